"""What is run a second time: the body of a cell, or a function; within bounds, and with the workers of DataLoaders in this process."""

from __future__ import annotations

import ast
import contextlib
import copy
import multiprocessing.process
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any

import torch
from torch.utils.data import DataLoader
from torch.utils.data._utils import worker

from torchdebug_magics.probing.source.user_code import called_from, frames_above, owner, writes_of

_AGAIN_S = 0.02
"""How soon the run is ended once more, should its code have caught the first attempt."""
_GRACE_S = 1.0
"""CPU time that code has which catches an interrupt to leave in good order."""


class FunctionBody:
    """A call of a function without arguments."""

    def __init__(self, function: Callable[[], object]) -> None:
        self.namespace: dict[str, Any] = {}
        self.hidden: frozenset[str] = frozenset()
        self.roots = (function,)
        self.variables = dict(_named_by(function))
        self.statements: tuple[ast.stmt, ...] = ()
        self.file = ""
        self.refusal = ""
        self._function = function
        self._given: object = None

    def left(self) -> Mapping[str, object]:
        """What it gave, and its variables."""
        return {"the result": self._given, **self.variables}

    def run(self) -> None:
        """Call it."""
        self._given = self._function()


def _named_by(function: object) -> Iterator[tuple[str, object]]:
    """Globals and closed-over variables that a function of the user's, and those that it calls, load."""
    for one in called_from(getattr(function, "__func__", function)):
        loaded = writes_of(one.__code__).loaded
        yield from ((name, value) for name, value in one.__globals__.items() if name in loaded)
        for name, cell in zip(one.__code__.co_freevars, one.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # nothing was bound to it so far
                yield name, cell.cell_contents


class Enough(BaseException):
    """Raised inside an op to end a run. No `except Exception` of the user's catches it."""


class TooLong(BaseException):
    """Raised in a hidden run that has taken many times the CPU time of the first one, wherever the user's code stands."""


@contextmanager
def bounded(most_s: float) -> Iterator[None]:
    """Until it closes, code that takes more CPU time than that is ended, and an interrupt ends it though the code may catch it.

    Only in the main thread, where Python handles signals. A timer or a handler of the user's own is left alone. What is raised is raised
    between two instructions of the user's code, or of a library that it calls; both handlers are gone before the user's own code goes on.
    """
    is_on, is_interrupted = True, False
    is_main = threading.current_thread() is threading.main_thread()
    # Nobody else may measure CPU time by a signal; Windows has none.
    has_timer = is_main and hasattr(signal, "setitimer") and signal.getsignal(signal.SIGPROF) is signal.SIG_DFL
    has_timer = has_timer and not any(signal.getitimer(signal.ITIMER_PROF))

    def interrupted(number: int, frame: FrameType | None) -> None:
        nonlocal is_interrupted
        is_interrupted = True
        if is_on:
            if has_timer:
                _set_timer(_GRACE_S)
            signal.default_int_handler(number, frame)

    def ended(_number: int, frame: FrameType | None) -> None:
        if is_on and _is_in_user_code(frame):
            raise KeyboardInterrupt if is_interrupted else TooLong

    stack = ExitStack()
    try:
        if has_timer:
            _handle(stack, signal.SIGPROF, ended)
            stack.callback(_set_timer, 0.0)
            _set_timer(most_s)
        if is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            _handle(stack, signal.SIGINT, interrupted)
        yield
    finally:
        is_on = False
        stack.close()
        if is_interrupted:  # and the user's code may have caught it
            raise KeyboardInterrupt


def _is_in_user_code(frame: FrameType | None) -> bool:
    """Whether that, or a library that it calls, runs: what is ours may stand between two steps that belong together."""
    for one in frames_above(frame):
        match owner(one.f_code.co_filename):
            case "user":
                return True
            case "own" | "torch":
                return False
    return False


def _set_timer(seconds: float) -> None:
    signal.setitimer(signal.ITIMER_PROF, seconds, _AGAIN_S if seconds else 0.0)


def _handle(stack: ExitStack, number: signal.Signals, handler: Callable[[int, FrameType | None], Any]) -> None:
    before = signal.signal(number, handler)

    def put_back() -> None:
        if signal.getsignal(number) is handler:  # else the user's code has put its own there
            signal.signal(number, before)

    stack.callback(put_back)


def workers_here(stack: ExitStack) -> None:
    """From here until the stack closes. Each loop begins as a worker does: seeded, with `get_worker_info`, after `worker_init_fn`."""
    kind: Any = DataLoader
    ordinary = kind._get_iterator

    def get_iterator(loader: Any) -> Any:
        return _batches(loader, ordinary) if loader.num_workers else ordinary(loader)

    stack.callback(setattr, kind, "_get_iterator", ordinary)
    stack.callback(setattr, worker, "_worker_info", worker._worker_info)
    kind._get_iterator = get_iterator


def _batches(loader: Any, ordinary: Any) -> Iterator[Any]:
    alone = copy.copy(loader)
    alone.multiprocessing_context = None
    alone.num_workers, alone.timeout = 0, 0
    batches = ordinary(alone)
    seed = int(batches._base_seed)
    random.seed(seed)
    torch.manual_seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)
    worker._worker_info = worker.WorkerInfo(id=0, num_workers=loader.num_workers, seed=seed, dataset=loader.dataset)
    if loader.worker_init_fn is not None:
        loader.worker_init_fn(0)
    yield from batches


def processes_count() -> str:
    """How many processes were started so far, in words: it changes with each."""
    return repr(getattr(multiprocessing.process, "_process_counter", None))
