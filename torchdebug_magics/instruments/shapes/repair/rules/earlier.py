"""Earlier steps at fault: a batch dimension that was lost or missing, and tensors joined along another dimension."""

from __future__ import annotations

import ast
import functools
import itertools
import math
from dataclasses import dataclass
from typing import Any

from torch import nn

from torchdebug_magics.format import shape
from torchdebug_magics.instruments.shapes.follow.seen import Made
from torchdebug_magics.instruments.shapes.repair.edit import OpEdit, Repair, method, together
from torchdebug_magics.instruments.shapes.repair.failure_facts import FailureFacts, Operand, Sizes
from torchdebug_magics.instruments.shapes.repair.local_call import LocalCall, Mismatch, resized_to
from torchdebug_magics.instruments.shapes.repair.rebuild import rebuilt_module
from torchdebug_magics.instruments.shapes.repair.rules.otherwise import at_step, otherwise, words
from torchdebug_magics.instruments.shapes.repair.size_history import RESHAPES, channels_first, of_inputs, steps
from torchdebug_magics.instruments.shapes.repair.source import site_at

FLAT = method("flatten", 1)
_IMAGES = 4
"""Dimensions."""
_COLORS = {(1,), (3,)}


@dataclass(frozen=True, eq=False)
class Earlier:
    """What was done before, in words to put behind the sentence, how to do it instead, and the size that comes then."""

    words: str
    edits: tuple[Repair, ...]
    size: int
    fits: bool = False
    """Whether another size of the input would do, too."""


def earlier(local: LocalCall, mismatch: Mismatch) -> Earlier | None:
    """Why another size than the wanted one came, where the last op is not to blame."""
    facts, x, wanted = local.facts, mismatch.operand, mismatch.wanted
    if mismatch.dim == -1:
        causes = (_unbatched(x), _rebatched(facts, x, wanted), _crossed(facts, x), _taken_apart(x, wanted))
        if cause := next(filter(None, causes), None):
            return cause
    batches = _batches(facts) | {x.sizes[0]}

    def fits(sizes: Sizes) -> bool:
        given = dict.fromkeys(mismatch.places, functools.partial(resized_to, sizes))
        return sizes[:1] != () and sizes[0] in batches and local.gives(given) is not None

    if (call := otherwise(x, fits)) is None:
        return None
    return Earlier(words(*call), call[1], wanted, fits=call[0].op in RESHAPES)


def with_size(facts: FailureFacts, cause: Earlier, wanted: int, name: str) -> tuple[Repair, ...]:
    """The edits of a cause; with the failing module made for what comes then, where that is still another size."""
    if cause.size == wanted:
        return cause.edits
    if not cause.edits:
        return ()
    remade = rebuilt_module(facts.module, facts.path, **dict[str, Any]({name: cause.size}))
    return tuple(together(edit, rebuilt) for edit in cause.edits for rebuilt in remade)


def _unbatched(x: Operand) -> Earlier | None:
    """A picture without a batch: a convolution takes it as one, and what flattens it then takes its channels for the batch."""
    line = list(steps(x.made))
    if len(x.sizes) != 2 or not line or line[-1].number:
        return None
    step = next((made for made in line if _is_unbatched(made) and made.shape[0] == x.sizes[0]), None)
    given = line[-1]
    if step is None or len(given.shape) != len(step.shape) or not given.op.isidentifier():
        return None
    words = f": `{step.module or step.op}` read {shape(step.inputs[0][0])} as one image without a batch"
    edit = Repair(f"{given.op} = {given.op}.unsqueeze(0)", "a batch of 1", 1, inputs={given.op: method("unsqueeze", 0)})
    return Earlier(words, (edit,), math.prod(x.sizes))


def _is_of_pictures(step: Made) -> bool:
    return ("conv" in step.op or "pool" in step.op) and bool(step.inputs)


def _is_unbatched(step: Made) -> bool:
    spatial = next((int(sign) for sign in step.op if sign.isdigit()), 0)
    return _is_of_pictures(step) and len(step.inputs[0][0]) == spatial + 1


def _crossed(facts: FailureFacts, x: Operand) -> Earlier | None:
    """``5`` with ``5 x 1``: each sample with each, which runs without an error and is probably unintended."""
    for step in steps(x.made):
        if step.shape != x.sizes:
            return None
        met = [sizes for sizes, made in step.inputs if of_inputs(made)]
        many = step.shape[0] if step.shape else 0
        if many > 1 and many in _batches(facts) and sorted(met) == [(many,), (many, 1)] and step.shape == (many, many):
            words = f": `{step.op.strip('_')}` of {shape(met[0])} and {shape(met[1])} paired every sample with every other"
            return Earlier(words, (), 0)
    return None


def _rebatched(facts: FailureFacts, x: Operand, wanted: int) -> Earlier | None:
    """``x.view(64, -1)`` of a batch of 32, or ``x.flatten()``: rows of another length than those of the samples.

    That the first dimension was a batch is sure where its rows have the wanted size, or a convolution took the single row's for one.
    """
    line = list(steps(x.made))
    for step in itertools.takewhile(lambda step: len(step.shape) == len(x.sizes), line):
        before: Sizes = step.inputs[0][0] if step.inputs else ()
        if step.op in RESHAPES and len(before) > len(step.shape) and before[0] in _batches(facts) - {step.shape[0]}:
            size, is_row = math.prod(before[1:]), len(step.shape) == 1
            if size == wanted or (is_row and any(_is_of_pictures(made) and not _is_unbatched(made) for made in line)):
                merged = f"merged the batch of {before[0]} into the features"
                words = f": `{step.op}` {merged if is_row else f'made {step.shape[0]} rows of a batch of {before[0]}'}"
                module = facts.modules.get(step.module)
                remade = rebuilt_module(module, step.module, start_dim=1, rank=1) if isinstance(module, nn.Flatten) else []
                return Earlier(words, tuple(remade) or at_step(step, FLAT), size)
    return None


def squeezed(facts: FailureFacts, x: Operand) -> Earlier | None:
    """``x.squeeze()`` that took the batch of one away, too; also of what was then stacked."""
    many = len(x.sizes)
    for step in steps(x.made):
        before: Sizes = step.inputs[0][0] if step.inputs else ()
        if len(step.shape) != many:
            return None
        many -= step.op == "stack"
        if step.op == "squeeze" and not step.args and before[:1] == (1,) and 1 in _batches(facts):
            kept = tuple(dim for dim, size in enumerate(before) if dim and size == 1)
            kept = (-1,) if kept == (len(before) - 1,) else kept
            edits = at_step(step, method("squeeze", kept[0] if len(kept) == 1 else kept))
            return Earlier(": `squeeze` removed the batch dimension", edits, math.prod(before[1:]))
    return None


def _batches(facts: FailureFacts) -> set[int]:
    return {tensor.shape[0] for _, tensor in facts.inputs if tensor.dim() > 1}


def _taken_apart(x: Operand, wanted: int) -> Earlier | None:
    """Where the width of a picture became the features, and its channels are as many as were wanted."""
    for step in steps(x.made):
        sizes, before = step.inputs[0] if step.inputs else ((), None)
        if step.op in RESHAPES and step.shape[-1:] == sizes[-1:] and step.shape[:-1] != sizes[:-1] and sizes[1:2] == (wanted,):
            edits = channels_last(before) if sizes[-1] != wanted else ()
            return Earlier(f": `{step.op}` split {shape(sizes)} as if it were channels-last", edits, wanted) if edits else None
    return None


def channels_last(made: Made | None) -> tuple[Repair, ...]:
    """A picture as a convolution returns it, or an input that looks like one, with its channels last from where it was made."""
    if made is None or len(made.shape) != _IMAGES:
        return ()
    turn, why = method("permute", 0, 2, 3, 1), "the channels last"
    if made.number == 0 and made.op.isidentifier() and made.shape[1:2] in _COLORS and len({*made.shape[2:]}) == 1:
        return (Repair(f"{made.op} = {turn.text(made.op)}", why, 1, inputs={made.op: turn}),)
    site = site_at(*made.line) if made.line is not None and channels_first(made) else None
    if site is None or not isinstance(site.expression, ast.Call):
        return ()
    run = OpEdit(site, made.op, lambda func, args, kwargs: turn.apply(func(*args, **kwargs)))
    return (Repair(turn.text(site.text), why, 1, ops=(run,)),)
