"""What is the same in two runs of one process, and another thing in the next: salted hashes."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torchdebug_magics.instruments.deterministic.origin.statements import dotted
from torchdebug_magics.instruments.deterministic.report import Potential
from torchdebug_magics.instruments.deterministic.ritual.late import began_with
from torchdebug_magics.probing.where import location

if TYPE_CHECKING:
    from torchdebug_magics.instruments.deterministic.twice.body import Body

__all__ = ["in_other_processes"]

_ORDERED = frozenset({"list", "tuple", "enumerate"})
"""They give an order to what has none."""
_SETTLED = frozenset({"sorted", "set", "frozenset", "len", "sum", "min", "max", "any", "all", "Counter"})
"""Whatever order they are given, they give the same."""
_SALTED = (str, bytes)
_MOST_ITEMS = 1000


def in_other_processes(body: Body) -> tuple[Potential, ...]:
    """A row for each, with the line that draws or asks."""
    is_salted = sys.flags.hash_randomization and not (began_with("PYTHONHASHSEED") or "random").isdigit()
    return tuple(_Salted(body).rows()) if is_salted else ()


class _Salted:
    """Of strings, Python's hashes begin anew with each process, and so does the order of a set of them."""

    def __init__(self, body: Body) -> None:
        self._body = body
        self._held: Mapping[str, Any] = body.left()
        nodes = [node for one in body.statements for node in ast.walk(one)]
        self._nodes = nodes
        inside = (
            inner
            for node in nodes
            if isinstance(node, ast.Call) and _name(node) in _SETTLED
            for one in node.args
            for inner in ast.walk(one)
        )
        self._settled = {id(node) for node in inside}
        self._sorted = {
            dotted(node.func.value)
            for node in nodes
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "sort"
        }
        self._sorted |= {dotted(one) for node in nodes if isinstance(node, ast.Call) and _name(node) == "sorted" for one in node.args}

    def rows(self) -> Iterator[Potential]:
        """Each place that hashes a string, or puts a set of them in an order."""
        for node in self._nodes:
            if id(node) in self._settled:
                continue
            if isinstance(node, ast.Call) and _name(node) == "hash" and len(node.args) == 1 and self._is_text(node.args[0]):
                yield self._row("hash", node.lineno, "`hash()` of a string", "use `zlib.crc32(text.encode())`")
            elif (one := _put_in_order(node)) is not None and self._is_set_of_texts(one) and not self._is_sorted_later(node):
                what = "the order of a set of strings"
                yield self._row("set", one.lineno, what, f"give it an order: `sorted({ast.unparse(one)})`")

    def _row(self, op: str, line: int, what: str, fix: str) -> Potential:
        return Potential(
            op=op,
            module=None,
            location=location(self._body.file, line, "<module>"),
            differed_count=0,
            repetitions_count=0,
            explanation=f"{what} is another one with each start of Python",
            fix=fix,
        )

    def _is_sorted_later(self, node: ast.AST) -> bool:
        """Whether what the statement binds is sorted somewhere in the cell."""
        bound = [
            dotted(target)
            for one in self._nodes
            if isinstance(one, ast.Assign) and any(inner is node for inner in ast.walk(one.value))
            for target in one.targets
        ]
        return bool(self._sorted & set(filter(None, bound)))

    def _is_text(self, node: ast.expr) -> bool:
        if isinstance(node, (ast.Constant, ast.JoinedStr)):
            return isinstance(node, ast.JoinedStr) or isinstance(node.value, _SALTED)
        return isinstance(self._value(node), _SALTED)

    def _is_set_of_texts(self, node: ast.expr) -> bool:
        if isinstance(node, ast.Set):
            return len(node.elts) > 1 and all(map(self._is_text, node.elts))
        if isinstance(node, ast.Call) and _name(node) in {"set", "frozenset"} and len(node.args) == 1:
            return _has_texts(self._value(node.args[0]))
        value = self._value(node)
        return isinstance(value, (set, frozenset)) and _has_texts(value)

    def _value(self, node: ast.expr) -> Any:
        """Of a plain name, as the run has left it."""
        return self._held.get(node.id) if isinstance(node, ast.Name) else None


def _put_in_order(node: ast.AST) -> ast.expr | None:
    """What has no order of its own, perhaps, where the node gives it one."""
    if isinstance(node, ast.ListComp):
        return node.generators[0].iter
    return node.args[0] if isinstance(node, ast.Call) and _name(node) in _ORDERED and len(node.args) == 1 else None


def _name(node: ast.Call) -> str:
    return node.func.id if isinstance(node.func, ast.Name) else ""


def _has_texts(value: Any) -> bool:
    """Whether it holds two different ones."""
    if type(value) not in {list, tuple, dict, set, frozenset}:
        return False
    return len({one for one in list(value)[:_MOST_ITEMS] if isinstance(one, _SALTED)}) > 1
