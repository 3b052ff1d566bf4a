"""Documented ops are repeated on copies before they run; those that do not give the same each time are told with their count."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import torch

from torchdebug_magics.instruments.deterministic.twice import verify as potential
from torchdebug_magics.instruments.deterministic.twice.verify import Repetitions

if TYPE_CHECKING:
    import pytest

COUNTER = itertools.count()


def test_what_differs_on_the_same_inputs_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.library._scoped_library("torchdebug_repeated", "DEF") as library:
        library.define("noisy(Tensor x) -> Tensor")
        library.impl("noisy", lambda x: x + next(COUNTER), "CPU")
        monkeypatch.setattr(potential, "is_documented", lambda _base: True)
        repetitions = Repetitions(lambda: (None, "layer"))
        for _ in range(5):
            repetitions.before(torch.ops.torchdebug_repeated.noisy.default, (torch.ones(3),), {})
    (found,) = repetitions.found()
    # Three calls are looked at, each ten times; the first of each ten is what the others are held against.
    assert (found.op, found.module, found.on) == ("torchdebug_repeated.noisy.default", "layer", "race")
    assert "27 of 30" in found.what


def test_what_gives_the_same_is_not_told_and_nothing_is_written() -> None:
    repetitions, table = Repetitions(lambda: (None, None)), torch.zeros(5)
    index = torch.tensor([0, 1, 1])
    repetitions.before(torch.ops.aten.index_put_.default, (table, [index], torch.ones(3), True), {})
    repetitions.before(torch.ops.aten.add.Tensor, (table, 1), {})
    assert repetitions.found() == ()
    assert table.tolist() == [0] * 5
