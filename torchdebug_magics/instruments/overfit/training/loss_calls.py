"""Calls of PyTorch's loss functions: what they were given, and the values that their result can be compared with."""

from __future__ import annotations

import inspect
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - as everybody writes it

from torchdebug_magics.report import Location

CLASSES = (F.cross_entropy, F.nll_loss)
BINARY = (F.binary_cross_entropy, F.binary_cross_entropy_with_logits)
DISTANCES = (F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss)
LOSSES: tuple[Any, ...] = (*CLASSES, *BINARY, *DISTANCES, F.kl_div, F.ctc_loss)
_NEAR = 1e-3
_MOST_LAG = 4
_SHARE = 0.05
"""Of what is lost by chance: less than that is as good as learned."""
_MOST = 0.1
"""Nats a label: of a large vocabulary, 5 % would still be a wrong word in two."""
_SAME = 0.01
_TIMES = 2.0
"""A first loss that is further above what chance gives is no measure."""
_TINY = 1e-6
_TAIL = 4
"""The trend is that of the last quarter."""
_STATIONARY = 0.01


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
            rest = smoothing / self.classes
            peak = 1 - smoothing + rest
            return -peak * math.log(peak) - (self.classes - 1) * rest * math.log(rest)
        if self.function is F.cross_entropy and not self.is_classes:
            return float(torch.special.entr(self.target).sum(1).mean())
        if self.function in BINARY:
            target = self.target.float().clamp(0, 1)
            return float((torch.special.entr(target) + torch.special.entr(1 - target)).mean())
        return 0.0

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
        for words, following in zip(ids.tolist(), labels.tolist(), strict=True):
            for place, label in enumerate(following):
                if label != self.ignored:
                    seen.setdefault(tuple(words[: place + 1]), []).append(label)
        counts = [(len(found), Counter(found).values()) for found in seen.values()]
        many = sum(size for size, _ in counts)
        return sum(-share * math.log(share / size) for size, shares in counts for share in shares) / max(1, many)

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
        shares = self.labels.bincount().float() / max(1, len(self.labels))
        return float(torch.special.entr(shares).sum())

    def known_values(self) -> dict[str, float]:
        """Losses at which a faulty training stalls, by what they are called."""
        if not self.is_classes or not len(self.labels):
            return {}
        many, entropy = self.classes, self.entropy()
        chance, twice = math.log(many), math.log(1 + (many - 1) / math.e)
        named = {
            f"ln {many} = {chance:.4g}: equal shares for all classes": chance,
            f"ln(1 + {many - 1}/e) = {twice:.4g}: softmax applied twice": twice,
            f"{entropy:.4g}: the entropy of the labels, as if the input were not known": entropy,
        }
        return {name: value for name, value in named.items() if value > 0}


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


def is_probabilities(values: Tensor, dim: int = 1) -> bool:
    """Whether the numbers are shares that sum to 1 over the dimension of classes."""
    if values.dim() <= dim or values.shape[dim] < 2 or not values.numel():  # noqa: PLR2004 - one class alone is no distribution
        return False
    values = values.float()
    return bool((values >= 0).all()) and bool(((values.sum(dim) - 1).abs() < _NEAR).all())


@dataclass(frozen=True)
class Goal:
    """What the loss is compared with."""

    floor: float
    reference: float
    """Distance from the floor of the first loss, if that is not far above what chance gives."""
    chance: float | None
    is_known: bool
    """Whether the loss is that of PyTorch's functions, and nothing besides."""

    @classmethod
    def of(cls, calls: Sequence[LossCall], total: float, inputs: Sequence[Tensor] = ()) -> Goal:
        """From the loss functions that the first step has called, its loss, and what the model was given."""
        whole = sum(call.value for call in calls)
        scales = (1.0, 1 / max(1, len(calls)))
        scale = next((scale for scale in scales if math.isclose(scale * whole, total, rel_tol=_SAME) and math.isfinite(total)), None)
        if not calls or scale is None or any(call.is_contrast for call in calls):
            return cls(0.0, abs(total), None, is_known=False)
        chances = [call.chance() for call in calls]
        floor = scale * sum(max(call.floor(), call.floor_of_next_words(inputs)) * call.size for call in calls)
        known = [scale * chance * call.size for chance, call in zip(chances, calls, strict=True) if chance is not None]
        chance = sum(known) if len(known) == len(calls) else None
        usual = (chance if chance is not None else total) - floor
        return cls(floor, min(max(total - floor, usual), _TIMES * usual), chance, is_known=True)

    def learned(self, loss: float, calls: Sequence[LossCall] = ()) -> bool:
        """Whether a step's loss is as good as its floor; of a loss with further terms, whether those are that depend on the targets."""
        if calls and not self.is_known and all(_is_low(call) for call in calls):
            return True
        reference = max(self.reference, 0.0)
        return math.isfinite(loss) and -_SAME * reference - _TINY <= loss - self.floor <= _SHARE * reference

    def nearly(self, losses: Sequence[float], quarters: int) -> bool:
        """Whether the loss falls so fast that so many further quarters of the steps are likely to be enough."""
        before, now = (mean - self.floor for mean in _last_quarters(losses))
        target = _SHARE * self.reference
        if not target > 0 or not 0 < now < before:
            return now <= target
        return math.log(now / target) / math.log(before / now) <= quarters

    def has_converged(self, losses: Sequence[float], share: float = _STATIONARY) -> bool:
        """Whether a loss with further terms has fallen, and in its last quarter by no more than a share of that."""
        before, now = _last_quarters(losses)
        return losses[0] - now > _SHARE * abs(losses[0]) and abs(before - now) <= share * (losses[0] - now)


def _last_quarters(losses: Sequence[float]) -> tuple[float, float]:
    """The means of the last two quarters; NaN where they are too short for a trend, or not finite."""
    tail = len(losses) // _TAIL
    if tail < 2 or not all(map(math.isfinite, losses[-2 * tail :])):  # noqa: PLR2004 - a trend needs two values
        return math.nan, math.nan
    return sum(losses[-2 * tail : -tail]) / tail, sum(losses[-tail:]) / tail


def _is_low(call: LossCall) -> bool:
    chance, value = call.chance(), call.value / call.size
    if not math.isfinite(value):
        return False
    excess = value - call.floor()
    if chance is None:
        return abs(excess) <= _SHARE
    return excess <= min(_SHARE * (chance - call.floor()), _MOST if call.is_classes else math.inf)


NO_GOAL = Goal(0.0, 0.0, None, is_known=False)
"""Before a step has ended."""
