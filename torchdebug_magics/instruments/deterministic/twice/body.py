"""What is run a second time, within bounds: a cell or a function, with the workers of DataLoaders; and what its run begins with."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import itertools
import multiprocessing.process
import random
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from queue import Queue, SimpleQueue
from sys import intern
from types import FrameType, GeneratorType, ModuleType
from typing import Any, TypeAlias

import torch
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader
from torch.utils.data._utils import worker

from torchdebug_magics.instrument import Body
from torchdebug_magics.probing.safety import Guard
from torchdebug_magics.probing.source.user_code import called_from, frames_above, local_values, owner, runs_alone, writes_of
from torchdebug_magics.probing.state.attributes import Names, attributes_of, referents
from torchdebug_magics.probing.state.contents import Contents
from torchdebug_magics.probing.state.kinds import ABSENT, Kind, hashes_by_itself, same
from torchdebug_magics.probing.state.snapshot import Bound, Snapshot, reachable
from torchdebug_magics.probing.state.states import ways_of

_AGAIN_S = 0.02
"""How soon the run is ended once more, should its code have caught the first attempt."""
_GRACE_S = 1.0
"""CPU time that code has which catches an interrupt to leave in good order."""
_NEAR = Bound(objects=10_000, levels=4)
"""How far iterators are looked for."""
_MOST_ITEMS = 64
"""Of a list or a dict that may hold iterators."""
_OF_COMPILERS = "__"
"""How the names begin that a compiler puts beside the user's: what it has compiled stays, and looks for them."""
_ALL = Bound(objects=2_000_000, bytes=4 << 30)
_Make: TypeAlias = Callable[["dict[int, Any]"], Any]
"""Makes one anew; those that were made already, by the number of what they stand for."""
_GONE_THROUGH: tuple[Any, ...] = ([], (), range(0), range(1 << 70), "", "\xe9", b"", bytearray(), {}, {}.values(), {}.items(), set())
_GONE_BACK: tuple[Any, ...] = ([], {}, {}.values(), {}.items())


class FunctionBody(Body):
    """A call of a function without arguments."""

    def __init__(self, function: Callable[[], object]) -> None:
        self.namespace = {}
        self.hidden = frozenset()
        self.roots = (function,)
        self.variables = dict(_named_by(function))
        self.statements = ()
        self.file = self.refusal = ""
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


class StartState:
    """Of everything that a body can reach, at one moment. What tensors hold is not in it: see `Contents`."""

    def __init__(self, body: Body, guard: Guard, also: Iterable[str] = ()) -> None:
        self._body = body
        self._guard = guard
        self.names = frozenset(body.namespace.keys() - body.hidden)
        self._modules = _users_modules()
        self._has_figures = bool(figures())
        self._snapshot = Snapshot([Names(body.namespace, self.names | frozenset(also)), *body.roots, figures()], _ALL)
        self.stand_ins = StandIns(self._snapshot.objects())
        """For what a later run finds as the first one did, though it cannot be put back in place."""

    @property
    def is_dense(self) -> bool:
        """Whether no gradient is sparse."""
        return all(leaf.gradient is None or leaf.gradient.layout is torch.strided for leaf in self._snapshot.gradients)

    def contents(self) -> Contents:
        """What all tensors hold now."""
        contents = Contents()
        for tensor in self._snapshot.of_kind(torch.Tensor):
            if not is_lazy(tensor):
                contents.keep(tensor)
        return contents

    def stand_in(self) -> None:
        """Let new objects stand where those are that cannot be put back in place; to be followed by `put_back`."""
        self._snapshot.put_in_place(self.stand_ins.made(), self._guard)

    def put_back(self, *, with_modules: bool = True) -> None:
        """Make all of it as it was; names that are new are gone, and modules: what one keeps begins with its import."""
        if with_modules:
            for name in _users_modules(but=self._modules):
                del sys.modules[name]
            sys.modules.update(self._modules)
        for name in self._body.namespace.keys() - self._body.hidden - self.names:
            if not name.startswith(_OF_COMPILERS):
                del self._body.namespace[name]
        if runs_alone():  # else what a thread has put there meanwhile stays
            for queue in self._snapshot.of_kind(Queue):
                with queue.mutex:
                    queue.queue.clear()
        self._snapshot.put_back(self._guard)
        if not self._has_figures:  # pyplot itself may be new
            figures().clear()


def _users_modules(but: Container[str] = ()) -> dict[str, ModuleType]:
    """By name; without what is written in C, or gives torch new ops, which may not be loaded a second time."""
    modules = [(name, module) for name, module in list(sys.modules.items()) if name not in but and is_users(module)]
    return {name: module for name, module in modules if not any(isinstance(var, torch.library.Library) for var in [*vars(module).values()])}


def is_users(module: ModuleType) -> bool:
    """Whether it is written in Python, by the user."""
    file = getattr(module, "__dict__", {}).get("__file__")  # `sys.modules` may hold None
    return isinstance(file, str) and file.endswith(".py") and owner(file) == "user"


_ITERATORS = frozenset(
    {enumerate, zip, map, filter, reversed, type(iter(int, 1)), type(itertools.tee(())[0])}
    | {var for var in vars(itertools).values() if isinstance(var, type)}
    | {type(iter(one)) for one in _GONE_THROUGH}
    | {type(reversed(one)) for one in _GONE_BACK}
)


class StandIns:
    """For some objects at one moment; the objects themselves stay as they are."""

    def __init__(self, objects: Iterable[object]) -> None:
        self._found: dict[int, tuple[Any, _Make]] = {}  # also keeps the objects alive, so that no id is given away
        for one in objects:
            self._take(one)

    def __contains__(self, value: object) -> bool:
        return id(value) in self._found

    def made(self) -> dict[int, Any]:
        """New ones, by the `id` of what they stand for."""
        made: dict[int, Any] = {}
        for value, _ in self._found.values():
            self._anew(value, made)
        return made

    def _take(self, value: Any) -> bool:
        """Whether it can be made anew."""
        if id(value) not in self._found:
            make = _of_cache(value) if isinstance(value, functools._lru_cache_wrapper) else self._of_iterator(value)
            if make is None:
                return False
            self._found[id(value)] = value, make
        return True

    def _of_iterator(self, value: Any) -> _Make | None:
        if type(value) not in _ITERATORS:
            return None
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # some Pythons warn that this will go
                function, given, *state = value.__reduce__()
        except (TypeError, AttributeError, ValueError):
            return None
        state = [_copied(one) for one in state]
        parts = (*given, *(part for one in state for part in (one if type(one) is tuple else (one,))))
        # No generator can be made as it was, nor what is only known to give one thing after the other.
        if any(hasattr(type(part), "__next__") and attributes_of(part) is None and not self._take(part) for part in parts):
            return None

        def make(made: dict[int, Any]) -> Any:
            iterator = function(*(self._anew(one, made) for one in given))
            for one in state:
                iterator.__setstate__(self._anew(_copied(one), made))
            return iterator

        return make

    def _anew(self, part: Any, made: dict[int, Any]) -> Any:
        if isinstance(part, tuple):
            return tuple(self._anew(one, made) for one in part)
        if id(part) in self._found and id(part) not in made:
            made[id(part)] = self._found[id(part)][1](made)
        return made.get(id(part), part)


def _copied(state: Any) -> Any:
    return [*state] if type(state) is list else tuple(map(_copied, state)) if type(state) is tuple else state


def _of_cache(function: Any) -> _Make | None:
    """Of a `functools.lru_cache`; None where it keeps results without a limit, or where it cannot be told which."""
    kinds = {"_lru_list_elem", "_lru_cache_wrapper"}
    referents = [referent for referent in gc.get_referents(function) if getattr(referent, "__name__", "") not in kinds]
    table = next((place for place, one in enumerate(referents) if type(one) is dict and one is not vars(function)), None)
    parameters = function.cache_parameters()
    if parameters["maxsize"] is None or table is None or table != 2 * len(referents[table]):
        return None
    keys = referents[:table:2]  # the oldest first
    if {*map(id, keys)} != {*map(id, referents[table])} or not all(map(hashes_by_itself, keys)):
        return None
    results = dict(zip(keys, referents[1:table:2], strict=True))

    def make(_: dict[int, Any]) -> Any:
        """Only calls put something into a new cache, so each result is handed over when it is asked for."""
        kept = dict(results)
        marks = [referent for referent in gc.get_referents(function) if type(referent) is object]  # between arguments and those with a name

        def called(*args: Any, **kwargs: Any) -> Any:
            key: Any = functools._make_key(args, kwargs, parameters["typed"], tuple(marks[-1:]))
            result = kept.pop(tuple(key) if isinstance(key, list) else key, ABSENT)
            if result is not ABSENT:
                return result
            if kept and len(kept) + cache.cache_info().currsize >= parameters["maxsize"]:
                del kept[next(iter(kept))]
            return function.__wrapped__(*args, **kwargs)

        cache: Any = functools.lru_cache(**parameters)(called)
        vars(cache).update(vars(function))
        return cache

    return make


def figures() -> dict[Any, Any]:
    """By number, the very dict; one of nobody's where pyplot was not imported."""
    helpers: Any = sys.modules.get("matplotlib._pylab_helpers")
    return {} if helpers is None else helpers.Gcf.figs


class Leftovers:
    """How far every iterator and queue is that some variables lead to, and in which order sets stand; to be asked back at the start."""

    def __init__(self, variables: Mapping[str, object], is_found_again: Callable[[object], bool]) -> None:
        leads = ((name, one) for name, value in variables.items() for one, _ in reachable([value], lambda _: [_LED_TO], _NEAR))
        found = ((name, one) for name, one in leads if _is_taken_from(type(one)) and not is_found_again(one))
        self._places = [(f"the {'queue' if type(one) is SimpleQueue else 'iterator'} `{name}`", one, _place(one)) for name, one in found]
        self._sets = [(name, value, list(value)) for name, value in variables.items() if type(value) is set]

    def names(self) -> tuple[str, ...]:
        """What is not where it was, such as ``the iterator `batches` ``."""
        gone = (words for words, one, place in self._places if not same(_place(one), place))
        turned = (f"the order of the set `{name}`" for name, value, before in self._sets if not same(list(value), before))
        return tuple(dict.fromkeys((*gone, *turned)))

    def at_risk(self) -> tuple[str, ...]:
        """What could not be put back, should a run take from it."""
        without_places = ((words, one) for words, one, _ in self._places if attributes_of(one) is None)
        return tuple(words for words, one in without_places if not any(way.read(one) for way in ways_of(one)))


def _is_taken_from(kind: type) -> bool:
    """Whether what is taken from an object of that type is gone; of a file there is a way back."""
    return kind is SimpleQueue or (hasattr(kind, "__next__") and not hasattr(kind, "read"))


def _led_to(value: Any) -> list[Any] | None:
    """What a list, a tuple or a dict holds, and what an iterator takes from."""
    kind = type(value)
    if kind in {list, tuple, dict}:
        return list(value.values() if kind is dict else value)[:_MOST_ITEMS]
    if not _is_taken_from(kind):
        return None
    attributes = attributes_of(value)
    return [] if kind in {SimpleQueue, GeneratorType} else list(referents(value) if attributes is None else attributes.values())


_LED_TO = Kind(_led_to)


def _place(iterator: Any) -> list[object]:
    """How far it is, and the objects that the variables of a generator hold: a loop is at the same place of its code each time round.

    Of an iterator without a place of its own, what it takes from tells.
    """
    if type(iterator) is SimpleQueue:
        return [intern(str(iterator.qsize()))]
    frame = iterator.gi_frame if isinstance(iterator, GeneratorType) else None
    return [] if frame is None else [intern(f"{frame.f_lasti} {[*local_values(frame)]}"), *local_values(frame).values()]
