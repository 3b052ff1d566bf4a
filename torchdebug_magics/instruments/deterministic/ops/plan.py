"""What can be told of an op before it runs, from its schema: read once an op."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from torchdebug_magics.probing.ops import is_movement, is_overwriting, is_pointwise, is_uninitialised, is_writing_in_part, op_name

__all__ = ["Plan", "plan_of"]


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
    is_pointwise: bool
    is_marker: bool
    """Whether it computes nothing, as the profiler's own."""


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
        is_pointwise=is_pointwise(func),
        is_marker=base.startswith("profiler::"),
    )
