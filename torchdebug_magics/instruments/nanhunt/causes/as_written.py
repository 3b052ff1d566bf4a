"""A birth as the user wrote it: a plain number becomes a tensor, and a part of a tensor a view, by ops that stand in nobody's code."""

from __future__ import annotations

from dataclasses import replace
from itertools import dropwhile
from typing import TYPE_CHECKING

import torch

from torchdebug_magics.instruments.nanhunt.causes.tensor_names import UNNAMED, owner_of, shares_memory, variable_name
from torchdebug_magics.instruments.nanhunt.walk.blamed_inputs import overlap
from torchdebug_magics.probing.ops import is_movement
from torchdebug_magics.probing.tensors import bad_mask

if TYPE_CHECKING:
    from torchdebug_magics.instruments.nanhunt.causes.evidence import Context, Evidence
    from torchdebug_magics.instruments.nanhunt.replay.op_trace import Op
    from torchdebug_magics.instruments.nanhunt.walk.birth_walk import Birth

__all__ = ["as_written", "written_into"]


def as_written(evidence: Evidence) -> Evidence:
    """The same birth, by the op that took the number."""
    birth = evidence.birth
    is_number = birth.op.name == "scalar_tensor" if birth.op is not None else _is_unnamed_number(birth.tensor, evidence.context)
    takers = list(dropwhile(_hands_on_a_number, birth.via))
    if not is_number or not takers or not takers[0].outputs:
        return evidence
    taker, *via = takers
    meant = birth.on_purpose or birth.op is None
    return replace(evidence, birth=replace(birth, op=taker, tensor=taker.outputs[0], mask=None, via=tuple(via), on_purpose=meant))


def written_into(birth: Birth) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The tensor whose rows the user knows, and where it is bad: of a row that was written in place, what it is a row of."""
    part, mask = birth.tensor, birth.mask if birth.mask is not None else bad_mask(birth.tensor)
    if birth.op is None or not birth.op.written or not birth.via or mask is None or part.layout is not torch.strided:
        return part, mask
    # ``x[2] /= 0`` divides a view of a row, and then writes that view into its own place.
    reader = next((op for op in birth.via if not op.written), birth.via[-1])
    wholes = (one for one in reader.inputs() if one.dim() > part.dim() and shares_memory(one, part))
    whole = next(wholes, part)
    return whole, mask if whole is part else overlap(part, mask, whole)[1]


def _is_unnamed_number(tensor: torch.Tensor, context: Context) -> bool:
    """Whether torch made it of a number, as for ``x[0] = math.nan``."""
    if tensor.dim() or tensor.requires_grad or owner_of(tensor, context.roots) is not None:
        return False
    return variable_name(tensor, context.variables, context.entries) == UNNAMED


def _hands_on_a_number(op: Op) -> bool:
    return is_movement(op.func) and not op.written and all(not output.dim() for output in op.outputs)
