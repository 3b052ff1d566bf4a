"""A number for a value that is the same in two runs of one process, whenever the value is."""

from __future__ import annotations

import datetime as dt
import decimal
import fractions
import functools
import random
import struct
import uuid
import weakref
import zlib
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import PurePath
from types import BuiltinFunctionType, BuiltinMethodType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import torch

from torchdebug_magics.probing.attributes import attributes_of
from torchdebug_magics.probing.digest import of_tensor
from torchdebug_magics.probing.source.code_owner import is_user_code
from torchdebug_magics.probing.tensors import is_traced

Token = tuple[str, int]
"""The type of an object, and which of that type it was to be seen."""
_DEEPEST = 5
_MOST_ITEMS = 1024
_MOST_BYTES = 1 << 20
_LEAST_BYTES = 1 << 12
_BY_REPR = (dt.date, dt.time, dt.timedelta, decimal.Decimal, fractions.Fraction, uuid.UUID, PurePath, torch.dtype, torch.device)
_MOST_INSIDE = 64
_DEEPEST_INSIDE = 2
_ITERATORS = frozenset(map(type, (iter([]), iter(()), iter(range(0)), iter(""), iter("\xe9"), reversed([]), iter({}), iter({}.values()))))
_TAKING = frozenset({zip, map, filter, enumerate})
_FLAT = frozenset({int, float, str, bytes, bool, type(None)})
_AS_THEY_ARE = frozenset({str, bytes, bool, type(None), type(...)})
_BLOCKS = 64
_NUMPY_DRAWS = frozenset({"Generator", "RandomState", "MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64", "SeedSequence"})


class Digests:
    """Of one run: objects that are nothing but themselves are numbered in the order in which they were first seen."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[weakref.ref[Any], Token]] = {}
        self._counts: dict[str, int] = {}
        self._room_bytes = _MOST_BYTES
        """Of memory that is still to be read for the value that is looked at."""

    def token(self, value: object) -> Token:
        """Never by its address; nothing is kept alive."""
        known = self._seen.get(id(value))
        if known is not None and known[0]() is value:
            return known[1]
        kind = type(value).__qualname__
        try:
            reference = weakref.ref(value)
        except TypeError:  # an object that cannot be told from the next one of its kind
            return kind, -1
        number = self._counts[kind] = self._counts.get(kind, 0) + 1
        self._seen[id(value)] = reference, (kind, number)
        return kind, number

    def of(self, value: Any, level: int = 0) -> int:
        """By value and bits: -0.0 is not 0.0, and NaN is NaN. Sets by what is in them, as their order is nobody's wish."""
        if level == 0:
            self._room_bytes = _MOST_BYTES
        kind = type(value)
        if kind is int:
            return hash((int, value, value == -1))  # -1 and -2 have one hash
        if kind is float:
            return hash(struct.pack("d", value))
        if kind in _AS_THEY_ARE:
            return hash((kind, value))
        if isinstance(value, torch.Tensor):
            return self._of_tensor(value)
        if level >= _DEEPEST:
            return hash(kind.__qualname__)
        return self._of_object(value, kind, level + 1)

    def _of_object(self, value: Any, kind: type, level: int) -> int:  # noqa: C901, PLR0911, PLR0912 - a list of kinds, each with its own way
        if isinstance(value, (list, tuple, deque)):
            return hash((kind.__qualname__, len(value), self._of_items(_some(value), level)))
        if isinstance(value, (dict, Mapping)):
            return hash((kind.__qualname__, len(value), tuple((self.of(key, level), self.of(item, level)) for key, item in _items(value))))
        if isinstance(value, (set, frozenset)):
            return hash((kind.__qualname__, len(value), tuple(sorted(self.of(item, level) for item in islice(value, _MOST_ITEMS)))))
        if isinstance(value, (int, float, str, bytes)):  # a class of its own: an enum, a string that knows more
            return hash((kind.__qualname__, next(base.__repr__(value) for base in (float, int, str, bytes) if isinstance(value, base))))
        if isinstance(value, (complex, bytearray, range, slice)):
            return hash((kind.__qualname__, repr(value)))
        if is_random(value):
            return hash((kind.__qualname__, state_of(value)))
        if kind.__module__ == "numpy":
            return self._of_numpy(value, level)
        if isinstance(value, _BY_REPR):
            return hash((kind.__qualname__, str(value)))
        if isinstance(value, SimpleNamespace):
            return self.of(vars(value), level)
        if isinstance(value, functools.partial):
            return self.of((value.func, value.args, value.keywords), level)
        if isinstance(value, torch.optim.Optimizer):
            return self.of([{name: part for name, part in group.items() if name != "params"} for group in value.param_groups], level)
        if isinstance(value, torch.nn.Module):
            return hash((self.token(value), self._of_settings(value, level)))
        if isinstance(value, (MethodType, BuiltinMethodType)) and not isinstance(value.__self__, (ModuleType, type)):
            return hash((value.__name__, self.of(value.__self__, level)))
        if isinstance(value, FunctionType):
            return hash((value.__qualname__, self.of(value.__defaults__, level), self.of(value.__kwdefaults__, level)))
        if isinstance(value, BaseException):
            return hash((kind.__qualname__, self.of(BaseException.args.__get__(value), level)))  # type: ignore[attr-defined]  # of a descriptor
        if kind in _ITERATORS or kind in _TAKING:
            return hash((kind.__qualname__, self.of(value.__reduce__()[1:], level)))  # what it goes over, and how far it is
        if isinstance(value, (type, ModuleType, BuiltinFunctionType)):
            return hash((kind.__qualname__, getattr(value, "__qualname__", value.__name__)))
        return hash(self.token(value))

    def _of_items(self, items: tuple[Any, ...], level: int) -> int:
        kinds = set(map(type, items))
        if kinds in ({float}, {int}):
            try:
                return zlib.crc32(array("d" if float in kinds else "q", items).tobytes())
            except OverflowError:
                pass
        return hash(tuple([self.of(item, level) for item in items]))

    def _of_settings(self, module: torch.nn.Module, level: int) -> int:
        """Plain values, such as the rate of a dropout, of the layer itself and of those in it."""
        held = vars(module)
        own = tuple((name, self.of(part, level)) for name, part in islice(held.items(), _MOST_INSIDE) if type(part) in _FLAT)
        inner = islice(held.get("_modules", {}).values(), _MOST_INSIDE) if level <= _DEEPEST_INSIDE else ()
        return hash((own, *(self._of_settings(one, level + 1) for one in inner if one is not None)))

    def _of_numpy(self, value: Any, level: int) -> int:
        if not hasattr(value, "tobytes"):
            return hash((type(value).__qualname__, getattr(value, "__name__", "")))
        if value.dtype.hasobject:
            return hash((value.shape, self.of(value.ravel()[:_MOST_ITEMS].tolist(), level)))
        room_bytes = self._take_room(value.nbytes)
        flat = value if value.nbytes <= room_bytes else value.ravel()[:: max(1, value.nbytes // room_bytes)]
        return hash((str(value.dtype), value.shape, zlib.crc32(flat.tobytes())))

    def _of_tensor(self, tensor: torch.Tensor) -> int:
        """Hashed where it lies in memory, or in a copy; no mode and no hook of anybody's sees that."""
        if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_nested or tensor.is_quantized or has_no_memory(tensor):
            return hash((str(tensor.dtype), str(tensor.device)))
        room_bytes = self._take_room(tensor.numel() * tensor.element_size())
        return hash((str(tensor.dtype), tuple(tensor.shape), str(tensor.device), bytes_of(tensor, room_bytes)))

    def _take_room(self, wanted_bytes: int) -> int:
        """How much of so much memory may be read."""
        given = max(_LEAST_BYTES, min(wanted_bytes, self._room_bytes))
        self._room_bytes -= given
        return given

    def inside(self, value: Any, level: int = 0) -> Iterator[tuple[tuple[Any, ...], int]]:
        """Attributes of the user's own objects in a value, and the containers in it, each with its digest."""
        if isinstance(value, (list, tuple, set, frozenset, deque, dict)):
            for number, item in enumerate(islice(value.values() if isinstance(value, dict) else value, _MOST_INSIDE)):
                if isinstance(item, (list, set, deque, dict)) or type(item).__name__ == "ndarray":
                    yield ("within", level, number), self.of(item)
                if level < _DEEPEST_INSIDE and type(item) not in _FLAT:
                    yield from self.inside(item, level + 1)
        elif not isinstance(value, (torch.Tensor, torch.nn.Module)) and is_users(type(value)):
            for name, part in islice((attributes_of(value) or {}).items(), _MOST_INSIDE):
                yield ("attribute", *self.token(value), name), self.of(part)


def is_users(kind: type) -> bool:
    """Whether the class is the user's own: one of its methods, or where it stands, tells."""
    methods = (method for method in vars(kind).values() if hasattr(method, "__code__"))
    known = next((is_user_code(method.__code__) for method in methods), None)
    return kind.__module__ == "__main__" if known is None else known


def _some(items: Any) -> Any:
    """All of a list, or of a long one its ends and every so many in between."""
    if len(items) <= _MOST_ITEMS:
        return tuple(items)
    if isinstance(items, deque):
        return tuple(islice(items, _MOST_ITEMS))
    step = len(items) // (_MOST_ITEMS // 2)
    return (*items[: _MOST_ITEMS // 4], *items[::step], *items[-_MOST_ITEMS // 4 :])


def _items(value: Any) -> Iterable[tuple[Any, Any]]:
    items = dict.items(value) if isinstance(value, dict) else value.items()
    return islice(items, _MOST_ITEMS)


def is_random(value: object) -> bool:
    """Whether numbers are drawn from it."""
    kind = type(value)
    return isinstance(value, (random.Random, torch.Generator)) or (
        kind.__module__.startswith("numpy.random") and kind.__name__ in _NUMPY_DRAWS
    )


def state_of(value: Any) -> str:
    """What the next draw depends on."""
    if isinstance(value, random.SystemRandom):
        return "the system's"
    if isinstance(value, random.Random):
        return str(hash(random.Random.getstate(value)))
    if isinstance(value, torch.Generator):
        return str(bytes_of(value.get_state()))
    if type(value).__name__ == "RandomState":
        return _written_out(value.get_state())
    return _written_out(getattr(value, "bit_generator", value).state)


def _written_out(state: Any) -> str:
    """With every number of an array, which `repr` leaves out."""
    if isinstance(state, dict):
        return str({name: _written_out(part) for name, part in state.items()})
    if isinstance(state, tuple):
        return str([_written_out(part) for part in state])
    return str(state.tobytes() if hasattr(state, "tobytes") else state)


def has_no_memory(tensor: torch.Tensor) -> bool:
    """Whether it stands for numbers that are not there."""
    return tensor._is_zerotensor() or is_traced(tensor)


def bytes_of(tensor: torch.Tensor, room_bytes: int = 1 << 20) -> int:
    """A number for its bytes, in order; of so many at most, from all over it. No mode and no hook of anybody's sees that."""
    with torch.no_grad(), torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
        plain = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
        room = max(_BLOCKS, room_bytes // plain.element_size())
        if plain.numel() > room:
            ends = torch.linspace(0, plain.numel() - room // _BLOCKS, _BLOCKS, dtype=torch.float64).long().tolist()
            plain = torch.cat([plain[start : start + room // _BLOCKS] for start in ends])
        return of_tensor(plain)
