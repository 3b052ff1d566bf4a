"""Tensors that the user's own code makes of given sizes, such as a first hidden state, made with other sizes."""

from __future__ import annotations

import ast
import copy
from typing import TYPE_CHECKING, Any

import torch

from torchdebug_magics.instruments.shapes.repair.edit import Edit, OpEdit
from torchdebug_magics.instruments.shapes.repair.size_history import steps
from torchdebug_magics.instruments.shapes.repair.source import site_at

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torchdebug_magics.instruments.shapes.repair.failure_facts import Facts, Operand, Sizes

__all__ = ["FACTORIES", "created"]

FACTORIES = frozenset(["zeros", "ones", "empty", "rand", "randn", "new_zeros", "new_ones", "new_empty"])


def created(facts: Facts, operand: Operand, wanted: Sizes, *, rank: int) -> list[Edit]:
    """The call that made it, with the sizes in which it differs from the wanted ones changed."""
    step = next((one for one in steps(operand.made) if one.op in FACTORIES), None)
    if step is None or step.line is None or step.shape != operand.sizes or len(wanted) != len(step.shape):
        return []
    site = site_at(*step.line)
    call = site.expression
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute) or call.func.attr != step.op:
        return []
    if len(_elements(call)) != len(wanted):
        return []
    new = copy.deepcopy(call)
    parts = _elements(new)
    for at, (now, then) in enumerate(zip(step.shape, wanted, strict=True)):
        if now != then:
            names = site.code.co_varnames[: site.code.co_argcount]
            parts[at] = ast.parse(_told(facts, parts[at], now, then, names), mode="eval").body

    def run(func: Any, args: Any, kwargs: Any) -> Any:
        given = {name: value for name, value in kwargs.items() if name != "size"}
        return func(*(one for one in args if isinstance(one, torch.Tensor)), wanted, **given)

    named = site.statement if isinstance(site.statement, ast.Assign) and site.statement.value is call else None
    targets = "".join(f"{ast.unparse(one)} = " for one in named.targets) if named is not None else ""
    return [Edit(f"{targets}{ast.unparse(new)}", "", rank, ops=(OpEdit(site, step.op, run),))]


def _elements(call: ast.Call) -> list[ast.expr]:
    """The parts of the call that are its sizes."""
    first = call.args[0] if len(call.args) == 1 else None
    parts = first.elts if isinstance(first, (ast.Tuple, ast.List)) else call.args
    return [] if any(isinstance(one, ast.Starred) for one in parts) else parts


def _told(facts: Facts, node: ast.expr, now: int, then: int, names: Sequence[str]) -> str:
    """Another dimension of the same input, where that has the wanted size, or the batch of one of these names; the number otherwise."""
    text = ast.unparse(node)
    for name, tensor in facts.inputs:
        for here in (dim for dim, size in enumerate(tensor.shape) if size == now):
            for there in (dim for dim, size in enumerate(tensor.shape) if size == then):
                for form in (f"{name}.size({{}})", f"{name}.shape[{{}}]"):
                    if text == form.format(here):
                        return form.format(there)
    batches = [(name, tensor.shape[0]) for name, tensor in facts.inputs if name in names and tensor.dim() > 1]
    return next((f"{name}.size(0)" for name, size in batches if size == then > 1 and isinstance(node, ast.Constant)), str(then))
