"""What is trained, from the values on the magic's line: a model with a batch, a function that makes a step, or a trainer."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from torchdebug_magics.errors import TorchDebugError
from torchdebug_magics.instruments.overfit.subject.batches import Reading, cut, loss_of, readings, samples_in
from torchdebug_magics.instruments.overfit.subject.subset import subset
from torchdebug_magics.instruments.overfit.subject.trainers import parts_of_trainer
from torchdebug_magics.probing.modules import unwrapped
from torchdebug_magics.probing.written import called_from, writes_of

if TYPE_CHECKING:
    from torchdebug_magics.instruments.overfit.training.training import Training

__all__ = ["ModelSteps", "OwnSteps", "Subject", "subject_of"]

_RATE = 1e-3


@dataclass(eq=False)
class ModelSteps:
    """Steps of one model on one batch."""

    model: nn.Module
    reading: Reading
    loss_function: Any
    optimizer: torch.optim.Optimizer
    call: Any = None
    """What is called in place of the model, such as a compiled one."""
    others: tuple[Reading, ...] = ()
    """Further batches; a step is then an epoch."""
    models: dict[str, nn.Module] = field(default_factory=dict)

    def run(self, training: Training) -> None:
        """Until the training says so."""
        if not self.model.training:
            self.model.train()
        takes_closure = _needs_closure(self.optimizer)
        while True:
            training.begin()
            losses = [self._update(reading, takes_closure=takes_closure) for reading in (self.reading, *self.others)]
            if training.end(losses):
                return

    def _update(self, reading: Reading, *, takes_closure: bool) -> Any:
        def closure() -> Any:
            self.optimizer.zero_grad()
            loss = self.loss(reading)
            loss.backward()
            return loss

        if takes_closure:
            return self.optimizer.step(closure)
        loss = closure()
        self.optimizer.step()
        return loss

    def loss(self, reading: Reading) -> torch.Tensor:
        """One forward pass."""
        with torch.enable_grad():
            return loss_of(self.call(*reading.args, **reading.kwargs), reading.targets, self.loss_function)


@dataclass(eq=False)
class OwnSteps:
    """Steps that the user's own function makes."""

    step: Callable[[], Any]
    models: dict[str, nn.Module] = field(default_factory=dict)

    def run(self, training: Training) -> None:
        """Until the training says so."""
        while True:
            training.begin()
            if training.end(self.step()):
                return


@dataclass(frozen=True, eq=False)
class Subject:
    """What is trained."""

    steps: Any
    roots: tuple[object, ...]
    """What a step can reach."""
    samples: int | None
    names: Mapping[str, str]
    """How the user writes ``model``, ``optimizer`` and the others."""
    notes: tuple[str, ...] = ()
    model: ModelSteps | None = None


def subject_of(values: Sequence[Any], names: Sequence[str], keywords: Mapping[str, Any], samples: int) -> Subject:
    """From the values on the line. Raises `TorchDebugError` where they cannot be trained."""
    if not values:
        msg = "name what to train: `%overfit model batch loss_function optimizer`, or `%overfit step`"
        raise TorchDebugError(msg)
    first, first_name = values[0], (names[0] if names else "model")
    trainer = parts_of_trainer(first, values[1:])
    if trainer is not None:
        model, batch, loss_function, optimizer = trainer
        own = {"model": f"{first_name}.model", "optimizer": f"{first_name}.optimizer"}
        return _of_model(model, batch, loss_function, optimizer, samples, own, first)
    if isinstance(first, nn.Module):
        return _named(values, names, keywords, samples)
    if callable(first):
        found = _models_of(first)
        return Subject(OwnSteps(first, found), (first,), None, {"step": first_name})
    msg = f"the first value must be a model, a function that makes one step, or a trainer, not {type(first).__name__}"
    raise TorchDebugError(msg)


def _named(values: Sequence[Any], names: Sequence[str], keywords: Mapping[str, Any], samples: int) -> Subject:
    model, rest = values[0], list(zip(values[1:], [*names[1:], *([""] * len(values))], strict=False))
    known = {"batch", "loss_function", "optimizer"}
    for name in keywords:
        if name not in known:
            msg = f"%overfit takes no value named {name}: it takes `batch`, `loss_function` and `optimizer`"
            raise TorchDebugError(msg)
    written = {"model": names[0] if names else "model"}
    optimizer = keywords.get("optimizer")
    for value, name in list(rest):
        if isinstance(value, torch.optim.Optimizer) and optimizer is None:
            optimizer, written["optimizer"] = value, name or "optimizer"
            rest.remove((value, name))
    batch = keywords.get("batch")
    if batch is None and rest:
        batch, written["batch"] = rest[0][0], rest.pop(0)[1] or "batch"
    loss_function = keywords.get("loss_function")
    if loss_function is None and rest:
        loss_function, written["loss_function"] = rest[0][0], rest.pop(0)[1] or "loss_function"
    if batch is None or rest:
        msg = "write `%overfit model batch loss_function optimizer`; the last two may be left out"
        raise TorchDebugError(msg)
    if loss_function is not None and not callable(loss_function):
        msg = f"the loss function must be callable, not {type(loss_function).__name__}: put inputs and targets into one tuple, the batch"
        raise TorchDebugError(msg)
    return _of_model(model, batch, loss_function, optimizer, samples, written, *values)


def _of_model(
    model: nn.Module,
    batch: Any,
    loss_function: Any,
    optimizer: Any,
    samples: int,
    names: Mapping[str, str],
    *roots: object,
) -> Subject:
    batches = _batches(batch, samples)
    batch = batches[0] if batches else batch
    size = samples_in(batch)
    if size == 0:
        msg = "the batch is empty: it has no samples"
        raise TorchDebugError(msg)
    notes = []
    parameters = [one for one in model.parameters() if one.requires_grad]
    if not list(model.parameters()):
        msg = "the model has no parameters: there is nothing to train"
        raise TorchDebugError(msg)
    if optimizer is None:
        held = parameters or list(model.parameters())
        optimizer = torch.optim.Adam(held, lr=_RATE)
        notes.append(f"no optimizer was named: trained with Adam(lr={_RATE:g})")
    steps, used = _runnable(model, batch, loss_function, optimizer, samples)
    if len(batches) > 1:
        steps.others = tuple(next(readings(model, one, loss_function)) for one in batches[1:])
        used = sum(samples_in(one) or 0 for one in batches)
    elif size is not None and used != min(size, samples):
        notes.append("the model does not take a part of this batch: all of it was used")
    return Subject(steps, (model, loss_function, optimizer, batch, *roots), used, names, tuple(notes), steps)


def _batches(data: Any, samples: int) -> list[Any]:
    """Of a loader, its first batch, or all that it takes for so many samples; none of anything else."""
    if not isinstance(data, DataLoader):
        return []
    is_enough = data.batch_size is None or data.batch_size >= samples
    found = [next(iter(data))] if is_enough else list(subset(data, samples))
    if not found:
        msg = "the loader gives no batch: its data set is empty"
        raise TorchDebugError(msg)
    return found


def _runnable(model: nn.Module, batch: Any, loss_function: Any, optimizer: Any, samples: int) -> tuple[ModelSteps, int | None]:
    """The first way to use the batch with which a forward pass does not raise; else the likeliest one. To be undone by the caller."""
    tried: list[tuple[ModelSteps, int | None]] = []
    for part in (cut(batch, samples), cut(batch, 1 << 60)):
        for reading in readings(model, part, loss_function):
            steps = ModelSteps(unwrapped(model), reading, loss_function, optimizer, model, models={"model": model})
            tried.append((steps, samples_in(part)))
            try:
                if not model.training:
                    model.train()
                steps.loss(reading)
            except TorchDebugError:
                raise
            except Exception:  # noqa: BLE001, S112 - the next way is tried; if none works, the training raises it
                continue
            return tried[-1]
    return tried[0]


def _needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    try:
        closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    except (TypeError, ValueError):
        return False
    return closure is not None and closure.default is closure.empty


def _models_of(step: object) -> dict[str, nn.Module]:
    """Models that a function names."""
    found: dict[str, nn.Module] = {}
    owner = getattr(step, "__self__", None)
    if isinstance(owner, nn.Module):
        found["self"] = owner
    elif owner is not None:
        found |= {name: one for name, one in vars(owner).items() if isinstance(one, nn.Module)} if hasattr(owner, "__dict__") else {}
    for function in called_from(getattr(step, "__func__", step)):
        cells = {
            name: cell.cell_contents
            for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
            if _is_bound(cell)
        }
        loaded = {name: function.__globals__[name] for name in writes_of(function.__code__).loaded if name in function.__globals__}
        found |= {name: one for name, one in {**loaded, **cells}.items() if isinstance(one, nn.Module)}
    whole = {name: one for name, one in found.items() if any(True for _ in one.parameters())}
    inside = {id(part) for one in whole.values() for part in one.modules() if part is not one}
    return {name: one for name, one in dict.fromkeys(whole.items()) if id(one) not in inside}


def _is_bound(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018 - asked for the error
    except ValueError:
        return False
    return True
