"""What the system says of a process: running, waiting in which call, ended and how; and of one that nobody may look at."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING

import pytest

from torchdebug_magics.machine import process_state as module
from torchdebug_magics.machine.process_state import (
    age_s,
    catches,
    child_pids,
    exit_code_of,
    main_thread_ran_s,
    open_pipes,
    process_state,
    read,
    thread_cpu_s,
    waited_for_core_s,
    waits_in,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = pytest.mark.waits

NOBODY = 2**22 + 1
"""Above the largest number that Linux gives to a process."""


def until(holds: Callable[[], object], limit_s: float = 10.0) -> bool:
    end_s = time.monotonic() + limit_s
    while not (found := bool(holds())) and time.monotonic() < end_s:
        time.sleep(0.01)
    return found


@contextlib.contextmanager
def running(code: str, **options: object) -> Iterator[subprocess.Popen[bytes]]:
    """Python with this code, killed at the end; it has printed a line when it is there."""
    child = subprocess.Popen([sys.executable, "-S", "-c", code], stdout=subprocess.PIPE, **options)  # type: ignore[call-overload]
    try:
        assert child.stdout.readline()
        yield child
    finally:
        child.kill()
        child.wait()
        for end in (child.stdout, child.stdin):
            if end is not None:
                end.close()


def burn(seconds: float) -> None:
    end_s = time.thread_time() + seconds
    while time.thread_time() < end_s:
        pass


def test_of_this_process() -> None:
    state = process_state(os.getpid())
    assert state is not None
    assert (state.pid, state.parent, state.status, state.is_zombie) == (os.getpid(), os.getppid(), "running", False)
    burn(0.1)
    later = process_state(os.getpid())
    assert later is not None
    assert later.cpu_s - state.cpu_s >= 0.08
    assert later.started_s == state.started_s
    assert 0 < age_s() < time.time() - state.started_s + 1


@pytest.mark.parametrize(("code", "exit_code"), [("raise SystemExit(3)", 3), ("import os; os.kill(os.getpid(), 9)", -9), ("", 0)])
def test_how_one_has_ended_without_waiting_for_it(code: str, exit_code: int) -> None:
    child = subprocess.Popen([sys.executable, "-S", "-c", code])
    assert until(lambda: (state := process_state(child.pid)) is not None and state.is_zombie)
    assert exit_code_of(child.pid) == exit_code_of(child.pid) == exit_code, "it is still there for whoever waits for it"
    assert child.wait() == exit_code
    assert (process_state(child.pid), exit_code_of(child.pid), exit_code_of(os.getppid())) == (None, None, None)


def test_of_nobody() -> None:
    assert process_state(NOBODY) is None
    assert thread_cpu_s(os.getpid(), NOBODY) is None
    assert thread_cpu_s(os.getpid(), None) is None
    assert (waits_in(NOBODY), child_pids(NOBODY), open_pipes(NOBODY), catches(NOBODY, 10)) == ("", [], frozenset(), False)


def test_the_time_that_one_thread_has_computed() -> None:
    numbers: list[int] = []
    end = threading.Event()

    def work() -> None:
        burn(0.15)
        numbers.append(threading.get_native_id())
        end.wait()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    until(lambda: numbers)
    assert (thread_cpu_s(os.getpid(), numbers[0]) or 0) >= 0.1
    before = main_thread_ran_s()
    time.sleep(0.1)
    assert main_thread_ran_s() - before < 0.09, "it has slept"
    burn(0.1)
    assert main_thread_ran_s() - before >= 0.09
    end.set()
    thread.join()


def test_children_of_every_thread_and_not_those_that_were_waited_for() -> None:
    before = child_pids(os.getpid())
    children: list[subprocess.Popen[bytes]] = []
    end = threading.Event()

    def start() -> None:
        children.append(subprocess.Popen(["sleep", "60"]))
        end.wait()

    thread = threading.Thread(target=start, daemon=True)
    thread.start()
    assert until(lambda: children)
    try:
        assert sorted(set(child_pids(os.getpid())) - set(before)) == [children[0].pid]
        end.set()
        thread.join()
        assert children[0].pid in child_pids(os.getpid()), "the thread that started it has ended"
    finally:
        children[0].kill()
        children[0].wait()
    assert children[0].pid not in child_pids(os.getpid())


SLEEPS = {
    "sleep": ("print(1, flush=True); import time; time.sleep(60)", "sleep"),
    "read": ("print(1, flush=True); import os; os.read(0, 1)", "read pipe:["),
    "write": ("import os; print(1, flush=True); os.write(1, b'x' * (1 << 20))", "write pipe:["),
    "lock": ("import threading; lock = threading.Lock(); lock.acquire(); print(1, flush=True); lock.acquire()", "futex"),
    "socket": ("import socket; ends = socket.socketpair(); print(1, flush=True); ends[0].recv(1)", "receive"),
    "child": ("import os; pid = os.fork() or __import__('time').sleep(60); print(1, flush=True); os.waitpid(pid, 0)", "wait"),
}


@pytest.mark.parametrize("call", SLEEPS)
def test_the_call_that_one_sleeps_in(call: str) -> None:
    code, said = SLEEPS[call]
    with running(code, stdin=subprocess.PIPE, start_new_session=True) as child:
        assert until(lambda: waits_in(child.pid).startswith(said)), waits_in(child.pid)
        if "pipe" in said:
            assert waits_in(child.pid).partition(" ")[2] in open_pipes(child.pid)
        os.killpg(child.pid, signal.SIGKILL)


def test_one_that_computes_sleeps_in_nothing() -> None:
    with running("print(1, flush=True)\nwhile True: pass") as child:
        assert until(lambda: waits_in(child.pid) == "")


def test_what_it_catches() -> None:
    handler = "import signal, time; signal.signal(signal.SIGUSR1, lambda *_: None); print(1, flush=True); time.sleep(60)"
    with running(handler) as child:
        assert catches(child.pid, signal.SIGUSR1)
        assert not catches(child.pid, signal.SIGUSR2)
    ignores = "import signal, time; signal.signal(signal.SIGUSR1, signal.SIG_IGN); print(1, flush=True); time.sleep(60)"
    with running(ignores) as child:
        assert not catches(child.pid, signal.SIGUSR1)


def test_what_may_not_be_looked_at_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "read", lambda path, *_: None if path.endswith("/syscall") else "1 (init) S 0 1")
    assert waits_in(1) == ""
    monkeypatch.setattr(module, "read", lambda _path, *_: "running")
    assert waits_in(1) == ""
    monkeypatch.setattr(module, "read", lambda _path, *_: "0 0x3 0x0")
    monkeypatch.setattr(module.platform, "machine", lambda: "x86_64")
    assert waits_in(NOBODY) == "read", "whose files are not ours to see"


def test_a_system_without_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    def listed(path: str | bytes) -> list[str] | list[bytes]:
        if str(path).endswith("/task"):
            raise FileNotFoundError(path)
        return listdir(path)

    listdir = os.listdir
    with running("print(1, flush=True); import time; time.sleep(60)") as child, monkeypatch.context() as without:
        without.setattr(module.os, "listdir", listed)
        pids = module.child_pids(os.getpid())
    assert child.pid in pids


def test_time_without_a_core_is_told() -> None:
    """Two that compute on one core: each waits for the other."""
    cores = os.sched_getaffinity(0)
    code = f"import os; os.sched_setaffinity(0, [{min(cores)}])\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-c", code]) as other:
        try:
            os.sched_setaffinity(0, {min(cores)})
            before_s, end_s = waited_for_core_s(os.getpid(), None), time.monotonic() + 10
            while waited_for_core_s(os.getpid(), None) < before_s + 0.05 and time.monotonic() < end_s:
                pass
            assert waited_for_core_s(os.getpid(), None) >= before_s + 0.05
        finally:
            os.sched_setaffinity(0, cores)
            other.kill()
    assert waited_for_core_s(NOBODY, None) == 0.0


def test_the_text_without_blanks_around(tmp_path: Path):
    (tmp_path / "x").write_text(" 12 \n\n")
    assert read(f"{tmp_path}/x") == "12"
    assert read(f"{tmp_path}/x", 2) == "1"


def test_what_cannot_be_read_is_none(tmp_path: Path):
    assert read(f"{tmp_path}/nowhere") is None
    assert read(str(tmp_path)) is None
