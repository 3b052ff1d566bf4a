"""A way into every process that is started while it is open: what it answers, and what it leaves in the process and here, nothing."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from contextlib import ExitStack
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.children import launched, run
from tests.unit.ranks import targets
from torchdebug_magics.instruments.hangwatch.everybody.looking_around import (
    AgentError,
    ask,
    dumped_stack,
    left_error,
    processes_with_agents,
)
from torchdebug_magics.ranks import agent, launching
from torchdebug_magics.ranks.agent import AGENT_THREAD, dump_signal, socket_path
from torchdebug_magics.ranks.launching import Children
from torchdebug_magics.session import without_ours

if TYPE_CHECKING:
    from collections.abc import Callable

    Until = Callable[..., bool]
    Start = Callable[..., Any]

METHODS = ("fork", "spawn", "forkserver")
HERE = "tests.unit.ranks.targets"


@pytest.mark.parametrize("method", METHODS)
def test_it_answers(method: str, with_agent: Start, children: Children) -> None:
    process = with_agent(targets.wait, method=method, name="sleeper")
    assert ask(children.folder, process.pid, "os:getpid", 10) == process.pid
    assert ask(children.folder, process.pid, "json:dumps", 10, obj={"a": [1]}) == '{"a": [1]}'
    if method != "fork":
        assert ask(children.folder, process.pid, f"{HERE}:is_plain", 10), "the agent has brought torch into the process"
    found = children.started[process.pid]
    assert (found.name, found.method, found.is_alive(), found.exit_code()) == ("sleeper", method, True, None)
    assert found in children.alive()


def test_what_it_cannot_answer_is_said_and_it_goes_on(with_agent: Start, children: Children) -> None:
    pid = with_agent(targets.wait).pid
    for call, said in {
        f"{HERE}:raise_error": "could not answer: ValueError: bad label",
        "no_such_module:thing": "ModuleNotFoundError",
        "os:no_such_function": "AttributeError",
        f"{HERE}:square": "TypeError",
        "threading:current_thread": "TypeError|not JSON|could not",
    }.items():
        with pytest.raises(AgentError, match=said) as caught:
            ask(children.folder, pid, call, 10)
        assert not caught.value.is_silent
    assert ask(children.folder, pid, "os:getpid", 10) == pid


def test_a_long_answer_and_a_long_question(with_agent: Start, children: Children) -> None:
    text = "x" * 1_000_000
    assert ask(children.folder, with_agent(targets.wait).pid, "json:dumps", 10, obj=text) == f'"{text}"'


def test_nobody_to_ask(children: Children, tmp_path: Path) -> None:
    for folder in (children.folder, str(tmp_path / "gone")):
        with pytest.raises(AgentError, match="could not be asked") as caught:
            ask(folder, os.getpid(), "os:getpid")
        assert not caught.value.is_silent
        assert (left_error(folder, 1), dumped_stack(folder, os.getpid(), is_alive=True)) == (None, [])
    assert processes_with_agents(str(tmp_path / "gone")) == []


def test_a_process_in_which_no_thread_gets_a_turn_is_silent_and_shows_its_stack(
    with_agent: Start, children: Children, until: Until
) -> None:
    process = with_agent(targets.hold_gil)
    time.sleep(0.1)
    begun_s = time.monotonic()
    with pytest.raises(AgentError, match=r"did not answer within 0\.3 s") as caught:
        ask(children.folder, process.pid, "os:getpid", 0.3)
    assert caught.value.is_silent
    assert time.monotonic() - begun_s < 1
    stack: list[tuple[str, int, str]] = []
    assert until(lambda: stack.extend(dumped_stack(children.folder, process.pid, is_alive=True)) or stack, 2)
    assert (Path(stack[0][0]).name, stack[0][2]) == ("targets.py", "hold_gil")
    assert process.is_alive(), "the signal has ended it"


ENDS = {
    "raises": ((), 1, "ValueError"),
    "exits": ((3,), 3, None),
    "leaves": ((3,), 3, None),
    "is killed": ((), -signal.SIGKILL, None),
    "is interrupted": ((), 1, None),
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("end", ["raises", "exits", "is killed"])
def test_how_it_has_ended(end: str, method: str, start: Start, children: Children, until: Until) -> None:
    check_end(end, method, start, children, until)


@pytest.mark.parametrize("end", ["leaves", "is interrupted"])
def test_how_a_fork_has_ended(end: str, start: Start, children: Children, until: Until) -> None:
    check_end(end, "fork", start, children, until)


def check_end(end: str, method: str, start: Start, children: Children, until: Until) -> None:
    args, code, error = ENDS[end]
    process = start(targets.RUN[end], *args, method=method)
    found = children.started[process.pid]
    assert until(lambda: not found.is_alive())
    if method != "forkserver":  # whose children are the server's to wait for
        assert found.exit_code() == code
    record = left_error(children.folder, process.pid)
    assert (record or {}).get("type") == error
    if record:
        assert record["message"] == "bad label"
        assert [name for *_, name in record["frames"]][-1] == "raise_error"
        assert abs(record["at_s"] - time.time()) < 20
    process.join()
    assert process.exitcode == code, "somebody else has waited for it"
    assert found.exit_code() == code
    assert children.alive() == []


def test_a_launcher_that_turns_an_error_into_an_exit_code(start: Start, children: Children) -> None:
    process = start(targets.leave_after_error)
    process.join()
    record = left_error(children.folder, process.pid)
    assert record is not None
    assert (record["type"], record["message"]) == ("ValueError", "the first")


def test_an_error_of_the_parents_is_not_the_childs(start: Start, children: Children, monkeypatch: pytest.MonkeyPatch) -> None:
    """IPython keeps the error of an earlier cell as `sys.last_value`, which a fork inherits."""
    monkeypatch.setattr(sys, "last_value", KeyError("of an earlier cell"), raising=False)
    process = start(targets.square, 3)
    process.join()
    assert process.exitcode == 0
    assert left_error(children.folder, process.pid) is None


def test_an_error_that_the_parent_handles_is_not_the_childs(start: Start, children: Children) -> None:
    try:
        raise KeyError("is handled")
    except KeyError:
        process = start(targets.square, 3)
    process.join()
    assert process.exitcode == 0
    assert left_error(children.folder, process.pid) is None


def test_what_is_recorded_beside_an_error(start: Start, until: Until) -> None:
    children = Children(on_error=f"{__name__}:beside")
    with ExitStack() as stack:
        children.attach(stack)
        process = start(targets.raise_error)
        process.join()
        record = left_error(children.folder, process.pid)
    assert record is not None
    assert (record["type"], record["beside"]) == ("ValueError", "ValueError('bad label')")


def beside(error: BaseException) -> dict[str, str]:
    return {"beside": repr(error)}


def test_of_many_frames_the_innermost_are_recorded(start: Start, children: Children) -> None:
    def down(depth: int) -> None:
        if depth:
            down(depth - 1)
        targets.raise_error("x" * 5000)

    process = start(down, 200)
    process.join()
    record = left_error(children.folder, process.pid)
    assert record is not None
    assert (len(record["frames"]), record["frames"][-1][2], len(record["message"])) == (50, "raise_error", 2000)


def test_a_number_that_is_used_again_is_another_process(start: Start, children: Children) -> None:
    process = start(targets.wait)
    found = children.started[process.pid]
    found.started_s -= 5
    assert not found.is_alive()
    assert found.exit_code() is None


def test_the_workers_of_a_pool(children: Children, until: Until) -> None:
    with multiprocessing.get_context("fork").Pool(2) as pool:
        assert pool.map(targets.square, [1, 2, 3]) == [1, 4, 9]
        assert until(lambda: len(processes_with_agents(children.folder)) == 2)
        assert {child.name.partition("-")[0] for child in children.alive()} == {"ForkPoolWorker"}
    pool.join()
    children.note_ends()
    assert children.alive() == []
    assert all(child.handle is None for child in children.started.values()), "their handles are kept"


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_process_of_a_process(method: str, with_agent: Start, children: Children, until: Until) -> None:
    process = with_agent(targets.start_another, method=method)
    assert until(lambda: len(processes_with_agents(children.folder)) == 2)
    inner = next(pid for pid in processes_with_agents(children.folder) if pid != process.pid)
    assert ask(children.folder, inner, "os:getppid", 10) == process.pid
    process.terminate()
    process.join()


def test_a_fork_of_a_process_is_none_of_ours(with_agent: Start, children: Children) -> None:
    ours, theirs = multiprocessing.Pipe()
    process = with_agent(targets.fork_again, theirs)
    assert ours.poll(10)
    forked = ours.recv()
    try:
        for _ in range(5):
            assert ask(children.folder, process.pid, "os:getpid", 10) == process.pid
        assert processes_with_agents(children.folder) == [process.pid]
    finally:
        os.kill(forked, signal.SIGKILL)
    ours.close()
    theirs.close()


def test_what_a_process_has_of_its_parents(start: Start, children: Children) -> None:
    ours, theirs = multiprocessing.Pipe()
    with ExitStack() as stack:
        import socket

        one, other = (stack.enter_context(end) for end in socket.socketpair())
        other.setblocking(False)
        assert one
        stack.callback(signal.set_wakeup_fd, signal.set_wakeup_fd(other.fileno()))
        process = start(targets.report, theirs)
        assert ours.poll(10)
        found = ours.recv()
        process.join()
    assert found["wakeup"] == -1, "the signals of the process are written to the parent's"
    assert found["default"] == dict.fromkeys(("SIGUSR1", "SIGUSR2", "SIGTERM"), True)
    assert found["threads"] == ["MainThread", AGENT_THREAD]
    ours.close()
    theirs.close()


# What is left ----------------------------------------------------------------------------------------------------------


def test_afterwards_nothing_is_patched_and_no_process_gets_an_agent(start: Start, agents_folder: Path) -> None:
    plain = BaseProcess.start
    children = Children()
    with ExitStack() as stack:
        children.attach(stack)
        folder = Path(children.folder)
        assert folder.parent == agents_folder
        assert folder.stat().st_mode & 0o777 == 0o700
        assert BaseProcess.start is not plain
    assert BaseProcess.start is plain
    assert not folder.exists()
    process = start(targets.wait)
    time.sleep(0.1)
    assert process.pid not in children.started
    assert not folder.exists()
    assert list(agents_folder.iterdir()) == []


def test_a_fork_of_ours_that_leaves_the_block_takes_nothing_away(children: Children) -> None:
    with ExitStack() as stack:
        inner = Children()
        inner.attach(stack)
        pid = os.fork()
        if not pid:
            stack.close()
            inner.sweep()
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert Path(inner.folder).is_dir()
        assert inner.started == {}


def test_nothing_is_registered_for_every_fork(monkeypatch: pytest.MonkeyPatch, start: Start) -> None:
    monkeypatch.setattr(os, "register_at_fork", lambda **_: pytest.fail("cannot be undone"))
    with ExitStack() as stack:
        Children().attach(stack)
        start(targets.square, 2).join()


def test_a_lock_of_ours_that_is_held_stops_no_start(children: Children, with_agent: Start) -> None:
    with children.fork_lock:
        begun_s = time.monotonic()
        process = with_agent(targets.wait)
        assert time.monotonic() - begun_s < 2
    assert ask(children.folder, process.pid, "os:getpid", 10) == process.pid


def test_the_lock_of_a_child_is_its_own(children: Children, none_outlives: None) -> None:
    def take(connection: Any) -> None:
        connection.send(children.fork_lock.acquire(timeout=2))

    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=take, args=(theirs,))
    process.start()  # which holds the lock while it forks
    assert ours.poll(10)
    assert ours.recv()
    process.join()
    ours.close()
    theirs.close()


def test_the_process_is_as_the_user_made_it(start: Start, children: Children) -> None:
    process = start(targets.square, 2, method="spawn")
    assert not [name for name in vars(process) if "torchdebug" in name]
    process.join()
    assert process.exitcode == 0


def test_a_start_that_fails_is_the_users_and_shows_no_line_of_ours(children: Children) -> None:
    process = multiprocessing.get_context("spawn").Process(target=lambda: None)
    with pytest.raises(Exception, match=r"pickle|lambda") as caught:
        process.start()
    without_ours(caught.value)
    files = [str(entry.path) for entry in caught.traceback]
    assert not [file for file in files if "torchdebug_magics" in file]
    assert children.started == {}
    assert not [name for name in vars(process) if "torchdebug" in name]


SCRIPT = """
import sys
from contextlib import ExitStack
import multiprocessing
sys.path.insert(0, {root!r})
def fails():
    raise ValueError("bad label")
def run():
    for method in ("fork", "spawn"):
        process = multiprocessing.get_context(method).Process(target=fails, name="one")
        process.start()
        process.join()
    print(process.exitcode, "until here", file=sys.stderr, flush=True)
if __name__ == "__main__":
    run()
    from torchdebug_magics.ranks.launching import Children
    with ExitStack() as stack:
        Children().attach(stack)
        run()
"""


def test_its_traceback_is_that_of_a_plain_run(root: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(root=str(root)))
    code, _, err = run(sys.executable, str(script))
    assert code == 0, err
    plain, watched, rest = err.split("1 until here\n")
    assert plain == watched
    assert (plain.count("ValueError: bad label"), rest) == (2, "")


# The signal by which a stack is shown --------------------------------------------------------------------------------


def test_who_does_not_catch_the_signal_is_not_sent_it(children: Children) -> None:
    number = dump_signal()
    assert number is not None
    with launched(("sleep", "60")) as (child,):
        Path(children.folder, f"{child.process.pid}.stack").touch()
        assert dumped_stack(children.folder, child.process.pid, is_alive=True) == []
        time.sleep(0.1)
        assert child.process.poll() is None, "it was ended"


def test_a_handler_of_the_users_for_it_stays(start: Start, children: Children, until: Until) -> None:
    number = dump_signal()
    assert number is not None
    ours, theirs = multiprocessing.Pipe()
    before = signal.signal(number, lambda *_: None)
    try:
        process = start(tell_handler, theirs, number)
        assert ours.poll(10)
        assert "lambda" in ours.recv()
        assert until(lambda: process.pid in processes_with_agents(children.folder))
        assert dumped_stack(children.folder, process.pid, is_alive=True) == []
        assert not ours.poll(0.3), "it was called"
    finally:
        signal.signal(number, before)
        ours.close()
        theirs.close()


def tell_handler(connection: Any, number: int) -> None:
    connection.send(repr(signal.getsignal(number)))
    signal.signal(number, lambda *_: connection.send("called"))
    time.sleep(60)


def test_a_stack_that_was_written_before_a_crash_is_read(children: Children) -> None:
    text = (
        'Fatal Python error: Segmentation fault\n\nThread 0x01 (most recent call first):\n  File "/a/wait.py", line 3 in wait\n\n'
        'Current thread 0x02 (most recent call first):\n  File "/a/b, line 9 in c/x.py", line 7 in inner\n'
        '  File "/a/x.py", line 9 in <module>\n'
    )
    Path(children.folder, "77.stack").write_text(text)
    assert dumped_stack(children.folder, 77, is_alive=False) == [("/a/b, line 9 in c/x.py", 7, "inner"), ("/a/x.py", 9, "<module>")]


@pytest.mark.parametrize("text", ["", "garbage", "Current thread (most recent call first):\n", "{"])
def test_half_a_record_is_none(text: str, children: Children) -> None:
    Path(children.folder, "78.stack").write_text(text)
    Path(children.folder, "78.error").write_text(text)
    assert dumped_stack(children.folder, 78, is_alive=False) == []
    assert left_error(children.folder, 78) is None


def test_without_real_time_signals(monkeypatch: pytest.MonkeyPatch, start: Start, children: Children, until: Until) -> None:
    monkeypatch.setattr(agent, "signal", type("signal", (), {"getsignal": signal.getsignal, "SIGINT": 2, "set_wakeup_fd": lambda _: -1}))
    assert dump_signal() is None
    process = start(targets.wait)
    assert until(lambda: process.pid in processes_with_agents(children.folder))
    assert ask(children.folder, process.pid, "os:getpid", 10) == process.pid


def test_without_room_for_a_socket_the_process_runs_as_without(start: Start, children: Children) -> None:
    Path(children.folder).rmdir()
    process = start(targets.square, 2)
    process.join()
    assert process.exitcode == 0
    assert processes_with_agents(children.folder) == []
    Path(children.folder).mkdir()


@pytest.mark.parametrize("temporary", ["/x" * 40, "/tmp"])
def test_the_path_of_a_socket_is_short(temporary: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(launching.tempfile, "gettempdir", lambda: temporary)
    folder = Path(launching._short_folder() or temporary)
    assert folder.is_dir()
    assert len(socket_path(f"{folder}/{'t' * 20}", 2**22)) < 100
