"""Who holds what a thread waits for: asked of the object where it knows, else read from the lines that each thread has come through."""

from __future__ import annotations

import ast
import gc
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from types import FrameType, FunctionType
from typing import Any

from torchdebug_magics.instruments.hangwatch.waits.builtin_waits import LOCKS, Reach, Target, Waiting, runs_loop
from torchdebug_magics.probing.source.call_sites import MISSING, function_node, line_of, names_of, value_of
from torchdebug_magics.probing.source.syntax import WITHS, enclosing, last_name, loops_around, nodes, own_nodes
from torchdebug_magics.probing.source.user_code import is_user_code, owner

Stacks = Mapping[int, Sequence[FrameType]]
"""The frames of each thread, by its ident, innermost first."""
_OWNER = re.compile(r"owner=(\d+)")
_MOST_FUNCTIONS = 2000


def find_holders(ident: int, waiting: Waiting, stacks: Stacks, waits: Mapping[int, Waiting | None], reach: Callable[[int], Reach]) -> None:
    """Fill in `targets` and `able`, and in `facts` where a lock was acquired; `reach` is asked for that of a thread, by its ident."""
    if waiting.on is None or waiting.targets:
        return
    if waiting.facts.get("of_loop"):
        waiting.targets = _busy_in_pools(stacks)
        waiting.facts["may_end"] = True  # a socket, a process or a callback may resolve it
        return
    if waiting.kind == "lock":
        _lock_holder(ident, waiting, stacks, reach)
    elif waiting.facts.get("future"):
        waiting.targets = _runners(waiting.on, stacks)
        if not waiting.targets and any(_is_to_run(waiting.on, frame) for frame in stacks[ident]):
            waiting.targets = [("thread", ident)]
            waiting.facts["own_loop"] = True
        waiting.kind = "join" if waiting.targets else "event"
    alike = {other for other, its in waits.items() if its is not None and (its.on is waiting.on or its.facts.get("idle"))}
    others = [other for other in stacks if other != ident and other not in alike]
    if waiting.kind in {"queue", "event"} and not waiting.targets:
        waiting.targets = [("thread", other) for other in others if reach(other).names(waiting.on)]
    if waiting.kind in {"queue", "event"} or (waiting.kind == "lock" and waiting.targets in ([], [("thread", ident)])):
        waiting.able = [("thread", other) for other in others if reach(other).can_get(waiting.on)]


def _lock_holder(ident: int, waiting: Waiting, stacks: Stacks, reach: Callable[[int], Reach]) -> None:
    lock = waiting.on
    told = _OWNER.search(repr(lock)) if isinstance(lock, LOCKS) else None
    if told is not None and int(told[1]):
        waiting.targets = [("thread", int(told[1]))]
    for other, frames in sorted(stacks.items(), key=lambda item: item[0] != ident):
        for frame in (frame for frame in frames if owner(frame.f_code.co_filename) in {"user", "library"}):
            line, by_with = _acquired_at(frame, lock)
            shared = getattr(lock, "_semlock", None)
            is_free = other == ident and shared is not None and not shared._count()  # this process does not hold it
            if line is None or is_free or (waiting.targets and waiting.targets != [("thread", other)]):
                continue
            others = [one for one in stacks if one != ident and reach(one).names(lock)] if other == ident and not by_with else []
            waiting.targets = [("thread", other) for other in others or [other]]  # a lock may be a signal, that another thread gives
            waiting.facts["acquired"] = (frame.f_code.co_filename, line, frame.f_code.co_name)
            return
    if not waiting.targets:
        waiting.facts["acquired"], waiting.facts["acquired_by_with"] = _acquired_somewhere(str(waiting.facts.get("name", "")))


def _acquired_at(frame: FrameType, lock: Any) -> tuple[int | None, bool]:
    """The line of a frame's function at which it took the lock that it still holds, and whether by a `with`."""
    function = function_node(frame.f_code) if not frame.f_code.co_filename.startswith("<frozen") else None
    if function is None:
        return None, False
    line, names = line_of(frame), names_of(frame)
    for statement in enclosing(function, line):
        if isinstance(statement, WITHS) and line > statement.lineno:
            for item in statement.items:
                if _same(value_of(item.context_expr, frame, names), lock):
                    return item.context_expr.lineno, True
    taken: int | None = None
    for word, at in _called_on(lock, function, frame, names):
        if at < line:
            taken = at if word == "acquire" else None if word == "release" else taken
    if taken is None:  # by the last round of a loop whose body never gives it back, at the line where it waits now
        words = [word for loop in loops_around(function, line)[-1:] for word, _ in _called_on(lock, loop, frame, names)]
        taken = line if words and "release" not in words else None
    return taken, False


def _called_on(lock: Any, inside: ast.AST, frame: FrameType, names: dict[str, Any]) -> list[tuple[str, int]]:
    """(method, line) of the calls on a lock in a function or loop, in the order of their lines."""
    functions = (node.func for node in own_nodes(inside) if isinstance(node, ast.Call))
    found = [
        function for function in functions if isinstance(function, ast.Attribute) and _same(value_of(function.value, frame, names), lock)
    ]
    return sorted(((one.attr, one.lineno) for one in found), key=lambda call: call[1])


def _same(value: Any, lock: Any) -> bool:
    return value is not MISSING and (value is lock or (type(value).__module__ == "threading" and getattr(value, "_lock", None) is lock))


def _acquired_somewhere(name: str) -> tuple[tuple[str, int, str] | None, bool]:
    """Where a function of the user's that has ended took a lock of this name, if only one does, and whether in a `with`."""
    found = []
    values = list(vars(sys.modules["__main__"]).values())[:_MOST_FUNCTIONS] if name else []
    functions = (each for value in values for each in (value, *(vars(value).values() if issubclass(type(value), type) else ())))
    for code in (each.__code__ for each in functions if isinstance(each, FunctionType) and is_user_code(each.__code__)):
        function = function_node(code)
        taken = [(node.value, False) for node in nodes(ast.Attribute, function) if node.attr == "acquire"]
        taken += [(node.context_expr, True) for node in nodes(ast.withitem, function)]
        found += [((code.co_filename, node.lineno, code.co_name), by_with) for node, by_with in taken if last_name(node) == name]
    return found[0] if len(found) == 1 else (None, bool(found) and all(by_with for _, by_with in found))


def _runners(future: Any, stacks: Stacks) -> list[Target]:
    """The thread that runs a future's work; of one that waits for its turn, the threads of its pool that are busy."""
    busy: list[tuple[int, Any]] = []
    for ident, frames in stacks.items():
        for frame in frames:
            if frame.f_globals.get("__name__") == "concurrent.futures.thread" and frame.f_code.co_name in {"run", "_worker"}:
                names = names_of(frame)
                if getattr(names.get("self"), "future", None) is future:
                    return [("thread", ident)]
                if frame.f_code.co_name == "_worker" and names.get("work_item") is not None:
                    busy.append((ident, names.get("work_queue")))
    # What waits in a pool's queue is held by its `SimpleQueue`, which tells the collector what it refers to.
    queued = ((ident, referent) for ident, queue in busy if queue is not None for referent in gc.get_referents(queue))
    waiting = ((ident, item) for ident, one in queued for item in (tuple(one) if isinstance(one, list) else (one,)))
    return list(dict.fromkeys(("thread", ident) for ident, item in waiting if getattr(item, "future", None) is future))


def _is_to_run(future: Any, frame: FrameType) -> bool:
    """Whether it stands for a coroutine that an event loop, run by this frame, has been asked for and cannot begin."""
    ready = getattr(names_of(frame).get("self"), "_ready", ()) if runs_loop(frame) else ()
    closures = (getattr(getattr(handle, "_callback", None), "__closure__", None) or () for handle in tuple(ready))
    return any(cell.cell_contents is future for closure in closures for cell in closure)


def _busy_in_pools(stacks: Stacks) -> list[Target]:
    """The threads of pools that run the user's code: one of them may compute what a coroutine awaits."""
    running = ((ident, frames) for ident, frames in stacks.items() if any(is_user_code(frame.f_code) for frame in frames))
    pool = "concurrent.futures.thread"
    return [("thread", ident) for ident, frames in running if any(frame.f_globals.get("__name__") == pool for frame in frames)]
