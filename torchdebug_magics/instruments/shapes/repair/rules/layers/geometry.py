"""Ops on pictures and grids: PixelShuffle, grid_sample, and sizes below zero."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING, Any

import torch

from torchdebug_magics.format import shape
from torchdebug_magics.instruments.shapes.cell_error.side_effects import number_named
from torchdebug_magics.instruments.shapes.repair.edit import Change, Edit, on_operand
from torchdebug_magics.instruments.shapes.repair.rules.rule_parts import Diagnosis, gets, producer_edits, shown, told, turned

if TYPE_CHECKING:
    from torchdebug_magics.instruments.shapes.repair.failure_facts import Facts

__all__ = ["grid", "negative", "shuffle"]

_MADE_BY_SIZES = frozenset(["zeros", "ones", "empty", "full", "rand", "randn", "new_zeros", "new_ones", "new_empty", "new_full"])
_CALCULATED = re.compile(r"Calculated output size(?: per channel)?: \((?P<sizes>[-\dx ]+)\)")


def shuffle(facts: Facts) -> Diagnosis | None:
    """Channels are to divide by the square of the factor."""
    if facts.op != "pixel_shuffle" or len(facts.operands[0].sizes) < 3:
        return None
    x, factor = facts.operands[0], facts.argument(1, "upscale_factor")
    got = x.sizes[-3]
    if not isinstance(factor, int) or got % factor**2 == 0:
        return None
    wanted = -(-got // factor**2) * factor**2
    makes = f"{facts.who} makes {factor} x {factor} pixels from {factor**2} channels"
    sentence = f"{makes}, gets {gets(x, got, -3)}: not a multiple of {factor**2}"
    return Diagnosis(sentence, tuple(producer_edits(facts, x, got, wanted, rank=15)), x)


def grid(facts: Facts) -> Diagnosis | None:
    """One grid a picture, of as many coordinates as it has dimensions."""
    if facts.op not in {"grid_sample", "grid_sampler"} or len(facts.operands) < 2:
        return None
    x, points = facts.operands[0], facts.operands[1]
    if len(x.sizes) != len(points.sizes):
        return Diagnosis(f"`{facts.op}` expects a grid of as many dimensions as its input, gets {shown(x)} and {shown(points)}", (), points)
    if points.sizes[-1] != len(x.sizes) - 2:
        words = f"{len(x.sizes) - 2} coordinates in its last dimension"
        order = (0, *range(2, len(x.sizes)), 1)
        last = turned(facts, 1, order, rank=3, why="the coordinates last") if points.sizes[1] == len(x.sizes) - 2 else []
        return Diagnosis(f"`{facts.op}` of {shown(x)} expects a grid with {words}, gets {told(points)}", tuple(last), points)
    if points.sizes[0] == x.sizes[0]:
        return None
    sentence = f"`{facts.op}` expects one grid per image: {x.sizes[0]} of them in {told(x)}, and {points.sizes[0]} in {told(points)}"
    edits: list[Edit] = []
    if points.sizes[0] == 1:
        size = f"{x.name}.size(0)" if x.name.isidentifier() else str(x.sizes[0])
        rest = ", -1" * (len(points.sizes) - 1)
        change = Change(lambda y: f"{y}.expand({size}{rest})", lambda one: one.expand(x.sizes[0], *points.sizes[1:]))
        edits = on_operand(facts, 1, change, rank=4, why="the same grid for every image")
    return Diagnosis(sentence, tuple(edits), points)


def negative(facts: Facts) -> Diagnosis | None:
    """A size below zero: of a new tensor, or of what a kernel would leave."""
    if found := _CALCULATED.search(facts.text):
        x = facts.operands[0]
        settings = [
            f"{name} {_plain(getattr(facts.module, name))}" for name in ("kernel_size", "stride", "padding") if hasattr(facts.module, name)
        ]
        with_ = f" with {', '.join(settings)}" if settings else ""
        size = " x ".join(found["sizes"].replace("x", " ").split())
        return Diagnosis(f"{facts.who} would return a size of {size} for {told(x)}{with_}", (), x)
    if facts.op not in _MADE_BY_SIZES or not ("non-negative" in facts.text or "negative dimension" in facts.text):
        return None
    given: Any = [one for one in facts.args if not isinstance(one, torch.Tensor)]
    sizes = given[0] if given and isinstance(given[0], (tuple, list)) else given
    if not all(isinstance(one, int) for one in sizes) or min(sizes, default=0) >= 0:
        return None
    text = facts.written
    return Diagnosis(f"{text} requests a tensor of {shape(tuple(sizes))}{_why(facts, min(sizes))}", tuple(_cut(facts)))


def _cut(facts: Facts) -> list[Edit]:
    """The input from whose size the negative one came, such as ``8 - x.size(1)``, cut to the other number of the difference."""
    call, given = facts.written_call, dict(facts.inputs)
    names = facts.site.names if facts.site is not None else {}
    for part in ast.walk(call) if call is not None else ():
        if not isinstance(part, ast.BinOp) or not isinstance(part.op, ast.Sub):
            continue
        left, right = ast.unparse(part.left), ast.unparse(part.right)
        for name, dim in ((name, dim) for name, one in given.items() if name.isidentifier() for dim in range(one.dim())):
            size = given[name].shape[dim]
            if right not in {f"{name}.size({dim})", f"{name}.shape[{dim}]"} or (many := number_named(part.left, names)) is None:
                continue
            if 0 < many < size:
                change = _cut_at(dim, many, left)
                return [Edit(f"{name} = {change.text(name)}", f"as long as what it is filled up to: {many}", 10, inputs={name: change})]
    return []


def _cut_at(dim: int, many: int, told: str) -> Change:
    """``x[:, :self.length]``."""
    ends = (*(slice(None),) * dim, slice(many))
    return Change(lambda x: f"{x}[{':, ' * dim}:{told}]", lambda one: one[ends])


def _plain(value: Any) -> Any:
    return value[0] if isinstance(value, tuple) and len(set(value)) == 1 else value


def _why(facts: Facts, size: int) -> str:
    """The tensors of which the expression for the size speaks."""
    site, call = facts.site, facts.written_call
    if site is None or call is None:
        return ""
    differences = [one for one in ast.walk(call) if isinstance(one, ast.BinOp) and isinstance(one.op, ast.Sub)]
    names = dict.fromkeys(one.id for part in differences for one in ast.walk(part) if isinstance(one, ast.Name))
    known = [f"`{name}` is {shape(tuple(site.names[name].shape))}" for name in names if isinstance(site.names.get(name), torch.Tensor)]
    whole = [f"`{name}` is {site.names[name]}" for name in names if type(site.names.get(name)) is int]
    return (
        f": `{ast.unparse(differences[0])}` is {size}, as {' and '.join((*known, *whole))}"
        if len(differences) == 1 and (known or whole)
        else ""
    )
