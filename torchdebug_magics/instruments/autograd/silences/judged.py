"""What the recorded steps mean: each fault that raised nothing, worst first."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch

from torchdebug_magics.instruments.autograd.errors.raised import statement_at, writes_to
from torchdebug_magics.instruments.autograd.report import AutogradFinding, Kind
from torchdebug_magics.instruments.autograd.silences.leaking_batch import batch_leaks
from torchdebug_magics.instruments.autograd.silences.left_out import missing_gradients, nothing_reached, wrong_tensors
from torchdebug_magics.instruments.autograd.silences.modes import double_softmax, wrong_modes
from torchdebug_magics.instruments.autograd.silences.watched import Alive, Watched, tensors_of
from torchdebug_magics.instruments.autograd.training_course import Backward, Event, Step, Zeroed
from torchdebug_magics.probing.lines import Line
from torchdebug_magics.probing.names import variable_of
from torchdebug_magics.probing.syntax import last_name, nodes, tree_of
from torchdebug_magics.probing.where import excerpt, location
from torchdebug_magics.report import Location

_ORDER: tuple[Kind, ...] = (
    "stale_value", "grad_disabled", "stale_optimizer", "no_gradient", "zeroed_before_step", "stepped_without_backward", "never_stepped",
    "not_in_optimizer", "leaking_batch", "double_softmax", "never_zeroed", "train_in_eval_mode", "eval_in_train_mode",
)  # fmt: skip
_FOLLOWS: Mapping[Kind, frozenset[Kind]] = {
    "zeroed_before_step": frozenset({"grad_disabled", "stale_optimizer", "no_gradient"}),
    "stepped_without_backward": frozenset({"grad_disabled", "stale_optimizer", "no_gradient"}),
    "not_in_optimizer": frozenset({"stale_optimizer"}),
    "no_gradient": frozenset({"stale_optimizer", "grad_disabled"}),
}
"""What is only a consequence where one of the others is found."""
_WASTED = 2
"""Number of discarded backward passes from which on they are reported; a single skipped step may be intended."""
_IN_A_LOOP = 3
"""Number of backward passes without an update from which on the update is reported missing."""


def silent_faults(watched: Watched) -> list[AutogradFinding]:
    """As far as the recorded steps tell until now."""
    judges: tuple[Callable[[Watched, Alive], list[AutogradFinding]], ...] = (
        stale_values, nothing_reached, wrong_order, wrong_tensors, missing_gradients, lambda seen, _: batch_leaks(seen.leak),
        double_softmax, wrong_modes,
    )  # fmt: skip
    alive = Alive.now()
    return [finding for judge in judges for finding in judge(watched, alive)]


def worst_first(findings: Sequence[AutogradFinding]) -> tuple[AutogradFinding, ...]:
    """Each once, without those that follow from others."""
    kinds = {one.kind for one in findings}
    known = {
        (one.kind, str(one.location), one.parameters): one for one in reversed(findings) if not _FOLLOWS.get(one.kind, frozenset()) & kinds
    }
    return tuple(sorted(known.values(), key=lambda one: _ORDER.index(one.kind)))


def stale_values(watched: Watched, alive: Alive) -> list[AutogradFinding]:
    """The first tensor overwritten unnoticed, as a finding."""
    for saver, writer, memory, ratio in [watched.stale] if watched.stale is not None else []:
        where = writer.line.location if writer.line is not None else None
        members = [name for name, held in alive.members() if watched.recorder.tape.numbers.of(held) == memory]
        statement = statement_at(where)
        name = members[0] if members else next(writes_to(statement), None) if statement is not None else None
        is_update = writer.in_optimizer or writer.name.startswith("_fused_")
        source = where.source if where is not None else "the write"
        return [
            AutogradFinding(
                kind="stale_value",
                raised=False,
                headline=f"{f'`{name}`' if name else 'a tensor'} was overwritten after `{saver.name}` saved it for backward",
                location=where,
                op=saver.name,
                saved_at=saver.line.location if saver.line is not None else None,
                writer_op=writer.name,
                tensor=name,
                module=saver.module,
                parameters=tuple(members),
                error_ratio=ratio,
                fix=f"move `{source}` below the last backward() of the step"
                if is_update
                else f"move `{source}` below backward(), or write into a copy (`.clone()`)",
                explanation="PyTorch's version check does not see this write, so backward() used the new values and raised nothing",
                excerpt=excerpt(where) if where is not None else (),
            )
        ]
    return []


def wrong_order(watched: Watched, alive: Alive) -> list[AutogradFinding]:
    """Checks the order of backward(), step() and zero_grad() for each optimizer."""
    events = watched.course.events
    found = [_never_stepped(watched, alive) or _only_added_up(watched, alive)]
    for key in dict.fromkeys(step.optimizer for step in watched.course.steps):
        places = [place for place, one in enumerate(events) if isinstance(one, Step) and one.is_recorded and one.optimizer == key]
        steps = [one for one in watched.course.steps if one.optimizer == key]
        if not any(step.nonzero_count for step in steps) and steps[0].parameters:
            found.append(_without_gradients(steps[0], events[: places[0]], events))
        else:
            found.append(_never_zeroed(steps, [events[first:last] for first, last in pairwise(places)]))
            found.append(_thrown_away(steps[0], [events[first:last] for first, last in pairwise([0, *places])]))
    return [one for one in found if one is not None]


def _finding(kind: Kind, headline: str, line: Line | Location | None, fix: str, **more: Any) -> AutogradFinding:
    where = line.location if isinstance(line, Line) else line
    lines = excerpt(where) if where else ()
    return AutogradFinding(kind=kind, raised=False, headline=headline, location=where, fix=fix, excerpt=lines, **more)


def _without_gradients(step: Step, before: Sequence[Event], events: Sequence[Event]) -> AutogradFinding | None:
    """Explains an update without gradients, or with zeros only."""
    name = step.name
    reaching = [place for place, one in enumerate(before) if isinstance(one, Backward) and one.leaves & step.parameters]
    if not reaching:
        later = next((one for one in events if isinstance(one, Backward) and one.leaves & step.parameters), None)
        return _finding(
            "stepped_without_backward",
            f"`{name}.step()` ran without gradients",
            step.line,
            "call `loss.backward()` before the step" if later is None else f"move the step below `{_source(later.line)}`",
            explanation="no backward() had reached the parameters, so the step changed nothing",
            first_backward_at=later.line.location if later is not None and later.line is not None else None,
        )
    last = before[reaching[-1]]
    zeroed = [one for one in before[reaching[-1] :] if isinstance(one, Zeroed) and one.parameters & step.parameters]
    where = zeroed[-1].line.location if zeroed and zeroed[-1].line is not None else None if zeroed else _set_to_none(step)
    if where is None:
        return None
    return _finding(
        "zeroed_before_step",
        f"the gradients were zeroed between backward() and `{name}.step()`",
        where,
        f"move `{where.source}` above the backward() call",
        first_backward_at=last.line.location if isinstance(last, Backward) and last.line is not None else None,
        explanation="step() finds no gradients, so the parameters do not change",
    )


def _thrown_away(step: Step, between: Sequence[Sequence[Event]]) -> AutogradFinding | None:
    """Finds backward passes whose gradients are zeroed unread before each update, as in broken gradient accumulation."""
    wasted = [[one for one in pairwise(events) if _is_wasted(*one, step)] for events in between]
    count = sum(map(len, wasted))
    if not all(wasted) or count < _WASTED:  # once in a while, a step is skipped on purpose
        return None
    (backward, zeroed), name = wasted[0][0], step.name
    return _finding(
        "zeroed_before_step",
        f"the gradients of {count} backward passes were zeroed before `{name}.step()`",
        zeroed.line,
        f"move `{_source(zeroed.line)}` below `{_source(step.line)}`, so that gradients accumulate until the update",
        first_backward_at=backward.line.location if backward.line is not None else None,
        explanation="each update uses only the last backward pass before it",
    )


def _is_wasted(one: Event, after: Event, step: Step) -> bool:
    if not isinstance(one, Backward) or not one.is_recorded or not one.leaves & step.parameters:
        return False
    return isinstance(after, Zeroed) and one.leaves <= after.parameters and not after.is_read


def _set_to_none(step: Step) -> Location | None:
    """``p.grad = None``, which no hook sees, by the text of the file that makes the step."""
    if step.line is None:
        return None
    lines = (node.lineno for node in nodes(ast.Assign, tree_of(step.line.file)) if last_name(node.targets[0]) == "grad")
    return next((location(step.line.file, line, "<module>") for line in lines), None)


def _source(line: Line | None) -> str:
    return line.location.source if line is not None else "backward()"


def _never_stepped(watched: Watched, alive: Alive) -> AutogradFinding | None:
    """Finds an optimizer whose gradients are zeroed and computed repeatedly, but that never steps."""
    course = watched.course
    if any(_may_skip(scaler) for scaler in alive.scalers):
        return None
    updated = watched.updated()
    parameters = {id(one) for root in alive.roots for one in root.parameters()}
    for optimizer in alive.optimizers:
        held = set(map(id, tensors_of(optimizer))) - updated  # another optimizer may make the update for this one
        # A gradient of the inputs is asked for itself, as by a saliency map or an attack.
        reached = [one for one in course.backwards if one.leaves & held and one.leaves <= parameters | held]
        zeroed = [one for one in course.events if isinstance(one, Zeroed) and one.parameters & held]
        if id(optimizer) not in course.stepped and len(reached) >= _IN_A_LOOP and len(zeroed) >= _IN_A_LOOP - 1:
            name = variable_of(optimizer) or "optimizer"
            return _finding(
                "never_stepped",
                f"`{name}.step()` is never called, after {len(reached)} backward passes",
                reached[0].line,
                f"add `{name}.step()` after `{_source(reached[0].line)}`",
            )
    return None


def _only_added_up(watched: Watched, alive: Alive) -> AutogradFinding | None:
    """Finds a loop of backward passes in which nothing zeroes the gradients, and nothing uses them."""
    course, by_hand = watched.course, watched.written_by_hand()
    parameters = {id(one): one for root in alive.roots for one in root.parameters()}
    # A gradient of the inputs is asked for itself, as by a saliency map or an attack.
    passes = [one for one in course.backwards if one.leaves and one.leaves <= parameters.keys()]
    loops = [one for earlier, one in pairwise(passes) if one.left_over & earlier.leaves and one.line is earlier.line]
    if not loops or course.stepped or any(watched.recorder.use(parameters[key]).memory in by_hand for key in loops[0].leaves):
        return None
    owner = next((one for one in alive.optimizers if loops[0].leaves & set(map(id, tensors_of(one)))), None)
    name = "" if owner is None else variable_of(owner)
    source = _source(loops[0].line)
    return _finding(
        "never_stepped",
        f"{len(passes)} backward passes without zero_grad() or step(): gradients add up",
        loops[0].line,
        f"call `{name}.zero_grad()` before `{source}` and `{name}.step()` after it" if name else "",
        explanation="backward() adds to `.grad`, and no parameter was updated",
        is_hint=True,
    )


def _may_skip(scaler: torch.amp.GradScaler) -> bool:
    """Whether the scaler may have skipped updates on purpose; after a step that it takes, its growth tracker is above zero."""
    tracker = scaler._growth_tracker
    return scaler.is_enabled() and (tracker is None or not int(tracker))


def _never_zeroed(steps: Sequence[Step], between: Sequence[Sequence[Event]]) -> AutogradFinding | None:
    """Finds an optimizer whose tensors still hold the previous gradients at every backward pass between two updates."""
    for events in between:
        reaching = [one for one in events if isinstance(one, Backward) and one.is_recorded and one.leaves & steps[0].parameters]
        if reaching and all(one.left_over & steps[0].parameters for one in reaching):
            name = steps[0].name
            return _finding(
                "never_zeroed",
                f"the gradients of `{name}` are never zeroed",
                steps[0].line,
                f"call `{name}.zero_grad()` after `{_source(steps[0].line)}`",
                explanation="backward() adds to `.grad`, so each update uses the sum over all previous steps",
                is_hint=True,
            )
    return None
