"""Which Python objects are plain: all that they are is in what they hold, and that can be written back without the user's code."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import torch

from torchdebug_magics.probing.attributes import CELL, HEAP_TYPE, INSTANCE, NAMES, attributes_of, members_of
from torchdebug_magics.probing.kinds import ABSENT, CONTAINERS, DICT, GONE, LEAVES, SET, Kind, hashes_by_itself
from torchdebug_magics.probing.states import STATES, of_numpy
from torchdebug_magics.probing.ways import ways_of
from torchdebug_magics.probing.where import owner

__all__ = ["is_leaf", "plain_ways_of"]

_PLAIN = frozenset({*CONTAINERS.values(), *STATES.values(), CELL, NAMES})


def is_leaf(value: Any) -> bool:
    """Whether nothing in it is to be looked at, and no tensor is in it."""
    kind: Any = type(value)
    if kind in LEAVES or value is GONE or value is ABSENT:
        return True
    if kind is tuple or kind is frozenset:
        return all(type(item) in LEAVES for item in value)
    if kind.__module__ == "numpy":
        return not (kind.__name__ == "ndarray" and value.dtype.hasobject)
    return issubclass(kind, type)


def plain_ways_of(value: object) -> list[Kind]:
    """All ways to look at an object; none for one that is not plain."""
    ways = ways_of(value)
    return ways if all(_is_plain(value, way) for way in ways) else []


def _is_plain(value: Any, way: Kind) -> bool:
    if way is INSTANCE:
        is_bare = way is not ways_of(value)[0] and not attributes_of(value) and not members_of(type(value))
        return is_bare or _has_plain_attributes(value)
    if way is DICT or way is SET:
        return all(map(hashes_by_itself, (dict if way is DICT else set).__iter__(value)))
    return way in _PLAIN or (type(value).__module__.startswith("numpy.random") and way is of_numpy(value))


def _has_plain_attributes(value: object) -> bool:
    """An object of the user's, or an installed one of nothing but plain values: any other may have a life that is not in its attributes."""
    kind = type(value)
    if kind is SimpleNamespace:
        return True
    if kind.__module__.partition(".")[0] == "torch" or issubclass(kind, (torch.Tensor, torch.nn.Module, torch.optim.Optimizer)):
        return False
    whose = _whose(kind)
    if whose == "library":
        held = attributes_of(value)
        return held is not None and all(map(is_leaf, held.values()))
    return whose == "user" and (attributes_of(value) is not None or bool(members_of(kind)))


def _whose(kind: type) -> str:
    name = kind.__module__
    if not isinstance(name, str) or not kind.__flags__ & HEAP_TYPE:
        return "python"
    if name.partition(".")[0] in sys.stdlib_module_names and name not in {"__main__", "builtins"}:
        return "python"
    file = getattr(sys.modules.get(name), "__dict__", {}).get("__file__") if name != "__main__" else None
    return owner(file) if isinstance(file, str) else "user"
