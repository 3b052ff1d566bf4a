"""What was to be gathered into one row of features before a Linear: the states of all layers, or each channel as one number."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from torch import nn

from torchdebug_magics.format import shape
from torchdebug_magics.instruments.shapes.repair.edit import Edit, method, on_operand, then
from torchdebug_magics.instruments.shapes.repair.rules.steps.earlier import Earlier, at_step
from torchdebug_magics.instruments.shapes.repair.size_history import RESHAPES, channels_first, steps

if TYPE_CHECKING:
    from torchdebug_magics.instruments.shapes.follow.origins import Made
    from torchdebug_magics.instruments.shapes.repair.failure_facts import Facts, Operand, Sizes

__all__ = ["unjoined", "unpooled"]


def unpooled(x: Operand, wanted: int) -> Earlier | None:
    """``x.view(n, -1)`` of a picture whose channels alone are what is wanted: each was to be one number."""
    for step in steps(x.made):
        before = step.inputs[0] if step.inputs else ((), None)
        if step.shape != x.sizes or step.op not in RESHAPES:
            return None
        if len(before[0]) > 2 and before[0][:2] == (x.sizes[0], wanted) and len(x.sizes) == 2 and channels_first(before[1]):
            return Earlier(f": its {wanted} channels were not pooled", _pooled(step, tuple(range(2, len(before[0])))), wanted)
    return None


def unjoined(facts: Facts, x: Operand, wanted: int) -> Earlier | None:
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


def _side_by_side(facts: Facts, x: Operand, step: Made) -> tuple[Edit, ...]:
    change = then(method("transpose", 0, 1), method("flatten", 1))
    squeezes = next((one for one in steps(x.made) if one.op == "squeeze"), None)
    if squeezes is not None:
        return at_step(squeezes, lambda _, y: change.text(y), lambda _, args, __: change.apply(args[0]))
    at = next(at for at, one in enumerate(facts.operands) if one is x)
    return tuple(on_operand(facts, at, change, rank=1)) if x.sizes == step.shape else ()


def _pooled(step: Made, places: Sizes) -> tuple[Edit, ...]:
    why = f"each channel as one value, instead of `{step.op}`"
    edits = at_step(step, lambda _, x: f"{x}.mean({places})", lambda _, args, __: args[0].mean(places))
    return tuple(replace(edit, why=why) for edit in edits)
