"""What is told of an op that differs, and where."""

from __future__ import annotations

import copy
import random
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.data import DataLoader
from torch.utils.data._utils import worker

from torchdebug_magics.instruments.deterministic.ops.op_recorder import Recorder
from torchdebug_magics.instruments.deterministic.ops.op_recording import Empty, Op, Recording, Seen, repair
from torchdebug_magics.instruments.deterministic.origin import Origin, first_difference
from torchdebug_magics.instruments.deterministic.report import Cause, On
from torchdebug_magics.instruments.deterministic.twice.body import Enough
from torchdebug_magics.instruments.deterministic.twice.run_comparison import Difference
from torchdebug_magics.instruments.deterministic.twice.runs import Runs
from torchdebug_magics.probing.source.code_owner import is_user_code
from torchdebug_magics.probing.where import location
from torchdebug_magics.report import Location

_NOTHING_MORE = frozenset({"unknown", "worker_seed", "control_flow", "state_leak", "outside_data"})


@dataclass(frozen=True, kw_only=True)
class Told:
    """What is said of an op."""

    cause: Cause
    explanation: str
    fix: str = ""
    op: str = ""
    """Where another one is to blame."""
    location: Location | None = None
    other: Location | None = None
    on: On | None = None
    further: tuple[Origin, ...] = ()


def raised_at(error: BaseException) -> Location | None:
    """The innermost line of the user's on its way."""
    found = [(frame.f_code, line) for frame, line in traceback.walk_tb(error.__traceback__) if is_user_code(frame.f_code)]
    return location(found[-1][0].co_filename, found[-1][1], found[-1][0].co_name) if found else None


def drawn_from(op: Op) -> torch.Generator:
    """The generator that an op takes its numbers from."""
    return next((one for one in (*op.args, *op.kwargs.values()) if isinstance(one, torch.Generator)), torch.default_generator)


def name_of(generator: Any, names: dict[str, Any]) -> str:
    """In an op it is wrapped anew: it is known by what is behind it."""
    held: list[tuple[str, Any]] = [(name, value) for name, value in names.items() if isinstance(value, torch.Generator)]
    return next((name for name, value in held if value._cdata == generator._cdata), "")


def of_empty(op: Op, empty: Empty, difference: Difference) -> Told:
    """It reads memory that another op has made."""
    made = None if empty.line is None else empty.line.location
    maker = "torch.empty" if empty.plan.base == "empty" else f"{empty.plan.base}"
    zeros = {
        "empty": "use `torch.zeros` instead of `torch.empty`, or ",
        "empty_like": "use `torch.zeros_like` instead of `torch.empty_like`, or ",
    }
    return Told(
        cause="uninitialized_memory",
        explanation=f"`{op.plan.name}` reads uninitialized memory from `{maker}`{f' ({made})' if made else ''}",
        fix=f"{zeros.get(empty.plan.base, '')}write every element before reading",
        op=empty.plan.name,
        location=made,
        other=location_of(difference),
    )


def of_kernel(op: Op) -> Told:
    """Its inputs agree."""
    if op.plan.is_view or op.plan.moves or op.plan.is_pointwise:
        said = f"`{op.plan.name}` gave different numbers on equal inputs, which it cannot do by itself: something else wrote to its memory"
        return Told(cause="unknown", explanation=said)
    fix = repair(op.plan.base)
    known = "as PyTorch's documentation says it may" if fix else "and no workaround is known"
    return Told(cause="nondeterministic_op", explanation=f"`{op.plan.name}` gave different numbers on equal inputs, {known}", fix=fix)


def location_of(difference: Difference) -> Location | None:
    """The user's line that it was seen at."""
    return None if difference.line is None else difference.line.location


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


def workers_here(stack: ExitStack) -> None:
    """From here until the stack closes. Each loop begins as a worker does: seeded, with `get_worker_info`, after `worker_init_fn`."""
    kind: Any = DataLoader
    ordinary = kind._get_iterator

    def get_iterator(loader: Any) -> Any:
        return _batches(loader, ordinary) if loader.num_workers else ordinary(loader)

    stack.callback(setattr, kind, "_get_iterator", ordinary)
    stack.callback(setattr, worker, "_worker_info", worker._worker_info)
    kind._get_iterator = get_iterator


def _batches(loader: Any, ordinary: Any) -> Iterator[Any]:
    alone = copy.copy(loader)
    alone.multiprocessing_context = None
    alone.num_workers, alone.timeout = 0, 0
    batches = ordinary(alone)
    seed = int(batches._base_seed)
    random.seed(seed)
    torch.manual_seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)
    worker._worker_info = worker.WorkerInfo(id=0, num_workers=loader.num_workers, seed=seed, dataset=loader.dataset)
    if loader.worker_init_fn is not None:
        loader.worker_init_fn(0)
    yield from batches
