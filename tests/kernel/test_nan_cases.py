"""A few of the planted NaN and inf as a person meets them: in a kernel with `%%nanhunt` above the cell."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.kernel.kernels import Kernel, Ran, on_stacks
from tests.nan_cases import Case, Nothing, all_cases
from tests.nan_cases.door import compare, compare_location

# All cases run through the script door (tests/unit): here each phase is met once, and what only a kernel has, such as a cell that awaits.
ON_MODERN = (
    "data_one_bad_row", "parameter_embedding_row", "forward_linear_overflows", "attention_row_masked_by_a_boolean",
    "precision_variance_underflows_in_half", "loss_from_an_imported_file", "backward_gradient_penalty", "optimizer_adam_without_eps",
    "flow_keep_going_counts_every_bad_step", "loop_backward_one_iteration_late", "names_third_call_of_a_shared_block",
    "scaler_half_activation_overflows", "hard_source_not_at_hand", "odd_async_training", "nothing_empty_cell",
    "quiet_rows_masked_away_after_the_softmax",
)  # fmt: skip
ON_COLAB = (
    "data_in_a_tuple_argument", "forward_zero_over_zero", "loss_own_cross_entropy_log_of_softmax", "backward_hypot_at_the_origin",
    "optimizer_clip_of_an_infinite_gradient", "nothing_std_of_a_constant",
)  # fmt: skip
CASES = {case.name: case for case in all_cases()}

# %reset -f does the same in 0.3 s.
CLEAR = """
for _name in [name for name in globals() if not name.startswith("_") and name not in {"In", "Out", "get_ipython", "exit", "quit", "open"}]:
    del globals()[_name]
import sys, warnings
if "torch._dynamo" in sys.modules:
    sys.modules["torch._dynamo"].reset()
_warnings = warnings.catch_warnings()
_warnings.__enter__()
warnings.simplefilter("ignore")
"""


@pytest.fixture
def cleared(kernel: Kernel) -> Iterator[Kernel]:
    """The shared kernel without the names of other tests; the warning filters are put back."""
    _run(kernel, CLEAR)
    yield kernel
    _run(kernel, "_warnings.__exit__(None, None, None)")


@pytest.mark.parametrize(("stack", "name"), on_stacks(ON_MODERN, colab=ON_COLAB), indirect=["stack"])
def test_the_cell_stops_with_the_true_finding(cleared: Kernel, name: str) -> None:
    case = CASES[name]
    for file, text in case.files.items():
        (cleared.folder / file).write_text(text)
    _run(cleared, case.prelude)
    setup = _run(cleared, case.setup) if case.setup else Ran()
    ran = cleared.run(f"%%nanhunt -o hunt{_flags(case)}\n{case.cell}", timeout_s=120)
    report = json.loads(_run(cleared, "print(hunt.to_json(indent=None))").stdout)
    differs = {
        **_raised(case, ran),
        **compare(case, report),
        **compare_location(case, report, cells={"setup": (setup.count, 1), "cell": (ran.count, 2)}),
    }
    said = [report["verdict"], *report["problems"]]
    assert not differs, "\n".join([*(f"{name}: {text}" for name, text in differs.items()), *said])
    if ran.ename == "NonFiniteError":
        assert report["verdict"] in ran.evalue


def _run(kernel: Kernel, code: str) -> Ran:
    ran = kernel.run(code, timeout_s=120)
    assert ran.status == "ok", ran.traceback
    return ran


def _flags(case: Case) -> str:
    def flag(name: str, value: Any) -> str:
        return f" --{name.replace('_', '-')}" + ("" if value is True else f" {value}")

    return "".join(flag(name, value) for name, value in case.options.items())


def _raised(case: Case, ran: Ran) -> dict[str, str]:
    wanted = case.truth.raises or "" if isinstance(case.truth, Nothing) else "" if case.options.get("keep_going") else "NonFiniteError"
    return {} if ran.ename == wanted else {"raised": f"{ran.ename}: {ran.evalue}\n{ran.traceback}, not {wanted or 'nothing'}"}
