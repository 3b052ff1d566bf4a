"""Find the leak: three of them, each hidden behind a larger one."""

from __future__ import annotations

import math
from collections.abc import Callable, MutableMapping
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

import torchdebug_magics
from torchdebug_magics.exercises.checking import Exercise, Sealed, expect, shown

_LARGEST = Sealed("leak/largest", "2ddc168e4e007383793808fdd22f9113")
_BATCHES = 4
check = Exercise("All tasks are solved: this loop can run for a week now, and takes as much memory at its end as at its beginning.")


@check.task
def named(largest: str) -> None:
    """The variable that grows most."""
    expect(isinstance(largest, str), f"{shown(largest)} is what it holds; give the name of the variable, in quotation marks.")
    expect(
        _LARGEST.fits(largest.partition("[")[0]),  # `name[0]`, as the report has it, is as good
        f"{shown(largest)} is not the variable that keeps most; the headline of the report names the variable that grows.",
    )


@check.task
def looked(look: Callable[..., object], activity: list[Any]) -> None:
    """The hook keeps a number that is right."""
    output = torch.randn(4, 3, requires_grad=True) * 2
    kept = _added(activity, lambda: look(nn.Identity(), (), output))
    expect(not isinstance(kept, Tensor), "`look` still keeps a tensor at each call; a number is enough, and keeps nothing else alive.")
    expect(isinstance(kept, Real), f"`look` should keep a number, and keeps {shown(kept)}.")
    expect(math.isclose(kept, output.mean().item(), abs_tol=1e-3), "the number that `look` keeps is not the mean of the output.")


@check.task
def bounded(prepared: Callable[[int], Tensor], cache: MutableMapping[Any, Any]) -> None:
    """Each batch is prepared once, and no step makes one of its own."""
    before = dict(cache)
    cache.clear()
    try:
        first = [prepared(number) for number in range(_BATCHES)]
        later = [prepared(number) for number in range(_BATCHES, 10 * _BATCHES)]
        size = len(cache)
    finally:
        cache.clear()
        cache.update(before)
    expect(
        size <= _BATCHES,
        f"after {10 * _BATCHES} steps `cache` holds {size} batches, and there are only {_BATCHES}; by what should it remember them?",
    )
    expect(
        all(torch.equal(batch, first[number % _BATCHES]) for number, batch in enumerate(later)),
        f"step {_BATCHES} should see the very batch of step 0 again, and so on.",
    )
    expect(not torch.equal(first[0], first[1]), "`prepared` gives the same batch for every step; there are four.")
    elsewhere = all(batch is first[number % _BATCHES] for number, batch in enumerate(later))
    expect(size > 0 or elsewhere, "`cache` is not used any more, so that each batch is made again and again; keep it, and bound it.")


@check.task
def validated(validate: Callable[[int], list[Tensor]], model: nn.Module) -> None:
    """Scores are what is wanted, and no graph."""
    scores = validate(3)
    expect(isinstance(scores, list) and len(scores) == 3, "`validate(3)` should still give a list of three scores.")  # noqa: PLR2004 - of three
    expect(all(isinstance(score, Tensor) for score in scores), "the scores should still be what the model gives, a tensor for each batch.")
    expect(
        not any(score.requires_grad for score in scores),
        "every score still holds the graph that it was computed with; what tells torch that nothing here will be differentiated?",
    )
    expect(torch.is_grad_enabled(), "gradients are switched off for all that follows; switch them off for this loop alone.")
    expect(all(parameter.requires_grad for parameter in model.parameters()), "the model cannot be trained any more; leave its parameters.")


@check.task
def repaired(train: Callable[[int], object]) -> None:
    """Nothing grows, as %%memtrace sees it."""
    train(_BATCHES)  # fills the cache, which is no leak
    with torchdebug_magics.memtrace() as session:
        train(8)
    growth = session.report.growth or session.report.graph_growth
    expect(growth is None, f"something still grows, kept by `{growth.holder if growth else ''}`; trace `train` once more.")


def _added(kept: list[Any], act: Callable[[], object]) -> Any:
    """The one thing that `act` puts into the list, which is as before afterwards."""
    before = list(kept)
    try:
        act()
        expect(len(kept) == len(before) + 1, "each call should append one number to `activity`, and leave the others there.")
        return kept[-1]
    finally:
        kept[:] = before
