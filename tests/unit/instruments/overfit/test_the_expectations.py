"""What a case expects beside its cause, against plain torch: factor, parameters, rows and line."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.unit.instruments.overfit.case import train
from tests.unit.instruments.overfit.planted import CASES

if TYPE_CHECKING:
    from tests.unit.instruments.overfit.case import Built, Case

pytestmark = pytest.mark.corpus


def that(*causes: str, field: str) -> list[Any]:
    chosen = [case for case in CASES if case.causes[0] in causes and getattr(case, field)]
    assert chosen
    return [pytest.param(case, id=case.name) for case in chosen]


def optimizer_of(built: Built) -> torch.optim.Optimizer:
    return built["options"].get("optimizer") or built["values"][3]


def inputs_and_targets(built: Built) -> tuple[torch.Tensor, torch.Tensor]:
    first, *rest = built["values"]
    if not rest:
        free = inspect.getclosurevars(first).nonlocals
        return free["x"], free["y"]
    batch = rest[0]
    return (batch["input_ids"], batch["labels"]) if isinstance(batch, Mapping) else (batch[0], batch[-1])


@pytest.mark.parametrize("case", that("learning_rate", field="factor"))
def test_a_rate_between_the_bounds_learns(case: Case) -> None:
    built = case.build()
    for group in optimizer_of(built).param_groups:
        group["lr"] *= math.sqrt(math.prod(case.factor or ()))
    assert case.learns(built)


@pytest.mark.parametrize("case", that("reduction", field="factor"))
def test_the_loss_is_that_multiple_of_the_mean(case: Case) -> None:
    (faulty, *_), (mean, *_) = train(case.build(), 0), train(case.repair(case.build()), 0)
    assert (faulty / mean, faulty / mean) == pytest.approx(case.factor)


@pytest.mark.parametrize("case", that("frozen", field="parameters"))
def test_these_are_frozen(case: Case) -> None:
    model = case.build()["values"][0]
    assert {name for name, parameter in model.named_parameters() if not parameter.requires_grad} == set(case.parameters or ())


@pytest.mark.parametrize("case", that("stale_optimizer", field="parameters"))
def test_these_are_unknown_to_the_optimizer(case: Case) -> None:
    built = case.build()
    known = {id(parameter) for group in optimizer_of(built).param_groups for parameter in group["params"]}
    named = built["values"][0].named_parameters()
    assert {name for name, parameter in named if parameter.requires_grad and id(parameter) not in known} == set(case.parameters or ())


@pytest.mark.parametrize("case", that("dead_units", "bad_init", field="parameters"))
def test_these_initialized_anew_make_it_learn(case: Case) -> None:
    built = case.build()
    with torch.random.fork_rng():
        torch.manual_seed(3)
        for name in {name.rpartition(".")[0] for name in case.parameters or ()}:
            built["values"][0].get_submodule(name).reset_parameters()
    assert case.learns(built)


@pytest.mark.parametrize("case", that("conflicting_labels", field="rows"))
def test_these_rows_have_an_equal_with_another_label(case: Case) -> None:
    x, y = inputs_and_targets(case.build())
    pairs = [(i, j) for i in range(8) for j in range(8) if torch.equal(x[i], x[j]) and not torch.equal(y[i], y[j])]
    assert {i for i, _ in pairs} == set(case.rows or ())


def test_each_line_stands_in_one_place() -> None:
    texts = [path.read_text() for path in (Path(__file__).parent / "trainings").glob("planted_*.py")]
    lines = [line for text in texts for line in text.splitlines() if "location_text=" not in line]
    for case in CASES:
        if case.location_text:
            assert sum(case.location_text in line for line in lines) == 1, case.name
