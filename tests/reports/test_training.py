"""The reported trainings against plain torch: each stalls as reported, and learns once the answer is applied."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.plants.plain_training import Training, learned, stalled
from tests.reports.training import CASES, TrainingCase


def losses(case: TrainingCase, *, repaired: bool) -> list[float]:
    """Of a plain training of what the last cell hands to the magic, after the cells before it."""
    *cells, magic = case.repaired if repaired else case.cells
    namespace: dict[str, Any] = {}
    with torch.random.fork_rng():
        for cell in cells:
            exec(compile(cell, case.name, "exec"), namespace)
    return Training(namespace, magic.removeprefix("%overfit ").partition(" -o ")[0].split()).losses()


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in CASES])
def test_it_stalls_and_the_answer_makes_it_learn(case: TrainingCase) -> None:
    repaired_losses = losses(case, repaired=True)
    assert stalled(losses(case, repaired=False), repaired_losses)
    assert learned(repaired_losses)


def test_every_training_report_is_whole() -> None:
    assert len({case.name for case in CASES}) == len(CASES) >= 25
    assert len({case.source for case in CASES}) == len(CASES)
    assert all(case.fixed and case.fix for case in CASES)
