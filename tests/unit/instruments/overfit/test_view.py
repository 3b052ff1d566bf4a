"""What a report shows, from reports made by hand: the verdict first, each fact once, both curves on one scale."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as everybody writes it

import torchdebug_magics
from torchdebug_magics.format import sparkline
from torchdebug_magics.html import markup, plain
from torchdebug_magics.html.page import Chart, Facts, Fold, Table
from torchdebug_magics.instruments.overfit.report import OverfitReport, Progress, Trial
from torchdebug_magics.instruments.overfit.view import live_page, page

STALLED: dict[str, Any] = {
    "passed": False,
    "losses": (1.4, 1.39, 1.38),
    "samples": 8,
    "headline": "The learning rate 1e-06 is too small: with 0.001 the model learns the 8 samples",
    "cause": "learning_rate",
    "fix": '`for group in optimizer.param_groups: group["lr"] = 0.001`',
    "verified": True,
    "factor": 1000.0,
    "trials": (
        Trial(suspect="learning_rate", change="learning rate x10", last_loss=1.3, learns=False, steps=200),
        Trial(suspect="learning_rate", change="learning rate x1000", last_loss=0.01, learns=True, steps=40),
    ),
    "cured_losses": (1.4, 0.5, 0.01),
    "floor": 0.0,
    "chance": math.log(4),
}


def test_the_verdict_is_the_cause_and_each_curve_has_the_same_scale() -> None:
    shown = page(OverfitReport(**STALLED))
    assert shown.headline == "The learning rate 1e-06 is too small"
    assert shown.status == "bad"
    assert [type(block) for block in shown.blocks] == [Facts, Chart, Fold, Fold, Fold]
    inside = [block for fold in shown.blocks if isinstance(fold, Fold) for block in fold.blocks]
    charts = [block for block in (*shown.blocks, *inside) if isinstance(block, Chart)]
    assert [chart.span for chart in charts] == [(0.01, 1.4)] * 2
    table = next(block for block in inside if isinstance(block, Table))
    assert [row[3] for row in table.rows] == ["does not learn", "learns"]
    text = plain.render(shown)
    assert text.count("0.001") == 2  # the fix, and the reason
    assert "proof" in text
    assert markup.render(shown)


def test_a_passed_training_says_from_where_to_where() -> None:
    report = OverfitReport(passed=True, losses=(1.5, 0.4, 0.01), samples=8, floor=0.0, chance=1.386)
    assert report.verdict == "The model overfits 8 samples: loss 1.5 -> 0.01 in 3 steps"
    shown = page(report)
    assert shown.status == "good"
    assert [type(block) for block in shown.blocks] == [Facts, Chart, Fold]
    assert [name for name, _ in dict.fromkeys(shown.blocks[0].rows)] == ["unchanged"]  # type: ignore[union-attr]
    facts = dict(shown.blocks[-1].blocks[0].rows)  # type: ignore[union-attr]
    assert facts["loss of guessing"] == "1.386; the least possible loss is 0.0"


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"passed": False, "reason": "the cell draws no batch"}, "No training step was seen: the cell draws no batch"),
        ({"passed": False, "error": "ValueError: no"}, "The step fails: ValueError: no"),
        ({"passed": False, "losses": (2.0, 1.0), "reason": "none of 9 changes makes it learn"}, "does not overfit the batch"),
    ],
)
def test_without_a_cause(values: dict[str, Any], says: str) -> None:
    report = OverfitReport(**values)
    assert says in report.verdict
    text = plain.render(page(report)).replace("\n  ", " ")
    assert all(part in text for part in says.split(": ", 1))
    assert json.loads(report.to_json())["passed"] is False


def test_conflicting_rows_promise_no_floor() -> None:
    text = plain.render(page(OverfitReport(**{**STALLED, "cause": "conflicting_labels"})))
    assert "least possible" not in text


def test_the_live_view_has_the_curve() -> None:
    shown = live_page(Progress("learning rate x10", (1.4, 1.2)))
    assert shown.headline == "learning rate x10: step 2, loss 1.2"
    assert isinstance(shown.blocks[0], Chart)
    assert live_page(Progress("training", ())).blocks == ()


def test_a_curve_that_stays_high_looks_high() -> None:
    stays, falls = (sparkline(values, span=(0.07, 1.5)) for values in ([1.5, 1.49], [1.5, 0.07]))
    assert stays[0] == stays[1] == falls[0] != falls[1]
    assert len(sparkline([1.0] * 200, span=(0.1, 1.0))) == 40


@pytest.mark.keeps_rng
def test_what_was_learned_by_heart_is_said() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        x, y = torch.randn(8, 16), torch.arange(8) % 4
        model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)

    def step(*, shuffled: bool) -> torch.Tensor:
        order = torch.randperm(8)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x[order]), y[order] if shuffled else y)
        loss.backward()
        optimizer.step()
        return loss

    together = torchdebug_magics.overfit(lambda: step(shuffled=True))
    apart = torchdebug_magics.overfit(lambda: step(shuffled=False))
    assert "memorized" not in together.verdict
    assert "with different random numbers the loss is" in apart.verdict
