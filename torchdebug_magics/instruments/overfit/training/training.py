"""One training on the same samples, from the kept start, with one change or none."""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from torchdebug_magics.instruments.overfit.batches import is_label, refuse_sharded
from torchdebug_magics.instruments.overfit.training.change import NOTHING, TrainingChange, Undo
from torchdebug_magics.instruments.overfit.training.loss_calls import Goal
from torchdebug_magics.instruments.overfit.training.observed_step import FunctionCalls, ObservedStep
from torchdebug_magics.probing.dispatch import take_function_mode_off
from torchdebug_magics.probing.dry_runs.inputs import rebuilt
from torchdebug_magics.probing.hooks import Hooks
from torchdebug_magics.probing.modules import unwrapped
from torchdebug_magics.probing.safety import quiet
from torchdebug_magics.probing.state.rng import RandomState
from torchdebug_magics.probing.steps import ParameterFacts, facts_of
from torchdebug_magics.probing.tensors import tensors_in

_SURE = 2
"""So many steps one after the other have to be good."""
_HALF, _NO_BETTER = 2, 0.8
"""A trial that is no better by then is given up."""
_EVERY = 10
_BY_HEART = 0.5
"""Of the loss by chance."""


@dataclass(eq=False)
class Training:
    """Watches a training while `Steps` makes it."""

    steps: Steps
    most_steps: int
    hooks: Hooks
    change: TrainingChange = NOTHING
    told: Callable[[list[float]], None] = lambda _: None
    losses: list[float] = field(default_factory=list)
    goal: Goal | None = None
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
    is_zeroed: bool = False
    """Whether the update found no gradients, though the backward pass had made some."""
    loss_scale: float = 1.0
    """How many times the value of the loss functions the loss is that was differentiated."""
    summed: int = 1
    """Over how many numbers the loss is a plain sum."""
    last_rate: float | None = None
    """The largest learning rate of the last update."""
    backwards: int = 0
    learned: bool = False
    other_loss: float | None = None
    """With other random numbers, where that is no learned loss."""
    error: BaseException | None = None
    _good: int = 0
    """How many of the last steps were good."""
    _is_checking: bool = False
    """Whether the step is one more, with other random numbers."""
    _seen: ObservedStep | None = None
    """The present step, where it is the first or the last."""
    _watched: ObservedStep | None = None
    """The same, or one of which only the loss functions are asked for."""
    _values: list[float] = field(default_factory=list)
    """What was differentiated in this step."""
    _kept: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    """Parameters with their gradients, after the backward pass."""
    _updated: bool = True
    """Whether no backward pass was made since an update."""
    _was_zeroed: bool = False
    _paths: dict[int, str] = field(default_factory=dict)
    _undo: list[Undo] = field(default_factory=list)

    def run(self) -> None:
        """All steps; what the user's code raises is kept."""
        with quiet(), self.opened():
            try:
                self.steps.run(self)
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
            self.hooks.zeroed_gradients(stack, self._zeroing)
            for name, model in self.steps.models.items():
                self._meet(name, model)
            try:
                yield
            finally:
                self._after_update()
                self._step_stack.close()
        if self.goal is None:
            self._summarise()

    # --- the steps ---------------------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """A step begins: with the same random numbers as every other."""
        self._random.put_back()
        if self._is_checking:
            other_numbers()
        self._values.clear()
        self._step_stack = self._stack.enter_context(ExitStack())
        self._seen = self._watched = self.last if self.losses else self.first
        if self._seen is not None:
            self.hooks.module_calls(self._step_stack, self._called, self._returned)
            for model in self.models.values():
                self.hooks.own_calls(self._step_stack, model, self._given, lambda *_: None)
        elif self.goal is not None and not self.goal.is_known and self.first.losses:
            self._watched = ObservedStep()
        if self._watched is not None or self.change.on_call is not None:
            mode = FunctionCalls(self._watched, self.change.on_call)
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
        if self.goal is not None and self._is_checking:
            self.other_loss = value if value - self.goal.floor > _BY_HEART * self.goal.reference else None
            return True
        self.losses.append(value)
        if self.goal is None:
            self.goal = Goal.of(self.first.losses, value, self.first.inputs)
            self._summarise()
        many, goal = len(self.losses), self.goal
        good = goal.learned(value, self._watched.losses if self._watched is not None else [])
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

    # --- models --------------------------------------------------------------------------------------------------------------------

    def named_parameters(self) -> dict[str, torch.nn.Parameter]:
        """Of all models; of several, after the model's name."""
        return {_joined(name, path, self.models): one for name, model in self.models.items() for path, one in model.named_parameters()}

    def named_modules(self) -> dict[str, torch.nn.Module]:
        """The same."""
        return {_joined(name, path, self.models): one for name, model in self.models.items() for path, one in model.named_modules()}

    def _meet(self, name: str, model: torch.nn.Module) -> None:
        refuse_sharded(model.parameters())
        self.models[name] = model = unwrapped(model)
        without_dropout(model)
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

    # --- backward passes and updates -------------------------------------------------------------------------------------------------

    def _backward(self, original: Callable[..., Any], tensors: Any, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        losses = [tensor for tensor in tensors_in(tensors) if tensor.numel() == 1]
        self._values.append(sum(float(loss.detach()) for loss in losses))
        is_first, is_second = self._seen is self.first, self._updated and len(self.losses) == 1 and self._seen is None
        named = self.named_parameters() if self._seen is not None or self.change is not NOTHING or is_second else {}
        if is_second:
            self.accumulates = any(one.grad is not None and bool(one.grad.any()) for one in named.values())
        self._updated = False
        if self.change.backward_scale != 1.0 and len(losses) == 1:
            tensors = losses[0] * self.change.backward_scale
        if is_first:
            self.backwards += 1
            for one in losses:
                self.summed = self.first.differentiated(one)
        result = original(tensors, *args, **kwargs)
        if is_first or self.change.keeps_gradients:
            self._kept = [(one, one.grad.detach().clone()) for one in named.values() if one.grad is not None]
        return result

    def _zeroing(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        self._was_zeroed = self._was_zeroed or (self._seen is self.first and not self._updated)
        return original(*args, **kwargs)

    def _before_update(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        self._updated = True
        if not any(optimizer is one for one in self.optimizers):
            self.optimizers.append(optimizer)
        self.last_rate = max((float(group["lr"]) for group in optimizer.param_groups if "lr" in group), default=None)
        if self._seen is self.first and self.clipped is None:
            before = _norm([kept for _, kept in self._kept])
            now = _norm([one.grad for one, _ in self._kept if one.grad is not None])
            self.clipped = (before, now) if now < before / 2 else None
            self.is_zeroed = before > 0 and now == 0 and self._was_zeroed
        if self.change.keeps_gradients:
            for one, kept in self._kept:
                one.grad = kept
        undo = None if self.change.on_update is None else self.change.on_update(optimizer)
        self._undo += [] if undo is None else [undo]

    def _after_update(self, *_: Any) -> None:
        while self._undo:
            self._undo.pop()()

    def _summarise(self) -> None:
        """What the first step shows of parameters; its own tensors are then forgotten."""
        used = {name: one for name, one in self.named_parameters().items() if id(one) in self.first.used}
        self.facts = facts_of(used, self.optimizers, {id(one): gradient for one, gradient in self._kept})
        whole = sum(call.value for call in self.first.losses)
        if self._values and whole and math.isfinite(whole):
            self.loss_scale = sum(self._values) / whole
        self.first.forget()


def _numbers(loss: Any) -> list[float]:
    """The loss of a step, or of each batch of an epoch; none where it cannot be told."""
    if isinstance(loss, list):
        return [number for one in loss for number in _numbers(one)]
    if isinstance(loss, (int, float)):
        return [float(loss)]
    return [float(tensor.detach().float().sum()) for tensor in tensors_in(loss)][:1]


def _joined(name: str, path: str, models: Mapping[str, Any]) -> str:
    return path if len(models) == 1 else f"{name}.{path}".rstrip(".")


def _norm(tensors: list[torch.Tensor]) -> float:
    return math.sqrt(sum(float(tensor.float().square().sum()) for tensor in tensors))


def other_numbers() -> None:
    """Let every generator go on from another place."""
    torch.rand(1)
    random.random()  # noqa: S311 - not for secrets
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.random()


def without_dropout(model: torch.nn.Module) -> None:
    """What is dropped at random tells equal samples apart; to be undone with the training."""
    for part in model.modules():
        if isinstance(part, torch.nn.modules.dropout._DropoutNd):
            part.p = 0.0
        elif isinstance(part, (torch.nn.RNNBase, torch.nn.MultiheadAttention)):
            part.dropout = 0.0


class Steps(Protocol):
    """How the steps of a training are made."""

    models: Mapping[str, torch.nn.Module]
    """Those that are known beforehand, by name."""

    def run(self, training: Training) -> None:
        """Call `training.begin`, make a step, and call `training.end` with its loss, until that says so."""
