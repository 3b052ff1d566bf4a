"""Runs a body again and again from the same start, and leaves everything as the first run has left it."""

from __future__ import annotations

import ast
import builtins
import contextvars
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import FunctionType, ModuleType
from typing import Any, Protocol

import torch

from torchdebug_magics.errors import DeterminismError
from torchdebug_magics.instrument import Body
from torchdebug_magics.instruments.deterministic.ops.digest_recorder import DigestRecorder
from torchdebug_magics.instruments.deterministic.ops.op_recording import Recording
from torchdebug_magics.instruments.deterministic.twice.body import Enough, TooLong, bounded
from torchdebug_magics.instruments.deterministic.twice.silent_run import Heard, Unheard
from torchdebug_magics.instruments.deterministic.twice.start_state import StartState
from torchdebug_magics.probing.hooks import Hooks
from torchdebug_magics.probing.modules import is_compiled, live_modules, unwrapped
from torchdebug_magics.probing.outside.effects import Effects, Irrevocable
from torchdebug_magics.probing.safety import Guard, interrupts_held
from torchdebug_magics.probing.source.lines import Line
from torchdebug_magics.probing.source.syntax import nodes
from torchdebug_magics.probing.source.user_code import owner
from torchdebug_magics.probing.state.contents import Contents, memory_of
from torchdebug_magics.probing.state.rng import RandomState

_MOST_TIMES, _MORE_S = 10, 5.0
"""How much more CPU time than the first run a further one may take, times and seconds."""
_TRACED_TIMES = 6
"""As many times that where the lines of the user's code are followed."""
_STRICT = "--strict: the cell {}, which cannot be undone for a second run: move it to its own cell"
REPEATS = "the cell {}, which a second run would repeat: `--anyway` runs it all the same"


def _nothing(_stack: ExitStack) -> None:
    return None


class RunWatch(Protocol):
    """Sees the ops of one run."""

    @property
    def contents(self) -> Contents:
        """What tensors held before that run has written them."""

    def attach(self, stack: ExitStack) -> None:
        """From here until the stack closes."""


class Runs:
    """The first run is the user's own; `over` ends it. Every later one is ended where it began, and `finish` brings back the end."""

    def __init__(self, body: Body, outside: Outside, guard: Guard, hooks: Hooks) -> None:
        self.body = body
        self.guard = guard
        self.hooks = hooks
        self._outside = outside
        self._start = StartState(body, guard)
        self._imported = Imported()
        self._context = contextvars.copy_context()
        self._unheard = Unheard()
        # Compiled code writes where no op is seen: what it may write is copied whole.
        self._unseen = self._start.contents() if _is_compiled(body) else Contents()
        self._unseen_end = Contents()
        self._end: StartState | None = None
        self._written: Contents | None = None
        self._undo = Contents()
        """What tensors held at the start, while a run begins at the end of the first one."""
        self._vary: Callable[[ExitStack], object] = _nothing
        self._from_end = False
        self.heard = self.second_heard = Heard()
        """What the last run has printed, and what the second one has."""
        self.writers: Mapping[int, Line] = {}
        """The line of the first run that wrote first to each storage from before it."""
        self._began_s, self._first_s = time.process_time(), 0.0
        """CPU time: at the start of the first run, and what it took."""
        self.count = 0
        """Runs after the first one."""

    @property
    def can_go_on(self) -> bool:
        """Whether a run may begin where the first one ended."""
        return self._end is not None and self._end.is_whole

    @property
    def files(self) -> tuple[str, ...]:
        """Names of the files that the first run has changed."""
        return self._outside.changed

    @property
    def written(self) -> frozenset[int]:
        """Where the storages are that the first run has written to, of those that were there before it."""
        kept = () if self._written is None else self._written.tensors()
        return frozenset(memory_of(tensor) for tensor in (*kept, *self._unseen_end.tensors()))

    def is_found_again(self, value: object) -> bool:
        """Whether a later run finds it as the first one did, though it cannot be put back in place."""
        return self._start.is_found_again(value)

    def over(self, contents: Contents) -> None:
        """The first run has ended, having written what is in `contents`: back to the start."""
        self._first_s = time.process_time() - self._began_s
        with interrupts_held():
            self._end = StartState(self.body, self.guard, also=self._start.names)
            for tensor in self._unseen.tensors():
                self._unseen_end.keep(tensor)
            self._written = Contents()
            contents.exchange(self._written)
            self._unseen.put_back()
            self._imported.over()
            self._start.put_back()

    @contextmanager
    def otherwise(self, vary: Callable[[ExitStack], object] = _nothing, *, from_end: bool = False) -> Iterator[None]:
        """Meanwhile each run begins after `vary`, which may register what to undo; if `from_end`, it begins where the first run ended."""
        before = self._vary, self._from_end
        self._vary, self._from_end = vary, from_end
        try:
            yield
        finally:
            self._vary, self._from_end = before

    def again(self, watch: RunWatch, at_end: Callable[[], object] = lambda: None) -> BaseException | None:
        """One more run; what it raised, if it raised. An interrupt passes. `at_end` sees what a whole run has left."""
        try:
            with ExitStack() as stack:
                self._run(watch, stack)
            at_end()
        except Enough:
            return None
        except (KeyboardInterrupt, Irrevocable):
            raise
        except TooLong as error:
            self.guard.note(f"a rerun was stopped after {_MOST_TIMES} times the CPU time of the first run")
            return error
        except BaseException as error:  # noqa: BLE001 - the user's code in a hidden run: what it raises is what differs
            return error
        finally:
            with interrupts_held():
                watch.contents.put_back()
                watch.contents.forget()  # the frames of the run may hold its watch until Python's collector comes
                self._undo.put_back()
                self._undo = Contents()
                self._unseen.put_back()
                self._imported.drop()
                self._start.put_back()
        return None

    def unwatched(self) -> BaseException | None:
        """One more run of which no op is compared."""
        return self.again(DigestRecorder(Recording(), lambda _seen, _op: None, self.guard, self.hooks))

    def _run(self, watch: RunWatch, stack: ExitStack) -> None:
        self.count += 1
        state = self._to_end() if self._from_end else self._start
        self.heard = stack.enter_context(self._unheard.meanwhile())  # after the state, which holds the standard streams, too
        self._outside.again(stack, as_left=self._from_end)
        state.stand_in()
        self.guard.run("changing one thing", self._vary, stack)
        watch.attach(stack)
        most_s = _MOST_TIMES * self._first_s + _MORE_S
        try:
            with bounded(most_s if sys.gettrace() is None else _TRACED_TIMES * most_s):
                self._context.copy().run(self.body.run)
        except Enough as enough:
            traceback.clear_frames(enough.__traceback__)  # what was made in part and complains as it goes, goes unheard
            raise

    def _to_end(self) -> StartState:
        """From the start to where the first run ended, the generators of random numbers left as they are."""
        assert self._end is not None
        assert self._written is not None
        for tensor in (*self._written.tensors(), *self._unseen_end.tensors()):
            self._undo.keep(tensor)
        self._written.put_back()
        self._unseen_end.put_back()
        random = RandomState.take()
        self._end.put_back()
        random.put_back()
        return self._end

    def finish(self) -> None:
        """Everything as the first run has left it. Harmless the second time."""
        with interrupts_held():
            self._imported.finish()
            if self._end is not None and self._written is not None:
                self._written.put_back()
                self._unseen_end.put_back()
                self._end.put_back()
            self._end = self._written = None  # last: what an interrupt cut short is finished by another call


def _is_compiled(body: Body) -> bool:
    """Whether a compiler may be at work in it, as far as can be seen."""
    return (
        any(node.attr == "compile" for node in nodes(ast.Attribute, *body.statements))
        or any(is_compiled(module) or unwrapped(module) is not module for module in live_modules())
        or any(hasattr(value, "_torchdynamo_orig_callable") for value in body.variables.values() if isinstance(value, FunctionType))
    )


class Imported:
    """What a module keeps began with its import: were it there already, a later run would find what the first one has left in it."""

    def __init__(self) -> None:
        self._before = frozenset(sys.modules)
        self._first: dict[str, ModuleType] = {}

    def over(self) -> None:
        """The first run has ended: what it has imported is kept for the end."""
        self._first = self._new()
        self.drop()

    def drop(self) -> None:
        """As it was before any run."""
        for name in self._new():
            del sys.modules[name]

    def finish(self) -> None:
        """As the first run has left it. Harmless the second time."""
        if self._first:
            self.drop()
            sys.modules.update(self._first)
        self._first = {}  # last: what an interrupt cut short is finished by another call

    def _new(self) -> dict[str, ModuleType]:
        return {name: one for name, one in list(sys.modules.items()) if name not in self._before and _is_users(one)}


def _is_users(module: ModuleType) -> bool:
    """Whether it is written in Python, by the user. What is written in C, or gives torch new ops, may not be loaded a second time."""
    file = getattr(module, "__file__", None)
    if not isinstance(file, str) or not file.endswith(".py") or owner(file) != "user":
        return False
    return not any(isinstance(var, torch.library.Library) for var in list(vars(module).values()))


class Outside:
    """Questions are asked by the first run alone: later ones hear the same answers. Files are put back around each later run."""

    def __init__(self, body: Body | None, guard: Guard, *, strict: bool, anyway: bool = False) -> None:
        self._strict = strict
        """Whether an act that cannot be undone raises at the user's line."""
        self._answers: list[str] = []
        roots = () if body is None else (body.namespace, body.variables, *body.statements, *body.roots)
        self._effects = Effects(guard, *roots, sentence=REPEATS, anyway=anyway, prevent=self._prevent)

    @property
    def said(self) -> tuple[str, ...]:
        """What a second run does not find as the first one did."""
        return ("the answer typed for `input()`",) if self._answers else ()

    @property
    def changed(self) -> tuple[str, ...]:
        """Names of the files that the first run has written, made or removed."""
        return self._effects.changed

    @property
    def refusal(self) -> str:
        """Why there can be no later run, now that the first one has ended; or nothing."""
        return self._effects.refusal

    def first(self, stack: ExitStack) -> None:
        """Note what happens, from here until the stack closes."""
        ask = builtins.input

        def asked(*prompt: Any) -> str:
            __tracebackhide__ = True
            self._prevent("asks for an answer by `input()`")
            self._answers.append(ask(*prompt))
            return self._answers[-1]

        self._effects.begin()
        self._effects.first(stack)
        _stand_in(stack, asked)

    def over(self) -> None:
        """The first run has ended."""
        self._effects.over()

    def again(self, stack: ExitStack, *, as_left: bool = False) -> None:
        """Nothing gets out, from here until the stack closes; the disk is as the first run found it, or, `as_left`, has left it."""
        answers = deque(self._answers)

        def asked(*_prompt: Any) -> str:
            if not answers:
                raise EOFError
            return answers.popleft()

        stack.enter_context(self._effects.rerun(from_end=as_left))
        _stand_in(stack, asked)

    def finish(self) -> None:
        """Everything is as the first run has left it. Harmless the second time."""
        self._effects.finish()

    def _prevent(self, what: str) -> None:
        __tracebackhide__ = True
        if self._strict:
            raise DeterminismError(_STRICT.format(what))


def _stand_in(stack: ExitStack, asked: Any) -> None:
    before = builtins.input

    def undo() -> None:
        if builtins.input is asked:  # else the user has put something there, and it stays
            builtins.input = before

    stack.callback(undo)
    builtins.input = asked
