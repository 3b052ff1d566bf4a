"""Every op of a forward: what made each tensor, what it cost, and which one failed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from torchdebug_magics.instruments.shapes.leaves import named_tensors

if TYPE_CHECKING:
    from torchdebug_magics.instruments.shapes.calls import Calls
    from torchdebug_magics.instruments.shapes.faking import Fakes
    from torchdebug_magics.instruments.shapes.flops import FlopFormulas

__all__ = ["Arithmetic", "Failed", "Made", "Origins"]


@dataclass(frozen=True, eq=False)
class Made:
    """How a tensor came about: a link of the chain back to the inputs."""

    op: str
    module: str
    number: int
    """Of the op in this run, by which it can be found again in another run."""
    inputs: tuple[tuple[tuple[int, ...], Made | None], ...] = field(repr=False)
    shape: tuple[int, ...]
    args: tuple[Any, ...] = field(default=(), repr=False)
    """Its arguments that are no tensors."""


@dataclass(frozen=True, eq=False)
class Failed:
    """The op that raised, with what it was given."""

    func: Any
    op: str
    module: str | None
    number: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    operands: tuple[tuple[str, torch.Tensor], ...]
    made: tuple[Made | None, ...]
    """How each operand came about."""
    error: BaseException


class Origins(TorchFunctionMode):
    """Follows functions as the user calls them. `instead` may replace one call, by its number, with another function."""

    def __init__(self, calls: Calls, instead: dict[int, Callable[..., Any]] | None = None) -> None:
        super().__init__()
        self._calls = calls
        self._instead = instead or {}
        self._made: Any = WeakIdKeyDictionary()
        self._count = 0
        self.failed: Failed | None = None

    def begin(self, inputs: Any) -> None:
        """Name the tensors that the forward begins with."""
        for name, tensor in named_tensors(inputs):
            self._made[tensor] = Made(name or "input", "", 0, (), tuple(tensor.shape))

    def made(self, tensor: torch.Tensor) -> Made | None:
        """How it came about; None for a parameter, or what was there before."""
        found: Made | None = self._made.get(tensor)
        return found

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        name = function_name(func)
        if name.startswith("__get__") or name in _QUESTIONS:
            return func(*args, **kwargs)
        self._count += 1
        number = self._count
        try:
            out = self._instead.get(number, func)(*args, **kwargs)
        except Exception as error:
            if self.failed is None or self.failed.error is not error:
                self.failed = self._failed(func, name, number, args, kwargs, error)
            raise
        self._follow(name, number, args, kwargs, out)
        return out

    def _follow(self, name: str, number: int, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        current = self._calls.current
        inputs: tuple[Any, ...] | None = None
        for _, tensor in named_tensors(out):
            if inputs is None:
                inputs = tuple((tuple(one.shape), self._made.get(one)) for _, one in named_tensors((args, kwargs)))
                plain = tuple(one for one in args if isinstance(one, (int, float, tuple, list, str)) and not _holds_tensor(one))
            self._made[tensor] = Made(name, current.path if current else "", number, inputs, tuple(tensor.shape), plain)

    def _failed(self, func: Any, name: str, number: int, args: Any, kwargs: Any, error: Exception) -> Failed:
        operands = tuple(named_tensors(args)) + tuple((f"{key}", tensor) for key, tensor in named_tensors(kwargs))
        current = self._calls.current
        made = tuple(self._made.get(tensor) for _, tensor in operands)
        return Failed(func, name, current.path if current else None, number, args, kwargs, operands, made, error)


class Arithmetic(TorchDispatchMode):
    """Every op below autograd: run on fakes where there are some, and counted."""

    def __init__(self, calls: Calls, formulas: FlopFormulas, fakes: Fakes | None, check: Callable[..., None] | None = None) -> None:
        super().__init__()
        self._calls = calls
        self._formulas = formulas
        self._fakes = fakes
        self._check = check
        self.total = 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Asked by the compiler."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":
            return func(*args, **kwargs)
        packet = func._overloadpacket
        if not self._formulas.knows(packet) and func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd):
            with self:
                whole = func.decompose(*args, **kwargs)
            if whole is not NotImplemented:
                return whole
        if self._check is not None:
            self._check(func, args, kwargs)
        out = func(*args, **kwargs) if self._fakes is None else self._fakes.call(func, args, kwargs)
        flops = self._formulas.count(func, args, kwargs, out)
        if flops:
            self.total += flops
            if (current := self._calls.current) is not None:
                current.flops += flops
        return out


_QUESTIONS = frozenset(
    [
        "dim",
        "size",
        "numel",
        "stride",
        "is_floating_point",
        "is_complex",
        "element_size",
        "storage_offset",
        "is_contiguous",
        "__len__",
        "__repr__",
        "get_device",
    ]
)


def function_name(func: Any) -> str:
    """``linear``, ``cat``, ``__get__`` as the user would write it."""
    name = getattr(func, "__name__", "") or str(func)
    return str(name)


def _holds_tensor(value: Any) -> bool:
    return isinstance(value, (tuple, list)) and any(isinstance(one, torch.Tensor) for one in value)
