"""Every planted case as a person meets it, in a real kernel with `%%nanhunt` above the cell; some on each stack."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.kernel.kernels import Kernel, Ran
from tests.nan_cases import Case, Nothing, all_cases
from tests.nan_cases.door import compare, compare_location

pytestmark = pytest.mark.corpus

CASES = all_cases()
# What the Colab-like stack lacks (lightning) is left to the other one.
# Every case runs through the script door (tests/unit); through a kernel, on each stack, as many as the time for CI allows.
ON_MODERN = CASES[::8]
ON_COLAB = [case for case in CASES if not case.needs][1::15]
RUNS = [
    pytest.param(stack, case, id=f"{stack}-{case.name}") for stack, cases in (("modern", ON_MODERN), ("colab", ON_COLAB)) for case in cases
]

# %reset -f does the same in 0.3 s.
CLEAR = """
for _name in [name for name in globals() if not name.startswith("_") and name not in {"In", "Out", "get_ipython", "exit", "quit", "open"}]:
    del globals()[_name]
import sys, warnings
warnings.simplefilter("ignore")
if "torch._dynamo" in sys.modules:
    sys.modules["torch._dynamo"].reset()
"""


@pytest.fixture(scope="session")
def kernels() -> dict[str, Kernel]:
    """Those of this file, one a stack."""
    return {}


@pytest.fixture(scope="session")
def on(request: pytest.FixtureRequest, kernels: dict[str, Kernel], start_kernel: Callable[[str], Kernel]) -> Kernel:
    """The kernel of the stack that the test is for; of the session, as it outlives the guard of a test."""
    if request.param not in kernels:
        kernels[request.param] = start_kernel(request.param)
        assert kernels[request.param].run("%load_ext torchdebug_magics").status == "ok"
    return kernels[request.param]


@pytest.mark.parametrize(("on", "case"), RUNS, indirect=["on"])
def test_the_cell_stops_with_the_true_finding(on: Kernel, case: Case) -> None:
    for name, text in case.files.items():
        (on.folder / name).write_text(text)
    forgotten = (f"sys.modules.pop({name.removesuffix('.py')!r}, None)" for name in case.files)
    _run(on, CLEAR, *forgotten, case.prelude)
    setup = _run(on, case.setup) if case.setup else Ran()
    ran = on.run(f"%%nanhunt -o hunt{_flags(case)}\n{case.cell}", timeout_s=120)
    report = json.loads(_run(on, "print(hunt.to_json(indent=None))").stdout)
    differs = {
        **_raised(case, ran),
        **compare(case, report),
        **compare_location(case, report, cells={"setup": (setup.count, 1), "cell": (ran.count, 2)}),
    }
    said = [report["verdict"], *report["problems"]]
    assert not differs, "\n".join([*(f"{name}: {text}" for name, text in differs.items()), *said])
    if ran.ename == "NonFiniteError":
        assert report["verdict"] in ran.evalue


def _run(kernel: Kernel, *lines: str) -> Ran:
    ran = kernel.run("\n".join(lines), timeout_s=120)
    assert ran.status == "ok", ran.traceback
    return ran


def _flags(case: Case) -> str:
    def flag(name: str, value: Any) -> str:
        return f" --{name.replace('_', '-')}" + ("" if value is True else f" {value}")

    return "".join(flag(name, value) for name, value in case.options.items())


def _raised(case: Case, ran: Ran) -> dict[str, str]:
    wanted = case.truth.raises or "" if isinstance(case.truth, Nothing) else "" if case.options.get("keep_going") else "NonFiniteError"
    return {} if ran.ename == wanted else {"raised": f"{ran.ename}: {ran.evalue}\n{ran.traceback}, not {wanted or 'nothing'}"}
