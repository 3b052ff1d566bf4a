"""Earlier steps at fault: a batch dimension that was lost or missing, and tensors joined along another dimension."""

from __future__ import annotations

import ast
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from torchdebug_magics.format import shape
from torchdebug_magics.instruments.shapes.follow.seen import Made
from torchdebug_magics.instruments.shapes.repair.edit import OpEdit, Repair, ValueChange, method, together
from torchdebug_magics.instruments.shapes.repair.failure_facts import FailureFacts, Operand, Sizes
from torchdebug_magics.instruments.shapes.repair.rebuild import rebuilt_module
from torchdebug_magics.instruments.shapes.repair.size_history import (
    JOINS,
    RESHAPES,
    channels_first,
    joined_along,
    of_inputs,
    steps,
)
from torchdebug_magics.instruments.shapes.repair.source import site_at
from torchdebug_magics.probing.source.syntax import expression

_REDUCTIONS = frozenset(["mean", "sum", "amax", "amin", "max", "min", "argmax", "argmin", "logsumexp", "median"])
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


def earlier(facts: FailureFacts, x: Operand, wanted: int, dim: int = -1) -> Earlier | None:
    """Why another size than the wanted one came, where the last op is not to blame."""
    if dim != -1:
        return _joined(x, wanted, dim)
    causes = (_unbatched(x), _rebatched(facts, x, wanted), _crossed(facts, x), _unpooled(x, wanted), _taken_apart(x, wanted))
    return next(filter(None, causes), None) or _joined(x, wanted, dim)


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


def _joined(x: Operand, wanted: int, dim: int) -> Earlier | None:
    """``torch.cat`` along the batch or the steps, where it was to be along the features."""
    step = next((step for step in steps(x.made) if step.shape != x.sizes or step.op in JOINS), None)
    if step is None or step.op not in JOINS or step.shape != x.sizes:
        return None
    parts = [sizes for sizes, _ in step.inputs]
    now, then = joined_along(step), dim % len(x.sizes)
    if now is None or now == then or len(set(parts)) > 1 or sum(part[then] for part in parts) != wanted:
        return None
    words = f": `{step.op}` joined {' and '.join(map(shape, parts[:3]))} along dimension {now}"
    edits = called_otherwise(step, lambda call, _: _along(call, dim), lambda _, args, __: torch.cat(args[0], dim=dim))
    return Earlier(words, edits, wanted)


def reduced_to(x: Operand, wanted: Sizes) -> tuple[Repair, ...]:
    """The mean, the maximum or the like that made a tensor, over the dimension without which the wanted sizes are left."""
    step = next((step for step in steps(x.made) if step.shape != x.sizes or step.op in _REDUCTIONS), None)
    before = step.inputs[0][0] if step is not None and step.inputs else ()
    if step is None or step.op not in _REDUCTIONS or step.shape != x.sizes or len(before) != len(x.sizes) + 1 or wanted == x.sizes:
        return ()
    dim = next((dim for dim in reversed(range(len(before))) if before[:dim] + before[dim + 1 :] == wanted), None)

    def over(call: ast.Call, _: str) -> str:
        of_torch = isinstance(call.func, ast.Attribute) and isinstance(call.func.value, ast.Name) and call.func.value.id == "torch"
        places = call.args[1:] if of_torch else call.args
        named = [keyword.value for keyword in call.keywords if keyword.arg in {"dim", "axis"}]
        if len(places) + len(call.keywords) != 1 or not isinstance([*places, *named][0], (ast.Constant, ast.UnaryOp)):
            return ""
        number = [ast.Constant(dim)] if places else []
        return ast.unparse(
            ast.Call(call.func, [*(call.args[:1] if of_torch else []), *number], [ast.keyword("dim", ast.Constant(dim))] if named else [])
        )

    return () if dim is None else called_otherwise(step, over, lambda func, args, _: func(args[0], dim), why=f"over dimension {dim}")


def at_step(step: Made, change: ValueChange, *, why: str = "") -> tuple[Repair, ...]:
    """What the step was made of, changed in the place of the user's call that made it."""
    return called_otherwise(step, lambda _, x: change.text(x), lambda _, args, __: change.apply(args[0]), why=why)


def called_otherwise(
    step: Made, text: Callable[[ast.Call, str], str], run: Callable[[Any, Any, Any], Any], *, why: str = ""
) -> tuple[Repair, ...]:
    """The call that made this step, done otherwise, where it stands in the user's code."""
    if step.line is None:
        return ()
    site = site_at(*step.line)
    call = site.expression
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute) or call.func.attr != step.op:
        return ()
    of_torch = isinstance(call.func.value, ast.Name) and call.func.value.id == "torch"
    receiver = call.args[0] if of_torch and call.args else call.func.value
    shown = ast.unparse(receiver)
    code = text(call, shown if isinstance(receiver, (ast.Name, ast.Attribute, ast.Call, ast.Subscript)) else f"({shown})")
    return (Repair(code, why, 1, ops=(OpEdit(site, step.op, run),)),) if code else ()


def _along(call: ast.Call, dim: int) -> str:
    rest = [ast.keyword(keyword.arg, keyword.value) for keyword in call.keywords if keyword.arg not in {"dim", "axis"}]
    number = expression(str(dim))
    return ast.unparse(ast.Call(call.func, call.args[:1], [*rest, ast.keyword("dim", number)])) if call.args else ""


def _unpooled(x: Operand, wanted: int) -> Earlier | None:
    """``x.view(n, -1)`` of a picture whose channels alone are what is wanted: each was to be one number."""
    for step in steps(x.made):
        before = step.inputs[0] if step.inputs else ((), None)
        if step.shape != x.sizes or step.op not in RESHAPES:
            return None
        if len(before[0]) > 2 and before[0][:2] == (x.sizes[0], wanted) and len(x.sizes) == 2 and channels_first(before[1]):
            mean = method("mean", tuple(range(2, len(before[0]))))
            edits = at_step(step, mean, why=f"each channel as one value, instead of `{step.op}`")
            return Earlier(f": its {wanted} channels were not pooled", edits, wanted, fits=True)
    return None


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
