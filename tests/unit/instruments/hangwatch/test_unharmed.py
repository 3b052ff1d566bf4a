"""Whatever happens in a session, and however it ends: what the user has is as it was, and nothing of ours is left."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import random
import signal
import socket
import sys
import threading
import time
import weakref
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import nn

import torchdebug_magics
from tests import leaks
from torchdebug_magics.instruments.hangwatch.getting_out import StopPresses, end_processes, new_processes, wake_loop
from torchdebug_magics.instruments.hangwatch.probe import HangProbe
from torchdebug_magics.machine.process_state import process_state
from torchdebug_magics.ranks.launching import Children
from torchdebug_magics.session import Session

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("none_outlives")
FORK = multiprocessing.get_context("fork")


def train(steps: int = 6) -> list[Any]:
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002 - the global one is the one that users seed
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.3), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    losses = []
    data = torch.utils.data.TensorDataset(torch.randn(steps * 4, 8))
    for (x,) in torch.utils.data.DataLoader(data, 4, shuffle=True):
        loss = model(x + random.random() + np.random.rand()).pow(2).mean()  # noqa: NPY002 - as above
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        time.sleep(0.03)  # for looks to fall into the loop
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    return [losses, weights, torch.get_rng_state(), random.getstate(), str(np.random.get_state(legacy=False))]  # noqa: NPY002 - as above


@pytest.mark.keeps_rng
def test_numbers_and_generators_are_those_of_a_plain_run() -> None:
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()  # noqa: NPY002 - as above
    plain = train()
    with torchdebug_magics.hangwatch(after=0.05):
        watched = train()
    assert plain[0] == watched[0]
    assert all(torch.equal(one, other) for one, other in zip(plain[1], watched[1], strict=True))
    assert torch.equal(plain[2], watched[2])
    assert plain[3:] == watched[3:]
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    np.random.set_state(states[2])  # noqa: NPY002 - as above


def test_what_a_thread_held_is_let_go_of() -> None:
    class Big:
        pass

    gone: list[weakref.ref[Big]] = []

    def use() -> None:
        big = Big()
        gone.append(weakref.ref(big))
        time.sleep(0.8)  # while everybody is looked at
        del big

    with torchdebug_magics.hangwatch(after=0.2):
        use()
        time.sleep(0.3)
        assert gone[0]() is None
    assert gone[0]() is None


# Signals -------------------------------------------------------------------------------------------------------------


def test_a_signal_of_the_users_is_the_users() -> None:
    got: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: got.append(number))
    theirs = signal.getsignal(signal.SIGUSR1)
    try:
        with torchdebug_magics.hangwatch(after=0.2):
            child = FORK.Process(target=tell, args=(os.getpid(),))
            child.start()
            child.join()
            assert signal.getsignal(signal.SIGUSR1) is theirs
            time.sleep(0.6)
        assert got == [signal.SIGUSR1]
        assert signal.getsignal(signal.SIGUSR1) is theirs
    finally:
        signal.signal(signal.SIGUSR1, before)


def tell(parent: int) -> None:
    os.kill(parent, signal.SIGUSR1)


@pytest.fixture
def wakeup() -> Iterator[socket.socket]:
    """A descriptor of the user's, to which Python writes each signal."""
    with ExitStack() as stack:
        reading, writing = (stack.enter_context(end) for end in socket.socketpair())
        reading.settimeout(2)
        writing.setblocking(False)
        stack.callback(signal.set_wakeup_fd, signal.set_wakeup_fd(writing.fileno()))
        stack.callback(signal.signal, signal.SIGUSR1, signal.signal(signal.SIGUSR1, lambda *_: None))
        yield reading


def test_a_descriptor_of_the_users_is_served_and_comes_back(wakeup: socket.socket) -> None:
    with torchdebug_magics.hangwatch(), torchdebug_magics.hangwatch():
        os.kill(os.getpid(), signal.SIGUSR1)
        assert wakeup.recv(10) == bytes([signal.SIGUSR1])
    os.kill(os.getpid(), signal.SIGUSR1)
    assert wakeup.recv(10) == bytes([signal.SIGUSR1])


def test_sessions_that_end_in_the_order_in_which_they_began(wakeup: socket.socket) -> None:
    first, second = torchdebug_magics.hangwatch(), torchdebug_magics.hangwatch()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    second.__exit__(None, None, None)
    os.kill(os.getpid(), signal.SIGUSR1)
    assert wakeup.recv(10) == bytes([signal.SIGUSR1])


def test_sessions_that_end_in_that_order_without_a_descriptor_of_the_users() -> None:
    first, second = torchdebug_magics.hangwatch(), torchdebug_magics.hangwatch()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    second.__exit__(None, None, None)
    assert signal.set_wakeup_fd(-1) == -1


def test_a_descriptor_that_came_inside_stays() -> None:
    reading, writing = socket.socketpair()
    writing.setblocking(False)
    with torchdebug_magics.hangwatch():
        signal.set_wakeup_fd(writing.fileno())
    assert signal.set_wakeup_fd(-1) == writing.fileno()
    reading.close()
    writing.close()


def test_a_press_of_stop_is_noticed_while_python_cannot_act_on_it() -> None:
    presses = StopPresses()
    with ExitStack() as stack:
        presses.attach(stack)
        presses.look()
        assert presses.at_s is None
        handler = signal.signal(signal.SIGINT, lambda *_: None)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)
        signal.signal(signal.SIGINT, handler)
        presses.look()
        assert time.monotonic() - (presses.at_s or 0) < 1


def test_in_another_thread_stop_is_left_alone() -> None:
    found: list[int] = []

    def watch() -> None:
        with torchdebug_magics.hangwatch() as session:
            time.sleep(0.3)
        found.append(len(session.report.problems))

    thread = threading.Thread(target=watch)
    thread.start()
    thread.join()
    assert found == [0]


# Processes -----------------------------------------------------------------------------------------------------------


def stubborn() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(60)


def with_child() -> None:
    FORK.Process(target=stubborn).start()
    time.sleep(60)


def test_what_the_session_has_started_is_ended_and_nothing_else(until: Callable[..., bool]) -> None:
    earlier = FORK.Process(target=time.sleep, args=(60,))
    earlier.start()
    with pytest.raises(KeyboardInterrupt), torchdebug_magics.hangwatch() as session:  # noqa: PT012 - what is done inside is the point
        ours = [FORK.Process(target=target) for target in (stubborn, with_child)]
        for process in ours:
            process.start()
        time.sleep(0.3)
        raise KeyboardInterrupt
    assert session.report.stopped_count == 3
    assert session.report.ended_by == "Stop"
    assert earlier.is_alive()
    for process in ours:
        process.join(2)
        assert process.exitcode is not None


def test_an_error_ends_no_process() -> None:
    with pytest.raises(ZeroDivisionError), torchdebug_magics.hangwatch() as session:  # noqa: PT012 - what is done inside is the point
        process = FORK.Process(target=time.sleep, args=(60,))
        process.start()
        raise ZeroDivisionError
    assert process.is_alive()
    assert session.report.stopped_count == 0


def test_one_that_is_stopped_is_ended_too(until: Callable[..., bool]) -> None:
    process = FORK.Process(target=time.sleep, args=(60,))
    process.start()
    os.kill(process.pid or 0, signal.SIGSTOP)
    assert until(lambda: (state := process_state(process.pid or 0)) is not None and state.status == "stopped")
    assert process.pid in new_processes(Children(), [])
    assert process.pid not in new_processes(Children(), [process.pid])
    assert end_processes([process.pid or 0, 2**22 + 1]) == 1
    process.join(2)
    assert process.exitcode == -signal.SIGTERM


def test_no_sleeping_loop_is_needed_to_wake_one() -> None:
    wake_loop()  # there is none

    async def body() -> str:
        threading.Timer(0.1, wake_loop).start()
        await asyncio.sleep(0.3)
        return "went on"

    assert asyncio.run(body()) == "went on"


def test_workers_of_a_loader_come_and_go(until: Callable[..., bool]) -> None:
    data = torch.utils.data.TensorDataset(torch.arange(8.0))
    with torchdebug_magics.hangwatch(after=0.3) as session:
        for _ in range(2):
            assert [x.sum().item() for (x,) in torch.utils.data.DataLoader(data, 4, num_workers=1)] == [6.0, 22.0]
    assert session.report.state == "finished"
    assert session.report.cause is None


# However it ends -----------------------------------------------------------------------------------------------------


def interrupted_after(delay_s: float) -> bool:
    """Enter and leave, while Stop is pressed at some moment of it."""
    session, ready, main = Session(HangProbe(after=0.2)), threading.Event(), threading.main_thread().ident or 0

    def press() -> None:
        ready.wait()
        end_s = time.perf_counter() + delay_s
        while time.perf_counter() < end_s:
            time.sleep(0)
        signal.pthread_kill(main, signal.SIGINT)

    thread = threading.Thread(target=press, daemon=True)
    thread.start()
    try:
        ready.set()
        with session:
            pass
        has_ended = True
        thread.join()
        time.sleep(0.01)
    except KeyboardInterrupt:
        has_ended = False
    except OSError as error:  # `shutil.rmtree` makes one of an interrupt in its middle
        if not isinstance(error.__context__, KeyboardInterrupt):
            raise
        has_ended = False
    thread.join()
    session.__exit__(None, None, None)  # as the end of a cell does a second time
    return not has_ended


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # a socket that no name was given yet closes itself, and says so
def test_an_interrupt_at_any_moment_leaves_nothing(agents_folder: Path) -> None:
    choose = random.Random(3)
    for _ in range(2):  # at first all is imported
        begun_s = time.perf_counter()
        with torchdebug_magics.hangwatch():
            pass
        took_s = time.perf_counter() - begun_s
    before, many = leaks.snapshot(), 0
    for _ in range(150):
        many += interrupted_after(choose.uniform(0, 1.5 * took_s))
        left = leaks.differences(before, leaks.snapshot())
        assert left == []
        assert list(agents_folder.iterdir()) == []
    assert many > 30, "hardly one came in time"


@pytest.mark.parametrize("end", [SystemExit, KeyboardInterrupt, GeneratorExit, asyncio.CancelledError])
def test_every_end_is_an_end(end: type[BaseException], agents_folder: Path) -> None:
    with pytest.raises(end), torchdebug_magics.hangwatch() as session:
        raise end
    assert session.report.state in {"finished", "interrupted"}
    assert list(agents_folder.iterdir()) == []


def test_a_fork_that_leaves_the_block_ends_only_its_own(agents_folder: Path) -> None:
    with torchdebug_magics.hangwatch() as session:
        process = FORK.Process(target=time.sleep, args=(60,))
        process.start()
        pid = os.fork()
        if not pid:
            try:
                session.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
            finally:
                os._exit(0)
        os.waitpid(pid, 0)
        is_alive, folders = process.is_alive(), len(list(agents_folder.iterdir()))
        process.kill()
        process.join()
        assert session.live() is not None
    assert is_alive, "a fork has ended a process of its parent's"
    assert folders == 1, "a fork has removed the folder of its parent's session"


def test_output_goes_where_it_went(capsys: pytest.CaptureFixture[str]) -> None:
    with torchdebug_magics.hangwatch(after=0.2), torchdebug_magics.hangwatch(after=0.2):
        print("one")
        print("two", file=sys.stderr)
        time.sleep(0.6)
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("one\n", "two\n")


def test_a_session_under_a_tracer_changes_no_variable() -> None:
    def counted() -> int:
        total = 0
        end_s = time.monotonic() + 1.0
        while time.monotonic() < end_s:
            total += 1
            check = total
            assert check == total
        return total

    seen: list[str] = []

    def trace(_frame: object, event: str, _arg: object) -> Any:
        seen.append(event) if len(seen) < 5 else None
        return trace

    with torchdebug_magics.hangwatch(after=0.2):
        sys.settrace(trace)
        try:
            assert counted() > 100
        finally:
            sys.settrace(None)
    assert seen


def test_variables_keep_their_values_while_they_are_looked_at() -> None:
    """Before Python 3.13, a look at a running frame from another thread must never write back what it saw."""

    def counted() -> int:
        wrong, last = 0, -1
        inner = 0
        end_s = time.monotonic() + 1.5
        while time.monotonic() < end_s:
            for value in range(1000):
                inner = value
                wrong += inner != value
            last += 1
        return wrong

    with torchdebug_magics.hangwatch(after=0.2):
        assert counted() == 0
