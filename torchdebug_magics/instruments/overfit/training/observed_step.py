"""What one training step does: its calls of torch's functions and modules, with where each value came from."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from torchdebug_magics.instruments.overfit.training.change import OnCall
from torchdebug_magics.instruments.overfit.training.loss_calls import LOSSES, LossCall, bound, names_of
from torchdebug_magics.probing.source.code_owner import frames_above, owner
from torchdebug_magics.probing.tensors import tensors_in
from torchdebug_magics.probing.where import locate
from torchdebug_magics.report import Location

_NORMALIZING, _RECTIFYING = frozenset({"softmax", "log_softmax"}), frozenset({"relu", "relu6", "gelu", "silu"})
_SATURATING, _CLIPPING = frozenset({"sigmoid", "tanh"}), frozenset({"hardsigmoid", "hardtanh"})
ACTIVATIONS = _NORMALIZING | _RECTIFYING | _SATURATING | _CLIPPING | {"logsigmoid", "leaky_relu", "softplus"}
_VIEWS = frozenset(
    {"view", "reshape", "squeeze", "unsqueeze", "flatten", "transpose", "permute", "__getitem__", "float", "contiguous", "t", "to", "clone"}
)
_ASKED = frozenset({"requires_grad", "is_leaf", "shape", "dtype", "device", "dim", "size", "grad", "grad_fn", "ndim"})
_FLAT = frozenset({"round", "floor", "ceil", "trunc", "sign", "sgn", "heaviside"})
"""Functions whose derivative is 0 everywhere."""
_AS_NUMBERS = frozenset({"item", "numpy", "tolist"})
_SAME = 1e-4
"""Relative to the largest number: what normalizing a constant leaves of rounding is less."""
_ZERO, _SATURATED, _DEAD = 1e-6, 1e-4, 0.98
_MOST_SOURCES = 4096


@dataclass(frozen=True, eq=False)
class Activation:
    """A call of a nonlinearity."""

    name: str
    given: Tensor
    dim: int | None
    """The dimension over which it normalizes."""
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


@dataclass(frozen=True)
class _Origin:
    """What a value was computed from."""

    sources: frozenset[int] = frozenset()
    cuts: frozenset[int] = frozenset()
    """Where it lost its connection, as places in `ObservedStep.cuts`."""


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
    lost: set[int] = field(default_factory=set)
    """Cuts that lie between the loss and parameters, as places in `cuts`."""
    before_backward: int = 0
    """How many cuts there were when the backward pass began."""
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
    _sums: dict[int, tuple[Tensor, int]] = field(default_factory=dict)
    _origins: dict[int, tuple[Tensor, _Origin]] = field(default_factory=dict)
    unregistered: dict[str, torch.nn.Module] = field(default_factory=dict)
    """Modules with parameters that ran inside a model, and are no part of it, by what they are called."""

    @property
    def samples(self) -> int | None:
        """The length of the first dimension of the first input, where the loss has as many rows."""
        many = next((len(one) for one in self.inputs if one.dim()), 0)
        agrees = all(call.target.numel() % many == 0 for call in self.losses if call.target.dim()) if many else False
        return many if agrees else None

    def forget(self) -> None:
        """Tensors of the step that are needed no more."""
        self._produced.clear()
        self._origins.clear()
        self._sums.clear()

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
                place.append(line_of_step())
            return place[0]

        if function in LOSSES:
            self._loss(function, args, kwargs, result, here())
        if not name.endswith("_like") and not name.startswith("new_"):
            self._follow(name, given, made, here)
        if made and given:
            self._made(name, function, args, kwargs, (given[0], made[0]), here)
        if not self.running and name in {"sub", "__sub__", "__rsub__", "rsub"} and len(given) == 2 and made:  # noqa: PLR2004 - both sides
            one, other = given
            if one.requires_grad != other.requires_grad and made[0].numel() > max(one.numel(), other.numel()) > 1:
                self.broadcast = self.broadcast or (here(), tuple(one.shape), tuple(other.shape))
        self._rows(given, made, here)

    def _made(
        self, name: str, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], pair: tuple[Tensor, Tensor], here: Any
    ) -> None:
        """What made a value, as far as it says something of a loss that is computed from it."""
        given, made = pair
        if name in ACTIVATIONS:
            self._activation(name, given, made, here(), bound(function, args, kwargs).get("dim"))
        elif name in _VIEWS and id(given) in self._produced:
            self._produced[id(made)] = made, self._produced[id(given)][1]
        elif name == "sum" and made.numel() == 1:
            self._sums[id(made)] = made, given.numel()

    def _loss(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, place: Location | None) -> None:
        options = bound(function, args, kwargs)
        values, target = (options.pop(name, None) for name in names_of(function))
        if not isinstance(values, Tensor) or not isinstance(target, Tensor):
            return
        self.losses.append(LossCall.of(function, values.detach(), target.detach(), options, place, result))
        produced = self._produced.get(id(values))
        self.loss_from = produced[1] if produced is not None else self.loss_from
        self.last_is_same = values.dim() > 0 and len(values) > 1 and _equal_rows(values.detach())

    def _follow(self, name: str, given: list[Tensor], made: list[Tensor], here: Any) -> None:
        """Which parameters a value was computed from, and where the connection to them ends."""
        origins = [self.origin_of(one) for one in given]
        sources = frozenset().union(*(one.sources for one in origins))
        if not sources or len(sources) > _MOST_SOURCES:
            return
        cuts = frozenset().union(*(one.cuts for one in origins))
        was_connected = any(one.requires_grad for one in given)
        is_end = name in _FLAT or not any(one.requires_grad for one in made)
        if was_connected and is_end and (made or name in _AS_NUMBERS):
            cuts |= {len(self.cuts)}
            self.cuts.append(Cut(name, here(), sources, no_grad=not torch.is_grad_enabled()))
        for one in made:
            self._origins[id(one)] = one, _Origin(sources, cuts)

    def origin_of(self, tensor: Tensor) -> _Origin:
        """The parameters that it was computed from, and where it lost them."""
        if id(tensor) in self._origins:
            return self._origins[id(tensor)][1]
        return _Origin(frozenset({id(tensor)})) if isinstance(tensor, torch.nn.Parameter) else _Origin()

    def differentiated(self, loss: Tensor) -> None:
        """A backward pass begins from this loss."""
        origin = self.origin_of(loss)
        self.before_backward = len(self.cuts)
        self.used |= origin.sources
        self.lost |= origin.cuts

    def summed_over(self, loss: Tensor) -> int:
        """Over how many numbers a loss is a plain sum; 1 where it is none."""
        return self._sums[id(loss)][1] if id(loss) in self._sums else 1

    def _activation(self, name: str, given: Tensor, made: Tensor, place: Location | None, dim: Any) -> None:
        module = self.running[-1] if self.running else ""
        if not isinstance(dim, int):  # over which dimension PyTorch normalizes where none is named
            dim = None if name not in _NORMALIZING else 0 if given.dim() in {0, 1, 3} else 1
        one = Activation(name, given.detach(), dim, place, module, self.feeder, _is_dead(name, made.detach()))
        self._produced[id(made)] = made, one
        self.activations.append(one)

    def _rows(self, given: list[Tensor], made: list[Tensor], here: Any) -> None:
        samples = self.samples
        if samples is None or samples < 2 or self.same_rows is not None or not self.running or not made:  # noqa: PLR2004
            return
        result = made[0].detach()
        if result.dim() < 2 or len(result) != samples or not result.is_floating_point():  # noqa: PLR2004 - no samples
            return
        batched = [one.detach() for one in given if one.dim() and len(one) == samples and not isinstance(one, torch.nn.Parameter)]
        if not batched:
            return
        scale = max((_largest(one) for one in batched if one.is_floating_point()), default=0.0)
        if _equal_rows(result, scale) and not all(map(_equal_rows, batched)):
            self.same_rows = here(), self.running[-1]


def _is_dead(name: str, result: Tensor) -> bool:
    if result.numel() < 2 or not result.is_floating_point():  # noqa: PLR2004 - of one number nothing can be said
        return False
    if name in _RECTIFYING:
        ends = result.abs() < _ZERO
    elif name in _CLIPPING:
        ends = ((result == result.max()) | (result == result.min())) & (result.max().abs() <= 1) & (result.max() == result.max().round())
    elif name in _SATURATING:
        ends = (result > 1 - _SATURATED) | (result < (_SATURATED if name == "sigmoid" else _SATURATED - 1))
    else:
        return False
    return bool(ends.float().mean() >= _DEAD)


def _equal_rows(values: Tensor, scale: float = 0.0) -> bool:
    """Whether all samples have the same numbers, but for rounding."""
    if not values.is_floating_point():
        return bool((values == values[:1]).all())
    tolerance = _SAME * max(scale, _largest(values)) if values.numel() else 0.0
    # Nearly always two rows already differ, and the others need not be read.
    return all(bool(((rows - values[:1]).abs() <= tolerance).all()) for rows in (values[1:2], values[2:]))


def _largest(values: Tensor) -> float:
    """The largest magnitude, of one reading and without memory."""
    return max(abs(float(end)) for end in values.aminmax()) if values.numel() else 0.0


class FunctionCalls(TorchFunctionMode):
    """Sees every call of torch's functions in a step, and may answer one in its place."""

    def __init__(self, seen: ObservedStep | None, on_call: OnCall | None) -> None:
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


def line_of_step() -> Location | None:
    """The innermost line of the user's code inside the step; None where a module of PyTorch's own is called by us."""
    is_inside = False
    for frame in frames_above(sys._getframe(1)):
        whose = owner(frame.f_code.co_filename)
        if whose == "user":
            return locate(frame)
        if whose == "own" and is_inside:
            return None
        is_inside = is_inside or whose != "own"
    return None


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
