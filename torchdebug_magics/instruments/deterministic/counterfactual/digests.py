"""A number for a value that is the same in two runs of one process, whenever the value is."""

from __future__ import annotations

import datetime as dt
import decimal
import fractions
import random
import uuid
import zlib
from collections import deque
from collections.abc import Iterable, Mapping
from itertools import islice
from pathlib import PurePath
from types import FunctionType
from typing import Any

import torch

from torchdebug_magics.probing.source.user_code import is_user_code
from torchdebug_magics.probing.state.attributes import attributes_of
from torchdebug_magics.probing.state.digest import of_plain, of_tensor

_DEEPEST = 4
_MOST_ITEMS = 1024
_MOST_BYTES = 1 << 20
_BY_REPR = (dt.date, dt.time, dt.timedelta, decimal.Decimal, fractions.Fraction, uuid.UUID, PurePath, torch.dtype, torch.device, range)
_PLAIN = frozenset({int, float, complex, bool, str, type(None)})


def digest_of(value: Any, level: int = 0) -> int:
    """By value; objects of the user's by their attributes, a layer or an optimizer by its settings, anything else by its type."""
    kind = type(value)
    if kind in _PLAIN:
        return of_plain(value)
    if isinstance(value, torch.Tensor):
        return of_tensor(value)
    if hasattr(value, "tobytes") and hasattr(value, "dtype") and not value.dtype.hasobject:
        step = max(1, value.nbytes // _MOST_BYTES)
        return hash((str(value.dtype), value.shape, zlib.crc32(value.ravel()[::step].tobytes())))
    if level >= _DEEPEST or isinstance(value, type):
        return hash(kind.__qualname__)
    return hash((kind.__qualname__, *_parts(value, level + 1)))


def _parts(value: Any, level: int) -> Iterable[int]:
    """Digests of what is in it. A set has no order."""
    if isinstance(value, (bytes, bytearray, *_BY_REPR)):
        return (hash(repr(value)),)
    if isinstance(value, (set, frozenset)):
        return (len(value), *sorted(digest_of(one, level) for one in islice(value, _MOST_ITEMS)))
    if isinstance(value, (dict, Mapping)):
        pairs = islice(dict.items(value) if isinstance(value, dict) else value.items(), _MOST_ITEMS)
        return (len(value), *(digest_of(one, level) for pair in pairs for one in pair))
    if isinstance(value, (list, tuple, deque)):
        return (len(value), *(digest_of(one, level) for one in (*islice(value, _MOST_ITEMS), *list(value)[-_MOST_ITEMS:])))
    state = _state_of(value)
    return _attributes(value, level) if state is None else (hash(state),)


def _state_of(value: Any) -> object:
    """Of a generator, what its next draw depends on."""
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        return random.Random.getstate(value)
    if isinstance(value, torch.Generator):
        return of_tensor(value.get_state())
    if type(value).__module__.startswith("numpy.random"):
        return str(value.get_state() if hasattr(value, "get_state") else getattr(value, "bit_generator", value).state)
    return None


def _attributes(value: Any, level: int) -> Iterable[int]:
    if isinstance(value, torch.optim.Optimizer):
        return [digest_of([part for name, part in group.items() if name != "params"], level) for group in value.param_groups]
    if isinstance(value, torch.nn.Module):
        return [of_plain([name, part]) for module in value.modules() for name, part in vars(module).items() if type(part) in _PLAIN]
    if isinstance(value, FunctionType):
        return (digest_of(value.__defaults__, level), digest_of(value.__kwdefaults__, level))
    held = attributes_of(value) if is_users(type(value)) else None
    return [digest_of(one, level) for pair in islice((held or {}).items(), _MOST_ITEMS) for one in pair]


def is_users(kind: type) -> bool:
    """Whether the class is the user's own: one of its methods, or where it stands, tells."""
    methods = (method for method in vars(kind).values() if hasattr(method, "__code__"))
    known = next((is_user_code(method.__code__) for method in methods), None)
    return kind.__module__ == "__main__" if known is None else known
