"""Nobody moves: who is to let go of what. The first cause that applies is told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torchdebug_magics.format import duration, listed
from torchdebug_magics.instruments.hangwatch.causes.deaths import differ, failed, in_worker, last_line, named, short_error, with_article
from torchdebug_magics.instruments.hangwatch.everybody.participants import Participant
from torchdebug_magics.instruments.hangwatch.hang_evidence import Evidence
from torchdebug_magics.instruments.hangwatch.report import HangFinding

_LEFT_UNDONE = frozenset({"queue_never_fed", "event_never_set", "lock_never_released"})
_FEEDS = {"queue": "queue_never_fed", "io": "queue_never_fed", "event": "event_never_set"}


def stopped(case: Evidence) -> HangFinding | None:
    """Why nobody moves; None where somebody outside may still end the wait."""
    if case.root.kind == "python":
        case.root.kind = "native"  # it computes nothing
    found = next(filter(None, (cause(case) for cause in _CAUSES)), None)
    return _after_error(case, found) if found is not None and found.cause in _LEFT_UNDONE and case.look.thread_errors else found


def _after_error(case: Evidence, found: HangFinding) -> HangFinding:
    """What a thread has left undone, as an exception has ended it."""
    name, error = max(case.look.thread_errors.items(), key=lambda item: float(item[1]["at_s"]))
    line = last_line(error)
    where = f" · {line}: `{line.source}`" if line is not None else ""
    return replace(found, fix=f"fix the error in thread {name}; {found.fix}", reason=f"thread {name} raised {short_error(error)}{where}")


def debugger(case: Evidence) -> HangFinding | None:
    """A prompt in a process without a keyboard."""
    everybody = (one for one in case.look.everybody.values() if one.process and (one.is_child or one.pid != case.main.pid))
    one = next((one for one in everybody if one.kind == "input"), None)
    if one is None:
        return None
    if not one.facts.get("debugger"):
        return case.found(
            "stuck", "input_waiting", f"{named(one.who)} waits for input",
            f"call `input()` in the notebook's own process{in_worker(one) or ', and pass the answer to the other process'}",
            "a child process cannot read the keyboard", at=one,
        )  # fmt: skip
    where = "`num_workers=0`" if one.process.get("worker") is not None else "a single process"
    return case.found(
        "stuck", "debugger_in_worker", f"{named(one.who)} has stopped in a debugger",
        f"remove the breakpoint, or use {where} to debug this code in the notebook's own process",
        "a child process cannot read the keyboard", at=one,
    )  # fmt: skip


def _openmp(case: Evidence) -> HangFinding | None:
    root = case.root
    parent = max((one.process.get("torch_threads") or 0) for one in case.look.everybody.values() if one.process)
    is_forked = root.child is not None and root.child.method == "fork" and root.process.get("worker") is None
    if not is_forked or root.facts.get("is_waiting") or root.kind == "dead" or parent <= 1 or root.sleeps_in not in {"futex", ""}:
        return None
    return case.found(
        "stuck", "openmp_after_fork", f"{named(root.who)} waits for its parent's OpenMP threads, which fork does not copy",
        "call `torch.set_num_threads(1)` at the top of the child's function, or start it with the `spawn` method",
        "the parent had used several threads before it forked",
    )  # fmt: skip


def _circle(case: Evidence) -> HangFinding | None:
    circle = case.chain.circle
    if not circle:
        return None
    feeding = [one for one in circle if one.kind in _FEEDS and not one.facts.get("pipe_full")]
    if feeding and len(feeding) < len(circle):
        return _never_fed(case, feeding[0])
    if len(circle) == 1:
        one = circle[0]
        if one.facts.get("own_loop"):
            return case.found(
                "stuck", "self_deadlock", f"{named(one.who)} waits for a coroutine of the event loop that it blocks",
                "`await` the coroutine in the cell, instead of calling `.result()`",
            )  # fmt: skip
        if one.facts.get("future"):
            return case.found(
                "stuck", "deadlock", f"{named(one.who)} waits for a task of the pool in which it runs itself",
                "do not wait for a task inside another task of the same pool, or give the pool more workers",
            )  # fmt: skip
        return case.found(
            "stuck", "self_deadlock", f"{named(one.who)} waits for {with_article(one.what or 'lock')} that it holds itself",
            _release_own(one),
        )  # fmt: skip
    if any(one.facts.get("future") for one in circle):
        fix = "do not wait for a task inside another task of the same pool, or give the pool more workers"
    elif all(one.kind == "lock" for one in circle):
        fix = "acquire the locks in the same order in every thread"
    elif any(one.kind == "lock" for one in circle):
        fix = "release the lock before `join()`"
    else:
        fix = "break the cycle: send before you receive, and receive before you join"
    say = " and ".join(named(one.who) for one in circle) if len(circle) == 2 else listed([named(one.who) for one in circle])  # noqa: PLR2004 - two
    waits = "; ".join(f"{named(one.who)} waits for {named(one.targets[0])} ({one.what})" for one in circle)
    return case.found("stuck", "deadlock", f"{say} wait for each other", fix, waits)


def _release_own(one: Participant) -> str:
    """What to do about a lock that a thread takes twice."""
    if one.what.startswith("asyncio "):
        return "do not await this while the lock is held, or acquire the lock only in the outermost coroutine"
    if "emaphore" in one.what:
        return "release it after each `acquire()`, in a `finally:`, or raise its initial value"
    if one.what.startswith("multiprocessing "):
        return f"release it with `with lock:`, or make it a `multiprocessing.RLock()`{in_worker(one)}"
    if one.location is not None and one.location.source.startswith("with "):
        return f"make it a `threading.RLock()`, or do not call this while the lock is held{in_worker(one)}"
    return f"release it with `with lock:`, or make it a `threading.RLock()`{in_worker(one)}"


def _pipe_full(case: Evidence) -> HangFinding | None:
    """A process that cannot end as nobody reads what it has written."""
    root = case.root
    if root.facts.get("pipe_full"):
        whose = next((one for one in reversed(case.chain.path) if one.pid != root.pid), case.main)
        writer = root.who.partition(" thread ")[0]
        return case.found(
            "stuck", "deadlock", f"{named(whose.who)} waits for the end of {writer}, which waits for its queue to be read",
            "read the queue before you join: `result = queue.get()`, then `process.join()`", at=whose,
        )  # fmt: skip
    if root.sleeps_in.startswith("write pipe") and not root.process:
        return case.found(
            "stuck", "deadlock", f"{root.who} waits for its output to be read, and {named(case.main.who)} waits for it to exit",
            "call `communicate()` instead of `wait()`, or pass `stdout=subprocess.DEVNULL`",
        )  # fmt: skip
    if root.sleeps_in.startswith("read") and not root.process and root.facts.get("our_pipe"):
        return case.found(
            "stuck", "deadlock", f"{root.who} waits for the end of its input, which this process keeps open",
            "call `process.stdin.close()` before the read, or `process.communicate(input)`, which does both",
        )  # fmt: skip
    if root.sleeps_in.startswith("read") and not root.process:
        return case.found(
            "stuck", "input_waiting", f"{root.who} waits for input that no process writes",
            "pass `stdin=subprocess.DEVNULL`, or call `communicate(input=...)`, which closes the pipe",
        )  # fmt: skip
    return None


def _lock(case: Evidence) -> HangFinding | None:
    root = case.root
    if root.kind != "lock":
        return None
    is_copy = root.child is not None and root.child.method == "fork" and "semaphore" not in root.facts
    is_copy = is_copy and (not root.facts.get("acquired") or bool(root.facts.get("acquired_by_with")))
    what = root.what or "lock"
    if is_copy:
        return case.found(
            "stuck", "lock_never_released", f"{named(root.who)} waits for a {what} that was held when the process was forked",
            "create the lock in the process that uses it, or start the process with the `spawn` method",
            "fork copies a held lock, but not the thread that would release it",
        )  # fmt: skip
    return case.found(
        "stuck", "lock_never_released", f"{named(root.who)} waits for a {what} that was never released",
        f"release it with `with lock:`, also after an error{in_worker(root)}",
        "no running thread holds it: the thread that acquired it has ended, or continued without releasing it",
    )  # fmt: skip


def _fed(case: Evidence) -> HangFinding | None:
    root = case.root
    if root.kind == "queue" or (root.kind == "io" and "pipe" in root.facts):
        return _never_fed(case, root)
    return _never_fed(case, root) if root.kind == "event" else None


def _never_fed(case: Evidence, one: Participant) -> HangFinding:
    cause = _FEEDS[one.kind]
    if one.facts.get("idle") and len(case.chain.path) > 1:
        before = case.chain.path[case.chain.path.index(one) - 1]
        return case.found(
            "stuck", "worker_blocked", f"{named(before.who)} waits for {before.what}, and {named(one.who)} has nothing to do",
            "check for a killed worker, or a result that cannot be pickled: the task was lost", at=before,
        )  # fmt: skip
    if one.facts.get("put"):
        return case.found(
            "stuck", cause, f"{named(one.who)} puts into a full queue that nobody reads",
            "read the queue in another thread, or raise `maxsize` (0 for no limit)", at=one,
        )  # fmt: skip
    if one.facts.get("join"):
        return case.found(
            "stuck", "event_never_set", f"{named(one.who)} waits in `queue.join()` for a `task_done()` that nobody calls",
            "call `queue.task_done()` after each `get()`, in a `finally:`", at=one,
        )  # fmt: skip
    alone = "nobody is left to put an item" if one.kind != "event" else "nobody is left to set it"
    others = [named(who) for who in one.targets]
    if others:
        alone = f"{listed(others)} {'wait' if len(others) > 1 else 'waits'} for it in turn" if one in case.chain.circle else alone
    if one.kind == "event":
        what = one.what or "event"
        fix = {"condition": "call `notify()` while holding the condition, after the awaited change"}.get(
            what, "set the event in a `finally:` of the code that should set it, and wait with a timeout"
        )
        if what.startswith("barrier"):
            fix = "call `wait()` in as many threads as the barrier has parties"
            return case.found("stuck", cause, f"{named(one.who)} waits at a {what}", fix, at=one)
        verb = "notified" if what == "condition" else "set"
        return case.found("stuck", cause, f"{named(one.who)} waits for {with_article(what)} that is never {verb}: {alone}", fix, at=one)
    fix = "put a sentinel such as `None` when there is no more work, and end the loop at it; or use `get(timeout=...)`"
    return case.found("stuck", cause, f"{named(one.who)} waits in {one.what}, and {alone}", fix, at=one)


def _future(case: Evidence) -> HangFinding | None:
    root = case.root
    if not root.facts.get("future"):
        return None
    if root.child is not None and root.child.method == "fork":
        return case.found(
            "stuck", "worker_blocked", f"{named(root.who)} waits for a future of a pool whose threads are in the parent process",
            f"create the pool in the process that uses it: fork does not copy threads{in_worker(root)}", at=root,
        )  # fmt: skip
    return case.found("stuck", "event_never_set", f"{named(root.who)} waits for a future that nobody resolves",
        "submit the work to a running pool, or call `set_result()` on every path, also in an `except:`", at=root,
    )  # fmt: skip


def _native(case: Evidence) -> HangFinding | None:
    root = case.root
    if root.kind not in {"native", "python", "gil"}:
        return None
    if root.who.startswith("worker "):
        return case.found(
            "stuck", "worker_blocked", f"{named(root.who)} is blocked{_in_call(root)}",
            f"run this line without workers to see what it waits for{in_worker(root)}",
        )  # fmt: skip
    return case.found(
        "stuck", "native_wait", f"{named(root.who)} is blocked in native code{_in_call(root)}",
        "call `faulthandler.dump_traceback_later(60)` before this line to see every thread; pass a timeout if the call takes one",
        f"no progress for {duration(case.still_s)}",
    )  # fmt: skip


def _in_call(one: Participant) -> str:
    called = one.facts.get("calls")
    return f" in `{called}`" if called else ""


_CAUSES: tuple[Callable[[Evidence], HangFinding | None], ...] = (
    debugger, failed, differ, _openmp, _circle, _pipe_full, _lock, _future, _fed, _native,
)  # fmt: skip
