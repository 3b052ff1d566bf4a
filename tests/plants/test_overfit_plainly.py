"""The plants of overfit against plain torch alone: each fault stalls, its repair learns, and the rest of the expectations is true too."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.plants import all_plants
from tests.plants.plain_training import learned, plain_losses, prepared, raised, stalled

if TYPE_CHECKING:
    from tests.plants.plant import Plant

PLANTS = all_plants("overfit")
HEALTHY, FAULTY = ([plant for plant in PLANTS if plant.healthy is healthy] for healthy in (True, False))
CAUSES = {
    "frozen", "learning_rate", "reduction", "double_softmax", "wrong_loss_input", "target_shape", "off_by_one_labels", "conflicting_labels",
    "dead_units", "bad_init", "stale_optimizer", "cut_graph", "zero_grad_missing", "weight_decay", "clipping", "batchnorm_of_one",
    "output_ignores_input", "input_scale", "capacity",
}  # fmt: skip


def causes(plant: Plant) -> tuple[str, ...]:
    cause = plant.expect["cause"]
    return (cause,) if isinstance(cause, str) else cause.values


def named(plants: list[Plant]) -> list[Any]:
    return [pytest.param(plant, id=plant.id) for plant in plants]


def that(*first_causes: str, expect: str) -> list[Any]:
    chosen = [plant for plant in FAULTY if causes(plant)[0] in first_causes and expect in plant.expect]
    assert chosen
    return named(chosen)


def holds(expression: str, **losses: tuple[float, ...]) -> bool:
    return bool(eval(expression, {"learned": learned, "stalled": stalled, "raised": raised, **losses}))


@pytest.mark.parametrize("plant", named(FAULTY))
def test_a_fault_stalls_and_its_repair_learns(plant: Plant) -> None:
    losses, repaired_losses = plain_losses(plant), plain_losses(plant, repaired=True)
    assert holds(plant.fails, losses=losses, repaired_losses=repaired_losses)
    assert holds(plant.works, losses=repaired_losses)


@pytest.mark.parametrize("plant", named(HEALTHY))
def test_a_healthy_training_gets_to_its_floor(plant: Plant) -> None:
    assert holds(plant.works, losses=plain_losses(plant))


def test_every_cause_is_planted() -> None:
    assert {cause for plant in FAULTY for cause in causes(plant)} == CAUSES


def test_each_graph_is_cut_at_a_marked_line() -> None:
    assert [plant for plant in FAULTY if ("cut_graph" in causes(plant)) is not ("location" in plant.expect)] == []


@pytest.mark.parametrize("plant", that("learning_rate", expect="factor"))
def test_a_rate_between_the_bounds_learns(plant: Plant) -> None:
    training, factor = prepared(plant), plant.expect["factor"]
    for group in training.optimizer.param_groups:
        group["lr"] *= math.sqrt(factor.low * factor.high)
    assert learned(training.losses())


@pytest.mark.parametrize("plant", that("reduction", expect="factor"))
def test_the_loss_is_that_multiple_of_the_mean(plant: Plant) -> None:
    ratio, factor = plain_losses(plant)[0] / plain_losses(plant, repaired=True)[0], plant.expect["factor"]
    assert (ratio, ratio) == pytest.approx((factor.low, factor.high))


@pytest.mark.parametrize("plant", that("frozen", expect="parameters"))
def test_these_are_frozen(plant: Plant) -> None:
    parameters = prepared(plant).model.named_parameters()
    assert {name for name, parameter in parameters if not parameter.requires_grad} == plant.expect["parameters"].values


@pytest.mark.parametrize("plant", that("stale_optimizer", expect="parameters"))
def test_these_are_unknown_to_the_optimizer(plant: Plant) -> None:
    training = prepared(plant)
    known = {id(parameter) for group in training.optimizer.param_groups for parameter in group["params"]}
    trained = [(name, parameter) for name, parameter in training.model.named_parameters() if parameter.requires_grad]
    assert {name for name, parameter in trained if id(parameter) not in known} == plant.expect["parameters"].values


@pytest.mark.parametrize("plant", that("dead_units", "bad_init", expect="parameters"))
def test_these_initialized_anew_make_it_learn(plant: Plant) -> None:
    training = prepared(plant)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        for name in {name.rpartition(".")[0] for name in plant.expect["parameters"].values}:
            training.model.get_submodule(name).reset_parameters()
    assert learned(training.losses())


@pytest.mark.parametrize("plant", that("conflicting_labels", expect="rows"))
def test_these_rows_have_an_equal_with_another_label(plant: Plant) -> None:
    x, y = prepared(plant).inputs_and_targets
    pairs = [(i, j) for i in range(8) for j in range(8) if torch.equal(x[i], x[j]) and not torch.equal(y[i], y[j])]
    assert {i for i, _ in pairs} == plant.expect["rows"].values
