"""What a fix is written in: settings of the user's own classes, sizes that hold for the next batch, words that agree with the table."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

import torchdebug_magics


class Stated(nn.Module):
    """A hidden state for a batch of four."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(6, 8, batch_first=True)

    def forward(self, x: torch.Tensor) -> Any:
        """Give what the recurrent module gives."""
        h = torch.zeros(1, 4, 8)
        return self.gru(x, h)[0]


def failure(model: nn.Module, *sizes: int) -> Any:
    return torchdebug_magics.shapes(model, torch.zeros(sizes)).failure


def test_a_size_of_this_batch_alone_is_not_written() -> None:
    found = failure(Stated(), 5, 7, 6)
    assert found.fixes[0].code == "h = torch.zeros(1, x.size(0), 8)"
    assert found.fixes[0].verified


def test_a_fix_that_holds_for_this_batch_alone_is_not_verified() -> None:
    class Split(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(6, 2)

        def forward(self, x: torch.Tensor) -> Any:
            return self.fc(x).view(4, 14)

    found = failure(Split(), 5, 7, 6)
    assert not [one for one in found.fixes if one.verified and "view(5" in one.code]


def test_lengths_that_are_described_are_whole_numbers() -> None:
    report = torchdebug_magics.shapes(nn.CTCLoss(), (50, 16, 20), (16, 30), (16,), (16,))
    assert report.failure is None
    assert report.rows[0].output_shapes == ((),)


class Steps(nn.Module):
    """Six steps of a picture's rows, written down."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.fc = nn.Embedding(20, 8), nn.Linear(8, 2)

    def forward(self, ids: torch.Tensor) -> Any:
        """Give scores for each step."""
        return self.fc(self.emb(ids).view(4, 6, 8))


def test_a_fix_that_holds_for_so_many_steps_alone_is_not_verified() -> None:
    found = torchdebug_magics.shapes(Steps(), torch.zeros(4, 7, dtype=torch.int64)).failure
    assert found is not None
    verified = [one.code for one in found.fixes if one.verified]
    assert "self.emb(ids).view(4, -1, 8)" in verified
    assert not [one for one in verified if "7" in one]


class Rows(nn.Module):
    """A `view` into as many rows as the batch has, by a number of the user's."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(30, 2)

    def forward(self, x: torch.Tensor) -> Any:
        """Give the scores."""
        return self.fc(x.view(3, 10, 4).flatten(1))


def test_a_number_of_the_users_own_for_the_batch_does_not_cost_the_fix() -> None:
    found = failure(Rows(), 3, 40)
    assert [one.code for one in found.fixes if one.verified][:1] == ["fc = nn.Linear(40, 2)"]


def nets() -> list[Any]:
    conv = (nn.Conv2d(3, 8, 3), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(256, 10))
    deep = [part for at in range(6) for part in (nn.Conv2d(4 if at else 3, 4, 3, padding=1), nn.MaxPool2d(2))]
    return [
        (nn.Sequential(*conv), (2, 3, 32, 32)),
        (nn.Sequential(*deep, nn.Flatten(), nn.Linear(16, 2)), (2, 3, 224, 224)),
        (nn.Sequential(nn.Conv1d(2, 4, 5), nn.MaxPool1d(4), nn.Flatten(), nn.Linear(40, 3)), (2, 2, 100)),
        (nn.Sequential(nn.Conv2d(3, 4, 3, 2), nn.MaxPool2d(3, 2, ceil_mode=True), nn.Flatten(), nn.Linear(100, 2)), (2, 3, 64, 64)),
        (nn.Sequential(nn.Conv2d(3, 4, 3), nn.MaxPool2d(4), nn.Conv2d(4, 4, 5), nn.AdaptiveAvgPool2d(1)), (2, 3, 12, 12)),
    ]


def comes_through(model: nn.Module, sizes: tuple[int, ...]) -> bool:
    try:
        with torch.no_grad():
            model(torch.zeros(sizes))
    except RuntimeError:
        return False
    return True


@pytest.mark.parametrize(("model", "sizes"), nets(), ids=["cnn", "deep", "waves", "ceil", "too small"])
def test_a_stated_range_has_every_size_that_works(model: nn.Module, sizes: tuple[int, ...]) -> None:
    codes = [one.code for one in failure(model, *sizes).fixes if one.code.startswith("input of ")]
    numbers = [int(one) for one in re.findall(r"\d+", codes[0])]
    works = [size for size in range(1, 2 * max(sizes)) if comes_through(model, (*sizes[:2], *[size] * (len(sizes) - 2)))]
    assert works[0] == numbers[0]
    assert works[-1] == (2 * max(sizes) - 1 if "or more" in codes[0] else numbers[-1])
    assert len(works) == works[-1] - works[0] + 1
