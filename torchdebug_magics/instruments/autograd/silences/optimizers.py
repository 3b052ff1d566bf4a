"""``stale_optimizer`` and ``not_in_optimizer``: the tensors that get gradients are not those that are updated."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from torchdebug_magics.format import listed
from torchdebug_magics.instruments.autograd.named import attribute_line, made_at
from torchdebug_magics.instruments.autograd.report import Finding
from torchdebug_magics.instruments.autograd.silences.plain_containers import hidden_parameters
from torchdebug_magics.instruments.autograd.silences.watched import tensors_of
from torchdebug_magics.instruments.autograd.training_course import Backward, Step
from torchdebug_magics.probing.names import variable_of
from torchdebug_magics.probing.where import excerpt

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import torch

    from torchdebug_magics.instruments.autograd.silences.alive import Alive
    from torchdebug_magics.instruments.autograd.silences.watched import Watched
    from torchdebug_magics.instruments.autograd.training_course import Course
    from torchdebug_magics.report import Location

__all__ = ["wrong_tensors"]


def wrong_tensors(watched: Watched, alive: Alive) -> list[Finding]:
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


def _not_updated(names: tuple[str, ...], optimizer: str, where: Location | None, hidden_in: str = "", copy: str = "") -> Finding:
    one = len(names) == 1
    called = listed([f"`{name}`" for name in names])
    fix = f"create `{optimizer}` with all parameters, including {called}"
    if hidden_in:
        fix = f"keep the modules of `{hidden_in}` in an `nn.ModuleList`, and create `{optimizer}` after that"
    elif copy:
        fix = f"if `{copy}` is a target network, call it under `torch.no_grad()`; otherwise also pass its parameters to `{optimizer}`"
    return Finding(
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


def _stale(name: str, unowned: tuple[str, ...], where: Location | None) -> Finding:
    source = where.source if where is not None else f"{name} = ..."
    return Finding(
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
