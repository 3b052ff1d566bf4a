"""One training on the same samples, from the kept start, with one change or none; and what the suspects of a stalled one are found by."""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from torchdebug_magics.errors import refuse
from torchdebug_magics.format import plural
from torchdebug_magics.instruments.overfit.training.observed_step import (
    NOTHING,
    FunctionCalls,
    LossCall,
    ObservedStep,
    TrainingChange,
    Undo,
)
from torchdebug_magics.probing.dispatch import take_function_mode_off
from torchdebug_magics.probing.dry_runs.inputs import rebuilt
from torchdebug_magics.probing.hooks import Hooks
from torchdebug_magics.probing.modules import unwrapped
from torchdebug_magics.probing.safety import Guard, quiet
from torchdebug_magics.probing.source.lines import Line
from torchdebug_magics.probing.state.rng import RandomState
from torchdebug_magics.probing.state.snapshot import KeptState
from torchdebug_magics.probing.steps import EventWatch, ParameterFacts, facts_of, named_in
from torchdebug_magics.probing.storages import is_shard
from torchdebug_magics.probing.tensors import tensors_in

LABELS = ("labels", "label", "targets", "target", "y", "label_ids", "start_positions")
_SURE = 2
"""So many steps one after the other have to be good."""
_HALF, _NO_BETTER = 2, 0.8
"""A trial that is no better by then is given up."""
_EVERY = 10
_BY_HEART = 0.5
"""Of the loss by chance."""
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
    def of(cls, calls: Sequence[LossCall], total: float, inputs: Sequence[torch.Tensor] = ()) -> Goal:
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
    chance, floor = call.chance(), call.floor()
    excess = call.value / call.size - floor
    if chance is None:
        return abs(excess) <= _SHARE
    return -math.inf < excess <= min(_SHARE * (chance - floor), _MOST if call.is_classes else math.inf)


@dataclass(eq=False)
class Training:
    """Watches a training while `make_steps` makes it."""

    make_steps: Callable[[Training], None]
    """Calls `begin`, makes a step, and calls `end`, until that says so."""
    known: Mapping[str, torch.nn.Module]
    """The models that are known beforehand, by name."""
    most_steps: int
    hooks: Hooks
    change: TrainingChange = NOTHING
    told: Callable[[list[float]], None] = lambda _: None
    losses: list[float] = field(default_factory=list)
    goal: Goal = Goal(0.0, 0.0, None, is_known=False)
    first: ObservedStep = field(default_factory=ObservedStep)
    last: ObservedStep | None = None
    models: dict[str, torch.nn.Module] = field(default_factory=dict)
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)
    facts: dict[str, ParameterFacts] = field(default_factory=dict)
    """Those of each parameter whose module ran, with the gradients of the first backward pass."""
    accumulates: bool = False
    """Whether a backward pass began with the gradients of the step before."""
    clipped: tuple[float, float] | None = None
    """The gradient norm after the first backward pass, and before the update, where it was made smaller."""
    zeroed: Line | None = None
    """Where gradients were zeroed before the first update, which then found none."""
    last_rate: float | None = None
    """The largest learning rate of the last update."""
    learned: bool = False
    other_loss: float | None = None
    """With other random numbers, where that is no learned loss."""
    error: BaseException | None = None
    _good: int = 0
    """How many of the last steps were good."""
    _is_checking: bool = False
    """Whether the step is one more, with other random numbers."""
    _seen: ObservedStep | None = None
    """The present step, where it is the first or the last, or one of which the loss functions are asked for."""
    _values: list[float] = field(default_factory=list)
    """What was differentiated in this step."""
    _kept: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    """Parameters with their gradients, after the backward pass."""
    _updated: bool = True
    """Whether no backward pass was made since an update."""
    _paths: dict[int, str] = field(default_factory=dict)
    _undo: list[Undo] = field(default_factory=list)

    def run(self) -> None:
        """All steps; what the user's code raises is kept."""
        with quiet(), self.opened():
            try:
                self.make_steps(self)
            except Exception as error:  # noqa: BLE001 - the user's own code: that it fails is what is reported
                self.error = error

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Inside, steps may be made."""
        self._random = RandomState.take()
        with ExitStack() as stack:
            self._stack, self._step_stack = stack, ExitStack()
            self.hooks.autograd_calls(stack, "backward", self._backward)
            self.hooks.optimizer_steps(stack, self._before_update, self._after_update)
            self.events = EventWatch(self.hooks, Guard())
            self.events.attach(stack)
            for name, model in self.known.items():
                self._meet(name, model)
            try:
                yield
            finally:
                self._after_update()
                self._step_stack.close()
        if not self.losses:
            self._summarise()

    def begin(self) -> None:
        """A step begins: with the same random numbers as every other."""
        self._random.put_back()
        if self._is_checking:  # every generator goes on from another place
            torch.rand(1)
            random.random()  # noqa: S311 - not for secrets
            numpy = sys.modules.get("numpy")
            if numpy is not None:
                numpy.random.random()
        self._values.clear()
        self._step_stack = self._stack.enter_context(ExitStack())
        self._seen = self.last if self.losses else self.first
        if self._seen is not None:
            self.hooks.module_calls(self._step_stack, self._called, self._returned)
            for model in self.models.values():
                self.hooks.own_calls(self._step_stack, model, self._given, lambda *_: None)
        elif not self.goal.is_known and self.first.losses:
            self._seen = ObservedStep()
        if self._seen is not None or self.change.on_call is not None:
            mode = FunctionCalls(self._seen, self.change.on_call)
            self._step_stack.callback(take_function_mode_off, mode)
            mode.__enter__()

    def end(self, loss: Any = None) -> bool:
        """A step is over, with its loss, if it is known; whether this was the last one."""
        self._step_stack.close()
        if self.change.on_end is not None:
            self.change.on_end()
        numbers = _numbers(loss)
        value = sum(numbers) / len(numbers) if numbers else sum(self._values) if self._values else math.nan
        if self.last is not None:
            return True
        if self._is_checking:
            self.other_loss = value if value - self.goal.floor > _BY_HEART * self.goal.reference else None
            return True
        self.losses.append(value)
        if len(self.losses) == 1:
            self.goal = Goal.of(self.first.losses, value, self.first.inputs)
            self._summarise()
        many, goal = len(self.losses), self.goal
        good = goal.learned(value, self._seen.losses if self._seen is not None else [])
        self._good = self._good + 1 if good else 0
        # Gradients that add up may yet diverge.
        self.learned = (self._good >= _SURE and not self.accumulates) or (good and many >= self.most_steps)
        if many % _EVERY == 0 or many == 1:
            self.told(self.losses)
        is_trial = self.change is not NOTHING
        self._is_checking = self.learned and not is_trial
        if self._is_checking:
            return False
        if self.learned or not math.isfinite(value):
            return True
        if many >= self.most_steps:
            self.last = None if is_trial else ObservedStep()  # one more, to see where it has come to
            return is_trial
        is_half = is_trial and many == self.most_steps // _HALF
        return is_half and value - goal.floor > _NO_BETTER * max(self.losses[0] - goal.floor, goal.reference)

    @property
    def not_updated(self) -> tuple[str, ...]:
        """Parameters with a gradient that no optimizer holds."""
        return tuple(name for name, one in self.facts.items() if one.gradient and one.group is None) if self.optimizers else ()

    def named_parameters(self) -> dict[str, torch.nn.Parameter]:
        """Of all models; of several, after the model's name."""
        return named_in(self.models, "named_parameters")

    def named_modules(self) -> dict[str, torch.nn.Module]:
        """The same."""
        return named_in(self.models, "named_modules")

    def _meet(self, name: str, model: torch.nn.Module) -> None:
        refuse_sharded(model.parameters())
        self.models[name] = model = unwrapped(model)
        for part in model.modules():  # what is dropped at random tells equal samples apart; to be undone with the training
            if isinstance(part, torch.nn.modules.dropout._DropoutNd):
                part.p = 0.0
            elif isinstance(part, (torch.nn.RNNBase, torch.nn.MultiheadAttention)):
                part.dropout = 0.0
        self._paths = {id(module): path for path, module in self.named_modules().items()}
        if self.change.on_models is not None:
            self.change.on_models({**self.named_modules(), **self.named_parameters()})
        if self.change.on_input is not None:
            self.hooks.own_calls(self._stack, model, self._entered, lambda *_: None)

    def _entered(self, _module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        change = self.change.on_input

        def changed(tensor: torch.Tensor) -> torch.Tensor:
            return change(tensor) if change is not None and tensor.is_floating_point() else tensor

        return rebuilt(args, changed), rebuilt(kwargs, changed)

    def _given(self, _module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        if self._seen is not None and len(self._seen.running) <= 1:
            known = self._seen.inputs
            inputs = {name: value for name, value in kwargs.items() if not is_label(name)}
            known += [tensor for tensor in tensors_in((args, inputs)) if not any(tensor is other for other in known)]

    def _called(self, module: torch.nn.Module, args: Any) -> None:
        seen = self._seen
        if seen is None:
            return
        if not seen.running and id(module) not in self._paths and any(True for _ in module.parameters()):
            self._meet(f"model {len(self.models) + 1}" if self.models else "model", module)
        path, own = self._paths.get(id(module)), [id(parameter) for parameter in module._parameters.values() if parameter is not None]
        if path is None:
            if seen.running and own:
                seen.unregistered.setdefault(f"{type(module).__name__} {len(seen.unregistered)} in `{seen.running[-1] or 'model'}`", module)
            return
        if not seen.running:
            self._given(module, args, {})
        seen.running.append(path)
        if own:
            seen.feeder = path
            seen.used.update(own)

    def _returned(self, module: torch.nn.Module, _args: Any, _output: Any) -> None:
        seen = self._seen
        if seen is not None and seen.running and seen.running[-1] == self._paths.get(id(module)):
            seen.running.pop()

    def _backward(self, original: Callable[..., Any], tensors: Any, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        losses = [tensor for tensor in tensors_in(tensors) if tensor.numel() == 1]
        self._values.append(sum(float(loss.detach()) for loss in losses))
        if self._updated and len(self.losses) == 1:
            self.accumulates = any(one.grad is not None and bool(one.grad.any()) for one in self.named_parameters().values())
        self._updated = False
        if self._seen is self.first:
            self.first.differentiated(losses)
        if self.change.backward_scale != 1.0 and len(losses) == 1:
            tensors = losses[0] * self.change.backward_scale
        result = original(tensors, *args, **kwargs)
        if self._seen is self.first or self.change.keeps_gradients:
            self._kept = [(one, one.grad.detach().clone()) for one in self.named_parameters().values() if one.grad is not None]
        return result

    def _before_update(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        self._updated = True
        if not any(optimizer is one for one in self.optimizers):
            self.optimizers.append(optimizer)
        self.last_rate = max((float(group["lr"]) for group in optimizer.param_groups if "lr" in group), default=None)
        if self._seen is self.first and self.clipped is None:
            before = _norm([kept for _, kept in self._kept])
            now = _norm([one.grad for one, _ in self._kept if one.grad is not None])
            self.clipped = (before, now) if now < before / 2 else None
            self.zeroed = self.events.now.zeroed if before > 0 and now == 0 else None
        if self.change.keeps_gradients:
            for one, kept in self._kept:
                one.grad = kept
        undo = None if self.change.on_update is None else self.change.on_update(self, optimizer)
        self._undo += [] if undo is None else [undo]

    def _after_update(self, *_: Any) -> None:
        self.events.take()
        while self._undo:
            self._undo.pop()()

    def _summarise(self) -> None:
        """What the first step shows of parameters; its own tensors are then forgotten."""
        used = {name: one for name, one in self.named_parameters().items() if id(one) in self.first.used}
        self.facts = facts_of(used, self.optimizers, {id(one): gradient for one, gradient in self._kept})
        self.first.origins.clear()


class TrainingEvidence:
    """A stalled training."""

    def __init__(self, names: Mapping[str, str], base: Training, start: KeptState, samples: int | None, unusual: Mapping[str, str]) -> None:
        self.names, self.base, self.start, self.samples = names, base, start, samples
        self.unusual = unusual
        """Modules whose initial weights are unusual, and in which way."""
        groups = [group for optimizer in base.optimizers for group in optimizer.param_groups]
        self.rates = tuple(float(group["lr"]) for group in groups if "lr" in group)
        """Learning rates of all groups, at the start."""
        self.decay = max((float(group["weight_decay"]) for group in groups if "weight_decay" in group), default=0.0)
        self.scales = tuple(float(scaler.get_scale()) for scaler in start.of_kind(torch.amp.GradScaler) if scaler.is_enabled())
        """Of the gradient scalers in use, at the start."""
        self.model, self.optimizer = names.get("model") or next(iter(base.models), "model"), names.get("optimizer", "optimizer")
        """How the user writes them."""
        self.subject = "the batch" if samples is None else f"the {plural(samples, 'sample')}"


def _numbers(loss: Any) -> list[float]:
    """The loss of a step, or of each batch of an epoch; none where it cannot be told."""
    if isinstance(loss, list):
        return [number for one in loss for number in _numbers(one)]
    if isinstance(loss, (int, float)):
        return [float(loss)]
    return [float(tensor.detach().float().sum()) for tensor in tensors_in(loss)][:1]


def _norm(tensors: list[torch.Tensor]) -> float:
    return math.sqrt(sum(float(tensor.float().square().sum()) for tensor in tensors))


def repeated(step: Callable[[], Any], training: Training) -> None:
    """Make steps until the training says that it is over."""
    is_over = False
    while not is_over:
        training.begin()
        is_over = training.end(step())


def is_label(name: str) -> bool:
    """Whether an argument of that name is what the model is to learn."""
    return name in LABELS or "label" in name or "target" in name


def refuse_sharded(tensors: Iterable[torch.Tensor]) -> None:
    """Raise a `TorchDebugError` where one is a DTensor."""
    why = "the model is sharded over ranks: overfit it before `fully_shard`, `parallelize_module` or `distribute_tensor`"
    refuse(any(map(is_shard, tensors)), why)
