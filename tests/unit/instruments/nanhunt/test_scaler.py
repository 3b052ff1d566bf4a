"""What a GradScaler skips by design, and what it does not."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from torchdebug_magics import NonFiniteError, nanhunt
from torchdebug_magics.instruments.nanhunt.watch.update_checks import at_scale_one

if TYPE_CHECKING:
    from torchdebug_magics.instruments.nanhunt.report import NanReport

X, Y = torch.linspace(-1, 1, 32).reshape(8, 4), torch.full((8, 1), 100.0)


@pytest.fixture(autouse=True)
def _no_scaler_of_another_test() -> Iterator[None]:
    yield
    gc.collect()


class Training:
    """A small model with its scaler; every step can be run again."""

    def __init__(self, scale: float, *, backoff: float = 0.5, make: Any = torch.optim.SGD, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
        self.optimizer = make(self.model.parameters(), **{"lr": 1e-4, **options})
        self.scaler = torch.amp.GradScaler("cpu", init_scale=scale, backoff_factor=backoff, growth_interval=3)

    def step(self, loss_of: Callable[[Any, Any], Any] = functional.mse_loss, target: torch.Tensor = Y, **cast: Any) -> None:
        self.optimizer.zero_grad()
        with torch.autocast("cpu", **cast) if cast else torch.autocast("cpu", enabled=False):
            output = self.model(X)
        self.scaler.scale(loss_of(output.float(), target)).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()


def hunt(body: Callable[[], None], **options: Any) -> NanReport:
    session = nanhunt(**options)
    try:
        with session:
            body()
    except NonFiniteError:
        pass
    return session.report


def steps(training: Training, count: int, **more: Any) -> NanReport:
    def body() -> None:
        for _ in range(count):
            training.step(**more)

    return hunt(body)


def healthy(report: NanReport, skipped: int, taken: int) -> None:
    assert not report.found, report.verdict
    assert (report.overflow_steps_count, report.steps_count, report.problems) == (skipped, taken, ())


# ------------------------------------------------------------------------------------------------ by design


def test_half_precision_finds_its_scale() -> None:
    training = Training(2.0**24)
    report = steps(training, 14, dtype=torch.float16)
    skipped = report.overflow_steps_count
    assert skipped > 0
    healthy(report, skipped, 14 - skipped)


def test_it_overflows_again_after_it_grew() -> None:
    training = Training(2.0**118)
    report = steps(training, 16)
    assert report.steps_count < 16
    healthy(report, 16 - report.steps_count, report.steps_count)


def test_unscaled_and_clipped() -> None:
    training = Training(2.0**127, backoff=2.0**-40)

    def body() -> None:
        for _ in range(5):
            training.optimizer.zero_grad()
            training.scaler.scale(functional.mse_loss(training.model(X), Y)).backward()
            training.scaler.unscale_(training.optimizer)
            nn.utils.clip_grad_norm_(training.model.parameters(), 1.0)
            training.scaler.step(training.optimizer)
            training.scaler.update()

    healthy(hunt(body), 1, 4)


def test_bfloat16_needs_none() -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def body() -> None:
        for factor in (1.0, 1.0, 1e38):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                output = model(X)
            (functional.mse_loss(output.float(), Y) * factor).backward()
            optimizer.step()

    report = hunt(body)
    assert (report.finding.op, report.finding.step, report.overflow_steps_count) == ("mul", 2, 0)


def test_two_scalers_each_with_its_own_skips() -> None:
    searching, settled = Training(2.0**127), Training(2.0)

    def body() -> None:
        for _ in range(20):
            searching.step()
            settled.step()

    report = hunt(body)
    healthy(report, 40 - report.steps_count, report.steps_count)
    assert report.overflow_steps_count > 3


def test_the_scaler_of_another_run_has_no_say() -> None:
    collapsed, training = Training(2.0**-20), Training(2.0**127, backoff=2.0**-40)
    collapsed.scaler.scale(torch.ones(1))
    healthy(steps(training, 5), 1, 4)


# ------------------------------------------------------------------------------------------------ no design


@pytest.mark.parametrize("scale", [1.0, 4.0, 2.0**20])
def test_a_loss_that_is_bad_at_scale_one_too(scale: float) -> None:
    report = steps(Training(scale), 3, loss_of=lambda output, target: (output * 1e30).square().mean() + target.sum())
    assert (report.finding.op, report.finding.kind, report.overflow_steps_count) == ("pow", "inf", 0)


@pytest.mark.parametrize("scale", [0.125, 1.0, 2.0**16])
def test_a_slope_that_is_bad_at_scale_one_too(scale: float) -> None:
    report = steps(Training(scale), 3, loss_of=lambda output, _: (output - output.detach()).abs().sqrt().mean())
    assert (report.finding.op, report.finding.phase, report.overflow_steps_count) == ("sqrt", "backward", 0)


def test_a_scale_that_collapses() -> None:
    training = Training(2.0**100, lr=0.0)
    report = steps(training, 120, loss_of=lambda output, _: output.mean() * 1e37)
    assert report.finding.diagnosis == "scale_collapse"
    assert report.overflow_steps_count == 20
    assert "20 steps in a row" in report.finding.explanation


def test_an_overflow_that_is_applied_is_no_skip() -> None:
    training = Training(2.0**127)

    def body() -> None:
        training.scaler.scale(functional.mse_loss(training.model(X), Y)).backward()
        training.optimizer.step()

    report = hunt(body)
    assert (report.found, report.overflow_steps_count) == (True, 0)
    assert all(one.isfinite().all() for one in training.model.parameters())


# ------------------------------------------------------------------------------------------------ no replay


def blind(training: Training, loss_of: Callable[[Any, Any], Any], count: int = 4, *, scaled: bool = True) -> NanReport:
    """Steps that cannot be run again: each takes its target from an iterator, after the model call."""
    names = {"training": training, "loss_of": loss_of, "data": iter([Y] * count), "X": X}
    scale = "training.scaler.scale(loss).backward(); training.scaler.step(training.optimizer); training.scaler.update()"
    text = (
        f"for _ in range({count}):\n    training.optimizer.zero_grad()\n    output = training.model(X)\n"
        f"    loss = loss_of(output, next(data))\n    {scale if scaled else 'loss.backward(); training.optimizer.step()'}\n"
    )
    return hunt(lambda: exec(text, names))


def test_a_blind_overflow_is_a_skip_and_the_report_says_why_it_thinks_so() -> None:
    report = blind(Training(2.0**127, backoff=2.0**-40), functional.mse_loss)
    assert (report.found, report.overflow_steps_count) == (False, 1)
    assert any("treated as an overflow" in problem for problem in report.problems)


def test_a_blind_nan_loss_is_no_skip() -> None:
    report = blind(Training(4.0), lambda output, target: (output - target).log().mean())
    assert (report.found, report.finding.phase, report.overflow_steps_count) == (True, "loss", 0)


def test_a_blind_infinite_loss_at_a_small_scale_is_no_skip() -> None:
    report = blind(Training(4.0), lambda output, target: (output * 1e30).square().mean() + target.sum())
    assert (report.found, report.finding.phase, report.overflow_steps_count) == (True, "loss", 0)


def test_a_blind_bad_slope_in_every_step_ends_as_a_collapsed_scale() -> None:
    report = blind(Training(2.0**16), lambda output, _: (output - output.detach()).abs().sqrt().mean(), 30)
    assert report.finding.diagnosis == "scale_collapse"


def test_blind_and_without_the_scaler_that_lies_about() -> None:
    training = Training(4.0)
    training.scaler.scale(torch.ones(1))
    report = blind(training, lambda output, _: (output - output.detach()).abs().sqrt().mean(), scaled=False)
    assert (report.found, report.overflow_steps_count) == (True, 0)
    assert "no GradScaler skips it" in report.finding.explanation
    assert all(one.isfinite().all() for one in training.model.parameters())


# ------------------------------------------------------------------------------------------------ parts


def test_at_scale_one_leaves_a_scaler_as_it_was() -> None:
    used_one, other = Training(8.0).scaler, Training(4.0).scaler
    for one in (used_one, other):
        one.scale(torch.ones(1))
    before = [copy.copy(vars(one)) for one in (used_one, other)]
    with at_scale_one([used_one, other]) as used:
        assert used_one.scale(torch.ones(1)).item() == 1.0
    assert used == [used_one]
    assert [vars(one) for one in (used_one, other)] == before
    assert used_one.scale(torch.ones(1)).item() == 8.0
