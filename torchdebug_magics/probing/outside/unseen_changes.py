"""Files that a run has changed by means that Python does not hear of, such as a writer in Rust: found by a look at the folders."""

from __future__ import annotations

import ast
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import islice
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torchdebug_magics.machine.kept_files import Stamp, stamp_of
from torchdebug_magics.probing.names import Named
from torchdebug_magics.probing.source.syntax import names_in, nodes
from torchdebug_magics.probing.source.user_code import is_user_code
from torchdebug_magics.probing.state.attributes import attributes_of

_MOST_ENTRIES, _DEEPEST = 5_000, 3
"""How many entries of all folders together, and how deep, are looked at."""
_SHORTEST = 3
"""Letters of a string that begins or ends the name of a file."""
_MOST_LETTERS = 1_000
_OF_THE_SYSTEM = ("/proc", "/sys", "/dev")
"""What is no file on a disk."""
_OF_THE_SERVER = ".ipynb"
"""What the notebook's server saves while a cell runs; a cell that writes one is heard."""
_IMMUTABLE = (str, bytes, int, float, complex, bool, type(None), ModuleType, FunctionType, MethodType, BuiltinFunctionType, type)
_MOST_STRINGS, _MOST_PARTS = 5_000, 100


class Folders:
    """The working folder, those that strings of the user's code and variables name, and those in which a run has changed something."""

    def __init__(self, strings: Iterable[str]) -> None:
        strings = [text for text in strings if len(text) <= _MOST_LETTERS and not set(text) & set("\0\n") and set(text) - set(f".{os.sep}")]
        self._names = frozenset(os.path.basename(text.rstrip(os.sep)) for text in strings)
        self._parts = tuple(name for name in self._names if len(name) >= _SHORTEST and not name.isalnum())
        self._depths: dict[str, int] = {}
        self._named: set[str] = set()
        """Folders whose whole path a string of the user's gives."""
        for folder in _named_folders(strings):
            self._named.add(os.path.realpath(folder))
        self._room = _MOST_ENTRIES
        self._here = here()
        for folder in filter(None, (self._here, *sorted(self._named))):
            self._admit(folder, 1 if folder in _shared_folders() else _DEEPEST)

    def add(self, folder: str) -> dict[str, Stamp]:
        """Look into this one, too; what is in it now, if it is new."""
        folder = os.path.realpath(folder)
        is_known = folder in self._depths or self.covers(os.path.join(folder, "x"))
        if is_known or folder.startswith(_OF_THE_SYSTEM) or not os.path.isdir(folder):
            return {}
        return {path: stamp_of(path) for path in self._admit(folder, 1)}

    def _admit(self, folder: str, depth: int) -> list[str]:
        """As deep as there is room for: a folder is looked at whole, or not at all."""
        for deep in range(depth, 0, -1):
            entries = list(islice(_below(folder, deep, self._names), self._room + 1))
            if len(entries) <= self._room:
                self._room -= len(entries)
                self._depths[folder] = deep
                return entries
        return []

    def covers(self, path: str) -> bool:
        """Whether a look shows what is at this path."""
        name = os.path.basename(path)
        folders = [os.path.dirname(path)]
        while len(folders) < _DEEPEST:
            folders.append(os.path.dirname(folders[-1]))
        is_near = any(self._depths.get(folder, 0) > depth for depth, folder in enumerate(folders))
        return is_near and not _is_passed_by(name, self._names)

    def is_named(self, path: str) -> bool:
        """Whether a string of the user's is the name of the file, or begins or ends it, or names its folder."""
        folder = os.path.dirname(path)
        is_own = folder != self._here and folder not in _shared_folders()
        return self.has_own_name(path) or (is_own and (folder in self._named or self._has_name(os.path.basename(folder))))

    def has_own_name(self, path: str) -> bool:
        """Whether a string of the user's is the name of the file, or begins or ends it."""
        return self._has_name(os.path.basename(path))

    def look(self) -> dict[str, Stamp]:
        """What is in the folders now."""
        stamps: dict[str, Stamp] = {}
        for folder, depth in self._depths.items():
            stamps |= {path: stamp_of(path) for path in _below(folder, depth, self._names)}
        return stamps

    def _has_name(self, name: str) -> bool:
        return name in self._names or any(name.startswith(part) or name.endswith(part) for part in self._parts)


def here() -> str:
    """The working directory; empty if it was removed."""
    try:
        return os.path.realpath(os.getcwd())
    except OSError:
        return ""


def _shared_folders() -> frozenset[str]:
    """Where other processes write, too."""
    return frozenset(map(os.path.realpath, (tempfile.gettempdir(), os.path.expanduser("~"), os.sep)))


def _is_passed_by(name: str, names: frozenset[str]) -> bool:
    """Whether a file is what a server writes, or hidden and not one that the user's code names."""
    return name.endswith(_OF_THE_SERVER) or (name.startswith(".") and name not in names)


def _below(root: str, depth: int, names: frozenset[str]) -> Iterator[str]:
    """The entries nearest to the root first."""
    level = [root]
    for _ in range(depth):
        deeper: list[str] = []
        for folder in level:
            with suppress(OSError), os.scandir(folder) as entries:
                for entry in entries:
                    if _is_passed_by(entry.name, names):
                        continue
                    yield entry.path
                    if entry.is_dir(follow_symlinks=False):
                        deeper.append(entry.path)
        level = deeper


def _named_folders(strings: Iterable[str]) -> Iterator[str]:
    for text in strings:
        path = os.path.expanduser(text)
        if os.sep not in path and not os.path.isdir(path):
            continue
        folder = path if os.path.isdir(path) else os.path.dirname(path)
        if os.path.isdir(folder) and os.path.realpath(folder) != os.sep and not os.path.realpath(folder).startswith(_OF_THE_SYSTEM):
            yield folder


def used_by(*roots: Any) -> list[Named]:
    """The variables that code names, with their values.

    `roots` are functions, objects of the user's classes, code objects and statements, and the namespaces of the last two.
    """
    spaces = [root for root in roots if type(root) is dict]
    variables: dict[str, Named] = {}
    todo: list[tuple[Any, Mapping[str, Any]]] = [(root, space) for root in roots if type(root) is not dict for space in spaces or [{}]]
    seen: set[tuple[int, int]] = set()
    while todo:
        root, space = todo.pop()
        if (id(root), id(space)) in seen:
            continue
        seen.add((id(root), id(space)))
        if not issubclass(type(root), (FunctionType, MethodType, CodeType, ast.AST)):
            methods = (value for kind in type(root).__mro__ for value in vars(kind).values() if type(value) is FunctionType)
            todo += [(method, method.__globals__) for method in methods if is_user_code(method.__code__)]
            continue
        for name, value in used_in(root, space):
            if name not in variables or variables[name].value is not value:
                variables[name] = Named(name, value)
            inner = value.__func__ if type(value) is MethodType else value
            if type(inner) is FunctionType and is_user_code(inner.__code__):
                todo.append((inner, inner.__globals__))
    return list(variables.values())


def used_in(root: Any, space: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The names of one piece of code that are bound in its namespace, or that a function closes over."""
    if type(root) is MethodType:
        yield "self", root.__self__
        root = root.__func__
    if type(root) is FunctionType:
        yield from zip(root.__code__.co_freevars, _cells(root), strict=False)
        root, space = root.__code__, root.__globals__
    names: Iterable[str] = ()
    if type(root) is CodeType:
        names = _names_of(root)
    elif issubclass(type(root), ast.AST):
        names = names_in(root)
    yield from ((name, space[name]) for name in names if name in space)


def _names_of(code: CodeType) -> set[str]:
    inner = (_names_of(part) for part in code.co_consts if type(part) is CodeType)
    return set(code.co_names).union(*inner)


def is_shareable(value: object) -> bool:
    """Whether a change of the value is seen by all that have it."""
    return not issubclass(type(value), _IMMUTABLE) and type(value) not in {tuple, frozenset}


def strings_in(*roots: Any) -> Iterator[str]:
    """Strings and paths in variables, and constants of the user's code: of functions, methods, classes, code objects and statements."""
    seen: set[int] = set()
    todo = list(roots)
    count = 0
    while todo and count < _MOST_STRINGS:
        root = todo.pop()
        if id(root) in seen:
            continue
        seen.add(id(root))
        if issubclass(type(root), (str, bytes, os.PathLike)):
            count += 1
            yield os.fsdecode(root)
        else:
            todo += _parts_of(root)


def _parts_of(root: Any) -> list[Any]:
    """Where strings may be."""
    kind = type(root)
    parts: Iterable[Any] = ()
    if kind is dict:
        parts = [value for name, value in list(root.items())[:_MOST_STRINGS] if not (isinstance(name, str) and name.startswith("_"))]
    elif kind in {list, tuple}:
        parts = root[:_MOST_PARTS]
    elif kind is CodeType:
        parts = root.co_consts
    elif kind is MethodType:
        parts = (root.__func__, root.__self__)
    elif kind is FunctionType and is_user_code(root.__code__):
        named = (root.__globals__.get(name) for name in root.__code__.co_names)
        parts = (root.__code__, *(root.__defaults__ or ()), *(root.__kwdefaults__ or {}).values(), *_cells(root), *named)
    elif issubclass(kind, ast.AST):
        parts = [node.value for node in nodes(ast.Constant, root)]
    elif issubclass(kind, type) and _has_user_code(root):
        parts = vars(root).values()
    elif _has_user_code(kind):
        parts = (kind, *(attributes_of(root) or {}).values())
    return list(parts)


def _has_user_code(kind: type) -> bool:
    return any(type(value) is FunctionType and is_user_code(value.__code__) for value in vars(kind).values())


def _cells(function: FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not bound yet
            continue
