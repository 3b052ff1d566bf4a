"""Suspects in the samples: contradicting labels, input scale, and an output that does not depend on the input."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from torchdebug_magics.format import listed, number
from torchdebug_magics.instruments.overfit.suspects.loss_inputs import rows_of
from torchdebug_magics.instruments.overfit.training.change import Change

if TYPE_CHECKING:
    from torchdebug_magics.instruments.overfit.suspects.suspect_evidence import Evidence

__all__ = ["capacity", "constant_output", "suspects"]

_ALMOST = 0.98
_SMALL, _LARGE = 0.05, 20.0
"""Standard deviations of an input that are far from 1."""


def suspects(seen: Evidence) -> Iterator[Change]:
    """Equal samples with different labels; inputs far from unit scale."""
    yield from _conflicts(seen)
    yield from _scale(seen)


def _conflicts(seen: Evidence) -> Iterator[Change]:
    groups = conflicting_rows(seen)
    if not groups:
        return
    assert seen.samples is not None
    rows = tuple(sorted(row for group in groups for row in group))
    dropped = {row for group in groups for row in group[1:]}
    keep = torch.tensor([row for row in range(seen.samples) if row not in dropped])
    yield Change(
        suspect="conflicting_labels",
        text=f"without row{'s' if len(dropped) > 1 else ''} {', '.join(map(str, sorted(dropped)))}",
        headline=f"Rows {listed([*map(str, rows)])} are equal inputs with different labels",
        fix=f"correct the labels of rows {', '.join(map(str, rows))}, or keep one of each group",
        rows=rows,
        on_call=rows_of(seen, keep),
        is_evident=True,
    )


def conflicting_rows(seen: Evidence) -> list[list[int]]:
    """Groups of samples with equal inputs whose targets differ."""
    samples, first = seen.base.first.samples, seen.base.first
    targets = [call.target for call in first.losses]
    inputs = [one for one in first.inputs if one.dim() and len(one) == samples and not any(one is other for other in targets)]
    if samples is None or samples < 2 or not inputs or not targets or any(len(one) % samples for one in targets if one.dim()):  # noqa: PLR2004
        return []
    labels = torch.cat([one.detach().reshape(samples, -1).double() for one in targets if one.dim()], 1)
    values = torch.cat([one.detach().reshape(samples, -1).double() for one in inputs if not one.is_complex()], 1)
    _, group = values.unique(dim=0, return_inverse=True)
    found = []
    for number_of_group in group.unique().tolist():
        rows = (group == number_of_group).nonzero().flatten()
        if len(rows) > 1 and bool((labels[rows] != labels[rows[:1]]).any()):
            found.append([int(row) for row in rows])
    return found


def _scale(seen: Evidence) -> Iterator[Change]:
    inputs = [one.detach().float() for one in seen.base.first.inputs if one.is_floating_point() and one.numel() > 1]
    far = next((one for one in inputs if _is_far(one)), None)
    if far is None:
        return
    mean, deviation = float(far.mean()), float(far.std())
    name = seen.names.get("batch", "inputs")
    yield Change(
        suspect="input_scale",
        text="inputs with mean 0 and standard deviation 1",
        headline=f"The inputs have mean {number(mean)} and standard deviation {number(deviation)}: normalize them",
        fix=f"normalize the inputs of `{name}`: `x = (x - {mean:.6g}) / {max(deviation, 1e-12):.6g}`",
        factor=deviation,
        on_input=_normalized,
    )


def _is_far(values: Tensor) -> bool:
    columns = values.reshape(len(values), -1) if values.dim() > 1 else values.reshape(-1, 1)
    deviation, mean = float(values.std()), abs(float(values.mean()))
    spread = columns.std(0) if len(columns) > 1 else values.std().reshape(1)
    is_uneven = values.dim() == 2 and float(spread.max()) > _LARGE * max(float(spread.median()), 1e-12)  # noqa: PLR2004 - a table
    return not _SMALL <= deviation <= _LARGE or mean > _LARGE * max(deviation, _SMALL) or is_uneven


def _normalized(values: Tensor) -> Tensor:
    if values.numel() < 2 or not _is_far(values.detach().float()):  # noqa: PLR2004 - of one number there is no deviation
        return values
    if values.dim() == 2 and len(values) > 1:  # noqa: PLR2004 - a table: by column
        deviation = values.std(0)
        return (values - values.mean(0)) / torch.where(deviation > 0, deviation, torch.ones_like(deviation))
    return (values - values.mean()) / values.std().clamp_min(1e-12)


def constant_output(seen: Evidence) -> Iterator[Change]:
    """The same output for all samples, at the first step and at the last one."""
    first, last = seen.base.first, seen.base.last
    if last is None or not first.last_is_same or not _differ(first.inputs) or not (last.last_is_same or _is_by_chance(seen)):
        return
    place, module = first.same_rows or (None, "")
    where = f" from {place} on" if place is not None else ""
    yield Change(
        suspect="output_ignores_input",
        text="",
        headline=f"The output is the same for all samples{where}: it does not depend on the input",
        fix=f"make `{place.source}` depend on the input" if place is not None and place.source else "make the output depend on the input",
        location=place,
        module=module,
        is_evident=True,
    )


def _is_by_chance(seen: Evidence) -> bool:
    """Whether the loss has come no lower than the shares of the labels explain."""
    entropies = [call.entropy() for call in seen.base.first.losses if call.is_classes]
    return bool(entropies) and len(entropies) == len(seen.base.first.losses) and seen.base.losses[-1] >= _ALMOST * sum(entropies) > 0


def _differ(inputs: list[Tensor]) -> bool:
    """Whether any two samples do."""
    within = any(one.dim() and len(one) == len(inputs[0]) and bool((one != one[:1]).any()) for one in inputs if inputs[0].dim())
    return within or any(one.shape == inputs[0].shape and bool((one != inputs[0]).any()) for one in inputs[1:])


def capacity(seen: Evidence) -> Iterator[Change]:
    """Fewer samples: that the model learns these alone shows that nothing else is wrong."""
    samples = seen.samples
    if samples is None or samples <= 2 or seen.base.first.samples != samples:  # noqa: PLR2004 - the trial has two
        return
    change = rows_of(seen, torch.arange(2))
    if change is not None:
        yield replace(
            too_small(seen),
            text="the first 2 samples only",
            headline=f"The model is too small: it learns 2 samples, but not {samples}",
            on_call=change,
        )


def too_small(seen: Evidence) -> Change:
    """What is left where nothing else helps."""
    return Change(
        suspect="capacity",
        text="",
        headline=f"The model is likely too small for {seen.subject}: no other change helps",
        fix=f"give `{seen.model}` more units or layers",
    )
