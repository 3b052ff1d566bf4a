"""The line of Python on the way to an op at which runs begin to differ."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from torchdebug_magics.instruments.deterministic.ops.op_recorder import Recorder
from torchdebug_magics.instruments.deterministic.ops.op_recording import Recording
from torchdebug_magics.instruments.deterministic.origin import first_difference
from torchdebug_magics.instruments.deterministic.twice.cause.workers_here import workers_here
from torchdebug_magics.instruments.deterministic.twice.ending import Enough

if TYPE_CHECKING:
    from torchdebug_magics.instruments.deterministic.ops.op_recording import Seen
    from torchdebug_magics.instruments.deterministic.ops.seen_op import Op
    from torchdebug_magics.instruments.deterministic.origin import Origin
    from torchdebug_magics.instruments.deterministic.twice.runs import Runs

__all__ = ["origin_before", "origin_in_workers"]

_NOTHING_MORE = frozenset({"unknown", "worker_seed", "control_flow", "state_leak", "outside_data"})


def origin_in_workers(runs: Runs) -> Origin | None:
    """The line of a dataset, or of what it calls, at which two runs begin to differ when the workers of DataLoaders run here."""
    with runs.otherwise(workers_here):
        found = origin_before(sys.maxsize, runs)
    if found is None or found.cause in _NOTHING_MORE:
        return None
    asked = f"`{found.sources[0]}()`" if found.sources else "it"
    if found.cause in {"wall_clock", "os_entropy"}:
        return replace(
            found, fix=f"in a worker, replace {asked} with `torch.initial_seed() % 2**32`: the DataLoader seeds torch in each worker"
        )
    if found.location.function == "__getitem__":
        return replace(found, cause="worker_seed")
    return replace(
        found,
        cause="worker_seed",
        fix=f"replace {asked} with a draw from torch (`torch.rand`, `torch.randint`): the DataLoader seeds torch in each worker",
    )


def origin_before(place: int, runs: Runs, drawn: object = None, *, is_way: bool = False, most_runs: int = 24) -> Origin | None:
    """Run as far as the op at `place`, several times; `drawn` is the generator that it draws from. See `first_difference`."""

    def recorder() -> Recorder:
        return Recorder(Recording(), _until(place), runs.guard, runs.hooks)

    watch = recorder()

    def run() -> None:
        nonlocal watch
        watch = recorder()
        runs.through(watch)

    try:
        return first_difference(run, lambda: runs.back(watch), guard=runs.guard, drawn=drawn, is_way=is_way, most_runs=most_runs)
    finally:
        runs.back(watch)


def _until(place: int) -> Callable[[Seen, Op], None]:
    """Ends a run at an op, once: what runs on the way out is let through."""
    is_over = False

    def seen(_seen: Seen, op: Op) -> None:
        nonlocal is_over
        if op.place >= place and not is_over:
            is_over = True
            raise Enough

    return seen
