"""``stale_optimizer`` and ``not_in_optimizer``: the tensors that get gradients are not those that are updated."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch

from torchdebug_magics.format import listed, plural
from torchdebug_magics.instruments.autograd.errors.cut import (
    Dropped,
    ancestors,
    cut_words,
    dropped_on_the_way,
    gradient_switch,
    rewrapped,
)
from torchdebug_magics.instruments.autograd.named import attribute_line, is_written_by_user, made_at
from torchdebug_magics.instruments.autograd.report import AutogradFinding, Kind
from torchdebug_magics.instruments.autograd.silences.watched import Alive, Watched, tensors_of
from torchdebug_magics.instruments.autograd.tape import RecordedOp, Tape
from torchdebug_magics.instruments.autograd.training_course import Backward, Course, Step
from torchdebug_magics.probing.names import variable_of
from torchdebug_magics.probing.where import excerpt
from torchdebug_magics.report import Location

_CONTAINERS = (list, tuple, dict)
_DEEPEST = 3
_MOST_OPS = 20_000


def wrong_tensors(watched: Watched, alive: Alive) -> list[AutogradFinding]:
    """Compares the tensors that get gradients with those that the optimizers update, in the recorded steps."""
    course, tape = watched.course, watched.recorder.tape
    if not course.steps or not course.backwards:
        return []
    held = {id(one) for optimizer in alive.optimizers for one in tensors_of(optimizer)} | watched.updated()
    reached = {key for one in course.backwards for key in one.leaves}
    by_hand = watched.written_by_hand()
    unowned = {
        id(one): one
        for root in alive.roots
        for one in root.parameters()
        if id(one) in reached and id(one) not in held and watched.recorder.use(one).memory not in by_hand
    }
    files = [op.line.file for op in reversed(tape.ops) if op.line is not None]
    called = {one.optimizer: one.name for one in course.steps}
    optimizers = watched.optimizers()
    updated = {id(one) for optimizer in optimizers for one in tensors_of(optimizer)}
    trained = [root for root in alive.roots if any(id(one) in updated for one in root.parameters())]
    hidden = [one for root in trained for one in hidden_parameters(root) if id(one.parameter) in reached and id(one.parameter) not in held]
    if hidden:
        optimizer = _in_charge(course, optimizers, {id(one.parameter) for one in hidden})
        name = called.get(id(optimizer), "optimizer")
        where = attribute_line(hidden[0].owner, hidden[0].attribute) or made_at(optimizer, name, files)
        return [_not_updated(tuple(one.name for one in hidden), name, where, hidden[0].attribute)]
    if not unowned:
        return []
    called_ids = {key[0] for key in watched.recorder.root_calls}
    of_models = {id(one) for root in alive.roots if id(root) in called_ids for one in root.parameters()}
    for optimizer in optimizers:
        if any(one.requires_grad and id(one) not in of_models and id(one) not in reached for one in tensors_of(optimizer)):
            name = called.get(id(optimizer), "optimizer")
            return [_stale(name, alive.names(list(unowned.values())), made_at(optimizer, name, files))]
    optimizer = _in_charge(course, optimizers, set(unowned))
    name = called.get(id(optimizer), "optimizer")
    where = made_at(optimizer, name, files)
    forgotten = list(_forgotten(alive, updated, unowned, where))
    return [_not_updated(alive.names(list(forgotten)), name, where, copy=_copy_of_trained(trained, alive, forgotten))] if forgotten else []


def _copy_of_trained(trained: list[torch.nn.Module], alive: Alive, forgotten: list[torch.nn.Parameter]) -> str:
    """The variable of the model that all forgotten parameters are of, if it is built as one that is trained; as a target network is."""
    whole = next((root for root in alive.roots if {id(one) for one in root.parameters()} >= {id(one) for one in forgotten}), None)
    if whole is None or whole in trained or not any(_built(whole) == _built(root) for root in trained):
        return ""
    return variable_of(whole) or ""


def _built(model: torch.nn.Module) -> tuple[type, dict[str, torch.Size]]:
    return type(model), {name: one.shape for name, one in model.named_parameters()}


def _in_charge(course: Course, optimizers: list[torch.optim.Optimizer], forgotten: set[int]) -> torch.optim.Optimizer:
    """The optimizer whose backward pass reaches the fewest tensors besides its own and the forgotten ones."""
    found: list[tuple[int, int]] = []
    for place, one in enumerate(course.events):
        step = next((later for later in course.events[place:] if isinstance(later, Step) and later.is_recorded), None)
        if isinstance(one, Backward) and one.leaves & forgotten and step is not None:
            found.append((len(one.leaves - forgotten - step.parameters), step.optimizer))
    chosen = min(found)[1] if found else None
    return next((one for one in optimizers if id(one) == chosen), optimizers[0])


def _not_updated(names: tuple[str, ...], optimizer: str, where: Location | None, hidden_in: str = "", copy: str = "") -> AutogradFinding:
    one = len(names) == 1
    called = listed([f"`{name}`" for name in names])
    fix = f"create `{optimizer}` with all parameters, including {called}"
    if hidden_in:
        fix = f"keep the modules of `{hidden_in}` in an `nn.ModuleList`, and create `{optimizer}` after that"
    elif copy:
        fix = f"if `{copy}` is a target network, call it under `torch.no_grad()`; otherwise also pass its parameters to `{optimizer}`"
    return AutogradFinding(
        kind="not_in_optimizer",
        raised=False,
        headline=f"{called} gets gradients, but no optimizer updates it"
        if one
        else f"{len(names)} parameters get gradients, but no optimizer updates them",
        location=where,
        parameters=names,
        tensor=names[0] if names else None,
        fix=fix,
        explanation="`parameters()` does not search plain lists and dicts" if hidden_in else "",
        excerpt=excerpt(where) if where is not None else (),
    )


def _forgotten(
    alive: Alive, updated: set[int], unowned: Mapping[int, torch.nn.Parameter], line: Location | None
) -> Iterator[torch.nn.Parameter]:
    """Parameters missing by mistake: part of an updated module, of a partly frozen model, or of a second model in training mode.

    Whole parts may be left out on purpose, where the line that creates the optimizer names the part to train.
    """
    trains_a_model = any(id(one) in updated for root in alive.roots for one in root.parameters())
    names_a_part = line is not None and re.search(r"\w+\.\w+(\.\w+)*\.parameters\(\)", line.source) is not None
    for root in alive.roots:
        missing = [one for one in root.parameters() if id(one) in unowned]
        mine = [one for one in root.parameters() if id(one) in updated]
        is_frozen_in_part = any(not one.requires_grad for one in root.parameters())
        mixed = {name.rpartition(".")[0] for name, one in root.named_parameters() if id(one) in updated}
        in_mixed = [one for name, one in root.named_parameters() if id(one) in unowned and name.rpartition(".")[0] in mixed]
        if mine and (is_frozen_in_part or not names_a_part):
            yield from missing
        elif mine:
            yield from in_mixed
        elif root.training and trains_a_model:  # else an input is optimized, as an image
            yield from missing


def _stale(name: str, unowned: tuple[str, ...], where: Location | None) -> AutogradFinding:
    source = where.source if where is not None else f"{name} = ..."
    return AutogradFinding(
        kind="stale_optimizer",
        raised=False,
        headline=f"`{name}` updates tensors that are no longer the model's",
        location=where,
        parameters=unowned,
        tensor=name,
        fix=f"run `{source}` again after the model is created or changed",
        explanation="an optimizer updates the tensors that it was created with, not the parameters that the model gets later",
        excerpt=excerpt(where) if where is not None else (),
    )


class Hidden(NamedTuple):
    """A parameter that is not registered."""

    name: str
    parameter: torch.nn.Parameter
    owner: torch.nn.Module
    attribute: str


def hidden_parameters(root: torch.nn.Module) -> Iterator[Hidden]:
    """Of a model and of the modules in it."""
    for path, module in root.named_modules():
        for attribute, value in list(vars(module).items()):
            if not attribute.startswith("_") and type(value) in _CONTAINERS:
                held = _held_in(value, f"{path}.{attribute}".lstrip("."))
                yield from (Hidden(name, one, module, attribute) for name, one in held)


def _held_in(value: object, prefix: str, depth: int = 0) -> Iterator[tuple[str, torch.nn.Parameter]]:
    if isinstance(value, torch.nn.Parameter):
        yield prefix, value
    elif isinstance(value, torch.nn.Module):
        yield from ((f"{prefix}.{name}", one) for name, one in value.named_parameters())
    elif isinstance(value, _CONTAINERS) and depth < _DEEPEST:
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _held_in(part, f"{prefix}[{key!r}]", depth + 1)


def nothing_reached(watched: Watched, alive: Alive) -> list[AutogradFinding]:
    """Finds a loss set to require grad itself: backward() raises nothing, and reaches no parameter."""
    for seen in watched.course.backwards:
        if not seen.loss_is_leaf or not watched.course.steps:
            continue
        dropped, _ = dropped_on_the_way(watched.recorder.tape, seen.loss, seen.index)
        if dropped is None:
            continue
        kind: Kind = "grad_disabled" if dropped.cause in {"no_grad", "inference_mode"} else "no_gradient"
        headline, fix, where = cut_words(dropped)
        return [
            AutogradFinding(
                kind=kind,
                raised=False,
                headline=headline,
                location=where,
                op=dropped.op.name,
                module=dropped.op.module,
                parameters=alive.names(_never_with_gradient(watched)),
                first_backward_at=seen.line.location if seen.line is not None else None,
                fix=f"{fix}, and remove `requires_grad` from the loss",
                explanation="the loss is a leaf tensor: backward() stops there, and no parameter gets a gradient",
                excerpt=excerpt(where) if where is not None else (),
            )
        ]
    return []


def missing_gradients(watched: Watched, alive: Alive) -> list[AutogradFinding]:
    """Finds optimizer tensors without a gradient in every step, although others have one."""
    if any(one.loss_is_leaf for one in watched.course.backwards):
        return []
    tape, by_hand = watched.recorder.tape, watched.written_by_hand()
    others_learn = any(one.nonzero_count for one in watched.course.steps)
    counted = {op.index for seen in watched.course.backwards for op in ancestors(tape, seen.loss, seen.index)}
    consumers = {key: [one for one in later if one.index in counted] for key, later in tape.consumers().items()}
    groups: dict[object, list[torch.Tensor]] = {}
    cuts: dict[object, Dropped | None] = {}
    for tensor in _never_with_gradient(watched):
        memory = watched.recorder.use(tensor).memory
        if memory in by_hand:
            continue  # as a codebook, or a moving average
        readers = [op for op in tape.ops if _is_forward(op) and any(use.memory == memory for use in op.reads)]
        dropped = _dropped_after([op for op in readers if op.index in counted], consumers) or (
            _rewrapped_before(watched, tape) if readers else None
        )
        if dropped is None and (readers or not others_learn or not _is_unused_by_mistake(alive, tensor)):
            continue
        key = None if dropped is None else (dropped.op.line.file, dropped.op.line.line) if dropped.op.line is not None else dropped.op.name
        groups.setdefault(key, []).append(tensor)
        cuts[key] = dropped
    return [_no_gradient(alive.names(tensors), len(tensors), cuts[key]) for key, tensors in groups.items()]


def _never_with_gradient(watched: Watched) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    reached = {key for one in watched.course.backwards for key in one.leaves}
    for optimizer in watched.optimizers():
        steps = [one for one in watched.course.steps if one.optimizer == id(optimizer)]
        without = frozenset.intersection(*(one.without for one in steps)) if steps else frozenset[int]()
        learnt_later = optimizer.state if watched.steps_of(optimizer) > len(steps) else ()
        missed = [one for one in tensors_of(optimizer) if id(one) in without - reached]
        found += [one for one in missed if one.grad is None and one not in learnt_later]
    return found


def _dropped_after(readers: list[RecordedOp], consumers: Mapping[int, list[RecordedOp]]) -> Dropped | None:
    """Forward from the ops that read a parameter: the first that lets its gradient end; all of them led to a loss."""
    todo, seen = deque(readers), set[int]()
    while todo and len(seen) < _MOST_OPS:
        op = todo.popleft()
        if op.index in seen:
            continue
        seen.add(op.index)
        if any(use.requires_grad for use in op.reads) and (op.inference or not op.grad_enabled):
            return Dropped(op, "inference_mode" if op.inference else "no_grad")
        later = [one for one in consumers.get(op.index, ()) if _is_forward(one)]
        if op.name == "detach" and later:
            return Dropped(op, "data" if op.line is not None and ".data" in op.line.location.source else "detach")
        if op.makes and not any(one.can_have_grad for one in op.makes):
            return Dropped(op, "dtype")
        if any(not use.can_have_grad and maker is op for one in later for use, maker in one.sources):
            return Dropped(op, "dtype")
        todo += later
    return None


def _rewrapped_before(watched: Watched, tape: Tape) -> Dropped | None:
    """Numbers read from a tensor, and put into a new one, on the way to a loss."""
    for seen in watched.course.backwards:
        for op in ancestors(tape, seen.loss, seen.index):
            if (dropped := rewrapped(tape, op)) is not None:
                return dropped
    return None


def _is_forward(op: RecordedOp) -> bool:
    return not op.in_backward and not op.in_optimizer and not op.initializes


def _is_unused_by_mistake(alive: Alive, tensor: torch.Tensor) -> bool:
    """Of a tensor that no op read: whether its module stands for itself, in a model of the user's, and is no expert or head of several."""
    for root in alive.roots:
        for path, owner in root.named_modules():
            if any(one is tensor for one in owner._parameters.values()):
                steps = path.split(".") if path else []
                around = [root, *(root.get_submodule(".".join(steps[: place + 1])) for place in range(len(steps)))]
                chosen = any(isinstance(one, (torch.nn.ModuleList, torch.nn.ModuleDict)) for one in around[:-1])
                return is_written_by_user(around[-2] if len(around) > 1 else root) and not chosen
    return False


def _no_gradient(names: tuple[str, ...], count: int, dropped: Dropped | None) -> AutogradFinding:
    subject = f"`{names[0]}` gets" if count == 1 and names else f"{plural(count, 'parameter')} {'gets' if count == 1 else 'get'}"
    if dropped is None:
        return AutogradFinding(
            kind="no_gradient",
            raised=False,
            headline=f"{subject} no gradient: the forward never uses {'it' if count == 1 else 'them'}",
            parameters=names,
            tensor=names[0] if names else None,
            module=names[0].rpartition(".")[0] if names else None,
            fix=f"use `{names[0].rpartition('.')[0] or names[0]}` in the forward, or delete it"
            if names
            else "use these parameters in the forward, or delete them",
        )
    _, fix, where = cut_words(dropped)
    causes = {
        "no_grad": "gradients are off",
        "inference_mode": "inference mode is on",
        "rewrapped": "a copy into a new tensor cuts the graph",
        "list": "a copy into a new tensor cuts the graph",
    }
    by = causes.get(dropped.cause, f"`{dropped.op.name}` cuts the graph")
    return AutogradFinding(
        kind="no_gradient",
        raised=False,
        headline=f"{subject} no gradient: {by}",
        location=where,
        op=dropped.op.name,
        saved_at=dropped.op.line.location if dropped.op.line is not None and gradient_switch(dropped.op) is not None else None,
        module=dropped.op.module,
        tensor=names[0] if names else None,
        parameters=names,
        fix=fix,
        excerpt=excerpt(where) if where is not None else (),
    )
