"""What a body reaches by name and does not make itself: a digest of each value, which of them a run changes, and at which line."""

from __future__ import annotations

import datetime as dt
import decimal
import fractions
import functools
import os
import random
import sys
import time
import uuid
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from itertools import islice
from pathlib import PurePath
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any, NamedTuple

import torch

from torchdebug_magics.instrument import Body
from torchdebug_magics.instruments.deterministic.ops.digest_recorder import DigestRecorder
from torchdebug_magics.instruments.deterministic.ops.op_recording import Op, Recording
from torchdebug_magics.instruments.deterministic.twice.runs import Place, Runs
from torchdebug_magics.probing.source.syntax import names_in, read_before_bound
from torchdebug_magics.probing.source.user_code import is_user_code, location, writes_of
from torchdebug_magics.probing.state.attributes import attributes_of, whose
from torchdebug_magics.probing.state.digest import of_plain, of_tensor
from torchdebug_magics.probing.state.kinds import ABSENT
from torchdebug_magics.probing.state.process_settings import SETTINGS
from torchdebug_magics.probing.state.rng import same_state
from torchdebug_magics.report import Location

OF_GRADIENTS = ".grad"
"""What is put behind the name of a module for the gradients of its parameters."""
IN = " in "
"""Between a variable that a function closes over, and the function."""
_MOST_FUNCTIONS = 200
_MOST_S = 3.0
"""CPU time: another process that uses the machine shortens no look."""
_DEEPEST = 4
_MOST_ITEMS = 1024
_MOST_BYTES = 1 << 20
_BY_REPR = (dt.date, dt.time, dt.timedelta, decimal.Decimal, fractions.Fraction, uuid.UUID, PurePath, torch.dtype, torch.device, range)
_PLAIN = frozenset({int, float, complex, bool, str, type(None)})


class KeptObject(NamedTuple):
    """A place where a value is kept from one run to the next."""

    read: Callable[[], Any]
    """`ABSENT` where nothing is kept."""
    is_elsewhere: bool = False
    """Whether a class, a function or the process keeps it, and no variable."""

    def digest(self) -> int:
        """A number for what is kept there now."""
        return digest_of(self.read())


def _kept(body: Body) -> Iterator[tuple[str, KeptObject]]:
    """What the body reaches and a run may change: variables; what classes and functions of the user's keep; settings of the process."""
    found = {name: value for name in reached(body)[0] if (value := _value(body, name)) is not ABSENT}
    found |= {root.__name__: root for root in body.roots if isinstance(root, FunctionType)}
    kinds: dict[type, None] = {}
    for name, value in found.items():
        kinds |= dict.fromkeys((value if isinstance(value, type) else type(value)).__mro__)
        if isinstance(value, FunctionType):
            yield from _of_function(name, value)
        if not isinstance(value, (type, ModuleType)):
            yield name, KeptObject(functools.partial(_value, body, name))
        if isinstance(value, torch.nn.Module):
            gradients = functools.partial(lambda module: [parameter.grad for parameter in module.parameters()], value)
            yield f"{name}{OF_GRADIENTS}", KeptObject(gradients)
    for kind in kinds:
        if whose(kind) == "user":
            yield from ((f"{kind.__name__}.{name}", place) for name, place in _of_mapping(vars(kind)) if not name.startswith("__"))
    yield from ((name, KeptObject(setting.read, is_elsewhere=True)) for name, setting in SETTINGS.items() if setting.line)
    yield from ((f"os.environ[{name!r}]", place) for name, place in _of_mapping(os.environ))


def _value(body: Body, name: str) -> Any:
    return body.namespace.get(name, body.variables.get(name, ABSENT))


def _of_function(name: str, function: FunctionType) -> Iterator[tuple[str, KeptObject]]:
    if is_user_code(function.__code__):
        yield from ((f"{name}.{key}", place) for key, place in _of_mapping(vars(function)))
        for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            place = KeptObject(functools.partial(getattr, cell, "cell_contents", ABSENT), is_elsewhere=True)
            if not _is_code(place.read()):
                yield f"{variable}{IN}{name}", place


def _of_mapping(held: Mapping[str, Any]) -> Iterator[tuple[str, KeptObject]]:
    return (
        (name, KeptObject(functools.partial(held.get, name, ABSENT), is_elsewhere=True))
        for name, part in list(held.items())
        if not _is_code(part)
    )


def _is_code(part: object) -> bool:
    return isinstance(part, (FunctionType, property, classmethod, staticmethod, type)) or hasattr(type(part), "__get__")


class StateNow:
    """What the body reaches, as it is now: digests, by name."""

    def __init__(self, body: Body) -> None:
        self._body = body
        self.kept = dict(_kept(body))
        self._values = {name: (id(value := one.read()), digest_of(value), value) for name, one in self.kept.items()}
        """(identity, digest, the value)"""

    def changed(self, end: StateNow) -> tuple[str, ...]:
        """Names whose value was changed in place or is kept elsewhere than in a variable; else those that are read first and bound anew."""
        absent = (id(ABSENT), digest_of(ABSENT), ABSENT)
        names = [*self.kept, *(name for name, one in end.kept.items() if one.is_elsewhere and name not in self.kept)]
        pairs = {name: (self._values.get(name, absent), end._values.get(name, absent)) for name in names}
        differing = [name for name, (one, other) in pairs.items() if one[1] != other[1]]
        in_place = tuple(name for name in differing if not name.isidentifier() or pairs[name][0][0] == pairs[name][1][0])
        return in_place or tuple(name for name in differing if _is_read_first(self._body, name))


def line_that_changes(runs: Runs, read: Callable[[], Any], place: int | None = None) -> Location | None:
    """The line of the user's after which `read` gives something else: the first one, or the last one on the way to the op at `place`.

    One run, as far as that; none if a debugger follows the code.
    """
    watch = _LineWatch(runs, read, place)
    if sys.gettrace() is None:
        runs.again(watch)
    return None if watch.changed_by is None else location(*watch.changed_by)


class _LineWatch(DigestRecorder):
    """Reads a value after each line, and at the op at `place`, which ends the run; without a place, the first change ends it."""

    def __init__(self, runs: Runs, read: Callable[[], Any], place: int | None) -> None:
        super().__init__(Recording(), runs.guard, runs.hooks)
        self.until = sys.maxsize if place is None else place
        self.changed_by: Place | None = None
        """The last line after which the value was another one."""
        self._last: Place | None = None
        self._read, self._state = read, read()
        self._begin_s = time.process_time()

    def attach(self, stack: ExitStack, height: int | None = None) -> None:
        """From here until the stack closes."""
        super().attach(stack, height)
        follow_lines(stack, lambda code: is_user_code(code) and code.co_filename != "<string>", self._passed)

    def seen(self, op: Op) -> None:
        """One more op."""
        if op.place == self.until:
            sys.settrace(None)
            self._has_changed()

    def _has_changed(self) -> bool:
        before, self._state = self._state, self._read()
        is_same = same_state(self._state, before)
        self.changed_by = self.changed_by if is_same else self._last
        return not is_same

    def _passed(self, frame: FrameType, event: str) -> None:
        is_over = self._has_changed() and self.until == sys.maxsize
        if is_over or time.process_time() - self._begin_s > _MOST_S:
            self.until = -1  # the next op: what is raised by a line may jump over the end of a `with`, and leave a lock taken
            sys.settrace(None)
            return
        here = frame.f_back if event == "return" else frame
        if here is not None and is_user_code(here.f_code):
            self._last = here.f_code.co_filename, here.f_lineno or 1, here.f_code.co_name


def follow_lines(stack: ExitStack, is_followed: Callable[[CodeType], bool], passed: Callable[[FrameType, str], object]) -> None:
    """`passed` before each line of the code that is followed and when it returns, until the stack closes; not if a debugger follows it."""
    known: dict[int, tuple[CodeType, bool]] = {}  # by its id: code that a compiler has written may hold what has no hash

    def entered(frame: FrameType, _event: str, _arg: object) -> Any:
        code = frame.f_code
        if id(code) not in known:
            known[id(code)] = code, is_followed(code)
        return line if known[id(code)][1] else None

    def line(frame: FrameType, event: str, _arg: object) -> Any:
        if event in {"line", "return"}:
            passed(frame, event)
        return line

    if sys.gettrace() is None:
        stack.callback(sys.settrace, None)
        sys.settrace(entered)


def reached(body: Body) -> tuple[set[str], list[CodeType]]:
    """Names in the body and in the functions and methods of the user's that it reaches by name; and their code."""
    names = names_in(*body.statements) | body.variables.keys()
    todo, codes = sorted(names), dict[CodeType, None]()
    while todo and len(codes) < _MOST_FUNCTIONS:
        for function in _functions(_value(body, todo.pop())):
            if function.__code__ not in codes:
                codes[function.__code__] = None
                new = writes_of(function.__code__).loaded - names
                names |= new
                todo += sorted(new)
    return names - body.hidden, list(codes)


def _functions(value: object) -> Iterator[FunctionType]:
    if isinstance(value, FunctionType):
        if is_user_code(value.__code__):
            yield value
        return
    kind = value if isinstance(value, type) else type(value)
    if whose(kind) == "user":
        yield from (var for var in vars(kind).values() if isinstance(var, FunctionType))


def _is_read_first(body: Body, name: str) -> bool:
    if name in names_in(*body.statements):
        return name in read_before_bound(body.statements)
    return any(name in writes_of(code).stored_globals & writes_of(code).loaded for code in reached(body)[1])


def digest_of(value: Any, level: int = 0) -> int:
    """A number for a value that is the same in two runs of one process whenever the value is.

    Of objects of the user's, their attributes count; of a layer or an optimizer, its settings; of anything else, its type.
    """
    kind = type(value)
    if kind in _PLAIN:
        return of_plain(value)
    if isinstance(value, torch.Tensor):
        return of_tensor(value)
    if hasattr(value, "tobytes") and hasattr(value, "dtype") and not value.dtype.hasobject:
        step = max(1, value.nbytes // _MOST_BYTES)
        return hash((str(value.dtype), value.shape, zlib.crc32(value.ravel()[::step].tobytes())))
    if level >= _DEEPEST or isinstance(value, type):
        return hash(kind.__qualname__)
    return hash((kind.__qualname__, *_parts(value, level + 1)))


def _parts(value: Any, level: int) -> Iterable[int]:
    """Digests of what is in it. A set has no order."""
    if isinstance(value, (bytes, bytearray, *_BY_REPR)):
        return (hash(repr(value)),)
    if isinstance(value, (set, frozenset)):
        return (len(value), *sorted(digest_of(one, level) for one in islice(value, _MOST_ITEMS)))
    if isinstance(value, (dict, Mapping)):
        pairs = islice(dict.items(value) if isinstance(value, dict) else value.items(), _MOST_ITEMS)
        return (len(value), *(digest_of(one, level) for pair in pairs for one in pair))
    if isinstance(value, (list, tuple, deque)):
        return (len(value), *(digest_of(one, level) for one in (*islice(value, _MOST_ITEMS), *list(value)[-_MOST_ITEMS:])))
    state = _state_of(value)
    return _attributes(value, level) if state is None else (hash(state),)


def _state_of(value: Any) -> object:
    """Of a generator, what its next draw depends on."""
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        return random.Random.getstate(value)
    if isinstance(value, torch.Generator):
        return of_tensor(value.get_state())
    if type(value).__module__.startswith("numpy.random"):
        return str(value.get_state() if hasattr(value, "get_state") else getattr(value, "bit_generator", value).state)
    return None


def _attributes(value: Any, level: int) -> Iterable[int]:
    if isinstance(value, torch.optim.Optimizer):
        return [digest_of([part for name, part in group.items() if name != "params"], level) for group in value.param_groups]
    if isinstance(value, torch.nn.Module):
        return [of_plain([name, part]) for module in value.modules() for name, part in vars(module).items() if type(part) in _PLAIN]
    if isinstance(value, FunctionType):
        return (digest_of(value.__defaults__, level), digest_of(value.__kwdefaults__, level))
    held = attributes_of(value) if whose(type(value)) == "user" else None
    return [digest_of(one, level) for pair in islice((held or {}).items(), _MOST_ITEMS) for one in pair]
