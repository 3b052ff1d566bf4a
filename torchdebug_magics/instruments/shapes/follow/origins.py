"""Every function that a forward calls: what made each tensor, and which one failed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import CodeType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from torchdebug_magics.instruments.shapes.follow.module_calls import Calls
from torchdebug_magics.instruments.shapes.follow.seen import Failed, Made
from torchdebug_magics.instruments.shapes.follow.suspects import Suspects
from torchdebug_magics.probing.dry_runs.faking import Fakes
from torchdebug_magics.probing.dry_runs.inputs import named_tensors, sizes
from torchdebug_magics.probing.safety import Guard
from torchdebug_magics.probing.source.user_code import user_frame

_QUESTIONS = {
    *("dim", "size", "numel", "stride", "is_floating_point", "is_complex", "element_size", "storage_offset", "is_contiguous"),
    *("__len__", "__repr__", "get_device"),
}
_MOST_OUTSIDE = 1000
"""Functions that are followed outside every module: a cell may go on for long without a backward pass."""
_BY_VALUE = {
    *("one_hot", "multi_margin_loss", "multilabel_margin_loss", "binary_cross_entropy", "ctc_loss", "multinomial", "bernoulli"),
    *("cholesky", "linalg_cholesky", "linalg_inv", "inverse", "linalg_solve"),
}
"""Refuse values of any dtype, or look at them in ways that are not followed beside the fakes."""
_BY_INDEX = {
    *("embedding", "embedding_bag", "gather", "take", "take_along_dim", "index_select", "__getitem__", "__setitem__", "select"),
    *("scatter", "scatter_", "scatter_add", "scatter_add_", "scatter_reduce", "index_add", "index_add_", "index_copy", "index_copy_"),
    *("cross_entropy", "nll_loss", "nll_loss_nd"),
}
_INDICES = frozenset([torch.int64, torch.int32])


class Origins(TorchFunctionMode):
    """Follows functions as the user calls them. `instead` gives what runs in the place of a function.

    Lines of the user's are looked for above the function of ours whose code is `below`: what called that asked for a report.
    """

    def __init__(
        self,
        calls: Calls,
        instead: Callable[[Any], Any] | None = None,
        fakes: Fakes | None = None,
        below: CodeType | None = None,
        guard: Guard | None = None,
    ) -> None:
        super().__init__()
        self._below = below
        self._guard = guard or Guard()
        self._fakes = fakes
        self.unchecked: set[str] = set()
        """Ops that refuse some values, and ran on tensors whose values are not known."""
        self._calls = calls
        self._instead = instead
        self._made: Any = WeakIdKeyDictionary()
        self.suspects = Suspects()
        self.count = 0
        self.is_done = False
        """Whether nothing is followed any more."""
        self._free = _MOST_OUTSIDE
        self.failed: Failed | None = None
        self.used: set[int] = set()
        """The ids of the parameters that some op took."""

    def begin(self, inputs: Any) -> None:
        """Name the tensors that the forward begins with."""
        for name, tensor in named_tensors(inputs):
            self._made[tensor] = Made(name or "input", "", 0, (), sizes(tensor))

    def made(self, tensor: torch.Tensor) -> Made | None:
        """How it came about; None for a parameter, or what was there before."""
        made: Made | None = self._made.get(tensor)
        return made

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if self.is_done or (not self._calls.stack and self._is_far()):
            return func(*args, **kwargs)
        name = function_name(func)
        if name.startswith("__get__"):
            return self._read(func, args, kwargs)
        if name in _QUESTIONS:
            return func(*args, **kwargs)
        self._note_use((*args, *kwargs.values()))
        self.count += 1
        number = self.count
        try:
            run = func if self._instead is None else self._instead(func)
            out = run(*args, **kwargs)
        except Exception as error:
            if self.failed is None or self.failed.error is not error:
                self.failed = self._failed(func, name, number, args, kwargs, error)
            raise
        self._follow(name, number, args, kwargs, out)
        current = self._calls.current
        path = current.path if current else None
        self._guard.run("the look for broadcasts", self.suspects.look, name, args, kwargs, out, path, self.made)
        if self._fakes is not None and is_unchecked(name, (args, kwargs), self._fakes):
            self.unchecked.add(name.strip("_"))
        return out

    def refill(self) -> None:
        """As many functions as ever may follow from here."""
        self._free = _MOST_OUTSIDE

    def _is_far(self) -> bool:
        """Whether the last call of a module lies too many functions back to be followed further."""
        self._free -= 1
        self.is_done = self._free < 0
        return self.is_done

    def _read(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An attribute, such as ``x.T``: no op of its own, and yet a step where it is a tensor."""
        out = func(*args, **kwargs)
        if isinstance(out, torch.Tensor) and self._made.get(out) is None:
            name = function_name(getattr(func, "__self__", func))
            self._follow(name, max(self.count, 1), args, kwargs, out)
        return out

    def _note_use(self, args: Any) -> None:
        for argument in args:
            if isinstance(argument, torch.nn.Parameter):
                self.used.add(id(argument))
            elif isinstance(argument, (tuple, list)):
                self._note_use(argument)

    def _follow(self, name: str, number: int, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        current = self._calls.current
        inputs: tuple[Any, ...] | None = None
        plain: tuple[Any, ...] = ()
        for _, tensor in named_tensors(out):
            if inputs is None:
                inputs = tuple((sizes(operand), self._made.get(operand)) for _, operand in named_tensors((args, kwargs)))
                plain = tuple(arg for arg in args if isinstance(arg, (int, float, tuple, list, str)) and not _holds_tensor(arg))
            takes_model = bool(self.used.intersection(map(id, args))) or any(made is not None and made.of_model for _, made in inputs)
            of_model = current is not None or takes_model
            where = current.path if current else ""
            self._made[tensor] = Made(name, where, number, inputs, sizes(tensor), plain, _line(self._below), of_model)

    def _failed(self, func: Any, name: str, number: int, args: Any, kwargs: Any, error: Exception) -> Failed:
        operands = (*named_tensors(args), *named_tensors(kwargs))
        current = self._calls.current
        made = tuple(self._made.get(tensor) for _, tensor in operands)
        paths = self._calls.owned()
        owned = frozenset(at for at, (_, tensor) in enumerate(operands) if id(tensor) in paths)
        operands = tuple((paths.get(id(tensor), place), tensor) for place, tensor in operands)
        return Failed(func, name, current.path if current else None, number, args, kwargs, operands, made, error, owned)


def function_name(func: Any) -> str:
    """``linear``, ``cat``, ``__get__`` as the user would write it."""
    name = getattr(func, "__name__", "") or str(func)
    return str(name)


def _line(below: CodeType | None) -> tuple[CodeType, int, int] | None:
    frame = user_frame(sys._getframe(3), below=below)
    return None if frame is None else (frame.f_code, frame.f_lineno, frame.f_lasti)


def _holds_tensor(value: Any) -> bool:
    return isinstance(value, (tuple, list)) and any(isinstance(item, torch.Tensor) for item in value)


def is_unchecked(name: str, values: Any, fakes: Fakes) -> bool:
    """Whether a real op of this name might refuse what the fake one took."""
    if name in _BY_VALUE:
        return True
    if name not in _BY_INDEX:
        return False
    return any(tensor.dtype in _INDICES and tensor.numel() and fakes.value(tensor) is None for _, tensor in named_tensors(values))
