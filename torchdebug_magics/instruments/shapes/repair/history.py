"""Where a size came from, in words: ``576 = 16 x 6 x 6 from `conv2` ``."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from torchdebug_magics.format import shape

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torchdebug_magics.instruments.shapes.ops import Made

__all__ = ["before", "came_from", "maker", "of_inputs", "product", "same_input", "steps"]

_MAKERS = frozenset(
    [
        "linear",
        "conv1d",
        "conv2d",
        "conv3d",
        "conv_transpose1d",
        "conv_transpose2d",
        "conv_transpose3d",
        "embedding",
        "embedding_bag",
        "bilinear",
        "matmul",
        "__matmul__",
        "__rmatmul__",
        "mm",
        "bmm",
        "addmm",
        "baddbmm",
        "einsum",
        "lstm",
        "gru",
        "rnn_tanh",
        "rnn_relu",
        "lstm_cell",
        "gru_cell",
        "rnn_tanh_cell",
        "rnn_relu_cell",
        "multi_head_attention_forward",
        "scaled_dot_product_attention",
        "cat",
        "concat",
        "concatenate",
        "stack",
        "hstack",
        "vstack",
        "one_hot",
    ]
)
"""Ops that decide sizes; the others pass on, or take from, those of their first operand."""
_RESHAPES = frozenset(["view", "reshape", "flatten", "ravel", "view_as", "reshape_as"])
_JOINS = frozenset(["cat", "concat", "concatenate", "hstack", "vstack"])


def steps(made: Made | None) -> Iterator[Made]:
    """From the last to the first, along the first operand that has a history."""
    while made is not None:
        yield made
        made = before(made)


def same_input(made: Made | None) -> Made | None:
    """The input that a tensor still is, but for ops that left its shape alone."""
    line = list(steps(made))
    return line[-1] if line and line[-1].number == 0 and all(step.shape == line[0].shape for step in line) else None


def of_inputs(made: Made | None) -> bool:
    """Whether it depends on what the model was called with."""
    return made is not None and (made.number == 0 or any(of_inputs(one) for _, one in made.inputs))


def before(made: Made) -> Made | None:
    """What it was made from."""
    return next((one for _, one in made.inputs if one is not None), None)


def maker(made: Made | None) -> Made | None:
    """The step that decided the sizes: the nearest one that does, or the first of all."""
    last = None
    for last in steps(made):
        if last.op in _MAKERS:
            return last
    return last


def came_from(made: Made | None) -> str:
    """``from `conv2` ``, ``from the input `x` ``; empty where it is not known."""
    step = maker(made)
    if step is None:
        return ""
    if step.number == 0:
        return f"from the input `{step.op}`"
    if step.op in _MAKERS and step.op not in _JOINS and step.module and not step.op.startswith(("__", "mat", "bmm")):
        return f"from `{step.module}`"
    return f"from `{step.op.strip('_')}`" + (f" in `{step.module}`" if step.module else "")


def product(made: Made | None, size: int) -> str:
    """``16 x 6 x 6`` where the size came about by flattening, ``64 + 32`` by joining; empty where it was one from the start."""
    for step in steps(made):
        if not step.inputs:
            return ""
        if step.op in _JOINS:
            parts = _joined(step, size)
            return " + ".join(map(str, parts)) if len(parts) > 1 else ""
        sizes = step.inputs[0][0]
        for first in range(len(sizes) - 1 if step.op in _RESHAPES else 0):
            merged = sizes[first:]
            if math.prod(merged) == size and size not in sizes:
                return shape(merged)
        if step.op in _MAKERS:
            return ""
    return ""


def _joined(step: Made, size: int) -> list[int]:
    shapes = [sizes for sizes, _ in step.inputs if len(sizes) == len(step.shape)]
    for dim, whole in enumerate(step.shape):
        parts = [sizes[dim] for sizes in shapes]
        if whole == size and sum(parts) == whole:
            return parts
    return []
