"""Ops that refuse some values: where these are not known, the report says that they were not checked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - as users write it
from torch import nn

from tests.unit.instruments.shapes.planted import Parts
from torchdebug_magics import shapes
from torchdebug_magics.html import plain
from torchdebug_magics.instruments.shapes import forward_table
from torchdebug_magics.instruments.shapes.view import page

if TYPE_CHECKING:
    from collections.abc import Callable


class Does(Parts):
    """One function as a model."""

    def __init__(self, does: Callable[..., Any], **parts: Any) -> None:
        super().__init__(**parts)
        self._does = does

    def forward(self, *args: Any) -> Any:
        return self._does(self, *args)


UNKNOWN = {
    "embedding": (Does(lambda self, x: self.table((x * 10).long()), table=nn.Embedding(5, 4)), (torch.full((3, 2), 0.9),)),
    "one_hot": (Does(lambda _, ids: F.one_hot(ids, 3)), (torch.tensor([0, 7]),)),
    "multi_margin_loss": (Does(lambda _, x: F.multi_margin_loss(x, torch.tensor([9, 0]))), (torch.rand(2, 3),)),
    "binary_cross_entropy": (Does(lambda _, x: F.binary_cross_entropy(x, x)), (torch.randn(2, 3) * 5,)),
    "multinomial": (Does(lambda _, x: torch.multinomial(x, 2)), (-torch.ones(2, 3),)),
    "linalg_cholesky": (Does(lambda _, x: torch.linalg.cholesky(x)), (-torch.eye(3),)),
    "cross_entropy": (Does(lambda _, x: F.cross_entropy(x, (x[:, 0] * 9).long())), (torch.full((2, 3), 0.9),)),
}


@pytest.mark.parametrize("op", UNKNOWN)
def test_what_was_not_checked_is_said(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward_table, "QUICK_FLOPS", -1)
    model, inputs = UNKNOWN[op]
    report = shapes(model, *inputs)
    assert report.failure is None
    assert report.unchecked_ops == (op,)
    assert f"`{op}` may reject values, which only `--real` checks" in " ".join(plain.render(page(report)).split())


@pytest.mark.parametrize("op", UNKNOWN)
def test_a_quick_forward_is_checked_for_real(op: str) -> None:
    model, inputs = UNKNOWN[op]
    report = shapes(model, *inputs)
    assert report.failure is not None
    assert report.failure.op == op
    assert report.notes == (f"ran on real tensors, as values decide what `{op}` rejects",)


def test_a_quick_forward_that_passes_for_real_is_shown_as_it_was_without_data() -> None:
    report = shapes(Does(lambda self, x: self.table((x * 3).long()), table=nn.Embedding(5, 4)), torch.rand(3, 2))
    assert (report.failure, report.mode, (*report.problems, *report.notes)) == (None, "fake", ())
    assert (report.unchecked_ops, report.checked_ops) == ((), ("embedding",))
    assert "then once on real tensors, as `embedding` may reject values" in " ".join(plain.render(page(report)).split())


def test_described_inputs_have_no_values_to_check() -> None:
    report = shapes(Does(lambda _, x: F.one_hot(x.argmax(1), 4)), (3, 2))
    assert (report.unchecked_ops, report.checked_ops) == (("one_hot",), ())


@pytest.mark.parametrize("op", ["one_hot", "multi_margin_loss", "binary_cross_entropy", "multinomial", "linalg_cholesky"])
def test_a_real_run_checks_them(op: str) -> None:
    model, inputs = UNKNOWN[op]
    report = shapes(model, *inputs, real=True)
    assert report.failure is not None
    assert report.unchecked_ops == ()


KNOWN = {
    "labels": (Does(lambda _, x, y: F.cross_entropy(x, y)), (torch.rand(2, 3), torch.tensor([0, 2]))),
}


@pytest.mark.parametrize("name", KNOWN)
def test_where_values_are_known_or_do_not_matter_nothing_is_said(name: str) -> None:
    model, inputs = KNOWN[name]
    report = shapes(model, *inputs)
    assert report.failure is None
    assert report.unchecked_ops == ()
    assert "not checked" not in plain.render(page(report))
