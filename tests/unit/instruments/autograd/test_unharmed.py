"""With the magic a program computes the same bits, raises the same errors, and frees its memory as early as without it."""

from __future__ import annotations

import random
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.unit.instruments.autograd.random_programs import program

if TYPE_CHECKING:
    from tests.doors import Observe

SEEDS = range(60)


def outcome(namespace: dict[str, Any], error: BaseException | None) -> dict[str, Any]:
    """Everything that must be the same to the bit."""
    layers, optimizer, extra = namespace["layers"], namespace["optimizer"], namespace["extra"]
    tensors = [*layers.state_dict().values(), extra, *optimizer_tensors(optimizer)]
    return {
        "error": (type(error), str(error)),
        "log": [bits(entry) for entry in namespace["log"]],
        "freed": namespace["freed"],
        "tensors": [bits(tensor) for tensor in tensors],
        "gradients": [bits(parameter.grad) for parameter in [*layers.parameters(), extra]],
        "versions": [tensor._version for tensor in [*layers.parameters(), extra, *layers.buffers()]],
        "hooks": [hooks(module) for module in layers.modules()],
        "tensor hooks": [(len(p._backward_hooks or ()), len(p._post_accumulate_grad_hooks or ())) for p in [*layers.parameters(), extra]],
        "torch's RNG": bits(torch.get_rng_state()),
        "random's RNG": random.getstate(),
    }


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)]


def hooks(module: torch.nn.Module) -> list[int]:
    """How many there are in each of a module's tables."""
    return [len(table) for name, table in sorted(vars(module).items()) if name.endswith("hooks") and table is not None]


def bits(value: object) -> object:
    if isinstance(value, torch.Tensor):
        return (
            value.dtype,
            tuple(value.shape),
            value.detach().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes() if value.numel() else b"",
        )
    if isinstance(value, (list, tuple)):
        return [bits(entry) for entry in value]
    return value


def plainly(body: str) -> dict[str, Any]:
    namespace: dict[str, Any] = {"__name__": "__main__"}
    error = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            exec(compile(body, "<plain>", "exec", dont_inherit=True), namespace)
        except Exception as raised:
            error = raised.with_traceback(None)
    return outcome(namespace, error)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("every_step", [False, True], ids=["first steps", "every step"])
@pytest.mark.parametrize(
    ("seed", "observe"), [pytest.param(seed, ("function", "magic")[seed % 7 == 0], id=str(seed)) for seed in SEEDS], indirect=["observe"]
)
def test_the_same_bits_and_errors(seed: int, observe: Observe, every_step: bool) -> None:
    body = program(seed, safe=seed % 3 == 0)
    plain = plainly(body)
    observed = observe("autograd", body, every_step=every_step)
    with_it = outcome(observed.namespace, observed.error)
    assert [name for name, value in plain.items() if with_it[name] != value] == []
    assert with_it == plain
    assert observed.report.problems == ()


def test_programs_at_random_are_not_all_of_one_kind() -> None:
    errors = [plainly(program(seed, safe=seed % 3 == 0))["error"] for seed in SEEDS]
    raised = [message for kind, message in errors if kind is not type(None)]
    assert len(SEEDS) // 5 < len(raised) < 4 * len(SEEDS) // 5
    assert any("modified by an inplace operation" in message for message in raised)
    assert any("a second time" in message for message in raised)


FREED = """\
import gc
import weakref
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
gc.disable()

class Tracked:
    pass

class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        ctx.tracked = Tracked()
        objects.append(weakref.ref(ctx.tracked))
        return x * x

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 2 * x * grad

model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
optimizer = torch.optim.Adam(model.parameters())
storages, objects, freed = [], [], []

def look():
    freed.append(([s.expired() for s in storages], [o() is None for o in objects]))

def forward(x):
    h = model(x)
    captured = Tracked()
    objects.append(weakref.ref(captured))
    h.register_hook(lambda g, c=captured: g)
    storages.append(StorageWeakRef(h.untyped_storage()))
    y = Square.apply(h).exp()
    storages.append(StorageWeakRef(y.untyped_storage()))
    return y.mean()

try:
    for step in range(5):
        loss = forward(torch.randn(4, 8))
        look()
        optimizer.zero_grad()
        loss.backward()
        look()
        optimizer.step()
        del loss
        look()
        forward(torch.randn(4, 8))
        look()
        nodes = forward(torch.randn(4, 8)).grad_fn
        look()
        del nodes
        look()
finally:
    gc.enable()
"""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("every_step", [False, True], ids=["first steps", "every step"])
def test_what_a_graph_holds_is_freed_as_early(observe: Observe, every_step: bool) -> None:
    plain: dict[str, Any] = {}
    exec(compile(FREED, "<plain>", "exec", dont_inherit=True), plain)
    observed = observe("autograd", FREED, every_step=every_step)
    assert observed.error is None
    assert observed.namespace["freed"] == plain["freed"]


GROWN = """\
import torch
from torch import nn
torch.manual_seed(0)
emb = nn.Embedding(5, 3)
emb(torch.tensor([0, 4])).sum().backward()
emb.weight.data = torch.cat([emb.weight.data, torch.randn(2, 3)])
emb.weight.grad = None
emb(torch.tensor([5, 6])).sum().backward()
"""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("every_step", [False, True], ids=["first steps", "every step"])
def test_no_old_node_of_a_parameter_is_kept(observe: Observe, every_step: bool) -> None:
    """One that knows the shape from before makes backward raise."""
    observed = observe("autograd", GROWN, every_step=every_step)
    assert observed.error is None
    assert observed.namespace["emb"].weight.grad.shape == (7, 3)
