"""Output is counted on its way, changed in nothing, and the streams are afterwards as they were before."""

from __future__ import annotations

import contextlib
import io
import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

from torchdebug_magics.instruments.hangwatch.main_thread.progress import OutputMeter

if TYPE_CHECKING:
    from collections.abc import Iterator


class Stream(io.StringIO):
    """As a kernel's: Python's own, with a dict."""


@contextlib.contextmanager
def streams() -> Iterator[tuple[Stream, Stream]]:
    """In the place of Python's; entered in the test itself, as pytest puts its own back around each phase."""
    with contextlib.redirect_stdout(Stream()) as out, contextlib.redirect_stderr(Stream()) as err:
        yield out, err


def test_both_streams_are_counted_and_written() -> None:
    with streams() as (out, err):
        meter = OutputMeter()
        with ExitStack() as stack:
            meter.attach(stack)
            print("abc")
            print("de", end="", file=sys.stderr)
            assert sys.stdout.write("fg") == 2
        print("not counted")
        assert meter.written == 8
        assert meter.tail == "abc\ndefg"
        assert [out.getvalue(), err.getvalue()] == ["abc\nfgnot counted\n", "de"]
        assert all("write" not in vars(stream) for stream in (out, err))


def test_of_much_output_the_end_is_kept() -> None:
    with streams() as (out, _):
        meter = OutputMeter()
        with ExitStack() as stack:
            meter.attach(stack)
            for number in range(5000):
                print(number)
        assert len(meter.tail) == 4000
        assert meter.tail.endswith("4998\n4999\n")
        assert meter.written == len(out.getvalue())


def test_a_mistake_of_the_users_is_the_users() -> None:
    with streams(), ExitStack() as stack:
        OutputMeter().attach(stack)
        with pytest.raises(TypeError):
            sys.stdout.write(3)  # type: ignore[arg-type]


def test_one_inside_the_other() -> None:
    with streams() as (out, _):
        outer, inner = OutputMeter(), OutputMeter()
        with ExitStack() as stack:
            outer.attach(stack)
            with ExitStack() as within:
                inner.attach(within)
                print("ab", end="")
            print("c", end="")
        assert (outer.written, inner.written) == (3, 2)
        assert "write" not in vars(out)


def test_they_may_end_in_the_order_in_which_they_began() -> None:
    with streams() as (out, _):
        first, second = OutputMeter(), OutputMeter()
        with ExitStack() as one, ExitStack() as other:
            first.attach(one)
            second.attach(other)
            one.close()
            print("ab", end="")
            assert second.written == 2
            other.close()
        assert "write" not in vars(out), "the one that has ended was put back"
        assert out.getvalue() == "ab"


def test_a_write_that_was_there_before_comes_back() -> None:
    with streams() as (out, _):
        shouted: list[str] = []
        vars(out)["write"] = shouted.append
        with ExitStack() as stack:
            OutputMeter().attach(stack)
            print("a")
        assert shouted == ["a", "\n"]
        assert vars(out)["write"] == shouted.append


def test_whoever_came_later_stays() -> None:
    with streams() as (out, _):
        meter = OutputMeter()
        with ExitStack() as stack:
            meter.attach(stack)
            theirs = vars(out)["write"] = len
        assert vars(out)["write"] is theirs


def test_both_names_for_one_stream() -> None:
    with streams() as (out, _), contextlib.redirect_stderr(out):
        meter = OutputMeter()
        with ExitStack() as stack:
            meter.attach(stack)
            print("ab", end="")
        assert meter.written == 2
        assert "write" not in vars(out)


def test_what_is_captured_inside_is_the_users() -> None:
    with streams():
        meter, captured = OutputMeter(), io.StringIO()
        with ExitStack() as stack:
            meter.attach(stack)
            with contextlib.redirect_stdout(captured):
                print("a")
        assert (captured.getvalue(), meter.written) == ("a\n", 0)


def test_no_stream_or_one_without_a_dict(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slotted:
        __slots__ = ("text",)

        def write(self, text: str) -> int:
            return len(text)

    for stream in (None, Slotted()):
        monkeypatch.setattr(sys, "stdout", stream)
        with ExitStack() as stack:
            OutputMeter().attach(stack)
            print("a")


def test_detaching_twice() -> None:
    with streams() as (out, _):
        meter = OutputMeter()
        with ExitStack() as stack:
            meter.attach(stack)
            meter.detach()
        assert "write" not in vars(out)
