"""Tests that share what is dear to make run in one worker."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

CONFTEST = """
import pytest
from tests.conftest import pytest_xdist_make_scheduler

@pytest.fixture(autouse=True)
def worker(worker_id, request):
    with open(request.config.rootpath / "said.txt", "a") as said:
        said.write(f"{worker_id} {request.node.nodeid}\\n")
"""
TESTS = """
import pytest

pytestmark = pytest.mark.parametrize("document", ["one", "two"], scope="module")

def test_a(document):
    pass

def test_b(document):
    pass

def test_c(document):
    pass
"""
FILES = ("tests/browser/test_a.py", "tests/browser/test_b.py", "tests/kernel/test_a.py", "tests/notebooks/test_notebooks.py")


def test_what_shares_something_dear_runs_in_one_worker(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(CONFTEST)
    for file in FILES:
        path = pytester.path / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(TESTS)
    pytester.runpytest_subprocess("-n2", "-p", "no:cacheprovider", "--import-mode=importlib").assert_outcomes(passed=24)
    said = [line.split() for line in (pytester.path / "said.txt").read_text().splitlines()]
    assert len({worker for worker, _ in said}) == 2
    for folder, document in (("browser", ""), ("kernel", ""), ("notebooks", "[one]"), ("notebooks", "[two]")):
        assert len({worker for worker, name in said if folder in name and document in name}) == 1, folder
