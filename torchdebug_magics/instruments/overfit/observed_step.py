"""What one training step does: its calls of torch's functions and modules, with where each value came from."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from torchdebug_magics.instruments.overfit.loss_calls import LOSSES, LossCall, bound
from torchdebug_magics.probing.tensors import tensors_in
from torchdebug_magics.probing.where import locate, user_frame
from torchdebug_magics.report import Location

__all__ = ["ACTIVATIONS", "Activation", "Cut", "FunctionCalls", "ObservedStep", "called_name"]

ACTIVATIONS = frozenset(
    {"softmax", "log_softmax", "sigmoid", "logsigmoid", "tanh", "relu", "relu6", "gelu", "silu", "leaky_relu", "softplus"}
)
_VIEWS = frozenset(
    {"view", "reshape", "squeeze", "unsqueeze", "flatten", "transpose", "permute", "__getitem__", "float", "contiguous", "t", "to", "clone"}
)
_ASKED = frozenset({"requires_grad", "is_leaf", "shape", "dtype", "device", "dim", "size", "grad", "grad_fn", "ndim"})
_ZERO, _SATURATED, _DEAD = 1e-6, 1e-4, 0.98
_MOST_SOURCES = 4096


@dataclass(frozen=True, eq=False)
class Activation:
    """A call of a nonlinearity."""

    name: str
    given: Tensor
    location: Location | None
    module: str
    feeder: str
    """The module with parameters that was called last before it."""
    is_dead: bool
    """Whether it lets no sample through."""


@dataclass(frozen=True)
class Cut:
    """Where a value lost its connection to the parameters it was computed from."""

    name: str
    location: Location | None
    sources: frozenset[int]
    """The parameters, by id."""
    no_grad: bool


@dataclass(eq=False)
class ObservedStep:
    """One step."""

    losses: list[LossCall] = field(default_factory=list)
    inputs: list[Tensor] = field(default_factory=list)
    """Tensors that the outermost models were given."""
    activations: list[Activation] = field(default_factory=list)
    cuts: list[Cut] = field(default_factory=list)
    used: set[int] = field(default_factory=set)
    """Parameters that the loss depends on, connected or not, by id."""
    same_rows: tuple[Location | None, str] | None = None
    """Where all samples became equal: the line, and the module."""
    last_is_same: bool = False
    """Whether what the loss function was given is equal for all samples."""
    loss_from: Activation | None = None
    """The nonlinearity whose result the loss function was given."""
    broadcast: tuple[Location | None, tuple[int, ...], tuple[int, ...]] | None = None
    """An elementwise difference outside the model of sizes (n, 1) and (n,)."""
    running: list[str] = field(default_factory=list)
    """Paths of the modules that run."""
    feeder: str = ""
    _produced: dict[int, tuple[Tensor, Activation]] = field(default_factory=dict)
    _sources: dict[int, tuple[Tensor, frozenset[int]]] = field(default_factory=dict)

    @property
    def samples(self) -> int | None:
        """The length of the first dimension of the first input."""
        return next((len(one) for one in self.inputs if one.dim()), None)

    def forget(self) -> None:
        """Tensors of the step that are needed no more."""
        self._produced.clear()
        self._sources.clear()

    def called(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """A call, and its result."""
        name = called_name(function)
        if name in _ASKED:
            return
        given = list(tensors_in((args, kwargs)))
        made = [one for one in tensors_in(result) if not any(one is other for other in given)] or list(tensors_in(result))
        place: list[Location | None] = []

        def here() -> Location | None:
            if not place:
                frame = user_frame(sys._getframe(2))
                place.append(None if frame is None else locate(frame))
            return place[0]

        if function in LOSSES:
            self._loss(function, args, kwargs, result, here())
        if not name.endswith("_like") and not name.startswith("new_"):
            self._follow(name, given, made, here)
        if name in ACTIVATIONS and made and given:
            self._activation(name, given[0], made[0], here())
        elif name in _VIEWS and made and given and id(given[0]) in self._produced:
            self._produced[id(made[0])] = made[0], self._produced[id(given[0])][1]
        if not self.running and name in {"sub", "__sub__", "__rsub__", "rsub"} and len(given) == 2 and made:  # noqa: PLR2004 - both sides
            one, other = given
            if one.requires_grad != other.requires_grad and made[0].numel() > max(one.numel(), other.numel()) > 1:
                self.broadcast = self.broadcast or (here(), tuple(one.shape), tuple(other.shape))
        self._rows(given, made, here)

    def _loss(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, place: Location | None) -> None:
        options = bound(function, args, kwargs)
        values, target = options.pop("input", None), options.pop("target", None)
        if not isinstance(values, Tensor) or not isinstance(target, Tensor):
            return
        value = float(result.detach()) if isinstance(result, Tensor) and result.numel() == 1 else float("nan")
        self.losses.append(LossCall(function, values.detach(), target.detach(), options, place, value))
        produced = self._produced.get(id(values))
        self.loss_from = produced[1] if produced is not None else self.loss_from
        samples = self.samples
        self.last_is_same = samples is not None and len(values) == samples > 1 and _equal_rows(values)

    def _follow(self, name: str, given: list[Tensor], made: list[Tensor], here: Any) -> None:
        """Which parameters a value was computed from, and where the connection to them ends."""
        sources: frozenset[int] = frozenset()
        for one in given:
            known = self._sources.get(id(one))
            sources |= known[1] if known is not None else frozenset({id(one)}) if isinstance(one, torch.nn.Parameter) else frozenset()
        if not sources or len(sources) > _MOST_SOURCES:
            return
        was_connected = any(one.requires_grad for one in given)
        if was_connected and not any(one.requires_grad for one in made):
            self.cuts.append(Cut(name, here(), sources, no_grad=not torch.is_grad_enabled()))
        for one in made:
            self._sources[id(one)] = one, sources

    def sources_of(self, tensor: Tensor) -> frozenset[int]:
        """The parameters that it was computed from, by id."""
        return self._sources[id(tensor)][1] if id(tensor) in self._sources else frozenset()

    def _activation(self, name: str, given: Tensor, made: Tensor, place: Location | None) -> None:
        module = self.running[-1] if self.running else ""
        one = Activation(name, given.detach(), place, module, self.feeder, _is_dead(name, made.detach()))
        self._produced[id(made)] = made, one
        self.activations.append(one)

    def _rows(self, given: list[Tensor], made: list[Tensor], here: Any) -> None:
        samples = self.samples
        if samples is None or samples < 2 or self.same_rows is not None or not self.running or not made:  # noqa: PLR2004
            return
        result = made[0]
        if result.dim() < 2 or len(result) != samples or not result.is_floating_point() or not _equal_rows(result):  # noqa: PLR2004
            return
        if any(one.dim() and len(one) == samples and not _equal_rows(one) for one in given if not isinstance(one, torch.nn.Parameter)):
            self.same_rows = here(), self.running[-1]


class FunctionCalls(TorchFunctionMode):
    """Sees every call of torch's functions in a step, and may answer one in its place."""

    def __init__(self, seen: ObservedStep | None, on_call: Any) -> None:
        super().__init__()
        self._seen = seen
        self._on_call = on_call

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        instead = None if self._on_call is None else self._on_call(func, args, kwargs)
        if instead is not None:
            func, args, kwargs = instead
        try:
            result = func(*args, **kwargs)
        except Exception:
            if self._seen is not None and func in LOSSES:
                self._seen.called(func, args, kwargs, None)
            raise
        if self._seen is not None:
            self._seen.called(func, args, kwargs, result)
        return result


def called_name(function: Any) -> str:
    """``relu``; of an attribute of a tensor, its name."""
    name = str(getattr(function, "__name__", ""))
    return (
        str(getattr(getattr(function, "__self__", None), "__name__", name))
        if name == "__get__"
        else name.rstrip("_")
        if not name.startswith("__")
        else name
    )


def _is_dead(name: str, result: Tensor) -> bool:
    if result.numel() < 2 or not result.is_floating_point():  # noqa: PLR2004 - of one number nothing can be said
        return False
    if name in {"relu", "relu6", "gelu", "silu"}:
        return bool((result.abs() < _ZERO).float().mean() >= _DEAD)
    if name == "tanh":
        return bool((result.abs() > 1 - _SATURATED).float().mean() >= _DEAD)
    if name == "sigmoid":
        return bool(((result < _SATURATED) | (result > 1 - _SATURATED)).float().mean() >= _DEAD)
    return False


def _equal_rows(values: Tensor) -> bool:
    return bool((values == values[:1]).all())
