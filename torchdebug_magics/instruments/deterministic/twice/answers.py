"""What a run is answered from outside its code: noted by the call that asks, given again as an earlier run had it, or turned round."""

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
from dataclasses import dataclass
from multiprocessing.pool import Pool
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch

from torchdebug_magics.instruments.deterministic.report import Cause, Dependence, On
from torchdebug_magics.instruments.deterministic.twice.body import is_users
from torchdebug_magics.probing.source.call_sites import node_at
from torchdebug_magics.probing.source.syntax import called, dotted
from torchdebug_magics.probing.source.user_code import frames_above, is_user_code, location, owner

_SEED = 42


@dataclass(frozen=True)
class Influence:
    """One kind of what is asked."""

    cause: Cause
    on: On | None
    what: str
    """A clause, with ``{text}`` for the call."""
    fix: str | Callable[[OutsideCall], str]


class OutsideCall(NamedTuple):
    """A call in the user's code that asks, by itself or deep inside."""

    influence: Influence
    file: str
    line: int
    function: str
    first_parameter: str
    """Of the method that it stands in, after ``self``."""
    text: str
    """As it is written; empty where that is not known."""
    seed: str = ""
    """The parameter of the library's function that takes a seed, if the library asks."""

    @property
    def call(self) -> ast.expr | None:
        """What is written there."""
        return ast.parse(self.text, mode="eval").body if self.text else None

    @property
    def path(self) -> str:
        """Of what is called, such as ``time.time``; empty where it has no name."""
        return dotted(self.call.func) if isinstance(self.call, ast.Call) else ""

    @property
    def dependence(self) -> Dependence:
        """In words."""
        influence = self.influence
        what = influence.what.format(text=f"`{self.text}`" if self.text else "this line")
        fix = influence.fix.replace("{text}", self.text) if isinstance(influence.fix, str) else influence.fix(self)
        return Dependence(on=influence.on or "entropy", op="", location=location(self.file, self.line, self.function), what=what, fix=fix)


def _seeded(otherwise: str) -> Callable[[OutsideCall], str]:
    def fix(asked: OutsideCall) -> str:
        """A seed within a function gives the same numbers at each call."""
        if asked.seed:
            return f"pass `{asked.seed}={_SEED}` to `{asked.path or asked.text}`"
        path = asked.path or otherwise
        if asked.function == "__getitem__" and asked.first_parameter:
            return f"use `{path}({asked.first_parameter})`: different numbers for each item, the same in each run"
        if asked.function == "__init__" or not asked.function.isidentifier():
            return f"use `{path}({_SEED})`"
        return f"create one generator outside `{asked.function}`, `rng = {path}({_SEED})`, and pass it in"

    return fix


def _manual(asked: OutsideCall) -> str:
    return f"use `{asked.path.removesuffix('seed') or 'torch.Generator().'}manual_seed({_SEED})`"


def _in_order(asked: OutsideCall) -> str:
    ways = {
        "imap_unordered": "use `imap` instead of `imap_unordered`",
        "as_completed": "iterate over the futures in submission order, or use `map`",
    }
    return f"{ways.get(called(asked.call), 'collect the results in submission order')}, or sort the results"


def _sorted(asked: OutsideCall) -> str:
    match called(asked.call):
        case "":
            return "sort the files"
        case "walk":
            return f"sort both lists from `{asked.text}`: `dirs.sort()`, `files.sort()`"
        case "scandir":
            return f"`sorted({asked.text}, key=lambda entry: entry.name)`"
        case _:
            return f"`sorted({asked.text})`"


_UNSEEDED = "{text} has no seed and takes one from the operating system"
CLOCK = Influence("wall_clock", "clock", "{text} reads the clock", "replace `{text}` with a constant: it reads the clock")
_DRAW = f"replace `{{text}}` with a draw from a seeded generator, such as `random.Random({_SEED})`"
ENTROPY = Influence("os_entropy", "entropy", "{text} reads the operating system's entropy", _DRAW)
NUMPY = Influence("numpy_random", "seed", _UNSEEDED, _seeded("np.random.default_rng"))
PYTHON = Influence("python_random", "seed", _UNSEEDED, _seeded("random.Random"))
TORCH = Influence("unseeded_generator", "seed", "{text} takes a new seed from the operating system", _manual)
ARRIVAL = Influence("outside_data", "order", "{text} returns results in completion order, which varies", _in_order)
LISTING = Influence("outside_data", "order", "{text} returns entries in file-system order, which differs between machines", _sorted)
_HASHED = "{text} gives a number that is computed from memory addresses, which differ in each run"
ADDRESS = Influence("hash_order", "order", _HASHED, "replace `{text}` with a stable key, such as an index")
_READ = "{text} comes from outside the program, and may change"
OUTSIDE = Influence("outside_data", None, _READ, "read it once, in an earlier cell")
PROCESS = Influence("os_entropy", "entropy", "{text} differs in each process", f"replace `{{text}}` with a constant, such as {_SEED}")
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
            line, text = user.f_lineno or 1, _text(code.co_filename, node_at(user))
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


def _text(file: str, node: ast.expr | None) -> str:
    """An expression in one line; as it is written if it stands on one."""
    if node is None or node.lineno != node.end_lineno:
        return "" if node is None else ast.unparse(node)
    return linecache.getline(file, node.lineno).encode()[node.col_offset : node.end_col_offset].decode()


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
