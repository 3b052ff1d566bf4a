"""Torch's warnings of non-deterministic ops: with the user's line, and in place of noise."""

from __future__ import annotations

import functools
import warnings
from typing import TYPE_CHECKING

import pytest
import torch

import torchdebug_magics

if TYPE_CHECKING:
    from tests.doors import Observe

PUT = "torch.zeros(4).put_(torch.tensor([0]), torch.ones(1))"
POOL = "torch.nn.MaxUnpool2d(2)(*torch.nn.MaxPool2d(2, return_indices=True)(torch.ones(1, 1, 4, 4)))"


def test_each_op_is_met_at_its_line_and_counted(observe: Observe):
    report = observe("deterministic", f"import torch\nfor _ in range(3):\n    {PUT}\n{POOL}\n{PUT}").report
    met = [(one.op, one.location.line, one.location.source, one.count) for one in report.warnings]
    assert met == [("put_", 4, PUT, 3), ("max_unpooling2d_forward_out", 5, POOL, 1), ("put_", 6, PUT, 1)]
    assert report.warnings[0].fix == "assign to the flat view `.view(-1)` by index, which is deterministic"
    assert "3 nondeterministic ops, first put_ · " in report.verdict


def test_the_warnings_that_are_there_because_of_us_are_not_shown(recwarn: pytest.WarningsRecorder, observe: Observe):
    observe("deterministic", f"import torch\n{PUT}")
    assert [one for one in recwarn if "deterministic" in str(one.message)] == []


def test_who_let_torch_warn_before_sees_it_warn(observe: Observe):
    torch.use_deterministic_algorithms(True, warn_only=True)
    shown = []
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda message, *_, **__: shown.append(str(message))
        report = observe("deterministic", f"import torch\n{PUT}").report
    assert [one.op for one in report.warnings] == ["put_"]
    assert ["put_ does not have" in one for one in shown] == [True]


def test_other_warnings_are_shown_as_ever(observe: Observe):
    shown = []
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda message, *_, **__: shown.append(str(message))
        report = observe("deterministic", "import warnings\nwarnings.warn('mine')").report
    assert shown == ["mine"]
    assert report.warnings == ()


def test_a_filter_that_makes_warnings_errors_does_not_stop_the_cell(observe: Observe):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        observed = observe("deterministic", f"import torch\n{PUT}")
    assert observed.error is None
    assert len(observed.report.warnings) == 1


def test_a_hook_that_the_cell_puts_on_top_stays_and_ours_is_silent_below_it():
    before = warnings.showwarning
    with torchdebug_magics.deterministic() as session:
        mine = warnings.showwarning = functools.partial(warnings.showwarning)
    assert warnings.showwarning is mine
    torch.use_deterministic_algorithms(True, warn_only=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.zeros(4).put_(torch.tensor([0]), torch.ones(1))
    assert session.report.warnings == ()
    warnings.showwarning = before


def test_what_the_repairs_say_is_so():
    x, index, values = torch.zeros(2, 3), torch.tensor([1, 4]), torch.tensor([5.0, 6.0])
    expected = x.clone().put_(index, values)
    torch.use_deterministic_algorithms(True)
    written = x.clone()
    written.view(-1)[index] = values
    assert written.equal(expected)
    logits, target = torch.randn(2, 5, 3, 4), torch.randint(5, (2, 3, 4))
    flat = torch.nn.functional.cross_entropy(logits.movedim(1, -1).flatten(0, -2), target.flatten())
    torch.testing.assert_close(flat, torch.nn.functional.cross_entropy(logits, target))
    pooled, places = torch.nn.functional.max_pool2d(torch.randn(1, 2, 4, 4), 2, return_indices=True)
    scattered = torch.zeros(1, 2, 16).scatter(-1, places.flatten(-2), pooled.flatten(-2)).unflatten(-1, (4, 4))
    torch.use_deterministic_algorithms(False)
    assert scattered.equal(torch.nn.functional.max_unpool2d(pooled, places, 2))
    volume = torch.randn(1, 1, 4, 4, 4)
    averaged = volume.unflatten(-1, (-1, 2)).mean(-1).unflatten(-2, (-1, 2)).mean(-2).unflatten(-3, (-1, 2)).mean(-3)
    torch.testing.assert_close(averaged, torch.nn.functional.avg_pool3d(volume, 2))
