"""Tells an infinity that is meant, as a causal mask or a start value has, from a fault."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from torchdebug_magics.instruments.nanhunt.causes.tensor_names import owner_of, shares_memory
from torchdebug_magics.instruments.nanhunt.replay.op_trace import Op
from torchdebug_magics.probing.ops import is_movement
from torchdebug_magics.probing.tensors import INF, dense

_ON_PURPOSE = frozenset([
    "fill", "full", "full_like", "new_full", "masked_fill", "index_fill", "scalar_tensor", "where", "constant_pad_nd", "pad",
    "lift_fresh", "lift_fresh_copy", "_to_copy", "add", "sub", "maximum", "minimum", "clamp", "clamp_min", "clamp_max", "scatter",
    "index_put", "_index_put_impl", "masked_scatter", "copy",
])  # fmt: skip
"""Ops by which an infinity that the user wrote down enters: a mask, a start value, padding."""
_WRITES_DOWN = frozenset({"masked_fill", "where"})
"""A NaN written here marks what is missing; one from `fill_` or `full` is as likely a fault."""


def on_purpose(op: Op, kind: int) -> bool:
    """Whether the op put an infinity that somebody wrote down."""
    name = op.name.removesuffix("_")
    if name not in _ON_PURPOSE or op.backward:
        return False
    scalars = [value for value in (*op.args, *op.kwargs.values()) if isinstance(value, float)]
    if any(math.isinf(value) if kind == INF else math.isnan(value) and name in _WRITES_DOWN for value in scalars):
        return True
    # `torch.tensor(-inf)` holds one as well.
    return kind == INF and name in {"lift_fresh", "lift_fresh_copy"}


_ADDITIVE = frozenset([
    "add", "sub", "where", "masked_fill", "_softmax", "_log_softmax", "logsumexp", "logaddexp", "amax", "max", "maximum",
])  # fmt: skip


def is_mask(tensor: torch.Tensor, kind: int, via: tuple[Op, ...]) -> bool:
    """Whether a tensor from before the step is a mask: minus infinity and at most two other values, used as masks are."""
    numbers = dense(tensor)
    if kind != INF or numbers is None or numbers.is_complex() or bool((numbers == math.inf).any()) or bool(torch.isnan(numbers).any()):
        return False
    finite = numbers[torch.isfinite(numbers)]
    if finite.numel() and torch.unique(finite).numel() > 2:  # noqa: PLR2004 - kept and blocked
        used = next((op for op in via if not is_movement(op.func)), None)
        return (
            used is not None
            and (used.name.removesuffix("_") in _ADDITIVE or "attention" in used.name)
            and finite.numel() * 4 < numbers.numel() * 3
        )
    return True


_FACTORS = {
    **dict.fromkeys(("mm", "bmm", "mv", "dot", "mul", "div", "linear", "einsum", "pow", "_embedding_bag"), ()),
    **dict.fromkeys(("addmm", "addmv", "addbmm", "baddbmm"), (0,)),
    **dict.fromkeys(("convolution", "native_batch_norm", "_native_batch_norm_legit_no_training", "native_group_norm", "lstm", "gru"), (2,)),
    **dict.fromkeys(("native_layer_norm", "_fused_rms_norm"), (3,)),
    **dict.fromkeys(("mkldnn_rnn_layer", "_thnn_fused_lstm_cell", "_thnn_fused_gru_cell", "prelu", "_prelu_kernel"), ()),
}
"""Ops that multiply, each with the places of the arguments that it only adds."""


def is_bad_weight(tensor: torch.Tensor, via: tuple[Op, ...], roots: Iterable[torch.nn.Module]) -> bool:
    """Whether infinities that a model holds were put there by nobody: in what is multiplied, or plus infinity in a bias that is trained.

    What is added, compared or chosen from may hold infinities by design, as a mask does.
    """
    owner, user = owner_of(tensor, roots), next((op for op in via if not is_movement(op.func)), None)
    if owner is None or user is None:
        return False
    name = user.name.removesuffix("_")
    if name in _FACTORS:
        added = [user.args[place] for place in _FACTORS[name] if place < len(user.args)]
        if not any(isinstance(one, torch.Tensor) and shares_memory(one, tensor) for one in added):
            return True
    numbers = dense(tensor)
    plus = numbers is not None and not numbers.is_complex() and bool((numbers == math.inf).any())
    return plus and tensor.requires_grad and (name in _FACTORS or name == "add")
