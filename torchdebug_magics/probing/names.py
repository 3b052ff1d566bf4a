"""What the user's names lead to, with the path that leads there: ``loader.generator``, ``runs[0]``."""

from __future__ import annotations

import re
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from types import FrameType, FunctionType, ModuleType
from typing import Any, NamedTuple

import torch

from torchdebug_magics.probing.source.user_code import frames_above, is_user_code, local_values, running_shell
from torchdebug_magics.probing.state.attributes import attributes_of, members_of
from torchdebug_magics.probing.state.kinds import LEAVES
from torchdebug_magics.probing.state.states import is_generator, ways_of

OUTPUT_NAME = re.compile(r"_+\d*$")
"""The names of the variables that IPython gives to outputs."""
_MOST_OBJECTS = 20_000
_MOST_PARTS = 2_000
"""How many parts of one object are looked at: a data set of a million numbers holds nothing to be found."""
_DEEPEST = 6
_FUNCTION_FLAG = 0x2
"""``CO_NEWLOCALS``: a call, not the top of a cell or file."""


class Named(NamedTuple):
    """A value, and how to write it."""

    name: str
    value: Any


def user_variables() -> Iterator[Named]:
    """The user's own names in the notebook, and in ``__main__``."""
    shell = running_shell()
    for space in user_namespaces():
        yield from (Named(name, value) for name, value in named(space) if not _is_ours(name, shell))


def user_namespaces() -> list[dict[str, Any]]:
    """The namespace of the notebook, and that of ``__main__``."""
    shell = running_shell()
    module = sys.modules.get("__main__")
    main: dict[str, Any] = vars(module) if type(module) is ModuleType else {}
    return [main] if shell is None or shell.user_ns is main else [shell.user_ns, main]


def _is_ours(name: str, shell: Any) -> bool:
    """Whether a name is one that Python or IPython gives."""
    return name.startswith("__") or (shell is not None and bool(name in {"Out", "_oh", "In", "_ih", "_dh"} or OUTPUT_NAME.match(name)))


def named(space: dict[Any, Any]) -> list[tuple[str, Any]]:
    """The names in a namespace: anything may be a key of ``globals()``."""
    return [(name, value) for name, value in dict.items(space) if type(name) is str]


def user_names(frame: FrameType | None) -> Iterator[Named]:
    """The variables of the notebook or script, then those of the user's calls that `frame` stands in, the innermost first."""
    yield from user_variables()
    spaces: set[int] = set()
    for outer in frames_above(frame):
        if not is_user_code(outer.f_code):
            continue
        if outer.f_code.co_flags & _FUNCTION_FLAG:
            yield from (Named(f"{name} in {outer.f_code.co_name}()", value) for name, value in local_values(outer).items())
        if id(outer.f_globals) not in spaces:
            spaces.add(id(outer.f_globals))
            yield from (Named(name, value) for name, value in list(outer.f_globals.items()) if not name.startswith("_"))


def variable_of(value: object) -> str | None:
    """The variable that holds the very object, in the user's running frames or the notebook; no ``self``."""
    names = (variable.name.partition(" in ")[0] for variable in user_names(sys._getframe(1)) if variable.value is value)
    return next((name for name in names if name != "self"), None)


def values_found(roots: Iterator[Named], is_wanted: Callable[[object], bool]) -> list[Named]:
    """Each wanted value once, by the shortest of its names; the search ends at a bound, and runs no code of the user's."""
    seen: dict[int, Any] = {}
    variables: list[Named] = []
    todo = deque((root, 0) for root in sorted(roots, key=lambda root: root.name))
    while todo and len(seen) < _MOST_OBJECTS:
        here, depth = todo.popleft()
        if id(here.value) in seen or type(here.value) in LEAVES:
            continue
        seen[id(here.value)] = here.value
        if is_wanted(here.value):
            variables.append(here)
        if depth < _DEEPEST and not is_generator(here.value):
            todo.extend((part, depth + 1) for part in islice(_parts(here), _MOST_PARTS) if type(part.value) not in LEAVES)
    return variables


def _parts(here: Named) -> Iterator[Named]:
    """The parts by what its type says: a lazy object may answer `isinstance` with an import or a warning."""
    name, value = here
    kind = type(value)
    ways = ways_of(value)
    if not ways or issubclass(kind, torch.Tensor):
        return
    if issubclass(kind, dict):
        yield from (Named(f"{name}[{key!r}]", part) for key, part in list(dict.items(value)) if type(key) in {str, int})
    elif issubclass(kind, (list, tuple, deque)):
        yield from (Named(f"{name}[{position}]", part) for position, part in enumerate(_base(kind).__iter__(value)))
    elif kind is FunctionType:
        yield from _around(name, value)
    elif issubclass(kind, (ModuleType, type)):
        # Of modules and classes only the user's own, which these ways know.
        if ways[0].read(value) is not None:
            yield from _of_names(name, vars(value))
    else:
        yield from _of_instance(name, value)


def _base(kind: type) -> Any:
    return next(base for base in (list, tuple, deque) if issubclass(kind, base))


def _of_instance(name: str, value: object) -> Iterator[Named]:
    attributes = attributes_of(value) or {}
    if issubclass(type(value), torch.nn.Module):
        yield from _of_names(name, attributes.get("_modules") or {})
    yield from _of_names(name, attributes)
    for member in members_of(type(value)):
        yield from (Named(f"{name}.{member.__name__}", part) for part in _held(member.__get__, value))


def _of_names(name: str, attributes: Mapping[str, Any]) -> Iterator[Named]:
    yield from (Named(f"{name}.{key}", part) for key, part in list(attributes.items()) if type(key) is str and not key.startswith("__"))


def _around(name: str, function: FunctionType) -> Iterator[Named]:
    if not is_user_code(function.__code__):
        return
    for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        yield from (Named(f"{variable} of {name}()", part) for part in _held(getattr, cell, "cell_contents"))
    yield from (Named(f"a default of {name}()", value) for value in function.__defaults__ or ())


def _held(read: Callable[..., Any], *place: object) -> list[Any]:
    """What is kept in a slot or in a cell, if anything was put there."""
    try:
        return [read(*place)]
    except (AttributeError, ValueError):
        return []
