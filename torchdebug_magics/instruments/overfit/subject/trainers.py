"""Trainers of Lightning and transformers: their model, a batch, and how the loss is computed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from torchdebug_magics.errors import TorchDebugError

__all__ = ["parts_of_trainer"]


def parts_of_trainer(trainer: Any, others: Sequence[Any]) -> tuple[nn.Module, Any, Callable[..., Any] | None, Any] | None:
    """(model, batch, loss function, optimizer) of a trainer or a LightningModule; None for anything else."""
    kinds = {one.__name__ for one in type(trainer).__mro__}
    library = str(type(trainer).__module__).partition(".")[0]
    if "LightningModule" in kinds:
        return _of_lightning(trainer, next((one for one in others if not isinstance(one, torch.optim.Optimizer)), None), others)
    if "Trainer" in kinds and hasattr(trainer, "fit") and (library in {"lightning", "pytorch_lightning"} or hasattr(trainer, "fit_loop")):
        given = next((one for one in others if isinstance(one, nn.Module)), None)
        model = given if given is not None else getattr(trainer, "lightning_module", None)
        if model is None:
            msg = "the trainer has no model before `fit`: write `%overfit trainer model loader`"
            raise TorchDebugError(msg)
        data = next((one for one in others if one is not model), None)
        return _of_lightning(model, _loader_of(trainer) if data is None else data, others)
    if "Trainer" in kinds and hasattr(trainer, "compute_loss") and hasattr(trainer, "get_train_dataloader"):
        batch = trainer._prepare_inputs(_first(trainer.get_train_dataloader()))
        optimizer = trainer.optimizer or _optimizer_of(trainer)
        return trainer.model, batch, None, optimizer
    return None


def _optimizer_of(trainer: Any) -> Any:
    """As the trainer would make it; the trainer keeps none."""
    made = trainer.create_optimizer()
    trainer.optimizer = None
    return made


def _loader_of(trainer: Any) -> Any:
    loader = getattr(trainer, "train_dataloader", None)
    if loader is None:
        msg = "the trainer has no data before `fit`: write `%overfit trainer model loader`"
        raise TorchDebugError(msg)
    return loader


class _TrainingStep(nn.Module):
    """A LightningModule whose call is its training step."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module

    def forward(self, batch: Any) -> Any:
        """The loss of a batch."""
        return self.module.training_step(batch, 0)


def _of_lightning(module: Any, data: Any, others: Sequence[Any]) -> tuple[nn.Module, Any, Callable[..., Any] | None, Any]:
    if data is None:
        msg = "name the data, too: `%overfit module loader`"
        raise TorchDebugError(msg)
    batch = _first(data)
    own = next((one for one in others if isinstance(one, torch.optim.Optimizer)), None)
    return _TrainingStep(module), batch, None, own if own is not None else _first_optimizer(module.configure_optimizers())


def _first(data: Any) -> Any:
    """The first batch of a loader or a data module; a batch is one already."""
    if hasattr(data, "train_dataloader") and not isinstance(data, nn.Module):
        data = data.train_dataloader()
    is_batch = isinstance(data, (torch.Tensor, tuple, list, dict)) or not isinstance(data, Iterable)
    return data if is_batch else next(iter(data))


def _first_optimizer(made: Any) -> Any:
    if isinstance(made, torch.optim.Optimizer):
        return made
    if isinstance(made, dict):
        return made["optimizer"]
    found = made[0] if isinstance(made, (tuple, list)) and made else None
    if isinstance(found, (list, tuple)):
        found = found[0] if found else None
    if isinstance(found, dict):
        found = found["optimizer"]
    if isinstance(made, (tuple, list)) and len(made) > 1 and isinstance(made[1], torch.optim.Optimizer):
        msg = "the module has several optimizers, so there is no single loss to overfit: use `%overfit step`"
        raise TorchDebugError(msg)
    return found
