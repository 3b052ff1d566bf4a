"""Sets that are given an order: of strings it is another one in each process, of objects in each run. One more run says where."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import torch

from torchdebug_magics.instruments.deterministic.counterfactual.ordering_places import OrderingPlace, ordering_places
from torchdebug_magics.instruments.deterministic.ops.recorder import Recorder
from torchdebug_magics.instruments.deterministic.ops.recording import Recording
from torchdebug_magics.instruments.deterministic.report import Dependence
from torchdebug_magics.instruments.deterministic.ritual.late import began_with
from torchdebug_magics.probing.where import location

if TYPE_CHECKING:
    from types import FrameType

    from torchdebug_magics.instruments.deterministic.twice.runs import Runs
    from torchdebug_magics.probing.contents import Contents
    from torchdebug_magics.report import Location

__all__ = ["Ordering", "dependence_of", "on_order", "orderings"]

_HOLDING = (list, tuple, dict, set, frozenset)
_MOST_ITEMS = 1000

Kind: TypeAlias = Literal["salted", "address"]


class Ordering(NamedTuple):
    """Such a place that a run has come to."""

    kind: Kind
    text: str
    location: Location
    is_hash: bool


def on_order(found: Iterable[Ordering]) -> tuple[Dependence, ...]:
    """Of objects; of strings, where Python draws their hashes anew in each process."""
    is_salted = sys.flags.hash_randomization and not (began_with("PYTHONHASHSEED") or "random").isdigit()
    return tuple(dependence_of(one) for one in found if is_salted or one.kind == "address")


def dependence_of(found: Ordering) -> Dependence:
    """In words."""
    if found.is_hash:
        what, fix = "`hash()` of a string is another number in each process", "`zlib.crc32(text.encode())` in its place"
    elif found.kind == "salted":
        what, fix = f"the order of the set `{found.text}` of strings is another one in each process", f"`sorted({found.text})`"
    else:
        what = f"the set `{found.text}` is ordered by the addresses of its objects, which differ in each run"
        fix = f"keep a list, or `dict.fromkeys(...)`, in place of the set `{found.text}`"
    return Dependence(on="order", op="", location=found.location, what=what, fix=fix)


def orderings(runs: Runs) -> tuple[Ordering, ...]:
    """Each place once, in the order in which the run comes to them; no run where the source has none."""
    asked = ordering_places(runs.body)
    if not asked or sys.gettrace() is not None:
        return ()
    watch = _Lines(runs, asked)
    runs.again(watch)
    return tuple(watch.found.values())


class _Lines:
    """Looks at values before and after the lines in question."""

    def __init__(self, runs: Runs, asked: dict[str, dict[int, list[OrderingPlace]]]) -> None:
        self.found: dict[tuple[str, int, str], Ordering] = {}
        self._asked = asked
        self._recorder = Recorder(Recording(), lambda _seen, _op: None, runs.guard, runs.hooks)
        self._after: dict[FrameType, tuple[int, list[OrderingPlace]]] = {}

    @property
    def contents(self) -> Contents:
        """What the run has written."""
        return self._recorder.contents

    def attach(self, stack: ExitStack) -> None:
        """From here until the stack closes."""
        self._recorder.attach(stack)
        stack.callback(self._after.clear)
        stack.callback(sys.settrace, None)
        sys.settrace(self._entered)

    def _entered(self, frame: FrameType, _event: str, _arg: object) -> Any:
        return self._line if frame.f_code.co_filename in self._asked else None

    def _line(self, frame: FrameType, event: str, _arg: object) -> Any:
        if event not in {"line", "return"}:
            return self._line
        if (before := self._after.pop(frame, None)) is not None:
            self._look(frame, *before)
        here = self._asked[frame.f_code.co_filename].get(frame.f_lineno or 0)
        if event == "line" and here:
            self._look(frame, frame.f_lineno, here)
            self._after[frame] = frame.f_lineno, here
        return self._line

    def _look(self, frame: FrameType, line: int, asked: list[OrderingPlace]) -> None:
        for one in asked:
            key = frame.f_code.co_filename, line, one.text
            held = _held(frame, one.path)
            kind = _kind_of(held) if one.is_set or isinstance(held, (set, frozenset)) else None
            if one.is_text:
                kind = "salted"
            elif kind is None and one.is_set:
                kind = _kind_of(made) if (made := _held(frame, one.target)) is None or one.is_loop or type(made) in _HOLDING else None
            if kind is not None and key not in self.found and not (one.is_hash and kind != "salted"):
                self.found[key] = Ordering(kind, one.text, location(key[0], line, frame.f_code.co_name), one.is_hash)


def _held(frame: FrameType, path: str) -> Any:
    """What a dotted name holds; no code of the user's runs for it."""
    root, *parts = path.split(".")
    value = frame.f_locals.get(root, frame.f_globals.get(root))
    for part in parts:
        value = getattr(value, "__dict__", {}).get(part)
    return value


def _kind_of(value: Any) -> Kind | None:
    if isinstance(value, (str, bytes)):
        return "salted"
    if isinstance(value, dict):
        return _kind_of(list(value)[:_MOST_ITEMS]) or _kind_of(list(value.values())[:_MOST_ITEMS])
    if type(value) not in _HOLDING:
        return "address" if isinstance(value, (torch.Tensor, torch.nn.Module)) else None
    items = list(value)[:_MOST_ITEMS]
    if any(isinstance(item, (torch.Tensor, torch.nn.Module)) for item in items):
        return "address" if len(items) > 1 else None
    flat = [part for item in items for part in (item if isinstance(item, tuple) else (item,))]
    return "salted" if len({part for part in flat if isinstance(part, (str, bytes))}) > 1 else None
