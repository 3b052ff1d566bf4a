"""Who watches the loop: each a context manager around a block of steps."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import nn

import torchdebug_magics

if TYPE_CHECKING:
    from tests.bench.models import Training


@dataclass(frozen=True)
class Contender:
    name: str
    prepare: Callable[[Training], None] = field(repr=False)
    """Done once, to a model of its own: what cannot be taken off again."""
    watch: Callable[[Training], contextlib.AbstractContextManager[object]] = field(repr=False)


def nothing(_training: Training) -> None:
    pass


def _nanhunt(_training: Training) -> contextlib.AbstractContextManager[object]:
    return torchdebug_magics.nanhunt()


def _anomaly(_training: Training) -> contextlib.AbstractContextManager[object]:
    return torch.autograd.detect_anomaly()


@contextlib.contextmanager
def _finite_hooks(training: Training) -> Iterator[None]:
    """What teaching material has people paste: every leaf module asked whether its output is finite."""

    def ask(module: nn.Module, _args: object, output: object) -> None:
        for one in output if isinstance(output, (tuple, list)) else (output,):
            if isinstance(one, torch.Tensor) and not torch.isfinite(one).all():
                msg = f"non-finite output of {type(module).__name__}"
                raise RuntimeError(msg)

    leaves = [module for module in training.model.modules() if not list(module.children())]
    handles = [module.register_forward_hook(ask) for module in leaves]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _hugging_face(training: Training) -> None:
    from transformers.debug_utils import DebugUnderflowOverflow

    DebugUnderflowOverflow(training.model)  # keeps no handles: its hooks stay for good


def off(_training: Training) -> contextlib.AbstractContextManager[object]:
    return contextlib.nullcontext()


CONTENDERS = (
    Contender("plain", nothing, off),
    Contender("nanhunt", nothing, _nanhunt),
    Contender("detect_anomaly", nothing, _anomaly),
    Contender("isfinite hooks, each leaf", nothing, _finite_hooks),
    Contender("HF DebugUnderflowOverflow", _hugging_face, off),
)
