"""``no_gradient`` and ``grad_disabled``: parameters that the loss does not reach, and the line that cut them off."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import torch

from torchdebug_magics.format import plural
from torchdebug_magics.instruments.autograd.errors.cut_words import cut_words
from torchdebug_magics.instruments.autograd.errors.dropped_gradient import (
    Dropped,
    ancestors,
    dropped_on_the_way,
    gradient_switch,
    rewrapped,
)
from torchdebug_magics.instruments.autograd.named import is_written_by_user
from torchdebug_magics.instruments.autograd.report import Finding
from torchdebug_magics.instruments.autograd.silences.watched import tensors_of
from torchdebug_magics.probing.where import excerpt

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torchdebug_magics.instruments.autograd.recording.tape import RecordedOp, Tape
    from torchdebug_magics.instruments.autograd.report import Kind
    from torchdebug_magics.instruments.autograd.silences.alive import Alive
    from torchdebug_magics.instruments.autograd.silences.watched import Watched

__all__ = ["missing_gradients", "nothing_reached"]

_MOST_OPS = 20_000


def nothing_reached(watched: Watched, alive: Alive) -> list[Finding]:
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
            Finding(
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


def missing_gradients(watched: Watched, alive: Alive) -> list[Finding]:
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


def _no_gradient(names: tuple[str, ...], count: int, dropped: Dropped | None) -> Finding:
    subject = f"`{names[0]}` gets" if count == 1 and names else f"{plural(count, 'parameter')} {'gets' if count == 1 else 'get'}"
    if dropped is None:
        return Finding(
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
    return Finding(
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
