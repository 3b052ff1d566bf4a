"""The statements of a step, from the model call to `backward()`, as code that runs on its own, once more, and says nothing to anybody."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from inspect import CO_OPTIMIZED
from itertools import dropwhile, takewhile
from types import CodeType, FrameType, MappingProxyType
from typing import Any

import torch

from torchdebug_magics.instruments.nanhunt.rerun.attempt import Position, names_seen, refuse, span_at
from torchdebug_magics.instruments.nanhunt.rerun.step_recorder import Batches, Step
from torchdebug_magics.probing.source.syntax import (
    FILLING,
    SIMPLE,
    backward_slice,
    bound_names,
    copied,
    covers,
    dotted,
    exchanged,
    lists_around,
    makes,
    method,
    names_in,
    nodes,
    read_before_bound,
    root_of,
    tree_of,
    writes_into,
)
from torchdebug_magics.probing.source.user_code import adopt_timed, owner
from torchdebug_magics.probing.tensors import is_bad, tensors_in

_NO_SOURCE = "the source of the step is not at hand"


@dataclass(frozen=True)
class Slice:
    """Code to execute, and the names it runs with."""

    code: CodeType
    names: dict[str, Any]
    statements: tuple[ast.stmt, ...]
    made: dict[str, Any]
    """What the variables that the step binds held at its end."""


def cut(
    step: Step, sink: tuple[Position, ...], wanted: str = "", held: Mapping[str, Any] = MappingProxyType({}), *, graphs: bool = True
) -> Slice:
    """The slice of the deepest frame that stands both in the step's first model call and in its `backward()`.

    Without a model call: the statements before `backward()` that the loss depends on. `wanted` names a variable whose making, before
    the model call, is to be run again, too, as is with `graphs` that of each variable with a graph; `held` says what variables held before.
    """
    adopt_timed(position.frame for position in sink)
    if step.entries:
        start, end = _common(step, sink)
        body, first, last = _statements(start, end)
        statements, now = body[first : last + 1], names_seen(end.frame)
        early = dict(step.live_in.get(id(start.frame), {}))
        # What is filled in the step must begin empty again; a backward() goes on into what made a variable with a graph.
        free = read_before_bound(statements) - early.keys() if graphs else set()
        with_graph = {name for name in free if isinstance(value := now.get(name), torch.Tensor) and value.grad_fn is not None}
        remade = ({wanted} - {""}) | written_into(statements) | with_graph
        before, _ = makers(_ahead(start, body)[0], remade, frozenset(held))
        early.update(held)
    else:
        files = ((position, position.frame.f_code.co_filename) for position in sink)
        ends = (position for position, file in files if owner(file) in {"user", "library"} and tree_of(file) is not None)
        end = next(ends, None) or refuse(_NO_SOURCE)
        before, statements, now = [], _dependencies(end), names_seen(end.frame)
        early = {}
    together = [*before, *statements]
    code, given = runnable(together, end.frame, end.line, now)
    made = {name: now[name] for name in bound_names(*statements) & now.keys()}
    return Slice(code, {**now, **early, **given}, tuple(together), made)


def overwritten(step: Step, sink: tuple[Position, ...], wanted: str, batches: Batches) -> list[dict[str, Any]]:
    """Where `wanted` was made of something that it was written over: what that may have been, for `held` of `cut`."""
    start, end = _common(step, sink)
    ahead, loop = _ahead(start, _statements(start, end)[0])
    gone = makers(ahead, {wanted})[1]
    target = drawn_by(ahead, gone) or (loop.target if isinstance(loop, (ast.For, ast.AsyncFor)) else None)
    return [*batches.bound_by(target, gone)] if gone and target is not None else []


def _ahead(start: Position, body: list[ast.stmt]) -> tuple[list[ast.stmt], ast.stmt | None]:
    """All statements before the model call, back to the start of the innermost loop, also those before a `with` that holds it; the loop."""
    ahead: list[ast.stmt] = []
    for inner, place in dropwhile(lambda one: one[0] is not body, _lists(start)):
        if inner is not body and isinstance(inner[place], (ast.For, ast.AsyncFor, ast.While)):
            return ahead, inner[place]
        ahead = [*inner[:place], *ahead]
    return ahead, None


def _common(step: Step, sink: tuple[Position, ...]) -> tuple[Position, Position]:
    pairs = [(start, end) for start in step.chain for end in sink if start.frame is end.frame]
    pairs += [(start, end) for start in step.chain[-1:] for end in sink if _one_cell(start.frame, end.frame)]
    return pairs[0] if pairs else refuse("the model call and backward() share no running function")


def _one_cell(one: FrameType, other: FrameType) -> bool:
    """Whether two frames run top-level statements of the same cell: IPython compiles each of those by itself."""
    return (
        one.f_globals is other.f_globals
        and one.f_code.co_filename == other.f_code.co_filename
        and not (one.f_code.co_flags | other.f_code.co_flags) & CO_OPTIMIZED
    )


def _lists(position: Position) -> list[tuple[list[ast.stmt], int]]:
    tree = tree_of(position.frame.f_code.co_filename)
    return refuse(_NO_SOURCE) if tree is None else lists_around(tree, span_at((position.frame.f_code, position.instruction)))


def _statements(start: Position, end: Position) -> tuple[list[ast.stmt], int, int]:
    ends = {id(body): place for body, place in _lists(end)}
    for body, first in _lists(start):
        last = ends.get(id(body))
        if last is not None:
            return (body, first, last) if last >= first else refuse("backward() stands before the model call")
    return refuse("no statements hold both the model call and backward()")


def _dependencies(end: Position) -> list[ast.stmt]:
    """The statements that `backward()` needs, back to the start of the innermost list, without those nothing depends on."""
    lists = _lists(end)
    if not lists:
        refuse(_NO_SOURCE)
    body, last = lists[0]
    undrawn = [*takewhile(lambda statement: not draws(statement), reversed(body[:last]))][::-1]
    made, lost = makers(undrawn, read_before_bound([body[last]]))
    kept = [*made, body[last]]
    if not isinstance(body[last], SIMPLE):
        lost |= read_before_bound(kept) & bound_names(body[last])  # a simple one binds its own names after the backward()
    if lost:
        refuse(f"the earlier value of {', '.join(sorted(lost))} is gone")
    return kept


def values_in(part: Slice | None) -> list[object]:
    """What the names in the statements stand for: all that they can reach begins there."""
    if part is None:
        return []
    return [part.names[name] for name in names_in(*part.statements) & part.names.keys()]


def cut_graphs(part: Slice) -> dict[int, torch.Tensor]:
    """Variables whose graph was made before the statements, and is gone since the backward(): leaves in their place."""
    cut: dict[int, torch.Tensor] = {}
    for name in read_before_bound(list(part.statements)):
        value = part.names.get(name)
        if isinstance(value, torch.Tensor) and value.grad_fn is not None:
            leaf = part.names[name] = value.detach().requires_grad_()
            cut[id(leaf)] = leaf
    return cut


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


_REPORTING = frozenset({
    "append", "appendleft", "extend", "add", "update", "insert", "put", "push", "write", "writelines", "record", "observe", "tick",
    "log", "log_dict", "debug", "info", "warning", "error", "add_scalar", "add_scalars", "display", "set_postfix", "set_description",
    "zero_grad", "step",
})  # fmt: skip
"""Methods that a statement calls to tell somebody something; the step's numbers do not come from them."""
_ONCE = "_torchdebug_once"
NEXT, ITERATE, GET, DRAWN = "_torchdebug_next", "_torchdebug_iterate", "_torchdebug_get", "_torchdebug_drawn_"


def runnable(
    statements: list[ast.stmt], frame: FrameType, last_line: int, now: Mapping[str, Any], wanted: Collection[str] = ()
) -> tuple[CodeType, dict[str, Any]]:
    """Their code, and what else it must be given by name. `last_line` is that of the call which ends the step; `now`: the variables.

    What the statements tell the objects in `wanted` is no mere report.
    """
    if any(isinstance(node, (ast.Await, ast.Yield, ast.YieldFrom, ast.AsyncFor, ast.AsyncWith)) for node in nodes(ast.AST, *statements)):
        refuse("the step awaits or yields")
    edit = _Edit(frame, last_line, used(statements).union(wanted))
    drawn = _drawn(statements, now, last_line)
    copies: list[ast.stmt] = []
    for statement in statements:
        name = _drawn_name(statement)
        known = ast.Assign([ast.Name(name, ast.Store())], ast.Name(f"{DRAWN}{name}", ast.Load()), None)
        copies.append(ast.copy_location(known, statement) if name in drawn else edit.visit(copied(statement)))
    # In a loop of one round, `continue` and `break` of the loop around the step have somewhere to go.
    once = ast.For(ast.Name(_ONCE, ast.Store()), ast.Tuple([ast.Constant(0)], ast.Load()), copies, [], None)
    module = ast.fix_missing_locations(ast.Module([ast.copy_location(once, statements[0])], []))
    code = compile(module, frame.f_code.co_filename, "exec", dont_inherit=True)
    return code, {**STAND_INS, **{f"{DRAWN}{name}": value for name, value in drawn.items()}}


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


def _drawn(statements: list[ast.stmt], now: Mapping[str, Any], last_line: int) -> dict[str, Any]:
    """Variables that hold what the step took from an iterator, a queue or a file: ``scale = next(scales)`` is not run again.

    Only where the variable still holds it: bound once in the step, at its top level, and not written into. A tensor in a graph, or
    with a NaN, must be made again to be traced.
    """
    bound = Counter(node.id for node in nodes(ast.Name, *statements) if not isinstance(node.ctx, ast.Load))
    names = [_drawn_name(statement) for statement in statements if not covers(statement, last_line)]
    still = [name for name in names if bound[name] == 1 and name in now and not any(writes_into(one, {name}) for one in statements)]
    is_made = {name: any(tensor.grad_fn is not None or is_bad(tensor) for tensor in tensors_in(now[name])) for name in still}
    return {name: now[name] for name in still if not is_made[name]}


def _drawn_name(statement: ast.stmt) -> str:
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
