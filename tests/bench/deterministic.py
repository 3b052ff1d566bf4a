"""Time `%%deterministic`: against torch's own flags set by hand, and `verify` against one run; ``python -m tests.bench.deterministic``.

It prints, and never fails.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if __package__ in {None, ""}:  # `python tests/bench/deterministic.py`
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

import torchdebug_magics
from tests.bench import measure
from tests.bench.models import WORKLOADS, train
from tests.bench.rivals import Contender, nothing, off
from tests.bench.run import hush_transformers, print_costs
from torchdebug_magics.machine.process import PeakRss, rss_bytes

if TYPE_CHECKING:
    from tests.bench.models import Training, Workload


@contextlib.contextmanager
def _by_hand(_training: Training) -> Iterator[None]:
    torch.manual_seed(42)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.deterministic, torch.backends.cudnn.allow_tf32 = True, False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.backends.cudnn.deterministic, torch.backends.cudnn.allow_tf32 = False, True


CONTENDERS = (
    Contender("plain", nothing, _by_hand),  # what the others are measured by
    Contender("deterministic", nothing, lambda _: torchdebug_magics.deterministic()),
    Contender("no flags", nothing, off),
)


def _verified(workload: Workload, steps: int, rounds: int) -> None:
    """One run under the flags beside `verify`, which makes two and compares every op; and the memory of it."""
    device = torch.device("cpu")
    training = workload.make(device)
    train(training, steps)
    ratios = []
    for _ in range(rounds):
        with _by_hand(training):
            begin_s = time.process_time()
            train(training, steps)
            plain_s = time.process_time() - begin_s
        held_bytes = rss_bytes()
        peak = PeakRss()
        peak.start()
        begin_s = time.process_time()
        report = torchdebug_magics.verify(lambda: train(training, steps))
        ratios.append((time.process_time() - begin_s) / plain_s)
        peak.stop()
    spread = measure.Spread.of(ratios)
    written = 3 * sum(one.nbytes for one in training.model.parameters())  # with both moments of Adam
    extra = peak.peak().size_bytes - held_bytes
    print(
        f"  verify             {spread.median:.2f}x CPU of one run ({spread.low:.2f}-{spread.high:.2f}; asked: 5), "
        f"{report.ops_count:,} ops in {steps} steps; {extra / 2**20:,.0f} MiB more at its peak "
        f"(parameters and optimizer state: {written / 2**20:,.0f} MiB)"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    quick = "--quick" in (sys.argv[1:] if arguments is None else arguments)
    torch.set_num_threads(1)
    hush_transformers()
    print(f"torch {torch.__version__}, CPU ({os.cpu_count()} cores), load {os.getloadavg()[0]:.1f}; plain: torch's flags, set by hand")
    names = {one for one in (sys.argv[1:] if arguments is None else arguments) if not one.startswith("-")}
    for workload in WORKLOADS:
        if names and workload.name not in names:
            continue
        print(f"\n{workload.title}", flush=True)
        rounds = max(3, workload.rounds // 4) if quick else workload.rounds
        print_costs(measure.costs(workload, torch.device("cpu"), rounds, CONTENDERS), {"deterministic": 1.01})
        _verified(workload, steps=2, rounds=3)


if __name__ == "__main__":
    main()
