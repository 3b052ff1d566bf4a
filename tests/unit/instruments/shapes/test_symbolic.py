"""``--symbolic``: sizes as formulas of the input's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from torchdebug_magics import shapes
from torchdebug_magics.html import plain
from torchdebug_magics.instruments.shapes.view import page


def formulas(model: nn.Module, *args: Any, **kwargs: Any) -> dict[str, str]:
    report = shapes(model, *args, symbolic=True, **kwargs)
    assert report.problems == ()
    return {row.path: row.formula for row in report.rows}


@pytest.mark.parametrize("images", [(1, 3, 32, 32), (4, 3, 32, 48), torch.zeros(1, 3, 32, 32)], ids=["one", "several", "values"])
def test_images(images: Any) -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=2, padding=1), nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(256, 10)
    )
    found = formulas(model, images)
    assert found["0"].startswith("(B, 16, ")
    assert "H" in found["0"]
    assert "W" in found["0"]
    assert (found["2"], found["3"], found["4"]) == ("(B, 16, 4, 4)", "(B, 256)", "(B, 10)")


def test_the_formula_gives_the_size() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 5), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3, stride=2))
    report = shapes(model, (2, 3, 61, 47), symbolic=True)
    for row in report.rows:
        assert eval(row.formula, {"B": 2, "H": 61, "W": 47}) == row.output_shapes[0]


def test_tokens_and_the_width_of_a_transformer() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.up, self.down = nn.Embedding(100, 24), nn.Linear(24, 96), nn.Linear(96, 24)

        def forward(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
            h = self.embedding(ids)
            h = h + self.down(self.up(h).relu())
            return {"hidden": h, "scores": h @ h.transpose(1, 2), "last": h[:, -1]}

    report = shapes(Block(), (2, 7), symbolic=True)
    assert {row.path: row.formula for row in report.rows} == {
        "": "(B, T, D), (B, T, T), (B, D)",
        "embedding": "(B, T, D)",
        "up": "(B, T, 4*D)",
        "down": "(B, T, D)",
    }
    assert report.symbols == "D = 24"


def test_sizes_and_counts_are_those_of_a_plain_run() -> None:
    model = nn.TransformerEncoderLayer(64, 4, 256, batch_first=True)
    plain, symbolic = shapes(model, (2, 9, 64)), shapes(model, (2, 9, 64), symbolic=True)
    assert [row.output_shapes for row in plain.rows] == [row.output_shapes for row in symbolic.rows]
    assert (plain.total_flops, plain.activation_bytes) == (symbolic.total_flops, symbolic.activation_bytes)


def test_what_decides_on_a_size_is_still_told_in_numbers() -> None:
    class Odd(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.reshape(-1, int(x.sum().item()) + 3)

    report = shapes(Odd(), torch.zeros(4, 3), symbolic=True)
    assert report.rows[0].output_shapes == ((4, 3),)
    assert any("symbols" in problem for problem in report.problems) or report.rows[0].formula


def test_a_failing_forward_fails_as_without_it() -> None:
    report = shapes(nn.Linear(3, 4), (2, 5), symbolic=True)
    assert report.failure is not None
    assert report.failure.op == "linear"


def test_the_inputs_are_formulas_too() -> None:
    report = shapes(nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(2), nn.Conv1d(8, 4, 1)), (2, 3, 20, 20), symbolic=True)
    assert [row.input_formula for row in report.rows[:2]] == ["(B, 3, H, W)"] * 2
    assert [row.input_formula for row in report.rows[1:]][1:] == [row.formula for row in report.rows[1:]][:-1]
    shown = " ".join(plain.render(page(report)).split())
    assert "(B, 3, H, W)" in shown
    assert "2 x 3 x 20 x 20" not in shown.partition("Every module call")[2].partition("parameters")[0]
