"""What one training step does, with where each value came from; and what a trial does otherwise, with the calls it makes instead."""

from __future__ import annotations

import inspect
import math
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import cache
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - as everybody writes it
from torch.overrides import TorchFunctionMode

from torchdebug_magics.instruments.overfit.report import Cause
from torchdebug_magics.probing.source.user_code import frames_above, locate, owner
from torchdebug_magics.probing.tensors import tensors_in
from torchdebug_magics.report import Location

OnCall: TypeAlias = Callable[[Any, tuple[Any, ...], dict[str, Any]], tuple[Any, tuple[Any, ...], dict[str, Any]] | None]
"""The call that is made in place of a call of torch's, or None."""
Undo: TypeAlias = Callable[[], None]
CLASSES = (F.cross_entropy, F.nll_loss)
BINARY = (F.binary_cross_entropy, F.binary_cross_entropy_with_logits)
DISTANCES = (F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss)
LOSSES: tuple[Any, ...] = (*CLASSES, *BINARY, *DISTANCES, F.kl_div, F.ctc_loss)
_MOST_LAG = 4
_NEAR = 0.01
_NORMALIZING, _RECTIFYING = frozenset({"softmax", "log_softmax"}), frozenset({"relu", "relu6", "gelu", "silu"})
_SATURATING, _CLIPPING = frozenset({"sigmoid", "tanh"}), frozenset({"hardsigmoid", "hardtanh"})
ACTIVATIONS = _NORMALIZING | _RECTIFYING | _SATURATING | _CLIPPING | {"logsigmoid", "leaky_relu", "softplus"}
_VIEWS = frozenset(
    {"view", "reshape", "squeeze", "unsqueeze", "flatten", "transpose", "permute", "__getitem__", "float", "contiguous", "t", "to", "clone"}
)
_ASKED = frozenset({"requires_grad", "is_leaf", "shape", "dtype", "device", "dim", "size", "grad", "grad_fn", "ndim"})
SUBTRACTIONS = frozenset({"sub", "__sub__", "__rsub__", "rsub"})
_FLAT = frozenset({"round", "floor", "ceil", "trunc", "sign", "sgn", "heaviside"})
"""Functions whose derivative is 0 everywhere."""
_AS_NUMBERS = frozenset({"item", "numpy", "tolist"})
_SAME = 1e-4
"""Relative to the largest number: what normalizing a constant leaves of rounding is less."""
_ZERO, _SATURATED, _DEAD = 1e-6, 1e-4, 0.98
_MOST_SOURCES = 4096


class LossCall:
    """One call; tensors are detached, and share memory with the step's."""

    def __init__(
        self, function: Any, values: Tensor, target: Tensor, options: dict[str, Any], location: Location | None, result: Any
    ) -> None:
        self.function, self.input, self.target, self.options, self.location = function, values, target, options, location
        self.name = str(function.__name__)
        self.is_classes = function in CLASSES and not target.is_floating_point()
        """Whether the target holds class indices."""
        self.classes = values.shape[1] if values.dim() > 1 else values.shape[-1] if values.dim() else 1
        """How many there are."""
        self.ignored = int(options.get("ignore_index", -100))
        """The label that is none."""
        self.labels = target[target != self.ignored].flatten() if self.is_classes else target
        """Without those that are ignored."""
        terms = len(self.labels) if self.is_classes else target.numel()
        self.size = float(terms or not self.is_classes) if options.get("reduction", "mean") == "sum" else 1.0
        """How many times the mean the result is."""
        self.value = math.nan
        """The result, or the mean of one that is not a scalar; NaN where it raised."""
        if isinstance(result, Tensor) and result.numel():
            counted = terms if self.is_classes and result.dim() else result.numel()
            self.value = float(result.detach().float().sum()) / max(1, counted)

    @property
    def is_contrast(self) -> bool:
        """Whether each sample is compared with all of the batch: how low such a loss becomes depends on its temperature."""
        is_square = self.is_classes and self.input.dim() == 2 and len(self.input) == self.classes  # noqa: PLR2004
        return is_square and self.target.flatten().tolist() == list(range(self.classes))

    def floor(self) -> float:
        """The least mean loss for these targets."""
        if self.is_classes and (smoothing := float(self.options.get("label_smoothing") or 0.0)):
            shares = torch.full((self.classes,), smoothing / self.classes, dtype=torch.float64)
            shares[0] += 1 - smoothing
            return float(torch.special.entr(shares).sum())
        if self.function is F.cross_entropy and not self.is_classes:
            return float(torch.special.entr(self.target).sum(1).mean())
        target = self.target.float().clamp(0, 1)
        return float((torch.special.entr(target) + torch.special.entr(1 - target)).mean()) if self.function in BINARY else 0.0

    def words_ahead(self, inputs: Sequence[Tensor]) -> tuple[Tensor, Tensor, int] | None:
        """Of a language model: (its input, the labels by sample, by how many words these are ahead of the input); None of any other."""
        ids = next((tensor for tensor in inputs if tensor.dim() == 2 and not tensor.is_floating_point()), None)  # noqa: PLR2004 - samples and words
        if ids is None or not self.is_classes or not len(ids) or self.target.numel() % len(ids):
            return None
        labels = self.target.reshape(len(ids), -1)
        for lag in range(_MOST_LAG):
            many = min(labels.shape[1], ids.shape[1] - lag)
            counted = labels[:, :many] != self.ignored
            # One word may agree by chance.
            if many > 1 and bool(counted.any()) and bool((labels[:, :many] == ids[:, lag : lag + many])[counted].all()):
                return ids, labels, lag
        return None

    def floor_of_next_words(self, inputs: Sequence[Tensor]) -> float:
        """The least mean loss of a model that sees the words so far: sentences that begin alike go on in different ways."""
        known = self.words_ahead(inputs)
        if known is None or known[2] != 1:
            return 0.0
        ids, labels, _ = known
        seen: dict[tuple[int, ...], list[int]] = {}
        for sentence, following in zip(ids.tolist(), labels.tolist(), strict=True):
            for place, label in enumerate(following):
                if label != self.ignored:
                    seen.setdefault(tuple(sentence[: place + 1]), []).append(label)
        lost = sum(-many * math.log(many / len(words)) for words in seen.values() for many in Counter(words).values())
        return lost / max(1, sum(map(len, seen.values())))

    def chance(self) -> float | None:
        """The mean loss of the prediction that knows nothing: equal shares for classes, the mean of the targets for distances."""
        if self.function in CLASSES:
            return math.log(max(2, self.classes))
        if self.function in BINARY:
            return math.log(2)
        if self.function in DISTANCES:
            target = self.target.float()
            at = target.mean() if self.function is not F.l1_loss else target.median()
            return float(self.function(at.expand_as(target), target)) or None
        return None

    def entropy(self) -> float:
        """Of the class labels: the loss of their shares as prediction for every sample."""
        return float(torch.special.entr(self.labels.bincount().float() / max(1, len(self.labels))).sum())

    def stalls_at(self, loss: float) -> str:
        """The known value near which a faulty training stalls; empty where it is none of them."""
        if not self.is_classes or not len(self.labels):
            return ""
        many, entropy = self.classes, self.entropy()
        chance, twice = math.log(many), math.log(1 + (many - 1) / math.e)
        known = (
            (chance, f"ln {many} = {chance:.4g}: equal shares for all classes"),
            (twice, f"ln(1 + {many - 1}/e) = {twice:.4g}: softmax applied twice"),
            (entropy, f"{entropy:.4g}: the entropy of the labels, as if the input were not known"),
        )
        return next((name for value, name in known if abs(loss - value) <= _NEAR * value > 0), "")


def names_of(function: Any) -> tuple[str, str]:
    """How a loss function calls what it compares."""
    return ("log_probs", "targets") if function is F.ctc_loss else ("input", "target")


def bound(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments by name: what was passed, and the defaults; of a method of tensors, the first number as ``dim``."""
    if not hasattr(function, "__code__"):
        numbers = [argument for argument in args[1:2] if isinstance(argument, int)]
        return {**({"dim": numbers[0]} if numbers else {}), **kwargs}
    try:
        given = inspect.signature(function).bind(*args, **kwargs)
    except (TypeError, ValueError):
        return dict(kwargs)
    given.apply_defaults()
    return dict(given.arguments)


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
class CutGraph:
    """Where a value lost its connection to the parameters it was computed from."""

    name: str
    location: Location | None
    sources: frozenset[int]
    """The parameters, by id."""
    no_grad: bool


class Origin(NamedTuple):
    """What a value was computed from."""

    sources: frozenset[int] = frozenset()
    """The parameters, by id."""
    cuts: frozenset[int] = frozenset()
    """Where it lost its connection to them, as places in `ObservedStep.cuts`."""
    activation: Activation | None = None
    """The nonlinearity whose result it is, in another shape perhaps."""
    summed: int = 1
    """Over how many numbers it is a plain sum."""


@dataclass(eq=False)
class ObservedStep:
    """One step."""

    losses: list[LossCall] = field(default_factory=list)
    inputs: list[Tensor] = field(default_factory=list)
    """Tensors that the outermost models were given."""
    activations: list[Activation] = field(default_factory=list)
    cuts: list[CutGraph] = field(default_factory=list)
    used: set[int] = field(default_factory=set)
    """Parameters that the loss depends on, connected or not, by id."""
    lost: set[int] = field(default_factory=set)
    """Cuts that lie between the loss and parameters, as places in `cuts`."""
    before_backward: int = 0
    """How many cuts there were when the backward pass began."""
    backwards: int = 0
    total: float = 0.0
    """The sum of what was differentiated."""
    summed: int = 1
    """Over how many numbers that is a plain sum."""
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
    origins: dict[int, tuple[Tensor, Origin]] = field(default_factory=dict)
    unregistered: dict[str, torch.nn.Module] = field(default_factory=dict)
    """Modules with parameters that ran inside a model, and are no part of it, by what they are called."""

    @property
    def samples(self) -> int | None:
        """The length of the first dimension of the first input, where the loss has as many rows."""
        many = next((len(tensor) for tensor in self.inputs if tensor.dim()), 0)
        agrees = all(call.target.numel() % many == 0 for call in self.losses if call.target.dim()) if many else False
        return many if agrees else None

    def called(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """A call, and its result."""
        name = called_name(function)
        if name in _ASKED:
            return
        given = list(tensors_in((args, kwargs)))
        made = [tensor for tensor in tensors_in(result) if not any(tensor is other for other in given)] or list(tensors_in(result))
        here = cache(line_of_step)
        options = bound(function, args, kwargs) if function in LOSSES else {}
        values, target = (options.pop(part, None) for part in names_of(function))
        if isinstance(values, Tensor) and isinstance(target, Tensor):
            self.losses.append(LossCall(function, values.detach(), target.detach(), options, here(), result))
            self.loss_from = self.origin_of(values).activation or self.loss_from
            self.last_is_same = values.dim() > 0 and len(values) > 1 and _equal_rows(values.detach())
        origin = self._origin(name, given, made, here)
        if made and given and name in ACTIVATIONS:
            dim, module = bound(function, args, kwargs).get("dim"), self.running[-1] if self.running else ""
            if not isinstance(dim, int):  # over which dimension PyTorch normalizes where none is named
                dim = None if name not in _NORMALIZING else 0 if given[0].dim() in {0, 1, 3} else 1
            activation = Activation(name, given[0].detach(), dim, here(), module, self.feeder, _is_dead(name, made[0].detach()))
            self.activations.append(activation)
            origin = origin._replace(activation=activation)
        for one in made if any(origin[:3]) or origin.summed > 1 else ():
            self.origins[id(one)] = one, origin
        if not self.running and name in SUBTRACTIONS and len(given) == 2 and made:  # noqa: PLR2004 - both sides
            one, other = given
            if one.requires_grad != other.requires_grad and made[0].numel() > max(one.numel(), other.numel()) > 1:
                self.broadcast = self.broadcast or (here(), tuple(one.shape), tuple(other.shape))
        self._rows(given, made, here)

    def _origin(self, name: str, given: list[Tensor], made: list[Tensor], here: Any) -> Origin:
        """Which parameters a value was computed from, where the connection to them ends, and what was done last."""
        origins = [self.origin_of(one) for one in given]
        summed = given[0].numel() if given and name == "sum" and made and made[0].numel() == 1 else 1
        last = Origin(activation=origins[0].activation if origins and name in _VIEWS else None, summed=summed)
        sources = frozenset().union(*(origin.sources for origin in origins))
        if not sources or len(sources) > _MOST_SOURCES or name.endswith("_like") or name.startswith("new_"):
            return last
        cuts = frozenset().union(*(origin.cuts for origin in origins))
        is_end = name in _FLAT or not any(one.requires_grad for one in made)
        if is_end and any(one.requires_grad for one in given) and (made or name in _AS_NUMBERS):
            cuts |= {len(self.cuts)}
            self.cuts.append(CutGraph(name, here(), sources, no_grad=not torch.is_grad_enabled()))
        return last._replace(sources=sources, cuts=cuts)

    def origin_of(self, tensor: Tensor) -> Origin:
        """What it was computed from; a parameter, from itself."""
        if id(tensor) in self.origins:
            return self.origins[id(tensor)][1]
        return Origin(frozenset({id(tensor)})) if isinstance(tensor, torch.nn.Parameter) else Origin()

    def differentiated(self, losses: Sequence[Tensor]) -> None:
        """A backward pass begins from these losses."""
        self.backwards += 1
        self.before_backward = len(self.cuts)
        self.total += sum(float(loss.detach()) for loss in losses)
        for origin in map(self.origin_of, losses):
            self.used |= origin.sources
            self.lost |= origin.cuts
            self.summed = origin.summed

    @property
    def scale(self) -> float:
        """How many times the value of the loss functions the loss is that was differentiated."""
        whole = sum(call.value for call in self.losses)
        return self.total / whole if self.backwards and whole and math.isfinite(whole) else 1.0

    def _rows(self, given: list[Tensor], made: list[Tensor], here: Any) -> None:
        samples = self.samples or 0
        result = made[0].detach() if made and samples > 1 and self.running and self.same_rows is None else None
        if result is None or result.dim() < 2 or len(result) != samples or not result.is_floating_point():  # noqa: PLR2004 - no samples
            return
        batched = [each.detach() for each in given if each.dim() and len(each) == samples and not isinstance(each, torch.nn.Parameter)]
        scale = max((_largest(each) for each in batched if each.is_floating_point()), default=0.0)
        if not all(map(_equal_rows, batched)) and _equal_rows(result, scale):
            self.same_rows = here(), self.running[-1]


def _is_dead(name: str, result: Tensor) -> bool:
    """Whether nearly all values lie where the derivative is 0."""
    if result.numel() < 2 or not result.is_floating_point():  # noqa: PLR2004 - of one number nothing can be said
        return False
    ends = torch.zeros_like(result, dtype=torch.bool)
    if name in _RECTIFYING:
        ends = result.abs() < _ZERO
    elif name in _CLIPPING:
        ends = ((result == result.max()) | (result == result.min())) & (result.max().abs() <= 1) & (result.max() == result.max().round())
    elif name in _SATURATING:
        ends = (result > 1 - _SATURATED) | (result < (_SATURATED if name == "sigmoid" else _SATURATED - 1))
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
    if name == "__get__":
        return str(getattr(getattr(function, "__self__", None), "__name__", name))
    return name if name.startswith("__") else name.rstrip("_")


@dataclass(frozen=True)
class TrainingChange:
    """Exactly one thing that is done otherwise. Whatever it does to objects is undone with the trial."""

    suspect: Cause | None = None
    """None for what is not one of the suspects by name."""
    headline: str = ""
    """What is wrong, should the trial learn."""
    fix: str = ""
    _: KW_ONLY
    text: str = ""
    """``learning rate x1000``: for the table of trials; empty where the fix says it."""
    parameters: tuple[str, ...] = ()
    rows: tuple[int, ...] = ()
    factor: float | None = None
    location: Location | None = None
    module: str = ""
    on_models: Callable[[Mapping[str, Any]], None] | None = None
    """Before the first step: modules and parameters by name."""
    on_call: OnCall | None = None
    on_input: Callable[[Tensor], Tensor] | None = None
    """For each floating-point input of the outermost models."""
    on_update: Callable[[Any, torch.optim.Optimizer], Undo | None] | None = None
    """Before each update of the training; what it gives is called after it."""
    on_end: Undo | None = None
    """At the end of each step."""
    backward_scale: float = 1.0
    """By which all gradients are multiplied."""
    keeps_gradients: bool = False
    """Whether the update is made with the gradients of the backward pass, whatever has changed them since."""
    is_evident: bool = False
    """Whether it is a fault in any case, and named where no trial learns."""

    @property
    def can_be_tried(self) -> bool:
        """Whether it changes anything; what is only named has no trial."""
        hooks = (self.on_models, self.on_call, self.on_input, self.on_update, self.on_end)
        return any(hook is not None for hook in hooks) or self.keeps_gradients or self.backward_scale != 1.0


NOTHING = TrainingChange()
"""The training as it is."""
