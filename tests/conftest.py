"""What every test shares: nothing may be left behind, nothing is skipped by accident, and each behaviour is tried through both doors."""

from __future__ import annotations

import gc
import os
import signal
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import pytest

from tests import doors, leaks, plain_words, processes, selection, summary
from tests.dealing import Dealing

if TYPE_CHECKING:
    from collections.abc import Iterator

    from IPython.core.interactiveshell import InteractiveShell
    from xdist.remote import Producer

    from torchdebug_magics.report import Report

pytest.register_assert_rewrite("tests.unit.instruments.shapes.planted")
with pytest.MonkeyPatch.context() as patch:  # its grammar, of addresses that no notebook holds, takes seconds to build in each process
    patch.setitem(sys.modules, "rfc3987_syntax", None)
    import jsonschema  # noqa: F401 - before anything else imports it

MAY_BE_SKIPPED = "gpu"
FULL_OF_PROCESSES = ("tests/kernel/", "tests/browser/", "tests/notebooks/", "tests/unit/ranks/")
ROOT = Path(__file__).parent.parent
REPORTS = plain_words.watch([])


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--whole", action="store_true", help="every test, of which otherwise only the cover set runs, and what a change touches"
    )
    parser.addoption("--only", choices=selection.INSTRUMENTS, default="", help="every test of one instrument, and no other")
    parser.addoption("--base", default="origin/main", help="what differs from this commit is touched by the change (%(default)s)")
    parser.addoption("--no-skips", action="store_true", help="a skipped test is a failure, unless it is marked `gpu`")


def pytest_itemcollected(item: pytest.Item) -> None:
    if item.nodeid.startswith(FULL_OF_PROCESSES):
        item.add_marker(summary.WAITS)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[object]:
    """Nothing that is imported is garbage: looking for some would take a quarter of the time."""
    gc.disable()
    result = yield
    gc.enable()
    return result


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Files and tests that are named on the command line run whole; of folders, the tests that `selection` takes."""
    tests = {item.nodeid: item.get_closest_marker("thorough") is not None for item in items}
    if instrument := config.getoption("--only"):
        left_out = selection.left_out_by_instrument(tests, instrument)
    elif config.getoption("--whole") or all(".py" in name for name in config.args):
        return
    else:
        changed = selection.changed_files(config.getoption("--base"))
        left_out = selection.left_out(tests, selection.cover(), selection.known(), changed, selection.turn())
    if left_out:
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in left_out])
        items[:] = [item for item in items if item.nodeid not in left_out]


def pytest_configure(config: pytest.Config) -> None:
    processes.adopt_orphans()
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(summary.Summary())
    # One thread each: models are small, and a second thread costs more than it gives.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a job in the background has it: kernels would inherit that
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # The interpreters and kernels that tests start look at this checkout, wherever they run.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Dealing:
    config.option.loadscopereorder = False  # by the number of tests, which says little of how long they take
    return Dealing(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report = yield
    if item.config.getoption("--no-skips") and report.skipped and not hasattr(report, "wasxfail") and MAY_BE_SKIPPED not in item.keywords:
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid} was skipped, which --no-skips forbids: {report.longrepr}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[None]:
    report = yield
    if collector.config.getoption("--no-skips") and report.skipped:
        report.outcome = "failed"
        report.longrepr = f"{collector.nodeid} was skipped whole, which --no-skips forbids: {report.longrepr}"
    return report


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository: every test runs in an empty folder of its own."""
    return ROOT


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call() -> Iterator[object]:
    """The warning filters are compared here, as pytest puts its own back around each phase of a test."""
    before = leaks.warning_filters()
    result = yield
    if left := leaks.differences(before, leaks.warning_filters()):
        pytest.fail("\n".join(left), pytrace=False)
    return result


@pytest.fixture(autouse=True)
def little_to_search() -> None:
    """What was there before is passed by: else each collection, and each look for live models, reads a million objects of imports.

    Before each test, as the first of a module is the one that imports.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def other_tests(request: pytest.FixtureRequest) -> list[str]:
    """The modules of other folders of tests.

    Those that the test file names itself are not among them: a function is pickled by the name of its module.
    """
    folders = {ROOT / "tests", request.path.parent}
    used = vars(request.module).values()
    named = {value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", "") for value in used}
    names = [name for name in sys.modules if name.startswith("tests.") and name not in named]
    return [name for name in names if Path(sys.modules[name].__file__ or "").parent not in folders]


@pytest.fixture
def no_other_tests(other_tests: list[str]) -> Iterator[None]:
    """The modules of other folders of tests are none of the user's: a walk over all holders would go through their globals."""
    hidden = {name: sys.modules.pop(name) for name in other_tests if name in sys.modules}
    yield
    sys.modules.update(hidden)


@pytest.fixture(autouse=True)
def leak_guard(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """After each test the process, and the folder that it ran in, are as they were before."""
    folder = tmp_path_factory.mktemp("cwd")
    rng = request.node.get_closest_marker("keeps_rng") is not None
    if request.node.get_closest_marker(MAY_BE_SKIPPED) is not None and "torch" in sys.modules and sys.modules["torch"].cuda.is_available():
        sys.modules["torch"].cuda.init()  # which cannot be taken back
    with pytest.MonkeyPatch.context() as here:  # not the fixture: a test's own patches are undone before the look back
        here.chdir(folder)
        before = leaks.snapshot(rng=rng)
        yield
        left = leaks.differences(before, leaks.snapshot(rng=rng))
    left += [f"a file was left in the working folder: {file.relative_to(folder)}" for file in sorted(folder.rglob("*"))]
    if left:
        pytest.fail("the test left something behind:\n" + "\n".join(f"  {line}" for line in left), pytrace=False)


@pytest.fixture(autouse=True)
def plain_words_guard(request: pytest.FixtureRequest) -> Iterator[list[Report]]:
    """Each report that a test makes is read; they are the fixture's value."""
    REPORTS.clear()
    plain_words.watch(REPORTS)
    yield REPORTS
    if said := list(plain_words.read(REPORTS, request.node.nodeid)):
        pytest.fail("a report does not read well:\n" + "\n".join(f"  {line}" for line in said), pytrace=False)
    REPORTS.clear()


@pytest.fixture
def shell(leak_guard: None) -> Iterator[InteractiveShell]:
    """An IPython in this process with the extension loaded."""
    with doors.in_process_shell() as shell:
        yield shell


@pytest.fixture(params=doors.DOORS)
def observe(request: pytest.FixtureRequest, tmp_path: Path) -> doors.Observe:
    """Runs a body under an instrument, once through its function and once through its magic."""
    if request.param == "function":
        return doors.FunctionDoor(tmp_path)
    return doors.MagicDoor(request.getfixturevalue("shell"))
