"""What training is said to need, against what a real training step holds."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from torchdebug_magics import shapes
from torchdebug_magics.instruments.shapes import forward_table as plan
from torchdebug_magics.machine.limits import Limit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torchdebug_magics.instruments.shapes.report import Need

OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "SGD with momentum": lambda params: torch.optim.SGD(params, 0.1, momentum=0.9),
    "Adam": lambda params: torch.optim.Adam(params, 0.1),
}


def perceptron() -> tuple[nn.Module, torch.Tensor]:
    return nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 8)), torch.randn(16, 20)


def convolutions() -> tuple[nn.Module, torch.Tensor]:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.GELU(), nn.Flatten(), nn.Linear(8 * 36, 5)), torch.randn(4, 3, 8, 8)


def partly_frozen() -> tuple[nn.Module, torch.Tensor]:
    model, x = perceptron()
    for parameter in model[0].parameters():
        parameter.requires_grad_(requires_grad=False)
    return model, x


MODELS = [
    perceptron,
    partly_frozen,
]


def bytes_of(tensors: Any) -> int:
    return sum(memory.nbytes() for memory in {one.untyped_storage()._cdata: one.untyped_storage() for one in tensors}.values())


def trained(model: nn.Module, x: torch.Tensor, optimizer: torch.optim.Optimizer) -> tuple[int, int, int, int]:
    """(parameters and buffers, gradients, optimizer state, activations) of a step, in bytes."""
    own = {one.untyped_storage()._cdata for one in (*model.parameters(), *model.buffers())}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage()._cdata not in own:
            kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(x)
    activations = bytes_of(kept.values())
    loss.float().sum().backward()
    optimizer.step()
    held = bytes_of([*model.parameters(), *model.buffers()])
    gradients = bytes_of(one.grad for one in model.parameters() if one.grad is not None)
    state = bytes_of(one for entry in optimizer.state.values() for one in entry.values() if isinstance(one, torch.Tensor) and one.dim())
    return held, gradients, state, activations


def needed(model: nn.Module, *inputs: Any) -> dict[str, Need]:
    return {need.optimizer: need for need in shapes(model, *inputs).needs}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("build", MODELS)
def test_each_part_is_what_a_step_holds(build: Callable[[], tuple[nn.Module, torch.Tensor]], optimizer: str) -> None:
    model, x = build()
    need = needed(model, x)[optimizer]
    held, gradients, state, activations = trained(model, x, OPTIMIZERS[optimizer]([one for one in model.parameters() if one.requires_grad]))
    assert (need.parameters_bytes, need.gradients_bytes, need.optimizer_bytes) == (held, gradients, state)
    # The input itself is saved for the first layer, where that learns: it is the user's, and there anyway.
    assert need.activations_bytes in {activations, activations - bytes_of([x])}
    assert need.total_bytes == held + gradients + state + need.activations_bytes


def test_nothing_to_train_needs_no_plan() -> None:
    model, x = perceptron()
    assert needed(model.requires_grad_(requires_grad=False), x) == {}


@contextmanager
def _no_gpus() -> Iterator[Any]:
    yield SimpleNamespace(read=list)


@pytest.mark.parametrize("build", [perceptron, convolutions])
def test_the_largest_batch_is_the_largest(build: Callable[[], tuple[nn.Module, torch.Tensor]], monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = build()
    monkeypatch.setattr(plan, "Gpus", _no_gpus)
    monkeypatch.setattr(plan, "smallest_limit", lambda: Limit(200_000, 0, None, "a small machine"))
    most = needed(model, x)["Adam"].largest_batch
    assert most is not None
    fits = {batch: needed(model, x[:1].expand(batch, *x.shape[1:]).clone())["Adam"].fits for batch in (most, most + 2)}
    assert fits == {most: True, most + 2: False}


def test_a_model_that_does_not_fit_has_no_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = perceptron()
    monkeypatch.setattr(plan, "Gpus", _no_gpus)
    monkeypatch.setattr(plan, "smallest_limit", lambda: Limit(1000, 0, None, "a tiny machine"))
    need = needed(model, x)["Adam"]
    assert (need.fits, need.largest_batch) == (False, 0)
    assert need.sentence.endswith("of a tiny machine; no batch size fits")
