"""Two tensors of as many numbers, the one with a dimension of one more, that broadcast: every sample met every other one.

Whoever wants that writes the dimension there, and is left alone.
"""

from __future__ import annotations

import ast
import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from torchdebug_magics.format import shape
from torchdebug_magics.instruments.shapes.repair.edit import method
from torchdebug_magics.instruments.shapes.repair.size_history import steps
from torchdebug_magics.instruments.shapes.repair.source import site_at
from torchdebug_magics.instruments.shapes.report import Failure, Fix
from torchdebug_magics.probing.where import location

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torchdebug_magics.instruments.shapes.follow.origins import Made
    from torchdebug_magics.instruments.shapes.repair.source import Site
    from torchdebug_magics.report import Location

__all__ = ["DIFFERENCES", "PAIRED_LOSSES", "REDUCES", "Side", "averaged", "broadcast", "suspected"]

PAIRED_LOSSES = frozenset(
    [
        *("binary_cross_entropy", "binary_cross_entropy_with_logits", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div"),
        *("soft_margin_loss", "poisson_nll_loss"),
    ]
)
"""Losses of each number of the input with the same one of the target."""
DIFFERENCES = frozenset(["sub", "__sub__", "__rsub__", "rsub", "eq", "__eq__", "ne", "__ne__", "dist", "isclose", "allclose"])
REDUCES = frozenset(["mean", "sum", "nanmean", "nansum"])
"""To one number: of each with each, that is the product of two such numbers, or their sum, and nobody writes it so."""
_SIGNS: dict[type[ast.operator], str] = {ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "div", ast.Pow: "pow"}
_MEANT = frozenset(
    [
        *("unsqueeze", "view", "reshape", "view_as", "reshape_as", "unflatten", "expand", "expand_as", "repeat", "transpose", "t"),
        *("permute", "T", "mT", "swapaxes", "swapdims", "movedim", "broadcast_to"),
    ]
)
"""Whoever gave a tensor its dimensions by one of these had them in mind."""


class Side(NamedTuple):
    """One of two operands."""

    sizes: tuple[int, ...]
    made: Made | None
    tensor: Any = None
    """None where it is not alive any more."""


def averaged(made: Made | None) -> Failure | None:
    """An op of the user's own line whose result, of each with each, went into one number.

    Where such a result met another tensor of all pairs, as the products do in squared distances, it was meant.
    """
    first: Failure | None = None
    todo, seen = [made], set()
    while todo:
        step = todo.pop()
        if step is None or id(step) in seen or made is None or step.shape != made.shape:
            continue
        seen.add(id(step))
        inner = [one for sizes, one in step.inputs if sizes == made.shape]
        if inner and all(one is not None for one in inner):
            todo += inner
            continue
        found = _crossed(step)
        if found is None:
            return None
        first = first or found
    return first


def _crossed(step: Made) -> Failure | None:
    if len(step.inputs) != 2 or step.line is None:  # noqa: PLR2004 - a pair
        return None
    site = site_at(*step.line)
    where = location(step.line[0].co_filename, step.line[1], step.line[0].co_name)
    return broadcast(step.op, [Side(*one) for one in step.inputs], site, step.module or None, where) if _calls(site, step.op) else None


def _calls(site: Site, op: str) -> bool:
    """Whether the expression is the op itself, and not a call of what has it inside."""
    node = site.expression
    if isinstance(node, ast.BinOp):
        return _SIGNS.get(type(node.op)) in {op.strip("_"), op.strip("_").removeprefix("r").removeprefix("true")}
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == op


def broadcast(name: str, pair: list[Side], site: Site, module: str | None, where: Location) -> Failure | None:
    """What is wrong with an op of two operands, in words and with what to write; None where they are meant as they are."""
    small, large = sorted(pair, key=lambda one: len(one.sizes))
    few, many = small.sizes, large.sizes
    if len(few) == len(many) or math.prod(few) < 2 or _plain(few) != _plain(many):  # noqa: PLR2004 - more than one number
        return None
    whole = tuple(torch.broadcast_shapes(few, many))
    if math.prod(whole) == math.prod(few) or not (name in PAIRED_LOSSES or _is_accident(small.made, large.made)):
        return None
    texts = [site.operand_text(at, one.tensor if one.tensor is not None else _GONE, direct=True) for at, one in enumerate(pair)]
    told = [f"{f'`{text}` of ' if text else ''}{shape(one.sizes)}" for text, one in zip(texts, pair, strict=True)]
    each = f"each of {few[0]} samples with all {few[0]}" if few[0] == whole[0] else f"{math.prod(whole):,} values from {math.prod(few):,}"
    sentence = f"`{name.strip('_')}` broadcasts {told[0]} with {told[1]} to {shape(whole)}: {each}"
    return suspected(sentence, name, module, where, [one.sizes for one in pair], texts, _squeezes(site, pair, few, many))


_GONE: Any = object()


def _is_accident(small: Made | None, large: Made | None) -> bool:
    """Whether a model had a part in it, and nobody gave the larger one its dimension on purpose."""
    if not any(one is not None and one.of_model for one in (large, small)):
        return False
    if any(one is not None and one.number and not one.inputs for one in (large, small)):  # made of nothing, as by `arange`
        return False
    for step in steps(large):
        if step.op in _MEANT or (step.op == "__getitem__" and _asks_for_one(step.args)):
            return False
        if not step.inputs or step.inputs[0][0] != step.shape:
            break
    return True


def _plain(dims: Sequence[int]) -> list[int]:
    return [size for size in dims if size != 1]


def _asks_for_one(args: Sequence[Any]) -> bool:
    """``x[:, None]``."""
    return any(one is None or (isinstance(one, tuple) and any(part is None for part in one)) for one in args)


def _squeezes(site: Site, pair: list[Side], few: tuple[int, ...], many: tuple[int, ...]) -> list[Fix]:
    """The larger one without its dimension of one, or the other one with it."""
    dim = next((dim for dim in reversed(range(len(many))) if many[dim] == 1 and (*many[:dim], *many[dim + 1 :]) == few), None)
    if dim is None:
        return []
    shown = -1 if dim == len(many) - 1 else dim
    fixes = []
    for dims, change, gives in ((many, method("squeeze", shown), few), (few, method("unsqueeze", shown), many)):
        at = next(at for at, one in enumerate(pair) if one.sizes == dims)
        node = site.operand_node(at, pair[at].tensor if pair[at].tensor is not None else _GONE, direct=True)
        if node is not None:
            fixes.append(Fix(code=site.changed(node, change.text), verified=True, why=f"{shape(gives)} on both sides"))
    return fixes


def suspected(
    sentence: str,
    name: str,
    module: str | None,
    where: Location,
    operands: Sequence[tuple[int, ...]],
    texts: Sequence[str],
    fixes: list[Fix],
) -> Failure:
    """Describes as a failure what ran without an error."""
    return Failure(
        module=module,
        op=name.strip("_"),
        location=where,
        operand_shapes=tuple(operands),
        operand_names=tuple(texts),
        explanation=sentence,
        fixes=tuple(fixes),
        error="",
    )
