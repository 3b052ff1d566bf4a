"""Time nanhunt against the plain loop and against rivals: ``python -m tests.bench.run``. It prints, and never fails on a figure.

Every contender trains a model of its own, all in one process, block by block in turn; a ratio is that of a block to the plain block of
the same round, and what is shown is the median over the rounds with the middle half around it. One thread by default: with more, the
threads of a step wait for each other, and on a machine that does anything else they wait for that.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

if __package__ in {None, ""}:  # `python tests/bench/run.py`
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

from tests.bench import measure
from tests.bench.models import PLANTS, WORKLOADS, Workload
from tests.bench.rivals import CONTENDERS
from torchdebug_magics.format import byte_size, duration


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    torch.set_num_threads(options.threads)
    hush_transformers()
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        sys.exit("--device cuda: torch sees no CUDA device here")
    if options.peak_of:
        name, contender = options.peak_of.split(":")
        print(measure.peak_here(_named(name), contender, device))
        return
    chosen = [_named(name) for name in options.only] if options.only else list(WORKLOADS)
    machine = (
        f"torch {torch.__version__}, Python {platform.python_version()}, {device_name(device)}, threads {options.threads}, load {_load()}"
    )
    print(machine)
    result: dict[str, Any] = {"machine": machine, "workloads": {}}
    for workload in chosen:
        print(f"\n{workload.title}", flush=True)
        result["workloads"][workload.name] = _measured(workload, device, quick=options.quick, parts=options.part)
        if options.json:
            Path(options.json).write_text(json.dumps(result, indent=1), encoding="utf-8")
    print(f"\nload at the end {_load()}")


def _measured(workload: Workload, device: torch.device, *, quick: bool, parts: Sequence[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if "cost" in parts:
        costs = measure.costs(workload, device, max(3, workload.rounds // 4) if quick else workload.rounds)
        print_costs(costs, {"nanhunt": workload.asked})
        found["cost"] = [asdict(cost) for cost in costs]
    if "verdict" in parts:
        hunts = [measure.hunt(workload, device, plant, 1 if quick else 3) for plant in PLANTS]
        _print_hunts(hunts)
        found["verdict"] = [asdict(hunt) for hunt in hunts]
    if "memory" in parts:
        memory = measure.memory(workload, device)
        _print_memory(memory)
        found["memory"] = asdict(memory)
    if device.type == "cuda" and "syncs" in parts:
        counts = {contender.name: measure.synchronisations(workload, contender, device) for contender in CONTENDERS}
        _print_table(
            ("synchronisations", "a step", "asked", ""),
            [(name, f"{count:g}", *(("1", _word(count, 1)) if name == "nanhunt" else ("", ""))) for name, count in counts.items()],
        )
        found["syncs"] = counts
    return found


# --- tables --------------------------------------------------------------------------------------------------------------------------


def print_costs(
    costs: Iterable[measure.Cost],
    most: Mapping[str, float],
    settling_steps: int = measure.SETTLING_STEPS,
    *,
    by_cpu: bool = False,
) -> None:
    """A row a contender; `most` says for some of them what ratio is asked, of wall time or of CPU time."""
    rows = []
    for cost in costs:
        limit = most.get(cost.contender)
        asked = ("", "") if limit is None else (f"{limit:.2f}", _word((cost.cpu_ratio if by_cpu else cost.wall_ratio).median, limit))
        around = (duration(cost.entering_s.median), f"{cost.settling_s.median * 1e3:+.1f} ms")
        rows.append((cost.contender, duration(cost.step_s.median), *_spread(cost.wall_ratio), *_spread(cost.cpu_ratio), *asked, *around))
    settling = f"first {settling_steps} steps"
    _print_table(("ratio to plain", "step", "wall", "p25-p75", "CPU", "p25-p75", "asked", "", "enter+leave", settling), rows)


def _spread(ratio: measure.Spread) -> tuple[str, str]:
    return f"{ratio.median:.3f}", f"{ratio.low:.3f}-{ratio.high:.3f}"


def _print_hunts(hunts: Iterable[measure.Hunt]) -> None:
    rows = [
        (
            hunt.plant, duration(hunt.step_s), duration(hunt.verdict_s.median), f"{hunt.verdict_s.median / hunt.step_s:.1f}",
            duration(hunt.limit_s), _word(hunt.verdict_s.median, hunt.limit_s) if hunt.right else f"WRONG: {hunt.sentence}",
        )
        for hunt in hunts
    ]  # fmt: skip
    _print_table(("bad step to verdict", "plain step", "verdict", "in steps", "asked", ""), rows)


def _print_memory(memory: measure.Memory) -> None:
    rows = [("peak of a process", byte_size(memory.plain_peak_bytes), byte_size(memory.watched_peak_bytes), "")]
    rows += [
        (f"activations alive after a step ({kind})", str(plain), str(watched), "same" if watched <= plain else "MORE")
        for kind, (plain, watched) in memory.outliving.items()
    ]
    _print_table(("memory", "plain", "nanhunt", ""), rows)


def _print_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    wide = [max(len(row[place]) for row in (head, *rows)) for place in range(len(head))]
    for row in (head, *rows):
        print("  " + "  ".join(cell.ljust(wide[0]) if place == 0 else cell.rjust(wide[place]) for place, cell in enumerate(row)).rstrip())
    print(flush=True)


def _word(value: float, asked: float) -> str:
    return "within" if value <= asked else "above"


# --- small things --------------------------------------------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.run", description=(__doc__ or "").splitlines()[0])
    names = [workload.name for workload in WORKLOADS]
    parser.add_argument("--quick", action="store_true", help="a quarter of the rounds")
    parser.add_argument("--only", action="append", choices=names, metavar="NAME", help=f"one of {', '.join(names)}; may be given again")
    parts = ("cost", "verdict", "memory", "syncs")
    parser.add_argument("--part", nargs="+", choices=parts, default=parts, help="which tables")
    parser.add_argument("--json", metavar="PATH", help="write the figures there too")
    parser.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    parser.add_argument("--threads", type=int, default=1, help="torch's threads (default 1)")
    parser.add_argument("--peak-of", help=argparse.SUPPRESS)
    return parser


def _named(name: str) -> Workload:
    return next(workload for workload in WORKLOADS if workload.name == name)


def hush_transformers() -> None:
    """Its advice belongs to another page."""
    import transformers

    transformers.logging.set_verbosity_error()


def device_name(device: torch.device) -> str:
    """The GPU's, or how many cores the CPU has."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU ({os.cpu_count()} cores)"


def _load() -> str:
    return f"{os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else "unknown"


if __name__ == "__main__":
    main()
