"""The line that puts something into a variable or an attribute: ``losses.append(loss)``, ``self.sum += val * n``."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterable, Iterator
from typing import TYPE_CHECKING

from torchdebug_magics.probing.shell import running_shell
from torchdebug_magics.probing.source.call_sites import tree_of
from torchdebug_magics.probing.where import location

if TYPE_CHECKING:
    from torchdebug_magics.probing.holders import Owner
    from torchdebug_magics.report import Location

__all__ = ["KeepingLines"]

_PUTS = frozenset({"append", "appendleft", "extend", "add", "insert", "update", "setdefault", "put", "push", "resize_"})
_ASKS = frozenset({"compute", "reset", "clear", "to", "cpu", "cuda", "eval", "train", "state_dict", "items", "values", "keys", "get"})
"""Methods by which one gives nothing to an object."""
_CONTAINERS = frozenset({"list", "dict", "set", "tuple", "deque", "defaultdict", "OrderedDict", "Counter"})
_MODULES = frozenset({"torch", "np", "numpy", "collections", "nn"})
_LOCAL = re.compile(r"(\w+)\(\) local '(\w+)'")
_FIRST = re.compile(r"\w+")
_GROWS, _FITS, _AS_WANTED = 8, 4, 2


class KeepingLines:
    """Reads the user's cells and files, once each."""

    def __init__(self, files: Iterable[str]) -> None:
        compiler = getattr(running_shell(), "compile", None)
        cells = [name for name in getattr(compiler, "_filename_map", {}) if isinstance(name, str)]
        self._files = list(dict.fromkeys([*reversed(cells), *files]))
        self._puts: dict[str, list[_Put]] = {}

    def of(self, path: str, owner: Owner | None, *, adds_up: bool = False) -> Location | None:
        """Where what is at that path gets what it keeps; `adds_up`: by joining it with what it was, and not beside it."""
        local = _LOCAL.match(path)
        function, name = local.groups() if local is not None else ("", "")
        if owner is None:
            first = None if local is not None else _FIRST.match(path)
            return self._best(name or (first[0] if first is not None else ""), (), function, self._files, adds_up=adds_up)
        if owner.is_users:
            return self._best(f".{owner.attribute}", owner.type_names, "", [*filter(None, [owner.file]), *self._files], adds_up=adds_up)
        foreign = self._best(f".{owner.attribute}", owner.type_names, "", self._files, adds_up=adds_up, of_others=True)
        if foreign is not None:
            return foreign
        # Code of a library puts it there: it is given to the object by who calls that.
        kept_as = re.split(r"\W+", re.sub(r"\[[^\]]*\]", "", owner.path))[-1]
        return self._best(f"{'.' if '.' in owner.path else ''}{kept_as}()", (), function, self._files, adds_up=False)

    def of_attribute(self, name: str) -> Location | None:
        """Where an attribute with that name is set."""
        return self._best(f".{name}", (), "", self._files, adds_up=False)

    def call_of(self, names: Collection[str], types: Collection[str] = ()) -> Location | None:
        """Where a function or method with one of these names is called, in a class of these names where there is one."""
        wanted = {f"{name}()!" for name in names}
        found = [put for file in self._files for put in self._in(file) if put.name in wanted]
        best = max(found, key=lambda put: put.rank(types, "", adds_up=False), default=None)
        return None if best is None else location(best.file, best.line, best.function)

    def in_function(self, name: str) -> Location | None:
        """Where a function of that name makes an attribute of its object larger."""
        found = [put for file in self._files for put in self._in(file) if put.function == name and put.is_own and put.grows]
        return location(found[0].file, found[0].line, name) if found else None

    def _best(
        self, name: str, types: Collection[str], function: str, files: Iterable[str], *, adds_up: bool, of_others: bool = False
    ) -> Location | None:
        """`of_others`: the attribute is one of a library's object, and no class of the user's sets its own."""
        if not name.strip(".()"):
            return None
        found = [put for file in dict.fromkeys(files) for put in self._in(file) if put.name == name and not put.is_initial]
        if of_others:
            found = [put for put in found if not put.is_own]
        best = max(found, key=lambda put: put.rank(types, function, adds_up=adds_up), default=None)
        return None if best is None else location(best.file, best.line, best.function)

    def _in(self, file: str) -> list[_Put]:
        if file not in self._puts:
            self._puts[file] = list(_walk(tree_of(file) or ast.Module(body=[], type_ignores=[]), file, _Around()))
        return self._puts[file]


class _Around:
    """What a statement is written in."""

    def __init__(self, kind: str = "", function: str = "", *, in_loop: bool = False) -> None:
        self.kind, self.function, self.in_loop = kind, function, in_loop


class _Put:
    """One statement that puts something somewhere."""

    def __init__(
        self,
        name: str,
        node: ast.stmt | ast.expr,
        file: str,
        around: _Around,
        *,
        adds: bool,
        is_initial: bool = False,
        is_put: bool = False,
    ) -> None:
        self.name, self.line, self.file, self.is_initial = name, node.lineno, file, is_initial
        self._adds, self.grows = adds, adds or is_put
        self.is_own = name.startswith(".") and any(
            isinstance(one, ast.Attribute) and f".{one.attr}" == name and isinstance(one.value, ast.Name) and one.value.id == "self"
            for one in ast.walk(node)
        )
        """Whether it is an attribute of ``self``."""
        self.function, self._kind, self._in_loop = around.function, around.kind, around.in_loop

    def rank(self, types: Collection[str], function: str, *, adds_up: bool) -> int:
        """How well it fits an owner of these types, or a variable of that function."""
        fits = self._kind in types if types else self.function == function
        return _GROWS * self.grows + _FITS * fits + _AS_WANTED * (self._adds or not adds_up) + self._in_loop


def _walk(node: ast.AST, file: str, around: _Around) -> Iterator[_Put]:
    for child in ast.iter_child_nodes(node):
        inside = around
        if isinstance(child, ast.ClassDef):
            inside = _Around(child.name)
        elif isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            inside = _Around(around.kind, child.name)
        elif isinstance(child, (ast.For, ast.While, ast.AsyncFor, ast.comprehension)):
            inside = _Around(around.kind, around.function, in_loop=True)
        yield from _puts(child, file, inside)
        yield from _walk(child, file, inside)


def _puts(node: ast.AST, file: str, around: _Around) -> Iterator[_Put]:
    if isinstance(node, ast.AugAssign):
        yield from (_Put(name, node, file, around, adds=True) for name in _names(node.target))
    elif isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        parts = [part for target in targets for part in (target.elts if isinstance(target, (ast.Tuple, ast.List)) else [target])]
        read = {name for one in ast.walk(node.value) if isinstance(one, ast.expr) for name in _names(one)}
        for part in parts:
            is_put = isinstance(part, ast.Subscript)
            is_first = not is_put and _is_empty(node.value)
            yield from (_Put(name, node, file, around, adds=name in read, is_initial=is_first, is_put=is_put) for name in _names(part))
    elif isinstance(node, ast.Call):
        function = node.func
        if isinstance(function, ast.Attribute) and function.attr in _PUTS:
            yield from (_Put(name, node, file, around, adds=False, is_put=True) for name in _names(function.value))
        called = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
        yield _Put(f"{called}()!", node, file, around, adds=False)
        given = function.value if isinstance(function, ast.Attribute) and function.attr not in _ASKS else function
        if node.args or node.keywords:
            yield from (_Put(f"{name}()", node, file, around, adds=False) for name in _names(given))


def _names(target: ast.expr) -> list[str]:
    """``losses`` for ``losses['a'][0]``; ``.sum`` for ``self.sum``."""
    while isinstance(target, (ast.Subscript, ast.Starred)):
        target = target.value
    if isinstance(target, ast.Attribute):
        return [f".{target.attr}"]
    return [target.id] if isinstance(target, ast.Name) else []


def _is_empty(value: ast.expr) -> bool:
    """Whether it only begins with that: nothing, a number, an empty list, a new object made of nothing."""
    if isinstance(value, (ast.List, ast.Tuple, ast.Set)):
        return all(_is_empty(one) for one in value.elts)
    if isinstance(value, ast.Dict):
        return not value.keys
    if isinstance(value, ast.Call):
        is_method = isinstance(value.func, ast.Attribute)
        made = value.func.attr if isinstance(value.func, ast.Attribute) else getattr(value.func, "id", "")
        from_module = isinstance(value.func, ast.Attribute) and getattr(value.func.value, "id", "") in _MODULES
        is_new = (from_module or not is_method) and bool(value.args) and all(_is_empty(one) for one in value.args)
        return made in _CONTAINERS or is_new
    return isinstance(value, ast.Constant)
