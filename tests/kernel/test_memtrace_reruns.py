"""A cell that is run again and again in a real kernel, as by Shift-Enter."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests import stacks

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.kernel.kernels import Kernel


@pytest.fixture(scope="module", params=stacks.STACKS)
def kernel_of_traces(request: pytest.FixtureRequest, start_kernel: Callable[[str], Kernel]) -> Kernel:
    kernel = start_kernel(request.param)
    kernel.run("%load_ext torchdebug_magics\nimport torch\nkept = []")
    return kernel


def verdicts(kernel: Kernel, body: str) -> list[str]:
    said = []
    for _ in range(3):
        kernel.run(f"%%memtrace -q -o m\n{body}")
        said.append(kernel.run("print(m.verdict)").stdout.strip())
    return said


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("kept.append(torch.ones(1024, 1024))", "line 2: `kept.append(torch.ones(1024, 1024))` · kept by `kept`"),
        ("torch.ones(1024, 1024)", "line 2: `torch.ones(1024, 1024)` · kept by `Out` · fix: end the line with `;`"),
    ],
)
def test_the_third_run_says_what_each_leaves(kernel_of_traces: Kernel, body: str, said: str) -> None:
    first, second, third = verdicts(kernel_of_traces, body)
    assert "Each run" not in first + second
    assert third.startswith("Each run of this cell leaves 4.0 MiB more · In[")
    assert said in third


def test_a_variable_that_is_bound_anew_leaves_nothing(kernel_of_traces: Kernel) -> None:
    assert not [one for one in verdicts(kernel_of_traces, "bound = torch.ones(1024, 1024)") if "Each run" in one]
