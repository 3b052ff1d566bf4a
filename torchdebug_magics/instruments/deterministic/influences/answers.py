"""What a run is answered: noted by the call in the user's code that asks, given again as an earlier run had it, or turned round.

`asked_by` finds the calls whose answers make two runs differ: with these held, the runs agree.
"""

from __future__ import annotations

import ast
import concurrent.futures
import datetime as dt
import functools
import linecache
import multiprocessing.queues
import os
import queue
import random
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, ExitStack
from multiprocessing.pool import Pool
from types import CodeType, FrameType
from typing import Any

import torch

from torchdebug_magics.instruments.deterministic.influences.influence import (
    ADDRESS,
    ARRIVAL,
    CLOCK,
    ENTROPY,
    LISTING,
    MEMORY,
    NUMPY,
    OUTSIDE,
    PROCESS,
    PYTHON,
    TORCH,
    Influence,
    OutsideCall,
)
from torchdebug_magics.instruments.deterministic.ops.digest_recorder import DigestRecorder
from torchdebug_magics.instruments.deterministic.ops.op_recording import Op, Recording, Seen
from torchdebug_magics.instruments.deterministic.twice.body import Enough
from torchdebug_magics.instruments.deterministic.twice.run_comparison import RunComparison
from torchdebug_magics.instruments.deterministic.twice.runs import Runs, is_users
from torchdebug_magics.probing.modules import live_modules
from torchdebug_magics.probing.source.user_code import frames_above, is_user_code, owner, span

_CLOCKS = ("time", "perf_counter", "monotonic", "process_time", "thread_time", "clock_gettime")
_PLAIN = (
    *((time, f"{name}{unit}", CLOCK, False) for name in _CLOCKS for unit in ("", "_ns")),
    (uuid, "_generate_time_safe", CLOCK, False),
    *((holder, name, ENTROPY, False) for holder, name in ((os, "urandom"), (random, "_urandom"), (os, "getrandom"))),
    *((os, name, OUTSIDE, True) for name in ("read", "getloadavg", "times")),
)
"""(holder, name, influence, whether only the user's own asking is meant); what is missing on this system is left out."""
_CALENDARS = ("localtime", "gmtime", "ctime")
_WAITING = frozenset({"threading", "queue", "concurrent", "multiprocessing", "asyncio", "selectors", "subprocess", "socket"})
"""Modules that look at the clock only to know how long they have waited."""
_SEEDS = ("seed", "random_state", "rng", "generator")
"""How parameters of libraries are called that take a seed."""
_MOST_BYTES = 1 << 24
_LEAST_TRIES, _MOST_TRIES, _MOST_S = 2, 8, 3.0
"""Of runs that are to agree, as two may by chance; only long ones are made less often."""


class Answers:
    """Of one run; `held` are the calls that are answered as in `earlier`, `turned` those that are answered otherwise, all if it is None."""

    def __init__(
        self,
        names: MutableMapping[str, Any],
        earlier: Mapping[OutsideCall, Mapping[tuple[Any, ...], list[Any]]] | None = None,
        held: frozenset[OutsideCall] = frozenset(),
        turned: frozenset[OutsideCall] | None = frozenset(),
    ) -> None:
        self._names = names
        self._earlier = earlier or {}
        self._held, self._turned = held, turned
        self.given: dict[OutsideCall, dict[tuple[Any, ...], list[Any]]] = {}
        """By the call that asked, in the order in which they first did, and by the task of a pool that it asked for."""
        self._places: dict[tuple[CodeType, int, Influence], OutsideCall] = {}
        self._urandom = os.urandom

    def attach(self, stack: ExitStack) -> None:
        """From here until the stack closes. Names that were bound to what is asked are bound anew, too."""
        new: dict[int, Any] = {}
        for holder, name, stand_in in self._stand_ins():
            ordinary = getattr(holder, name)
            new[id(ordinary)] = stand_in
            stack.callback(setattr, holder, name, ordinary)
            setattr(holder, name, stand_in)
        for names in (self._names, *(vars(module) for module in list(sys.modules.values()) if is_users(module))):
            for name, value in list(names.items()):
                stand_in = new.get(id(value))
                if isinstance(value, functools.partial) and id(value.func) in new:
                    stand_in = functools.partial(new[id(value.func)], *value.args, **value.keywords)
                if stand_in is not None:
                    stack.callback(names.__setitem__, name, value)
                    names[name] = stand_in
            for function in (id, hash):
                if function.__name__ not in names:
                    stack.callback(names.pop, function.__name__, None)
                    names[function.__name__] = self._asking(ADDRESS, function, is_direct=True)

    def _ask(
        self, influence: Influence, ordinary: Callable[[], Any], turn: Callable[[Any], Any] | None = None, *, is_direct: bool = False
    ) -> Any:
        frame = sys._getframe(2)
        user = _asking_frame(frame, is_direct=is_direct)
        if user is None:
            return ordinary()
        asked = self._asked(influence, user, frame)
        task = _task(user)
        given = self.given.setdefault(asked, {}).setdefault(task, [])
        known = self._earlier.get(asked, {}).get(task, ()) if asked in self._held else ()
        answer = known[len(given)] if len(given) < len(known) else ordinary()
        given.append(answer)
        return turn(answer) if turn is not None and (self._turned is None or asked in self._turned) else answer

    def _asked(self, influence: Influence, user: FrameType, frame: FrameType) -> OutsideCall:
        key = user.f_code, user.f_lasti, influence
        if key not in self._places:
            code, outer = user.f_code, user
            while outer.f_code.co_name.endswith("comp>") and outer.f_back is not None:
                outer = outer.f_back
            called = outer.f_code
            parameter = called.co_varnames[1] if called.co_argcount > 1 else ""
            line, text = user.f_lineno or 1, _text(code, user.f_lasti)
            seed = _seed_of_library(frame, user)
            self._places[key] = OutsideCall(influence, code.co_filename, line, called.co_name, parameter, text, seed)
        return self._places[key]

    # --- who is asked ------------------------------------------------------------------------------------------------------------

    def _asking(
        self, influence: Influence, function: Any, turn: Callable[[Any], Any] | None = None, *, is_direct: bool = False
    ) -> Callable[..., Any]:
        @functools.wraps(function)
        def asked(*args: Any, **kwargs: Any) -> Any:
            return self._ask(influence, lambda: function(*args, **kwargs), turn, is_direct=is_direct)

        return asked

    def _stand_ins(self) -> Iterator[tuple[Any, str, Any]]:
        for holder, name, influence, is_direct in _PLAIN:
            if getattr(holder, name, None) is not None:
                yield holder, name, self._asking(influence, getattr(holder, name), is_direct=is_direct)
        for name in _CALENDARS:
            yield time, name, self._calendar(getattr(time, name))
        for kind in (dt.datetime, dt.date):
            yield dt, kind.__name__, self._dated(kind)
        yield from self._generators()
        yield from self._orders()
        if (numpy := sys.modules.get("numpy")) is not None:
            for name in ("empty", "empty_like"):
                yield numpy, name, self._unwritten(getattr(numpy, name))

    def _generators(self) -> Iterator[tuple[Any, str, Any]]:
        ordinary = random.Random.seed

        def seed(generator: random.Random, a: Any = None, version: int = 2) -> None:
            a = self._ask(PYTHON, lambda: int.from_bytes(self._urandom(32), "little")) if a is None else a
            ordinary(generator, a, version)

        yield random.Random, "seed", seed
        yield random, "seed", functools.partial(seed, getattr(random, "_inst"))  # noqa: B009 - a name that mypy does not know
        if (bits := sys.modules.get("numpy.random.bit_generator")) is not None:
            yield bits, "randbits", self._asking(NUMPY, bits.randbits)
        ask = self._ask

        class Generator(torch.Generator):
            def seed(self) -> int:
                self.manual_seed(seed := ask(TORCH, super().seed))
                return int(seed)

        yield torch, "Generator", Generator
        ordinary_seed = torch.seed

        def torch_seed() -> int:
            torch.manual_seed(seed := ask(TORCH, ordinary_seed))
            return int(seed)

        yield torch, "seed", torch_seed
        yield torch.random, "seed", torch_seed

    def _orders(self) -> Iterator[tuple[Any, str, Any]]:
        as_completed, imap_unordered = concurrent.futures.as_completed, Pool.imap_unordered

        def completed(fs: Iterable[Any], timeout: float | None = None) -> Iterator[Any]:
            futures = list(fs)
            order = self._ask(ARRIVAL, lambda: [futures.index(one) for one in as_completed(futures, timeout)], _backwards)
            return (futures[place] for place in order)

        def unordered(pool: Any, *args: Any, **kwargs: Any) -> Iterator[Any]:
            results = list(imap_unordered(pool, *args, **kwargs))
            return iter(self._ask(ARRIVAL, lambda: results, _backwards))

        def scanned(*args: Any, **kwargs: Any) -> Any:
            with scandir(*args, **kwargs) as entries:
                found = [*entries]
            return _Scan(self._ask(LISTING, lambda: found, _backwards))

        scandir = os.scandir
        yield concurrent.futures, "as_completed", completed
        yield Pool, "imap_unordered", unordered
        yield os, "listdir", self._asking(LISTING, os.listdir, _backwards)
        yield os, "scandir", scanned
        for kind in (queue.Queue, multiprocessing.queues.Queue):
            yield kind, "get", self._taking(kind.get)
        for name in ("getpid", "getppid"):  # libraries know by it whether they were forked
            yield os, name, self._asking(PROCESS, getattr(os, name), lambda number: number + 1, is_direct=True)

    def _taking(self, get: Any) -> Callable[..., Any]:
        def taken(*args: Any, **kwargs: Any) -> Any:
            item = get(*args, **kwargs)
            return self._ask(ARRIVAL, lambda: item, is_direct=True)

        return taken

    def _calendar(self, function: Any) -> Callable[..., Any]:
        def asked(*args: Any) -> Any:
            return function(*args) if args and args[0] is not None else self._ask(CLOCK, function)

        return asked

    def _dated(self, kind: Any) -> type:
        def asking(name: str) -> Any:
            return staticmethod(self._asking(CLOCK, getattr(kind, name)))

        class Same(type):
            def __instancecheck__(cls, value: object) -> bool:
                return isinstance(value, kind)

        made = {"__new__": lambda _cls, *args, **kwargs: kind(*args, **kwargs)}
        return Same(kind.__name__, (kind,), made | {name: asking(name) for name in ("now", "utcnow", "today") if hasattr(kind, name)})

    def _unwritten(self, function: Any) -> Callable[..., Any]:
        """Noise is in it, so that no two runs agree by chance."""

        @functools.wraps(function)
        def asked(*args: Any, **kwargs: Any) -> Any:
            array = function(*args, **kwargs)
            if (
                type(array).__module__ == "numpy"
                and 0 < array.nbytes <= _MOST_BYTES
                and not array.dtype.hasobject
                and array.dtype.kind != "b"
            ):
                noise = self._ask(MEMORY, lambda: self._urandom(array.nbytes), is_direct=True)
                if isinstance(noise, bytes):
                    array.reshape(-1, order="A").view("u1")[:] = bytearray(noise)
            return array

        return asked


def _asking_frame(caller: FrameType, *, is_direct: bool) -> FrameType | None:
    """The user's frame that asks; None where a library waits or imports, or where we ask for ourselves."""
    if is_user_code(caller.f_code):
        return caller
    module = str(caller.f_globals.get("__name__", "")).partition(".")[0]
    if is_direct or module in _WAITING or owner(caller.f_code.co_filename) == "torch":
        return None
    for frame in frames_above(caller):
        match owner(frame.f_code.co_filename):
            case "user":
                return frame
            case "own":
                return None
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return None
    return None


def _task(user: FrameType) -> tuple[Any, ...]:
    """What a thread of a pool was given to do, by its plain arguments: which thread asks first is chance. Empty in the main thread."""
    if threading.current_thread() is threading.main_thread():
        return ()
    code = user.f_code
    parameters = (user.f_locals.get(name) for name in code.co_varnames[: code.co_argcount])
    return tuple(value for value in parameters if isinstance(value, (int, float, str)))


def _seed_of_library(caller: FrameType, user: FrameType) -> str:
    """The parameter for a seed of what the user's line called, if an installed library was asked there."""
    between = []
    for frame in frames_above(caller):
        if frame is user:
            break
        between.append(frame.f_code)
    if not between or owner(between[-1].co_filename) != "library":
        return ""
    parameters = between[-1].co_varnames[: between[-1].co_argcount + between[-1].co_kwonlyargcount]
    return next((name for name in _SEEDS if name in parameters), "")


def _text(code: CodeType, instruction: int) -> str:
    """The expression at an instruction, in one line."""
    place = span(code, instruction)
    if place is None:
        return ""
    line, column, end_line, end_column = place
    lines = [getline.encode() for getline in linecache.getlines(code.co_filename)[line - 1 : end_line]]
    if not lines:
        return ""
    lines[-1] = lines[-1][:end_column]
    lines[0] = lines[0][column:]
    try:
        text = ast.unparse(ast.parse(b"".join(lines).decode(), mode="eval"))
    except SyntaxError:  # the line stands otherwise in the file by now
        return ""
    return b"".join(lines).decode() if len(lines) == 1 else text


def _backwards(answer: list[Any]) -> list[Any]:
    return answer[::-1]


class _Scan(Iterator[Any], AbstractContextManager["_Scan"]):
    """As `os.scandir` gives it: an iterator, and a context of itself; nothing is open."""

    def __init__(self, entries: list[Any]) -> None:
        self._entries = iter(entries)

    def __next__(self) -> Any:
        return next(self._entries)

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        pass


def asked_by(runs: Runs, place: int | None, also: Callable[[ExitStack], object] = lambda _: None) -> tuple[OutsideCall, ...]:
    """Those that make what comes before and at the op at `place` differ, in the order in which they ask; none where no answer does.

    Without a place, what the whole run does. Each run begins after `also`.
    """
    search = _Search(runs, sys.maxsize if place is None else place, also)
    every = tuple(search.asked)
    for influence in sorted(
        dict.fromkeys(one.influence for one in every), key=lambda influence: influence is not ARRIVAL
    ):  # an order, before what only delays
        asked = tuple(one for one in every if one.influence is influence)
        if len(asked) < len(every) and search.agrees(frozenset(asked)) and (found := search.needed(asked, frozenset(asked))):
            return found
    if not every or not search.agrees(frozenset(every)):
        return ()
    # Runs one right after the other are often given the same memory: what agrees though no address is held has not agreed with the first.
    return search.needed(every, frozenset(every)) or tuple(one for one in every if one.influence is ADDRESS)


class _Search:
    """Against one run, whose answers are given again."""

    def __init__(self, runs: Runs, place: int, also: Callable[[ExitStack], object]) -> None:
        self._runs, self._place, self._also = runs, place, also
        self._recording = Recording()
        self._modules = list(live_modules())
        answers = Answers(runs.body.namespace)
        with self._answered(answers):
            self._error = runs.again(DigestRecorder(self._recording, self._first, runs.guard, runs.hooks))
        self.asked = answers.given

    def _answered(self, answers: Answers) -> AbstractContextManager[None]:
        def vary(stack: ExitStack) -> None:
            self._also(stack)
            answers.attach(stack)

        return self._runs.otherwise(vary)

    def _first(self, seen: Seen, op: Op) -> None:
        self._recording.add(seen)
        if op.place >= self._place:
            raise Enough

    def agrees(self, held: frozenset[OutsideCall]) -> bool:
        """Whether runs with these answers do what the first one did."""
        begin_s = time.monotonic()
        for count in range(_MOST_TRIES):
            if count >= _LEAST_TRIES and time.monotonic() - begin_s > _MOST_S:
                break
            run = RunComparison(self._recording, self._modules, self._runs.guard, self._runs.hooks, until=self._place)
            with self._answered(Answers(self._runs.body.namespace, self.asked, held)):
                error = self._runs.again(run)
            if error is None and not run.is_over:
                run.end()
            if run.difference is not None or type(error) is not type(self._error):
                return False
        return True

    def needed(self, group: tuple[OutsideCall, ...], held: frozenset[OutsideCall]) -> tuple[OutsideCall, ...]:
        """Those of a group without which runs that hold all others differ."""
        if self.agrees(held.difference(group)):
            return ()
        if len(group) == 1:
            return group
        half = len(group) // 2
        return (*self.needed(group[:half], held), *self.needed(group[half:], held)) or group[:1]
