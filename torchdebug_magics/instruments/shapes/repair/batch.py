"""Whether what comes out still tells the samples of a batch apart, and whether a batch of another size would, too."""

from __future__ import annotations

import itertools
import operator
import re
from typing import TYPE_CHECKING

import torch

from torchdebug_magics.format import shape
from torchdebug_magics.instruments.shapes.repair.edit import Change, Edit
from torchdebug_magics.probing.dry_runs.leaves import named_tensors, sizes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torchdebug_magics.instruments.shapes.run.forward import Forward

__all__ = ["bound_to", "mixed_batch"]


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
            return f"runs, but returns {shape(found)} for an input of {shape(inputs[0])}: the batch dimension is lost"
    return ""


def bound_to(edits: Sequence[Edit], run: Forward, again: Callable[[Sequence[Edit]], Forward | None]) -> str:
    """In words, to which size of the inputs the edits are bound, as they write it down and another one does not succeed.

    A batch twice as large is tried, or one step fewer. Where no edit names the size, it is the user's own code that wants it.
    """
    tensors = [(name, tensor) for name, tensor in named_tensors(run.given.named_values()) if tensor.dim()]
    batch, *rest = next((sizes(tensor) for _, tensor in tensors if tensor.dim() > 1), (0,))
    if any(_names(edit, batch) for edit in edits):
        larger = [Edit("", inputs={name: _TWICE}) for name, one in tensors if sizes(one)[0] == batch]
        if _is_refused(again([*edits, *larger])):
            return f"only for a batch of {batch}"
    steps = rest[0] if len(rest) in {1, 2} else 0
    if steps > 1 and any(_names(edit, steps) for edit in edits):
        shorter = [Edit("", inputs={name: _SHORTER}) for name, one in tensors if sizes(one)[:2] == (batch, steps)]
        return f"only for {steps} steps" if _is_refused(again([*edits, *shorter])) else ""
    return ""


def _is_refused(run: Forward | None) -> bool:
    return run is not None and run.error is not None


_TWICE = Change(str, lambda one: torch.cat([one, one]))
_SHORTER = Change(str, lambda one: one[:, :-1])


def _names(edit: Edit, size: int) -> bool:
    """Whether it writes this number where the user had not, into what runs with every batch; a single one may be any number."""
    sites = [site for site in (*(one.site for one in edit.ops), *(one.site for one in edit.calls)) if site is not None]
    numbers = re.compile(rf"{_DIMENSIONS}|\b({size})\b")
    plain = bool(sites) and not edit.modules and "\n" not in edit.code  # no module that is made new, whose numbers are others
    return plain and size > 1 and _many(numbers, edit.code) > sum(_many(numbers, site.text) for site in sites)


_DIMENSIONS = r"\.(?:permute|transpose|flatten|unsqueeze|squeeze|movedim|select|mean|sum|argmax|size)\([^()]*\)|shape\[[^]]*\]|dim=-?\d+"
"""Where a number is a dimension, and no size."""


def _many(numbers: re.Pattern[str], code: str) -> int:
    return sum(bool(found) for found in numbers.findall(code))
