"""What is trained, from the values on the magic's line: a model with a batch, a function that makes a step, or a trainer."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice, zip_longest
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset

from torchdebug_magics.errors import TorchDebugError, refuse
from torchdebug_magics.instruments.overfit.training.training import LABELS, Training, is_label, repeated
from torchdebug_magics.probing.dry_runs.inputs import rebuilt
from torchdebug_magics.probing.modules import unwrapped
from torchdebug_magics.probing.source.user_code import called_from, writes_of
from torchdebug_magics.probing.state.rng import RandomState
from torchdebug_magics.probing.tensors import tensors_in

_RATE = 1e-3
_MOST_READ = 10_000
"""Samples that are looked at for their labels."""


@dataclass(frozen=True, eq=False)
class Reading:
    """How a batch is used: the arguments of the model's call, and those of the loss function after the output."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    targets: tuple[Any, ...] = ()


def samples_in(batch: Any) -> int | None:
    """The length of the first dimension of its first tensor."""
    return next((len(tensor) for tensor in tensors_in(_plain(batch)) if tensor.dim()), None)


def cut(batch: Any, many: int) -> Any:
    """The first samples: of each tensor with a dimension of the batch's size, the first or else the second, and of lists as long."""
    size = samples_in(batch)
    if size is None or size <= many:
        return _plain(batch)

    def part(one: Any) -> Any:
        if isinstance(one, torch.Tensor):
            if one.dim() and len(one) == size:
                return one[:many]
            return one[:, :many] if one.dim() > 1 and one.shape[1] == size else one
        is_samples = len(one) == size and not any(isinstance(item, (torch.Tensor, list)) for item in one)
        return one[:many] if is_samples else [rebuilt(item, part, (torch.Tensor, list)) for item in one]

    return rebuilt(_plain(batch), part, (torch.Tensor, list))


def _plain(batch: Any) -> Any:
    """A mapping of any kind, such as a tokenizer's, as a dict."""
    return dict(batch) if isinstance(batch, Mapping) and type(batch) is not dict else batch


def readings(model: nn.Module, batch: Any, loss_function: Any) -> Sequence[Reading]:
    """Ways to use it, the likeliest first: which of them the model allows shows when they are tried."""
    return list(_of_mapping(model, batch, loss_function) if isinstance(batch, Mapping) else _of_parts(batch, loss_function))


def _of_parts(batch: Any, loss_function: Any) -> Iterator[Reading]:
    parts = tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)
    if loss_function is None:
        yield Reading(parts)
        yield Reading((batch,))
        yield Reading(parts[:-1] or parts)  # only so that it can be said what is missing
        return
    if len(parts) == 1:
        yield Reading(parts, targets=parts)
        return
    first, *rest = parts
    if isinstance(first, Mapping) and all(isinstance(name, str) for name in first):
        yield Reading((), dict(first), tuple(rest))
    for many in dict.fromkeys((len(parts) - 1, *range(1, len(parts)))):
        yield Reading(parts[:many], targets=parts[many:])
    if isinstance(first, (tuple, list)):
        yield Reading(tuple(first), targets=tuple(rest))


def _of_mapping(model: nn.Module, batch: Mapping[str, Any], loss_function: Any) -> Iterator[Reading]:
    taken, others = inspect.signature(model.forward).parameters, dict(batch)
    targets: tuple[Any, ...] = ()
    if loss_function is not None:
        unknown = (name for name in batch if name not in taken)
        label = next((name for name in LABELS if name in batch), None) or next(unknown, list(batch)[-1])
        targets = (others.pop(label),)
    yield Reading((), others, targets)
    yield Reading((), {name: value for name, value in others.items() if name in taken}, targets)
    yield Reading(tuple(others.values()), {}, targets)
    yield Reading((dict(batch),), {}, targets)


def loss_of(output: Any, targets: tuple[Any, ...], loss_function: Any) -> torch.Tensor:
    """The loss of a model's output. Raises `TorchDebugError` where the model returns none, and there is no loss function."""
    if loss_function is not None:
        output = loss_function(_prediction(output, loss_function), *targets)
    values = list(output.values()) if isinstance(output, Mapping) else []
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if not isinstance(loss, torch.Tensor):
        if values and all(isinstance(value, torch.Tensor) and value.numel() == 1 for value in values):
            return torch.stack([value.reshape(()) for value in values]).sum()
        loss = output[0] if isinstance(output, (tuple, list)) and output else output
        if not isinstance(loss, torch.Tensor) or (loss_function is None and loss.numel() != 1):
            msg = "the model returns no loss: name a loss function, as in `%overfit model batch loss_function`"
            msg = msg if loss_function is None else f"the loss function returned {type(output).__name__}, not a tensor"
            raise TorchDebugError(msg)
    return loss if loss.numel() == 1 else loss.mean()


def _prediction(output: Any, loss_function: Any) -> Any:
    """What a loss function takes: of several outputs the first, of a model output its logits."""
    logits = getattr(output, "logits", None)
    if isinstance(logits, torch.Tensor):
        return logits
    is_known = isinstance(loss_function, nn.Module) or str(getattr(loss_function, "__module__", "")).startswith("torch.")
    if is_known and isinstance(output, (tuple, list)) and output:
        return _prediction(output[0], loss_function)
    if is_known and isinstance(output, Mapping):
        return next((one for one in output.values() if isinstance(one, torch.Tensor)), output)
    return output


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

        parameter = inspect.signature(type(self.optimizer).step).parameters.get("closure")
        if parameter is not None and parameter.default is parameter.empty:
            return self.optimizer.step(closure)
        loss = closure()
        self.optimizer.step()
        return loss

    def loss(self, reading: Reading) -> torch.Tensor:
        """One forward pass."""
        with torch.enable_grad():
            return loss_of(self.call(*reading.args, **reading.kwargs), reading.targets, self.loss_function)


@dataclass(frozen=True, eq=False)
class Subject:
    """What is trained."""

    make_steps: Callable[[Training], None]
    models: Mapping[str, nn.Module]
    roots: tuple[object, ...]
    """What a step can reach."""
    samples: int | None
    names: Mapping[str, str]
    """How the user writes ``model``, ``optimizer`` and the others."""
    notes: tuple[str, ...] = ()
    model: ModelSteps | None = None


def subject_of(values: Sequence[Any], names: Sequence[str], keywords: Mapping[str, Any], samples: int) -> Subject:
    """From the values on the line. Raises `TorchDebugError` where they cannot be trained."""
    refuse(not values, "name what to train: `%overfit model batch loss_function optimizer`, or `%overfit step`")
    first, first_name = values[0], (names[0] if names else "model")
    trainer = parts_of_trainer(first, values[1:])
    if trainer is not None:
        model, batch, optimizer, call = trainer
        loss_function, roots = None, (first,)
        written = {"model": f"{first_name}.model", "optimizer": f"{first_name}.optimizer"}
    elif isinstance(first, nn.Module):
        given, written = _roles(values[1:], names[1:], keywords)
        model, batch, loss_function, optimizer = first, given["batch"], given.get("loss_function"), given.get("optimizer")
        written, roots, call = {"model": first_name, **written}, tuple(values), first
    elif callable(first):
        return Subject(partial(repeated, first), _models_of(first), (first,), None, {"step": first_name})
    else:
        msg = f"the first value must be a model, a function that makes one step, or a trainer, not {type(first).__name__}"
        raise TorchDebugError(msg)
    batches = _batches(batch, samples)
    batch = batches[0] if batches else batch
    size = samples_in(batch)
    refuse(size == 0, "the batch is empty: it has no samples")
    refuse(not (parameters := list(model.parameters())), "the model has no parameters: there is nothing to train")
    notes = []
    if optimizer is None:
        optimizer = torch.optim.Adam([parameter for parameter in parameters if parameter.requires_grad] or parameters, lr=_RATE)
        notes.append(f"no optimizer was named: trained with Adam(lr={_RATE:g})")
    steps, used, way = _runnable(model, call, batch, loss_function, optimizer, samples)
    if len(batches) > 1:
        steps.others = tuple(readings(model, batch, loss_function)[way] for batch in batches[1:])
        used = sum(samples_in(batch) or 0 for batch in batches)
    elif size is not None and used != min(size, samples):
        notes.append("the model does not take a part of this batch: all of it was used")
    reached = (model, loss_function, optimizer, batch, *roots)
    return Subject(partial(repeated, steps.step), {"model": model}, reached, used, written, tuple(notes), steps)


def _roles(values: Sequence[Any], names: Sequence[str], keywords: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """(batch, loss function and optimizer by their role, and how the user writes them)."""
    given = {name: value for name, value in keywords.items() if value is not None}
    written: dict[str, str] = {}
    wrong = next((name for name in keywords if name not in {"batch", "loss_function", "optimizer"}), "")
    refuse(wrong, f"%overfit takes no value named {wrong}: it takes `batch`, `loss_function` and `optimizer`")
    for value, name in zip(values, [*names, *([""] * len(values))], strict=False):
        is_optimizer = isinstance(value, torch.optim.Optimizer)
        role = next((role for role in (("optimizer",) if is_optimizer else ("batch", "loss_function")) if role not in given), "")
        given[role], written[role] = value, name or role
    is_wrong, loss_function = "batch" not in given or "" in given, given.get("loss_function")
    refuse(is_wrong, "write `%overfit model (inputs, targets) loss_function optimizer`; the last two may be left out")
    why = f"the loss function must be callable, not {type(loss_function).__name__}: put inputs and targets into one tuple, the batch"
    refuse(loss_function is not None and not callable(loss_function), why)
    return given, written


def _batches(data: Any, samples: int) -> list[Any]:
    """Of a loader, its first batch, or all that it takes for so many samples; none of anything else."""
    if not isinstance(data, DataLoader):
        return []
    is_enough = data.batch_size is None or data.batch_size >= samples
    batches = list(islice(data, 1)) if is_enough else list(subset(data, samples))
    refuse(not batches, "the loader gives no batch: its data set is empty")
    return batches


def _runnable(
    model: nn.Module, call: Callable[..., Any], batch: Any, loss_function: Any, optimizer: Any, samples: int
) -> tuple[ModelSteps, int | None, int]:
    """(the first way to use the batch with which a forward pass does not raise, how many samples that are, the place of the way).

    Where none works, the first that the model's signature allows, which raises when it is trained. To be undone by the caller.
    """
    if not model.training:
        model.train()
    failed: list[tuple[bool, tuple[ModelSteps, int | None, int]]] = []
    for part in (cut(batch, samples), cut(batch, 1 << 60)):
        for way, reading in enumerate(readings(model, part, loss_function)):
            steps = ModelSteps(unwrapped(model), reading, loss_function, optimizer, call)
            try:
                steps.loss(reading)
            except TorchDebugError:
                raise
            except Exception as error:  # noqa: BLE001 - the next way is tried; if none works, the training raises it
                failed.append((isinstance(error, TypeError), (steps, samples_in(part), way)))
                continue
            return steps, samples_in(part), way
    return min(failed, key=lambda attempt: attempt[0])[1]


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
    is_numbered = isinstance(data, Sized) and isinstance(data, Dataset)
    refuse(not is_numbered, "the data set has no length: a subset needs one whose samples are numbered")
    many, by_label = min(samples, len(data)), dict[Any, list[int]]()
    for place, label in enumerate(_labels(data)):
        by_label.setdefault(label, []).append(place)
    turns = (place for places in zip_longest(*by_label.values()) for place in places if place is not None)  # one of each class
    chosen = sorted(islice(turns, many)) if by_label else list(range(many))
    shuffles = isinstance(loader.sampler, torch.utils.data.RandomSampler)
    same = {name: getattr(loader, name) for name in ("num_workers", "collate_fn", "pin_memory", "generator")}
    return DataLoader(Subset(data, chosen), batch_size=loader.batch_size or 1, shuffle=shuffles, **same)


def _labels(data: Any) -> list[Any]:
    """Of a data set that keeps them, or of its samples; none where there are none."""
    kept, labels = getattr(data, "targets", None), list[Any]()
    if kept is None and isinstance(tensors := getattr(data, "tensors", None), tuple) and len(tensors) > 1:
        kept = tensors[-1]
    if kept is not None and len(kept) == len(data):
        labels = kept.tolist() if hasattr(kept, "tolist") else list(kept)
    elif len(data) <= _MOST_READ:
        with RandomState.kept():
            samples = [data[place] for place in range(len(data))]
        named = [[value for name, value in sample.items() if is_label(name)] if isinstance(sample, dict) else sample for sample in samples]
        raw = [parts[-1] if isinstance(parts, (tuple, list)) and parts else None for parts in named]
        labels = [label.item() if isinstance(label, torch.Tensor) and label.numel() == 1 else label for label in raw]
    return labels if all(isinstance(label, (int, str)) for label in labels) else []


def parts_of_trainer(trainer: Any, others: Sequence[Any]) -> tuple[nn.Module, Any, Any, Callable[..., Any]] | None:
    """(model, batch, optimizer, what makes the loss of a batch) of a trainer or a LightningModule; None for anything else."""
    kinds, module, lacks = {kind.__name__ for kind in type(trainer).__mro__}, trainer, "name the data, too: `%overfit module loader`"
    if "Trainer" in kinds and hasattr(trainer, "compute_loss") and hasattr(trainer, "get_train_dataloader"):
        batch, optimizer = trainer._prepare_inputs(_first(trainer.get_train_dataloader())), trainer.optimizer
        if optimizer is None:  # as the trainer would make it; it keeps none
            optimizer, trainer.optimizer = trainer.create_optimizer(), None
        return trainer.model, batch, optimizer, trainer.model
    if "Trainer" in kinds and hasattr(trainer, "fit_loop"):
        module = next((other for other in others if isinstance(other, nn.Module)), getattr(trainer, "lightning_module", None))
        refuse(module is None, "the trainer has no model before `fit`: write `%overfit trainer model loader`")
        others = [other for other in (*others, getattr(trainer, "train_dataloader", None)) if other is not module and other is not None]
        lacks = "the trainer has no data before `fit`: write `%overfit trainer model loader`"
    elif "LightningModule" not in kinds:
        return None
    data = next((other for other in others if not isinstance(other, torch.optim.Optimizer)), None)
    refuse(data is None, lacks)
    optimizer = next((other for other in others if isinstance(other, torch.optim.Optimizer)), None)
    made = module.configure_optimizers() if optimizer is None else optimizer
    is_several = isinstance(made, (tuple, list)) and len(made) > 1 and isinstance(made[1], torch.optim.Optimizer)
    refuse(is_several, "the module has several optimizers, so there is no single loss to overfit: use `%overfit step`")
    while isinstance(made, (tuple, list, dict)):  # a list of optimizers and one of schedulers, or a dict for each
        made = made["optimizer"] if isinstance(made, dict) else made[0] if made else None
    return module, _first(data), made, lambda batch: module.training_step(batch, 0)


def _first(data: Any) -> Any:
    """The first batch of a loader or a data module; a batch is one already."""
    if hasattr(data, "train_dataloader") and not isinstance(data, nn.Module):
        data = data.train_dataloader()
    is_batch = isinstance(data, (torch.Tensor, tuple, list, dict)) or not isinstance(data, Iterable)
    return data if is_batch else next(iter(data))
