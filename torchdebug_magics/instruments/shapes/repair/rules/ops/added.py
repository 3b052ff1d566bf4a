"""What is added to a product: the bias of a Linear or a convolution, and the first tensor of `addmm` and its like."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchdebug_magics.format import shape
from torchdebug_magics.instruments.shapes.repair.edit import parameter_edit
from torchdebug_magics.instruments.shapes.repair.rules.rule_parts import Diagnosis, shown

if TYPE_CHECKING:
    from torchdebug_magics.instruments.shapes.repair.failure_facts import Facts, Operand, Sizes

__all__ = ["added"]

_PRODUCTS = {"addmm": (2, 2), "addmv": (2, 1), "baddbmm": (3, 3)}
"""Dimensions of the two factors."""


def added(facts: Facts) -> Diagnosis | None:
    """The product itself fits, and what is added to it does not."""
    if facts.op in _PRODUCTS and len(facts.operands) > 2:
        return _to_product(facts)
    if len(facts.operands) < 3 or not (facts.op == "linear" or (facts.op or "").startswith("conv")):
        return None
    weight, bias = facts.operands[1], facts.operands[2]
    if len(weight.sizes) < 2:
        return None
    gives = weight.sizes[1] if "transpose" in (facts.op or "") else weight.sizes[0]
    if bias.sizes == (gives,) or ("transpose" in (facts.op or "") and facts.argument(6, "groups", 1) != 1):
        return None
    sentence = f"{_text(facts)} returns {gives} features (weight {shape(weight.sizes)}), and adds {shown(bias)}"
    return Diagnosis(sentence, tuple(parameter_edit(bias, (gives,))), bias)


def _to_product(facts: Facts) -> Diagnosis | None:
    term, a, b = facts.operands[:3]
    if (len(a.sizes), len(b.sizes)) != _PRODUCTS[facts.op or ""] or not _multiply(a, b):
        return None
    gives = (*a.sizes[:-1], *b.sizes[-1:]) if len(b.sizes) > 1 else a.sizes[:-1]
    if len(term.sizes) <= len(gives) and all(one in {1, there} for one, there in zip(term.sizes[::-1], gives[::-1], strict=False)):
        return None
    sentence = f"{_text(facts)} adds {shown(term)} to a product of {shape(gives)}"
    return Diagnosis(sentence, tuple(parameter_edit(term, _as_wide(term.sizes, gives))), term)


def _multiply(a: Operand, b: Operand) -> bool:
    return a.sizes[-1] == (b.sizes[-2] if len(b.sizes) > 1 else b.sizes[0]) and a.sizes[:-2] == b.sizes[:-2]


def _as_wide(sizes: Sizes, gives: Sizes) -> Sizes:
    """What broadcasts, goes on doing so."""
    return tuple(one if one == 1 else there for one, there in zip(sizes, gives[-len(sizes) :], strict=True))


def _text(facts: Facts) -> str:
    return f"`{facts.site.text}`" if facts.site is not None and facts.direct and facts.site.text else facts.who
