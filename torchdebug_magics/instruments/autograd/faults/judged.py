"""What the recorded steps mean: each fault that raised nothing, in the order and the modes of the calls of a training."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise

import torch

from torchdebug_magics.format import listed
from torchdebug_magics.instruments.autograd.faults import (
    broadcasts,
    left_out,
    loss_terms,
    meant_axes,
    misfit_losses,
    modes,
    remade_leaves,
    shared_memory,
    wasted_parts,
    zero_gradients,
)
from torchdebug_magics.instruments.autograd.faults.data import misused, overwritten_inputs, unread
from torchdebug_magics.instruments.autograd.faults.data.counted import miscounted
from torchdebug_magics.instruments.autograd.faults.data.leaking_batch import predicted_leak
from torchdebug_magics.instruments.autograd.faults.watched import TrainingFacts, WatchedTraining
from torchdebug_magics.instruments.autograd.report import AutogradFinding, Kind
from torchdebug_magics.instruments.autograd.source_readings import code_at, edited, finding, loop_around
from torchdebug_magics.instruments.autograd.tape import Backward, Event, OptimizerStep, Zeroed
from torchdebug_magics.probing.modules import live
from torchdebug_magics.probing.names import variable_of
from torchdebug_magics.probing.source.syntax import Loop, last_name, nodes, tree_of
from torchdebug_magics.probing.source.user_code import location
from torchdebug_magics.probing.steps import parameters_of
from torchdebug_magics.report import Location

_ORDER: tuple[Kind, ...] = (
    "no_batches", "remade", "stale_value", "wrong_backward", "broadcast", "scrambled", "one_row", "other_axis", "early_reduction",
    "driven_value", "wasted_term", "repeated_samples", "mixed_derivatives", "dropped_result", "grad_disabled", "stale_optimizer",
    "no_gradient", "zeroed_before_step", "stepped_without_backward", "never_stepped", "not_in_optimizer", "shared_memory", "leaking_batch",
    "known_answer", "turned_mask", "double_softmax", "loss_input", "never_zeroed", "train_in_eval_mode", "frozen_statistics",
    "eval_in_train_mode",
    "evaluated_on_bytes", "sorted_batches", "unread_batches", "compared_scores", "miscounted", "frozen_in_vain", "contradicting_labels",
    "evaluated_on_training", "unlike_reductions", "overwritten_input", "never_loaded", "used_up", "refitted",
    "no_activation",
)  # fmt: skip
LASTING: frozenset[Kind] = frozenset({
    "remade", "stale_value", "wrong_backward", "broadcast", "scrambled", "one_row", "other_axis", "early_reduction", "driven_value",
    "wasted_term", "repeated_samples", "mixed_derivatives", "unlike_reductions", "overwritten_input", "dropped_result",
    "shared_memory", "leaking_batch", "known_answer", "double_softmax", "loss_input", "compared_scores", "miscounted", "unread_batches",
    "frozen_in_vain",
})  # fmt: skip
"""What a step has shown, and no later one can undo; what others show is that something is missing, and may come."""
_FOLLOWS: Mapping[Kind, frozenset[Kind]] = {
    "leaking_batch": frozenset({"scrambled"}),
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


def silent_faults(watched: WatchedTraining) -> list[AutogradFinding]:
    """As far as the recorded steps tell until now."""
    facts = TrainingFacts(watched)
    uncalled = list(unread.uncalled_methods(facts))
    known = {fault.kind for fault in uncalled}  # what follows from a method that is not called
    return uncalled + [fault for faults in _FAULTS for fault in faults(facts) if fault.kind not in known]


def worst_first(findings: Sequence[AutogradFinding]) -> tuple[AutogradFinding, ...]:
    """Each once, without those that follow from others."""
    kinds = {fault.kind for fault in findings}
    known = {
        (fault.kind, str(fault.location), fault.parameters): fault
        for fault in reversed(findings)
        if not _FOLLOWS.get(fault.kind, frozenset()) & kinds
    }
    return tuple(sorted(known.values(), key=lambda fault: _ORDER.index(fault.kind)))


def _seen_at_once(facts: TrainingFacts) -> Iterator[AutogradFinding]:
    """What was seen as it happened, and needs no other step."""
    watched = facts.watched
    empty = watched.loaders.empty
    if empty is not None and empty.is_hint and facts.course.steps_count:
        empty = None  # beside a training, no validation set may be meant
    has_classes = any(op.name.startswith("nll_loss") for op in facts.tape.ops)
    leak = watched.leak if facts.course.backwards else predicted_leak(watched.recorder)
    loaders, lasting = watched.loaders, (watched.stale, leak, watched.restored)
    yield from filter(None, (empty, loaders.unread_batches(), loaders.repeated, *lasting))
    yield from loaders.samples.faults(has_classes=has_classes)
    yield from list(miscounted(facts, loaders.sizes))[:1]
    yield from filter(None, (loaders.stored.rewritten(), shared_memory.repeated_module(facts.roots)))
    yield from watched.recorder.functions.wrong
    yield from watched.derivatives.faults


def _shared_memory(facts: TrainingFacts) -> Iterator[AutogradFinding]:
    """What should be a copy of the parameters, and is updated with them."""
    updated = {use.memory for op in facts.tape.ops if op.in_optimizer for use in op.writes}
    compared = facts.watched.recorder.comparisons.values()
    if (pair := next((pair for pair in compared if pair[1] and pair[0].reads[0].memory in updated), None)) is not None:
        yield shared_memory.comparison_finding(*pair, facts.files)
    written = {use.memory for op in facts.tape.ops if op.in_optimizer or not op.initializes for use in op.writes}
    if lists := list(shared_memory.repeated_entries(facts.statements(), written, facts.tape.numbers.of)):
        yield shared_memory.repeated_finding(lists)
    trained = [root for root in facts.roots if not facts.updated.isdisjoint(map(id, root.parameters()))]
    if (alias := shared_memory.alias_finding(trained, facts.statements())) is not None:
        yield alias


def wrong_order(facts: TrainingFacts) -> Iterator[AutogradFinding]:
    """Updates that are missing, or that come before the gradients; gradients zeroed too early, or never."""
    yield from list(_never_stepped(facts))[:1] or list(_updated_by_sums(facts)) or list(_only_added_up(facts))
    events = facts.course.events
    for key in dict.fromkeys(step.optimizer for step in facts.course.steps):
        places = [
            place for place, event in enumerate(events) if isinstance(event, OptimizerStep) and event.is_recorded and event.optimizer == key
        ]
        steps = [step for step in facts.course.steps if step.optimizer == key]
        if not any(step.nonzero for step in steps) and steps[0].parameters:
            yield from _without_gradients(steps[0], events[: places[0]], events)
        else:
            between = [events[first:last] for first, last in pairwise([0, *places])]
            yield from _never_zeroed(steps[0], between[1:])
            yield from _thrown_away(steps[0], between)


def _reaching(events: Sequence[Event], step: OptimizerStep) -> list[Backward]:
    """The backward passes that reach the tensors of an update."""
    return [event for event in events if isinstance(event, Backward) and event.leaves & step.parameters]


def _without_gradients(step: OptimizerStep, before: Sequence[Event], events: Sequence[Event]) -> Iterator[AutogradFinding]:
    """An update without gradients, or with zeros only."""
    name, reaching = step.name, _reaching(before, step)
    if not reaching:
        later = next(iter(_reaching(events, step)), None)
        yield finding(
            "stepped_without_backward",
            f"`{name}.step()` ran without gradients",
            step.where,
            "call `loss.backward()` before the step"
            if later is None
            else f"move `{code_at(step.where, 'step')}` below `{code_at(later.where, 'backward')}`",
            explanation="no backward() had reached the parameters, so the step changed nothing",
            first_backward_at=later.where if later is not None else None,
        )
        return
    after = before[before.index(reaching[-1]) :]
    zeroed = [event for event in after if isinstance(event, Zeroed) and event.parameters & step.parameters]
    where = zeroed[-1].where if zeroed else None
    if not zeroed and step.line is not None:  # `p.grad = None`, which no hook sees, by the text of the file that makes the step
        lines = (node.lineno for node in nodes(ast.Assign, tree_of(step.line.file)) if last_name(node.targets[0]) == "grad")
        where = next((location(step.line.file, line, "<module>") for line in lines), None)
    if where is not None:
        yield finding(
            "zeroed_before_step",
            f"the gradients were zeroed between backward() and `{name}.step()`",
            where,
            f"move `{code_at(where, 'grad')}` above `{code_at(reaching[-1].where, 'backward')}`",
            first_backward_at=reaching[-1].where,
            explanation="step() finds no gradients, so the parameters do not change",
        )


def _thrown_away(step: OptimizerStep, between: Sequence[Sequence[Event]]) -> Iterator[AutogradFinding]:
    """Backward passes whose gradients are zeroed unread before each update, as in broken gradient accumulation."""
    wasted = [
        [
            (event, after)
            for event, after in pairwise(events)
            if isinstance(event, Backward) and event.is_recorded and event.leaves & step.parameters
            if isinstance(after, Zeroed) and event.leaves <= after.parameters and not after.is_read
        ]
        for events in between
    ]
    count = sum(map(len, wasted))
    if all(wasted) and count >= _WASTED:  # once in a while, a step is skipped on purpose
        backward, zeroed = wasted[0][0]
        loop = loop_around(backward.where)
        if loop is not None and _is_behind(step.where, loop, backward.where):
            update = code_at(step.where, "step")
            yield finding(
                "zeroed_before_step",
                f"`{step.name}.step()` is outside of the loop: it uses the last of {count} backward passes",
                step.where,
                f"move `{update}` below `{code_at(backward.where, 'backward')}`",
                first_backward_at=backward.where,
                explanation=f"`{code_at(zeroed.where, 'zero')}` drops the gradients of each pass before the update could use them",
            )
            return
        yield finding(
            "zeroed_before_step",
            f"the gradients of {count} backward passes were zeroed before `{step.name}.step()`",
            zeroed.where,
            f"move `{code_at(zeroed.where, 'zero')}` below `{code_at(step.where, 'step')}`, so that gradients accumulate until the update",
            first_backward_at=backward.where,
            explanation="each update uses only the last backward pass before it",
        )


def _is_behind(step: Location | None, loop: Loop, inside: Location | None) -> bool:
    """Whether an update stands behind the loop in whose body another line of the same function is."""
    is_there = step is not None and inside is not None and (step.file, step.function) == (inside.file, inside.function)
    return is_there and step is not None and step.line > (loop.end_lineno or 0)


def _never_zeroed(step: OptimizerStep, between: Sequence[Sequence[Event]]) -> Iterator[AutogradFinding]:
    """An optimizer whose tensors still hold the previous gradients at every backward pass between two updates."""
    for events in between:
        reaching = [event for event in _reaching(events, step) if event.is_recorded]
        if reaching and all(event.left_over & step.parameters for event in reaching):
            yield finding(
                "never_zeroed",
                f"the gradients of `{step.name}` are never zeroed",
                step.where,
                f"call `{step.name}.zero_grad()` after `{code_at(step.where, 'step')}`",
                explanation="backward() adds to `.grad`, so each update uses the sum over all previous steps",
                is_hint=True,
            )
            return


def _never_stepped(facts: TrainingFacts) -> Iterator[AutogradFinding]:
    """An optimizer whose gradients are zeroed and computed repeatedly, but that never steps."""
    trackers = [scaler._growth_tracker for scaler in facts.scalers if scaler.is_enabled()]
    if any(tracker is None or not int(tracker) for tracker in trackers):
        return  # updates may have been skipped on purpose: after a step that a scaler takes, its growth tracker is above zero
    course = facts.course
    for optimizer in facts.all_optimizers:
        members = set(map(id, parameters_of(optimizer))) - facts.updated  # another optimizer may make the update for this one
        # A gradient of the inputs is asked for itself, as by a saliency map or an attack.
        reached = [
            backward for backward in course.backwards if backward.leaves & members and backward.leaves <= facts.parameters.keys() | members
        ]
        zeroed = [event for event in course.events if isinstance(event, Zeroed) and event.parameters & members]
        if id(optimizer) not in course.stepped and len(reached) >= _IN_A_LOOP and len(zeroed) >= _IN_A_LOOP - 1:
            name = variable_of(optimizer) or "optimizer"
            headline = f"`{name}.step()` is never called, after {len(reached)} backward passes"
            yield finding(
                "never_stepped", headline, reached[0].where, f"add `{name}.step()` after `{code_at(reached[0].where, 'backward')}`"
            )


def _updated_by_sums(facts: TrainingFacts) -> Iterator[AutogradFinding]:
    """Tensors that the user's code updates by their gradients, each time by the sum of all so far."""
    passes = [backward for backward in facts.course.backwards if backward.is_recorded and backward.leaves]
    ops = {op.index: op for op in facts.tape.ops}
    for earlier, later in pairwise(passes):
        kept = later.left_over & earlier.leaves
        read = (use for index in later.ops if index in ops for use in ops[index].reads)
        memory = {use.memory for use in read if use.tensor in kept}
        between = [op for op in facts.tape.ops if earlier.index <= op.index < later.index and not (op.in_backward or op.in_optimizer)]
        if earlier.line is not later.line or not any(use.memory in memory for op in between for use in op.writes):
            continue
        named = [facts.names.get(id(tensor)) or variable_of(tensor) for tensor in live(torch.Tensor) if id(tensor) in kept]
        names = sorted({name for name in named if name is not None and name.isidentifier()})
        lines = [f"{name}.grad = None" for name in names or ["tensor"]]
        subject = listed([f"`{name}`" for name in names]) or "a tensor"
        yield finding(
            "never_zeroed",
            f"the gradient of {subject} is never zeroed" if len(names) < 2 else f"the gradients of {subject} are never zeroed",  # noqa: PLR2004
            later.where,
            fix=f"run {listed([f'`{line}`' for line in lines])} before `{code_at(later.where, 'backward')}`",
            edits=edited(later.where, "\n".join(lines), "before") if names else (),
            explanation="backward() adds to `.grad`, so each update uses the sum over all previous steps",
        )
        return


def _only_added_up(facts: TrainingFacts) -> Iterator[AutogradFinding]:
    """A loop of backward passes in which nothing zeroes the gradients, and nothing uses them."""
    # A gradient of the inputs is asked for itself, as by a saliency map or an attack.
    passes = [backward for backward in facts.course.backwards if backward.leaves and backward.leaves <= facts.parameters.keys()]
    loops = [event for earlier, event in pairwise(passes) if event.left_over & earlier.leaves and event.line is earlier.line]
    if not loops or facts.course.stepped or any(facts.is_written_by_hand(facts.parameters[key]) for key in loops[0].leaves):
        return
    owner = next((optimizer for optimizer in facts.all_optimizers if loops[0].leaves & set(map(id, parameters_of(optimizer)))), None)
    name = "" if owner is None else variable_of(owner)
    yield finding(
        "never_stepped",
        f"{len(passes)} backward passes without zero_grad() or step(): gradients add up",
        loops[0].where,
        f"call `{name}.zero_grad()` before `{code_at(loops[0].where, 'backward')}` and `{name}.step()` after it" if name else "",
        explanation="backward() adds to `.grad`, and no parameter was updated",
        is_hint=True,
    )


_FAULTS: tuple[Callable[[TrainingFacts], Iterable[AutogradFinding]], ...] = (
    _seen_at_once, meant_axes.moved_axes, meant_axes.one_row_for_all, meant_axes.other_axis, loss_terms.early_reductions,
    broadcasts.accidental_broadcast, _shared_memory, loss_terms.driven_values, left_out.nothing_reached, wrong_order,
    remade_leaves.remade_leaves, remade_leaves.losses_made_once, remade_leaves.unkept_gradients,
    left_out.wrong_tensors, modes.frozen_in_vain, modes.moved_though_frozen, wasted_parts.samples_without_gradient,
    left_out.missing_gradients, zero_gradients.stopped_gradients,
    wasted_parts.constant_gradients, misfit_losses.misfit_losses, misfit_losses.unaligned_targets, meant_axes.one_column,
    modes.trained_in_eval_mode, modes.evaluated_in_training_mode, modes.dropped_in_evaluation, loss_terms.unlike_reductions,
    modes.evaluated_on_bytes, modes.frozen_statistics, wasted_parts.wasted_terms, wasted_parts.dropped_sums, wasted_parts.linear_chains,
    wasted_parts.dropped_results, overwritten_inputs.overwritten_inputs, unread.unreached_updates, unread.unread_checkpoints,
    unread.unread_evaluation_data, misused.misuses,
)  # fmt: skip
