"""Earlier steps at fault: a batch dimension that was lost or missing, and tensors joined along another dimension."""

from __future__ import annotations

import ast
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from torchdebug_magics.format import shape
from torchdebug_magics.instruments.shapes.follow.seen import Made
from torchdebug_magics.instruments.shapes.repair.edit import OpEdit, Repair, ValueChange, method, on_operand, then, together
from torchdebug_magics.instruments.shapes.repair.failure_facts import FailureFacts, Operand, Sizes
from torchdebug_magics.instruments.shapes.repair.rebuild import rebuilt_module
from torchdebug_magics.instruments.shapes.repair.size_history import (
    JOINS,
    RESHAPES,
    channels_first,
    joined_along,
    steps,
)
from torchdebug_magics.instruments.shapes.repair.source import site_at
from torchdebug_magics.probing.source.syntax import expression


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
    if len(x.sizes) <= 2 and dim == -1 and (found := _unbatched(x) or _flattened(facts, x, wanted) or _rebatched(facts, x, wanted)):
        return found
    if dim == -1 and (known := _unjoined(facts, x, wanted) or _unpooled(x, wanted)):
        return known
    return _joined(x, wanted, dim)


def with_size(facts: FailureFacts, found: Earlier, wanted: int, name: str) -> tuple[Repair, ...]:
    """Its edits; with the failing module made for what comes then, where that is still another size."""
    if found.size == wanted:
        return found.edits
    if not found.edits:
        return ()
    remade = rebuilt_module(facts.module, facts.path, **dict[str, Any]({name: found.size}))
    return tuple(together(edit, one) for edit in found.edits for one in remade)


def _unbatched(x: Operand) -> Earlier | None:
    """A picture without a batch: a convolution takes it as one, and what flattens it then takes its channels for the batch."""
    line = list(steps(x.made))
    if len(x.sizes) != 2 or not line or line[-1].number:
        return None
    step = next((one for one in line if _is_unbatched(one) and one.shape[0] == x.sizes[0]), None)
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


def _flattened(facts: FailureFacts, x: Operand, wanted: int) -> Earlier | None:
    """``x.flatten()`` or ``x.view(-1)``: all of the batch in one row.

    That the first dimension was a batch is sure where its rows have the wanted size, or a convolution took it for one.
    """
    for step in itertools.takewhile(lambda step: len(step.shape) == 1, steps(x.made)):
        before: Sizes = step.inputs[0][0] if step.inputs else ()
        sure = math.prod(before[1:]) == wanted or any(_is_of_pictures(step) and not _is_unbatched(step) for step in steps(x.made))
        if step.op in RESHAPES and len(before) > 1 and before[0] in facts.batches and sure:
            edits = _of_module(facts, step) or instead_of(step, method("flatten", 1))
            return Earlier(f": `{step.op}` merged the batch of {before[0]} into the features", edits, math.prod(before[1:]))
    return None


def _rebatched(facts: FailureFacts, x: Operand, wanted: int) -> Earlier | None:
    """``x.view(64, -1)`` of a batch of 32: rows of another length than those of the samples, which have the wanted one."""
    for step in steps(x.made):
        if len(step.shape) != len(x.sizes):
            return None
        before: Sizes = step.inputs[0][0] if step.inputs else ()
        if step.op in RESHAPES and len(before) > len(step.shape) and before[0] != step.shape[0]:
            if before[0] not in facts.batches or math.prod(before[1:]) != wanted:
                return None
            words = f": `{step.op}` made {step.shape[0]} rows of a batch of {before[0]}"
            return Earlier(words, instead_of(step, method("flatten", 1)), wanted)
    return None


def squeezed(facts: FailureFacts, x: Operand) -> Earlier | None:
    """``x.squeeze()`` that took the batch of one away, too; also of what was then stacked."""
    many = len(x.sizes)
    for step in steps(x.made):
        before: Sizes = step.inputs[0][0] if step.inputs else ()
        if len(step.shape) != many:
            return None
        many -= step.op == "stack"
        if step.op == "squeeze" and not step.args and before[:1] == (1,) and 1 in facts.batches:
            kept = tuple(dim for dim, size in enumerate(before) if dim and size == 1)
            kept = (-1,) if kept == (len(before) - 1,) else kept
            edits = instead_of(step, method("squeeze", kept[0] if len(kept) == 1 else kept))
            return Earlier(": `squeeze` removed the batch dimension", edits, math.prod(before[1:]))
    return None


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
    edits = at_step(step, lambda call, _: _along(call, dim), lambda _, args, __: torch.cat(args[0], dim=dim))
    return Earlier(words, edits, wanted)


def _of_module(facts: FailureFacts, step: Made) -> tuple[Repair, ...]:
    module = facts.modules.get(step.module)
    return tuple(rebuilt_module(module, step.module, start_dim=1, rank=1)) if isinstance(module, nn.Flatten) else ()


def at_step(step: Made, text: Callable[[ast.Call, str], str], run: Callable[[Any, Any, Any], Any]) -> tuple[Repair, ...]:
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
    return (Repair(code, rank=1, ops=(OpEdit(site, step.op, run),)),) if code else ()


def instead_of(step: Made, change: ValueChange) -> tuple[Repair, ...]:
    """What the op of this step was given, changed in this way instead."""
    return at_step(step, lambda _, x: change.text(x), lambda _, args, __: change.apply(args[0]))


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
            why = f"each channel as one value, instead of `{step.op}`"
            pooled = instead_of(step, method("mean", tuple(range(2, len(before[0])))))
            edits = tuple(replace(edit, why=why) for edit in pooled)
            return Earlier(f": its {wanted} channels were not pooled", edits, wanted, fits=True)
    return None


def _unjoined(facts: FailureFacts, x: Operand, wanted: int) -> Earlier | None:
    """The states of several layers, or of both directions, of which all were wanted side by side."""
    for step in steps(x.made):
        module = facts.modules.get(step.module)
        if not isinstance(module, nn.RNNBase) or len(step.shape) != 3 or step.shape[0] * step.shape[2] != wanted:
            if step.op != "squeeze" and step.shape != x.sizes:
                return None
            continue
        if step.shape[0] != module.num_layers * (2 if module.bidirectional else 1) or step.shape[0] == 1:
            return None
        return Earlier(
            f": the {step.shape[0]} states of {step.shape[2]} are stacked along the first dimension of {shape(step.shape)}",
            _side_by_side(facts, x, step),
            wanted,
        )
    return None


def _side_by_side(facts: FailureFacts, x: Operand, step: Made) -> tuple[Repair, ...]:
    change = then(method("transpose", 0, 1), method("flatten", 1))
    squeezes = next((step for step in steps(x.made) if step.op == "squeeze"), None)
    if squeezes is not None:
        return instead_of(squeezes, change)
    at = next((at for at, one in enumerate(facts.given or facts.operands) if one.tensor is x.tensor), 0)
    return tuple(on_operand(replace(facts, operands=facts.given or facts.operands), at, change, rank=1)) if x.sizes == step.shape else ()
