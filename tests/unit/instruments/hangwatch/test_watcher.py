"""Which of the findings of many looks a report keeps."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

from torchdebug_magics.instruments.hangwatch import watcher
from torchdebug_magics.instruments.hangwatch.causes.deaths import ThreadErrors
from torchdebug_magics.instruments.hangwatch.main_thread.progress import OutputMeter
from torchdebug_magics.instruments.hangwatch.report import HangFinding, Wait
from torchdebug_magics.probing.safety import Guard
from torchdebug_magics.ranks.launching import Children
from torchdebug_magics.report import Location

if TYPE_CHECKING:
    from torchdebug_magics.instruments.hangwatch.report import State

pytestmark = pytest.mark.waits


def finding(cause: str, line: int, since_s: float, state: State = "slow") -> HangFinding:
    location = Location(cell=None, file="a.py", line=line, function="f", source="")
    root = Wait(who="main", pid=1, location=location, kind="python", waits_for=None, what="")
    return HangFinding(state=state, cause=cause, headline=f"{cause} at {line}", location=location, root=root, since_s=since_s)


@pytest.mark.parametrize(
    ("looks", "kept"),
    [
        ([finding("sleep", 9, 2.0), finding("sleep", 9, 2.2), finding("compute", 10, 2.4)], ("sleep", 9, 2.4)),
        ([finding("sleep", 9, 2.0), finding("compute", 10, 2.2), finding("compute", 10, 2.4)], ("compute", 10, 2.4)),
        ([finding("sleep", 9, 2.0), finding("lock", 10, 2.2, "stuck")], ("sleep", 9, 2.0)),
        ([finding("sleep", 9, 2.0), finding("lock", 10, 2.2, "stuck"), finding("lock", 10, 2.4, "stuck")], ("lock", 10, 2.4)),
    ],
    ids=["the-last-look-met-the-line-behind-the-wait", "another-reason-twice", "stuck-once", "stuck-twice"],
)
def test_one_look_that_says_otherwise_is_not_kept(
    looks: list[HangFinding], kept: tuple[str, int, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = watcher.Watcher(2.0, Children(), OutputMeter(), Guard(), stops=False)
    monkeypatch.setattr(watcher, "running_shell", object)
    for look in looks:
        watch._suspect(look)
    found = watch.standing.finding
    assert found is not None
    assert found.location is not None
    assert (found.cause, found.location.line, found.since_s) == kept


class UnspeakableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError


def run(error: BaseException, name: str = "worker") -> None:
    def fail() -> None:
        raise error

    thread = threading.Thread(target=fail, name=name)
    thread.start()
    thread.join()


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The hook of the user's."""
    told: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", lambda arguments: told.append(arguments.exc_type))
    return told


def test_the_error_its_line_and_its_thread(told: list[Any]) -> None:
    before, errors = threading.excepthook, ThreadErrors()
    with ExitStack() as stack:
        errors.attach(stack)
        run(KeyError("label"))
        run(SystemExit())
    run(ValueError("later"), "other")
    assert threading.excepthook is before
    assert told == [KeyError, SystemExit, ValueError]
    assert set(errors.records) == {"worker"}
    record = errors.records["worker"]
    assert (record["type"], record["message"], record["frames"][-1][2]) == ("KeyError", "'label'", "fail")


def test_what_cannot_be_recorded_is_printed_all_the_same(told: list[Any]) -> None:
    errors = ThreadErrors()
    with ExitStack() as stack:
        errors.attach(stack)
        run(UnspeakableError())
    assert (told, errors.records) == ([UnspeakableError], {})


def test_a_hook_that_the_user_sets_meanwhile_stays(told: list[Any]) -> None:
    def later(_: Any) -> None: ...

    errors = ThreadErrors()
    with ExitStack() as stack:
        errors.attach(stack)
        threading.excepthook = later
    assert threading.excepthook is later
