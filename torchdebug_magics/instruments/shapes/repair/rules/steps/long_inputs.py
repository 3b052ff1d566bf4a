"""The model's own inputs: sequences that are longer than the model takes, and masks or labels of another length than the ids."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from torchdebug_magics.format import shape
from torchdebug_magics.instruments.shapes.repair.edit import Change, Edit

if TYPE_CHECKING:
    from torchdebug_magics.instruments.shapes.repair.failure_facts import Facts
    from torchdebug_magics.instruments.shapes.repair.rules.rule_parts import Diagnosis

__all__ = ["beside", "shortened", "too_long"]

_IDS = (torch.int64, torch.int32)


def shortened(facts: Facts, size: int, to: int, *, rank: int = 25) -> list[Edit]:
    """All sequences among the inputs that are `size` long, cut to the length that the model takes."""
    long = [name for name, one in facts.inputs if one.dim() >= 2 and one.shape[1] == size and not one.is_floating_point()]
    if not too_long(facts, size, to) or not 0 < to < size:
        return []
    cut = Change(lambda x: f"{x}[:, :{to}]", lambda one: one[:, :to])
    code = "\n".join(f"{name} = {cut.text(name)}" for name in long)
    return [Edit(code, f"as long as the model takes: {to}", rank, inputs=dict.fromkeys(long, cut), many=len(long))]


def too_long(facts: Facts, size: int, to: int) -> str:
    """In words, where an input is a sequence of `size` and the model has `to` positions; empty where none is."""
    ids = [(name, one) for name, one in facts.inputs if one.dim() > 1 and one.dtype in _IDS]
    long = next((f"`{name}` is {shape(tuple(one.shape))}" for name, one in ids if one.shape[1] == size), "")
    if not long or not 0 < to < size:
        return ""
    settings = vars(getattr(facts.modules.get(""), "config", None) or object) if "" in facts.modules else {}
    named = next((name for name, value in settings.items() if value == to and ("position" in name or "ctx" in name)), "")
    return f"{long}, and the model has {to} positions{f' ({named})' if named else ''}"


def beside(facts: Facts, found: Diagnosis) -> Diagnosis:
    """Where a library's code failed: an input whose length is not that of the first, named and repaired."""
    if facts.op is None or len(facts.inputs) < 2 or (facts.site is not None and len(facts.operands) < 2):
        return found
    name, first = facts.inputs[0]
    odd = [(other, one) for other, one in facts.inputs[1:] if one.dim() == first.dim() == 2 and one.shape != first.shape]
    if not odd or first.is_floating_point():
        return found
    other, one = odd[0]
    met = [sizes for operand in facts.operands for sizes in (operand.sizes[:2], operand.sizes[-2:])]
    if facts.site is not None and not {tuple(first.shape), tuple(one.shape)} <= set(met):
        return found  # the user's own code may want them so
    sentence = f"{found.sentence}; `{other}` is {shape(tuple(one.shape))} beside `{name}` of {shape(tuple(first.shape))}"
    return replace(found, sentence=sentence, edits=(*_alike(name, first, other, one), *found.edits))


def _alike(name: str, first: torch.Tensor, other: str, one: torch.Tensor) -> list[Edit]:
    rows, length = first.shape
    if one.shape[0] == rows and one.shape[1] > length:
        cut = Change(lambda x: f"{x}[:, :{length}]", lambda tensor: tensor[:, :length])
        return [Edit(f"{other} = {cut.text(other)}", f"as long as `{name}`", 5, inputs={other: cut})]
    fill = "ones" if "mask" in other else "zeros" if "type" in other else ""
    if not fill:
        return []
    return [Edit(f"{other} = torch.{fill}_like({name})", f"as large as `{name}`", 6, inputs={other: Change(str, _filled(fill, first))})]


def _filled(fill: str, first: torch.Tensor) -> Any:
    sizes = tuple(first.shape)
    return lambda one: one.new_ones(sizes) if fill == "ones" else one.new_zeros(sizes)
