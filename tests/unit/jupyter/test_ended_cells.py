"""However a cell ends under a magic: the user's own calls, the report, and a line that all is as it was; none of our frames."""

from __future__ import annotations

import contextlib
import io
import re
import sys
from typing import TYPE_CHECKING

import pytest

import torchdebug_magics

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

HEAD = """\
import signal, sys, torch, torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
net = nn.Linear(4, 2)
opt = torch.optim.SGD(net.parameters(), lr={rate})
x, y = torch.randn(8, 4), torch.randint(0, 2, (8,))
loader = DataLoader(TensorDataset(x, y), batch_size=4)
def step():
    sys.calls_of_step += 1
    opt.zero_grad()
    if sys.calls_of_step == {at}:
        {event}
    loss = nn.functional.cross_entropy(net(x), y)
    loss.backward()
    opt.step()
    return loss
"""
LOOP = "for _ in range(20):\n    step()"
READS = """\
import signal
from torch.utils.data import DataLoader, Dataset
class Rows(Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, row):
        {event}
data = DataLoader(Rows(), batch_size=4)
"""
BATCHES = "for epoch in range(9):\n    for batch in loader:\n        step()"
STOP, ERROR = "signal.raise_signal(signal.SIGINT)", "net(torch.randn(8, 5))"
RESTORED = "(everything is as "
CASES = {
    "%overfit": ("%overfit step", 5),
    "%%overfit": (f"%%overfit\n{BATCHES}", 5),
    "%%overfit, a trial": (f"%%overfit\n{BATCHES}", 230),
    "%%gradwatch": (f"%%gradwatch\n{LOOP}", 5),
    "%%memtrace": (f"%%memtrace\n{LOOP}", 5),
    "%%nanhunt": (f"%%nanhunt\n{LOOP}", 5),
    "--verify": (f"%%deterministic --verify\n{LOOP}", 5),
    "--verify, the second run": (f"%%deterministic --verify\n{LOOP}", 25),
}


def ended(shell: InteractiveShell, cell: str, at: int, event: str, rate: float = 1e-9) -> tuple[str, BaseException | None]:
    """What is shown of a cell that ends by an event, and its error."""
    sys.calls_of_step = 0  # type: ignore[attr-defined]  # outside of all that a magic puts back
    try:
        shell.run_cell(HEAD.format(at=at, event=event, rate=rate)).raise_error()
        shown = io.StringIO()
        with contextlib.redirect_stdout(shown):
            result = shell.run_cell(cell, store_history=True)
    finally:
        del sys.calls_of_step  # type: ignore[attr-defined]
    return shown.getvalue(), result.error_in_exec


@pytest.mark.parametrize("name", CASES)
def test_after_stop(shell: InteractiveShell, name: str) -> None:
    cell, at = CASES[name]
    shown, error = ended(shell, cell, at, STOP)
    assert isinstance(error, KeyboardInterrupt)
    assert "Traceback of your own code" in shown
    assert f": {STOP}" in shown
    assert RESTORED in shown
    assert "caution]" in shown
    assert shown.count("Traceback of your own code") == 1
    assert torchdebug_magics.__path__[0] not in shown


@pytest.mark.parametrize("name", [name for name in CASES if "," not in name])
def test_after_an_error(shell: InteractiveShell, name: str) -> None:
    cell, at = CASES[name]
    shown, error = ended(shell, cell, at, ERROR)
    assert isinstance(error, RuntimeError)
    assert "Traceback of your own code" in shown
    assert f": {ERROR}" in shown
    assert RESTORED in shown
    assert "mat1 and mat2 shapes cannot be multiplied" in shown
    assert torchdebug_magics.__path__[0] not in shown


@pytest.mark.parametrize("name", ["%overfit", "%%overfit", "%%overfit, a trial"])
def test_a_stopped_training_says_how_far_it_came(shell: InteractiveShell, name: str) -> None:
    cell, at = CASES[name]
    shown, _ = ended(shell, cell, at, STOP)
    assert "Stopped: loss" in shown
    steps = "after 200 steps and 1 trial" if "trial" in name else "after 4 steps"
    assert f"{steps}; everything is as it was before the training" in " ".join(shown.split())


def test_an_error_in_the_cell_itself_is_shown_as_without_the_magic(shell: InteractiveShell) -> None:
    shown, error = ended(shell, "%%gradwatch\nstep()\nraise ValueError('mine')", 0, "pass")
    assert isinstance(error, ValueError)
    assert "Traceback of your own code" not in shown
    assert "raise ValueError('mine')" in re.sub(r"\x1b\[[\d;]*m", "", shown)


def test_a_quiet_magic_line_shows_the_whole_traceback_but_for_our_frames(shell: InteractiveShell) -> None:
    shown, error = ended(shell, "%overfit step -q", 5, ERROR)
    assert isinstance(error, RuntimeError)
    assert "your own code" not in shown
    assert "the report" not in shown
    assert "linear.py" in shown
    assert f"{ERROR}" in re.sub(r"\x1b\[[\d;]*m", "", shown)
    assert torchdebug_magics.__path__[0] not in shown


def test_where_there_is_no_report_none_is_said_to_hold_the_traceback(shell: InteractiveShell) -> None:
    shell.run_cell(READS.format(event=STOP)).raise_error()
    shown, error = ended(shell, "%overfit net data nn.functional.cross_entropy opt", 0, "pass")
    assert isinstance(error, KeyboardInterrupt)
    assert "Traceback of your own code" in shown
    assert f": {STOP}" in shown
    assert shown.rstrip().endswith("(everything is as it was before the training)")
