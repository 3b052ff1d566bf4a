"""What a fix is written in: settings of the user's own classes, sizes that hold for the next batch, words that agree with the table."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import torchdebug_magics


class Dense(nn.Linear):
    """A class of the user's own."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        nn.init.zeros_(self.bias)


class Same(nn.Conv2d):
    """One with an argument of its own default."""

    def __init__(self, channels: int, filters: int, size: int = 3) -> None:
        super().__init__(channels, filters, size, padding=size // 2)


class Net(nn.Module):
    """A head that does not fit."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Sequential(Same(3, 16), nn.ReLU(), nn.MaxPool2d(2))
        self.fc = Dense(300, 10)

    def forward(self, x: torch.Tensor) -> Any:
        """Flatten, and give the scores."""
        return self.fc(self.conv(x).flatten(1))


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


def test_a_class_of_the_users_own_is_made_with_its_own_arguments() -> None:
    found = failure(Net(), 1, 3, 16, 16)
    assert [one.code for one in found.fixes if one.verified][:1] == ["fc = Dense(1024, 10)"]
    assert "from `conv.0` through `conv.2`" in found.explanation
    assert "1024 = 16 x 8 x 8 " in found.explanation  # and not 1 x 16 x 8 x 8


def test_another_class_of_the_users_own() -> None:
    found = failure(nn.Sequential(Same(3, 16), Same(8, 4)), 2, 3, 9, 9)
    assert "model[1] = Same(16, 4)" in [one.code for one in found.fixes if one.verified]


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
