"""What is trained, from the values on the magic's line: a model with a batch, a function that makes a step, or a trainer."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice, zip_longest
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset

from torchdebug_magics.errors import TorchDebugError
from torchdebug_magics.instruments.overfit.batches import Reading, cut, loss_of, readings, samples_in
from torchdebug_magics.instruments.overfit.training.training import Training
from torchdebug_magics.probing.modules import unwrapped
from torchdebug_magics.probing.source.user_code import called_from, writes_of
from torchdebug_magics.probing.state.rng import RandomState

_RATE = 1e-3
_MOST_READ = 10_000
"""Samples that are looked at for their labels."""


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

    def step(self) -> list[Any]:
        """An update for each batch: their losses."""
        if not self.model.training:
            self.model.train()
        return [self._update(reading) for reading in (self.reading, *self.others)]

    def _update(self, reading: Reading) -> Any:
        def closure() -> Any:
            self.optimizer.zero_grad()
            loss = self.loss(reading)
            loss.backward()
            return loss

        if _needs_closure(self.optimizer):
            return self.optimizer.step(closure)
        loss = closure()
        self.optimizer.step()
        return loss

    def loss(self, reading: Reading) -> torch.Tensor:
        """One forward pass."""
        with torch.enable_grad():
            return loss_of(self.call(*reading.args, **reading.kwargs), reading.targets, self.loss_function)


@dataclass(eq=False)
class FunctionSteps:
    """Steps that a function makes."""

    step: Callable[[], Any]
    models: dict[str, nn.Module]

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
        model, batch, optimizer = trainer
        loss_function, roots = None, (first,)
        written = {"model": f"{first_name}.model", "optimizer": f"{first_name}.optimizer"}
    elif isinstance(first, nn.Module):
        given, written = _roles(values[1:], names[1:], keywords)
        model, batch, loss_function, optimizer = first, given["batch"], given.get("loss_function"), given.get("optimizer")
        written, roots = {"model": first_name, **written}, tuple(values)
    elif callable(first):
        return Subject(FunctionSteps(first, _models_of(first)), (first,), None, {"step": first_name})
    else:
        msg = f"the first value must be a model, a function that makes one step, or a trainer, not {type(first).__name__}"
        raise TorchDebugError(msg)
    batches = _batches(batch, samples)
    batch = batches[0] if batches else batch
    size = samples_in(batch)
    if size == 0:
        msg = "the batch is empty: it has no samples"
        raise TorchDebugError(msg)
    if not (parameters := list(model.parameters())):
        msg = "the model has no parameters: there is nothing to train"
        raise TorchDebugError(msg)
    notes = []
    if optimizer is None:
        optimizer = torch.optim.Adam([parameter for parameter in parameters if parameter.requires_grad] or parameters, lr=_RATE)
        notes.append(f"no optimizer was named: trained with Adam(lr={_RATE:g})")
    steps, used = _runnable(model, batch, loss_function, optimizer, samples)
    if len(batches) > 1:
        steps.others = tuple(readings(model, batch, loss_function)[0] for batch in batches[1:])
        used = sum(samples_in(batch) or 0 for batch in batches)
    elif size is not None and used != min(size, samples):
        notes.append("the model does not take a part of this batch: all of it was used")
    own = FunctionSteps(steps.step, {"model": model})
    return Subject(own, (model, loss_function, optimizer, batch, *roots), used, written, tuple(notes), steps)


def _roles(values: Sequence[Any], names: Sequence[str], keywords: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """(batch, loss function and optimizer by their role, and how the user writes them)."""
    given = {name: value for name, value in keywords.items() if value is not None}
    written: dict[str, str] = {}
    if wrong := next((name for name in keywords if name not in {"batch", "loss_function", "optimizer"}), ""):
        msg = f"%overfit takes no value named {wrong}: it takes `batch`, `loss_function` and `optimizer`"
        raise TorchDebugError(msg)
    for value, name in zip(values, [*names, *([""] * len(values))], strict=False):
        is_optimizer = isinstance(value, torch.optim.Optimizer)
        role = next((role for role in (("optimizer",) if is_optimizer else ("batch", "loss_function")) if role not in given), "")
        given[role], written[role] = value, name or role
    if "batch" not in given or "" in given:
        msg = "write `%overfit model (inputs, targets) loss_function optimizer`; the last two may be left out"
        raise TorchDebugError(msg)
    loss_function = given.get("loss_function")
    if loss_function is not None and not callable(loss_function):
        msg = f"the loss function must be callable, not {type(loss_function).__name__}: put inputs and targets into one tuple, the batch"
        raise TorchDebugError(msg)
    return given, written


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
            steps = ModelSteps(unwrapped(model), reading, loss_function, optimizer, model)
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
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is closure.empty


def _models_of(step: object) -> dict[str, nn.Module]:
    """Models that a function names."""
    owner = getattr(step, "__self__", None)
    named: dict[str, Any] = {"self": owner} if isinstance(owner, nn.Module) else dict(getattr(owner, "__dict__", {}))
    for function in called_from(getattr(step, "__func__", step)):
        loaded = writes_of(function.__code__).loaded
        named |= {name: function.__globals__[name] for name in loaded if name in function.__globals__}
        with suppress(ValueError):  # of a name that is not bound yet
            named |= inspect.getclosurevars(function).nonlocals
    models = {name: one for name, one in named.items() if isinstance(one, nn.Module) and next(one.parameters(), None) is not None}
    inside = {id(part) for model in models.values() for part in model.modules() if part is not model}
    return {name: one for name, one in models.items() if id(one) not in inside}


def subset(loader: DataLoader[Any], samples: int = 100) -> DataLoader[Any]:
    """A loader of `samples` samples of the same data set, spread evenly over the classes where samples have labels.

    Batch size, collation, transforms and shuffling are those of `loader`. Raises `TorchDebugError` where the data set has no length.
    """
    data: Any = loader.dataset
    if not isinstance(data, Sized) or not isinstance(data, Dataset):
        msg = "the data set has no length: a subset needs one whose samples are numbered"
        raise TorchDebugError(msg)
    chosen = _balanced(data, min(samples, len(data)))
    shuffles = isinstance(loader.sampler, torch.utils.data.RandomSampler)
    same = {name: getattr(loader, name) for name in ("num_workers", "collate_fn", "pin_memory", "generator")}
    return DataLoader(Subset(data, chosen), batch_size=loader.batch_size or 1, shuffle=shuffles, **same)


def _balanced(data: Any, many: int) -> list[int]:
    """Sample numbers, one of each class in turns; the first ones where there are no labels."""
    labels = _labels(data)
    if labels is None:
        return list(range(many))
    by_label: dict[Any, list[int]] = {}
    for place, label in enumerate(labels):
        by_label.setdefault(label, []).append(place)
    turns = (place for places in zip_longest(*by_label.values()) for place in places if place is not None)
    return sorted(islice(turns, many))


def _labels(data: Any) -> list[Any] | None:
    """Of a data set that keeps them, or of its first samples."""
    kept = getattr(data, "targets", None)
    if kept is None and isinstance(tensors := getattr(data, "tensors", None), tuple) and len(tensors) > 1:
        kept = tensors[-1]
    if kept is not None and len(kept) == len(data):
        found = kept.tolist() if hasattr(kept, "tolist") else list(kept)
    elif len(data) <= _MOST_READ:
        with RandomState.kept():
            found = [_label(data[place]) for place in range(len(data))]
    else:
        return None
    return found if all(isinstance(one, (int, str)) for one in found) else None


def _label(sample: Any) -> Any:
    if isinstance(sample, dict):
        label = next((sample[name] for name in ("label", "labels", "target") if name in sample), None)
    else:
        label = sample[-1] if isinstance(sample, (tuple, list)) and len(sample) > 1 else None
    if isinstance(label, torch.Tensor) and label.numel() == 1 and not label.is_floating_point():
        return int(label)
    return label


def parts_of_trainer(trainer: Any, others: Sequence[Any]) -> tuple[nn.Module, Any, Any] | None:
    """(model, batch, optimizer) of a trainer or a LightningModule; None for anything else."""
    kinds = {kind.__name__ for kind in type(trainer).__mro__}
    if "LightningModule" in kinds:
        return _of_lightning(trainer, others, "name the data, too: `%overfit module loader`")
    if "Trainer" in kinds and hasattr(trainer, "fit_loop"):
        given = next((other for other in others if isinstance(other, nn.Module)), None)
        model = given if given is not None else getattr(trainer, "lightning_module", None)
        if model is None:
            msg = "the trainer has no model before `fit`: write `%overfit trainer model loader`"
            raise TorchDebugError(msg)
        known = [one for one in (*others, getattr(trainer, "train_dataloader", None)) if one is not model and one is not None]
        return _of_lightning(model, known, "the trainer has no data before `fit`: write `%overfit trainer model loader`")
    if "Trainer" in kinds and hasattr(trainer, "compute_loss") and hasattr(trainer, "get_train_dataloader"):
        batch, optimizer = trainer._prepare_inputs(_first(trainer.get_train_dataloader())), trainer.optimizer
        if optimizer is None:  # as the trainer would make it; it keeps none
            optimizer, trainer.optimizer = trainer.create_optimizer(), None
        return trainer.model, batch, optimizer
    return None


class _TrainingStep(nn.Module):
    """A LightningModule whose call is its training step."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module

    def forward(self, batch: Any) -> Any:
        """The loss of a batch."""
        return self.module.training_step(batch, 0)


def _of_lightning(module: Any, others: Sequence[Any], missing: str) -> tuple[nn.Module, Any, Any]:
    data = next((other for other in others if not isinstance(other, torch.optim.Optimizer)), None)
    if data is None:
        raise TorchDebugError(missing)
    optimizer = next((other for other in others if isinstance(other, torch.optim.Optimizer)), None)
    made = module.configure_optimizers() if optimizer is None else optimizer
    if isinstance(made, (tuple, list)) and len(made) > 1 and isinstance(made[1], torch.optim.Optimizer):
        msg = "the module has several optimizers, so there is no single loss to overfit: use `%overfit step`"
        raise TorchDebugError(msg)
    while isinstance(made, (tuple, list, dict)):  # a list of optimizers and one of schedulers, or a dict for each
        made = made["optimizer"] if isinstance(made, dict) else made[0] if made else None
    return _TrainingStep(module), _first(data), made


def _first(data: Any) -> Any:
    """The first batch of a loader or a data module; a batch is one already."""
    if hasattr(data, "train_dataloader") and not isinstance(data, nn.Module):
        data = data.train_dataloader()
    is_batch = isinstance(data, (torch.Tensor, tuple, list, dict)) or not isinstance(data, Iterable)
    return data if is_batch else next(iter(data))
