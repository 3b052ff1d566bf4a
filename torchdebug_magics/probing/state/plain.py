"""Which objects are plain: all that they are stands in their attributes and items, and nothing else has a life in them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from torchdebug_magics.probing.state.attributes import CELL, INSTANCE, NAMES, attributes_of, members_of, whose
from torchdebug_magics.probing.state.kinds import ABSENT, CONTAINERS, GONE, LEAVES, Kind
from torchdebug_magics.probing.state.states import STATES, of_numpy, ways_of

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
    """All ways to look at an object; none for a leaf, or where it is not plain."""
    ways = [] if is_leaf(value) else ways_of(value)
    return ways if all(way in _PLAIN or _is_plain(value, way, is_more=len(ways) > 1) for way in ways) else []


def _is_plain(value: Any, way: Kind, *, is_more: bool) -> bool:
    if way is INSTANCE:
        return (is_more and not attributes_of(value) and not members_of(type(value))) or _has_plain_attributes(value)
    return type(value).__module__.startswith("numpy.random") and way is of_numpy(value)


def _has_plain_attributes(value: object) -> bool:
    """An object of the user's, or an installed one of nothing but plain values: any other may have a life that is not in its attributes."""
    kind = type(value)
    if whose(kind) == "library":
        attributes = attributes_of(value)
        return attributes is not None and all(map(is_leaf, attributes.values()))
    return kind is SimpleNamespace or (whose(kind) == "user" and not issubclass(kind, (torch.nn.Module, torch.optim.Optimizer)))
