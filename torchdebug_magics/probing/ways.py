"""Which ways there are to look at an object: one for what it is, and one for the attributes that it has besides."""

from __future__ import annotations

import functools
import gc
import itertools
from types import (
    BuiltinFunctionType,
    BuiltinMethodType,
    CellType,
    CodeType,
    FrameType,
    FunctionType,
    MethodType,
    ModuleType,
    TracebackType,
)
from typing import Any

import torch

from torchdebug_magics.probing.attributes import CELL, CLASS, FUNCTION, INSTANCE, MODULE, NAMES, Names, attributes_of
from torchdebug_magics.probing.kinds import CONTAINERS, LEAVES, Kind
from torchdebug_magics.probing.states import STATES, TENSOR, of_numpy

__all__ = ["ways_of"]

_NOT_THE_USERS = frozenset({__name__.partition(".")[0], "IPython", "ipykernel", "ipywidgets", "traitlets", "zmq", "tornado", "logging"})
"""Packages whose objects run the notebook, or watch it: what they hold is not the step's, and goes on meanwhile."""
_OPAQUE = LEAVES | {CodeType, FrameType, TracebackType}


def ways_of(value: Any) -> list[Kind]:
    """None for what never changes, and for what is none of the user's; a value of no known kind has attributes."""
    kind = type(value)
    if kind is Names:
        return [NAMES]
    if _is_opaque(value):
        return []
    for base in kind.__mro__:
        way = _WAYS.get(base)
        if way is not None:
            return [way] if base is kind or way in _COMPLETE else [way, INSTANCE]
    known = of_numpy(value)
    return [INSTANCE] if known is None else [known] if attributes_of(value) is None else [known, INSTANCE]


def _is_opaque(value: object) -> bool:
    kind = type(value)
    return (
        kind in _OPAQUE or (kind is BuiltinFunctionType and not _bound(value)) or str(kind.__module__).partition(".")[0] in _NOT_THE_USERS
    )


def _bound(function: Any) -> bool:
    """``hook = kept.append`` is a built-in function with the list inside it."""
    owner = function.__self__
    return owner is not None and type(owner).__name__ != "module"


def _leading_to(*attributes: str) -> Kind:
    return Kind(lambda value: [getattr(value, name) for name in attributes])


def _cache(function: Any) -> list[Any]:
    """The results that a function keeps. Where only so many are kept, the dict alone is not the whole of it: then it is left alone."""
    if function.cache_parameters()["maxsize"] is not None:
        return []
    return [one for one in gc.get_referents(function) if type(one) is dict and one is not vars(function)]


_TAKING = Kind(gc.get_referents)
"""Iterators without a place of their own: they stand where those stand that they take from."""
_WAYS: dict[type, Kind] = {
    **CONTAINERS,
    **STATES,
    frozenset: Kind(list),
    type: CLASS,
    ModuleType: MODULE,
    CellType: CELL,
    FunctionType: FUNCTION,
    MethodType: _leading_to("__self__", "__func__"),
    BuiltinMethodType: _leading_to("__self__"),
    functools.partial: _leading_to("func", "args", "keywords"),
    staticmethod: _leading_to("__func__"),
    classmethod: _leading_to("__func__"),
    functools._lru_cache_wrapper: Kind(_cache, also=lambda function: [function.__wrapped__, vars(function)]),
    property: _leading_to("fget", "fset"),
    torch.Tensor: TENSOR,
    **dict.fromkeys((zip, map, filter, enumerate, *(one for one in vars(itertools).values() if isinstance(one, type))), _TAKING),
}
_COMPLETE = frozenset({CLASS, MODULE})
"""They look at all attributes, of a subclass too."""
