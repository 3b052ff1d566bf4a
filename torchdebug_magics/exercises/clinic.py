"""The clinic: six broken cells, of all kinds."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from torchdebug_magics.exercises.checking import Exercise, expect, expect_kind

_CLOSE = 0.01
"""A bound below a square root leaves a distance as small as this."""
_EXACT = 1e-4
check = Exercise("All six patients are healthy; the next ones will be your own.")


@check.task
def pooled(pool: nn.Module) -> None:
    """Each set is pooled by the weights that its own query gives it."""
    rows = torch.randn(3, 5, 8)
    out = pool(rows)
    expect_kind(out, Tensor, "`pool` should give a tensor")
    expect(tuple(out.shape) == (3, 8), f"three sets of five rows of 8 should give (3, 8), and give {tuple(out.shape)}.")
    single = tuple(pool(rows[:1]).shape)
    expect(single == (1, 8), f"a single set of five rows should give (1, 8), and gives {single}.")
    same = torch.ones(2, 5, 8)
    expect(torch.allclose(pool(same), same[:, 0], atol=_EXACT), "a set of equal rows should give that row; do the weights add up to one?")
    shuffled = rows[:, torch.randperm(5)]
    expect(torch.allclose(pool(shuffled), out, atol=_EXACT), "the order of the rows should make no difference.")
    skewed = torch.cat((rows[:, :1] * 4, rows[:, 1:]), 1)
    expect(not torch.allclose(pool(skewed), skewed.mean(1), atol=_EXACT), "all rows weigh the same; the query should decide.")


@check.task
def measured(distance: Callable[[Tensor, Tensor], Tensor]) -> None:
    """The distance, with a gradient that is finite also for a point and itself."""
    left = torch.tensor([[0.0, 0.0], [1.0, 1.0]], requires_grad=True)
    right = torch.tensor([[3.0, 4.0], [1.0, 1.0]])
    found = distance(left, right)
    expect_kind(found, Tensor, "`distance` should give a tensor")
    expect(tuple(found.shape) == (2,), f"two pairs of points should give two distances, and give {tuple(found.shape)}.")
    expect(abs(float(found[0].detach()) - 5) < _EXACT, f"(0, 0) and (3, 4) are 5 apart, and not {float(found[0].detach()):.4f}.")
    expect(abs(float(found[1].detach())) < _CLOSE, f"a point is 0 apart from itself, and not {float(found[1].detach()):.4f}.")
    found.sum().backward()
    slope = left.grad
    expect(slope is not None and slope.isfinite().all(), "the value is fine, and the gradient of a point and itself is still NaN.")
    expect(slope is not None and slope[0].abs().sum() > 1, "the gradient of two different points is gone; they should still attract.")


@check.task
def metered(Meter: Callable[[], Any]) -> None:  # noqa: N803 - a class of the notebook's
    """The mean of what it was told, and no graph."""
    meter = Meter()
    weight = torch.ones(1, requires_grad=True)
    for factor in (1.0, 2.0, 6.0):
        meter.update((weight * factor).sum())
    kept = [name for name, value in vars(meter).items() if isinstance(value, Tensor) and value.requires_grad]
    expect(not kept, f"`{(kept or [''])[0]}` of the meter still drags along the graph of every loss that it was told.")
    expect(abs(float(meter.mean()) - 3) < _EXACT, f"the mean of 1, 2 and 6 is 3, and not {float(meter.mean()):.4f}.")


@check.task
def gated(gate: Callable[[Tensor], Tensor]) -> None:
    """The same values as before, and the right gradient."""
    x = torch.randn(6, dtype=torch.float64, requires_grad=True)
    expected = x.detach().sigmoid() * 2 - 1
    out = gate(x)
    expect_kind(out, Tensor, "`gate` should give a tensor")
    expect(torch.allclose(out, expected), "`gate` should still give 2 * sigmoid(x) - 1.")
    expect(out.requires_grad, "no gradient comes through `gate` any more, so that nothing before it would learn.")
    gate(x).sum().backward()
    slope = x.grad
    right = 2 * x.detach().sigmoid() * (1 - x.detach().sigmoid())
    expect(slope is not None and torch.allclose(slope, right), "the gradient is not that of 2 * sigmoid(x) - 1.")


@check.task
def evaluated(evaluate: Callable[[nn.Module, Tensor], Tensor]) -> None:
    """The same answer each time, and a model that is as it was."""
    norm = nn.BatchNorm1d(32)
    model = nn.Sequential(nn.Linear(4, 32), norm, nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 2))
    rows = torch.randn(16, 4)
    before = {name: value.clone() for name, value in norm.state_dict().items()}
    answers = [evaluate(model, rows) for _ in range(2)]
    for answer in answers:
        expect_kind(answer, Tensor, "`evaluate` should give what the model says, a tensor")
    expect(torch.equal(*answers), "asked twice, it gives two different answers; which layers behave differently while a model is trained?")
    expect(not answers[0].requires_grad, "the answer still has a graph, which nobody will need.")
    unchanged = all(torch.equal(value, before[name]) for name, value in norm.state_dict().items())
    expect(unchanged, "evaluating changes the averages of the BatchNorm layer: it learns from the test.")
    expect(model.training, "the model was being trained before, and is not after; put it back as it was.")
    expected = model.eval()(rows)
    answer = evaluate(model, rows)
    expect(
        answer.shape == expected.shape and torch.allclose(answer, expected, atol=_EXACT),
        "it should give what the model itself says of the rows when it is not being trained.",
    )
    expect(not model.training, "a model that was not being trained before is being trained after; put it back as it *was*.")


@check.task
def repeated(batches: Callable[[int], Iterable[Any]]) -> None:
    """One seed, one order; another seed, another."""
    one, two, other = (_order(batches, seed) for seed in (1, 1, 2))
    expect(sorted(one.tolist()) == list(range(32)), "every row from 0 to 31 should be in exactly one of the batches.")
    expect(torch.equal(one, two), "called twice with the same seed, it gives two different orders; who draws them?")
    expect(not torch.equal(one, other), "another seed should give another order.")
    for name, seed_all, draw in _GENERATORS:
        seed_all(5)
        drawn = draw()
        seed_all(5)
        batches(3)
        expect(draw() == drawn, f"it changes what {name} draws afterwards, in the whole notebook; draw from a generator of its own.")


_GENERATORS: tuple[tuple[str, Callable[[int], object], Callable[[], float]], ...] = (
    ("torch", torch.manual_seed, lambda: torch.rand(()).item()),
    ("Python's `random`", random.seed, random.random),
    ("NumPy", np.random.seed, np.random.random),
)


def _order(batches: Callable[[int], Iterable[Any]], seed: int) -> Tensor:
    """The rows of all batches, one after the other; a batch may also be a list or an array."""
    dealt = batches(seed)
    expect_kind(dealt, Iterable, "`batches` should give a list of batches")
    parts = [torch.as_tensor(batch) for batch in dealt]
    expect(len(parts) == 4, f"it should give four batches, and gives {len(parts)}.")  # noqa: PLR2004 - of four
    return torch.cat(parts)
