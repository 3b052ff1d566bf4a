"""Sizes that come out negative."""

from __future__ import annotations

import ast
import re
from typing import Any

import torch

from torchdebug_magics.format import shape
from torchdebug_magics.instruments.shapes.cell_error.side_effects import number_named
from torchdebug_magics.instruments.shapes.repair.edit import Edit
from torchdebug_magics.instruments.shapes.repair.failure_facts import Facts
from torchdebug_magics.instruments.shapes.repair.rules.candidates import subscript
from torchdebug_magics.instruments.shapes.repair.rules.rule_parts import Diagnosis, told
from torchdebug_magics.probing.source.syntax import nodes

_MADE_BY_SIZES = frozenset(["zeros", "ones", "empty", "full", "rand", "randn", "new_zeros", "new_ones", "new_empty", "new_full"])
_CALCULATED = re.compile(r"Calculated output size(?: per channel)?: \((?P<sizes>[-\dx ]+)\)")


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
                ends = (*(slice(None),) * dim, slice(many))
                change = subscript(f"{':, ' * dim}:{left}", ends)
                return [Edit(f"{name} = {change.text(name)}", f"as long as what it is filled up to: {many}", 10, inputs={name: change})]
    return []


def _plain(value: Any) -> Any:
    return value[0] if isinstance(value, tuple) and len(set(value)) == 1 else value


def _why(facts: Facts, size: int) -> str:
    """The tensors of which the expression for the size speaks."""
    site, call = facts.site, facts.written_call
    if site is None or call is None:
        return ""
    differences = [one for one in nodes(ast.BinOp, call) if isinstance(one.op, ast.Sub)]
    names = dict.fromkeys(one.id for one in nodes(ast.Name, *differences))
    known = [f"`{name}` is {shape(tuple(site.names[name].shape))}" for name in names if isinstance(site.names.get(name), torch.Tensor)]
    whole = [f"`{name}` is {site.names[name]}" for name in names if type(site.names.get(name)) is int]
    return (
        f": `{ast.unparse(differences[0])}` is {size}, as {' and '.join((*known, *whole))}"
        if len(differences) == 1 and (known or whole)
        else ""
    )
