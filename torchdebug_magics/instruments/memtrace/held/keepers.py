"""Who keeps what: the variables that hold what outlived the cell, grows, or was deleted, and the lines that store it."""

from __future__ import annotations

import ast
import re
import sys
import traceback
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from types import FrameType
from typing import Any, NamedTuple

import torch

from torchdebug_magics.instruments.memtrace.held.leak_fixes import Cause, adds_in_place, fix
from torchdebug_magics.instruments.memtrace.ledger.blocks import Block, Ledger, category, size_of
from torchdebug_magics.instruments.memtrace.trace import ACTIVATION, OTHER, PARAMETER, TEMPORARY, Holder, Undeleted
from torchdebug_magics.memory.found import Holding, find_holders
from torchdebug_magics.memory.paths import NOWHERE, HolderPath, Owner
from torchdebug_magics.memory.walk import roots
from torchdebug_magics.probing.source import syntax
from torchdebug_magics.probing.source.edited_source import Source
from torchdebug_magics.probing.source.syntax import FUNCTIONS, LOOPS, called, dotted, last_name, method, nodes, targets_of, tree_of
from torchdebug_magics.probing.source.user_code import frames_above, is_user_code, locate, location, running_shell
from torchdebug_magics.probing.storages import storages
from torchdebug_magics.probing.tensors import tensors_in
from torchdebug_magics.report import Edit, Location

_ASKED = 2000
"""Storages asked for at most, the largest: a report shows a few."""
_SHOWN = 20
_MANY, _FAR_MORE = 3, 2
_PUTS = frozenset({"append", "appendleft", "extend", "add", "insert", "update", "setdefault", "put", "push", "resize_"})
_ASKS = frozenset({"compute", "reset", "clear", "to", "cpu", "cuda", "eval", "train", "state_dict", "items", "values", "keys", "get"})
"""Methods by which one gives nothing to an object."""
_CONTAINERS = frozenset({"list", "dict", "set", "tuple", "deque", "defaultdict", "OrderedDict", "Counter"})
_MODULES = frozenset({"torch", "np", "numpy", "collections", "nn"})
_HOOKS = re.compile(r"register_\w*hook$")
_GROWS, _FITS, _AS_WANTED = 8, 4, 2
_LEAST_BYTES = 64 << 10
_LARGE_PART = 0.25
_MOST_LOOKS = 3
_FIX = (
    "retry after the `except` block, not in it: set a flag there, `failed = True`, and write `if failed:` after it. "
    "Until the block ends, the error's traceback keeps the variables of the failed call"
)


_NOBODY = Holding()


class Keepers:
    """Paths of blocks, found by one walk over the namespace, the running calls and the modules.

    A variable that is `carried` from one iteration into the next is what keeps a history, and not one that is only made of it.
    """

    def __init__(self, blocks: Iterable[Block], extra_roots: Iterable[tuple[str, object]] = (), *, carried: Collection[str] = ()) -> None:
        extra_roots = list(extra_roots)
        self.has_error = bool(extra_roots)
        """Whether an error may be what keeps them, as its traceback holds all that the calls held."""
        wanted = sorted((block for block in blocks if block.ref is not None), key=lambda block: -block.bytes)[:_ASKED]
        self._wanted = {block.ref.key: block for block in wanted if block.ref is not None}
        held = find_holders(self._wanted, extra_roots=extra_roots, first=carried) if wanted else None
        self._is_whole = held is None or held.is_whole
        self._holdings = {} if held is None else {id(self._wanted[key]): holding for key, holding in held.holdings.items()}

    def path(self, blocks: Collection[Block]) -> HolderPath:
        """Of the variable that holds most of them: the path to the first one in it; empty where that is no name for most of it.

        One that holds what a single iteration made has only its last value, however large that is; others hold more and more.
        """
        most = max(
            self.by_holder(blocks).values(), key=lambda held: (len({block.iteration for block in held}) > 1, size_of(held)), default=[]
        )
        asked = {id(block) for block in self._wanted.values()}
        unnamed = [block for block in blocks if not block.died and id(block) in asked and not self.of(block).path]
        # Where far more of them are alive without a name, what holds so few is not what keeps them.
        if not most or (self._is_whole and len(unnamed) >= _MANY and size_of(unnamed) > _FAR_MORE * size_of(most)):
            return NOWHERE
        return self.of(most[0]).path

    def by_holder(
        self, blocks: Iterable[Block], name: Callable[[HolderPath], str] = lambda path: path.collection
    ) -> dict[str, list[Block]]:
        """Those that a name leads to, by what of it they are in."""
        found: dict[str, list[Block]] = defaultdict(list)
        for block in blocks:
            if path := self.of(block).path:
                found[name(path)].append(block)
        return found

    def owner(self, path: HolderPath) -> Owner | None:
        """Whose attribute holds what is at that path; None where it is a variable's."""
        return next((holding.owner for holding in self._holdings.values() if holding.path == path), None)

    def frees_bytes(self, path: HolderPath, *, graphs: bool) -> int:
        """What is gone when the variable at that path lets go of all, or of the graphs alone: what no other root leads to."""
        held = (block for block in self.beside(path) if not block.died and (not graphs or self.of(block).path.through_graph))
        return size_of(block for block in held if not self.of(block).others)

    def beside(self, path: HolderPath) -> list[Block]:
        """All that the variable at that path holds, and what is in the graphs that it keeps."""
        return [block for block in self._wanted.values() if self.of(block).path.collection == path.collection]

    def are_slices(self, blocks: Collection[Block]) -> bool:
        """Whether most of them are held only for a part of each."""
        return 2 * size_of(block for block in blocks if self.of(block).is_sliced) > size_of(blocks)

    def have_history(self, blocks: Iterable[Block]) -> bool:
        """Whether some are held with the graph that made them."""
        return any(self.of(block).has_history for block in blocks)

    def of(self, block: Block) -> Holding:
        """With an empty path where no name leads to it."""
        return self._holdings.get(id(block), _NOBODY)


def holders(keepers: Keepers, blocks: Iterable[Block]) -> tuple[Holder, ...]:
    """A row for each variable that holds some of the blocks, the most bytes first."""
    rows = []
    for variable, kept in keepers.by_holder(blocks, lambda path: path.root).items():
        path = keepers.of(min(kept, key=lambda block: block.born)).path
        if len(kept) > 1 and not any(category(block) in {ACTIVATION, OTHER, TEMPORARY} for block in kept):
            path = HolderPath(variable)  # a model or an optimizer, as a whole
        place = max(kept, key=lambda block: block.bytes).place
        made_at = None if place is None else place.location
        rows.append(Holder(path=str(path), variable=variable, live_bytes=size_of(kept), location=made_at))
    return tuple(sorted(rows, key=lambda row: -row.live_bytes)[:_SHOWN])


class KeepingLines:
    """Finds the line that stores something, in the user's cells and files, each of which is read once."""

    def __init__(self, files: Iterable[str]) -> None:
        compiler = getattr(running_shell(), "compile", None)
        cells = [name for name in getattr(compiler, "_filename_map", {}) if isinstance(name, str)]
        self._files = list(dict.fromkeys([*reversed(cells), *files]))
        self._puts: dict[str, list[_Put]] = {}

    def of(self, path: HolderPath, owner: Owner | None, *, adds_up: bool = False) -> Location | None:
        """Where what is at that path gets what it keeps; `adds_up`: by joining it with what it was, and not beside it."""
        if owner is None:
            inner = path.collection.rpartition(".")[2] if "." in path.collection else ""
            written = self.best(f".{inner}", adds_up=adds_up) if inner.isidentifier() else None
            return written or self.best(path.name.partition(".")[0], function=path.function, adds_up=adds_up)
        if owner.is_users:
            key = next((piece for piece in path.pieces if piece.startswith("['")), "")
            files = (*filter(None, [owner.file]), *self._files)
            return self.best(f".{owner.attribute}{key}", owner.type_names, files=files, adds_up=adds_up)
        foreign = self.best(f".{owner.attribute}", owner.type_names, adds_up=adds_up, of_others=True)
        if foreign is not None:
            return foreign
        # Code of a library puts it there: it is given to the object by who calls that.
        before, _, kept_as = "".join((owner.path.name, *(piece for piece in owner.path.pieces if piece[0] != "["))).rpartition(".")
        return self.best(f"{'.' if before else ''}{kept_as}()", function=path.function)

    def call_of(self, names: Collection[str], types: Collection[str] = ()) -> Location | None:
        """Where a function or method with one of these names is called, in a class of these names where there is one."""
        wanted = {f"{name}()!" for name in names}
        puts = [put for file in self._files for put in self._in(file) if put.name in wanted]
        return max(puts, key=lambda put: put.rank(types, "", adds_up=False)).location if puts else None

    def hooked_anew(self) -> tuple[Location, str, tuple[Edit, ...]] | None:
        """Where a loop makes an object that registers hooks, of nothing that the loop gives; the fix, and its edits: once, before it."""
        trees = [(file, tree) for file in self._files if (tree := tree_of(file)) is not None]
        classes = [node for _, tree in trees for node in nodes(ast.ClassDef, tree)]
        hooking = {node.name for node in classes if any(_HOOKS.match(method(call)) for call in nodes(ast.Call, node))}
        hooking |= {node.name for node in classes if any(called(call) in hooking for call in nodes(ast.Call, node))}
        loops = [(file, tree, node) for file, tree in trees for node in ast.walk(tree) if isinstance(node, LOOPS)]
        for file, tree, loop in loops:
            for made in (node for node in loop.body if isinstance(node, ast.Assign) and called(node.value) in hooking):
                names = syntax.bound_names(made)
                if not (syntax.bound_names(loop) - names).isdisjoint(syntax.read_names(made)):
                    continue
                where = location(file, made.lineno, "<module>")
                source = Source(where, tree)
                edits = [source.replacing(made, ""), source.before(loop, source.text(made))]
                for deleted in (node for node in loop.body if isinstance(node, ast.Delete)):
                    left = [ast.unparse(target) for target in deleted.targets if dotted(target) not in names]
                    edits.append(source.replacing(deleted, f"del {', '.join(left)}" if left else ""))
                why = "each one registers hooks, which stay on the model"
                return where, f"move `{ast.unparse(made)}` above the loop: {why}", source.merged(edits)
        return None

    def only_addition(self) -> Location | None:
        """The only statement that adds to a tensor in place: ``total.add_(loss)``."""
        made = [
            location(file, node.lineno, "<module>")
            for file in self._files
            for node in nodes(ast.Expr, tree_of(file))
            if adds_in_place(ast.unparse(node))
        ]
        return made[0] if len(made) == 1 else None

    def in_function(self, name: str) -> Location | None:
        """Where a function of that name makes an attribute of its object larger."""
        found = (put for file in self._files for put in self._in(file) if put.around.function == name and put.is_own and put.grows)
        return next((put.location for put in found), None)

    def best(
        self,
        name: str,
        types: Collection[str] = (),
        *,
        function: str = "",
        files: Iterable[str] = (),
        adds_up: bool = False,
        of_others: bool = False,
    ) -> Location | None:
        """Where what has that name, such as ``losses`` or ``.sum``, gets something.

        `of_others`: the attribute is one of a library's object, and no class of the user's sets its own.
        """
        if not name.strip(".()"):
            return None
        name, bracket, key = name.partition("[")
        puts = (put for file in dict.fromkeys(files or self._files) for put in reversed(self._in(file)))
        found = [put for put in puts if put.name == name and not put.is_initial and not (of_others and put.is_own)]
        found = [put for put in found if bracket and f"{name}[{key}" in ast.unparse(put.node)] or found
        # Of equals the last of the latest cell: what begins stands before what goes on.
        return max(found, key=lambda put: put.rank(types, function, adds_up=adds_up)).location if found else None

    def _in(self, file: str) -> list[_Put]:
        if file not in self._puts:
            self._puts[file] = list(_walk(tree_of(file) or ast.Module(body=[], type_ignores=[]), _Around(file)))
        return self._puts[file]


class _Around(NamedTuple):
    """What a statement is written in."""

    file: str
    kind: str = ""
    function: str = ""
    in_loop: bool = False


class _Put(NamedTuple):
    """A statement that puts something into what has that name."""

    name: str
    node: ast.stmt | ast.expr
    around: _Around
    adds: bool = False
    """To what it was."""
    is_put: bool = False
    """Beside what is there."""
    is_initial: bool = False

    @property
    def grows(self) -> bool:
        """Whether it keeps what was there."""
        return self.adds or self.is_put

    @property
    def is_own(self) -> bool:
        """Whether it is an attribute of ``self``."""
        return self.name.startswith(".") and any(dotted(node) == f"self{self.name}" for node in nodes(ast.Attribute, self.node))

    @property
    def location(self) -> Location:
        """Where it stands."""
        return location(self.around.file, self.node.lineno, self.around.function)

    def rank(self, types: Collection[str], function: str, *, adds_up: bool) -> int:
        """How well it fits an owner of these types, or a variable of that function."""
        fits = self.around.kind in types if types else self.around.function == function
        return _GROWS * self.grows + _FITS * fits + _AS_WANTED * (self.adds or not adds_up) + self.around.in_loop


def _walk(node: ast.AST, around: _Around) -> Iterator[_Put]:
    for child in ast.iter_child_nodes(node):
        inside = around
        if isinstance(child, ast.ClassDef):
            inside = _Around(around.file, child.name)
        elif isinstance(child, FUNCTIONS):
            inside = around._replace(function=child.name, in_loop=False)
        elif isinstance(child, (*LOOPS, ast.comprehension)):
            inside = around._replace(in_loop=True)
        yield from _puts(child, inside)
        yield from _walk(child, inside)


def _puts(node: ast.AST, around: _Around) -> Iterator[_Put]:
    if isinstance(node, ast.AugAssign):
        yield from (_Put(name, node, around, adds=True) for name in _names(node.target))
    elif isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
        read = {name for node in nodes(ast.expr, node.value) for name in _names(node)}
        is_empty = _is_empty(node.value)  # `losses["total"] = 0` keeps nothing of a step
        for part in targets_of(node):
            is_part = isinstance(part, ast.Subscript)
            for name in _names(part):
                yield _Put(name, node, around, name in read, is_put=is_part and not is_empty, is_initial=is_empty and not is_part)
    elif isinstance(node, ast.Call):
        function = node.func
        if method(node) in _PUTS and isinstance(function, ast.Attribute):
            yield from (_Put(name, node, around, is_put=True) for name in _names(function.value))
        yield _Put(f"{called(node)}()!", node, around)
        given = function.value if isinstance(function, ast.Attribute) and function.attr not in _ASKS else function
        if node.args or node.keywords:
            yield from (_Put(f"{name}()", node, around) for name in _names(given))


def _names(target: ast.expr) -> list[str]:
    """``losses`` for ``losses['a'][0]``; ``.sum`` for ``self.sum``."""
    while isinstance(target, (ast.Subscript, ast.Starred)):
        target = target.value
    name = last_name(target)
    return [f".{name}" if isinstance(target, ast.Attribute) else name] if name else []


def _is_empty(value: ast.expr) -> bool:
    """Whether it only begins with that: nothing, a number, an empty list, a new object made of nothing."""
    if isinstance(value, (ast.List, ast.Tuple, ast.Set)):
        return all(_is_empty(elt) for elt in value.elts)
    if isinstance(value, ast.Dict):
        return not value.keys
    if isinstance(value, ast.Call):
        is_new = not method(value) or dotted(value.func).rpartition(".")[0] in _MODULES
        return called(value) in _CONTAINERS or (is_new and bool(value.args) and all(map(_is_empty, value.args)))
    return isinstance(value, ast.Constant)


_HIDDEN = ("Out", "sys.last", "InteractiveTB", "last_execution_result", "weakref.finalize")
"""How the label of a root begins that one does not see among the variables."""


class Deletions:
    """The names that the running cell deletes, and what those stand for that are there before it."""

    def __init__(self, frame: FrameType | None) -> None:
        self._file = "" if frame is None else frame.f_code.co_filename
        names = (node for node in syntax.own_nodes(tree_of(self._file)) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Del))
        self._lines = {node.id: node.lineno for node in names} if self._file else {}
        space: dict[str, Any] = {} if frame is None else frame.f_globals
        self._names = space if self._lines else {}
        self._before = {name: [weakref.ref(storage) for storage in _storages_of(space[name])] for name in self._lines if name in space}

    def found(self, made: Sequence[Block], keepers: Keepers, peak_bytes: int) -> Undeleted | None:
        """What is still there of one of them; of those that came and went in the cell, a model's that only something unseen holds."""
        gone = {name: line for name, line in self._lines.items() if name not in self._names}
        self._names = {}
        for name in gone.keys() & self._before.keys():
            alive = {one._cdata: one.nbytes() for ref in self._before[name] if (one := ref()) is not None}
            held = find_holders(alive)
            path = next((held.paths[key] for key in sorted(alive, key=lambda key: -alive[key]) if key in held.paths), NOWHERE)
            if sum(alive.values()) >= _LEAST_BYTES and path:
                return self._of(name, gone[name], sum(alive.values()), path)
        hidden = [block for block in made if block.role == PARAMETER and _is_hidden(keepers.of(block).path)]
        size_bytes = sum(block.bytes for block in hidden)
        made_here = [name for name in gone if name not in self._before]
        if not made_here or size_bytes < max(_LEAST_BYTES, _LARGE_PART * peak_bytes):
            return None
        path = keepers.of(max(hidden, key=lambda block: block.bytes)).path
        return self._of(made_here[0], gone[made_here[0]], size_bytes, path)

    def _of(self, name: str, line: int, size_bytes: int, path: HolderPath) -> Undeleted:
        known = fix(path, Cause(keeps_graph=False, trains=False)) if _is_hidden(path) else ""
        if path.in_function_cache:
            known = (
                "give each object its own cache, or clear it before the `del` with `cache_clear()`: "
                "a cache on a method keeps `self` in its keys"
            )
        return Undeleted(
            name=name,
            location=location(self._file, line, ""),
            live_bytes=size_bytes,
            holder=str(path),
            fix=known or f"also delete what holds it: `del {path.root}`",
        )


def _is_hidden(path: HolderPath) -> bool:
    return path.in_function_cache or path.through_hook or path.label.startswith(_HIDDEN)


def _storages_of(value: object) -> list[torch.UntypedStorage]:
    known = [*value.parameters(), *value.buffers()] if isinstance(value, torch.nn.Module) else tensors_in(value)
    return [storage for tensor in known for storage in storages(tensor)]


class HandledErrors:
    """Looks, where a model is called while an error is handled, at what nothing but that error holds."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._looks = 0
        self._latest = 0
        """The id of the error that was looked at."""
        self._most: Undeleted | None = None

    def look(self) -> None:
        """A model is called."""
        error = sys.exc_info()[1]
        if error is None or id(error) == self._latest or self._looks == _MOST_LOOKS:
            return
        self._latest, self._looks = id(error), self._looks + 1
        raised = {id(frame) for frame, _ in traceback.walk_tb(error.__traceback__)}
        # The call of the user's that handles it: the innermost that runs and that it came by.
        frame = next((frame for frame in frames_above(sys._getframe()) if id(frame) in raised and is_user_code(frame.f_code)), None)
        if frame is None:
            return
        self._ledger.settle()
        sizes = {block.ref.key: block.bytes for block in self._ledger.live.values() if block.ref is not None}
        of_error = {root.label for root in roots() if root.value is error}
        held = find_holders(sizes)
        only = {key: holding.path for key, holding in held.holdings.items() if of_error.issuperset((holding.root, *holding.others))}
        size_bytes = sum(sizes[key] for key in only) if held.is_whole else 0
        if size_bytes >= max(_LEAST_BYTES, 0 if self._most is None else self._most.live_bytes + 1):
            path = only[max(only, key=lambda key: sizes[key])]
            self._most = Undeleted(name="", location=locate(frame), live_bytes=size_bytes, holder=str(path), fix=_FIX)

    def found(self, peak_bytes: int) -> Undeleted | None:
        """What a retry found held, where it is much of what there was."""
        return self._most if self._most is not None and self._most.live_bytes >= _LARGE_PART * peak_bytes else None
