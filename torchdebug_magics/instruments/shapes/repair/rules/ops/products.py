"""Matrix products: the inner dimensions, and the batches around them."""

from __future__ import annotations

import ast
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from torchdebug_magics.format import shape
from torchdebug_magics.instruments.shapes.repair.around import rewritten
from torchdebug_magics.instruments.shapes.repair.edit import Edit, OpEdit, as_typed, method, on_operand, parameter_edit
from torchdebug_magics.instruments.shapes.repair.rules.rule_parts import Diagnosis, orders, producer_edits, shown, turned
from torchdebug_magics.instruments.shapes.repair.size_history import TURNS, of_inputs

if TYPE_CHECKING:
    from torchdebug_magics.instruments.shapes.repair.failure_facts import Facts, Operand

__all__ = ["matmul"]

_PRODUCTS = frozenset(["_sparse_mm", "matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "mv", "dot", "baddbmm", "inner"])


def matmul(facts: Facts) -> Diagnosis | None:
    """``q @ k`` whose inner dimensions differ."""
    if facts.op not in _PRODUCTS or len(facts.operands) < 2:
        return None
    first = 1 if facts.op == "baddbmm" else 0
    a, b = facts.operands[first], facts.operands[first + 1]
    if facts.op == "__rmatmul__":
        a, b = b, a
    text = facts.written
    if not a.sizes or not b.sizes:
        return None
    inner_a, inner_b = a.sizes[-1], b.sizes[-2] if len(b.sizes) > 1 else b.sizes[0]
    if inner_a != inner_b:
        sizes = f"{inner_a} and {inner_b} elements" if len(a.sizes) == len(b.sizes) == 1 else f"{inner_a} columns, {inner_b} rows"
        sentence = f"{text} cannot multiply {shown(a)} by {shown(b)}: {sizes}"
        return Diagnosis(sentence, tuple(_inner(facts, a, b, inner_a, inner_b)), a if a.made is not None else b)
    if facts.op in {"bmm", "mm", "mv", "dot", "baddbmm"} and not _right_dimensions(facts.op, a, b):
        edits = _vectors(facts, a, b) or (_as_matmul(facts) if facts.op in {"bmm", "mm"} else [])
        many = {"bmm": 3, "baddbmm": 3, "mm": 2, "mv": 2, "dot": 1}[facts.op]
        return Diagnosis(f"{text} multiplies tensors of {many} dimensions, gets {shown(a)} and {shown(b)}", tuple(edits), a)
    if a.sizes[:-2] != b.sizes[:-2]:
        sentence = f"{text} cannot multiply {shown(a)} by {shown(b)}: batch sizes {shape(a.sizes[:-2])} and {shape(b.sizes[:-2])}"
        return Diagnosis(sentence, tuple(_batches(facts, a, b)), a)
    return None


def _inner(facts: Facts, a: Operand, b: Operand, inner_a: int, inner_b: int) -> list[Edit]:
    at_a, at_b = facts.operands.index(a), facts.operands.index(b)
    edits = _vectors(facts, a, b)
    if edits:
        return edits
    if len(a.sizes) == len(b.sizes) == 2 and b.sizes[0] == b.sizes[1] == a.sizes[0] and (swapped := _swapped(facts, b)):
        return swapped  # an adjacency: to turn the other one would mix its rows
    if len(b.sizes) > 1 and b.sizes[-1] == inner_a:
        edits += on_operand(facts, at_b, method("transpose", -2, -1), rank=2) or _owned_turned(facts, at_b)
    if len(a.sizes) > 1 and a.sizes[-2] == inner_b and (a.sizes != b.sizes or a.owned):  # else the rows of b would do as well
        edits += on_operand(facts, at_a, method("transpose", -2, -1), rank=5) or _owned_turned(facts, at_a)
    if len(a.sizes) > 1 and len(b.sizes) > 1 and b.sizes[-1] == a.sizes[-2]:
        edits += _swapped(facts, b)
    if b.owned and len(b.sizes) > 1:
        edits += parameter_edit(b, (*b.sizes[:-2], inner_a, b.sizes[-1]))
    if a.owned and len(a.sizes) > 1:
        edits += parameter_edit(a, (*a.sizes[:-1], inner_b))
    edits += _turned_parameter(facts, b, inner_a)
    if b.owned or len(b.sizes) > 2 or inner_b not in {one.shape[0] for _, one in facts.inputs}:  # a layer is not to know of the batch
        edits += producer_edits(facts, a, inner_a, inner_b)
    return edits + producer_edits(facts, b, inner_b, inner_a)


def _vectors(facts: Facts, a: Operand, b: Operand) -> list[Edit]:
    """One vector a sample beside one matrix a sample: without a dimension of one, each would meet every sample's."""
    if {len(a.sizes), len(b.sizes)} != {2, 3} or a.sizes[0] != b.sizes[0] or a.owned or b.owned:
        return []
    if len(a.sizes) == 2:
        return on_operand(facts, facts.operands.index(a), method("unsqueeze", 1), rank=1) if a.sizes[1] == b.sizes[1] else []
    return on_operand(facts, facts.operands.index(b), method("unsqueeze", -1), rank=1) if b.sizes[1] == a.sizes[2] else []


def _turned_parameter(facts: Facts, b: Operand, inner: int) -> list[Edit]:
    """The user's own parameter, used as ``self.w.T``, with as many columns as meet it."""
    step, module = b.made, facts.modules.get(facts.path or "")
    if step is None or module is None or step.op not in TURNS or len(step.shape) != 2 or not step.inputs or step.inputs[0][1] is not None:
        return []
    whole = step.inputs[0][0]
    named = [name for name, one in module._parameters.items() if one is not None and tuple(one.shape) == whole and f".{name}." in b.name]
    if len(named) != 1 or whole[::-1] != step.shape:
        return []
    path = f"{facts.path}.{named[0]}".lstrip(".")
    code = f"{as_typed(path)} = nn.Parameter(torch.zeros({whole[0]}, {inner}))"
    return [Edit(code, "a parameter of the matching size", 30, parameters={path: (whole[0], inner)})]


def _owned_turned(facts: Facts, at: int) -> list[Edit]:
    """A parameter, turned in the expression that uses it."""
    operand = facts.operands[at]
    free = replace(operand, owned=False, made=None)
    operands = tuple(free if one is operand else one for one in facts.operands)
    change = method("t") if len(operand.sizes) == 2 else method("transpose", -2, -1)
    return on_operand(replace(facts, operands=operands), at, change, rank=4)


def _swapped(facts: Facts, b: Operand) -> list[Edit]:
    site = facts.site
    written = site.expression if site is not None else None
    if site is None or facts.op is None or not isinstance(written, ast.BinOp) or not facts.direct:
        return []
    square = len(b.sizes) == 2 and b.sizes[0] == b.sizes[1]
    computed = all(of_inputs(one.made) for one in facts.operands[:2])
    if not square and computed and b.sizes[-1] in {one.shape[0] for _, one in facts.inputs if one.dim() > 1}:
        return []  # the samples of the batch would be summed up
    code = ast.unparse(ast.BinOp(written.right, ast.MatMult(), written.left))
    return [
        Edit(
            code,
            "with the operands swapped",
            1 if square else 8,
            ops=(OpEdit(site, facts.op, lambda func, args, _: func(args[1], args[0])),),
        )
    ]


def _right_dimensions(op: str, a: Operand, b: Operand) -> bool:
    many = {"bmm": (3, 3), "baddbmm": (3, 3), "mm": (2, 2), "mv": (2, 1), "dot": (1, 1)}[op]
    return (len(a.sizes), len(b.sizes)) == many


def _as_matmul(facts: Facts) -> list[Edit]:
    names = [one.name for one in facts.operands[:2]]
    code = " @ ".join(names) if all(names) else ""
    return rewritten(
        facts, lambda _: code, lambda _, args, __: torch.matmul(args[0], args[1]), rank=3, why="takes any number of dimensions"
    )


def _batches(facts: Facts, a: Operand, b: Operand) -> list[Edit]:
    edits: list[Edit] = []
    for one, other in ((a, b), (b, a)):
        at = facts.operands.index(one)
        if len(one.sizes) < len(other.sizes):
            edits += [edit for dim in range(1, len(other.sizes) - 2) for edit in on_operand(facts, at, method("unsqueeze", dim), rank=6)]
        if len(one.sizes) == len(other.sizes) == 4 and one.sizes[0] == other.sizes[0] and not other.sizes[1] % one.sizes[1]:
            times = other.sizes[1] // one.sizes[1]
            why = f"each of the {one.sizes[1]} heads for {times} of the {other.sizes[1]}"
            edits += on_operand(facts, at, method("repeat_interleave", times, 1), rank=3, why=why) if one.sizes[1] > 1 else []
        if len(one.sizes) == len(other.sizes) > 2:
            for order in orders(len(one.sizes)):
                if tuple(one.sizes[dim] for dim in order[:-2]) == other.sizes[:-2] and order != tuple(range(len(order))):
                    edits += turned(facts, at, order, rank=7)
    return edits
