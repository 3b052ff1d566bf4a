"""The contract of a session: whatever happens, nothing stays attached, and what was collected is there to read."""

from __future__ import annotations

import sys
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from torchdebug_magics.errors import SessionError
from torchdebug_magics.report import Report
from torchdebug_magics.session import Session

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType


@dataclass(frozen=True, kw_only=True)
class Noted(Report):
    attached_when_frozen: tuple[str, ...] = ()

    @property
    def verdict(self) -> str:
        return "noted"


class World:
    """What a probe attaches itself to, as torch's global tables are."""

    def __init__(self) -> None:
        self.hooks: list[tuple[object, str]] = []
        self.log: list[str] = []

    def add(self, owner: object, name: str) -> None:
        self.hooks.append((owner, name))
        self.log.append(f"+{name}")

    def remove(self, owner: object, name: str) -> None:
        if (owner, name) in self.hooks:
            self.hooks.remove((owner, name))
            self.log.append(f"-{name}")


class FakeProbe:
    """Attaches three hooks; `fails` names the moment at which it raises."""

    NAMES = ("a", "b", "c")

    def __init__(self, world: World, *, fails: str = "") -> None:
        self.world, self.fails = world, fails
        self.reports_count = self.sweeps_count = 0

    def attach(self, stack: ExitStack) -> None:
        for name in self.NAMES:
            if self.fails == f"attach {name}":
                raise OSError(self.fails)
            # Registered first: a callback for a hook that is not there yet is harmless, the reverse is not.
            stack.callback(self._detach, name)
            self.world.add(self, name)

    def _detach(self, name: str) -> None:
        self.world.remove(self, name)
        if self.fails == f"detach {name}":
            raise OSError(self.fails)

    def sweep(self) -> None:
        self.sweeps_count += 1
        for owner, name in list(self.world.hooks):
            if owner is self:
                self.world.remove(owner, name)

    def report(self) -> Noted:
        self.reports_count += 1
        return Noted(attached_when_frozen=tuple(name for owner, name in self.world.hooks if owner is self))

    def live(self) -> object | None:
        return "so far"

    def kept(self) -> dict[str, object]:
        return {"bad": {"output": 1.0}} if self.fails == "keeps" else {}


@pytest.fixture
def world() -> World:
    return World()


class TestInOrder:
    def test_attached_inside_and_detached_after_in_reverse(self, world: World) -> None:
        with Session(FakeProbe(world)):
            assert [name for _, name in world.hooks] == ["a", "b", "c"]
        assert world.log == ["+a", "+b", "+c", "-c", "-b", "-a"]

    def test_making_a_session_attaches_nothing(self, world: World) -> None:
        Session(FakeProbe(world))
        assert world.log == []

    def test_entering_gives_the_session(self, world: World) -> None:
        session = Session(FakeProbe(world))
        with session as entered:
            assert entered is session

    def test_the_report_is_frozen_once_after_everything_is_detached(self, world: World) -> None:
        probe = FakeProbe(world)
        with Session(probe) as session:
            pass
        assert session.report is session.report
        assert session.report.attached_when_frozen == ()
        assert probe.reports_count == 1

    def test_the_live_snapshot_is_there_only_while_open(self, world: World) -> None:
        session = Session(FakeProbe(world))
        assert session.live() is None
        with session:
            assert session.live() == "so far"
        assert session.live() is None

    def test_what_the_probe_kept(self, world: World) -> None:
        with Session(FakeProbe(world, fails="keeps")) as found, Session(FakeProbe(world)) as clean:
            pass
        assert found.kept == {"bad": {"output": 1.0}}
        assert found.bad == {"output": 1.0}
        assert clean.bad == {}


class TestOutOfOrder:
    def test_the_report_before_the_start_is_an_error(self, world: World) -> None:
        with pytest.raises(SessionError, match="read it after the `with` block"):
            _ = Session(FakeProbe(world)).report

    def test_the_report_before_the_end_is_an_error(self, world: World) -> None:
        with Session(FakeProbe(world)) as session, pytest.raises(SessionError, match="read it after the `with` block"):
            _ = session.report
        assert session.report.verdict == "noted"

    def test_a_session_runs_once(self, world: World) -> None:
        session = Session(FakeProbe(world))
        with session:
            pass
        with pytest.raises(SessionError, match="make a new one"), session:
            pass
        assert world.hooks == []
        assert session.report.verdict == "noted"

    def test_entering_an_open_session_again_leaves_it_open(self, world: World) -> None:
        session = Session(FakeProbe(world))
        with session:
            with pytest.raises(SessionError):
                session.__enter__()
            assert len(world.hooks) == 3
        assert world.hooks == []

    def test_leaving_twice_changes_nothing(self, world: World) -> None:
        probe = FakeProbe(world)
        session = Session(probe)
        with session:
            pass
        first = session.report
        session.__exit__(None, None, None)
        assert session.report is first
        assert probe.reports_count == 1

    def test_leaving_what_was_never_entered_does_nothing(self, world: World) -> None:
        probe = FakeProbe(world)
        session = Session(probe)
        session.__exit__(None, None, None)
        assert (probe.sweeps_count, probe.reports_count, world.log) == (0, 0, [])


class TestErrors:
    def test_the_error_of_the_body_passes_unchanged_and_the_report_is_there(self, world: World) -> None:
        raised = ValueError("the user's own")
        session = Session(FakeProbe(world))
        with pytest.raises(ValueError, match="the user's own") as caught, session:
            raise raised
        assert caught.value is raised
        assert raised.__context__ is None
        assert world.hooks == []
        assert session.report.verdict == "noted"

    @pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit, GeneratorExit])
    def test_so_does_a_stop_that_is_no_exception(self, world: World, stop: type[BaseException]) -> None:
        session = Session(FakeProbe(world))
        with pytest.raises(stop), session:
            raise stop
        assert world.hooks == []
        assert session.report.verdict == "noted"

    @pytest.mark.parametrize("name", FakeProbe.NAMES)
    def test_attaching_that_fails_half_way_unwinds(self, world: World, name: str) -> None:
        session = Session(FakeProbe(world, fails=f"attach {name}"))
        with pytest.raises(OSError, match=f"attach {name}"), session:
            pytest.fail("the body must not run")
        assert world.hooks == []
        assert session.live() is None
        with pytest.raises(SessionError):
            _ = session.report

    @pytest.mark.parametrize("name", FakeProbe.NAMES)
    def test_detaching_that_fails_still_detaches_the_rest_and_freezes_the_report(self, world: World, name: str) -> None:
        session = Session(FakeProbe(world, fails=f"detach {name}"))
        with pytest.raises(OSError, match=f"detach {name}"), session:
            pass
        assert world.hooks == []
        assert session.report.attached_when_frozen == ()

    def test_detaching_that_fails_keeps_the_error_of_the_body_in_sight(self, world: World) -> None:
        with pytest.raises(OSError, match="detach a") as caught, Session(FakeProbe(world, fails="detach a")):
            raise ValueError
        assert isinstance(caught.value.__context__, ValueError)


class TestNested:
    def test_in_order(self, world: World) -> None:
        with Session(FakeProbe(world)) as outer:
            with Session(FakeProbe(world)) as inner:
                assert len(world.hooks) == 6
            assert inner.report.attached_when_frozen == ()
            assert len(world.hooks) == 3
        assert world.hooks == []
        assert outer.report.verdict == "noted"

    def test_crossed(self, world: World) -> None:
        first, second = Session(FakeProbe(world)), Session(FakeProbe(world))
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        assert len(world.hooks) == 3
        assert second.live() == "so far"
        second.__exit__(None, None, None)
        assert world.hooks == []

    def test_a_failing_inner_one_leaves_the_outer_one_attached(self, world: World) -> None:
        with Session(FakeProbe(world)):
            with pytest.raises(OSError, match="attach b"), Session(FakeProbe(world, fails="attach b")):
                pass
            assert len(world.hooks) == 3
        assert world.hooks == []


@contextmanager
def interrupted_at(moment: int, files: tuple[str, ...]) -> Iterator[Callable[[], bool]]:
    """Raise KeyboardInterrupt before the `moment`-th bytecode instruction that runs in `files`, as a signal could."""
    seen = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal seen
        if frame.f_code.co_filename not in files:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            seen += 1
            if seen == moment:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield lambda: seen >= moment
    finally:
        sys.settrace(before)


def test_an_interrupt_at_any_instruction_leaves_nothing_once_the_session_is_left_again() -> None:
    """Every point, not a sample: the end of a cell leaves each of its sessions once more, and then nothing may be attached."""
    import contextlib

    from torchdebug_magics import session as session_module

    files = (session_module.__file__, contextlib.__file__, __file__)
    moment = left_behind = without_report = 0
    happened = True
    while happened:
        moment += 1
        world = World()
        other = Session(FakeProbe(world))
        other.__enter__()
        session = Session(FakeProbe(world))
        entered = False
        try:
            with interrupted_at(moment, files) as has_happened, session:
                entered = True
        except KeyboardInterrupt:
            pass
        happened = has_happened()
        left_behind += len(world.hooks) > 3
        session.__exit__(None, None, None)
        assert {owner for owner, _ in world.hooks} == {other._probe}, f"left behind at instruction {moment}: {world.log}"
        assert len(world.hooks) == 3
        if entered:
            assert session.report.attached_when_frozen == (), f"at instruction {moment}"
        else:
            without_report += 1
        other.__exit__(None, None, None)
    assert moment > 200, "the tracing saw next to nothing"
    assert left_behind, "no interrupt left anything behind before the second exit: this test shows nothing"
    assert without_report, "no interrupt came while attaching"
