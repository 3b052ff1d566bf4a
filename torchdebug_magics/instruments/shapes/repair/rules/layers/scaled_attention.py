"""`F.scaled_dot_product_attention` itself."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

import torch

from torchdebug_magics.format import shape
from torchdebug_magics.instruments.shapes.repair.around import rewritten
from torchdebug_magics.instruments.shapes.repair.edit import Change, Edit, method, on_operand
from torchdebug_magics.instruments.shapes.repair.rules.rule_parts import Diagnosis, turned

if TYPE_CHECKING:
    from torchdebug_magics.instruments.shapes.repair.failure_facts import Facts, Operand

__all__ = ["scaled"]


def scaled(facts: Facts) -> Diagnosis | None:
    """Width, length, mask, batch and heads, in this order."""
    if facts.op != "scaled_dot_product_attention" or len(facts.operands) < 3:
        return None
    query, key, value = facts.operands[:3]
    mask = facts.argument(3, "attn_mask")
    if query.sizes[-1:] != key.sizes[-1:]:
        edits = (
            turned(facts, 1, (*range(len(key.sizes) - 2), len(key.sizes) - 1, len(key.sizes) - 2))
            if query.sizes[-1] == key.sizes[-2]
            else []
        )
        sentence = f"attention expects query and key of one width, gets {shape(query.sizes)} and {shape(key.sizes)}"
        return Diagnosis(sentence, tuple(edits), key)
    if key.sizes[-2:-1] != value.sizes[-2:-1]:
        return Diagnosis(f"attention expects key and value of one length, gets {shape(key.sizes)} and {shape(value.sizes)}", (), value)
    if isinstance(mask, torch.Tensor):
        return _scaled_mask(facts, mask, query, key)
    if query.sizes[:-2] != key.sizes[:-2]:
        return Diagnosis(
            f"attention expects query and key of the same batch and heads, gets {shape(query.sizes)} and {shape(key.sizes)}",
            tuple(_grouped(facts, query, key)),
            key,
        )
    return None


def _grouped(facts: Facts, query: Operand, key: Operand) -> list[Edit]:
    """Fewer heads of keys than of queries, each for a group of them."""
    if len(query.sizes) != 4 or len(key.sizes) != 4 or query.sizes[0] != key.sizes[0]:
        return []
    if query.sizes[1] <= key.sizes[1] or query.sizes[1] % key.sizes[1]:
        return []

    def write(call: ast.Call) -> ast.expr:
        return ast.Call(call.func, call.args, [*call.keywords, ast.keyword("enable_gqa", ast.Constant(value=True))])

    why = f"{query.sizes[1] // key.sizes[1]} heads of queries to one of keys and values"
    return rewritten(facts, write, lambda func, args, kwargs: func(*args, **{**kwargs, "enable_gqa": True}), rank=5, why=why)


def _scaled_mask(facts: Facts, mask: torch.Tensor, query: Operand, key: Operand) -> Diagnosis | None:
    wanted = (*query.sizes[:-1], key.sizes[-2])
    sizes = tuple(mask.shape)
    at = next((at for at, one in enumerate(facts.operands) if one.tensor is mask), 3)
    edits: list[Edit] = []
    if len(sizes) == 2 and len(wanted) == 4 and sizes == (wanted[0], wanted[-1]):
        edits += on_operand(
            facts,
            at,
            Change(lambda x: f"{x}[:, None, None, :]", lambda one: one[:, None, None, :]),
            rank=3,
            why="the same for every head and query",
        )
    if len(sizes) == 3 and len(wanted) == 4:
        edits += on_operand(facts, at, method("unsqueeze", 1), rank=3, why="the same for every head")
    sentence = f"attention expects a mask that fits {shape(wanted)} (batch, heads, target, source), gets {shape(sizes)}"
    return Diagnosis(sentence, tuple(edits), facts.operands[at]) if not _broadcasts(sizes, wanted) else None


def _broadcasts(sizes: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    return len(sizes) <= len(wanted) and all(one in {1, other} for one, other in zip(sizes[::-1], wanted[::-1], strict=False))
