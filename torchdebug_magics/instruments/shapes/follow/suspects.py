"""What ran without an error and is probably unintended: sizes that broadcast by accident, dimensions that a view reads in another order.

Two questions are asked of the ops in the user's own lines. Do two tensors of as many numbers, the one with a dimension of one more, give
more numbers, and is the op a difference or a loss, or are all those numbers averaged into one? Then every sample met every other one:
whoever wants that writes the dimension there, and is left alone. And does a dimension keep its size in a view, but not its stride? Then the
view read other numbers into it: a permute was meant.
"""

from __future__ import annotations

import ast
import linecache
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import CodeType, FrameType
from typing import Any, NamedTuple, TypeAlias

import torch

from torchdebug_magics.format import shape
from torchdebug_magics.instruments.shapes.follow.seen import Made
from torchdebug_magics.instruments.shapes.repair.edit import method
from torchdebug_magics.instruments.shapes.repair.size_history import steps
from torchdebug_magics.instruments.shapes.repair.source import EditSite, site_at, site_in
from torchdebug_magics.instruments.shapes.report import Failure, Fix
from torchdebug_magics.probing.dry_runs.inputs import sizes
from torchdebug_magics.probing.source.moved_axes import MovedAxis
from torchdebug_magics.probing.source.syntax import tree_of
from torchdebug_magics.probing.source.user_code import locate, owner, part_of_line, span
from torchdebug_magics.probing.tensors import Crossing
from torchdebug_magics.report import Location

History: TypeAlias = Callable[[torch.Tensor], Made | None]
_VIEWS = frozenset(["view", "reshape"])
_HANDS_ON = ("nn/functional.py", "torch/overrides.py", "nn/modules/loss.py", "nn/modules/module.py")
"""Torch's own code between the user's line and a loss."""
PAIRED_LOSSES = {
    *("binary_cross_entropy", "binary_cross_entropy_with_logits", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div"),
    *("soft_margin_loss", "poisson_nll_loss"),
}
"""Losses of each number of the input with the same one of the target."""
DIFFERENCES = frozenset(["sub", "__sub__", "__rsub__", "rsub", "eq", "__eq__", "ne", "__ne__", "dist", "isclose", "allclose"])
REDUCES = frozenset(["mean", "sum", "nanmean", "nansum"])
"""To one number: of each with each, that is the product of two such numbers, or their sum, and nobody writes it so."""
_SIGNS: dict[type[ast.operator], str] = {ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "div", ast.Pow: "pow"}
_MEANT = {
    *("unsqueeze", "view", "reshape", "view_as", "reshape_as", "unflatten", "expand", "expand_as", "repeat", "transpose", "t"),
    *("permute", "T", "mT", "swapaxes", "swapdims", "movedim", "broadcast_to"),
}
"""Whoever gave a tensor its dimensions by one of these had them in mind."""
_GONE: Any = object()


class Suspects:
    """Looks at ops that ran without an error, until the first suspicious one."""

    def __init__(self) -> None:
        self.first: Failure | None = None

    def look(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any, module: str | None, made: History) -> None:
        """One op, from the function mode that followed it."""
        if self.first is not None or not (name in _VIEWS or name in PAIRED_LOSSES or name in DIFFERENCES or name in REDUCES):
            return
        if name in REDUCES:
            is_whole = isinstance(out, torch.Tensor) and not out.dim() and args and isinstance(args[0], torch.Tensor)
            self.first = averaged(made(args[0])) if is_whole else None
            return
        frame = _asking(sys._getframe(3), through_loss=name in PAIRED_LOSSES)
        if frame is None or not args or not isinstance(args[0], torch.Tensor):
            return
        if name in _VIEWS:
            self.first = misread(name, args[0], out, frame, module)
        else:
            tensors = [argument for argument in (*args, *kwargs.values()) if isinstance(argument, torch.Tensor)]
            pair = tensors[:2] if name in PAIRED_LOSSES else tensors
            if len(pair) == 2 and all(type(size) is int for tensor in pair for size in tensor.shape):  # noqa: PLR2004 - a pair
                sides = [Side(sizes(tensor), made(tensor), tensor) for tensor in pair]
                self.first = broadcast(name, sides, site_in(frame), module, locate(frame))
        if self.first is not None:
            self.first = replace(self.first, underlined=underlined_at(frame.f_code, frame.f_lineno, frame.f_lasti))


def underlined_at(code: CodeType, line: int, instruction: int) -> tuple[int, int] | None:
    """The expression that runs as (start, end) in its line; None before Python 3.11, and where it is the whole line."""
    place = span(code, instruction)
    return None if place is None else part_of_line(linecache.getline(code.co_filename, line), line, place)


def _asking(frame: FrameType, *, through_loss: bool) -> FrameType | None:
    """The user's frame that called the op itself, or the module of the loss."""
    if owner(frame.f_code.co_filename) == "user":
        return frame
    outer: FrameType | None = frame
    while through_loss and outer is not None and owner(outer.f_code.co_filename) != "user":
        if owner(outer.f_code.co_filename) != "own" and not outer.f_code.co_filename.replace("\\", "/").endswith(_HANDS_ON):
            return None
        outer = outer.f_back
    return outer if through_loss else None


class Side(NamedTuple):
    """One of two operands."""

    sizes: tuple[int, ...]
    made: Made | None
    tensor: Any = _GONE
    """Another object where it is not alive any more."""


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
        inner = [origin for sizes, origin in step.inputs if sizes == made.shape]
        if inner and all(origin is not None for origin in inner):
            todo += inner
            continue
        failure = _crossed(step)
        if failure is None:
            return None
        first = first or failure
    return first


def _crossed(step: Made) -> Failure | None:
    where = step.location
    if len(step.inputs) != 2 or step.line is None or where is None:  # noqa: PLR2004 - a pair
        return None
    site = site_at(*step.line)
    return broadcast(step.op, [Side(*given) for given in step.inputs], site, step.module or None, where) if _calls(site, step.op) else None


def _calls(site: EditSite, op: str) -> bool:
    """Whether the expression is the op itself, and not a call of what has it inside."""
    node = site.expression
    if isinstance(node, ast.BinOp):
        return _SIGNS.get(type(node.op)) in {op.strip("_"), op.strip("_").removeprefix("r").removeprefix("true")}
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == op


def broadcast(name: str, pair: list[Side], site: EditSite, module: str | None, where: Location) -> Failure | None:
    """What is wrong with an op of two operands, in words and with what to write; None where they are meant as they are."""
    small, large = sorted(pair, key=lambda side: len(side.sizes))
    crossing = Crossing.of(small.sizes, large.sizes)
    if crossing is None or not (name in PAIRED_LOSSES or _is_accident(small.made, large.made)):
        return None
    operands = [(site.operand_text(at, side.tensor, direct=True), side.sizes) for at, side in enumerate(pair)]
    return Failure(
        module=module,
        op=name.strip("_"),
        location=where,
        operand_shapes=tuple(side.sizes for side in pair),
        operand_names=tuple(text for text, _ in operands),
        explanation=f"{crossing.sentence(name, operands)}: {crossing.meets}",
        fixes=tuple(_squeezes(site, pair, crossing)),
        error="",
    )


def _is_accident(small: Made | None, large: Made | None) -> bool:
    """Whether a model had a part in it, and nobody gave the larger one its dimension on purpose."""
    if not any(made is not None and made.of_model for made in (large, small)):
        return False
    if any(made is not None and made.number and not made.inputs for made in (large, small)):  # made of nothing, as by `arange`
        return False
    for step in steps(large):
        if step.op in _MEANT or (step.op == "__getitem__" and _asks_for_one(step.args)):
            return False
        if not step.inputs or step.inputs[0][0] != step.shape:
            break
    return True


def _asks_for_one(args: Sequence[Any]) -> bool:
    """``x[:, None]``."""
    return any(argument is None or (isinstance(argument, tuple) and any(part is None for part in argument)) for argument in args)


def _squeezes(site: EditSite, pair: list[Side], crossing: Crossing) -> list[Fix]:
    """The larger one without its dimension of one, or the other one with it."""
    few, many, _ = crossing
    fixes = []
    for dims, change, gives in ((many, "squeeze", few), (few, "unsqueeze", many)) if crossing.dim is not None else ():
        at = next(at for at, side in enumerate(pair) if side.sizes == dims)
        node = site.operand_node(at, pair[at].tensor, direct=True)
        if node is not None:
            code = site.changed(node, method(change, crossing.dim).text)
            fixes.append(Fix(code=code, verified=True, why=f"{shape(gives)} on both sides"))
    return fixes


def misread(name: str, x: torch.Tensor, out: Any, frame: FrameType, module: str | None) -> Failure | None:
    """What is wrong with a view, in words and with the permutation that was meant; None where it moves no dimension."""
    site = site_in(frame)
    moved = MovedAxis.of(sizes(x), sizes(out), site.expression, tree_of(site.code.co_filename)) if isinstance(out, torch.Tensor) else None
    if moved is None or not x.numel():
        return None
    text = site.operand_text(0, x, direct=True)
    node, call = site.operand_node(0, x, direct=True), site.expression
    turned = moved.permuted(call) if isinstance(call, ast.Call) and node is not None else None
    fixes = [Fix(code=ast.unparse(turned), verified=True, why="the dimensions in the order that the sizes name")] if turned else []
    return Failure(
        module=module,
        op=name,
        location=locate(frame),
        operand_shapes=(sizes(x),),
        operand_names=(text,),
        explanation=moved.sentence(name, text),
        fixes=tuple(fixes),
        error="",
    )
