"""Tensors inside nested values, and cheap questions about their numbers. Every weird kind of tensor is answered, none is touched."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves

from torchdebug_magics.format import shape
from torchdebug_magics.probing.storages import is_freed, is_shard, local_of

NAN, INF = 1, 2
"""Bits of `kind_of`."""
_FLOAT8 = frozenset(value for name, value in vars(torch).items() if name.startswith("float8") and isinstance(value, torch.dtype))
_SMALL_COUNT = 1 << 15
"""Tensors up to this size are checked together: one kernel instead of one each."""
_DEEPEST = 4
_WITHOUT = (str, bytes, int, float, torch.nn.Module, slice, torch.dtype, torch.device)
"""What holds no tensors that are looked for."""
_ORDINARY = torch._C._dispatch_keys(torch.empty(0)).raw_repr()
"""The keys of a plain strided CPU tensor; whatever `dense` must treat otherwise (sparse, quantised, zero, meta, fake, wrapped) differs."""
_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
_FLOATS = frozenset({torch.float32, torch.float64, torch.float16, torch.bfloat16})
RANGES = {"sigmoid": (0.0, 1.0), "softmax": (0.0, 1.0), "tanh": (-1.0, 1.0), "relu": (0.0, math.inf), "relu6": (0.0, 6.0)}
"""Between what activations keep their results."""
TAKES = {
    "cross_entropy": "logits",
    "binary_cross_entropy_with_logits": "logits",
    "nll_loss": "log-probabilities",
    "kl_div": "log-probabilities",
    "binary_cross_entropy": "probabilities",
}
"""What a loss expects of its input."""


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    """Every tensor in a nested value: tuples, dicts, named tuples, dataclasses and model outputs."""
    tensors: list[torch.Tensor] = []
    _collect(value, 0, tensors)
    return iter(tensors)


def _collect(value: object, depth: int, tensors: list[torch.Tensor]) -> None:
    if isinstance(value, torch.Tensor):
        tensors.append(value)
    elif depth >= _DEEPEST or value is None or isinstance(value, _WITHOUT):
        return
    elif isinstance(value, (tuple, list, dict, set, frozenset, Mapping)):  # the usual kinds first: an abstract one is slow to ask for
        for item in list(value.values() if isinstance(value, Mapping) else value):
            _collect(item, depth + 1, tensors)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        _collect([getattr(value, field.name, None) for field in dataclasses.fields(value)], depth, tensors)
    else:
        tensors += [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def is_traced(tensor: torch.Tensor) -> bool:
    """Whether it stands for numbers that are not there: of a compiler, or inside a function transform."""
    return isinstance(tensor, (FakeTensor, FunctionalTensor)) or torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def dense(tensor: torch.Tensor) -> torch.Tensor | None:
    """Its floating or complex numbers as a plain strided tensor, or None where there are none to look at.

    Of a DTensor, those of the part in this process. A ZeroTensor must not reach `isfinite` (it kills the process), nor a meta, fake or
    functorch tensor `bool()`.
    """
    tensor = local_of(tensor)
    if (
        is_lazy(tensor)
        or not (tensor.is_floating_point() or tensor.is_complex())
        or tensor.is_meta
        or tensor._is_zerotensor()
        or tensor.is_quantized
    ):
        return None
    if is_traced(tensor):
        return None
    tensor = tensor.detach()
    if tensor.layout is torch.sparse_coo:
        tensor = tensor._values()
    elif tensor.is_nested and tensor.layout is torch.strided:
        tensor = tensor.contiguous().values()
    elif tensor.layout is not torch.strided:
        tensor = tensor.values()
    if tensor.numel() == 0 or (type(tensor) in _PLAIN and is_freed(tensor)):
        return None
    return tensor.float() if tensor.dtype in _FLOAT8 else tensor


def kind_of(tensor: torch.Tensor) -> int:
    """`NAN` and `INF` bits of what it holds; 0 where all is finite or there is nothing to look at. One synchronisation, two with a NaN."""
    numbers = dense(tensor)
    if numbers is None:
        return 0
    kind, ends = 0, _ends(numbers)
    if math.isnan(ends[0]):
        kind, ends = NAN, _ends(torch.nan_to_num(numbers, nan=0.0, posinf=math.inf, neginf=-math.inf))
    return kind | (INF if math.inf in map(abs, ends) else 0)


def is_bad(tensor: torch.Tensor) -> bool:
    """Whether it holds anything non-finite."""
    numbers = dense(tensor)
    return numbers is not None and not all(map(math.isfinite, _ends(numbers)))


def _ends(numbers: torch.Tensor) -> list[float]:
    """The smallest and the largest, both NaN where any is: one reading and no memory; `isfinite` makes several tensors of the same size."""
    if numbers.is_complex():
        numbers = torch.view_as_real(numbers.resolve_conj())
    return list(torch.stack(torch.aminmax(numbers)).tolist())


def bad_mask(tensor: torch.Tensor, kinds: int = NAN | INF) -> torch.Tensor | None:
    """Where it holds a value of `kinds`; None where it cannot be looked at or its own indices are not those of its numbers."""
    numbers = dense(tensor)
    if numbers is None or tensor.layout is not torch.strided or tensor.is_nested or is_shard(tensor):
        return None
    if kinds == NAN | INF:
        return ~torch.isfinite(numbers)
    return torch.isnan(numbers) if kinds == NAN else torch.isinf(numbers)


def largest(tensors: Iterable[torch.Tensor]) -> float:
    """The largest magnitude in all of them: NaN or inf if any holds one, 0.0 for none. One synchronisation a device.

    Max-abs and not an L2 norm or a sum, as those overflow on numbers that are finite.
    """
    return peak_of(extremes(tensors))


def extremes(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """0-dimensional tensors among which the largest magnitude is; nothing is synchronised yet."""
    members = list(tensors)
    with torch.no_grad():
        joined = _joined(members)
        if joined is not None:
            return list(torch.aminmax(joined))
        if are_ordinary(members):
            return [extreme for group in _by_type(members) for extreme in _on_cpu(group)]
        groups: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
        for numbers in (member if are_ordinary((member,)) else dense(member) for member in members):
            if numbers is not None:
                real = torch.view_as_real(numbers.resolve_conj()) if numbers.is_complex() else numbers
                groups.setdefault((real.device, real.dtype), []).append(real)
        return [extreme for (device, _), group in groups.items() for extreme in _extremes(device, group)]


def _joined(members: list[torch.Tensor]) -> torch.Tensor | None:
    """Small tensors as one, where all are plain ones on the CPU; None where they are not.

    Each is asked little: what cannot be joined raises, and what is joined of strange ones is strange itself.
    """
    if not members or not _PLAIN.issuperset(map(type, members)) or not _FLOATS.issuperset([member.dtype for member in members]):
        return None
    if not all([member.is_cpu for member in members]) or max(map(torch.Tensor.numel, members)) > _SMALL_COUNT:  # noqa: C419 - a list is faster
        return None
    try:
        joined = torch._C._nn.flatten_dense_tensors(members)
    except RuntimeError:
        return None
    return joined if joined.numel() and torch._C._dispatch_keys(joined).raw_repr() == _ORDINARY else None


def are_ordinary(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether all are plain strided CPU tensors of floating numbers, as nearly all are. Asked of all at once, as that is fast."""
    if not _PLAIN.issuperset(map(type, tensors)) or not _FLOATS.issuperset([tensor.dtype for tensor in tensors]):
        return False
    return {_ORDINARY}.issuperset([keys.raw_repr() for keys in map(torch._C._dispatch_keys, tensors)])


def _by_type(tensors: Sequence[torch.Tensor]) -> Iterable[Sequence[torch.Tensor]]:
    types = {tensor.dtype for tensor in tensors}
    return [tensors] if len(types) < 2 else [[tensor for tensor in tensors if tensor.dtype is dtype] for dtype in types]  # noqa: PLR2004 - one type


def values_of(candidates: Sequence[torch.Tensor]) -> list[float]:
    """0-dimensional tensors as numbers, by device, that of the first one first; one transfer a device."""
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for candidate in candidates:
        by_device.setdefault(candidate.device, []).append(candidate)
    values: list[float] = []
    for device, members in by_device.items():
        values += (
            [member.item() for member in members] if device.type == "cpu" else torch.stack([member.double() for member in members]).tolist()
        )
    return values


def peak_of(candidates: Sequence[torch.Tensor]) -> float:
    """The largest magnitude among 0-dimensional tensors."""
    return peak(values_of(candidates))


def peak(values: Iterable[float]) -> float:
    """The largest magnitude; NaN if any is, 0.0 for none."""
    sizes = list(map(abs, values))
    return math.nan if any(map(math.isnan, sizes)) else max(sizes, default=0.0)


def _extremes(device: torch.device, members: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """0-dimensional tensors among which the largest magnitude is; one dtype, so that they may be joined."""
    return _on_cpu(members) if device.type == "cpu" else list(torch._foreach_norm(list(members), math.inf))


def _on_cpu(members: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    # `aminmax` reads several times faster than an inf-norm; many small tensors cost less joined than one by one.
    sizes = list(map(torch.Tensor.numel, members))
    small = [member for member, size in zip(members, sizes, strict=True) if size <= _SMALL_COUNT]
    whole = [member for member, size in zip(members, sizes, strict=True) if size > _SMALL_COUNT]
    if small and (joined := torch._C._nn.flatten_dense_tensors(small)).numel():
        whole.append(joined)
    return [extreme for member in whole for extreme in torch.aminmax(member)]


def sizes_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """Its shape; of a strided nested tensor, which has none, the number of its rows; of a parameter without one, nothing."""
    if is_lazy(tensor):
        return ()
    return (tensor.size(0),) if tensor.is_nested and tensor.layout is torch.strided else tuple(tensor.shape)


def describe(value: Any) -> str:
    """A tensor in a few words, for a place where its elements cannot be shown."""
    if is_lazy(value) or value.is_nested:
        return "nested" if value.is_nested else "uninitialised"
    numbers = dense(value)
    sizes = "x".join(map(str, value.shape)) or "scalar"
    return sizes if numbers is None else f"{sizes} {str(value.dtype).removeprefix('torch.')}"


def sums_to_one(values: torch.Tensor, dim: int, within: float) -> bool:
    """Whether the numbers along a dimension are probabilities, but for rounding: one alone says nothing."""
    if not values.numel() or values.size(dim) == 1:
        return False
    return bool(values.min() >= 0) and bool((values.sum(dim) - 1).abs().max() <= within)


class Crossing(NamedTuple):
    """The shapes of two tensors of as many numbers, the one with a dimension of one more: together they give each with each."""

    few: tuple[int, ...]
    many: tuple[int, ...]
    whole: tuple[int, ...]

    @classmethod
    def of(cls, *shapes: tuple[int, ...]) -> Crossing | None:
        """None for any other shapes than such a pair."""
        if len(shapes) != 2 or len(shapes[0]) == len(shapes[1]):  # noqa: PLR2004 - a pair
            return None
        few, many = sorted(shapes, key=len)
        if math.prod(few) < 2 or [size for size in few if size != 1] != [size for size in many if size != 1]:  # noqa: PLR2004
            return None
        try:
            whole = tuple(torch.broadcast_shapes(few, many))
        except RuntimeError:
            return None  # as of an index and what it is to choose from
        return None if math.prod(whole) == math.prod(few) else cls(few, many, whole)

    @property
    def dim(self) -> int | None:
        """The dimension of one by which they differ, -1 for the last; None where it is more than one."""
        dims = (dim for dim in reversed(range(len(self.many))) if self.many[dim] == 1)
        dim = next((dim for dim in dims if (*self.many[:dim], *self.many[dim + 1 :]) == self.few), None)
        return -1 if dim == len(self.many) - 1 else dim

    def sentence(self, op: str, operands: Sequence[tuple[str, tuple[int, ...]]]) -> str:
        """What an op does with two operands of which a text, that may be empty, and the shape are given."""
        first, second = [f"{f'`{text}` of ' if text else ''}{shape(sizes)}" for text, sizes in operands]
        return f"`{op.strip('_')}` broadcasts {first} with {second} to {shape(self.whole)}"

    @property
    def meets(self) -> str:
        """What is computed with what."""
        first, count = self.few[0], math.prod(self.few)
        return f"each of {first} samples with all {first}" if first == self.whole[0] else f"{math.prod(self.whole):,} values from {count:,}"
