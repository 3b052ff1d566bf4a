"""An error in a cell is shown with and without us alike, whatever stands between the cell and the op."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from tests.kernel.kernels import on_both_stacks

if TYPE_CHECKING:
    from tests.kernel.kernels import Kernel

SETUP = """
import torch
from torch import nn
net = nn.Sequential(nn.Linear(3, 4), nn.Linear(5, 6))
weights = torch.ones(3, requires_grad=True)
class Refuses(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return x * 2
    @staticmethod
    def backward(ctx, g): return g + torch.ones(7)
def deep(n):
    return deep(n - 1) if n else torch.ones(3) + torch.ones(4)
"""
CELLS = {
    "an op": "torch.ones(3) + torch.ones(4)",
    "an op in a function": "deep(3)",
    "a module": "net(torch.ones(2, 3))",
    "a backward pass": "Refuses.apply(weights).sum().backward()",
    "plain Python": "{}['no']",
    "an error in an error": "try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise RuntimeError('no') from e",
}
# Which branch of a module's call runs depends on whether any hook is there: not ours to hide.
_IN_CALL = re.compile(r"File .*module\.py:\d+, in Module\._(call_impl|wrapped_call_impl).*")
_SAYS = re.compile(r"(File|Cell|Input|<ipython|/|~|\S*Error|.*hidden|During|The above)")


@pytest.fixture
def kernel(kernel: Kernel) -> Kernel:
    """The shared kernel with a network whose call fails, and a function whose backward pass does."""
    assert kernel.run(SETUP).status == "ok"
    return kernel


def frames(traceback: str) -> list[str]:
    """Where the traceback stands, and what it says; without the numbers of cells and lines, which the magic line shifts."""
    said = [line for line in traceback.splitlines() if _SAYS.match(line.strip())]
    plain = [re.sub(r"In\s?\[\d+\]|line \d+|ipython-input-\S+|ipykernel_\d+/\d+\.py\S*", "", line) for line in said]
    return [line for line in plain if not _IN_CALL.search(line) and "_call_impl" not in line and "module.py" not in line]


STACKED = "%%memtrace -q\n%shapes -q"
ALONE = ("%%memtrace -q", "%%shapes -q", "%%nanhunt -q")


@pytest.mark.parametrize(
    ("stack", "what", "magic"),
    [
        *(pytest.param("modern", what, STACKED, id=f"modern-{what}-stacked") for what in CELLS),
        *(pytest.param("colab", what, STACKED, id=f"colab-{what}-stacked") for what in ("a module", "an error in an error")),
        *(pytest.param("modern", "a module", magic, id=f"modern-a module-{magic}") for magic in ALONE),
    ],
    indirect=["stack"],
)
def test_a_traceback_is_that_of_a_plain_cell(kernel: Kernel, what: str, magic: str) -> None:
    plain = kernel.run(CELLS[what])
    ours = kernel.run(f"{magic}\n{CELLS[what]}")
    assert (ours.status, ours.ename, ours.evalue) == (plain.status, plain.ename, plain.evalue) == ("error", plain.ename, plain.evalue)
    assert frames(ours.traceback) == frames(plain.traceback)
    assert "torchdebug_magics" not in ours.traceback


def test_a_handler_of_the_users_own_is_asked_and_stays(kernel: Kernel) -> None:
    kernel.run("ip = get_ipython()\ndef shown(self, kind, error, trace, tb_offset=None): print('mine', kind.__name__)")
    kernel.run("ip.set_custom_exc((KeyError,), shown)")
    ran = kernel.run("%%memtrace -q\n{}['no']")
    assert "mine KeyError" in ran.stdout
    assert "mine KeyError" in kernel.run("{}['no']").stdout
    assert kernel.run("%%memtrace -q\n1 / 0").ename == "ZeroDivisionError"
    kernel.run("ip.set_custom_exc((), None)")
    assert kernel.run("1 / 0").ename == "ZeroDivisionError"


@pytest.mark.parametrize(
    ("stack", "magic"), [("modern", "%%shapes"), ("modern", "%%memtrace -q\n%%shapes"), ("colab", "%%shapes")], indirect=["stack"]
)
def test_where_the_report_explains_the_error_the_full_traceback_folds(kernel: Kernel, magic: str) -> None:
    ran = kernel.run(f"{magic}\ndef run():\n    return net(torch.ones(2, 3))\nrun()")
    assert ran.ename == "RuntimeError"
    assert "module.py" not in ran.traceback
    assert "return net(torch.ones(2, 3))" in ran.traceback
    assert "mat1 and mat2 shapes cannot be multiplied" in ran.traceback
    report = ran.displays[-1]["text/html"]
    folded = report[report.index("The full traceback") :]
    assert "linear.py" in folded
    assert "mat1 and mat2 shapes cannot be multiplied" in folded


@pytest.mark.parametrize("cell", [CELLS["an error in an error"], CELLS["plain Python"]])
def test_an_error_of_the_users_own_code_and_one_in_another_are_shown_whole(kernel: Kernel, cell: str) -> None:
    plain, ran = kernel.run(f"# nothing\n{cell}"), kernel.run(f"%%shapes\n{cell}")
    assert frames(ran.traceback) == frames(plain.traceback)
    assert not any("The full traceback" in shown.get("text/html", "") for shown in ran.displays)


@on_both_stacks
def test_a_magic_line_reads_as_it_was_written(kernel: Kernel) -> None:
    said = kernel.run("%%memtrace -q\nx = 1\n1 / 0").traceback
    assert "ZeroDivisionError" in said
    assert "# %%memtrace -q" in said
    assert "run_cell_magic" not in said
    kept = "[entry[2][0] for entry in __import__('linecache').cache.values() if len(entry) > 2 and entry[2] and 'memtrace' in entry[2][0]]"
    assert "run_cell_magic" in kernel.value(kept)
    assert "# %%" not in kernel.value(kept)


def test_an_error_in_a_library_shows_the_users_own_lines(kernel: Kernel) -> None:
    ran = kernel.run("%%memtrace\ndef wide():\n    return nn.Linear(1 << 22, 1 << 22)\nwide()")
    assert "alloc" in ran.evalue
    assert "return nn.Linear(1 << 22, 1 << 22)" in ran.traceback
    assert "linear.py" not in ran.traceback
    assert "full traceback" in ran.traceback
    assert "The full traceback" in ran.displays[-1]["text/html"]
    ran = kernel.run("%%memtrace\nnet(torch.ones(2, 3))")
    assert "linear.py" not in ran.traceback
    assert "everything is as your code left it" in ran.traceback
    assert "linear.py" in ran.displays[-1]["text/html"]


LOSES = "def lose(w):\n    (w * 0).log().sum().backward()\nlose(weights)"


@on_both_stacks
def test_a_finding_of_nanhunt_is_one_line_above_its_report(kernel: Kernel) -> None:
    ran = kernel.run(f"%%nanhunt\n{LOSES}")
    lines = [line.strip() for line in re.sub(r"\x1b\[[0-9;]*m", "", ran.traceback).splitlines() if line.strip()]
    assert len(lines) == 1
    assert re.fullmatch(r"NonFiniteError: (NaN|Inf) at step 0, In\[\d+\] line 3; the report is below", lines[0])
    assert ran.evalue.startswith(("NaN from log in forward", "Inf from log in forward"))
    report = ran.displays[-1]["text/html"]
    assert "lose(weights)" in report[report.index("The full traceback") :]


@pytest.mark.parametrize("magic", ["%%nanhunt -q", "%%shapes\n%%nanhunt -q", "%%nanhunt -q\n%%shapes"])
def test_without_a_report_the_error_tells_all(kernel: Kernel, magic: str) -> None:
    told = kernel.run(f"{magic}\n{LOSES}").traceback
    assert "Traceback of your own code" in told
    assert "lose(weights)" in told
    assert "from log in forward" in told
    assert "below" not in told
