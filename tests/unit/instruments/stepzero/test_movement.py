"""How far each parameter is from step zero, and why some never moved."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchdebug_magics

X, Y = torch.randn(16, 4), torch.randint(0, 2, (16,))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)
        self.other = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)).relu())


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 20) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(X), Y).backward()
        optimizer.step()


def reasons(report: Any) -> dict[str, str]:
    return {row.parameter: row.why for row in report.unmoved}


def test_distances_are_absolute_relative_and_in_learning_rates() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    torchdebug_magics.stepzero(model, optimizer)
    before = model.last.weight.detach().clone()
    train(model, optimizer, 3)
    row = next(row for row in torchdebug_magics.stepzero().moved if row.parameter == "last.weight")
    distance = float((model.last.weight.detach() - before).norm())
    assert row.distance == pytest.approx(distance)
    assert row.relative == pytest.approx(distance / float(before.norm()))
    assert row.learning_rates == pytest.approx(distance / 4 / 0.5)
    assert row.why == ""


@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.SGD])
def test_each_reason_for_standing_still(optimizer: type[torch.optim.Optimizer]) -> None:
    model = Net()
    model.first.weight.requires_grad_(requires_grad=False)
    groups = [
        {"params": [model.first.weight, model.last.weight, *model.other.parameters(), *model.norm.parameters()]},
        {"params": [model.last.bias], "lr": 0.0},
    ]
    stepping = optimizer(groups, lr=0.01)  # type: ignore[call-arg]
    torchdebug_magics.stepzero(model, stepping)
    train(model, stepping)
    report = torchdebug_magics.stepzero()
    unreached = "no gradient" if optimizer is torch.optim.Adam else "no gradient, or a zero gradient"
    assert reasons(report) == {
        "first.weight": "frozen",
        "first.bias": "not in the optimizer",
        "last.bias": "the learning rate is 0",
        "other.weight": unreached,
        "other.bias": unreached,
    }
    assert {row.parameter for row in report.moved} == {"norm.weight", "norm.bias", "last.weight"}
    assert report.steps == (20 if optimizer is torch.optim.Adam else None)
    assert "`first.bias` never moved: not in the optimizer" in report.verdict
    assert "frozen" not in report.verdict


def test_zero_gradients_and_lost_updates() -> None:
    model = nn.Module()
    model.dead, model.huge = nn.Parameter(torch.ones(3)), nn.Parameter(torch.full((3,), 1e9))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    torchdebug_magics.stepzero(model, optimizer)
    (0 * model.dead.sum() + model.huge.sum()).backward()
    optimizer.step()
    for _ in range(2):
        assert reasons(torchdebug_magics.stepzero()) == {"dead": "zero gradients", "huge": "updates round to zero"}
        optimizer.zero_grad()


def test_before_the_first_step_nothing_is_odd() -> None:
    model = Net()
    optimizer = torch.optim.Adam(model.parameters())
    torchdebug_magics.stepzero(model, optimizer)
    report = torchdebug_magics.stepzero()
    assert report.verdict == "After 0 steps no parameter has moved since step zero"
    assert set(reasons(report).values()) == {"no step was taken"}
    assert report.unexpected == ()


def test_what_moved_though_it_was_frozen_comes_first() -> None:
    model = Net()
    for part in (model.first, model.other):
        part.requires_grad_(requires_grad=False)
    optimizer = torch.optim.Adam(model.parameters())
    torchdebug_magics.stepzero(model, optimizer)
    model.other.requires_grad_()
    train(model, optimizer)
    with torch.no_grad():
        model.first.bias.add_(1)
        model.other.bias.add_(1)
    report = torchdebug_magics.stepzero()
    assert {row.parameter: row.why for row in report.moved_though_frozen} == {
        "first.bias": "something other than the optimizer writes to it",
        "other.bias": "it requires a gradient now",
    }
    assert "moved though it was frozen" in report.verdict.partition(" · ")[0]


def test_buffers_that_changed() -> None:
    model = Net()
    optimizer = torch.optim.Adam(model.parameters())
    torchdebug_magics.stepzero(model, optimizer)
    train(model, optimizer)
    changed = {row.buffer: row.distance for row in torchdebug_magics.stepzero().buffers}
    assert changed.keys() == {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
    assert changed["norm.num_batches_tracked"] == 20


def test_tied_weights_count_once_and_several_models_have_their_names() -> None:
    tied = Net()
    tied.other.weight = tied.last.weight
    assert torchdebug_magics.stepzero(tied).parameters_count == 7
    one, two = nn.Linear(2, 2), nn.Linear(2, 2)
    torchdebug_magics.stepzero(one, two)
    with torch.no_grad():
        two.bias.add_(1)
    assert [row.parameter for row in torchdebug_magics.stepzero().moved] == ["value 1.bias"]


def test_a_model_that_changed_its_shape() -> None:
    model = nn.Module()
    model.table, model.gone = nn.Embedding(4, 2), nn.Linear(2, 2)
    torchdebug_magics.stepzero(model)
    model.table, model.new = nn.Embedding(5, 2), nn.Linear(2, 2)
    del model.gone
    report = torchdebug_magics.stepzero()
    assert len(report.problems) == 5
    assert (report.moved, report.unmoved) == ((), ())


@pytest.mark.parametrize("wrap", [nn.DataParallel, lambda model: torch.compile(model, backend="eager")])
def test_names_are_the_models_own(wrap: Any) -> None:
    model = Net()
    torchdebug_magics.stepzero(wrap(model))
    names = {row.parameter for row in torchdebug_magics.stepzero(model).data}
    assert names == set()
    torchdebug_magics.stepzero(model)
    assert {row.parameter for row in torchdebug_magics.stepzero().unmoved} == {name for name, _ in model.named_parameters()}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.complex64])
def test_other_dtypes(dtype: torch.dtype) -> None:
    model = nn.Module()
    model.weight = nn.Parameter(torch.ones(4, dtype=dtype))
    model.register_buffer("flags", torch.zeros(2, dtype=torch.bool))
    model.register_buffer("nothing", torch.ones(2, device="meta"))
    torchdebug_magics.stepzero(model)
    with torch.no_grad():
        model.weight.mul_(2)
        model.flags[0] = True
    report = torchdebug_magics.stepzero()
    assert (report.moved[0].distance, report.moved[0].relative) == (2.0, 1.0)
    assert [(row.buffer, row.distance) for row in report.buffers] == [("flags", 1.0)]


def test_data_that_changed_is_named() -> None:
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X.clone(), Y), batch_size=4)
    x, pair, batch = X.clone(), (X.clone(), Y.clone()), {"ids": Y.clone()}
    model = Net()
    state = torch.get_rng_state()
    torchdebug_magics.stepzero(model, x, pair, batch, loader)
    assert torch.equal(torch.get_rng_state(), state)
    assert [row.changed for row in torchdebug_magics.stepzero().data] == [False] * 4
    pair[1][0] += 1
    loader.dataset.tensors[0][3] = 0
    assert [row.changed for row in torchdebug_magics.stepzero().data] == [False, True, False, True]
    x[0], x[1] = x[1].clone(), x[0].clone()
    del batch
    assert [row.changed for row in torchdebug_magics.stepzero().data][:1] == [True], "another order is another batch"
