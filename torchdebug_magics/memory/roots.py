"""Where names begin: the namespace, its outputs, exceptions, running calls, and what modules and threads keep."""

from __future__ import annotations

import contextvars
import sys
import threading
import weakref
from collections.abc import Iterable, Iterator
from enum import IntEnum
from inspect import CO_OPTIMIZED
from types import BuiltinFunctionType, FunctionType
from typing import Any, NamedTuple

from torchdebug_magics.memory.containers import running_frames, thread_names
from torchdebug_magics.memory.outside import space_of, whose_module
from torchdebug_magics.probing.names import OUTPUT_NAME, named, user_namespaces, user_variables
from torchdebug_magics.probing.source.user_code import local_values, our_extension, running_shell

_ERRORS = ("last_traceback", "last_value", "last_exc")


class Rank(IntEnum):
    """Which of two roots that are equally near is the better answer: the lower one."""

    VARIABLE = 0
    OUTPUT = 1
    ERROR = 2
    DEBUGGER = 3
    SESSION = 4
    """What the last session of ours keeps for inspection."""
    IN_FLIGHT = 5
    """An error that is being handled, or what the caller says."""
    MODULE = 6


class Root(NamedTuple):
    """A named place in which things are held."""

    label: str
    value: object
    rank: Rank
    name: str = ""
    """The variable of a running call, whose `function` the label has, too; empty where it is the label."""
    function: str = ""


def roots(extra: Iterable[tuple[str, object]] = ()) -> Iterator[Root]:
    """All of them; the same object may come under several names."""
    shell = running_shell()
    yield from (Root(name, value, Rank.VARIABLE) for name, value in user_variables())
    yield from _locals()
    yield from _outputs(shell)
    yield from (Root(label, value, Rank.IN_FLIGHT) for label, value in extra)
    yield from _errors(shell)
    yield from _session(shell)
    yield from _globals(user_namespaces())
    yield from _kept()


def namespaces() -> Iterator[object]:
    """Dicts that are roots by their items: whoever holds one of them is no holder of all that is in it."""
    yield sys.modules
    yield from (space_of(module) for module in list(sys.modules.values()))
    shell = running_shell()
    if shell is not None:
        yield from (shell.user_ns, shell.user_ns_hidden, outputs(shell), shell.user_ns.get("In"))


def _locals() -> Iterator[Root]:
    spaces = list(namespaces())  # held, as the id of one that is gone may be another's
    known = set(map(id, spaces))
    for thread, frame in running_frames():
        where = f" in thread {thread!r}" if thread else ""
        if frame.f_code.co_flags & CO_OPTIMIZED:  # it has locals of its own: at the top of a module or a cell, they are the namespace
            function = frame.f_code.co_name
            for name, value in local_values(frame).items():
                yield Root(f"{function}() local {name!r}{where}", value, Rank.VARIABLE, name, function)
        elif id(frame.f_locals) not in known:
            found = ((name, value) for name, value in local_values(frame).items() if not name.startswith("__"))
            yield from (Root(f"{name}{where}", value, Rank.VARIABLE, name) for name, value in found)


def outputs(shell: Any) -> dict[int, Any]:
    """`Out`, unless the user gave its name to something else."""
    held = shell.user_ns.get("_oh")
    return held if type(held) is dict else {}


def _outputs(shell: Any) -> Iterator[Root]:
    if shell is None:
        return
    yield from (Root(f"Out[{number}]", value, Rank.OUTPUT) for number, value in list(outputs(shell).items()))
    yield from (Root(name, value, Rank.OUTPUT) for name, value in named(shell.user_ns) if OUTPUT_NAME.match(name))
    hidden = named(shell.user_ns_hidden)
    yield from (Root(f"user_ns_hidden[{name!r}]", value, Rank.OUTPUT) for name, value in hidden if OUTPUT_NAME.match(name))
    yield from (Root(f"displayhook.{name}", getattr(shell.displayhook, name, None), Rank.OUTPUT) for name in ("_", "__", "___"))
    yield Root("last_execution_result.result", getattr(shell.last_execution_result, "result", None), Rank.OUTPUT)


def _errors(shell: Any) -> Iterator[Root]:
    for name in _ERRORS:
        yield Root(f"sys.{name}", getattr(sys, name, None), Rank.ERROR)
    for error in (sys.exc_info()[1], *sys._current_exceptions().values()):
        yield Root("exception in flight", error[1] if isinstance(error, tuple) else error, Rank.IN_FLIGHT)
    if shell is None:
        return
    for name in ("InteractiveTB", "SyntaxTB"):
        held = getattr(shell, name, None)
        yield from (Root(f"{name}.{part}", getattr(held, part, None), Rank.ERROR) for part in ("tb", "evalue", "last_syntax_error"))
        # What a debugger that was left stands on; it is of IPython's, and not entered as such.
        kept = getattr(getattr(held, "pdb", None), "__dict__", None) or {}
        yield from (Root(f"{name}.pdb.{part}", value, Rank.DEBUGGER) for part, value in kept.items())
    for name in ("error_in_exec", "error_before_exec"):
        yield Root(f"last_execution_result.{name}", getattr(shell.last_execution_result, name, None), Rank.ERROR)


def _session(shell: Any) -> Iterator[Root]:
    session = getattr(our_extension(shell), "last_session", None)
    for name, kept in session.kept.items() if session is not None else ():
        yield Root(f"last_session().kept[{name!r}]", kept, Rank.SESSION)


def _globals(known: list[dict[str, Any]]) -> Iterator[Root]:
    tops: dict[str, bool] = {}  # an installed package has many modules, and all are its own
    for name, module in list(sys.modules.items()):
        top = name.partition(".")[0]
        if not (tops[top] if top in tops else tops.setdefault(top, whose_module(top) == "user")):
            continue
        space = space_of(module)
        if whose_module(name) != "user" or any(space is one for one in known):
            continue
        yield from (Root(f"{name}.{item}", value, Rank.MODULE) for item, value in named(space) if not item.startswith("__"))


def _kept() -> Iterator[Root]:
    for variable, value in contextvars.copy_context().items():
        yield Root(f"contextvar {variable.name}", value, Rank.MODULE)
    for info in list(getattr(weakref.finalize, "_registry", {}).values()):
        kind: Any = type(info.func)
        called = info.func.__name__ if kind is FunctionType or kind is BuiltinFunctionType else kind.__name__
        yield Root(f"weakref.finalize of {called}", (info.func, info.args, info.kwargs), Rank.MODULE)
    for thread, (_, name) in zip(threading.enumerate(), thread_names(), strict=False):
        yield Root(f"thread {name!r}", thread, Rank.MODULE)
