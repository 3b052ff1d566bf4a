"""Runs a body again and again from the same start, in silence, and leaves everything as the first run has left it."""

from __future__ import annotations

import ast
import builtins
import contextlib
import contextvars
import io
import logging
import re
import sys
import time
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import FunctionType
from typing import Any, NamedTuple, TypeAlias

from torchdebug_magics.errors import DeterminismError
from torchdebug_magics.instrument import Body
from torchdebug_magics.instruments.deterministic.ops.digest_recorder import DigestRecorder, Enough
from torchdebug_magics.instruments.deterministic.ops.op_recording import Recording
from torchdebug_magics.instruments.deterministic.twice.body import Leftovers, StartState, TooLong, bounded
from torchdebug_magics.probing.hooks import Hooks
from torchdebug_magics.probing.modules import is_compiled, live_modules, unwrapped
from torchdebug_magics.probing.outside.effects import Effects, Irrevocable
from torchdebug_magics.probing.safety import Guard, interrupts_held
from torchdebug_magics.probing.source.lines import Line
from torchdebug_magics.probing.source.syntax import nodes
from torchdebug_magics.probing.source.user_code import is_user_code, user_frame
from torchdebug_magics.probing.state.contents import Contents, memory_of
from torchdebug_magics.probing.state.rng import RandomState

_MOST_TIMES, _MORE_S = 10, 5.0
"""How much more CPU time than the first run a further one may take, times and seconds."""
_TRACED_TIMES = 6
"""As many times that where the lines of the user's code are followed."""
_STRICT = "--strict: the cell {}, which cannot be undone for a second run: move it to its own cell"
REPEATS = "the cell {}, which a second run would repeat: `--anyway` runs it all the same"
_HANDLE = logging.Handler.handle
_NUMBER = re.compile(r"[-+]?\d[\d.,]*(?:e[-+]?\d+)?")
_MOST_LINES, _MOST_LETTERS = 2_000, 10_000
Place: TypeAlias = "tuple[str, int, str]"
"""(file, line, function)"""
Vary: TypeAlias = Callable[[ExitStack], object]
"""Changes one thing before a run."""


def nothing(_stack: ExitStack) -> None:
    """Run as the first run did."""


class FirstRun(NamedTuple):
    """What a later run is compared with."""

    recording: Recording
    results: dict[str, int]
    """A digest of each tensor, number and text that it left, by the user's name."""


class Runs:
    """The first run is the user's own; `over` ends it. Every later one is ended where it began, and `finish` brings back the end."""

    def __init__(self, body: Body, outside: Outside, guard: Guard, hooks: Hooks) -> None:
        self.body = body
        self.guard = guard
        self.hooks = hooks
        self.outside = outside
        self.start = StartState(body, guard)
        self.leftovers = Leftovers(body.variables, self.start.stand_ins.__contains__)
        self._context = contextvars.copy_context()
        # Compiled code writes where no op is seen: what it may write is copied whole.
        self._unseen = self.start.contents() if _is_compiled(body) else Contents()
        self._end: StartState | None = None
        self._written: Contents | None = None
        self._undo = Contents()
        """What tensors held at the start, while a run begins at the end of the first one."""
        self.first = FirstRun(Recording(), {})
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
        """Whether a run may begin where the first one ended: what is added to a sparse gradient is seen by nobody, and cannot be undone."""
        return self._end is not None and self._end.is_dense

    @property
    def written(self) -> frozenset[int]:
        """Where the storages are that the first run has written to, of those that were there before it."""
        return frozenset(map(memory_of, () if self._written is None else self._written.tensors()))

    def over(self, contents: Contents) -> None:
        """The first run has ended, having written what is in `contents`: back to the start."""
        self._first_s = time.process_time() - self._began_s
        with interrupts_held():
            self._end = StartState(self.body, self.guard, also=self.start.names)
            self._written = Contents()
            contents.exchange(self._written)
            for tensor in self._unseen.tensors():
                self._written.keep(tensor)
            self._unseen.put_back()
            self.start.put_back()

    def again(
        self, watch: DigestRecorder, at_end: Callable[[], object] = lambda: None, vary: Vary = nothing, *, from_end: bool = False
    ) -> BaseException | None:
        """One more run; what it raised, if it raised. An interrupt passes. `at_end` sees what a whole run has left.

        It begins after `vary`, which may register what to undo; if `from_end`, where the first run ended.
        """
        try:
            with ExitStack() as stack:
                self._run(watch, stack, vary, from_end=from_end)
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
                self.start.put_back()
        return None

    def unwatched(self, vary: Vary = nothing, *, from_end: bool = False) -> BaseException | None:
        """One more run of which no op is compared."""
        return self.again(DigestRecorder(Recording(), self.guard, self.hooks), vary=vary, from_end=from_end)

    def _run(self, watch: DigestRecorder, stack: ExitStack, vary: Vary, *, from_end: bool) -> None:
        self.count += 1
        state = self._to_end() if from_end else self.start
        self.heard = stack.enter_context(unheard())  # after the state, which holds the standard streams, too
        stack.enter_context(self.outside.rerun(from_end=from_end))
        state.stand_in()
        self.guard.run("changing one thing", vary, stack)
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
        for tensor in self._written.tensors():
            self._undo.keep(tensor)
        self._written.put_back()
        random = RandomState.take()
        self._end.put_back(with_modules=False)
        random.put_back()
        return self._end

    def finish(self) -> None:
        """Everything as the first run has left it, the disk, too. Harmless the second time."""
        with interrupts_held():
            if self._end is not None and self._written is not None:
                self._written.put_back()
                self._end.put_back()
            self._end = self._written = None  # last: what an interrupt cut short is finished by another call
        self.outside.finish()


def _is_compiled(body: Body) -> bool:
    """Whether a compiler may be at work in it, as far as can be seen."""
    return (
        any(node.attr == "compile" for node in nodes(ast.Attribute, *body.statements))
        or any(is_compiled(module) or unwrapped(module) is not module for module in live_modules())
        or any(hasattr(value, "_torchdynamo_orig_callable") for value in body.variables.values() if isinstance(value, FunctionType))
    )


class Outside(Effects):
    """The disk and the outside world of a body; what the first run was answered by `input()` is what later ones are answered."""

    def __init__(self, body: Body, guard: Guard, *, strict: bool, anyway: bool) -> None:
        self._strict = strict
        """Whether an act that cannot be undone raises at the user's line."""
        self._answers: list[str] = []
        roots = (body.namespace, body.variables, *body.statements, *body.roots)
        super().__init__(guard, *roots, sentence=REPEATS, anyway=anyway, prevent=self._raise_if_strict)

    @property
    def said(self) -> tuple[str, ...]:
        """What a second run does not find as the first one did."""
        return ("the answer typed for `input()`",) if self._answers else ()

    def first(self, stack: ExitStack) -> None:
        """Note what happens, from here until the stack closes."""
        ask = builtins.input

        def asked(*prompt: Any) -> str:
            __tracebackhide__ = True
            self._raise_if_strict("asks for an answer by `input()`")
            self._answers.append(ask(*prompt))
            return self._answers[-1]

        self.begin()
        super().first(stack)
        _stand_in(stack, asked)

    @contextmanager
    def rerun(self, *, from_end: bool = False) -> Iterator[None]:
        """The same, and what was typed in the first run is the answer once more."""
        answers = deque(self._answers)

        def asked(*_prompt: Any) -> str:
            if not answers:
                raise EOFError
            return answers.popleft()

        with super().rerun(from_end=from_end), ExitStack() as stack:
            _stand_in(stack, asked)
            yield

    def _raise_if_strict(self, what: str) -> None:
        __tracebackhide__ = True
        if self._strict:
            raise DeterminismError(_STRICT.format(what))


def _stand_in(stack: ExitStack, asked: Any) -> None:
    # Where the user has put something there meanwhile, it stays.
    stack.callback(lambda before: setattr(builtins, "input", before) if builtins.input is asked else None, builtins.input)
    builtins.input = asked


class Heard(io.TextIOBase):
    """What a run prints."""

    def __init__(self) -> None:
        self.lines: list[tuple[Place | None, str]] = []
        """The line of the user's code, and what it printed without another line in between; only the first so many."""

    def writable(self) -> bool:
        """As any stream for output."""
        return True

    def write(self, text: str) -> int:
        """Keep it."""
        frame = user_frame(sys._getframe(1))
        place = None if frame is None else (frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
        if self.lines and self.lines[-1][0] == place and len(self.lines[-1][1]) < _MOST_LETTERS:
            self.lines[-1] = place, self.lines[-1][1] + text
        elif len(self.lines) < _MOST_LINES:
            self.lines.append((place, text))
        return len(text)

    def other_numbers(self, before: Heard) -> Iterator[int]:
        """Where this one prints another number than the one before, at the same lines and in the same words."""
        if [place for place, _ in self.lines] == [place for place, _ in before.lines]:
            for number, ((_, text), (_, was)) in enumerate(zip(self.lines, before.lines, strict=True)):
                if text != was and "0x" not in text and _NUMBER.sub("", text) == _NUMBER.sub("", was):
                    yield number


@contextmanager
def unheard() -> Iterator[Heard]:
    """A handler of the user's own is called; what Python's would show or send is not."""
    held: Any = logging.Handler
    before, heard = held.handle, Heard()
    with contextlib.redirect_stdout(heard), contextlib.redirect_stderr(io.StringIO()), warnings.catch_warnings():
        warnings.showwarning = lambda *_, **__: None
        held.handle = _handled
        try:
            yield heard
        finally:
            held.handle = before


def _handled(handler: logging.Handler, record: logging.LogRecord) -> bool:
    __tracebackhide__ = True
    code = getattr(type(handler).emit, "__code__", None)
    if code is not None and is_user_code(code):
        return bool(_HANDLE(handler, record))
    return bool(handler.filter(record))
