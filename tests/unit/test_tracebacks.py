"""Our frames are taken out of a user's traceback; what is the user's and torch's stays."""

from __future__ import annotations

import traceback

import pytest
import torch
from torch import nn

import torchdebug_magics
from torchdebug_magics import NonFiniteError


def files(error: BaseException) -> list[str]:
    return [frame.filename.replace("\\", "/") for frame in traceback.extract_tb(error.__traceback__)]


@pytest.mark.parametrize("name", ["memtrace", "shapes", "nanhunt"])
def test_an_op_that_fails_is_the_last_frame_of_the_user(name: str) -> None:
    with pytest.raises(RuntimeError) as caught, getattr(torchdebug_magics, name)():
        torch.ones(3) + torch.ones(4)
    assert files(caught.value)[-1] == __file__.replace("\\", "/")


@pytest.mark.parametrize("name", ["memtrace", "shapes", "nanhunt"])
def test_the_frames_of_modules_stay(name: str) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(5, 6))
    with pytest.raises(RuntimeError) as plain:
        model(torch.ones(2, 3))
    with pytest.raises(RuntimeError) as caught, getattr(torchdebug_magics, name)():
        model(torch.ones(2, 3))
    assert files(caught.value)[-1] == files(plain.value)[-1]
    assert not any("torchdebug_magics/torchdebug_magics/" in file or "/_ops.py" in file for file in files(caught.value))


def test_a_finding_of_ours_keeps_its_way() -> None:
    weight = torch.zeros(2, requires_grad=True)
    with pytest.raises(NonFiniteError) as caught, torchdebug_magics.nanhunt():
        (weight.sqrt() * 0).sum().backward()
    assert files(caught.value)
