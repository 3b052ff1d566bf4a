"""Whether what comes out still tells the samples of a batch apart, and whether a batch of another size would, too."""

from __future__ import annotations

import itertools
import operator
import re
from typing import TYPE_CHECKING

import torch

from torchdebug_magics.format import shape
from torchdebug_magics.instruments.shapes.leaves import named_tensors, sizes
from torchdebug_magics.instruments.shapes.repair.edit import Change, Edit

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torchdebug_magics.instruments.shapes.forward import Forward

__all__ = ["fixed_batch", "mixed_batch"]


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


def fixed_batch(edits: Sequence[Edit], run: Forward, again: Callable[[Sequence[Edit]], Forward | None]) -> str:
    """In words, where an edit names the size of this very batch, and does not hold for one of twice that; empty elsewhere."""
    tensors = [(name, tensor) for name, tensor in named_tensors(run.given.named_values()) if tensor.dim()]
    size = next((sizes(tensor)[0] for _, tensor in tensors if tensor.dim() > 1), 0)
    if size < 2 or not any(_names(edit, size) for edit in edits):
        return ""
    twice = Change(str, lambda one: torch.cat([one, one]))
    larger = again([*edits, *(Edit("", inputs={name: twice}) for name, tensor in tensors if sizes(tensor)[0] == size)])
    return f"holds for a batch of {size} alone" if larger is not None and larger.error is not None else ""


def _names(edit: Edit, size: int) -> bool:
    """Whether it writes this number where the user had not, into what runs with every batch."""
    sites = [site for site in (*(one.site for one in edit.ops), *(one.site for one in edit.calls)) if site is not None]
    numbers = re.compile(rf"\b{size}\b")
    plain = bool(sites) and not edit.modules and "\n" not in edit.code  # no module that is made new, whose numbers are others
    return plain and len(numbers.findall(edit.code)) > sum(len(numbers.findall(site.text)) for site in sites)
