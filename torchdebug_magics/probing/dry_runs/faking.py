"""Tensors without data, and, for whole numbers and what is made of them, their values beside them.

Fake tensors know shapes alone. Every index, and much of what a forward decides on, is whole numbers: these are computed for real, in the
shadow of the fakes, so that a position beyond its table is found and ``lengths.max().item()`` has an answer. What comes from the numbers
in weights and images is not computed.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from torchdebug_magics.probing.storages import held_of

_MOST = 1 << 20
"""Elements up to which values are computed beside the fakes."""
_LIFTS = (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default)
_GROUPED: Any = getattr(getattr(torch.ops.aten, "_grouped_mm", None), "default", None)
_UNKNOWN_VALUES = ("empty", "rand", "bernoulli", "multinomial", "dropout", "normal", "uniform", "exponential", "resize")


class ValueFailure(Exception):  # noqa: N818 - it carries an error, and is none of its own
    """What torch raised when an op ran on the real whole numbers; the fake op had let it through."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class CannotBeFakedError(NotImplementedError):
    """A tensor of a kind that has no fake, such as a nested one."""


class Fakes:
    """One fake world. The same tensor always has the same fake, so that ties and views hold."""

    def __init__(self, shape_env: Any = None) -> None:
        self.mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=shape_env)
        self._shadows = WeakIdKeyDictionary()
        self._stale: dict[int, torch.Tensor] = {}
        self._from_meta = WeakIdKeyDictionary()
        self.asked: set[tuple[Any, tuple[Any, ...]]] = set()
        """The ops and dtypes of which it is known whether there is a kernel."""

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The fake of a tensor; a fake stays itself. One on ``meta`` becomes one on the CPU, where factories put theirs."""
        if _is_fake(tensor):
            return tensor
        if tensor.device.type == "meta":
            return self._of_meta(tensor)
        try:
            fake = self.mode.from_tensor(tensor, static_shapes=True)
        except Exception as error:
            msg = f"a {type(tensor).__name__} ({tensor.layout}) has no fake: {error}"
            raise CannotBeFakedError(msg) from error
        if type(tensor) is torch.Tensor and not (tensor.is_floating_point() or tensor.is_complex()):
            self._know(fake, tensor)
        return fake

    def _know(self, fake: torch.Tensor, tensor: torch.Tensor) -> None:
        if fake not in self._shadows and _small(tensor):
            # After a failed assertion on a GPU, nothing there can be read any more.
            with unset_fake_temporarily(), torch.no_grad(), suppress(torch.AcceleratorError):
                self._shadows[fake] = tensor.detach().cpu().clone()

    def _of_meta(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor not in self._from_meta:
            with self.mode:
                fake = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cpu")
            fake.requires_grad_(tensor.requires_grad)
            self._from_meta[tensor] = torch.nn.Parameter(fake, tensor.requires_grad) if isinstance(tensor, torch.nn.Parameter) else fake
        kept: torch.Tensor = self._from_meta[tensor]
        return kept

    def zeros(self, sizes: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A fake full of zeros."""
        with self.mode:
            fake = torch.zeros(sizes, dtype=dtype, device="cpu" if device.type == "meta" else device)
        if not dtype.is_floating_point and _small(fake):
            self._shadows[fake] = torch.zeros(sizes, dtype=dtype)
        return fake

    def all(self, values: Any) -> Any:
        """`values` with each tensor replaced by its fake."""
        return values if all(map(_is_fake, _found_in(values))) else tree_map_only(torch.Tensor, self.of, values)

    def value(self, fake: torch.Tensor) -> torch.Tensor | None:
        """The values of a fake where they are known."""
        known = self._shadows.get(fake)
        return None if known is None or _storage(known) in self._stale else known

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one op on fakes, and beside it on what values are known."""
        if func in _LIFTS:
            return self._lift(func, args, kwargs)
        args, kwargs = self.all(args), self.all(kwargs)
        try:
            out = _in_known_dtype(func, args, kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            known, values = self._values(func, args, kwargs)
            if not known:
                raise
            return tree_map_only(torch.Tensor, self._of_known, values)
        out = as_on_device(func, args, out)
        self._shadow(func, args, kwargs, out)
        return out

    def _of_known(self, tensor: torch.Tensor) -> torch.Tensor:
        fake = self.of(tensor)
        self._know(fake, tensor)
        return fake

    def _lift(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = func(*args, **kwargs)
        if isinstance(out, FakeTensor) and isinstance(args[0], torch.Tensor) and not isinstance(args[0], FakeTensor):
            self._know(out, args[0])
        return out

    def _shadow(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Compute the values of the results where those of the inputs are known."""
        known, real = self._values(func, args, kwargs) if all(map(_small, _found_in(out))) else (False, None)
        if not known:
            self._forget(func, args, kwargs)
            return
        for fake, value in zip(tree_leaves(out), tree_leaves(real), strict=False):
            if isinstance(fake, torch.Tensor) and isinstance(value, torch.Tensor):
                self._shadows[fake] = value

    def _values(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[bool, Any]:
        """Whether all inputs have values, and what the op makes of them."""
        if any(self.value(tensor) is None for tensor in _found_in((args, kwargs))) or not _has_values(func):
            return False, None
        args, kwargs = tree_map_only(torch.Tensor, self.value, (args, kwargs))
        if "device" in kwargs:
            kwargs = {**kwargs, "device": torch.device("cpu")}
        with unset_fake_temporarily(), torch.no_grad():
            try:
                return True, func(*args, **kwargs)
            except Exception as error:  # noqa: BLE001 - whatever torch says to real numbers
                raise ValueFailure(error) from None

    def _forget(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """What the op writes to has values that are not known from now on, with all its views."""
        if not func._schema.is_mutable:
            return
        for argument, value in zip(func._schema.arguments, args, strict=False):
            self._forget_written(argument, value)
        for argument in func._schema.arguments:
            if argument.name in kwargs:
                self._forget_written(argument, kwargs[argument.name])

    def _forget_written(self, argument: Any, value: Any) -> None:
        if argument.alias_info is None or not argument.alias_info.is_write:
            return
        for leaf in tree_leaves(value):
            if isinstance(leaf, torch.Tensor) and (shadow := self._shadows.pop(leaf, None)) is not None:
                self._stale[_storage(shadow)] = shadow  # kept, so that no later one gets its address


def _found_in(values: Any) -> Iterator[torch.Tensor]:
    """The tensors among the arguments or results of an op: in lists, at most."""
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, (tuple, list)):
        for value in values:
            yield from _found_in(value)
    elif isinstance(values, dict):
        yield from _found_in(tuple(values.values()))


def _is_fake(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, FakeTensor) or isinstance(held_of(tensor), FakeTensor)


@functools.lru_cache(maxsize=4096)
def _has_values(func: Any) -> bool:
    name = func._schema.name.partition("::")[2]
    return torch.Tag.nondeterministic_seeded not in func.tags and not any(part in name for part in _UNKNOWN_VALUES)


def _small(tensor: torch.Tensor) -> bool:
    if not isinstance(tensor, FakeTensor) and tensor.is_meta:  # a fake is not asked for its device, which takes an op
        return False
    if tensor.layout != torch.strided or tensor.is_nested or tensor.is_quantized:
        return False
    return all(type(size) is int for size in tensor.shape) and tensor.numel() <= _MOST


def _storage(tensor: torch.Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata
    return address


def _in_known_dtype(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What fakes refuse and kernels do: the fake of a product of groups, as of experts, knows one dtype."""
    if func is not _GROUPED or args[0].dtype == torch.bfloat16:
        return func(*args, **kwargs)
    out = func(*tree_map_only(torch.Tensor, _as_bfloat16, args), **kwargs)
    return out.to(args[0].dtype)


def _as_bfloat16(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor


_NORMS = frozenset({"native_layer_norm", "native_group_norm", "native_batch_norm", "_native_batch_norm_legit"})


def as_on_device(func: Any, args: tuple[Any, ...], out: Any) -> Any:
    """What fakes tell wrong: the CPU keeps the mean and scale of a half-precision input in the precision of the weight."""
    if func._schema.name.partition("::")[2] not in _NORMS or out[1].fake_device.type != "cpu":
        return out
    weight = next((argument for argument in args[1:] if isinstance(argument, torch.Tensor)), None)
    if weight is None or weight.dtype == out[1].dtype:
        return out
    return (out[0], *(torch.empty_like(statistic, dtype=weight.dtype) for statistic in out[1:]))
