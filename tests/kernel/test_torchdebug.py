"""The one door in a kernel: above a cell, after one that failed or was stopped, and for all cells in between."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.kernel.kernels import on_both_stacks

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.kernel.kernels import Kernel

pytestmark = on_both_stacks

SETUP = """
import torch
from torch import nn
torch.manual_seed(0)
x, y = torch.randn(16, 8), torch.randn(16, 1)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
"""
TRAINS = """
for step in range(6):
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()"""
LOG = TRAINS.replace("nn.functional.mse_loss(model(x), y)", "torch.log(model(x) - 10).mean()")
NEVER_ZEROED = TRAINS.replace("    optimizer.zero_grad()\n", "")
WRONG_SIZE = "model(torch.randn(4, 9))"


@pytest.fixture
def prepared(kernel: Kernel) -> Iterator[Kernel]:
    kernel.run(SETUP)
    yield kernel
    kernel.run("if '_door_on' in globals(): get_ipython().run_line_magic('torchdebug', 'off'); del _door_on")


def test_above_a_cell_and_its_fix(prepared: Kernel) -> None:
    fine = prepared.run(f"%%torchdebug -o w{TRAINS}")
    assert "Nothing wrong in 6 steps" in fine.text
    assert prepared.value("(w.found, w.steps_count, len(w.reports))") == "(False, 6, 5)"
    failed = prepared.run(f"%%torchdebug -o w{LOG}")
    assert failed.ename == "NonFiniteError"
    assert "NaN from log" in failed.text
    assert prepared.value("(w.instrument, w.fix_state, w.location.line, w.reports['nanhunt'].found)") == "('nanhunt', 'verified', 4, True)"
    fixed = prepared.run("%torchdebug fix")
    (cell,) = [part["text"] for part in fixed.payload if part["source"] == "set_next_input"]
    assert prepared.run(cell).status == "ok"


def test_after_a_cell_that_failed(prepared: Kernel) -> None:
    assert prepared.run(WRONG_SIZE).status == "error"
    prepared.client.execute("1", silent=True, reply=True)  # as a front end asks for variables
    assert "`0` expects 8 features, gets 9" in prepared.run("%torchdebug -o e").text
    assert prepared.value("type(e).__name__") == "'ShapesReport'"
    assert prepared.run(f"%%torchdebug\n{WRONG_SIZE}").status == "error"
    again = prepared.run("%torchdebug")
    assert "`0` expects 8 features, gets 9" in again.text
    assert "ready: write `%%torchdebug`" in prepared.run("%torchdebug").text


def test_an_error_that_nothing_explains_leads_to_the_cell_magic(prepared: Kernel) -> None:
    assert prepared.run("broken = {}\nbroken['key']").status == "error"
    said = prepared.run("%torchdebug -o e").text.replace("\n  ", " ")
    assert "KeyError: 'key' at In[" in said
    assert "line 2: `broken['key']` · write `%%torchdebug` as the first line of the cell" in said
    assert prepared.value("e.suggestion") == "'%%torchdebug'"


def test_after_stop(prepared: Kernel) -> None:
    stopped = prepared.run("import time\ntime.sleep(30)", interrupt_s=0.7)
    assert stopped.ename == "KeyboardInterrupt"
    said = prepared.run("%torchdebug").text.replace("\n  ", " ")
    assert "The cell was stopped at In[" in said
    assert "line 2: `time.sleep(30)` · write `%%torchdebug`" in said


def test_on_watches_every_cell_and_shows_only_what_is_found(prepared: Kernel) -> None:
    before = prepared.value("len(get_ipython().events.callbacks['pre_run_cell'])")
    assert "every cell is watched" in prepared.run("%torchdebug on\n_door_on = 1").text
    for cell in ("z = 1", f"plain = 1{TRAINS}", "def f():\n    return 1\nf()", "!echo out"):
        ran = prepared.run(cell)
        assert (ran.status, "▲" in ran.text or "✔" in ran.text or "●" in ran.text) == ("ok", False), ran.text
    assert "The gradients of `optimizer` are never zeroed" in prepared.run(f"plain = 1{NEVER_ZEROED}").text
    assert "gets 9" in prepared.run(WRONG_SIZE).text
    assert prepared.run(f"plain = 1{LOG}").ename == "NonFiniteError"
    assert "nanhunt" in prepared.run(f"%%nanhunt -o hunt{TRAINS}\nhunt_ran = 'nanhunt'\nhunt_ran").text
    assert prepared.run("%torchdebug on").text.startswith("UsageError: %torchdebug is on already")
    prepared.run("%torchdebug off\ndel _door_on")
    assert prepared.run(f"plain = 1{NEVER_ZEROED}").text == ""
    assert prepared.run("%torchdebug off").text.startswith("UsageError: %torchdebug is not on")
    assert prepared.value("len(get_ipython().events.callbacks['pre_run_cell'])") == before


def test_words_and_variables_are_completed(prepared: Kernel) -> None:
    kernel = prepared
    if kernel.value("hasattr(__import__('IPython.core.completer').core.completer, 'context_matcher')") == "True":
        assert {"on", "off", "fix"} <= set(kernel.complete("%torchdebug "))
        assert "--guard" in kernel.complete("%%torchdebug --")
        assert kernel.complete("%shapes mod") == ["model"]
        assert "model.forward" in kernel.complete("%shapes model.forw")


def test_no_fix_goes_into_an_earlier_cell_that_made_another_object(prepared: Kernel) -> None:
    prepared.run("net = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 1))")
    made = "net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(100, 10)); net(torch.randn(2, 1, 8, 8))"
    assert prepared.run(f"%%torchdebug -o w\n{made}").ename == "RuntimeError"
    assert prepared.value("(w.instrument, {edit.cell for edit in w.edits} <= {w.location.cell})") == "('shapes', True)"
