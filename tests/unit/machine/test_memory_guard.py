"""What ends a cell before the system ends the kernel."""

from __future__ import annotations

import signal
import time

import pytest

from torchdebug_magics.machine.limits import Limit, Limits, MemoryGuard

ASLEEP_S = 20.0
"""To be woken from; the tests end in a fraction of a second."""


class Full(Limits):
    """Nine tenths of a container are used."""

    def all(self) -> list[Limit]:
        return [Limit(1000, 900, None, "container limit")]


def sleep() -> None:
    time.sleep(ASLEEP_S)


def test_it_wakes_a_sleeper_and_tells_what_was_used() -> None:
    guard = MemoryGuard(0.8, Full())
    with guard.watching(), pytest.raises(KeyboardInterrupt):
        sleep()
    assert [(one.used_bytes, one.limit_bytes, one.whose, one.guard_ratio) for one in guard.interrupts] == [
        (900, 1000, "container limit", 0.8)
    ]


def test_a_signal_that_falls_just_before_a_sleep_is_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    send, sent = signal.pthread_kill, []

    def first_unseen(thread: int, number: int) -> None:
        sent.append(number)
        if len(sent) > 1:
            send(thread, number)

    monkeypatch.setattr(signal, "pthread_kill", first_unseen)
    guard = MemoryGuard(0.8, Full())
    with guard.watching(), pytest.raises(KeyboardInterrupt):
        sleep()
    assert len(sent) == 2
    assert len(guard.interrupts) == 1


def test_one_that_was_seen_is_not_sent_again() -> None:
    guard = MemoryGuard(0.8, Full())
    with guard.watching():
        with pytest.raises(KeyboardInterrupt):
            sleep()
        time.sleep(0.3)  # while the guard looks a few times more
    assert len(guard.interrupts) == 1
