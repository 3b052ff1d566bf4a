"""A failed call written otherwise: its operands swapped, another function, a keyword more, another dimension."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from torchdebug_magics.format import shape
from torchdebug_magics.instruments.shapes.repair.edit import OpEdit, Repair
from torchdebug_magics.instruments.shapes.repair.failure_facts import FailureFacts
from torchdebug_magics.instruments.shapes.repair.local_call import LocalCall, Mismatch
from torchdebug_magics.instruments.shapes.repair.rules.rule_parts import Diagnosis, argument_changed, rewritten
from torchdebug_magics.instruments.shapes.repair.size_history import JOINS, of_inputs

_KEYWORDS = {"scaled_dot_product_attention": ("enable_gqa", "fewer heads of keys and values than of queries")}
"""What lets an op take other sizes."""


def swapped(local: LocalCall) -> list[Repair]:
    """``b @ a`` for ``a @ b``; not where the samples of the batch would be summed up."""
    facts = local.facts
    site = facts.site
    written = site.expression if site is not None and facts.direct else None
    if site is None or facts.op is None or not isinstance(written, ast.BinOp) or not isinstance(written.op, ast.MatMult):
        return []
    a, b = local.operands[:2]
    if local.gives({0: lambda tensor: tensor.new_empty(b.sizes), 1: lambda tensor: tensor.new_empty(a.sizes)}) is None:
        return []
    square = len(b.sizes) == 2 and b.sizes[0] == b.sizes[1]
    batches = {tensor.shape[0] for _, tensor in facts.inputs if tensor.dim() > 1}
    if not square and of_inputs(a.made) and of_inputs(b.made) and b.sizes[-1] in batches:
        return []
    code = ast.unparse(ast.BinOp(written.right, ast.MatMult(), written.left))
    run = OpEdit(site, facts.op, lambda func, args, _: func(args[1], args[0]))
    return [Repair(code, "with the operands swapped", 1 if square else 8, ops=(run,))]


def other_calls(local: LocalCall) -> Iterator[Repair]:
    """The same call by another name, with a keyword, or along another dimension."""
    facts = local.facts
    names = [operand.name for operand in facts.operands[:2]]
    if facts.op in {"bmm", "mm"} and all(names) and len({len(operand.sizes) for operand in facts.operands}) == 1:
        code = " @ ".join(names)
        yield from rewritten(
            facts, lambda _: code, lambda _, args, __: torch.matmul(args[0], args[1]), rank=3, why="takes any number of dimensions"
        )
    if facts.op in JOINS | {"stack"} and facts.operands:
        yield from _along(local)
    if facts.op in _KEYWORDS:
        name, why = _KEYWORDS[facts.op]

        def write(call: ast.Call) -> ast.expr:
            return ast.Call(call.func, call.args, [*call.keywords, ast.keyword(name, ast.Constant(value=True))])

        yield from rewritten(facts, write, lambda func, args, kwargs: func(*args, **{**kwargs, name: True}), rank=5, why=why)


def _along(local: LocalCall) -> Iterator[Repair]:
    """The same tensors joined along another dimension."""
    facts, many = local.facts, len(local.operands[0].sizes)
    for dim in reversed(range(many)):
        run = functools.partial(_joined, -1 if dim == many - 1 and facts.op != "stack" else dim)
        if local.gives(module=lambda *args, run=run, **_: run(None, args, {})) is not None:
            why = "joined along the dimension in which they differ" if facts.op == "stack" else ""
            yield from rewritten(facts, functools.partial(_written_along, run.args[0]), run, rank=8 if facts.op == "stack" else 3, why=why)


def _joined(dim: int, _: Any, args: Any, __: Any) -> Any:
    return torch.cat(args[0], dim=dim)


def _written_along(dim: int, call: ast.Call) -> str:
    func = ast.unparse(call.func).replace("stack", "cat")
    return f"{func}({ast.unparse(call.args[0])}, dim={dim})" if call.args else ""


def pair(facts: FailureFacts) -> Diagnosis | None:
    """An LSTM that is given one tensor for its two states."""
    given = facts.call.args[1:2] if facts.call is not None else ()
    if not isinstance(facts.module, (nn.LSTM, nn.LSTMCell)) or not given or not isinstance(given[0], torch.Tensor):
        return None

    def changed(args: Any, kwargs: Any) -> tuple[Any, Any]:
        return (args[0], (args[1], torch.zeros_like(args[1])), *args[2:]), kwargs

    sentence = f"{facts.who} expects its state as two tensors (h, c), gets one tensor of {shape(tuple(given[0].shape))}"
    edits = argument_changed(facts, 1, lambda h: f"({h}, torch.zeros_like({h}))", changed, rank=3, why="a cell state of zeros beside it")
    return Diagnosis(sentence, tuple(edits))


def first_rows(local: LocalCall, mismatch: Mismatch) -> list[Repair]:
    """A state of a larger batch, as that of all batches but the last one is, cut to the rows of this one."""
    facts, rows = local.facts, mismatch.wanted
    if not isinstance(facts.module, nn.RNNBase) or not mismatch.at or mismatch.dims != (-2,) or mismatch.got <= rows:
        return []
    size = f"{local.operands[0].name or 'x'}.size({0 if facts.module.batch_first else 1})"
    many = len(local.operands) > 2

    def cut(value: Any) -> Any:
        return tuple(state[:, :rows].contiguous() for state in value) if many else value[:, :rows].contiguous()

    def changed(args: Any, kwargs: Any) -> tuple[Any, Any]:
        return (args[0], cut(args[1]), *args[2:]), kwargs

    def text(h: str) -> str:
        return f"tuple(h[:, :{size}].contiguous() for h in {h})" if many else f"{h}[:, :{size}].contiguous()"

    why = f"a batch of {rows} after those of {mismatch.got}, as the last one of a loader is: or `drop_last=True` in the `DataLoader`"
    return argument_changed(facts, 1, text, changed, rank=2, why=why)
