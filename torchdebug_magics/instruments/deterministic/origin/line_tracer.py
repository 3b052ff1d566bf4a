"""Runs a body and writes down each line of the user's code: what its names held before and after it."""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from inspect import CO_ASYNC_GENERATOR, CO_COROUTINE, CO_GENERATOR
from types import CodeType, FrameType, TracebackType
from typing import Any

import torch

from torchdebug_magics.instruments.deterministic.origin.digests import Digests
from torchdebug_magics.instruments.deterministic.origin.line_names import Namespace, fact
from torchdebug_magics.instruments.deterministic.origin.line_statements import Statement, Statements
from torchdebug_magics.instruments.deterministic.origin.line_steps import Activation, Call, Files, Held, Place, Run, Source, Step
from torchdebug_magics.instruments.deterministic.origin.nondeterminism_sources import (
    FILE_WRITES,
    SAVED,
    asked_by_name,
    asked_in_c,
    asked_in_python,
    called_from,
)
from torchdebug_magics.instruments.deterministic.twice.body import TooLong
from torchdebug_magics.probing.safety import Guard
from torchdebug_magics.probing.source.code_owner import frames_above, is_in_comprehension, is_user_code, owner

_COMPREHENSIONS = frozenset({"<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"})
_RESUMED = CO_GENERATOR | CO_ASYNC_GENERATOR | CO_COROUTINE
_OF_PARTS = (torch.nn.Module, torch.optim.Optimizer)


class Tracer:
    """For one run. Nobody else may trace meanwhile; what a profiler would see is not touched."""

    def __init__(self, statements: Statements, files: Files, guard: Guard, most_steps: int) -> None:
        self._statements = statements
        self._files = files
        self._guard = guard
        self._most_steps = most_steps
        self._digests = Digests()
        self._run = Run()
        self._is_on = False
        self._process = os.getpid()
        self._threads = weakref.WeakKeyDictionary({threading.current_thread(): 0})
        self._threads_count = 0
        self._is_user: dict[CodeType, bool] = {}
        self._calls: dict[int, Call] = {}
        """Of running frames."""
        self._ended: dict[int, Activation] = {}
        """Of frames that are gone, or sleep; whose number is given away again is overwritten."""
        self._asleep: dict[int, int] = {}
        """Where a generator's frame stood when it yielded."""

    def trace(self, body: Callable[[], object]) -> Run:
        """Runs it. What it raises is swallowed, save an interrupt."""
        profiles = sys.getprofile() is None and getattr(threading, "_profile_hook", None) is None
        if not profiles:
            self._guard.note("reads of the clock and of entropy were not recorded: a profiler is running")
        before = getattr(threading, "_trace_hook", None)
        self._is_on = True
        try:
            threading.settrace(self._entered)
            if profiles:
                threading.setprofile(self._profiled)
                sys.setprofile(self._profiled)
            sys.settrace(self._entered)
            body()
        except KeyboardInterrupt:
            raise
        except TooLong:
            self._run.is_whole = False
        except BaseException as error:  # noqa: BLE001 - the run ends itself by raising; what the user's code raises is told by the runs before
            self._is_on = False
            self._run.stopped = stopped_at(error, self._ended)
        finally:
            self._is_on = False
            sys.settrace(None)
            threading.settrace(before)
            if profiles:
                sys.setprofile(None)
                threading.setprofile(None)
        return self._run

    # --- called by Python ------------------------------------------------------------------------------------------------------

    def _entered(self, frame: FrameType, _event: str, _arg: object) -> Any:
        if not self._is_on:
            sys.settrace(None)
            return None
        code = frame.f_code
        known = self._is_user.get(code)
        if known is None:
            known = self._is_user[code] = self._is_followed(code)
        if not known or os.getpid() != self._process:
            return None
        self._safely(self._enter, frame)
        return self._traced

    def _is_followed(self, code: CodeType) -> bool:
        """Comprehensions are part of their line; code without a source, such as a dataclass's, is part of the line that calls it."""
        return is_user_code(code) and code.co_name not in _COMPREHENSIONS and self._statements.knows(code.co_filename)

    def _traced(self, frame: FrameType, event: str, arg: object) -> Any:
        if not self._is_on:
            return None
        if event == "line" and not is_in_comprehension(frame):
            self._safely(self._line, frame)
        elif event == "return":
            self._safely(self._leave, frame, arg)
            del frame.f_trace  # of a generator that sleeps; it is set again when it goes on
            return None
        return self._traced

    def _profiled(self, frame: FrameType, event: str, arg: Any) -> None:
        if not self._is_on:
            sys.setprofile(None)
        elif event == "c_call":
            self._safely(self._asked, frame, arg)
        elif event == "call":
            self._safely(self._asked, frame, None)

    def _safely(self, what: Callable[..., None], *args: Any) -> None:
        try:
            what(*args)
        except Exception as error:  # noqa: BLE001 - any failure of ours must leave the user's code alone; it is reported
            self._is_on = False
            self._run.is_whole = False
            self._guard.note(f"tracing the lines of the cell failed: {type(error).__name__}: {str(error)[:200]}")

    # --- what is written down --------------------------------------------------------------------------------------------------

    def _enter(self, frame: FrameType) -> None:
        code = frame.f_code
        caller = self._current(frame.f_back)
        activation = None
        if code.co_flags & _RESUMED and frame.f_lasti >= self._asleep.get(id(frame), sys.maxsize):
            activation = self._ended.get(id(frame))
        if activation is None or activation.code is not code:
            activation = Activation(code, self._thread())
        call = self._calls[id(frame)] = Call(activation, caller, len(activation.steps))
        (self._run.roots if caller is None else caller.calls).append(call)
        for name in code.co_varnames[: code.co_argcount]:
            if name in frame.f_locals:
                self._digests.of(frame.f_locals[name])

    def _thread(self) -> int:
        thread = threading.current_thread()
        if thread not in self._threads:
            self._threads[thread] = self._threads_count = self._threads_count + 1
        return self._threads[thread]

    def _current(self, frame: FrameType | None) -> Step | None:
        for one in frames_above(frame):
            call = self._calls.get(id(one))
            if call is not None and call.activation.code is one.f_code:
                return call.activation.steps[-1] if call.activation.steps else call.caller
        return None

    def _line(self, frame: FrameType) -> None:
        call = self._calls.get(id(frame))
        if call is None:
            return
        if len(self._run.steps) >= self._most_steps:
            self._is_on = False
            self._run.is_whole = False
            self._guard.note(f"only the first {self._most_steps:,} lines that ran were traced")
            return
        activation = call.activation
        look = self._look(activation, frame)
        self._finish(call, look)
        statement = self._statements.at(activation.code.co_filename, frame.f_lineno, activation.code.co_name)
        step = Step(activation, call, len(self._run.steps), len(activation.steps), frame.f_lineno, statement, {}, {}, {}, [], [])
        activation.steps.append(step)
        self._run.steps.append(step)
        if statement is not None:
            step.before = look.all(statement)
            step.inside = look.inside(statement)
            step.sources += [Source(path, cause, line, distance=0) for path, cause, line in asked_by_name(statement.calls, frame)]

    @staticmethod
    def _finish(call: Call, look: Look) -> None:
        steps = call.activation.steps
        if len(steps) > call.entered and steps[-1].statement is not None:
            after = look.all(steps[-1].statement)
            steps[-1].after = steps[-1].before if after == steps[-1].before else after

    def _look(self, activation: Activation, frame: FrameType) -> Look:
        return Look(Namespace(activation, frame, self._digests), self._digests, self._files)

    def _leave(self, frame: FrameType, returned: object) -> None:
        call = self._calls.pop(id(frame), None)
        if call is None:
            return
        activation = call.activation
        if not is_in_comprehension(frame):
            self._finish(call, self._look(activation, frame))
        call.left = len(activation.steps)
        call.returned = self._digests.of(returned)
        self._ended[id(frame)] = activation
        if activation.code.co_flags & _RESUMED:
            self._asleep[id(frame)] = frame.f_lasti

    # --- who was asked ----------------------------------------------------------------------------------------------------------

    def _asked(self, frame: FrameType, function: Any) -> None:
        written = frame.f_locals.get("name") if function is None and frame.f_code is SAVED else None
        if function is not None and function.__name__ in FILE_WRITES:
            written = function.__self__
        if written is not None:
            self._files.wrote(written, self._current(frame))
        name, cause = asked_in_python(frame) if function is None else asked_in_c(function, frame)
        if not name or owner(frame.f_code.co_filename) == "own":  # what we ask for ourselves, inside an op
            return
        user = next((one for one in frames_above(frame) if id(one) in self._calls), None)
        step = self._current(user)
        if user is None or step is None:
            return
        if name.startswith("file."):
            self._files.read(function.__self__, step)
        asking = frame.f_back if function is None else frame
        told, distance = called_from(asking or frame, user, name)
        if name == "os.getenv" and distance > 1:  # a library's own settings
            return
        source = Source(told, cause, user.f_lineno or step.line, distance)
        if source not in step.sources:
            step.sources.append(source)


class Look:
    """What names hold at one moment; a name that is asked for twice is looked at once."""

    def __init__(self, names: Namespace, digests: Digests, files: Files) -> None:
        self._names = names
        self._digests = digests
        self._files = files
        self._known: dict[str, tuple[str, Held] | None] = {}

    def all(self, statement: Statement) -> dict[str, Held]:
        """By the name of each value."""
        found = {}
        for path in (*statement.paths, *self._holders(statement.paths)):
            known = self._known[path] if path in self._known else self._of(path, statement)
            self._known[path] = known
            if known is not None:
                found[known[0]] = known[1]
        return found

    def inside(self, statement: Statement) -> dict[str, dict[Place, int]]:
        """What containers hold, and objects of the user's in them."""
        found = {}
        for path in statement.paths:
            known = self._names.find(path)
            if known is not None:
                inner = dict(self._digests.inside(known[1]))
                if inner:
                    found[known[0]] = inner
        return found

    def _holders(self, paths: tuple[str, ...]) -> Iterator[str]:
        """Of `optimizer.param_groups` the optimizer, too: what it does is another thing when its parts are."""
        for root in dict.fromkeys(path.partition(".")[0] for path in paths if "." in path):
            found = self._names.find(root)
            if found is not None and isinstance(found[1], _OF_PARTS):
                yield root

    def _of(self, path: str, statement: Statement) -> tuple[str, Held] | None:
        found = self._names.find(path)
        if found is None:
            return None
        known, value, place = found
        if word := fact(value):
            statement.facts[known] = word
            if word == "file":
                self._files.met(value)
        return known, Held(place, self._digests.of(value))


def stopped_at(error: BaseException, ended: Mapping[int, Activation]) -> Step | None:
    """The innermost line of those calls, by the id of their frames, that the error has passed; None where it passed none."""
    return next(filter(None, (_innermost(one, ended) for one in _tracebacks(error))), None)


def _tracebacks(error: BaseException) -> Iterator[TracebackType | None]:
    """Of what was raised by the op in question first; of what other ops raised while that passed, after it."""
    chain = [error]
    while chain[-1].__context__ is not None and type(chain[-1].__context__) is type(error):
        chain.append(chain[-1].__context__)
    return (one.__traceback__ for one in reversed(chain))


def _innermost(traceback: TracebackType | None, ended: Mapping[int, Activation]) -> Step | None:
    found = None
    while traceback is not None:
        activation = ended.get(id(traceback.tb_frame))
        if activation is not None and activation.code is traceback.tb_frame.f_code:
            found = next((step for step in reversed(activation.steps) if _is_at(step, traceback.tb_lineno)), found)
        traceback = traceback.tb_next
    return found


def _is_at(step: Step, line: int) -> bool:
    return step.line == line or (step.statement is not None and step.statement.first <= line <= step.statement.last)
