"""Time many ranks: ``python -m tests.bench.ranks``. It prints, and never fails on a figure.

Merging thousands of simulated ranks, `gather` over real gloo ranks, and what a rank costs that is launched under an instrument.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __package__ in {None, ""}:  # `python tests/bench/ranks.py`
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import distributed, multiprocessing

import torchdebug_magics
from torchdebug_magics import catalog
from torchdebug_magics.format import byte_size
from torchdebug_magics.html import plain
from torchdebug_magics.ranks.compared import packed, unpacked
from torchdebug_magics.ranks.merging import held_details, merged
from torchdebug_magics.ranks.rank_traces import record_of

if TYPE_CHECKING:
    from torchdebug_magics.ranks.compared import RankRecord
    from torchdebug_magics.report import Report

_INSTRUMENTS = ("nanhunt", "memtrace", "gradwatch")
_ROUNDS = 5


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.ranks", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--merge", help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=_ROUNDS)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    if asked.merge:
        _merge(*asked.merge.split(":"))
    else:
        for instrument in _INSTRUMENTS:
            for number in (4096, 10_000):
                print(_alone(__file__, "--merge", f"{instrument}:{number}"), end="", flush=True)
        for number in (2, 4, 8):
            _gather(number)
        _start(asked.rounds)


def _alone(*command: str, **environment: str) -> str:
    """In a process of its own, as memory is measured."""
    environment = {**os.environ, **environment}
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, check=True, timeout=600, env=environment).stdout


# Merging ------------------------------------------------------------------------------------------------------------------


def _merge(instrument: str, number: str) -> None:
    watched = _watched(instrument)
    own = record_of(catalog.instrument(instrument).compared(watched), 0, watched, None, 1.0)
    numbers = random.Random(0)
    arrived = [packed(_like(own, rank, numbers)) for rank in range(1, int(number))]
    before = _peak_bytes()
    began = time.perf_counter()
    records = [own, *unpacked(arrived)]
    report = merged(instrument, records, held_details(records))
    merged_s = time.perf_counter() - began
    text = plain.render(catalog.instrument(instrument).page(report))
    shown_s = time.perf_counter() - began - merged_s
    print(
        f"{instrument:10} {int(number):6} ranks: merged in {merged_s:.2f} s, {byte_size(_peak_bytes() - before)} more"
        f" (asked of 4,096: 2 s, 200 MB), {len(arrived[-1])} bytes a rank on the wire; drawn in {shown_s:.2f} s, {len(text)} characters"
    )


def _watched(instrument: str) -> Report:
    model = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(20)))
    with catalog.instrument(instrument).session() as session:
        _train(model, 300)
    report: Report = session.report
    return report


def _train(model: torch.nn.Module, steps_count: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(steps_count):
        optimizer.zero_grad()
        model(torch.rand(8, 32)).pow(2).mean().backward()
        optimizer.step()


def _like(record: RankRecord, rank: int, numbers: random.Random) -> RankRecord:
    """Another rank's: the same, with a few numbers of its own."""
    own = replace(record.rank, rank=rank, host=f"node{rank // 8}", pid=1000 + rank, device=f"cuda:{rank % 8}", elapsed_s=numbers.random())
    return replace(record, rank=own)


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


# Gathering ----------------------------------------------------------------------------------------------------------------


def _gather(number: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(_gathering, (number, folder), nprocs=number)  # type: ignore[attr-defined]
        first, *others = json.loads(Path(folder, "times").read_text(encoding="utf-8"))
    later = statistics.median(others)
    a_rank = f"{first / number * 1e3:.1f} and {later / number * 1e3:.1f} ms a rank (asked: 50)"
    print(f"gather over {number} gloo ranks: the first {first * 1e3:.0f} ms, then {later * 1e3:.0f} ms; {a_rank}", flush=True)


def _gathering(rank: int, number: int, folder: str) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", rank=rank, world_size=number, init_method=f"file://{folder}/store")
    report = _watched("nanhunt")
    times = []
    for _ in range(10):
        distributed.barrier()
        began = time.perf_counter()
        torchdebug_magics.gather(report)
        times.append(time.perf_counter() - began)
    if rank == 0:
        Path(folder, "times").write_text(json.dumps(times), encoding="utf-8")
    distributed.barrier()
    distributed.destroy_process_group()


# Starting a rank ----------------------------------------------------------------------------------------------------------


def _start(rounds: int) -> None:
    kinds = ("plain", *_INSTRUMENTS)
    taken: dict[str, list[Any]] = {kind: [] for kind in kinds}
    script = str(Path(__file__).with_name("started_rank.py"))
    with tempfile.TemporaryDirectory() as folder:  # compiled once, as an installed package is
        compiled = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": folder}
        for kind in kinds:
            _alone(script, kind, **compiled)
        for number in range(rounds):
            for kind in kinds[number % len(kinds) :] + kinds[: number % len(kinds)]:
                taken[kind].append(json.loads(_alone(script, kind, **compiled)))
    usual = {kind: {name: statistics.median(one[name] for one in runs) for name in runs[0]} for kind, runs in taken.items()}
    for kind, one in usual.items():
        wall, cpu, rss = (
            f"{one[name] - usual['plain'][name]:+{form}}" for name, form in (("wall_s", ".2f"), ("cpu_s", ".2f"), ("mb", ".0f"))
        )
        used = f"{one['wall_s']:.2f} s, {one['cpu_s']:.2f} s of a processor, {one['mb']:.0f} MB"
        print(f"a rank started by spawn, {kind:10} {used}; more than plain: {wall} s, {cpu} s, {rss} MB (asked: 0.3 s, 20 MB)")


if __name__ == "__main__":
    main()
