"""Whether what comes out still tells the samples of a batch apart."""

from __future__ import annotations

import itertools
import operator
from typing import TYPE_CHECKING

from torchdebug_magics.format import shape
from torchdebug_magics.instruments.shapes.leaves import named_tensors, sizes

if TYPE_CHECKING:
    from torchdebug_magics.instruments.shapes.forward import Forward

__all__ = ["mixed_batch"]


def mixed_batch(run: Forward) -> str:
    """In words, where an output has no dimension of the batch's size; empty where it has one, or there is no batch to tell.

    Leading dimensions may have been joined, as those of a batch of sequences: 2 x 5 x 8 becomes 10 x 8.
    """
    inputs = [sizes(tensor) for _, tensor in named_tensors(run.given.named_values()) if tensor.dim() > 1]
    batches = {one[0] for one in inputs}
    if len(batches) != 1 or batches <= {0, 1}:
        return ""
    if any(getattr(call.module, "batch_first", True) is False for call in run.calls.made):  # steps first, and the batch may be second
        batches |= {one[1] for one in inputs} - {1}
    joined = {size for one in inputs for size in itertools.accumulate(one, operator.mul)}
    for _, tensor in named_tensors(run.output):
        found = sizes(tensor)
        if found and not batches.intersection(found) and found[0] not in joined:
            return f"comes through, but gives {shape(found)} for an input of {shape(inputs[0])}: the batch is lost"
    return ""
