"""A `DataLoader` that gives no batch: the loop over it does nothing, and raises nothing."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any, NamedTuple

from torch.utils.data.dataloader import _BaseDataLoaderIter, _DatasetKind

from torchdebug_magics.format import plural
from torchdebug_magics.instruments.autograd.report import AutogradFinding
from torchdebug_magics.instruments.autograd.source_readings import finding, statement_at
from torchdebug_magics.probing.safety import Guard
from torchdebug_magics.probing.source.edited_source import exchanging, made_as
from torchdebug_magics.probing.source.lines import Line
from torchdebug_magics.probing.source.syntax import called, enclosing, last_name, nodes, tree_of
from torchdebug_magics.report import Edit, Location


class EmptyLoader(NamedTuple):
    """What a loop over a loader has met at once: its end."""

    line: Line | None
    samples_count: int
    batch_size: int
    """0 where a sampler of the user's makes the batches."""
    drops_last: bool

    @property
    def is_too_few(self) -> bool:
        """Whether there are samples, and all are dropped."""
        return self.drops_last and 0 < self.samples_count < self.batch_size


class EmptyLoaders:
    """Sees each loader asked for its first batch, and keeps the first that has none."""

    def __init__(self, guard: Guard, line_here: Callable[[], Line | None]) -> None:
        self._guard = guard
        self._line_here = line_here
        self.first: EmptyLoader | None = None

    def around(self, original: Callable[[_BaseDataLoaderIter], Any], iterator: _BaseDataLoaderIter) -> Any:
        """A loader is asked for a batch."""
        __tracebackhide__ = True
        try:
            batch = original(iterator)
        except StopIteration:
            if self.first is None and iterator._num_yielded == 0 and iterator._dataset_kind == _DatasetKind.Map:
                self._guard.run("the look at an empty loader", self._meet, iterator)
            raise
        if self.first is not None and self.first.line is self._line_here():
            self.first = None  # another loader there has batches: that one has none may be meant
        return batch

    def _meet(self, iterator: Any) -> None:
        sampler = iterator._index_sampler
        size, drops_last = getattr(sampler, "batch_size", None) or 0, bool(getattr(sampler, "drop_last", False))
        self.first = EmptyLoader(self._line_here(), len(iterator._dataset), size, drops_last)


def empty_finding(empty: EmptyLoader) -> AutogradFinding:
    """A loader without a batch, at the line that makes it."""
    looped = None if empty.line is None else empty.line.location
    name = _name(looped)
    made = made_as(looped.file, name, "DataLoader") if looped is not None else []
    where = made[0][0] if made else looped
    is_too_few = empty.is_too_few
    held = plural(empty.samples_count, "sample")
    reason = f"{held} are less than one batch of {empty.batch_size}, and `drop_last=True` drops them" if is_too_few else f"it has {held}"
    return finding(
        "no_batches",
        f"`{name or 'the loader'}` gives no batch: {reason}",
        where,
        f"pass a `batch_size` of at most {empty.samples_count}, or `drop_last=False`"
        if is_too_few
        else "look at what selects the samples, the dataset or its sampler: the loop over it does nothing",
        edits=_without_drop(*made[0]) if is_too_few and made else (),
        tensor=name or None,
        saved_at=looped if where is not looped else None,
        explanation="a loop over an empty loader ends at once, and raises nothing",
        is_hint=not is_too_few,
    )


def _name(where: Location | None) -> str:
    """What the loop, or the call of ``next()``, at that line calls its loader."""
    around = (
        [] if where is None else [node for node in enclosing(tree_of(where.file), where.line) if isinstance(node, (ast.For, ast.AsyncFor))]
    )
    over = around[-1].iter if around else next((call for call in nodes(ast.Call, statement_at(where)) if called(call) == "next"), None)
    while isinstance(over, ast.Call) and over.args:  # as in `enumerate(loader)` and `next(iter(loader))`
        over = over.args[0]
    return last_name(over)


def _without_drop(where: Location, call: ast.Call) -> tuple[Edit, ...]:
    kept = [keyword for keyword in call.keywords if keyword.arg != "drop_last"]
    return exchanging(where, call, ast.Call(call.func, call.args, kept)) if len(kept) < len(call.keywords) else ()
