"""Batches whose samples have unequal shapes, and checkpoints of models of other sizes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

SETUP = """import torch, numpy as np
from torch import nn
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, default_collate
def read(samples, **how):
    for batch in DataLoader(samples, batch_size=2, **how):
        pass
    return batch
words = [{"x": torch.zeros(3), "words": torch.arange(4 + at % 2), "y": at} for at in range(4)]
boxes = [(torch.zeros(3, 8, 8), np.zeros((1 + at, 5))) for at in range(4)]
sounds = [torch.zeros(1, 80 + at) for at in range(4)]
pictures = [(torch.zeros(3, 8 + at % 2, 8), at) for at in range(4)]
gray = [(torch.zeros(1 + 2 * (at % 2), 8, 8), at) for at in range(4)]
lists = [{"ids": [1] * (2 + at), "y": at} for at in range(4)]
nested = [{"x": torch.zeros(3), "meta": {"id": at, "found": [at, torch.zeros(1 + at // 2, 4)]}} for at in range(4)]
class Net(nn.Module):
    def __init__(self, classes, width=8):
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, width, 3), nn.BatchNorm2d(width), nn.Sequential(nn.Linear(width, classes))
saved = Net(5).state_dict()
"""


def after(shell: InteractiveShell, cell: str) -> Any:
    from IPython.utils.capture import capture_output

    with capture_output():
        shell.run_cell(SETUP)
        assert not shell.run_cell(cell).success
        shell.run_cell("%shapes -o post")
    return shell.user_ns["post"].failure


BATCHES = {
    "the samples themselves": ("sounds", "these have 1 x 80, 1 x 81", "F.pad"),
    "pictures of two sizes": ("pictures", "`sample[0]` of these have 3 x 8 x 8, 3 x 9 x 8", "F.interpolate(x[None], size=(8, 8))"),
    "gray pictures": ("gray", "`sample[0]` of these have 1 x 8 x 8, 3 x 8 x 8", "x.expand(3, -1, -1)"),
    "a part of a part": (
        "nested[1:]",
        '`sample["meta"]["found"][1]` of these have 1 x 4, 2 x 4: `dataset[1]` is the first that differs',
        '"found": [default_collate([s["meta"]["found"][0] for s in batch]), [s["meta"]["found"][1] for s in batch]]',
    ),
    "lists of numbers": ("lists", '`sample["ids"]` of these have 2, 3', "pad_sequence"),
}


@pytest.mark.parametrize(("samples", "words", "fix"), BATCHES.values(), ids=BATCHES)
def test_the_part_of_the_samples_is_named_and_the_fix_runs(shell: InteractiveShell, samples: str, words: str, fix: str) -> None:
    failure = after(shell, f"read({samples})")
    assert failure.op == "stack"
    assert words in failure.explanation
    assert fix in failure.fixes[0].code
    assert failure.fixes[0].verified
    assert shell.run_cell(f"read({samples}, {failure.fixes[0].code})").success


def test_a_function_of_the_users_own_is_the_first_fix(shell: InteractiveShell) -> None:
    failure = after(shell, "def collate_boxes(batch):\n    return [s[0] for s in batch], [s[1] for s in batch]\nread(boxes)")
    assert failure.fixes[0].code == "collate_fn=collate_boxes"


CHECKPOINTS = {
    "another number of classes": ("net = Net(9)\nnet.load_state_dict(saved)", "net.head[0] = nn.Linear(8, 5)", "or `Net(5)`"),
    "another width": (
        "net = Net(5, 6)\nnet.load_state_dict(saved)",
        "net.conv = nn.Conv2d(3, 8, 3)\nnet.norm = nn.BatchNorm2d(8)\nnet.head[0] = nn.Linear(8, 5)",
        "or `Net(5, 8)`",
    ),
    "a list of layers": (
        "net = nn.Sequential(nn.Linear(3, 4))\nnet.load_state_dict(nn.Sequential(nn.Linear(2, 4)).state_dict())",
        "net[0] = nn.Linear(2, 4)",
        "",
    ),
}


@pytest.mark.parametrize(("cell", "code", "why"), CHECKPOINTS.values(), ids=CHECKPOINTS)
def test_the_modules_of_other_sizes_are_named(shell: InteractiveShell, cell: str, code: str, why: str) -> None:
    failure = after(shell, cell)
    assert "in the checkpoint" in failure.explanation
    assert failure.fixes[0].code == code
    assert why in failure.fixes[0].why
    load = cell.splitlines()[1]
    assert shell.run_cell(f"{code}\n{load}").success
