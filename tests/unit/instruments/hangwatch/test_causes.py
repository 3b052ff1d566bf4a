"""From facts to a finding: stuck or slow, by which cause, about whom, and what to change."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.unit.instruments.hangwatch.build import BACKWARD, FILE, US, World, backward, facts, issued, thread, waits
from torchdebug_magics.instruments.hangwatch.causes import judge
from torchdebug_magics.instruments.hangwatch.causes.judge import debugger_now
from torchdebug_magics.instruments.hangwatch.main_thread.progress import Progress
from torchdebug_magics.machine.limits import MemoryPressure

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchdebug_magics.instruments.hangwatch.report import HangFinding

ME, OTHER, CHILD = ("thread", 1), ("thread", 2), ("process", 100)
QUIET = MemoryPressure(0.0, 0, 0.1, "container limit")


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge, "memory_pressure", lambda: QUIET)


def main(world: World, waiting: dict[str, Any] | None, *others: dict[str, Any], **more: Any) -> World:
    world.own = facts(US, thread(1, waiting, **more), *others)
    return world


def worker(waiting: dict[str, Any] | None, **more: Any) -> dict[str, Any]:
    return facts(100, thread(1, waiting, line=8, **more), worker=0)


def rank(number: int, waiting: dict[str, Any] | None = None, collectives: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    frames = [(FILE, 20 + number, "step")]
    frames = [BACKWARD, *frames] if more.pop("in_backward", False) else frames
    return facts(100 + number, thread(1, waiting, frames=frames), rank=number, world_size=2, collectives=collectives, **more)


def ranks(world: World, *told: dict[str, Any]) -> World:
    for one in told:
        world.add(one, method="spawn")
    return main(world, waits("join", "the end of 2 processes", tuple(("process", one["pid"]) for one in told)))


IN_COLLECTIVE = waits("collective", "all_reduce", op="all_reduce", peer=None)
IN_BATCH = waits("batch", "batch 2", (CHILD,), batch=2, worker=0, workers=1, pin_memory=False)

# (what there is, cause, root, words of the headline, words of the fix)
STUCK: dict[str, tuple[Callable[[World], World], str, str, str, str]] = {
    "a lock and a join": (
        lambda world: main(world, waits("join", on=(OTHER,)), thread(2, waits("lock", on=(ME,)))),
        "deadlock", "main", "wait for each other", "release the lock before",
    ),
    "three threads": (
        lambda world: main(
            world, waits("join", on=(OTHER,)), thread(2, waits("lock", on=(("thread", 3),))), thread(3, waits("lock", on=(OTHER,)))
        ),
        "deadlock", "thread t2", "thread t2 and thread t3 wait for each other", "same order",
    ),
    "a lock of nobody": (
        lambda world: main(world, waits("lock")), "lock_never_released", "main", "a lock that was never released", "with lock:",
    ),
    "a lock between processes": (
        lambda world: main(world, waits("join", on=(CHILD,))).add(facts(100, thread(1, waits("lock", semaphore="/s"), line=8))),
        "lock_never_released", "process Process-100", "never released", "with lock:",
    ),
    "a full queue": (
        lambda world: main(world, waits("queue", "queue.put()", put=True)), "queue_never_fed", "main", "a full queue", "maxsize",
    ),
    "the join of a queue": (
        lambda world: main(world, waits("queue", "queue.join()", join=True)), "event_never_set", "main", "task_done()", "finally",
    ),
    "an event": (
        lambda world: main(world, waits("event", "event")), "event_never_set", "main", "an event that is never set", "finally",
    ),
    "a condition": (
        lambda world: main(world, waits("event", "condition")), "event_never_set", "main", "a condition that is never notified", "notify",
    ),
    "a barrier": (
        lambda world: main(world, waits("event", "barrier of 3 threads, 1 arrived")), "event_never_set", "main", "barrier of 3", "parties",
    ),
    "a worker that has nothing to do": (
        lambda world: main(world, IN_BATCH).add(worker(waits("queue", "more work", idle=True))),
        "worker_blocked", "main", "DataLoader worker 0 has nothing to do", "lost",
    ),
    "a worker in native code": (
        lambda world: main(world, IN_BATCH).add(worker(None, calls="cv2.imread")),
        "worker_blocked", "worker 0", "is blocked in `cv2.imread`", "without workers",
    ),
    "a worker without shared memory": (
        lambda world: main(world, IN_BATCH).ended(100, -signal.SIGBUS), "worker_died", "worker 0", "SIGBUS", "--shm-size",
    ),
    "a worker that has left": (
        lambda world: main(world, IN_BATCH).ended(100, 3), "worker_died", "worker 0", "ended with exit code 3", "raise an exception",
    ),
    "input in a worker": (
        lambda world: main(world, IN_BATCH).add(worker(waits("input", "your input"))),
        "input_waiting", "worker 0", "DataLoader worker 0 waits for input", "notebook's own process",
    ),
    "a command that reads": (
        lambda world: program(world, "read pipe:[5]"), "input_waiting", "process program", "input that no process writes", "DEVNULL",
    ),
    "native code": (
        lambda world: main(world, None, calls="library.wait"), "native_wait", "main", "in native code in `library.wait`", "timeout",
    ),
    "a future that nobody resolves": (
        lambda world: main(world, waits("join", "the result of a future", future=True)),
        "event_never_set", "main", "nobody resolves", "set_result",
    ),
    "a rank that has ended well": (
        lambda world: ranks(
            world, rank(0, IN_COLLECTIVE, issued(("barrier", [], True), ("all_reduce", [4], False)))
        ).ended(101, 0),
        "collective_missing", "rank 1", "rank 1 never called all_reduce #2 [4]", "every rank",
    ),
    "different shapes": (
        lambda world: ranks(
            world,
            rank(0, IN_COLLECTIVE, issued(("all_reduce", [4], False))),
            rank(1, IN_COLLECTIVE, issued(("all_reduce", [8], False))),
        ),
        "collective_mismatch", "rank 1", "rank 1 calls all_reduce #1 [8] where rank 0 calls all_reduce #1 [4]", "same shape",
    ),
    "different dtypes": (
        lambda world: ranks(
            world,
            rank(0, IN_COLLECTIVE, issued(("all_reduce", [4], False))),
            rank(1, IN_COLLECTIVE, issued(("all_reduce", [4], False), dtype="Double")),
        ),
        "collective_mismatch", "rank 1", "rank 1 calls all_reduce", "dtype",
    ),
    "a rank that never trained": (
        lambda world: ranks(world, rank(0, None, backward(False), in_backward=True), rank(1, waits("queue", "queue.get()"), issued())),
        "collective_missing", "rank 1", "rank 1 never called backward()", "equally often",
    ),
    "a rank whose parameters were not reduced": (
        lambda world: ranks(world, rank(0, IN_COLLECTIVE, issued(("all_reduce", [4], False)))).ended(
            101, 1, rank=1, parameters=["a", "b"],
            message="Expected to have finished reduction ... Parameter indices which did not receive grad for rank 1: 1",
        ),
        "unused_parameters", "rank 1", "no gradient for `b`", "find_unused_parameters=True",
    ),
    "a rank that has not joined": (
        lambda world: main(world, waits("join", "the end of 2 processes", (CHILD,)))
        .add(facts(100, thread(1, waits("collective", "init_process_group", op="init_process_group")), rank=0, world_size=2))
        .add(facts(101, thread(1, waits("queue", "queue.get()"), line=9))),
        "collective_missing", "process Process-101", "in init_process_group, and process Process-101 never called it", "world_size",
    ),
}  # fmt: skip


def program(world: World, sleeps_in: str) -> World:
    world.sleeps_in[100] = sleeps_in
    return main(world, waits("join", "the end of program", (CHILD,))).add(100, method="")


@pytest.mark.parametrize("case", STUCK)
def test_stuck(case: str, world: World) -> None:
    build, cause, root, said, fix = STUCK[case]
    found = build(world).judged()
    assert found.state == "stuck"
    assert found.cause in cause.split("|"), found.headline
    assert found.root is not None
    assert found.root.who == root
    assert said in found.headline
    assert fix in found.fix
    assert bool(found.fix) == bool(fix)
    assert found.location is not None
    assert found.chain[0] == "main"
    whos = [one.who for one in found.waits]
    assert len(set(whos)) == len(whos)
    assert set(found.chain) <= set(whos)
    assert {one.waits_for for one in found.waits} <= {None, *whos}


# Somebody moves, or will by itself -----------------------------------------------------------------------------------

SLOW: dict[str, tuple[Callable[[World], World], str | None, str]] = {
    "a wait with an end": (
        lambda world: main(world, waits("queue", "queue.get()", timeout_s=60.0, get=True)), None, "with a timeout of",
    ),
    "a command of which nothing is known": (lambda world: program(world, "poll"), None, "process program"),
    "a command that asks the network": (lambda world: program(world, "receive socket"), "network", "waits for the network"),
}  # fmt: skip


@pytest.mark.parametrize("case", SLOW)
def test_slow(case: str, world: World) -> None:
    build, cause, said = SLOW[case]
    found = build(world).judged()
    assert (found.state, found.cause) == ("slow", cause)
    assert said in found.headline


def test_a_wait_whose_time_is_over_is_stuck(world: World) -> None:
    found = main(world, waits("queue", "queue.get()", timeout_s=5.0, get=True)).judged(still_s=20)
    assert found.state == "stuck"


@pytest.mark.parametrize("who", ["main", "thread", "worker"])
def test_who_moves_is_slow_whatever_it_waits_in(world: World, who: str) -> None:
    looks = []
    for number in range(3):
        values = {"i": number}
        if who == "main":
            main(world, None, values=values)
        elif who == "thread":
            main(world, waits("join", on=(OTHER,)), thread(2, values=values))
        else:
            main(world, IN_BATCH).add(worker(None, values=values))
        looks.append(world.look(float(number)))
    found = judged_by(looks)
    assert found.state == "slow"
    assert found.cause == ("data_loading" if who == "worker" else None)


def judged_by(looks: list[Any], progress: Progress | None = None, **doing: int) -> HangFinding:
    from collections import Counter

    from torchdebug_magics.instruments.hangwatch.causes.judge import judged

    progress = progress or Progress()
    progress.doing = Counter(doing)
    return judged(looks, progress, 20.0)


@pytest.mark.parametrize(("cpu_s", "state"), [(0.0, "stuck"), (0.05, "stuck"), (1.5, "slow")])
def test_who_computes_moves(world: World, cpu_s: float, state: str) -> None:
    looks = []
    for number in range(3):
        world.cpu_s[100, 1] = number * cpu_s / 2
        looks.append(main(world, waits("join", on=(CHILD,))).add(facts(100, thread(1, None, calls="torch.mm"))).look(float(number)))
    assert judged_by(looks).state == state


def test_a_rank_that_computes_while_the_others_wait_is_slow(world: World) -> None:
    looks = []
    for number in range(3):
        world.cpu_s[101, 1] = float(number)
        waiting, late = rank(0, IN_COLLECTIVE, issued(("all_reduce", [4], False))), rank(1, None, issued())
        looks.append(ranks(world, waiting, late).look(float(number)))
    assert judged_by(looks).state == "slow"


def running(world: World, **more: Any) -> list[Any]:
    return [main(world, None, values={"i": number}, **more).look(float(number)) for number in range(3)]


def test_pressure_on_the_memory(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    assert judged_by(running(world), python=9).cause is None
    monkeypatch.setattr(judge, "memory_pressure", lambda: MemoryPressure(0.4, 1 << 30, 0.97, "container limit"))
    found = judged_by(running(world), python=9)
    assert found.cause == "memory_pressure"
    assert "97% of the container limit" in found.headline


def test_a_full_limit_alone_is_no_pressure(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge, "memory_pressure", lambda: MemoryPressure(0.0, 0, 0.99, "container limit"))
    assert judged_by(running(world), python=9).cause is None


@pytest.mark.parametrize(("threads", "cause"), [(8, "oversubscribed"), (1, None)])
def test_more_threads_than_cores(world: World, monkeypatch: pytest.MonkeyPatch, threads: int, cause: str | None) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
    looks = []
    for number in range(3):
        world.own = facts(US, thread(1, waits("join", on=(CHILD,))))
        for pid in (100, 101):
            world.add(facts(pid, thread(1, None, values={"i": number}), torch_threads=threads))
        looks.append(world.look(float(number)))
    assert judged_by(looks).cause == cause


@pytest.mark.parametrize(
    ("workers", "cores", "fix"), [(1, 8, "`num_workers=2`"), (4, 8, "`num_workers=8`"), (8, 8, "cheaper"), (0, 8, "=2`")]
)
def test_how_many_workers_would_be_enough(world: World, monkeypatch: pytest.MonkeyPatch, workers: int, cores: int, fix: str) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    if not workers:
        assert fix in judged_by(running(world), batch=9).fix
        return
    batch = {**IN_BATCH, "workers": workers}
    looks = [main(world, batch).add(worker(None, values={"i": number})).look(float(number)) for number in range(3)]
    found = judged_by(looks)
    assert found.cause == "data_loading"
    assert fix in found.fix


@pytest.mark.parametrize(("line", "is_named"), [(4, True), (2, False)])
def test_a_while_in_which_a_worker_computes_is_named(world: World, tmp_path: Path, line: int, is_named: bool) -> None:
    crops = tmp_path / "crops.py"
    crops.write_text("def crop(mask):\n    x = mask.sum()\n    while not x:\n        x = mask.sum()\n    return x\n")
    looks = []
    for number in range(3):
        at = worker(None, values={"i": number})
        at["threads"][0]["frames"] = [(str(crops), line, "crop"), *at["threads"][0]["frames"]]
        looks.append(main(world, IN_BATCH).add(at).look(float(number)))
    found = judged_by(looks)
    assert found.cause == "data_loading"
    assert (found.fix.startswith("bound `while not x:`"), "`while not x:`" in found.headline) == (is_named, is_named)


# One look is enough --------------------------------------------------------------------------------------------------


def test_a_debugger_of_this_process_is_the_users(world: World) -> None:
    main(world, waits("input", "a debugger's prompt", debugger=True))
    assert debugger_now(world.look(), Progress()) is None
    assert world.judged().state == "slow"


def test_a_process_in_which_no_thread_gets_a_turn(world: World) -> None:
    world.sleeps_in[100] = "silent"
    found = main(world, waits("join", on=(CHILD,))).add(100).judged()
    assert found.root is not None
    assert (found.root.who, found.root.kind) == ("process Process-100", "gil")
    assert (found.location and found.location.line) == 77
