"""Modules with parameters that no call reached: used by hand, or unused."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from torchdebug_magics.instruments.shapes.follow.parameters import NOTHING, Owned
from torchdebug_magics.instruments.shapes.report import Row
from torchdebug_magics.probing.modules import named_followed

if TYPE_CHECKING:
    from torchdebug_magics.instruments.shapes.run.forward import Forward

__all__ = ["row_of", "uncalled"]

_BY_HAND = "used, but not called as a module"
_UNUSED = "unused"


def uncalled(model: torch.nn.Module, run: Forward) -> tuple[tuple[Row, ...], tuple[str, ...]]:
    """A row for each that holds parameters itself, so that the rows add up; and the unused ones, the outermost path of each branch."""
    called = {id(one.module) for one in run.calls.made}
    rows: list[Row] = []
    holding: set[str] = set()
    alive: set[str] = set()
    for path, module in named_followed(model):
        if id(module) in called:
            alive.add(path)
        elif run.parameters.held_by(module):
            holding.add(path)
            owned = run.parameters.take(path, module)
            is_used = any(id(one) in run.used and run.parameters.counted_at(one) == path for _, one in run.parameters.held_by(module))
            if is_used:
                alive.add(path)
            rows.append(row_of(path, module, owned, _note(module, is_used=is_used)))
    return tuple(rows), _outermost(holding, alive)


def _note(module: torch.nn.Module, *, is_used: bool) -> str:
    if not is_used:
        return _UNUSED
    return "" if isinstance(module, (torch.nn.ParameterList, torch.nn.ParameterDict)) else _BY_HAND  # nobody would call those


def _outermost(holding: set[str], alive: set[str]) -> tuple[str, ...]:
    """Of the paths in `holding`, and what is above them, those below which nothing is alive."""
    for path in list(alive):
        alive.update(_above(path))
    dead = {one for path in holding for one in (path, *_above(path)) if one not in alive}
    return tuple(sorted(path for path in dead if path and (not path.count(".") or path.rpartition(".")[0] not in dead)))


def _above(path: str) -> list[str]:
    parts = path.split(".")
    return [".".join(parts[:count]) for count in range(len(parts))]


def row_of(path: str, module: torch.nn.Module, owned: Owned = NOTHING, note: str = "") -> Row:
    """The row of a module without a call."""
    return Row(
        path=path,
        type=type(module).__name__,
        call=0,
        depth=path.count(".") + 1 if path else 0,
        own_params=owned.params,
        trainable_params=owned.trainable,
        shards=owned.shards,
        note=", ".join(filter(None, (note, owned.note))),
    )
