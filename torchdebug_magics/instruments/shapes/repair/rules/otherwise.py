"""An earlier call of the user's, written otherwise: what would come of it is put to the op that failed."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from torchdebug_magics.format import shape
from torchdebug_magics.instruments.shapes.follow.seen import Made
from torchdebug_magics.instruments.shapes.repair.edit import OpEdit, Repair, ValueChange, as_written, method
from torchdebug_magics.instruments.shapes.repair.failure_facts import Operand, Sizes
from torchdebug_magics.instruments.shapes.repair.size_history import RESHAPES, TURNS, channels_first, maker, steps
from torchdebug_magics.instruments.shapes.repair.source import site_at
from torchdebug_magics.probing.dry_runs.inputs import named_tensors, sizes
from torchdebug_magics.probing.source.syntax import as_atom, expression, last_name

_JOINS = frozenset(["cat", "concat", "concatenate", "stack"])
_OVER_SEVERAL = frozenset(["mean", "sum", "amax", "amin", "logsumexp"])
_REDUCTIONS = _OVER_SEVERAL | {"max", "min", "argmax", "argmin", "median"}
_IMAGES = 4
"""Dimensions."""

Write = Callable[[ast.expr, ast.expr], str]
"""The new text, from the user's expression and from the tensor in it."""
Run = Callable[[Any, Any, Any], Any]
"""What is run instead of ``func(*args, **kwargs)``."""


def otherwise(x: Operand, fits: Callable[[Sizes], bool]) -> tuple[Made, tuple[Repair, ...]] | None:
    """The last call on the way to a tensor of which, written otherwise, a shape that fits comes; and how it is written then."""
    later: list[Made] = []
    for step in steps(x.made):
        given = [before for before, _ in step.inputs]
        edits: list[Repair] = []
        for write, run, why in _variations(step) if given else ():
            new = _result(step, given, run)
            for following in reversed(later):
                new = _after(following, new)
            if new is not None and new != x.sizes and fits(new):
                edits += called_otherwise(step, write, run, why=why)
        if edits:
            return step, tuple(replace(edit, rank=1 + place) for place, edit in enumerate(edits))
        if (maker(step) is step and step.op != "linear") or _after(step, given[0]) != step.shape:
            return None
        later.append(step)
    return None


def words(step: Made, edits: Sequence[Repair]) -> str:
    """What the call did, to put behind a sentence."""
    return f": `{edits[0].ops[0].site.text}` made {shape(step.shape)} of {' and '.join(shape(sizes) for sizes, _ in step.inputs[:3])}"


def _variations(step: Made) -> Iterator[tuple[Write, Run, str]]:
    """Along other dimensions, or of what has other dimensions."""
    sizes, before = step.inputs[0]
    many = len(sizes)
    if step.op in _JOINS | _REDUCTIONS:
        for dim in (*range(1, many + (step.op == "stack")), 0):
            yield *_along(-1 if dim == many - 1 and step.op in _JOINS - {"stack"} else dim), f"along dimension {dim}"
        if step.op in _OVER_SEVERAL and many >= _IMAGES:
            yield *_along(tuple(range(2, many))), "over the pixels of each channel"
    elif step.op == "__getitem__" and step.args:
        index = step.args[0] if isinstance(step.args[0], tuple) else step.args[:1]
        numbers = [item for item in index if type(item) is int]
        if len(numbers) == 1 and all(item in (slice(None), Ellipsis) for item in index if type(item) is not int):
            for dim in range(many):
                yield *_of_tensor(as_written(f"{{0}}[{':, ' * dim}{numbers[0]}]")), f"position {numbers[0]} of dimension {dim}"
    elif step.op in RESHAPES and many > 2 and channels_first(before):
        yield *_of_tensor(method("mean", tuple(range(2, many)))), f"each channel as one value, instead of `{step.op}`"
    elif step.op in RESHAPES and many == 2:
        yield *_of_tensor(as_written("{0}[:, 1:].reshape(-1)")), "the next word for each"


def _along(dim: Any) -> tuple[Write, Run]:
    """The call with another dimension, by place or by name, as it was given."""

    def write(call: ast.expr, tensor: ast.expr) -> str:
        if not isinstance(call, ast.Call):
            return ""
        args, number, place = [*call.args], expression(repr(dim)), int(tensor in call.args)
        named = next((keyword for keyword in call.keywords if keyword.arg in {"dim", "axis"}), None)
        keywords = [ast.keyword(keyword.arg, number) if keyword is named else keyword for keyword in call.keywords]
        if named is None and len(args) > place:
            args[place] = number
        elif named is None:
            keywords.append(ast.keyword("dim", number))
        return ast.unparse(ast.Call(call.func, args, keywords))

    def run(func: Any, args: Any, kwargs: Any) -> Any:
        name = next((name for name in ("dim", "axis") if name in kwargs), "dim")
        is_placed = len(args) > 1
        return func(args[0], dim, *args[2:], **kwargs) if is_placed else func(*args, **{**kwargs, name: dim})

    return write, run


def _of_tensor(change: ValueChange) -> tuple[Write, Run]:
    """The tensor changed, in the place of the call."""
    return lambda _, tensor: change.text(as_atom(tensor)), lambda _, args, __: change.apply(args[0])


def _after(step: Made, before: Sizes | None) -> Sizes | None:
    """The shape that a later step makes of another one than it had; None where it does not take that."""
    if before is not None and step.op == "linear":
        return (*before[:-1], step.shape[-1]) if before[-1:] == step.inputs[0][0][-1:] else None
    if before is None or (step.shape == step.inputs[0][0] and step.op not in TURNS):
        return before  # such as an activation
    return _result(step, [before], lambda func, args, kwargs: func(*args, **kwargs))


def _result(step: Made, given: Sequence[Sizes], run: Run) -> Sizes | None:
    tensors = [torch.empty(before, device="meta") for before in given]
    func = getattr(torch, step.op, None) or getattr(torch.Tensor, step.op, None)
    try:
        out = run(func, (tensors if step.op in _JOINS else tensors[0], *step.args), {})
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
        return None
    return next((sizes(tensor) for _, tensor in named_tensors(out)), None)


def at_step(step: Made, change: ValueChange, *, why: str = "") -> tuple[Repair, ...]:
    """What the step was made of, changed in the place of the user's call that made it."""
    return called_otherwise(step, *_of_tensor(change), why=why)


def called_otherwise(step: Made, write: Write, run: Run, *, why: str = "") -> tuple[Repair, ...]:
    """The call, or the subscript, that made this step, done otherwise, where it stands in the user's code."""
    site = site_at(*step.line) if step.line is not None else None
    node = site.expression if site is not None else None
    tensor: ast.expr | None = None
    if isinstance(node, ast.Subscript) and step.op == "__getitem__":
        tensor = node.value
    elif isinstance(node, ast.Call) and last_name(node.func) == step.op:
        tensor = tensor_of(node, len(step.args))
    code = write(node, tensor) if isinstance(node, ast.expr) and tensor is not None else ""
    return (Repair(code, why, 1, ops=(OpEdit(site, step.op, run),)),) if code and site is not None else ()


def tensor_of(call: ast.Call, many: int) -> ast.expr | None:
    """The tensor of ``x.mean(1)`` or of ``torch.mean(x, 1)``: the op had so many other arguments by place."""
    return call.args[0] if len(call.args) == many + 1 else getattr(call.func, "value", None)
