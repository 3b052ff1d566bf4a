"""Tensors that are not trained: those that get gradients are not those that are updated, or no gradient reaches them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import chain, pairwise
from typing import Any

import torch

from torchdebug_magics.format import listed, plural
from torchdebug_magics.instruments.autograd.errors.cut import (
    Dropped,
    Unused,
    dropped_by,
    dropped_on_the_way,
    listed_in,
    rewrapped_in,
    unwrapped,
    without_leaf,
)
from torchdebug_magics.instruments.autograd.errors.softened import softened
from torchdebug_magics.instruments.autograd.faults.forgotten import (
    WHY_HIDDEN,
    hidden_parameters,
    registering,
    with_group,
    with_model,
)
from torchdebug_magics.instruments.autograd.faults.watched import TrainingFacts
from torchdebug_magics.instruments.autograd.report import COMPARISONS, AutogradFinding, Kind, cutter
from torchdebug_magics.instruments.autograd.source_readings import (
    assigned_at,
    attribute_line,
    finding,
    held_as,
    made_at,
    statement_at,
    user_function,
)
from torchdebug_magics.instruments.autograd.tape import Backward, OptimizerStep, RecordedOp
from torchdebug_magics.probing.modules import live
from torchdebug_magics.probing.names import variable_of
from torchdebug_magics.probing.source.edited_source import Source, cells, made_later
from torchdebug_magics.probing.source.syntax import called, names_in, nodes, tree_of
from torchdebug_magics.probing.steps import parameters_of
from torchdebug_magics.report import Edit, Location

_FIXES = frozenset({"load_state_dict", "from_pretrained", "lerp_", "copy_"})
"""What gives weights that are not to be trained: a checkpoint, a moving average."""
_NAMES_A_PART = re.compile(r"\w+\.\w+(\.\w+)*\.parameters\(\)")


def wrong_tensors(facts: TrainingFacts) -> Iterator[AutogradFinding]:
    """Compares the tensors that get gradients with those that the optimizers update, in the recorded steps."""
    if not facts.course.steps or not facts.course.backwards:
        return
    forgotten = facts.not_updated(facts.parameters)
    updated = {id(tensor) for optimizer in facts.optimizers for tensor in parameters_of(optimizer)}
    trained = [root for root in facts.roots if any(id(parameter) in updated for parameter in root.parameters())]
    read = {use.memory for op in facts.tape.ops if op.is_forward for use in op.reads}
    wanted = (each for root in trained for each in hidden_parameters(root) if id(each.parameter) in facts.reached - facts.held)
    # What is changed by hand, or by a rule of the user's that reads its gradient, as an attack, needs no optimizer.
    by_hand = (each for each in wanted if not facts.is_written_by_hand(each.parameter))
    hidden = [each for each in by_hand if each.parameter.grad is None or facts.tape.numbers.of(each.parameter.grad) not in read]
    if hidden:
        where = attribute_line(hidden[0].owner, hidden[0].attribute)
        yield _not_updated(tuple(each.name for each in hidden), where, registering(hidden), explanation=WHY_HIDDEN)
        return
    yield from _in_no_module(facts)
    if not forgotten:
        return
    called = [seen.root for seen in facts.watched.recorder.root_calls.values()]
    of_models = {id(parameter) for root in called if (model := root()) is not None for parameter in model.parameters()}
    for optimizer in facts.optimizers:
        if any(tensor.requires_grad and id(tensor) not in of_models | facts.reached for tensor in parameters_of(optimizer)):
            name = facts.called(optimizer)
            where, first = made_at(optimizer, name, facts.files), facts.course.backwards[0].line
            fix, edits = made_later(where, first.line if first is not None else 0)
            alive = [model for root in called if (model := root()) is not None and any(True for _ in model.parameters())]
            models = set(filter(None, map(variable_of, alive)))
            if not edits and len(models) == 1:
                fix, edits = with_model(where, models.pop())
            yield finding(
                "stale_optimizer",
                f"`{name}` updates tensors that are no longer the model's",
                where,
                f"run `{where.source if where is not None else f'{name} = ...'}` again after the model is created or changed",
                fix=fix,
                edits=edits,
                parameters=facts.names_of(forgotten.values()),
                tensor=name,
                explanation="an optimizer updates the tensors that it was created with, not the parameters that the model gets later",
            )
            return
    optimizer, name = _in_charge(facts, set(forgotten))
    where = made_at(optimizer, name, facts.files)
    missing = list(_missing_by_mistake(facts, updated, forgotten, where))
    if names := facts.names_of(missing):
        fix = f"create `{name}` with all parameters, including {_listed(names)}"
        if copy := _copy_of_trained(trained, facts.roots, missing):  # no edit: whoever trains a target network gets worse values
            fix = f"if `{copy}` is a target network, call it under `torch.no_grad()`; otherwise also pass its parameters to `{name}`"
        edits = () if copy else with_group(facts, name, where, missing)
        fix = f"{fix}, as by `{edits[0].new.splitlines()[-1]}`" if edits else fix
        is_of_trained = any({*map(id, root.parameters())}.issuperset(map(id, missing)) for root in trained)
        is_hint = is_of_trained and where is not None and _NAMES_A_PART.search(where.source) is not None  # which may be meant alone
        yield _not_updated(names, where, "", fix=fix, edits=edits, is_hint=is_hint)


def _in_no_module(facts: TrainingFacts) -> Iterator[AutogradFinding]:
    """Parameters that the user's code holds in a variable only."""
    loose = facts.not_updated(facts.loose)
    names = tuple(name for parameter in loose.values() if (name := variable_of(parameter) or next(iter(held_as(parameter)), None)))
    if names:
        _, optimizer = _in_charge(facts, set(loose))
        fix = f"also pass {_listed(names)} to `{optimizer}`: `parameters()` returns only what a module holds"
        yield _not_updated(names, assigned_at(names[0], facts.files), fix)


def _listed(names: tuple[str, ...]) -> str:
    return listed([f"`{name}`" for name in names])


def _copy_of_trained(trained: list[torch.nn.Module], roots: list[torch.nn.Module], forgotten: list[torch.nn.Parameter]) -> str:
    """The variable of the model that all forgotten parameters are of, if it is built as one that is trained; as a target network is."""

    def built(model: torch.nn.Module) -> tuple[type, dict[str, torch.Size]]:
        return type(model), {name: parameter.shape for name, parameter in model.named_parameters()}

    whole = next(
        (root for root in roots if {id(parameter) for parameter in root.parameters()} >= {id(parameter) for parameter in forgotten}), None
    )
    if whole is None or whole in trained or not any(built(whole) == built(root) for root in trained):
        return ""
    return variable_of(whole) or ""


def _in_charge(facts: TrainingFacts, forgotten: set[int]) -> tuple[torch.optim.Optimizer, str]:
    """(optimizer, name) of the one whose backward pass reaches the fewest tensors besides its own and the forgotten ones."""
    candidates: list[tuple[int, int]] = []
    for place, event in enumerate(facts.course.events):
        step = next((later for later in facts.course.events[place:] if isinstance(later, OptimizerStep) and later.is_recorded), None)
        if isinstance(event, Backward) and event.leaves & forgotten and step is not None:
            candidates.append((len(event.leaves - forgotten - step.parameters), step.optimizer))
    chosen = min(candidates)[1] if candidates else None
    optimizer = next((optimizer for optimizer in facts.optimizers if id(optimizer) == chosen), facts.optimizers[0])
    return optimizer, facts.called(optimizer)


def _not_updated(names: tuple[str, ...], where: Location | None, advice: str, **more: Any) -> AutogradFinding:
    headline = f"{len(names)} parameters get gradients, but no optimizer updates them"
    headline = f"`{names[0]}` gets gradients, but no optimizer updates it" if len(names) == 1 else headline
    return finding("not_in_optimizer", headline, where, advice, parameters=names, tensor=names[0], **more)


def _missing_by_mistake(
    facts: TrainingFacts, updated: set[int], forgotten: Mapping[int, torch.nn.Parameter], line: Location | None
) -> Iterator[torch.nn.Parameter]:
    """Part of an updated module, of a partly frozen model, or of a second model in training mode.

    Whole parts may be left out on purpose, where the line that creates the optimizer names the part to train.
    """
    trains_a_model = not updated.isdisjoint(facts.parameters)
    names_a_part = line is not None and _NAMES_A_PART.search(line.source) is not None
    for root in facts.roots:
        members = dict(root.named_parameters())
        mixed = {name.rpartition(".")[0] for name, member in members.items() if id(member) in updated}
        is_frozen_in_part = any(not member.requires_grad for member in members.values())
        # Else an input is optimized, as an image.
        is_wanted = (is_frozen_in_part or not names_a_part) if mixed else root.training and trains_a_model
        for name, member in members.items():
            if id(member) in forgotten and (is_wanted or name.rpartition(".")[0] in mixed):
                yield member


def nothing_reached(facts: TrainingFacts) -> Iterator[AutogradFinding]:
    """A loss set to require grad itself: backward() raises nothing, and reaches no parameter."""
    for seen in facts.course.backwards:
        dropped = dropped_on_the_way(facts.tape, seen.loss, seen.index)[0] if seen.loss_is_leaf else None
        if dropped is not None and (facts.course.steps or dropped.cause in {"list", "rewrapped"}):
            kind: Kind = "grad_disabled" if dropped.cause in {"no_grad", "inference_mode"} else "no_gradient"
            headline, fix, where = dropped.words()
            of_loss, copies = without_leaf(seen.where), unwrapped([dropped])
            is_loss = where is not None and any((edit.file, edit.line) == (where.file, where.line) for edit in of_loss)
            yield finding(
                kind,
                headline,
                where,
                f"{fix}, and remove `requires_grad` from the loss",
                fix=f"remove `{of_loss[0].old}`" if is_loss and not of_loss[0].new else "",
                edits=of_loss if is_loss else (*copies, *of_loss) if copies else (),
                op=dropped.op,
                parameters=facts.names_of(_never_with_gradient(facts)),
                first_backward_at=seen.where,
                explanation="the loss is a leaf tensor: backward() stops there, and no parameter gets a gradient",
            )
            return


def missing_gradients(facts: TrainingFacts) -> Iterator[AutogradFinding]:
    """Optimizer tensors without a gradient in every step, although others have one; and variables from which no gradient can come."""
    if any(backward.loss_is_leaf for backward in facts.course.backwards):
        return
    others_learn = any(step.nonzero for step in facts.course.steps)
    counted = {op.index: op for seen in facts.course.backwards for op in facts.tape.ancestors(seen.loss, seen.index)}
    groups: dict[object, tuple[list[torch.Tensor], Dropped | Unused | None]] = {}
    variables = list(_unreached_variables(facts))
    for tensor in chain(_never_with_gradient(facts), variables):
        if facts.is_written_by_hand(tensor):
            continue  # as a codebook, or a moving average
        readers = facts.readers_of(tensor)
        after = facts.computed_from(readers)
        dropped: Dropped | Unused | None = None
        dropped = next(filter(None, (dropped_by(op, after) for index, op in after.items() if index in counted)), None)
        for start, end in pairwise([0, *(seen.index for seen in facts.course.backwards)]):
            # Numbers computed from it, and put into a new tensor, on the way to a loss; those of an earlier one are only logged.
            of_pass = facts.computed_from(op for op in readers if start <= op.index < end).values()
            dropped = dropped or rewrapped_in(facts.tape, (op for index, op in counted.items() if start <= index < end), of_pass)
        lists = list(listed_in(counted.values(), (op for op in after.values() if not facts.consumers.get(op.index))))
        dropped = dropped or next(iter(lists), None)
        if any(tensor is variable for variable in variables):
            if isinstance(dropped, Dropped) and _is_by_mistake(dropped, tensor, facts):
                yield _no_gradient((variable_of(tensor) or "",), 1, dropped, unwrapped(lists or [dropped]))
            continue
        if dropped is None and others_learn and after.keys().isdisjoint(counted):
            dropped = _left_unused(op for op in after.values() if not facts.consumers.get(op.index))
        if dropped is not None or (not readers and others_learn and _is_unused_by_mistake(facts, tensor)):
            key = None if dropped is None else (dropped.line if isinstance(dropped, Unused) else dropped.op.line) or dropped.op.name
            groups[key] = ([*groups.get(key, ([],))[0], tensor], dropped)
    yield from _by_switch(facts, list(groups.values()))


def _by_switch(facts: TrainingFacts, groups: list[tuple[list[torch.Tensor], Dropped | Unused | None]]) -> Iterator[AutogradFinding]:
    """A finding for each group; of those under one `no_grad()`, one for all."""
    by_switch: dict[Location | None, list[torch.Tensor]] = {}
    for tensors, dropped in groups:
        switch = dropped.switch if isinstance(dropped, Dropped) else None
        by_switch.setdefault(None if switch is None else switch[0], []).extend(tensors)
    for tensors, dropped in groups:
        switch = dropped.switch if isinstance(dropped, Dropped) else None
        together = by_switch.pop(switch[0], []) if switch is not None else tensors
        if len(together) > len(tensors) and isinstance(dropped, Dropped):  # several parts, of which nobody trains one
            without, edits = _without_switch(dropped)
            whole = _no_gradient(facts.names_of(together), len(together), dropped)
            yield replace(whole, fix=without, edits=edits, fix_state="compiles" if edits else "advice")
        elif together:
            soft: tuple[Edit, ...] | None = None
            if isinstance(dropped, Dropped) and dropped.cause == "dtype":
                ancestors = (op for seen in facts.course.backwards for op in facts.tape.ancestors(seen.loss, seen.index))
                soft = softened({op.index: op for op in ancestors}.values(), dropped.op)
            yield _no_gradient(facts.names_of(tensors), len(tensors), dropped, soft)


def _without_switch(dropped: Dropped) -> tuple[str, tuple[Edit, ...]]:
    """What to do with a block under which several parts of a model run, and the edit: its statements without it.

    None where any weights are loaded, or written by hand: the parts may be fixed on purpose.
    """
    where = dropped.switch[0] if dropped.switch is not None else None
    tree, statement = None if where is None else tree_of(where.file), statement_at(where)
    if where is None or tree is None or not isinstance(statement, ast.With):
        return "run these parts outside of `no_grad()`, or leave them out of the optimizer", ()
    switch = ", ".join(ast.unparse(item.context_expr) for item in statement.items)
    fix = f"remove `{switch}`, or leave the parts that run under it out of the optimizer"
    source = Source(where, tree)
    whole, margin = source.text(statement, whole=True), " " * (statement.body[0].col_offset - statement.col_offset)
    head, _, body = whole.partition("\n")
    is_kept = any(called(call) in _FIXES for cell in cells() for call in nodes(ast.Call, cell.tree))
    is_plain = head.endswith(":") and all(not line.strip() or line.startswith(margin) for line in body.split("\n"))
    has_text = any(isinstance(node.value, str) and node.lineno != node.end_lineno for node in nodes(ast.Constant, statement))
    if is_kept or has_text or not is_plain or len(statement.items) > 1:
        return fix, ()
    return fix, (source.replacing(statement, "\n".join(line.removeprefix(margin) for line in body.split("\n")), whole),)


def _left_unused(ends: Iterable[RecordedOp]) -> Unused | None:
    """Of what was computed from a parameter and nothing uses, the last, in a function of the user's that returns something else."""
    last = max((op for op in ends if op.grad_enabled), key=lambda op: op.index, default=None)
    unused = None if last is None else Unused.of(last)
    is_returned = unused is None or unused.returned is None or unused.name in names_in(unused.returned)
    return None if is_returned else unused


def _never_with_gradient(facts: TrainingFacts) -> Iterator[torch.Tensor]:
    for optimizer in facts.optimizers:
        steps = facts.steps_of(optimizer)
        without = frozenset.intersection(*(step.without for step in steps)) if steps else frozenset[int]()
        learnt_later = optimizer.state if facts.watched.steps[id(optimizer)] > len(steps) else ()
        missed = [tensor for tensor in parameters_of(optimizer) if id(tensor) in without - facts.reached]
        yield from (tensor for tensor in missed if tensor.grad is None and tensor not in learnt_later)


def _is_by_mistake(dropped: Dropped, variable: torch.Tensor, facts: TrainingFacts) -> bool:
    """Whether a cut can hardly be meant: a copy, or a threshold that is compared with; `detach` and `no_grad` say what they do."""
    memory = facts.tape.numbers.of(variable)
    is_threshold = dropped.op.name in COMPARISONS and variable.numel() == 1 and any(use.memory == memory for use in dropped.op.reads)
    return dropped.cause in {"list", "rewrapped"} or is_threshold


def _unreached_variables(facts: TrainingFacts) -> Iterator[torch.Tensor]:
    """Leaves of the user's that no optimizer has, and no backward pass has reached."""
    if not facts.course.backwards or facts.course.steps:
        return
    for tensor in live(torch.Tensor):
        is_leaf = tensor.is_leaf and tensor.requires_grad and tensor.grad is None and not isinstance(tensor, torch.nn.Parameter)
        if is_leaf and id(tensor) not in facts.reached and variable_of(tensor):
            yield tensor


def _is_unused_by_mistake(facts: TrainingFacts, tensor: torch.Tensor) -> bool:
    """Of a tensor that no op read: whether its module stands for itself, in a model of the user's, and is no expert or head of several."""
    for root in facts.roots:
        for path, owner in root.named_modules():
            if any(parameter is tensor for parameter in owner._parameters.values()):
                steps = path.split(".") if path else []
                around = [root, *(root.get_submodule(".".join(steps[: place + 1])) for place in range(len(steps)))]
                chosen = any(isinstance(module, (torch.nn.ModuleList, torch.nn.ModuleDict)) for module in around[:-1])
                holder = around[-2] if len(around) > 1 else root
                is_users = isinstance(holder, torch.nn.Sequential) or user_function(type(holder).forward) is not None
                return is_users and not chosen
    return False


def _no_gradient(
    names: tuple[str, ...], count: int, dropped: Dropped | Unused | None, edits: tuple[Edit, ...] | None = None
) -> AutogradFinding:
    subject = f"`{names[0]}` gets" if count == 1 and names else f"{plural(count, 'parameter')} {'gets' if count == 1 else 'get'}"
    name = names[0] if names else None
    if dropped is None:
        module = name.rpartition(".")[0] if name else None
        return finding(
            "no_gradient",
            f"{subject} no gradient: the forward never uses {'it' if count == 1 else 'them'}",
            None,
            f"use `{module or name}` in the forward, or delete it" if name else "use these parameters in the forward, or delete them",
            parameters=names,
            tensor=name,
            module=module,
        )
    if isinstance(dropped, Unused):
        return finding(
            "no_gradient",
            f"{subject} no gradient: {dropped.words}",
            dropped.line.location,
            f"use `{dropped.name}` in what `{dropped.line.function}` returns",
            op=dropped.op,
            saved_at=dropped.returned_at,
            tensor=name,
            parameters=names,
        )
    _, fix, where = dropped.words()
    return finding(
        "no_gradient",
        f"{subject} no gradient: {cutter(dropped.cause, dropped.op.name)} cuts the graph",
        where,
        fix,
        edits=unwrapped([dropped]) if edits is None else edits,
        op=dropped.op,
        saved_at=dropped.op.where if dropped.switch is not None else None,
        tensor=name,
        parameters=names,
    )
