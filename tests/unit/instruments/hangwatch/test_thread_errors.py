"""What ends a thread is noted, and whoever else is told of it still is."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from typing import Any

import pytest

from torchdebug_magics.instruments.hangwatch.watcher import ThreadErrors


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
