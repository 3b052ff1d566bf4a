"""Who keeps what: the variables that hold the blocks which outlived the cell, or which grow."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping

from torchdebug_magics.instruments.memtrace.held.leak_fixes import collection, root
from torchdebug_magics.instruments.memtrace.ledger.blocks import Block, category
from torchdebug_magics.instruments.memtrace.ledger.phases import ACTIVATION, OTHER, TEMPORARY
from torchdebug_magics.instruments.memtrace.report import Holder
from torchdebug_magics.probing.holders import Owner, find_holders
from torchdebug_magics.probing.syntax import FUNCTIONS, LOOPS, called, dotted, last_name, method, nodes, targets_of, tree_of
from torchdebug_magics.probing.where import location, running_shell
from torchdebug_magics.report import Location

_ASKED = 2000
"""Storages asked for at most, the largest: a report shows a few."""
_SHOWN = 20
_MANY, _FAR_MORE = 3, 2
_PUTS = frozenset({"append", "appendleft", "extend", "add", "insert", "update", "setdefault", "put", "push", "resize_"})
_ASKS = frozenset({"compute", "reset", "clear", "to", "cpu", "cuda", "eval", "train", "state_dict", "items", "values", "keys", "get"})
"""Methods by which one gives nothing to an object."""
_CONTAINERS = frozenset({"list", "dict", "set", "tuple", "deque", "defaultdict", "OrderedDict", "Counter"})
_MODULES = frozenset({"torch", "np", "numpy", "collections", "nn"})
_LOCAL = re.compile(r"(\w+)\(\) local '(\w+)'")
_FIRST = re.compile(r"\w+")
_GROWS, _FITS, _AS_WANTED = 8, 4, 2


class Keepers:
    """Paths of blocks, found by one walk over the namespace, the running calls and the modules.

    A variable that is `carried` from one iteration into the next is what keeps a history, and not one that is only made of it.
    """

    def __init__(self, blocks: Iterable[Block], extra_roots: Iterable[tuple[str, object]] = (), *, carried: Collection[str] = ()) -> None:
        extra_roots = list(extra_roots)
        self.has_error = bool(extra_roots)
        """Whether an error may be what keeps them, as its traceback holds all that the calls held."""
        wanted = sorted(((block.ref.key, block) for block in blocks if block.ref is not None), key=lambda one: -one[1].bytes)[:_ASKED]
        found = find_holders([key for key, _ in wanted], extra_roots=extra_roots, first=carried) if wanted else None
        self.is_whole = found is None or found.is_whole
        paths: Mapping[int, str] = {} if found is None else found.paths
        self._wanted = [block for _, block in wanted]
        self._paths = {id(block): paths[key] for key, block in wanted if key in paths}
        self._slices = frozenset(id(block) for key, block in wanted if found is not None and key in found.slices)
        self._bounded = frozenset(id(block) for key, block in wanted if found is not None and key in found.bounded)
        self._owners = {id(block): found.owners[key] for key, block in wanted if found is not None and key in found.owners}
        self._shared = frozenset(id(block) for key, block in wanted if found is not None and found.others.get(key))
        self._with_history = frozenset(id(block) for key, block in wanted if found is not None and key in found.with_history)

    def _is_unnamed(self, blocks: Iterable[Block], held: Collection[Block]) -> bool:
        """Whether far more of them are alive without a name: what holds so few is not what keeps them."""
        asked = {id(block) for block in self._wanted}
        unnamed = [block for block in blocks if not block.died and id(block) in asked and id(block) not in self._paths]
        return len(unnamed) >= _MANY and _size(unnamed) > _FAR_MORE * _size(held)

    def path(self, blocks: Collection[Block]) -> str:
        """Of the variable that holds most of them: the path to the first one in it; empty where that is no name for most of it.

        One that holds what a single iteration made has only its last value, however large that is; others hold more and more.
        """
        found: dict[str, list[Block]] = defaultdict(list)
        for block in blocks:
            if id(block) in self._paths:
                found[collection(self._paths[id(block)])].append(block)
        most = max(found.values(), key=lambda held: (len({block.iteration for block in held}) > 1, _size(held)), default=())
        if self.is_whole and self._is_unnamed(blocks, most):
            return ""
        return next((self._paths[id(block)] for block in most), "")

    def owner(self, path: str) -> Owner | None:
        """Whose attribute holds what is at that path; None where it is a variable's."""
        return next((self._owners.get(id(block)) for block in self._wanted if self.of(block) == path), None)

    def by_graph(self, leaks: Iterable[Iterable[Block]]) -> tuple[int, int]:
        """(bytes that are held with a graph or by way of one, bytes of plain tensors): the latter are not freed by cutting a graph off."""
        alive = [block for blocks in leaks for block in blocks if not block.died]
        in_graph = _size(block for block in alive if "grad_fn" in self.of(block) or id(block) in self._with_history)
        return in_graph, _size(alive) - in_graph

    def frees_bytes(self, path: str, *, graphs: bool) -> int:
        """What is gone when the variable at that path lets go of all, or of the graphs alone: what no other root leads to."""
        alone = (block for block in self.beside(path) if id(block) not in self._shared and not block.died)
        return _size(block for block in alone if not graphs or "grad_fn" in self.of(block))

    def unnamed_bytes(self, blocks: Iterable[Block]) -> int:
        """Of what is there without being a part of a model: that to which no name leads, or of which it was not asked."""
        return _size(block for block in blocks if not block.died and not block.role and id(block) not in self._paths)

    def beside(self, path: str) -> list[Block]:
        """All that the variable at that path holds, and what is in the graphs that it keeps."""
        return [block for block in self._wanted if collection(self.of(block)) == collection(path)]

    def holds_most(self, blocks: Iterable[Block], path: str) -> bool:
        """Whether the variable at that path holds the larger part of those that are still there."""
        alive = [block for block in blocks if not block.died]
        held = [block for block in alive if collection(self._paths.get(id(block), "")) == collection(path)]
        return 2 * _size(held) > _size(alive)

    def are_bounded(self, blocks: Iterable[Block]) -> bool:
        """Whether what holds them has a limit."""
        return any(id(block) in self._bounded for block in blocks)

    def are_slices(self, blocks: Iterable[Block]) -> bool:
        """Whether most of them are held only for a part of each."""
        blocks = list(blocks)
        return 2 * _size(block for block in blocks if id(block) in self._slices) > _size(blocks)

    def have_history(self, blocks: Iterable[Block]) -> bool:
        """Whether some are held with the graph that made them."""
        return any(id(block) in self._with_history for block in blocks)

    def have_graph(self, blocks: Iterable[Block]) -> bool:
        """Whether some are held with a graph, or by way of one; also where it is not known who holds one."""
        return any(id(block) in self._with_history or "grad_fn" in (self.of(block) or "grad_fn") for block in blocks if not block.died)

    def of(self, block: Block) -> str:
        """Empty where no name leads to it."""
        return self._paths.get(id(block), "")


def holders(keepers: Keepers, blocks: Iterable[Block]) -> tuple[Holder, ...]:
    """A row for each variable that holds some of the blocks, the most bytes first."""
    by_root: dict[str, list[Block]] = defaultdict(list)
    for block in blocks:
        path = keepers.of(block)
        if path:
            by_root[root(path)].append(block)
    rows = [_holder(keepers, found) for found in by_root.values()]
    return tuple(sorted(rows, key=lambda row: -row.live_bytes)[:_SHOWN])


def _size(blocks: Iterable[Block]) -> int:
    return sum(block.bytes for block in blocks)


def _holder(keepers: Keepers, blocks: Collection[Block]) -> Holder:
    first = min(blocks, key=lambda block: block.born)
    largest = max(blocks, key=lambda block: block.bytes)
    path = keepers.of(first)
    if len(blocks) > 1 and not any(category(block) in {ACTIVATION, OTHER, TEMPORARY} for block in blocks):
        path = root(path)  # a model or an optimizer, as a whole
    return Holder(
        path=path,
        variable=root(path),
        live_bytes=_size(blocks),
        location=largest.place.location if largest.place is not None else None,
    )


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
            inner = collection(path).rpartition(".")[2] if "." in collection(path) else ""
            written = self._best(f".{inner}", (), "", self._files, adds_up=adds_up) if inner.isidentifier() else None
            if written is not None:
                return written
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
        self.is_own = name.startswith(".") and any(dotted(one) == f"self{name}" for one in nodes(ast.Attribute, node))
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
        elif isinstance(child, FUNCTIONS):
            inside = _Around(around.kind, child.name)
        elif isinstance(child, (*LOOPS, ast.comprehension)):
            inside = _Around(around.kind, around.function, in_loop=True)
        yield from _puts(child, file, inside)
        yield from _walk(child, file, inside)


def _puts(node: ast.AST, file: str, around: _Around) -> Iterator[_Put]:
    if isinstance(node, ast.AugAssign):
        yield from (_Put(name, node, file, around, adds=True) for name in _names(node.target))
    elif isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
        read = {name for one in nodes(ast.expr, node.value) for name in _names(one)}
        for part in targets_of(node):
            is_part, is_empty = isinstance(part, ast.Subscript), _is_empty(node.value)  # `losses["total"] = 0` keeps nothing of a step
            is_first, is_put = is_empty and not is_part, is_part and not is_empty
            yield from (_Put(name, node, file, around, adds=name in read, is_initial=is_first, is_put=is_put) for name in _names(part))
    elif isinstance(node, ast.Call):
        function = node.func
        if isinstance(function, ast.Attribute) and function.attr in _PUTS:
            yield from (_Put(name, node, file, around, adds=False, is_put=True) for name in _names(function.value))
        yield _Put(f"{called(node)}()!", node, file, around, adds=False)
        given = function.value if isinstance(function, ast.Attribute) and function.attr not in _ASKS else function
        if node.args or node.keywords:
            yield from (_Put(f"{name}()", node, file, around, adds=False) for name in _names(given))


def _names(target: ast.expr) -> list[str]:
    """``losses`` for ``losses['a'][0]``; ``.sum`` for ``self.sum``."""
    while isinstance(target, (ast.Subscript, ast.Starred)):
        target = target.value
    name = last_name(target)
    return [f".{name}" if isinstance(target, ast.Attribute) else name] if name else []


def _is_empty(value: ast.expr) -> bool:
    """Whether it only begins with that: nothing, a number, an empty list, a new object made of nothing."""
    if isinstance(value, (ast.List, ast.Tuple, ast.Set)):
        return all(_is_empty(one) for one in value.elts)
    if isinstance(value, ast.Dict):
        return not value.keys
    if isinstance(value, ast.Call):
        is_new = not method(value) or dotted(value.func).rpartition(".")[0] in _MODULES
        return called(value) in _CONTAINERS or (is_new and bool(value.args) and all(map(_is_empty, value.args)))
    return isinstance(value, ast.Constant)
