"""What can be told of an op before it runs, from its schema: read once an op."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from torchdebug_magics.probing.ops import is_movement, is_overwriting, is_pointwise, is_uninitialised, is_writing_in_part, op_name

__all__ = ["Plan", "is_collective", "plan_of"]

_COLLECTIVES = frozenset({"c10d", "c10d_functional", "_c10d_functional", "_c10d_functional_autograd", "symm_mem"})
_INDEX_AT = {"index": 1, "index_put": 1, "masked_select": 1, "masked_fill": 1, "take": 1, "embedding": 1} | dict.fromkeys(
    ("index_select", "gather", "scatter", "index_copy", "index_fill", "index_add"), 2
)


@dataclass(frozen=True)
class Plan:
    """Of one op."""

    name: str
    """The dispatcher's, such as ``aten.add.Tensor``."""
    base: str
    """Without namespace and overload, such as ``add``."""
    is_view: bool
    """Whether all that it gives is memory that it was given; such as by `set_`, which takes a storage that came from another process."""
    is_random: bool
    """Whether it draws from a generator."""
    is_empty: bool
    """Whether it gives memory that nobody has written."""
    is_overwriting: bool
    """Whether what it writes does not depend on what was there."""
    moves: bool
    """Whether it only moves numbers."""
    passes_on: bool
    """Whether memory that nobody has written may be in what it gives, and it has not looked at it."""
    index_at: int
    """The place of the argument that says which numbers to move, and so is read; -1 where there is none."""
    is_pointwise: bool
    is_marker: bool
    """Whether it computes nothing, as the profiler's own."""
    is_collective: bool
    """Whether it gives what other ranks have sent, perhaps later: nothing is read of it, and who reads it is given it from outside."""


def is_collective(name: str) -> bool:
    """Whether an op of that name, such as ``c10d._allgather_base_.default``, communicates with other ranks."""
    return name.partition(".")[0] in _COLLECTIVES


@cache
def plan_of(func: Any) -> Plan:
    """The plan of an op."""
    schema = func._schema
    returns = [one.alias_info for one in schema.returns]
    base = op_name(func)
    return Plan(
        name=str(func),
        base=base,
        is_view=base == "set_" or (bool(returns) and all(alias is not None and not alias.is_write for alias in returns)),
        is_random=torch.Tag.nondeterministic_seeded in func.tags,
        is_empty=is_uninitialised(base) and base != "_efficientzerotensor",
        is_overwriting=is_overwriting(func),
        moves=is_movement(func),
        passes_on=is_movement(func) or is_writing_in_part(func),
        index_at=_INDEX_AT.get(base.removesuffix("_"), -1),
        is_pointwise=is_pointwise(func),
        is_marker=base.startswith("profiler::"),
        is_collective=is_collective(str(func)),
    )
