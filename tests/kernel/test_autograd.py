"""`%%autograd` as a person meets it: planted faults in a kernel; the bare line after a cell that failed."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.kernel.kernels import on_both_stacks, on_stacks
from tests.unit.instruments.autograd.planted import CASES

if TYPE_CHECKING:
    from tests.kernel.kernels import Kernel, Ran

# All of them run through the function and the magic in a shell of the same process (tests/unit): here one in so many of each stack's own.
_FAULTS = {case.name: case for case in CASES}
_CURED = [name for name, case in _FAULTS.items() if case.edits]
_FAILS = """\
encoder, left, right = nn.Linear(8, 4), nn.Linear(4, 1), nn.Linear(4, 1)
code = encoder(torch.randn(5, 8)).tanh()
loss_left, loss_right = left(code).mean(), right(code).mean()
loss_left.backward()
loss_right.backward()
"""


def _found(kernel: Kernel) -> list[dict[str, Any]]:
    ran = kernel.run("print(a.to_json(indent=None))")
    assert ran.status == "ok", ran.traceback
    found: list[dict[str, Any]] = json.loads(ran.stdout)["findings"]
    return found


def _run(kernel: Kernel, text: str) -> Ran:
    return kernel.run(text, timeout_s=120)


@pytest.mark.parametrize(("stack", "name"), on_stacks(list(_FAULTS)[::60], colab=list(_FAULTS)[18::72]), indirect=["stack"])
def test_the_line_is_named(kernel: Kernel, name: str) -> None:
    case = _FAULTS[name]
    ran = _run(kernel, f"%%autograd -o a\n{case.body}")
    found = next((one for one in _found(kernel) if one["kind"] in {case.kind, *case.kinds}), None)
    assert found is not None, ran.traceback
    assert (ran.status == "error") == found["raised"]
    assert found["fix"]
    if lines := case.lines("location"):
        assert found["location"]["line"] in lines
        assert found["location"]["cell"] == ran.count


@pytest.mark.parametrize(("stack", "name"), on_stacks(_CURED[5::60], colab=_CURED[23::120]), indirect=["stack"])
def test_nothing_is_found_after_the_cure(kernel: Kernel, name: str) -> None:
    ran = _run(kernel, f"%%autograd -o a\n{_FAULTS[name].fixed}")
    assert ran.status == "ok", ran.traceback
    assert [one["kind"] for one in _found(kernel) if not one["is_hint"]] == []


@on_both_stacks
def test_the_bare_line_explains_the_cell_that_failed(kernel: Kernel) -> None:
    _run(kernel, "import torch\nfrom torch import nn")
    failed = _run(kernel, _FAILS)
    assert failed.ename == "RuntimeError"
    ran = _run(kernel, "%autograd -o a")
    assert ran.status == "ok", ran.traceback
    (found,) = _found(kernel)
    assert (found["kind"], found["location"]["line"], found["first_backward_at"]["line"]) == ("second_backward", 5, 4)
    assert found["location"]["cell"] == failed.count


def test_a_loss_is_looked_at(kernel: Kernel) -> None:
    _run(kernel, "import torch\nfrom torch import nn\nnet = nn.Linear(3, 2)\nloss = net(torch.randn(4, 3)).sum()")
    ran = _run(kernel, "%autograd loss -o a")
    assert ran.status == "ok", ran.traceback
    assert kernel.value("[(one.name, one.reached) for one in a.reaches]") == "[('weight', True), ('bias', True)]"
