"""Why nothing goes on: whoever is stopped, and by what; else what takes the time."""

from __future__ import annotations

import ast
import os
from dataclasses import replace
from functools import partial
from itertools import pairwise, takewhile

from torchdebug_magics.format import byte_size, duration, listed
from torchdebug_magics.instruments.hangwatch.causes.deaths import Cause, Evidence, Row, differ, failed, first, last_line, short_error
from torchdebug_magics.instruments.hangwatch.everybody.participants import Look, Participant, follow, goes_on, moving, named
from torchdebug_magics.instruments.hangwatch.main_thread.progress import Progress
from torchdebug_magics.instruments.hangwatch.report import HangFinding
from torchdebug_magics.machine.limits import memory_pressure
from torchdebug_magics.probing.source.syntax import last_name, loops_around, nodes, tree_of
from torchdebug_magics.probing.source.user_code import owner
from torchdebug_magics.report import located

_LEFT_UNDONE = frozenset({"queue_never_fed", "event_never_set", "lock_never_released"})
_FEEDS = frozenset({"queue", "io", "event"})
_CALLS = ("receive", "connect")
_KEYBOARD = "a child process cannot read the keyboard"
_SAME_POOL = "do not wait for a task inside another task of the same pool, or give the pool more workers"
_MOST = 0.5
_STALLED = 0.2
_NEARLY_FULL = 0.95
_MUCH_SWAPPED_BYTES = 256 << 20
_SYNCHRONIZE = frozenset({"item", "cpu", "tolist", "numpy", "synchronize", "to"})


def judged(looks: list[Look], progress: Progress, still_s: float) -> HangFinding:
    """Why there was no progress for `still_s`: a cause without a name where only the line is known."""
    case = _evidence(looks, progress, still_s)
    is_moving = (progress.passes.carrier is not None and progress.passes.began_s) or goes_on(case.chain, case.moved, still_s)
    return (None if is_moving else _stopped(case)) or first(_SLOW, case) or case.found(None, _doing(case, case.root), state="slow")


def debugger_now(look: Look, progress: Progress) -> HangFinding | None:
    """A prompt in another process needs no second look."""
    return first(DEBUGGERS, _evidence([look], progress, progress.still_s))


def _evidence(looks: list[Look], progress: Progress, still_s: float) -> Evidence:
    moved = moving(looks) if len(looks) > 1 else {}
    return Evidence(looks[-1], follow(looks[-1], moved, still_s), moved, progress, still_s)


def _stopped(case: Evidence) -> HangFinding | None:
    """Why nobody moves; None where somebody outside may still end the wait."""
    if case.root.kind == "python":
        case.root.kind = "native"  # it computes nothing
    finding, errors = first(_STOPPED, case), case.look.thread_errors
    if finding is None or finding.cause not in _LEFT_UNDONE or not errors:
        return finding
    # What a thread has left undone, as an exception has ended it.
    name, error = max(errors.items(), key=lambda item: float(item[1]["at_s"]))
    reason = located(f"thread {name} raised {short_error(error)}", last_line(error))
    return replace(finding, fix=f"fix the error in thread {name}; {finding.fix}", reason=reason)


def _without_keyboard(case: Evidence) -> Participant | None:
    """Who waits for input in a process without a keyboard."""
    others = (one for one in case.look.everybody.values() if one.process and (one.is_child or one.pid != case.main.pid))
    return next((one for one in others if one.kind == "input"), None)


def _unfed(case: Evidence) -> Participant | None:
    """Who waits for what others would put, set or write: the root, or a part of a circle whose others wait for something else."""
    among = case.chain.circle or (case.root,)
    feeding = [one for one in among if one.kind in _FEEDS and not one.facts.get("pipe_full") and not one.facts.get("future")]
    if case.chain.circle:
        return feeding[0] if 0 < len(feeding) < len(among) else None
    return next((one for one in feeding if one.kind != "io" or "pipe" in one.facts), None)


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


def _is_alone(case: Evidence, _: Participant) -> bool:
    """Whether it waits for itself."""
    return len(case.chain.circle) == 1


def _is_program(root: Participant, call: str | tuple[str, ...]) -> bool:
    """Whether it is a program of its own that waits in this system call."""
    return root.sleeps_in.startswith(call) and not root.process


DEBUGGERS: tuple[Row, ...] = (
    Row("debugger_in_worker", lambda _, one: one.facts.get("debugger"), "{who} has stopped in a debugger",
        "remove the breakpoint, or use {single} to debug this code in the notebook's own process", _KEYBOARD, _without_keyboard),
    Row("input_waiting", lambda *_: True, "{who} waits for input",
        lambda _, one: f"call `input()` in the notebook's own process{one.in_worker or ', and pass the answer to the other process'}",
        _KEYBOARD, _without_keyboard),
)  # fmt: skip
_STOPPED: tuple[Cause, ...] = (
    *DEBUGGERS,
    failed,
    differ,
    Row("openmp_after_fork",
        lambda case, root: root.is_forked and root.process.get("worker") is None and not root.facts.get("is_waiting")
        and root.kind != "dead" and root.sleeps_in in {"futex", ""}
        and any((one.process.get("torch_threads") or 0) > 1 for one in case.look.everybody.values()),
        "{who} waits for its parent's OpenMP threads, which fork does not copy",
        "call `torch.set_num_threads(1)` at the top of the child's function, or start it with the `spawn` method",
        "the parent had used several threads before it forked"),
    Row("worker_blocked", lambda *_: True,
        lambda case, one: f"{one.name} waits for {one.what}, and {(_unfed(case) or one).name} has nothing to do",
        "check for a killed worker, or a result that cannot be pickled: the task was lost",
        whom=lambda case: next((one for one, idle in pairwise(case.chain.path) if idle is _unfed(case) and idle.facts.get("idle")), None)),
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
    Row("deadlock", lambda case, _: case.chain.circle, "{circle} wait for each other", _break_circle,
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
    Row("lock_never_released", lambda _, root: root.kind == "lock" and root.is_forked and "semaphore" not in root.facts
        and (not root.facts.get("acquired") or root.facts.get("acquired_by_with")),
        "{who} waits for a {what} that was held when the process was forked",
        "create the lock in the process that uses it, or start the process with the `spawn` method",
        "fork copies a held lock, but not the thread that would release it"),
    Row("lock_never_released", lambda _, root: root.kind == "lock", "{who} waits for a {what} that was never released",
        "release it with `with lock:`, also after an error{in_worker}",
        "no running thread holds it: the thread that acquired it has ended, or continued without releasing it"),
    Row("worker_blocked", lambda _, root: root.facts.get("future") and root.is_forked,
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


def _memory(case: Evidence) -> HangFinding | None:
    pressure = memory_pressure()
    if pressure.stalled_ratio < _STALLED and not (pressure.used_ratio > _NEARLY_FULL and pressure.swapped_bytes > _MUCH_SWAPPED_BYTES):
        return None
    swapped = f", and {byte_size(pressure.swapped_bytes)} of this process is swapped out" if pressure.swapped_bytes else ""
    return case.found(
        "memory_pressure", f"memory is nearly full ({pressure.used_ratio:.0%} of the {pressure.whose}){swapped}",
        "use a smaller batch, or free memory: `%memclean` lists what can be freed, `%%memtrace` names what grows",
        f"processes stalled on memory for {pressure.stalled_ratio:.0%} of the last 10 s", case.main, "slow",
    )  # fmt: skip


def _data(case: Evidence) -> HangFinding | None:
    batch = next((one for one in case.chain.path if one.kind == "batch"), None)
    if batch is None and not _mostly(case, "batch"):
        return None
    at, workers = (case.main, 0) if batch is None else (case.root, int(batch.facts.get("workers", 0)))
    begins = _initializer(at) if workers else ""
    what = "the Dataset computes a batch in the main thread" if batch is None else f"{at.name} computes {batch.what}"
    if begins:
        what = f"{at.name} runs `{begins}`, its `worker_init_fn`"
    elif at.kind == "sleep":
        what = f"{at.name} sleeps in the Dataset ({at.what})"
    enough = min(os.cpu_count() or 1, max(workers + 1, 2 * workers, 2))
    enough = max(enough, 2 * workers) if at.kind == "sleep" else enough  # who sleeps needs no core
    more = f"use `num_workers={enough}`" if enough > workers else "make `__getitem__` cheaper: more workers than cores do not help"
    made = sum(participant.child is not None for participant in case.look.everybody.values() if participant.kind == "dead")
    keep = "keep the workers between epochs with `persistent_workers=True`"
    more = keep if begins else f"{more}; {keep}" if workers and made >= workers else more
    pinned = " and `pin_memory=True` for a GPU" if batch is not None and not batch.facts.get("pin_memory") and _has_gpu() else ""
    fix = f"{more}{pinned}; or preprocess the data once, before the loop"
    if batch is not None and (loop := _while_of(at)):
        what, fix = f"{what} in `{loop}`", f"bound `{loop}`, such as by `for _ in range(100):`, if it may never end; else {fix}"
    return case.found("data_loading", f"the loop waits for data: {what}", fix, at=at, state="slow")


def _while_of(worker: Participant) -> str:
    """The head of the ``while`` in which a worker stands, which may go on for ever for one sample."""
    inner = takewhile(lambda frame: owner(frame[0]) == "user", worker.frames)  # above stand DataLoader and, in a fork, the training
    loops = (loop for file, line, _ in inner for loop in loops_around(tree_of(file), line) if isinstance(loop, ast.While))
    return next((f"while {ast.unparse(loop.test)}:" for loop in loops), "")


def _initializer(worker: Participant) -> str:
    """The function in which a worker stands, where a DataLoader was given it as ``worker_init_fn``."""
    for call in worker.stack:
        keywords = nodes(ast.keyword, tree_of(call.file))
        if any(keyword.arg == "worker_init_fn" and last_name(keyword.value) == call.function for keyword in keywords):
            return call.function
    return ""


def _graph(case: Evidence) -> HangFinding | None:
    passes = case.progress.passes
    if passes.carrier is None or not passes.began_s:
        return None
    name, fix = passes.carrier
    kept = f"`{name}` keeps the graphs of earlier steps, and each backward pass traverses them"
    headline = kept if name else "each backward pass also traverses the graphs of earlier steps"
    found = case.found("growing_graph", headline, f"{fix} at the start of each step", at=case.main, state="slow")
    return replace(found, location=passes.carried_at or found.location)


def _oversubscribed(case: Evidence) -> HangFinding | None:
    busy = [one for one in case.look.everybody.values() if one.is_main_thread and one.process and case.moved.get(one.who)]
    threads = sum(one.process.get("torch_threads") or 1 for one in busy)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if len(busy) < 2 or threads <= 2 * cores:  # noqa: PLR2004 - a process by itself shares with nobody
        return None
    fix = f"call `torch.set_num_threads({max(1, cores // len(busy))})` at the top of each process"
    return case.found(
        "oversubscribed", f"{len(busy)} processes with {threads} threads share {cores} cores", fix, at=case.main, state="slow"
    )


def _doing(case: Evidence, one: Participant) -> str:
    who = one.name
    if one.kind == "sleep":
        return f"{who} sleeps in {one.what or 'a system call'}"
    if one.facts.get("is_waiting"):
        return f"{who} waits for {one.a_what}" + (f", with a timeout of {duration(one.timeout_s)}" if one.timeout_s is not None else "")
    if one.facts.get("does"):
        return f"{who} {one.facts['does']}"
    if one.facts.get("calls"):
        return f"{who} has been in `{one.facts['calls']}` for {duration(case.still_s)}"
    return f"{who} has computed for {duration(case.still_s)} without a step or output"


def _mostly(case: Evidence, what: str) -> bool:
    return case.progress.doing[what] > _MOST * max(1, case.progress.doing.total())


def _has_gpu() -> bool:
    import torch  # noqa: PLC0415 - a view of the causes needs none

    return bool(torch.cuda.is_available() and torch.cuda.is_initialized())


_slow_row = partial(Row, whom=lambda case: case.main, state="slow")
_SLOW: tuple[Cause, ...] = (
    _slow_row("input_waiting", lambda _, one: one.kind == "input" and not one.is_child, "{who} waits for {what}",
        "type an answer under the cell"),
    _slow_row("compiling", lambda case, _: _mostly(case, "compiling"), "torch.compile is compiling",
        "wait: later steps run the compiled code; if every step recompiles, `TORCH_LOGS=recompiles` says why"),
    _memory,
    _slow_row("network", lambda *_: True,
        lambda _, one: f"{one.name} waits for " + (f"a response from {one.facts['host']}" if one.facts.get("host") else "the network"),
        lambda _, one: "call `settimeout(10)` on the socket" if one.what == "a socket" and not one.facts.get("host")
        else "set a timeout on the request; download once before the loop, and keep the file",
        whom=lambda case: next((one for one in case.chain.path if one.facts.get("network") or _is_program(one, _CALLS)), None)),
    _graph,
    _slow_row("tracing", lambda case, _: case.progress.tracer, lambda case, _: "{} is on: {}".format(*case.progress.tracer or ("", "")),
        lambda case, _: (case.progress.tracer or ("", "", ""))[2]),
    _data,
    _slow_row("native_wait", lambda _, one: _has_gpu() and str(one.facts.get("calls", "")).rpartition(".")[2] in _SYNCHRONIZE,
        "`{calls}` waits for the GPU to finish earlier kernels",
        "read the loss only every n steps; the time is spent in kernels launched before this line"),
    _oversubscribed,
)  # fmt: skip
