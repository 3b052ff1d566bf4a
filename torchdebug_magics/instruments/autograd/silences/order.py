"""Steps in the wrong order: ``zeroed_before_step``, ``stepped_without_backward``, ``never_stepped``, ``never_zeroed``."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from torchdebug_magics.instruments.autograd.course import Backward, Update
from torchdebug_magics.instruments.autograd.report import Finding
from torchdebug_magics.instruments.autograd.silences.named import variable_of
from torchdebug_magics.instruments.autograd.silences.watched import BackwardSeen, StepSeen
from torchdebug_magics.probing.modules import live
from torchdebug_magics.probing.where import excerpt

if TYPE_CHECKING:
    from torchdebug_magics.instruments.autograd.course import Course
    from torchdebug_magics.instruments.autograd.recording.tape import Tape
    from torchdebug_magics.instruments.autograd.silences.watched import Watched
    from torchdebug_magics.probing.lines import Line
    from torchdebug_magics.report import Location

__all__ = ["wrong_order"]

_IN_A_LOOP = 3
"""Backward passes without an update, from which on an update is missing."""


def wrong_order(watched: Watched, _tape: Tape, course: Course) -> list[Finding]:
    """At most one of each."""
    found = [_without_gradients(seen, course) for seen in watched.steps if not seen.with_gradient]
    at_every_step = len([one for one in found if one is not None]) == len(watched.steps)
    first = found[0] if found and at_every_step else None
    return [one for one in (first, _never_stepped(watched, course), _never_zeroed(watched, course)) if one is not None]


def _finding(kind: str, headline: str, where: Location | None, fix: str, **more: object) -> Finding:
    return Finding(kind=kind, raised=False, headline=headline, location=where, fix=fix, excerpt=excerpt(where) if where else (), **more)  # type: ignore[arg-type]


def _at(line: Line | None) -> Location | None:
    return line.location if line is not None else None


def _without_gradients(seen: StepSeen, course: Course) -> Finding | None:
    """An update for which no gradient is there, or only zeros."""
    if not seen.without and not seen.zero_count:
        return None
    steps = [
        place
        for place, event in enumerate(course.events)
        if isinstance(event, Update) and event.what == "step" and event.optimizer == seen.key
    ]
    if not steps:
        return None
    step = course.events[steps[0]]
    before = course.events[: steps[0]]
    name = seen.name
    backwards = [place for place, event in enumerate(before) if isinstance(event, Backward)]
    zeroed = [event for event in before[backwards[-1] if backwards else 0 :] if isinstance(event, Update) and event.what == "zero_grad"]
    if backwards and zeroed:
        where = _at(zeroed[-1].line)
        source = where.source if where is not None else "zero_grad()"
        return _finding(
            "zeroed_before_step",
            f"the gradients were set to zero after backward(), before `{name}.step()`",
            where,
            f"move `{source}` above the backward() call",
            first_backward_at=_at(before[backwards[-1]].line),
            explanation="the update sees no gradient, so nothing is learned",
        )
    if backwards:
        return None
    later = next((event for event in course.events[steps[0] :] if isinstance(event, Backward)), None)
    where = _at(step.line)
    return _finding(
        "stepped_without_backward",
        f"`{name}.step()` ran without gradients: no backward() came before it",
        where,
        "call `loss.backward()` before the step" if later is None else f"move the step below `{_source(later.line)}`",
        first_backward_at=_at(later.line) if later is not None else None,
    )


def _source(line: Line | None) -> str:
    where = _at(line)
    return where.source if where is not None else "backward()"


def _never_stepped(watched: Watched, course: Course) -> Finding | None:
    if course.steps_count or course.backward_count < _IN_A_LOOP or live(torch.amp.GradScaler):
        return None
    zeroed = {event.optimizer for event in course.events if isinstance(event, Update)}
    reached = {id(leaf) for seen in watched.backwards for ref in seen.leaves if (leaf := ref()) is not None}
    for optimizer in live(torch.optim.Optimizer):
        held = {id(one) for group in optimizer.param_groups for one in group["params"]}
        of_model = any(
            isinstance(one, torch.nn.Module) and held & {id(part) for part in one.parameters()}
            for one in live(torch.nn.Module)
            if id(one) in zeroed
        )
        if held & reached and (id(optimizer) in zeroed or of_model):
            name = variable_of(optimizer) or "optimizer"
            where = _at(course.backwards[-1].line)
            return _finding(
                "never_stepped",
                f"`{name}.step()` is never called: {course.backward_count} backward passes and no update",
                where,
                f"add `{name}.step()` after `{where.source if where is not None else 'backward()'}`",
            )
    return None


def _never_zeroed(watched: Watched, course: Course) -> Finding | None:
    for key in {seen.key for seen in watched.steps}:
        places = [place for place, seen in enumerate(watched.order) if isinstance(seen, StepSeen) and seen.key == key]
        for first, last in pairwise(places):
            between = [one for one in watched.order[first:last] if isinstance(one, BackwardSeen) and key in one.reached]
            if between and all(key in one.left_over for one in between):
                step = next(
                    event for event in course.events if isinstance(event, Update) and event.what == "step" and event.optimizer == key
                )
                name = next(seen.name for seen in watched.steps if seen.key == key)
                where = _at(step.line)
                return _finding(
                    "never_zeroed",
                    f"the gradients of `{name}` are never set to zero: each step adds to those of all steps before",
                    where,
                    f"`{name}.zero_grad()` after `{where.source if where is not None else f'{name}.step()'}`",
                    is_hint=True,
                )
    return None
