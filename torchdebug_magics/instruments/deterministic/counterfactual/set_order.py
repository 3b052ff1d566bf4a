"""Sets that are given an order: of strings it is another one in each process, of objects in each run. The second run says where."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import torch

from torchdebug_magics.instruments.deterministic.counterfactual.ordering_places import OrderingPlace, ordering_places
from torchdebug_magics.instruments.deterministic.report import Dependence
from torchdebug_magics.instruments.deterministic.ritual.late import began_with
from torchdebug_magics.probing.where import location

if TYPE_CHECKING:
    from types import CodeType, FrameType

    from torchdebug_magics.instruments.deterministic.twice.body import Body
    from torchdebug_magics.report import Location

__all__ = ["OrderWatch", "Ordering", "dependence_of", "on_order"]

_HOLDING = (list, tuple, dict, set, frozenset)
_MOST_ITEMS = 1000

Kind: TypeAlias = Literal["salted", "address"]


class Ordering(NamedTuple):
    """Such a place that a run has come to."""

    kind: Kind
    text: str
    location: Location
    place: OrderingPlace


def on_order(found: Iterable[Ordering]) -> tuple[Dependence, ...]:
    """Of objects; of strings, where Python draws their hashes anew in each process."""
    is_salted = sys.flags.hash_randomization and not (began_with("PYTHONHASHSEED") or "random").isdigit()
    return tuple(dependence_of(one) for one in found if is_salted or one.kind == "address")


def dependence_of(found: Ordering) -> Dependence:
    """In words."""
    if found.place.is_hash:
        what, fix = "`hash()` of a string differs in each process", "use `zlib.crc32(text.encode())` instead"
    elif found.kind == "salted":
        what, fix = f"the iteration order of `{found.text}`, a set of strings, differs in each process", f"use `sorted({found.text})`"
        if found.place.is_pop:
            fix = f"replace `{found.text}.pop()` with `min({found.text})`, and remove that element"
    else:
        what = f"the iteration order of the set `{found.text}` depends on object addresses, which differ in each run"
        fix = f"replace the set `{found.text}` with a list or `dict.fromkeys(...)`"
    return Dependence(on="order", op="", location=found.location, what=what, fix=fix)


class OrderWatch:
    """Looks at values before and after the lines of the user's that give an order to what may be a set, while a run goes on."""

    def __init__(self, body: Body) -> None:
        self._found: dict[tuple[str, int, str], Ordering] = {}
        self._asked = ordering_places(body)
        self._has_places: dict[CodeType, bool] = {}
        self._after: dict[FrameType, tuple[int, list[OrderingPlace]]] = {}

    @property
    def found(self) -> tuple[Ordering, ...]:
        """Each place once, in the order in which the run came to them."""
        return tuple(self._found.values())

    def attach(self, stack: ExitStack) -> None:
        """From here until the stack closes; not where the source has no such place, or a debugger follows the code."""
        if self._asked and sys.gettrace() is None:
            stack.callback(self._after.clear)
            stack.callback(sys.settrace, None)
            sys.settrace(self._entered)

    def _entered(self, frame: FrameType, _event: str, _arg: object) -> Any:
        code = frame.f_code
        asked = self._asked.get(code.co_filename)
        if asked is None:
            return None
        known = self._has_places.get(code)
        if known is None:  # the lines of all other functions cost nothing
            known = self._has_places[code] = any(line in asked for _, _, line in code.co_lines())
        return self._line if known else None

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
            if kind is not None and key not in self._found and not (one.is_hash and kind != "salted"):
                self._found[key] = Ordering(kind, one.text, location(key[0], line, frame.f_code.co_name), one)


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
