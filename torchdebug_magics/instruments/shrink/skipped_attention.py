"""``--skip-attention``: a tensor of attention's shape, connected to the graph, in every layer of a stack but the last."""

from __future__ import annotations

import copy
import functools
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - its usual name
from torch.overrides import TorchFunctionMode

from torchdebug_magics.instruments.shrink.stacks import Edits, Stack

_NAME = "torchdebug_skipped"
"""Under which the functions of transformers know the stand-in."""


class SkippedAttention:
    """The layers whose attention is replaced, and whether the stand-in was ever called."""

    def __init__(self) -> None:
        self.layers = 0
        self.has_run = False

    def stand_in(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Of the shape ``(..., heads, length, width of value)``; all three get a gradient, and nothing grows with length squared."""
        self.has_run = True
        mean = value.mean(-2, keepdim=True)
        if mean.dim() > 3 and mean.shape[-3] != query.shape[-3]:  # noqa: PLR2004 - batch, heads, length, width
            mean = mean.repeat_interleave(query.shape[-3] // mean.shape[-3], dim=-3)
        return mean + 0 * (query.mean(-1, keepdim=True) + key.mean())


def skip_attention(stacks: Sequence[Stack], edits: Edits) -> SkippedAttention:
    """Replace it in all layers but the last of each stack, until `edits` are undone."""
    skipped = SkippedAttention()
    for layer in dict.fromkeys(layer for stack in stacks for layer in stack.layers[:-1]):
        skipped.layers += 1
        forward = layer.forward
        forward = forward.forward if isinstance(forward, _WithoutAttention) else forward  # skipped before
        edits.put(vars(layer), "forward", _WithoutAttention(forward, skipped))
        for part in layer.modules():
            _switch(part, skipped, edits)
    return skipped


class _WithoutAttention:
    """A layer's forward in which torch's attention is replaced. An attribute of the layer, so that a copy of it has a copy of this."""

    def __init__(self, forward: Callable[..., Any], skipped: SkippedAttention) -> None:
        functools.update_wrapper(self, forward)
        self.forward = forward
        self._skipped = skipped

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with _Replacing(self._skipped):
            return self.forward(*args, **kwargs)


class _Replacing(TorchFunctionMode):
    """Replaces torch's own attention functions."""

    def __init__(self, skipped: SkippedAttention) -> None:
        super().__init__()
        self._skipped = skipped

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            names = dict(zip(("query", "key", "value"), args, strict=False))
            return self._skipped.stand_in(**{**names, **{name: kwargs[name] for name in ("query", "key", "value") if name in kwargs}})
        if func is F.multi_head_attention_forward:
            return self._multi_head(*args, **kwargs)
        return func(*args, **kwargs)

    def _multi_head(self, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """The projections as they are, lengths first."""
        _, heads, weight, bias, bias_k, bias_v, _, _, out_weight, out_bias, *_ = rest
        weights = [kwargs.get(f"{name}_proj_weight") for name in "qkv"] if weight is None else weight.chunk(3)
        biases = (None,) * 3 if bias is None else bias.chunk(3)
        given = zip((query, key, value), weights, biases, strict=True)
        parts = [F.linear(one, by, plus).transpose(0, -2) for one, by, plus in given]
        mixed = self._skipped.stand_in(*parts).transpose(0, -2)
        mixed = mixed + sum(0 * one.sum() for one in (bias_k, bias_v) if one is not None)
        out = F.linear(mixed, out_weight, out_bias)
        if not kwargs.get("need_weights", True):
            return out, None
        batch = query.shape[1:2] if query.dim() > 2 else ()  # noqa: PLR2004 - length, batch, width
        per_head = () if kwargs.get("average_attn_weights", True) else (heads,)
        share = query.new_full((), 1 / max(1, key.shape[0]))
        return out, share.expand(*batch, *per_head, query.shape[0], key.shape[0])


def _switch(part: nn.Module, skipped: SkippedAttention, edits: Edits) -> None:
    """The attention of transformers is chosen by the configuration that its module holds: that gets one of its own."""
    library: Any = sys.modules.get("transformers")
    config = vars(part).get("config")
    if library is None or "_attn_implementation_internal" not in getattr(config, "__dict__", {}):
        return
    own = copy.copy(config)
    vars(own).update({"_attn_implementation_internal": _NAME, _NAME: skipped})
    edits.put(vars(part), "config", own)
    if skipped not in _USED:
        _USED.add(skipped)
        library.AttentionInterface.register(_NAME, _as_in_transformers)
        weakref.finalize(skipped, _release, library.AttentionInterface._global_mapping).atexit = False


_USED: weakref.WeakSet[SkippedAttention] = weakref.WeakSet()
"""The stand-in is known to transformers as long as a configuration names one."""


def _release(known: dict[str, Any]) -> None:
    if not list(_USED):  # its length counts those that are going
        known.pop(_NAME, None)


def _as_in_transformers(module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    skipped: SkippedAttention = vars(module.config)[_NAME]
    return skipped.stand_in(query, key, value).transpose(1, 2).contiguous(), None
