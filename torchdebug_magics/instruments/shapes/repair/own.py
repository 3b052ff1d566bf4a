"""A module of the user's own that holds but tables, such as positions, made anew with other numbers.

What it was made with is found by making it: numbers that give the very same tables are those that were given.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import time
from typing import TYPE_CHECKING, Any

import torch

from torchdebug_magics.instruments.shapes.repair.edit import Edit, as_typed
from torchdebug_magics.instruments.shapes.repair.rebuild import quietly
from torchdebug_magics.probing.where import is_user_code

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

__all__ = ["remade"]

_MOST = 64
"""How often a module is made to find its numbers."""
_LONGEST_S = 0.5
"""How long that may compute."""
_LARGEST = 1 << 22
"""Elements of all its tables."""


def remade(module: torch.nn.Module | None, path: str, got: int, wanted: int, *, rank: int) -> list[Edit]:
    """The edits that make it with another number, so that what is `got` large is as large as `wanted`; none where it is no such module."""
    numbers = _numbers(module) if module is not None and got else None
    if module is None or numbers is None:
        return []
    edits = []
    for name, value in numbers.items():
        new, rest = divmod(value * wanted, got) if type(value) is int else (0, 1)
        changed = {**numbers, name: new}
        if not rest and new not in {0, value} and quietly(functools.partial(type(module), **changed)) is not None:
            code = f"{as_typed(path)} = {_code(type(module), changed)}"
            make = _maker(type(module), changed)
            edits.append(Edit(code, f"{name} of {new} instead of {value}", rank + 2 * (value != got), modules={path: make}))
    return edits


def _numbers(module: torch.nn.Module) -> dict[str, Any] | None:
    """What its class was called with, by name."""
    tables = _tables(module)
    kind = type(module)
    if not tables or next(module.parameters(), None) is not None or not is_user_code(kind.__init__.__code__):
        return None
    if sum(one.numel() for one in tables.values()) > _LARGEST or any(one.is_meta for one in tables.values()):
        return None
    choices = _choices(module, tables)
    if choices is None:
        return None
    until = time.thread_time() + _LONGEST_S
    for values in itertools.islice(itertools.product(*choices.values()), _MOST):
        if time.thread_time() > until:
            return None
        numbers = dict(zip(choices, values, strict=True))
        new = quietly(functools.partial(kind, **numbers))
        if new is not None and _are_same(_tables(new), tables):
            return numbers
    return None


def _tables(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    held = {name: one for name, one in vars(module).items() if isinstance(one, torch.Tensor)}
    return {**held, **dict(module.named_buffers())}


def _are_same(new: Mapping[str, torch.Tensor], old: Mapping[str, torch.Tensor]) -> bool:
    if new.keys() != old.keys():
        return False
    pairs = ((new[name], old[name].detach().cpu()) for name in old)
    return all(one.dtype == other.dtype and torch.equal(one, other) for one, other in pairs)


def _choices(module: torch.nn.Module, tables: Mapping[str, torch.Tensor]) -> dict[str, list[Any]] | None:
    """The values that each argument may have had, the likeliest first; None where one may be anything."""
    found: dict[str, list[Any]] = {}
    sizes = list(dict.fromkeys(size for one in tables.values() for size in reversed(one.shape) if size > 1))  # the width first
    for name, one in list(inspect.signature(type(module).__init__).parameters.items())[1:]:
        if one.kind in {one.VAR_POSITIONAL, one.VAR_KEYWORD}:
            continue
        kept = vars(module).get(name)
        usual = [] if one.default is one.empty else [one.default]
        if type(kept) in {int, float, bool}:
            found[name] = [kept]
        elif not usual or type(usual[0]) is int:
            found[name] = list(dict.fromkeys([*usual, *sizes, *(2 * size for size in sizes)]))
        else:
            found[name] = usual
    return found if all(found.values()) else None


def _maker(kind: type[torch.nn.Module], numbers: Mapping[str, Any]) -> Callable[[torch.nn.Module], torch.nn.Module]:
    def made(old: torch.nn.Module) -> torch.nn.Module:
        new = kind(**numbers).train(old.training)
        place = next(iter(_tables(old).values())).device
        return new if place.type == "meta" else new.to(place)

    return made


def _code(kind: type[torch.nn.Module], numbers: Mapping[str, Any]) -> str:
    return f"{kind.__name__}({', '.join(_written(kind, numbers))})"


def _written(kind: type[torch.nn.Module], numbers: Mapping[str, Any]) -> Iterator[str]:
    for name, one in inspect.signature(kind.__init__).parameters.items():
        if name in numbers and one.default is one.empty and one.kind is not one.KEYWORD_ONLY:
            yield repr(numbers[name])
        elif name in numbers and numbers[name] != one.default:
            yield f"{name}={numbers[name]!r}"
