"""Time `%%memtrace` and `%%memgauge` as nanhunt is timed: ``python -m tests.bench.memory``. It prints, and never fails on a figure."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __package__ in {None, ""}:  # `python tests/bench/memory.py`
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

import torchdebug_magics
from tests.bench import measure
from tests.bench.models import WORKLOADS
from tests.bench.rivals import Contender, nothing, off
from tests.bench.run import device_name, hush_transformers, print_costs
from torchdebug_magics.format import duration

if TYPE_CHECKING:
    from tests.bench.models import Training

ASKED = {
    "gpt2": {"memtrace": 1.10, "memtrace --light": 1.02, "memgauge": 1.01},
    "cnn": {"memtrace": 1.10, "memtrace --light": 1.02, "memgauge": 1.01},
    "mlp": {"memtrace": 2.0, "memtrace --light": 1.02, "memgauge": 1.01},
}


@contextlib.contextmanager
def _mem_tracker(training: Training) -> Iterator[None]:
    """torch.distributed's own; it refuses a second iteration unless it is told of each."""
    from torch.distributed._tools.mem_tracker import MemTracker

    tracker = MemTracker()
    tracker.track_external(training.model, training.optimizer)
    handle = training.optimizer.register_step_post_hook(lambda *_: tracker.reset_mod_stats())
    try:
        with tracker:
            yield
    finally:
        handle.remove()


def _profiler(_training: Training) -> Any:
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    return torch.profiler.profile(activities=activities, profile_memory=True, with_stack=True)


CONTENDERS = (
    Contender("plain", nothing, off),
    Contender("memtrace", nothing, lambda _: torchdebug_magics.memtrace()),
    Contender("memtrace --every-step", nothing, lambda _: torchdebug_magics.memtrace(every_step=True)),
    Contender("memtrace --light", nothing, lambda _: torchdebug_magics.memtrace(light=True)),
    Contender("memgauge", nothing, lambda _: torchdebug_magics.memgauge()),
    Contender("MemTracker", nothing, _mem_tracker),
    Contender("torch.profiler, memory and stacks", nothing, _profiler),
)


def main(arguments: Sequence[str] | None = None) -> None:
    given = sys.argv[1:] if arguments is None else arguments
    quick, device = "--quick" in given, torch.device("cuda" if "--cuda" in given else "cpu")
    torch.set_num_threads(1)
    hush_transformers()
    print(f"torch {torch.__version__}, {device_name(device)}, load {os.getloadavg()[0]:.1f}")
    for workload in WORKLOADS:
        print(f"\n{workload.title}", flush=True)
        rounds = max(3, workload.rounds // 4) if quick else workload.rounds
        print_costs(measure.costs(workload, device, rounds, CONTENDERS), ASKED[workload.name])
    _many_ops()


def _many_ops() -> None:
    """What a cell of 50 000 operations costs at its end."""
    small = torch.zeros(8)
    session = torchdebug_magics.memtrace()
    with contextlib.ExitStack() as stack:
        stack.enter_context(session)
        for _ in range(50_000):
            small = small + 1
        ended = time.perf_counter()
    print(f"\nreport on 50,000 operations: {duration(time.perf_counter() - ended)} (asked: below 1 s)")


if __name__ == "__main__":
    main()
