from __future__ import annotations

import pytest

from torchdebug_magics.probing.safety import Guard


def test_what_works_is_passed_through() -> None:
    guard = Guard()
    assert guard.run("the sum", lambda one, two: one + two, 1, two=2) == 3
    assert guard.problems == []


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("first\nsecond"), "the look failed: ValueError: first"),
        (RuntimeError(), "the look failed: RuntimeError"),
        (KeyError("name"), "the look failed: KeyError: 'name'"),
        (RuntimeError("x" * 500), "the look failed: RuntimeError: " + "x" * 200),
    ],
)
def test_a_failure_is_one_line_and_none(error: Exception, line: str) -> None:
    guard = Guard()

    def fail() -> None:
        raise error

    assert guard.run("the look", fail) is None
    assert guard.problems == [line]


def test_the_same_failure_is_said_once() -> None:
    guard = Guard()
    for _ in range(3):
        guard.run("it", [].pop)
        guard.note("and another")
    assert len(guard.problems) == 2


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_an_interrupt_is_nobodys_failure(error: type[BaseException]) -> None:
    guard = Guard()

    def interrupted() -> None:
        raise error

    with pytest.raises(error):
        guard.run("it", interrupted)
    assert guard.problems == []
