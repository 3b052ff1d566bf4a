"""Arithmetic of single ops: torch's own formulas, with those that it lacks.

2 FLOPs per multiply-add, as `torch.utils.flop_counter` counts.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

aten = torch.ops.aten

# Ops that move or name data, or make it: nothing to count.
_FREE = frozenset(
    [
        *("lift_fresh", "lift_fresh_copy", "detach", "alias", "clone", "copy_", "_to_copy", "contiguous", "empty", "empty_like"),
        *("new_empty", "new_zeros", "new_ones", "new_full", "zeros", "zeros_like", "ones", "ones_like", "full", "full_like", "arange"),
        *("scalar_tensor", "eye", "rand", "randn", "randint", "rand_like", "randn_like", "cat", "stack", "index_select", "gather"),
        *("embedding", "index", "slice", "select", "split", "split_with_sizes", "chunk", "unbind", "narrow", "repeat", "roll", "flip"),
        *("constant_pad_nd", "resize_", "set_", "fill_", "zero_", "_local_scalar_dense", "item", "masked_fill", "masked_fill_", "where"),
        *("index_put", "index_put_", "scatter", "scatter_", "tril", "triu", "empty_strided", "linspace", "_reshape_alias"),
        *("_unsafe_view", "unsafe_split", "unsafe_split_with_sizes", "_assert_async", "_assert_tensor_metadata", "bernoulli_", "normal_"),
        *("uniform_", "native_dropout", "new_empty_strided", "_efficientzerotensor"),
    ]
)


class FlopFormulas:
    """Counts one op at a time and remembers which ones it has no formula for."""

    def __init__(self) -> None:
        self._formulas: Mapping[Any, Callable[..., int]] = {**flop_registry, **_missing()}
        self.uncounted: dict[str, int] = {}

    def names(self) -> tuple[str, ...]:
        """The ops without a formula, the most frequent first."""
        return tuple(sorted(self.uncounted, key=lambda name: (-self.uncounted[name], name)))

    def knows(self, packet: Any) -> bool:
        """Whether there is a formula."""
        return packet in self._formulas

    def count(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
        """FLOPs of one op that ran."""
        formula = self._formulas.get(getattr(func, "_overloadpacket", func))
        if formula is not None:
            with contextlib.suppress(Exception):  # any: the registry is open to the user's formulas, and what one refuses is not counted
                return int(formula(*args, **kwargs, out_val=out))
        self.leave_out(func)
        return 0

    def leave_out(self, func: Any) -> None:
        """An op without a formula ran; one that only moves data needs none."""
        schema = getattr(func, "_schema", None)
        if schema is None:  # an op that takes a function
            self.uncounted[func.name()] = self.uncounted.get(func.name(), 0) + 1
            return
        name = schema.name.partition("::")[2]
        if not func.is_view and name not in _FREE:
            self.uncounted[name] = self.uncounted.get(name, 0) + 1


class NoFormulas(FlopFormulas):
    """Counts nothing: sizes that are symbols may not be multiplied into a number."""

    def count(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:  # noqa: ARG002 - one signature for every formula
        """Always 0."""
        return 0


def _missing() -> dict[Any, Callable[..., int]]:
    """Formulas for ops that torch's registry does not hold, or holds in one version only."""
    ours: dict[str, Callable[..., int]] = {
        "_scaled_dot_product_flash_attention_for_cpu": _attention,
        "_scaled_dot_product_attention_math": _attention,
        "_scaled_dot_product_fused_attention_overrideable": _attention,
        "_scaled_dot_product_flash_attention": _attention,
        "_scaled_dot_product_efficient_attention": _attention,
        "_scaled_dot_product_cudnn_attention": _attention,
        "mkldnn_rnn_layer": _mkldnn_rnn,
        "_cudnn_rnn": _cudnn_rnn,
        "mv": lambda a, *_, **__: 2 * a.numel(),
        "dot": lambda a, *_, **__: 2 * a.numel(),
        "vdot": lambda a, *_, **__: 2 * a.numel(),
        "addmv": lambda _, a, *__, **___: 2 * a.numel(),
        "addr": lambda _, a, b, **__: 2 * a.numel() * b.numel(),
        "_addmm_activation": lambda _, a, b, **__: 2 * a.shape[0] * a.shape[1] * b.shape[1],
        "_trilinear": _trilinear,
        "_native_multi_head_attention": _native_attention,
    }
    return {getattr(aten, name): formula for name, formula in ours.items() if hasattr(aten, name)}


def _attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    """FLOPs of every query with every key; keys may have fewer heads, which torch's own formula refuses before 2.13."""
    pairs = math.prod(query.shape[:-1]) * key.shape[-2]
    return int(2 * pairs * (query.shape[-1] + value.shape[-1]))


def _mkldnn_rnn(x: Any, weight_ih: Any, weight_hh: Any, *_: Any, **__: Any) -> int:
    steps, batch = x.shape[0], x.shape[1]
    return int(2 * steps * batch * (weight_ih.numel() + weight_hh.numel()))


def _cudnn_rnn(x: Any, weights: Any, *_: Any, **__: Any) -> int:
    rows = math.prod(x.shape[:-1])
    return int(2 * rows * sum(weight.numel() for weight in weights if weight.dim() > 1))


def _trilinear(_left: Any, weight: Any, *_: Any, out_val: Any = None, **__: Any) -> int:
    # As nn.Bilinear uses it: each row meets each weight once, after the products of its two sides.
    rows = out_val.shape[0] if out_val is not None and out_val.dim() else 1
    return int(2 * rows * weight.numel())


def _native_attention(query: Any, key: Any, _value: Any, embed_dim: int, *_: Any, **__: Any) -> int:
    batch, target, source = query.shape[0], query.shape[1], key.shape[1]
    projections = 2 * batch * (2 * target + 2 * source) * embed_dim * embed_dim
    return int(projections + 4 * batch * target * source * embed_dim)


def scratch_bytes(func: Any, args: tuple[Any, ...], out: Any) -> Iterator[tuple[torch.Tensor, int]]:
    """(tensor, size) of results whose memory is a kernel's own affair, so that it is told alike with and without computing."""
    name = func._schema.name.partition("::")[2]
    if name == "mkldnn_rnn_layer" and isinstance(out[3], torch.Tensor):
        steps, batch, _ = args[0].shape
        # oneDNN keeps gates and states of both directions in time: 15 to 16 numbers a unit, measured at usual sizes.
        yield out[3], 31 * steps * batch * args[2].shape[1] * args[0].element_size() // 2
    elif name == "_embedding_bag":
        yield from ((tensor, tensor.numel() * tensor.element_size()) for tensor in out[1:])
