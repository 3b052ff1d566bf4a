"""Reference cycles that only Python's collector frees: what each held, where it is made, and how to do without it."""

from __future__ import annotations

import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from typing import TypeAlias

import torch

from torchdebug_magics.instruments.memtrace.held.keepers import KeepingLines
from torchdebug_magics.instruments.memtrace.ledger.blocks import Block, Ledger, Places, size_of
from torchdebug_magics.instruments.memtrace.trace import Cycle
from torchdebug_magics.memory.cycles import cycles_of, waiting_cycles
from torchdebug_magics.memory.found import find_holders
from torchdebug_magics.memory.paths import HolderPath
from torchdebug_magics.report import Location

_FEWEST = 3
_TO = " -> "
_LARGE_PART = 0.25
"""Of the peak: less than that may wait for the collector."""
_LEAST_BYTES = 16 << 10
_FIRST_LOOK_BYTES, _FAR_MORE = 4 << 20, 4
"""Of what was made in the cell: when it is this much, and again when it is so many times as much, a look is taken; it costs a second."""
_MORE = 1.5
"""The same, once cycles have been seen to wait."""
_OF_TORCH = frozenset(
    {"grad_fn", "grad", "__self__", "__func__", "run_function", "_base", "_forward_hooks", "_backward_hooks", "_forward_pre_hooks"}
)
_Ref: TypeAlias = "weakref.ref[torch.UntypedStorage]"
_References: TypeAlias = "list[tuple[str, str]]"
_REGISTERS: Mapping[str, tuple[str, ...]] = {
    "_forward_hooks": ("register_forward_hook",),
    "_forward_pre_hooks": ("register_forward_pre_hook",),
    "_backward_hooks": ("register_full_backward_hook", "register_backward_hook", "register_hook"),
}
"""By the table in which torch keeps them: how hooks are registered."""


class CycleWatch:
    """What waits for Python's collector: when memory is high, as a collection may come before the cell ends, and at the end."""

    def __init__(self, ledger: Ledger, places: Places) -> None:
        self._ledger = ledger
        self._places = places
        self._most: tuple[Cycle, ...] = ()

    def begins(self) -> None:
        """What is alive now was there before the cell."""
        self._ledger.rises_at_bytes = self._ledger.total.now_bytes + _FIRST_LOOK_BYTES

    def look(self) -> None:
        """While the cell runs: nothing is collected."""
        made = self._made()
        now_bytes = sum(block.bytes for block in made.values())
        rows: tuple[Cycle, ...] = ()
        if self._seem_lost(made):
            rows = self._rows(waiting_cycles, made)
        wanted_bytes = max(now_bytes, _FIRST_LOOK_BYTES) * (_MORE if _bytes(rows) >= _LARGE_PART * now_bytes else _FAR_MORE)
        self._ledger.rises_at_bytes = self._ledger.total.start_bytes + int(wanted_bytes)
        self._most = max(self._most, rows, key=_bytes)

    def end(self) -> tuple[Cycle, ...]:
        """Collect; a row a cycle, however often it was made, the most bytes first. Of those that went earlier, as they were seen."""
        made = self._made()
        if not made:
            return self._most  # a collection visits every object of PyTorch: a tenth of a second each
        return max(self._most, self._rows(cycles_of, made), key=_bytes)

    def _made(self) -> dict[int, Block]:
        self._ledger.settle()
        return {block.ref.key: block for block in self._ledger.live.values() if block.ref is not None and not block.is_old}

    def _seem_lost(self, made: Mapping[int, Block]) -> bool:
        """Whether no name leads to the first of many that are alike: it is asked before all objects of the process are."""
        alike: dict[tuple[object, int], list[int]] = defaultdict(list)
        for key, block in made.items():
            alike[block.place, block.bytes].append(key)
        firsts = [keys[0] for (_, size_bytes), keys in alike.items() if len(keys) >= _FEWEST and size_bytes * len(keys) >= _LEAST_BYTES]
        return bool(firsts) and len(find_holders(firsts).paths) < len(firsts)

    def _rows(self, find: Callable[[Iterable[_Ref]], Mapping[int, HolderPath]], made: Mapping[int, Block]) -> tuple[Cycle, ...]:
        """`find` tells the path of each storage that only a collection frees."""
        alike: dict[frozenset[str], list[tuple[HolderPath, Block]]] = defaultdict(list)
        for key, path in find([block.ref for block in made.values() if block.ref is not None]).items():
            general = HolderPath(path.label, ("[...]" if piece[1:-1].isdigit() else piece for piece in path.pieces))
            alike[frozenset(general.split(_TO))].append((general, made[key]))
        lines = KeepingLines(self._places.files)
        rows = [_cycle(members[0][0], [block for _, block in members], lines) for members in alike.values()]
        return tuple(sorted(rows, key=lambda row: -row.freed_bytes))


def _bytes(rows: Iterable[Cycle]) -> int:
    return sum(row.freed_bytes for row in rows)


def kept_by_cycles(found: Iterable[Cycle], peak_bytes: int) -> Cycle | None:
    """The one that is worth a word: it was made again and again, and held much of what there was."""
    return next((row for row in found if row.count >= _FEWEST and row.freed_bytes >= max(_LEAST_BYTES, _LARGE_PART * peak_bytes)), None)


def _cycle(path: HolderPath, blocks: list[Block], lines: KeepingLines) -> Cycle:
    alike = Counter((block.place, block.bytes) for block in blocks)
    largest, _ = max(alike, key=lambda kind: kind[1] * alike[kind])
    # (object, by what it refers to the next one): an attribute, ``<closure self>`` or a variable of a frame.
    references = [
        (holder.removeprefix(_TO), piece.strip(" .'"))
        for holder, piece in pairwise((_TO + path.label, *path.pieces))
        if holder.startswith(_TO) and not piece.startswith(_TO)
    ]
    attributes = [(holder, name) for holder, name in references if name.isidentifier() and name not in _OF_TORCH and ":" not in holder]
    return Cycle(
        path=str(path),
        freed_bytes=size_of(blocks),
        count=max(alike.values()),
        location=_location(path, references, attributes, lines) or (None if largest is None else largest.location),
        fix=_fix(path, references, attributes),
    )


def _location(path: HolderPath, references: _References, attributes: _References, lines: KeepingLines) -> Location | None:
    """The line that closes the circle: that sets an attribute of the user's, registers a hook, or keeps an error."""
    for holder, name in references:
        function, _, line = holder.partition(":")
        if line.isdigit():
            return lines.of(HolderPath(name, name=name, function=function), None)
    calls = ("checkpoint",) if "CheckpointFunction" in path else next((names for table, names in _REGISTERS.items() if table in path), ())
    called = lines.call_of(calls, [holder for holder, _ in references]) if calls else None
    return called or next(filter(None, (lines.best(f".{name}") for _, name in reversed(attributes))), None)


def _fix(path: HolderPath, references: _References, attributes: _References) -> str:  # noqa: PLR0911 - one for each kind of cycle
    if "CheckpointFunction" in path:
        return "call `checkpoint(..., use_reentrant=False)`: the reentrant kind keeps the function that it runs"
    for holder, name in attributes:
        if holder.endswith("Backward"):
            return f"save it with `ctx.save_for_backward(...)`, not as `ctx.{name}`: an attribute of `ctx` refers back to its own node"
    if path.through_hook:
        closing = [(holder, name) for holder, name in references if holder.endswith("()") and name.startswith("<")]
        if not closing:
            return "call `.remove()` on the handle that registering the hook returned, once the object is no longer needed"
        (function, name), *_ = closing
        weak = f"`this = weakref.ref({name.partition(' ')[2][:-1]})`, and call `this()` in `{function.removesuffix('()')}`"
        return f"close over a weak reference, {weak}; or call `.remove()` on the hook's handle"
    variable = next((name for holder, name in references if holder.rpartition(":")[2].isdigit()), "")
    if variable:
        return f"end the block with `del {variable}`: the error refers to the frame, and the frame to the error"
    if not attributes:
        return "make one of the references weak; or call `gc.collect()` in the loop"
    if ".__self__" in path.pieces:
        return f"store `weakref.WeakMethod(...)` in `{'.'.join(attributes[0])}`, not the method: a bound method refers back to its object"
    return f"make `{'.'.join(attributes[-1])}` a weak reference, `weakref.ref(...)`; or call `gc.collect()` in the loop"
