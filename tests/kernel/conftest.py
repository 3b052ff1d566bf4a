"""Kernels of both stacks: one of each that the tests of a worker share, and fresh ones that end with the test that asked for them."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests import stacks
from tests.kernel.kernels import Kernel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

HERE = Path(__file__).parent
# What earlier tests made is passed by: else each collection, and each search for who holds what, reads a million objects.
NAMES = """
from tests.kernel import fakes
from tests.kernel.fakes import log, open_now
log.clear()
fakes.forget_cells(get_ipython())
__import__("gc").freeze()
"""
LOAD = f"""{NAMES}
import warnings
fakes.register()
warnings.simplefilter("always", UserWarning)
%load_ext torchdebug_magics
"""
ANSWER_S = 20.0
"""A shared kernel that has not answered by then is replaced."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker("kernel")


@pytest.fixture
def start_kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Kernel]]:
    """Start a bare kernel of a stack, in an empty folder; it ends with the test."""
    with contextlib.ExitStack() as running:
        yield lambda stack: running.enter_context(Kernel(stacks.python(stack), tmp_path_factory.mktemp(f"kernel_{stack}")))


@pytest.fixture(scope="session")
def stack(request: pytest.FixtureRequest) -> str:
    """The stack of a test's kernel: the modern one, unless the test is marked with `on_both_stacks` or names it."""
    return getattr(request, "param", "modern")


@pytest.fixture(scope="session")
def shared_kernels() -> Iterator[dict[str, Kernel]]:
    """The shared kernels by stack, which outlive a change of the stack from test to test."""
    kernels: dict[str, Kernel] = {}
    yield kernels
    for kernel in kernels.values():
        kernel.stop()


@pytest.fixture(scope="session")
def shared_kernel(stack: str, shared_kernels: dict[str, Kernel], tmp_path_factory: pytest.TempPathFactory) -> Kernel:
    """The kernel of a stack, started when first asked for: of the session, as its channels outlive the guard of a test."""
    if stack not in shared_kernels:
        kernel = shared_kernels[stack] = Kernel(stacks.python(stack), tmp_path_factory.mktemp(f"kernel_{stack}"))
        kernel.stack = stack
        assert kernel.run(LOAD).status == "ok"
    return shared_kernels[stack]


@pytest.fixture
def kernel(shared_kernel: Kernel) -> Kernel:
    """The shared kernel, with the fakes loaded and their log empty."""
    try:
        shared_kernel.run(NAMES, timeout_s=ANSWER_S)
    except TimeoutError:  # as an earlier test left it: that one has failed, this one must not
        shared_kernel.restart(now=True)
        assert shared_kernel.run(LOAD).status == "ok"
    return shared_kernel
