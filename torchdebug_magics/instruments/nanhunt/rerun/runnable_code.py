"""Which statements belong to a step, and these edited into code that runs on its own, once more, and says nothing to anybody."""

from __future__ import annotations

import ast
import copy
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack
from types import CodeType, FrameType
from typing import Any

import torch

from torchdebug_magics.instruments.nanhunt.rerun.attempt import refuse
from torchdebug_magics.probing.hooks import Hooks
from torchdebug_magics.probing.source.syntax import (
    FILLING,
    backward_slice,
    bound_names,
    covers,
    dotted,
    exchanged,
    makes,
    method,
    names_in,
    nodes,
    read_before_bound,
    root_of,
    writes_into,
)
from torchdebug_magics.probing.tensors import is_bad, tensors_in

_TAKING = frozenset({"get", "get_nowait", "pop", "popleft", "popitem", "readline", "recv"})


def makers(before: list[ast.stmt], wanted: set[str], known: frozenset[str] = frozenset()) -> tuple[list[ast.stmt], frozenset[str]]:
    """The statements that made some variables, none that takes from an iterator; and what is gone of what they read, nor is `known`."""
    return backward_slice(before, wanted, lambda one: not draws(one), lambda one, names: makes(one, names) or is_given(one, names), known)


def drawn_by(before: list[ast.stmt], names: frozenset[str]) -> ast.expr | None:
    """``x, y`` of the last ``x, y = next(batches)`` that binds one of `names`."""
    made = nodes(ast.Assign, *reversed(before))
    return next((one.targets[0] for one in made if draws(one) and bound_names(one) & names), None)


def written_into(statements: list[ast.stmt]) -> set[str]:
    """Names of lists, dicts and tensors from before the statements that these fill, and read."""
    free = read_before_bound(statements)
    return {name for name in free if any(writes_into(statement, {name}) for statement in statements)} & used(statements)


def used(statements: list[ast.stmt]) -> set[str]:
    """Names that are read for their value, not only told something."""
    calls = (node.value for node in nodes(ast.Expr, *statements) if isinstance(node.value, ast.Call))
    told = {id(call.func.value) for call in calls if isinstance(call.func, ast.Attribute)}
    return {node.id for node in nodes(ast.Name, *statements) if isinstance(node.ctx, ast.Load) and id(node) not in told}


def is_given(statement: ast.stmt, names: set[str]) -> bool:
    """``fill(h, x)`` and ``torch.div(h, y, out=h)``, whose value nobody takes, were called for what they do to their arguments."""
    if not isinstance(statement, ast.Expr) or not isinstance(statement.value, ast.Call):
        return False
    given = (*statement.value.args, *(keyword.value for keyword in statement.value.keywords))
    return any(dotted(one) in names for one in given)


def draws(statement: ast.stmt) -> bool:
    """Whether anything in it is taken from an iterator."""
    return "next" in names_in(statement)


def takes(value: ast.expr) -> bool:
    """``next(batches)``, ``queue.get()``: the same call gives another value the second time."""
    return method(value) in _TAKING or (isinstance(value, ast.Call) and dotted(value.func) == "next")


class Batches:
    """The batch that each running `DataLoader` gave last, which it does not keep itself; until it is asked for the next one."""

    def __init__(self) -> None:
        self._last: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()

    def attach(self, stack: ExitStack, hooks: Hooks) -> None:
        """Keep them until the stack closes."""
        stack.callback(self._last.clear)
        hooks.loader_batches(stack, self._around)

    def bound_by(self, target: ast.expr, names: frozenset[str]) -> Iterator[dict[str, Any]]:
        """What a loop's target, or a part of it, may have bound some names to: which loader is the loop's nobody says."""
        for batch in self._last.values():
            for part in nodes(ast.expr, target):
                bound = _bound(part, batch)
                if names <= bound.keys():
                    yield {name: bound[name] for name in names}

    def bad_sources(self) -> Iterator[Any]:
        """The data sets that a bad last batch was read from."""
        for iterator, batch in self._last.items():
            if any(map(is_bad, tensors_in(batch))) and hasattr(type(iterator._dataset), "__getitem__"):
                yield iterator._dataset

    def _around(self, original: Any, iterator: Any) -> Any:
        __tracebackhide__ = True
        self._last.pop(iterator, None)
        batch = original(iterator)
        self._last[iterator] = batch
        return batch


def _bound(target: ast.expr, element: Any) -> dict[str, Any]:
    """What the names in a loop's target are bound to by an element; nothing where it does not fit. Asks its type, which cannot fail."""
    if isinstance(target, ast.Name):
        return {target.id: element}
    if not isinstance(target, (ast.Tuple, ast.List)) or not issubclass(type(element), (tuple, list, torch.Tensor)):
        return {}
    if len(target.elts) != len(element):
        return {}
    bound: dict[str, Any] = {}
    for part, value in zip(target.elts, element, strict=True):
        inner = _bound(part, value)
        if not inner:
            return {}
        bound.update(inner)
    return bound


_REPORTING = frozenset({
    "append", "appendleft", "extend", "add", "update", "insert", "put", "push", "write", "writelines", "record", "observe", "tick",
    "log", "log_dict", "debug", "info", "warning", "error", "add_scalar", "add_scalars", "display", "set_postfix", "set_description",
    "zero_grad", "step",
})  # fmt: skip
"""Methods that a statement calls to tell somebody something; the step's numbers do not come from them."""
_ONCE = "_torchdebug_once"
NEXT, ITERATE, GET, DRAWN = "_torchdebug_next", "_torchdebug_iterate", "_torchdebug_get", "_torchdebug_drawn_"


def runnable(
    statements: list[ast.stmt], frame: FrameType, last_line: int, drawn: Drawn, wanted: Collection[str] = ()
) -> tuple[CodeType, dict[str, Any]]:
    """Their code, and what else it must be given by name. `last_line` is that of the call which ends the step.

    What the statements tell the objects in `wanted` is no mere report.
    """
    if any(isinstance(node, (ast.Await, ast.Yield, ast.YieldFrom, ast.AsyncFor, ast.AsyncWith)) for node in nodes(ast.AST, *statements)):
        refuse("the step awaits or yields")
    edit = _Edit(frame, last_line, used(statements).union(wanted))
    copies: list[ast.stmt] = []
    for statement in statements:
        name = drawn.name_in(statement)
        known = ast.Assign([ast.Name(name, ast.Store())], ast.Name(f"{DRAWN}{name}", ast.Load()), None)
        copies.append(ast.copy_location(known, statement) if name else edit.visit(copy.deepcopy(statement)))
    # In a loop of one round, `continue` and `break` of the loop around the step have somewhere to go.
    once = ast.For(ast.Name(_ONCE, ast.Store()), ast.Tuple([ast.Constant(0)], ast.Load()), copies, [], None)
    module = ast.fix_missing_locations(ast.Module([ast.copy_location(once, statements[0])], []))
    code = compile(module, frame.f_code.co_filename, "exec", dont_inherit=True)
    return code, {**STAND_INS, **{f"{DRAWN}{name}": value for name, value in drawn.values.items()}}


class _Edit(ast.NodeTransformer):
    """Makes a statement of a function one that runs on its own, and takes out what only reports."""

    def __init__(self, frame: FrameType, last_line: int, used: set[str]) -> None:
        self._last_line = last_line
        self._used = used
        self._first = frame.f_code.co_varnames[0] if frame.f_code.co_argcount else ""
        parts = frame.f_code.co_qualname.split(".")
        self._class = parts[-2] if len(parts) > 1 and parts[-2].isidentifier() else ""

    def visit(self, node: ast.AST) -> Any:
        if isinstance(node, (ast.Global, ast.Nonlocal, ast.Delete)):
            return ast.copy_location(ast.Pass(), node)
        return node if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) else super().visit(node)

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        inside = self.generic_visit(node)
        is_sink = covers(node, self._last_line)
        changes = (method(node.value) in FILLING or takes(node.value)) and root_of(node.value) in self._used
        is_idle = (_only_reports(node) or takes(node.value)) and not changes
        return ast.copy_location(ast.Pass(), node) if is_idle and not is_sink else inside

    def visit_Return(self, node: ast.Return) -> ast.AST:
        value = self.visit(node.value) if node.value is not None else ast.Constant(None)
        return ast.copy_location(ast.Expr(value), node)

    def visit_For(self, node: ast.For) -> ast.AST:
        self.generic_visit(node)
        node.iter = exchanged(node.iter, _checked)
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if dotted(node.func) == "next":
            return ast.copy_location(ast.Call(ast.Name(NEXT, ast.Load()), [], []), node)
        if isinstance(node.func, ast.Attribute) and node.func.attr == "get":
            node.func = ast.copy_location(ast.Call(ast.Name(GET, ast.Load()), [node.func.value], []), node.func)
        if dotted(node.func) == "super" and not node.args and self._first:
            node.args = [ast.Name("__class__", ast.Load()), ast.Name(self._first, ast.Load())]
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        if self._class and node.attr.startswith("__") and not node.attr.endswith("__"):
            node.attr = f"_{self._class.lstrip('_')}{node.attr}"
        return node


def _checked(node: ast.AST) -> ast.expr | None:
    """Asks a variable that a ``for`` runs over whether it can be run over once more."""
    if not isinstance(node, (ast.Name, ast.Attribute)):
        return None
    return ast.copy_location(ast.Call(ast.Name(ITERATE, ast.Load()), [node], []), node)


def _only_reports(statement: ast.stmt) -> bool:
    """``print(loss)``, ``losses.append(loss.item())``: what is said about the step, not what the step does."""
    if not isinstance(statement, ast.Expr) or not isinstance(statement.value, ast.Call):
        return False
    return method(statement.value) in _REPORTING or dotted(statement.value.func) in {"print", "display"}


class Drawn:
    """Variables that hold what the step took from an iterator, a queue or a file: ``scale = next(scales)`` is not run again.

    Only where the variable still holds it: bound once in the step, at its top level, and not written into. A tensor in a graph, or
    with a NaN, must be made again to be traced.
    """

    def __init__(self, statements: list[ast.stmt], now: Mapping[str, Any], last_line: int) -> None:
        bound = Counter(node.id for node in nodes(ast.Name, *statements) if not isinstance(node.ctx, ast.Load))
        ahead = [statement for statement in statements if not covers(statement, last_line)]
        names = [name for one in ahead if (name := self._drawn(one)) and bound[name] == 1 and name in now]
        self.values = {
            name: now[name]
            for name in names
            if not any(writes_into(statement, {name}) for statement in statements)
            and not any(tensor.grad_fn is not None or is_bad(tensor) for tensor in tensors_in(now[name]))
        }

    def name_in(self, statement: ast.stmt) -> str:
        """The variable that the statement binds, where its value is at hand."""
        name = self._drawn(statement)
        return name if name in self.values else ""

    @staticmethod
    def _drawn(statement: ast.stmt) -> str:
        if not isinstance(statement, ast.Assign) or len(statement.targets) != 1 or not takes(statement.value):
            return ""
        target = statement.targets[0]
        return target.id if isinstance(target, ast.Name) else ""


def _next(*_: Any) -> torch.Tensor:
    """What stands for a value that must not be taken from the user's iterator again; the model gets its recorded arguments anyway."""
    return torch.ones(())


def _iterate(values: Any) -> Any:
    """A variable in the head of a ``for``; an iterator that is already running would lose elements."""
    if hasattr(type(values), "__next__"):
        refuse("the step loops over an iterator that cannot be rewound")
    return values


def _get(owner: Any) -> Callable[..., Any]:
    """The method `get` of a dict, say; that of an empty queue would wait for ever."""
    if hasattr(type(owner), "put"):
        refuse("the step takes from a queue")
    method: Callable[..., Any] = owner.get
    return method


STAND_INS: dict[str, Any] = {NEXT: _next, ITERATE: _iterate, GET: _get}
