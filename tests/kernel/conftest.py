"""Real kernels of both stacks, shared by all tests of a session."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests import stacks
from tests.kernel.kernels import Kernel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

HERE = Path(__file__).parent
LOAD = """
import warnings
from tests.kernel import fakes
from tests.kernel.fakes import log, open_now
fakes.register()
warnings.simplefilter("always", UserWarning)
%load_ext torchdebug_magics
"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker("kernel")


@pytest.fixture(scope="session")
def start_kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Kernel]]:
    """Start a bare kernel of a stack, in an empty folder; all are stopped at the end."""
    started: list[Kernel] = []

    def start(stack: str) -> Kernel:
        kernel = Kernel(stacks.python(stack), tmp_path_factory.mktemp(f"kernel_{stack}"))
        started.append(kernel)
        return kernel

    yield start
    for kernel in started:
        kernel.stop()


@pytest.fixture(scope="session")
def shared_kernels(start_kernel: Callable[[str], Kernel]) -> dict[str, Kernel]:
    """One kernel a stack, with the fakes loaded; started when first asked for."""
    return {}


@pytest.fixture(scope="session", params=stacks.STACKS)
def shared_kernel(request: pytest.FixtureRequest, shared_kernels: dict[str, Kernel], start_kernel: Callable[[str], Kernel]) -> Kernel:
    if request.param not in shared_kernels:
        kernel = shared_kernels[request.param] = start_kernel(request.param)
        assert kernel.run(LOAD).status == "ok"
        kernel.stack = request.param
    return shared_kernels[request.param]


@pytest.fixture
def kernel(shared_kernel: Kernel) -> Kernel:
    """A kernel with the fakes loaded, whose log is empty."""
    assert shared_kernel.run("log.clear()").status == "ok"
    return shared_kernel
