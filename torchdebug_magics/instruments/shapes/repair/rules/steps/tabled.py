"""Tables that a model holds: causal masks, positions and windows, made for fewer steps, or for other widths, than what meets them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import torch

from torchdebug_magics.instruments.shapes.repair.edit import Edit, as_typed
from torchdebug_magics.instruments.shapes.repair.known import resized
from torchdebug_magics.instruments.shapes.repair.own import remade
from torchdebug_magics.instruments.shapes.repair.size_history import of_inputs, steps
from torchdebug_magics.probing.where import location

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torchdebug_magics.instruments.shapes.repair.failure_facts import Facts, Operand, Sizes

__all__ = ["fitted", "rotary"]

_NUMBER = re.compile(r"\b\d+\b")
_ROTATES = ("cos", "sin", "rot", "rope", "freq")


def fitted(facts: Facts, table: Operand, got: int, wanted: int, *, rank: int) -> list[Edit]:
    """The table as long, or as wide, as is wanted, where it is known how it was made."""
    if of_inputs(table.made) or not got or not wanted or isinstance(table.tensor, torch.nn.Parameter):
        return []
    edits: list[Edit] = []
    for path, sizes in _holders(table):
        module = facts.modules.get(path)
        held = [(name, one) for name, one in (module._buffers.items() if module is not None else ()) if one is not None]
        whole = [(name, one) for name, one in held if tuple(one.shape) == sizes or f"{path}.{name}".lstrip(".") == table.name]
        found = whole if len(whole) == 1 or table.owned else _named_like(whole, facts)
        edits += [edit for name, one in found for edit in _known(facts, path, name, one, (got, wanted), rank)]
        edits += remade(module, path, got, wanted, rank=rank)
    return edits


def _holders(table: Operand) -> Iterator[tuple[str, Sizes]]:
    """The paths of the modules whose tables it may be, each with the shape of the whole table."""
    if table.owned:
        yield table.name.rpartition(".")[0], table.sizes
        return
    seen: dict[str, Sizes] = {}
    for step in steps(table.made):
        seen[step.module] = step.inputs[0][0] if step.inputs else step.shape
    yield from seen.items()


def _named_like(held: list[tuple[str, torch.Tensor]], facts: Facts) -> list[tuple[str, torch.Tensor]]:
    """Of several tables of one shape, the one of which the failing line speaks, or a line that made its operands."""
    lines = [facts.site.text if facts.site is not None else ""]
    lines += [
        location(step.line[0].co_filename, step.line[1], "").source for one in facts.operands for step in steps(one.made) if step.line
    ]
    spoken = [[(name, one) for name, one in held if re.search(rf"\b{name}\b", line)] for line in lines]
    return next((found for found in spoken if len(found) == 1), [])


def _known(facts: Facts, path: str, name: str, table: torch.Tensor, sizes: tuple[int, int], rank: int) -> list[Edit]:
    """A buffer that is known by its numbers, in all modules alike."""
    got, wanted = sizes
    found = resized(table, got, wanted)
    if found is None:
        return []

    def made(old: torch.Tensor) -> torch.Tensor:
        return found.make().to(old.device)

    paths = _alike(facts, path, name, table)
    code = f"{_each(paths)}.{name} = {found.code}".lstrip(".")
    buffers = dict.fromkeys((f"{one}.{name}".lstrip(".") for one in paths), made)
    return [Edit(code, f"made for {wanted} instead of {got}", rank, buffers=buffers)]


def _alike(facts: Facts, path: str, name: str, table: torch.Tensor) -> list[str]:
    """The paths of this module, and of those in the same list that hold such a table, too."""
    module, root = facts.modules[path], facts.modules.get("")
    every = {} if root is None else {one: part for one, part in root.named_modules() if type(part) is type(module)}
    alike = [one for one, part in every.items() if (own := part._buffers.get(name)) is not None and own.shape == table.shape]
    return alike if len({_NUMBER.sub("#", one) for one in alike}) == 1 and path in alike else [path]


def _each(paths: list[str]) -> str:
    """``blocks[0].attn``; of several ``for block in blocks: block.attn``."""
    listed, _, rest = paths[0].partition(".0")
    if len(paths) == 1 or not listed or any(one != f"{listed}.{at}{rest}" for at, one in enumerate(paths)):
        return as_typed(paths[0]) if paths[0] else ""
    return f"for one in {as_typed(listed)}: one{rest}"


def rotary(table: Operand, width: int, wanted: int) -> str:
    """In words, where a table of rotations is as wide as another head; empty elsewhere."""
    names = " ".join([table.name, *(f"{step.module} {step.op}" for step in steps(table.made))]).lower()
    if of_inputs(table.made) or not any(one in names for one in _ROTATES):
        return ""
    what = "pairs of features" if table.tensor.is_complex() else "features"
    return f": it rotates {width} {what}, and a head has {wanted}"
