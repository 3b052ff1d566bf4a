"""The user's own expression that failed, and how it reads with an operand changed."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType, FrameType, MappingProxyType, TracebackType
from typing import Any

import torch

from torchdebug_magics.probing.source.syntax import (
    as_atom,
    dotted,
    exchanged,
    expression,
    expressions,
    nodes,
    span_of,
    statement_at,
    tree_of,
)
from torchdebug_magics.probing.source.user_code import local_values, owner, span

_SIGNS: dict[type[ast.operator], str] = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.MatMult: "@"}
_LONGEST = 60
"""Characters up to which an expression stands for a tensor's name."""


@dataclass(frozen=True, eq=False)
class EditSite:
    """One expression in one line of the user's, as it ran."""

    code: CodeType
    instruction: int
    line: int
    statement: ast.stmt | None
    expression: ast.AST | None
    """The call, operator or subscript that failed; None where it is unknown."""
    names: Mapping[str, Any]
    """The user's variables at that moment."""

    @property
    def text(self) -> str:
        """The failing expression."""
        return "" if self.expression is None else ast.unparse(self.expression)

    def operand_text(self, at: int, tensor: torch.Tensor, *, direct: bool) -> str:
        """What the user calls a tensor here: a variable that holds it, or the text of the operand where the expression takes it."""
        node = self.operand_node(at, tensor, direct=direct)
        if node is not None:
            text = ast.unparse(node)
            return text if len(text) <= _LONGEST else ""
        return next((name for name, value in self.names.items() if value is tensor and name.isidentifier()), "")

    def operand_node(self, at: int, tensor: torch.Tensor, *, direct: bool) -> ast.expr | None:
        """The part of the expression that is this operand."""
        nodes = self._operands()
        for node in (*nodes[at : at + 1], *nodes):  # the same tensor may have two names
            if isinstance(node, ast.Name) and self.names.get(node.id) is tensor:
                return node
        operand = nodes[at] if direct and at < len(nodes) else None
        return None if isinstance(operand, ast.Name) and operand.id in self.names else operand  # else it holds another tensor

    def changed(self, node: ast.expr, text: Callable[[str], str]) -> str:
        """The expression with one operand changed."""
        assert self.expression is not None
        whole = self.expression
        if isinstance(whole, ast.AugAssign) and node is whole.target:
            return f"{ast.unparse(node)} = {text(ast.unparse(node))} {_SIGNS.get(type(whole.op), '+')} {ast.unparse(whole.value)}"
        new, place = expression(text(as_atom(node))), span_of(node)
        return ast.unparse(exchanged(whole, lambda part: new if type(part) is type(node) and span_of(part) == place else None))

    def assigns_over(self, name: str) -> bool:
        """Whether nothing after this line reads the variable as it is now: it is given anew, or returned from."""
        targets = self.statement.targets if isinstance(self.statement, ast.Assign) else []
        return isinstance(self.statement, ast.Return) or name in map(dotted, targets)

    def _operands(self) -> list[ast.expr]:
        node = self.expression
        match node:
            case ast.BinOp(left, _, right):
                return [side for side in (left, right) if not isinstance(side, ast.Constant)]
            case ast.AugAssign(target, _, value):
                return [target, value]
            case ast.Compare(left, _, others):
                return [left, *others]
            case ast.Subscript(value, part):
                return [value, *_spread([part])]
            case ast.Call(_, args, keywords):
                return list(_spread([*self._receiver(node), *args, *(keyword.value for keyword in keywords)]))
        return []

    def _receiver(self, node: ast.Call) -> list[ast.expr]:
        """The tensor whose method is called."""
        if not isinstance(node.func, ast.Attribute):
            return []
        root, *path = dotted(node.func).split(".")
        value = self.names.get(root)
        if isinstance(value, torch.nn.Module):
            for name in path:
                value = getattr(value, name, None)
            return [] if isinstance(value, torch.nn.Module) or value is None else [node.func.value]
        return [node.func.value] if not root or isinstance(value, torch.Tensor) else []


@dataclass(frozen=True, eq=False)
class Caller:
    """The user's call of a model, and what stands in it for each of the forward's parameters."""

    site: EditSite
    nodes: Mapping[str, ast.expr]

    def changed(self, name: str, text: Callable[[str], str]) -> str:
        """The call with one argument changed; empty where it does not name that."""
        return self.site.changed(self.nodes[name], text) if name in self.nodes else ""


def caller_of(site: EditSite, names: Sequence[str]) -> Caller | None:
    """From a call with arguments for the parameters of these names, in their order; None where they cannot be distinguished."""
    call = site.expression
    if not isinstance(call, ast.Call) or len(call.args) != len(names) or any(isinstance(argument, ast.Starred) for argument in call.args):
        return None
    options = {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg is not None}
    return Caller(site, {**dict(zip(names, call.args, strict=True)), **options})


def traces(error: BaseException) -> Iterator[TracebackType]:
    """The entries of a traceback, the outermost first."""
    trace = error.__traceback__
    while trace is not None:
        yield trace
        trace = trace.tb_next


def site_of(error: BaseException) -> tuple[EditSite | None, int]:
    """(the innermost line of the user's, how many frames lead to it); None where code of a library lies below it, or none is the user's."""
    innermost: tuple[TracebackType, int] | None = None
    depth = 0
    for depth, trace in enumerate(traces(error), 1):
        kind = owner(trace.tb_frame.f_code.co_filename)
        innermost = (trace, depth) if kind == "user" else None if kind == "library" else innermost
    if innermost is None:
        return None, depth
    trace, depth = innermost
    return site_at(trace.tb_frame.f_code, trace.tb_lineno, trace.tb_lasti, dict(trace.tb_frame.f_locals)), depth


def site_at(code: CodeType, line: int, instruction: int, names: Mapping[str, Any] = MappingProxyType({})) -> EditSite:
    """A line that ran before: what its variables held is not known any more, save where `names` says it."""
    tree, place = tree_of(code.co_filename), span(code, instruction)
    node = None if tree is None or place is None else expressions(tree).get(place)
    return EditSite(code, instruction, line, statement_at(tree, line), node, names)


def site_in(frame: FrameType) -> EditSite:
    """The expression that runs now."""
    return site_at(frame.f_code, frame.f_lineno or frame.f_code.co_firstlineno, frame.f_lasti, local_values(frame))


def assignments(site: EditSite, name: str) -> list[ast.Assign]:
    """The lines of the same function, above this one, that give a variable; the last one first."""
    lines = range(site.code.co_firstlineno, site.line + 1)
    above = (node for node in nodes(ast.Assign, tree_of(site.code.co_filename)) if node.lineno in lines)
    return sorted((node for node in above if [dotted(target) for target in node.targets] == [name]), key=lambda node: -node.lineno)


def _spread(nodes: list[ast.expr]) -> Iterator[ast.expr]:
    for node in nodes:
        if isinstance(node, (ast.List, ast.Tuple)):
            yield from _spread(node.elts)
        elif not isinstance(node, (ast.Constant, ast.Slice, ast.JoinedStr)):
            yield node
