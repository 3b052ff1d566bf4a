"""An error in a cell is shown with and without us alike, whatever stands between the cell and the op."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from tests import stacks

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.kernel.kernels import Kernel

SETUP = """%load_ext torchdebug_magics
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
_TOLD = re.compile(r"(File|Cell|Input|<ipython|/|~|\S*Error|.*hidden|During|The above)")


@pytest.fixture(scope="module", params=stacks.STACKS)
def kernel(request: pytest.FixtureRequest, start_kernel: Callable[[str], Kernel]) -> Kernel:
    kernel = start_kernel(request.param)
    assert kernel.run(SETUP).status == "ok"
    return kernel


def frames(traceback: str) -> list[str]:
    """Where the traceback stands, and what it says; without the numbers of cells and lines, which the magic line shifts."""
    said = [
        line
        for line in traceback.splitlines()
        if re.match(r"(File|Cell|Input|<ipython|/|~|\S*Error|.*hidden|During|The above)", line.strip())
    ]
    plain = [re.sub(r"In\s?\[\d+\]|line \d+|ipython-input-\S+|ipykernel_\d+/\d+\.py\S*", "", line) for line in said]
    return [line for line in plain if not _IN_CALL.search(line) and "_call_impl" not in line and "module.py" not in line]


@pytest.mark.parametrize("magic", ["%%memtrace -q", "%%shapes -q", "%%nanhunt -q", "%%memtrace -q\n%shapes -q"])
@pytest.mark.parametrize("what", CELLS)
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
