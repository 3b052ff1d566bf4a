"""Every op of a forward below autograd: run on fakes where there are some, and counted."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Protocol

import torch
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.nested._internal.nested_tensor import NestedTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from torchdebug_magics.probing.dry_runs.faking import Fakes
from torchdebug_magics.probing.dry_runs.flops import FlopFormulas, scratch_bytes
from torchdebug_magics.probing.dry_runs.inputs import zeros
from torchdebug_magics.probing.state.contents import Writes
from torchdebug_magics.probing.storages import is_shard_type


class CountedCalls(Protocol):
    """The module calls of a run."""

    @property
    def current(self) -> Any:
        """The innermost running one, with the field ``flops``; or None."""


class Scratch(Protocol):
    """Adds up what a backward pass would need."""

    def put_at(self, tensor: torch.Tensor, size_bytes: int) -> None:
        """Count `size_bytes` for this tensor, whatever its memory holds."""


_DEVICE = torch.ops.prim.device.default


class Arithmetic(TorchDispatchMode):
    """Every op below autograd: run on fakes where there are some, counted, and told to ``ran(args, kwargs, out)``."""

    _torchdebug_owner = None
    supports_higher_order_operators = True
    """Else torch refuses what takes a function, such as `flex_attention`, while the mode is on."""

    def __init__(
        self,
        calls: CountedCalls | None,
        formulas: FlopFormulas,
        fakes: Fakes | None,
        check: Callable[..., None] | None = None,
        *,
        saved: Scratch | None = None,
        writes: Writes | None = None,
        ran: Callable[..., None] | None = None,
    ) -> None:
        super().__init__()
        self._calls = calls
        self._formulas = formulas
        self._fakes = fakes
        self._check = check
        self._saved = saved
        self._writes = writes
        self._ran = ran
        self.total = 0
        self.has_shards = False
        """Whether ops ran on tensors that several ranks hold, and were counted as of whole ones."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Asked by the compiler."""
        return False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Asked when the class is made: to be skipped by the compiler is to import it, which takes seconds."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, HigherOrderOperator):
            return self._with_function(func, args, kwargs)
        if func.namespace == "prim":
            # By far the most frequent question: kernels ask each operand for its device.
            return args[0].fake_device if func is _DEVICE and isinstance(args[0], FakeTensor) else func(*args, **kwargs)
        if _is_question(func):
            return func(*args, **kwargs)
        if any(issubclass(kind, NestedTensor) for kind in types):
            return NotImplemented  # it takes itself apart, and its parts come by again
        if any(isinstance(argument, torch.Tensor) and argument.is_nested for argument in args):
            self._formulas.leave_out(func)  # of the older kind, which has no sizes to count by
            return func(*args, **kwargs)
        self.has_shards = self.has_shards or any(map(is_shard_type, types))
        whole = self._in_parts(func, args, kwargs)
        return self._followed(func, args, kwargs) if whole is NotImplemented else whole

    def _with_function(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An op that takes a function has no schema to check it by, and runs as it is: the modes below know how."""
        out = func(*args, **kwargs)
        self._add(self._formulas.count(func, args, kwargs, out))
        return out

    def _in_parts(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of an op that is made of others, which come by one at a time; else NotImplemented."""
        if self._formulas.knows(func._overloadpacket):
            return NotImplemented
        if not func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd):
            return NotImplemented
        with self:
            return func.decompose(*args, **kwargs)

    def _followed(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._check is not None:
            self._check(func, args, kwargs)
        if self._writes is not None:
            self._writes.before(func, args, kwargs, computes=self._fakes is None)
        out = func(*args, **kwargs) if self._fakes is None else self._fakes.call(func, args, kwargs)
        if self._writes is not None:
            self._writes.made(out, (args, kwargs))
        if self._saved is not None:
            for tensor, size_bytes in scratch_bytes(func, args, out):
                self._saved.put_at(tensor, size_bytes)
        if self._ran is not None:
            self._ran(args, kwargs, out)
        self._add(self._formulas.count(func, args, kwargs, out))
        return out

    def _add(self, flops: int) -> None:
        if flops:
            self.total += flops
            if self._calls is not None and (current := self._calls.current) is not None:
                current.flops += flops


@cache
def _is_question(func: OpOverload) -> bool:
    """Whether it asks a tensor for its sizes or strides, which the mode below or the tensor itself answers: there is no kernel for it."""
    return not torch._C._dispatch_has_kernel(func.name())


class Copies:
    """The same tensor always has the same copy, and views of one memory stay views of one memory, so that ties and sums hold."""

    def __init__(self, writes: Writes) -> None:
        self._writes = writes
        self._copies = WeakIdKeyDictionary()
        self._memories: dict[int, torch.UntypedStorage] = {}

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The copy of a tensor, into which a forward may write; a parameter stays itself, as it is seldom written and often large."""
        copy: torch.Tensor = self._copies.get(tensor, tensor)
        if copy is tensor and _is_plain(tensor):
            copy = self._copies[tensor] = self._copied(tensor.detach()).requires_grad_(tensor.requires_grad)
        self._writes.made(copy, tensor)
        return copy

    def zeros(self, sizes: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A real tensor for a described one, into which a forward may write."""
        made = zeros(sizes, dtype, device)
        self._writes.made(made)
        return made

    def _copied(self, tensor: torch.Tensor) -> torch.Tensor:
        memory = tensor.untyped_storage()
        if memory._cdata not in self._memories:
            if memory.nbytes() > 2 * tensor.numel() * tensor.element_size():  # a few rows of a data set: not the whole of it
                return tensor.clone()
            self._memories[memory._cdata] = memory.clone()
        alike = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return alike.set_(self._memories[memory._cdata], tensor.storage_offset(), tensor.size(), tensor.stride())


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether it is memory and nothing else, and no parameter."""
    if type(tensor) is not torch.Tensor or tensor.is_nested or tensor.is_quantized:
        return False
    return tensor.layout == torch.strided and not tensor.is_meta and not (tensor.is_conj() or tensor.is_neg() or tensor._is_zerotensor())
