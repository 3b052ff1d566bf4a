"""Sets that are given an order: of strings it is another one in each process, of objects in each run. The second run says where."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from types import CodeType, FrameType
from typing import Any, Literal, NamedTuple, TypeAlias

import torch

from torchdebug_magics.instrument import Body
from torchdebug_magics.instruments.deterministic.counterfactual.reachable_state import follow_lines, reached
from torchdebug_magics.instruments.deterministic.report import Dependence
from torchdebug_magics.instruments.deterministic.ritual.status import hash_seed
from torchdebug_magics.probing.source.syntax import called, dotted, method, nodes, targets_of, tree_of
from torchdebug_magics.probing.source.user_code import location
from torchdebug_magics.report import Location

_HOLDING = (list, tuple, dict, set, frozenset)
_MOST_ITEMS = 1000
Kind: TypeAlias = Literal["salted", "address", "object"]
"""Of strings; of tensors or modules; of objects of the user's, whose order matters more rarely."""
How: TypeAlias = Literal["loop", "pop", "hash", "hash of a text", ""]
_ORDERING = frozenset({"list", "tuple", "enumerate", "zip", "map", "iter", "next", "dict", "join", "array", "tensor"})
"""They give an order to what has none."""
_SETTLED = frozenset({"sorted", "set", "frozenset", "len", "sum", "min", "max", "any", "all", "Counter"})
"""Whatever order they are given, they give the same."""
_KEEPING = frozenset({"append", "extend", "insert", "appendleft", "write", "index", "len"})
_PLAIN = frozenset(
    {"print", "set", "str", "int", "float", "isinstance", "abs", "range", "sorted", "min", "max", "any", "all", "hasattr", "getattr"}
)
_OF_SETS = frozenset({"union", "intersection", "difference", "symmetric_difference"})


class Ordering(NamedTuple):
    """Such a place that a run has come to."""

    kind: Kind
    location: Location
    place: OrderingPlace


def on_order(found: Iterable[Ordering]) -> tuple[Dependence, ...]:
    """Of objects; of strings, where Python draws their hashes anew in each process."""
    kinds = {"address", "salted"} if hash_seed() == "random" else {"address"}
    return tuple(dependence_of(one) for one in found if one.place.keeps_order and one.kind in kinds)


def dependence_of(found: Ordering) -> Dependence:
    """In words."""
    text = found.place.text
    if found.place.how.startswith("hash"):
        what, fix = "`hash()` of a string differs in each process", "use `zlib.crc32(text.encode())` instead"
    elif found.kind == "salted":
        what, fix = f"the iteration order of `{text}`, a set of strings, differs in each process", f"use `sorted({text})`"
        if found.place.how == "pop":
            fix = f"replace `{text}.pop()` with `min({text})`, and remove that element"
    else:
        what = f"the iteration order of the set `{text}` depends on object addresses, which differ in each run"
        fix = f"replace the set `{text}` with a list or `dict.fromkeys(...)`"
    return Dependence(on="order", op="", location=found.location, what=what, fix=fix)


class OrderWatch:
    """Looks at values before and after the lines of the user's that give an order to what may be a set, while a run goes on."""

    def __init__(self, body: Body) -> None:
        self.found: dict[tuple[str, int, str], Ordering] = {}
        """Each place once, by file, line and text, in the order in which the run came to them."""
        self._asked = ordering_places(body)
        self._after: dict[FrameType, tuple[int, list[OrderingPlace]]] = {}

    def attach(self, stack: ExitStack) -> None:
        """From here until the stack closes; not where the source has no such place, or a debugger follows the code."""
        if self._asked:
            stack.callback(self._after.clear)
            follow_lines(stack, self._has_places, self._passed)

    def _has_places(self, code: CodeType) -> bool:
        asked = self._asked.get(code.co_filename, {})
        return any(line in asked for _, _, line in code.co_lines())  # the lines of all other functions cost nothing

    def _passed(self, frame: FrameType, event: str) -> None:
        if (before := self._after.pop(frame, None)) is not None:
            self._look(frame, *before)
        here = self._asked[frame.f_code.co_filename].get(frame.f_lineno or 0)
        if event == "line" and here:
            self._look(frame, frame.f_lineno, here)
            self._after[frame] = frame.f_lineno, here

    def _look(self, frame: FrameType, line: int, asked: list[OrderingPlace]) -> None:
        for one in asked:
            key = frame.f_code.co_filename, line, one.text
            held = _held(frame, one.path)
            kind = _kind_of(held) if one.is_set or isinstance(held, (set, frozenset)) else None
            if one.how == "hash of a text":
                kind = "salted"
            elif kind is None and one.is_set:
                kind = _kind_of(made) if (made := _held(frame, one.target)) is None or one.how == "loop" or type(made) in _HOLDING else None
            if kind is not None and key not in self.found and not (one.how == "hash" and kind != "salted"):
                self.found[key] = Ordering(kind, location(key[0], line, frame.f_code.co_name), one)


def _held(frame: FrameType, path: str) -> Any:
    """What a dotted name holds; no code of the user's runs for it."""
    root, *parts = path.split(".")
    value = frame.f_locals.get(root, frame.f_globals.get(root))
    for part in parts:
        value = getattr(value, "__dict__", {}).get(part)
    return value


def _kind_of(value: Any) -> Kind | None:
    if isinstance(value, (str, bytes)):
        return "salted"
    if isinstance(value, dict):
        return _kind_of(list(value)[:_MOST_ITEMS]) or _kind_of(list(value.values())[:_MOST_ITEMS])
    if type(value) not in _HOLDING:
        return "address" if isinstance(value, (torch.Tensor, torch.nn.Module)) else None
    items = list(value)[:_MOST_ITEMS]
    if any(isinstance(item, (torch.Tensor, torch.nn.Module)) for item in items):
        return "address" if len(items) > 1 else None
    if len(items) > 1 and any(vars(object)["__hash__"] is getattr(type(item), "__hash__", None) for item in items):
        return "object"
    flat = [part for item in items for part in (item if isinstance(item, tuple) else (item,))]
    return "salted" if len({part for part in flat if isinstance(part, (str, bytes))}) > 1 else None


class OrderingPlace(NamedTuple):
    """A place in the source that gives an order to what may be a set."""

    text: str
    """What is ordered, as the user writes it."""
    path: str
    """A dotted name whose value tells what is in it; empty where none does."""
    target: str
    """A name that holds what came of it."""
    is_set: bool
    """Whether it is one by what is written."""
    how: How = ""
    """In a loop, the target holds one thing after the other; ``"hash of a text"`` is one by what is written."""
    keeps_order: bool = True
    """Whether what follows is known to keep the order; a loop may come to the same in any."""


def ordering_places(body: Body) -> dict[str, dict[int, list[OrderingPlace]]]:
    """By file and line."""
    files: dict[str, list[ast.stmt]] = {body.file: list(body.statements)}
    for code in reached(body)[1]:
        if code.co_filename not in files and (tree := tree_of(code.co_filename)) is not None:
            files[code.co_filename] = tree.body
    found: dict[str, dict[int, list[OrderingPlace]]] = {}
    for file, statements in files.items():
        for line, one in _places(statements):
            found.setdefault(file, {}).setdefault(line, []).append(one)
    return found


def _places(statements: list[ast.stmt]) -> Iterator[tuple[int, OrderingPlace]]:
    """Those of one file, with their lines."""
    statement_of = {id(node): statement for statement in nodes(ast.stmt, *statements) for node in ast.walk(statement)}  # the innermost
    calls = list(nodes(ast.Call, *statements))
    settled = {id(inner) for node in calls if called(node) in _SETTLED for inner in nodes(ast.AST, *node.args)}
    in_order = {dotted(argument) for node in calls if called(node) == "sorted" for argument in node.args}
    in_order |= {dotted(node.func).removesuffix(".sort") for node in calls if method(node) == "sort"}
    for node in nodes(ast.AST, *statements):
        statement = statement_of.get(id(node))
        target = dotted(next(iter(targets_of(statement)), None))  # the first variable that the statement assigns to
        if statement is None or id(node) in settled or (target and target in in_order):
            continue
        keeps_order = not isinstance(node, (ast.For, ast.DictComp)) or any(map(_keeps_order, ast.walk(node)))
        for one in _ordered(node):
            is_set, path = _is_set(one), dotted(_inside(one))
            if is_set or path:
                how: How = "loop" if isinstance(node, ast.For) else "pop" if method(node) == "pop" else ""
                yield statement.lineno, OrderingPlace(ast.unparse(one), path, target, is_set, how, keeps_order)
        if isinstance(node, ast.Call) and dotted(node.func) == "hash" and len(node.args) == 1:
            argument = node.args[0]
            is_text = isinstance(argument, ast.JoinedStr) or isinstance(getattr(argument, "value", None), (str, bytes))
            how = "hash of a text" if is_text else "hash"
            yield statement.lineno, OrderingPlace(ast.unparse(argument), dotted(argument), "", is_set=True, how=how)


def _ordered(node: ast.AST) -> Iterator[ast.expr]:
    """What the node gives an order."""
    if isinstance(node, ast.For):
        yield node.iter
    elif isinstance(node, (ast.ListComp, ast.GeneratorExp, ast.DictComp)):
        yield from (generator.iter for generator in node.generators)
    elif isinstance(node, ast.Starred):
        yield node.value
    elif isinstance(node, ast.Call) and called(node) in _ORDERING:
        yield from node.args
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "pop" and not node.args:
        yield node.func.value


def _keeps_order(node: ast.AST) -> bool:
    """Whether the body of a loop keeps the order of its turns: by adding to a list, by numbering, or by computing on."""
    if isinstance(node, ast.Call):
        return called(node) in _KEEPING or (isinstance(node.func, ast.Name) and node.func.id not in _PLAIN)
    return isinstance(node, (ast.Yield, ast.YieldFrom))


def _is_set(node: ast.expr) -> bool:
    if isinstance(node, ast.Set):
        return len(node.elts) > 1
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.BitAnd, ast.BitOr, ast.Sub, ast.BitXor)):
        return _is_set(node.left) or _is_set(node.right)
    if method(node) in _OF_SETS:
        return True
    return isinstance(node, ast.SetComp) or (isinstance(node, ast.Call) and called(node) in {"set", "frozenset"} and bool(node.args))


def _inside(node: ast.expr) -> ast.expr:
    """What fills a set: ``labels`` of ``set(labels)``."""
    if isinstance(node, ast.Call) and called(node) in {"set", "frozenset"} and node.args:
        return node.args[0]
    if isinstance(node, ast.BinOp):
        return _inside(node.left)
    return node
