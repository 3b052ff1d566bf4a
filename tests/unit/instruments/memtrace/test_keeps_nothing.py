"""A trace keeps no model alive: neither while it runs, when a cell makes one after the other, nor when it is over."""

from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING

import torch

import torchdebug_magics

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

MIB = 2**20
TRAIN = "for _ in range(3):\n    model(torch.ones(4, 512)).sum().backward()"


def test_models_that_are_made_one_after_the_other_are_freed_as_without_a_trace():
    gone = []
    with torchdebug_magics.memtrace() as session:
        for _ in range(8):
            model = torch.nn.Linear(512, 512)  # 1 MiB, and as much for its gradient
            model(torch.ones(4, 512)).sum().backward()
            gone.append(weakref.ref(model))
    assert [one() is None for one in gone] == [True] * 7 + [False]
    assert session.report.peak_bytes - session.report.start_bytes < 5 * MIB
    assert session.report.growth is None


def test_a_model_of_an_earlier_cell_is_freed_though_its_session_is_the_last(shell: InteractiveShell):
    shell.run_cell("import torch\nmodel = torch.nn.Linear(512, 512)")
    shell.run_cell(f"%%memtrace -q\n{TRAIN}")
    reference = weakref.ref(shell.user_ns["model"])
    shell.run_cell("del model")
    gc.collect()
    assert reference() is None
    assert torchdebug_magics.last_session() is not None
