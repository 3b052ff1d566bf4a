"""Nobody moves: who is to let go of what. The first cause of the table that applies is the finding."""

from __future__ import annotations

from dataclasses import replace

from torchdebug_magics.format import listed
from torchdebug_magics.instruments.hangwatch.causes.deaths import differ, failed, last_line, short_error
from torchdebug_magics.instruments.hangwatch.everybody.participants import Participant, named
from torchdebug_magics.instruments.hangwatch.hang_evidence import Cause, Evidence, Row, first
from torchdebug_magics.instruments.hangwatch.report import HangFinding

_LEFT_UNDONE = frozenset({"queue_never_fed", "event_never_set", "lock_never_released"})
_FEEDS = frozenset({"queue", "io", "event"})
_KEYBOARD = "a child process cannot read the keyboard"
_SAME_POOL = "do not wait for a task inside another task of the same pool, or give the pool more workers"


def stopped(case: Evidence) -> HangFinding | None:
    """Why nobody moves; None where somebody outside may still end the wait."""
    if case.root.kind == "python":
        case.root.kind = "native"  # it computes nothing
    found = first(_CAUSES, case)
    if found is None or found.cause not in _LEFT_UNDONE or not case.look.thread_errors:
        return found
    # What a thread has left undone, as an exception has ended it.
    name, error = max(case.look.thread_errors.items(), key=lambda item: float(item[1]["at_s"]))
    line = last_line(error)
    where = f" · {line}: `{line.source}`" if line is not None else ""
    return replace(found, fix=f"fix the error in thread {name}; {found.fix}", reason=f"thread {name} raised {short_error(error)}{where}")


def _without_keyboard(case: Evidence) -> Participant | None:
    """Who waits for input in a process without a keyboard."""
    everybody = (one for one in case.look.everybody.values() if one.process and (one.is_child or one.pid != case.main.pid))
    return next((one for one in everybody if one.kind == "input"), None)


def _is_openmp(case: Evidence, root: Participant) -> bool:
    parent = max((one.process.get("torch_threads") or 0) for one in case.look.everybody.values() if one.process)
    is_forked = root.child is not None and root.child.method == "fork" and root.process.get("worker") is None
    return is_forked and not root.facts.get("is_waiting") and root.kind != "dead" and parent > 1 and root.sleeps_in in {"futex", ""}


def _unfed(case: Evidence) -> Participant | None:
    """Who waits for what others would put, set or write: the root, or a part of a circle whose others wait for something else."""
    among = case.chain.circle or (case.root,)
    feeding = [one for one in among if one.kind in _FEEDS and not one.facts.get("pipe_full") and not one.facts.get("future")]
    if case.chain.is_circle:
        return feeding[0] if 0 < len(feeding) < len(among) else None
    return next((one for one in feeding if one.kind != "io" or "pipe" in one.facts), None)


def _before_idle(case: Evidence) -> Participant | None:
    """Who waits for somebody that waits for work."""
    idle, path = _unfed(case), case.chain.path
    return path[path.index(idle) - 1] if idle is not None and idle.facts.get("idle") and len(path) > 1 else None


def _alone(case: Evidence, one: Participant) -> str:
    others = [named(who) for who in one.targets]
    if others and one in case.chain.circle:
        return f"{listed(others)} {'wait' if len(others) > 1 else 'waits'} for it in turn"
    return "nobody is left to set it" if one.kind == "event" else "nobody is left to put an item"


def _release_own(_: Evidence, one: Participant) -> str:
    """What to do about a lock that a thread takes twice."""
    if one.what.startswith("asyncio "):
        return "do not await this while the lock is held, or acquire the lock only in the outermost coroutine"
    if "emaphore" in one.what:
        return "release it after each `acquire()`, in a `finally:`, or raise its initial value"
    if one.what.startswith("multiprocessing "):
        return f"release it with `with lock:`, or make it a `multiprocessing.RLock()`{one.in_worker}"
    if one.location is not None and one.location.source.startswith("with "):
        return f"make it a `threading.RLock()`, or do not call this while the lock is held{one.in_worker}"
    return f"release it with `with lock:`, or make it a `threading.RLock()`{one.in_worker}"


def _break_circle(case: Evidence, _: Participant) -> str:
    circle = case.chain.circle
    if any(one.facts.get("future") for one in circle):
        return _SAME_POOL
    if all(one.kind == "lock" for one in circle):
        return "acquire the locks in the same order in every thread"
    if any(one.kind == "lock" for one in circle):
        return "release the lock before `join()`"
    return "break the cycle: send before you receive, and receive before you join"


def _circle_named(case: Evidence, _: Participant) -> str:
    names = [one.name for one in case.chain.circle]
    return f"{' and '.join(names) if len(names) == 2 else listed(names)} wait for each other"  # noqa: PLR2004 - two


def _is_alone(case: Evidence, _: Participant) -> bool:
    """Whether it waits for itself."""
    return len(case.chain.circle) == 1


def _is_program(root: Participant, call: str) -> bool:
    """Whether it is a program of its own that waits in this system call."""
    return root.sleeps_in.startswith(call) and not root.process


def _is_forked_copy(root: Participant) -> bool:
    """Whether fork has copied the lock while the parent held it."""
    is_forked = root.child is not None and root.child.method == "fork" and "semaphore" not in root.facts
    return is_forked and (not root.facts.get("acquired") or bool(root.facts.get("acquired_by_with")))


DEBUGGERS: tuple[Row, ...] = (
    Row("debugger_in_worker", lambda _, one: one.facts.get("debugger"), "{who} has stopped in a debugger",
        "remove the breakpoint, or use {single} to debug this code in the notebook's own process", _KEYBOARD, _without_keyboard),
    Row("input_waiting", lambda *_: True, "{who} waits for input",
        lambda _, one: f"call `input()` in the notebook's own process{one.in_worker or ', and pass the answer to the other process'}",
        _KEYBOARD, _without_keyboard),
)  # fmt: skip
_CAUSES: tuple[Cause, ...] = (
    *DEBUGGERS,
    failed,
    differ,
    Row("openmp_after_fork", _is_openmp, "{who} waits for its parent's OpenMP threads, which fork does not copy",
        "call `torch.set_num_threads(1)` at the top of the child's function, or start it with the `spawn` method",
        "the parent had used several threads before it forked"),
    Row("worker_blocked", lambda *_: True,
        lambda case, one: f"{one.name} waits for {one.what}, and {(_unfed(case) or one).name} has nothing to do",
        "check for a killed worker, or a result that cannot be pickled: the task was lost", whom=_before_idle),
    Row("queue_never_fed", lambda _, one: one.facts.get("put"), "{who} puts into a full queue that nobody reads",
        "read the queue in another thread, or raise `maxsize` (0 for no limit)", whom=_unfed),
    Row("event_never_set", lambda _, one: one.facts.get("join"), "{who} waits in `queue.join()` for a `task_done()` that nobody calls",
        "call `queue.task_done()` after each `get()`, in a `finally:`", whom=_unfed),
    Row("event_never_set", lambda _, one: one.kind == "event" and one.what.startswith("barrier"), "{who} waits at a {what}",
        "call `wait()` in as many threads as the barrier has parties", whom=_unfed),
    Row("event_never_set", lambda _, one: one.kind == "event" and one.what == "condition",
        lambda case, one: f"{one.name} waits for a condition that is never notified: {_alone(case, one)}",
        "call `notify()` while holding the condition, after the awaited change", whom=_unfed),
    Row("event_never_set", lambda _, one: one.kind == "event",
        lambda case, one: f"{one.name} waits for {one.a_what} that is never set: {_alone(case, one)}",
        "set the event in a `finally:` of the code that should set it, and wait with a timeout", whom=_unfed),
    Row("queue_never_fed", lambda *_: True, lambda case, one: f"{one.name} waits in {one.what}, and {_alone(case, one)}",
        "put a sentinel such as `None` when there is no more work, and end the loop at it; or use `get(timeout=...)`", whom=_unfed),
    Row("self_deadlock", lambda case, one: _is_alone(case, one) and one.facts.get("own_loop"),
        "{who} waits for a coroutine of the event loop that it blocks",
        "`await` the coroutine in the cell, instead of calling `.result()`"),
    Row("deadlock", lambda case, one: _is_alone(case, one) and one.facts.get("future"),
        "{who} waits for a task of the pool in which it runs itself", _SAME_POOL),
    Row("self_deadlock", _is_alone, "{who} waits for {a_what} that it holds itself", _release_own),
    Row("deadlock", lambda case, _: case.chain.is_circle, _circle_named, _break_circle,
        lambda case, _: "; ".join(f"{one.name} waits for {named(one.targets[0])} ({one.what})" for one in case.chain.circle)),
    Row("deadlock", lambda case, _: case.root.facts.get("pipe_full"),
        lambda case, one: f"{one.name} waits for the end of {case.root.who.partition(' thread ')[0]}, which waits for its queue to be read",
        "read the queue before you join: `result = queue.get()`, then `process.join()`",
        whom=lambda case: next((one for one in reversed(case.chain.path) if one.pid != case.root.pid), case.main)),
    Row("deadlock", lambda _, root: _is_program(root, "write pipe"),
        "{who} waits for its output to be read, and {main} waits for it to exit",
        "call `communicate()` instead of `wait()`, or pass `stdout=subprocess.DEVNULL`"),
    Row("deadlock", lambda _, root: _is_program(root, "read") and root.facts.get("our_pipe"),
        "{who} waits for the end of its input, which this process keeps open",
        "call `process.stdin.close()` before the read, or `process.communicate(input)`, which does both"),
    Row("input_waiting", lambda _, root: _is_program(root, "read"), "{who} waits for input that no process writes",
        "pass `stdin=subprocess.DEVNULL`, or call `communicate(input=...)`, which closes the pipe"),
    Row("lock_never_released", lambda _, root: root.kind == "lock" and _is_forked_copy(root),
        "{who} waits for a {what} that was held when the process was forked",
        "create the lock in the process that uses it, or start the process with the `spawn` method",
        "fork copies a held lock, but not the thread that would release it"),
    Row("lock_never_released", lambda _, root: root.kind == "lock", "{who} waits for a {what} that was never released",
        "release it with `with lock:`, also after an error{in_worker}",
        "no running thread holds it: the thread that acquired it has ended, or continued without releasing it"),
    Row("worker_blocked", lambda _, root: root.facts.get("future") and root.child is not None and root.child.method == "fork",
        "{who} waits for a future of a pool whose threads are in the parent process",
        "create the pool in the process that uses it: fork does not copy threads{in_worker}"),
    Row("event_never_set", lambda _, root: root.facts.get("future"), "{who} waits for a future that nobody resolves",
        "submit the work to a running pool, or call `set_result()` on every path, also in an `except:`"),
    Row("worker_blocked", lambda _, root: root.kind in {"native", "gil"} and root.who.startswith("worker "), "{who} is blocked{in_call}",
        "run this line without workers to see what it waits for{in_worker}"),
    Row("native_wait", lambda _, root: root.kind in {"native", "gil"}, "{who} is blocked in native code{in_call}",
        "call `faulthandler.dump_traceback_later(60)` before this line to see every thread; pass a timeout if the call takes one",
        "no progress for {still}"),
)  # fmt: skip
