"""Where a size came from, in words: ``576 = 16 x 6 x 6 from `conv2` ``."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from torchdebug_magics.format import shape
from torchdebug_magics.instruments.shapes.follow.seen import Made

_MAKERS = {
    *("linear", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "embedding"),
    *("embedding_bag", "bilinear", "matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "addmm", "baddbmm", "einsum", "lstm", "gru"),
    *("rnn_tanh", "rnn_relu", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell", "multi_head_attention_forward"),
    *("scaled_dot_product_attention", "cat", "concat", "concatenate", "stack", "hstack", "vstack", "one_hot", "cdist"),
}
"""Ops that decide sizes; the others pass on, or take from, those of their first operand."""
_FEATURES_LAST = {
    *("linear", "embedding", "bilinear", "lstm", "gru", "rnn_tanh", "rnn_relu", "multi_head_attention_forward"),
    *("scaled_dot_product_attention",),
}
TURNS = frozenset(["transpose", "permute", "t", "mT", "T", "swapaxes", "swapdims", "movedim"])
RESHAPES = frozenset(["view", "reshape", "flatten", "ravel", "view_as", "reshape_as"])
JOINS = frozenset(["cat", "concat", "concatenate", "hstack", "vstack"])


def steps(made: Made | None) -> Iterator[Made]:
    """From the last to the first, along the first operand that has a history."""
    while made is not None:
        yield made
        made = next((earlier for _, earlier in made.inputs if earlier is not None), None)


def same_input(made: Made | None) -> Made | None:
    """The input that a tensor still is, but for ops that left its shape alone."""
    line = list(steps(made))
    return line[-1] if line and line[-1].number == 0 and all(step.shape == line[0].shape for step in line) else None


def of_inputs(made: Made | None) -> bool:
    """Whether it depends on what the model was called with."""
    return any(step.number == 0 for step in every_step(made))


def comes_from(made: Made | None, first: Made) -> bool:
    """Whether a step is among those that led to another."""
    return any(step is first for step in every_step(made))


def every_step(made: Made | None) -> Iterator[Made]:
    """All that led to a tensor, along all operands, once each."""
    todo, seen = [made], set()
    while todo:
        step = todo.pop()
        if step is not None and id(step) not in seen:
            seen.add(id(step))
            yield step
            todo += [inner for _, inner in step.inputs]


def maker(made: Made | None) -> Made | None:
    """The step that decided the sizes: the nearest one that does, or the first of all."""
    last = None
    for last in steps(made):
        if last.op in _MAKERS:
            return last
    return last


def makers(made: Made | None) -> Iterator[Made]:
    """All steps that decided sizes, the last first."""
    return (step for step in steps(made) if step.op in _MAKERS)


def came_from(made: Made | None) -> str:
    """``from `conv2` ``, ``from the input `x` ``; empty where it is not known."""
    step = maker(made)
    if step is None:
        return ""
    if step.number == 0:
        return f"from the input `{step.op}`"
    if step.op in _MAKERS and step.op not in JOINS and step.module and not step.op.startswith(("__", "mat", "bmm")):
        return f"from `{step.module}`"
    return f"from `{step.op.strip('_')}`" + (f" in `{step.module}`" if step.module else "")


def through(made: Made | None) -> str:
    """The pooling behind the step that decided the sizes, which has made them smaller; empty where there is none."""
    source = maker(made)
    pools = (step for step in itertools.takewhile(lambda step: step is not source, steps(made)) if "pool" in step.op and step.module)
    last = next(pools, None)
    return f" through `{last.module}`" if last is not None and source is not None and source.module and source.op in _MAKERS else ""


def product(made: Made | None, size: int, dim: int = -1) -> str:
    """``16 x 6 x 6`` where the size came about by flattening, ``64 + 32`` by joining; empty where it was one from the start.

    The size is that of dimension `dim`; where this stood in earlier shapes is known as long as the shape stays.
    """
    shape_now = made.shape if made is not None else ()
    for step in steps(made):
        if not step.inputs:
            return ""
        if step.op in JOINS:
            parts = _joined(step, size, dim % len(step.shape) if step.shape == shape_now else None)
            return " + ".join(map(str, parts)) if len(parts) > 1 else ""
        sizes = step.inputs[0][0]
        alone = int(sizes[:1] == (1,) == step.shape[:1] and len(sizes) > 2)  # a batch of one is none of the factors
        for first in range(alone, len(sizes) - 1 if step.op in RESHAPES else 0):
            merged = sizes[first:]
            if math.prod(merged) == size and size not in sizes:
                return shape(merged)
        if step.op in _MAKERS:
            return ""
    return ""


def is_flattened(made: Made | None) -> bool:
    """Whether dimensions were merged since the step that decided the sizes, also those of one pixel."""
    since = itertools.takewhile(lambda step: step.op not in _MAKERS, steps(made))
    return any(step.op in RESHAPES and bool(step.inputs) and len(step.inputs[0][0]) > len(step.shape) for step in since)


def _joined(step: Made, size: int, dim: int | None) -> list[int]:
    """The sizes that were joined to this one, along the dimension if it is known."""
    parts = [sizes for sizes, _ in step.inputs if len(sizes) == len(step.shape)]
    along = next((at for at, whole in enumerate(step.shape) if len(parts) > 1 and sum(part[at] for part in parts) == whole), None)
    if along is None or step.shape[along] != size or along != (along if dim is None else dim):
        return []
    if dim is None and step.shape.count(size) > 1:  # it may be the other one
        return []
    return [sizes[along] for sizes in parts]


def channels_first(made: Made | None) -> bool:
    """Whether what decided its sizes puts the channels in dimension 1, and no op since then has turned them: a convolution."""
    for step in steps(made):
        if step.op in TURNS or step.op in {"view", "reshape", "flatten"}:
            return False
        if step.op in _MAKERS:
            return step.op.startswith("conv")
    return False


def features_last(made: Made | None) -> bool:
    """Whether what decided its sizes puts the features last: a Linear, an embedding, a recurrent module or attention."""
    step = maker(made)
    return step is not None and step.op in _FEATURES_LAST
