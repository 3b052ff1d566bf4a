"""Which Python objects are plain: all that they are is in what they hold."""

from __future__ import annotations

import io
import random
import sys
from types import SimpleNamespace

import torch

from torchdebug_magics.probing.kinds import (
    ATTRIBUTES,
    CONTAINERS,
    GONE,
    HEAP_TYPE,
    LEAVES,
    POSITION,
    RANDOM,
    Kind,
    attributes_of,
    members_of,
)
from torchdebug_magics.probing.where import owner

__all__ = ["is_leaf", "kinds_of"]

_OPEN = frozenset({"queue", "types"})
"""Modules of Python's own whose objects are as plain as the user's."""
_FILES = frozenset({io.StringIO, io.BytesIO, io.TextIOWrapper, io.BufferedReader, io.BufferedRandom})


def is_leaf(value: object) -> bool:
    """Whether nothing in it can change, and no tensor is in it."""
    kind = type(value)
    if kind in LEAVES or value is GONE:
        return True
    if kind is tuple or kind is frozenset:
        return all(type(item) in LEAVES for item in value)  # type: ignore[attr-defined]
    if kind.__module__ == "numpy":
        return not (kind.__name__ == "ndarray" and value.dtype.hasobject)  # type: ignore[attr-defined]
    return issubclass(kind, type)


def kinds_of(value: object) -> list[Kind]:
    """The ways to look at an object; none for one that is no plain Python object."""
    kind = type(value)
    if kind in _FILES:
        return [POSITION]
    if kind is random.Random or kind is torch.Generator or _is_numpys_generator(kind):
        return [RANDOM]
    found = [way for base, way in CONTAINERS if issubclass(kind, base)][:1]
    if kind.__module__ != "builtins" or kind.__flags__ & HEAP_TYPE:
        found += [ATTRIBUTES] if _has_plain_attributes(value) else []
    return found


def _has_plain_attributes(value: object) -> bool:
    """An object of the user's, or an installed one of nothing but plain values: any other may have a life that is not in its attributes."""
    kind = type(value)
    if kind is SimpleNamespace or kind.__module__ in _OPEN:
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


def _is_numpys_generator(kind: type) -> bool:
    return kind.__module__.startswith("numpy.random") and kind.__name__ == "Generator"
