"""Ops that torch's documentation calls non-deterministic, on some device and in some mode, and what to use in their place."""

from __future__ import annotations

__all__ = ["fix_for", "is_documented"]

_SETTING = "`torch.use_deterministic_algorithms(True)` has a deterministic way for it"
_UNIQUE = "make the indices unique, or use `index_add`, which adds in one order under `torch.use_deterministic_algorithms(True)`"
_REDUCE = "`reduce='sum'` and `'mean'` have a deterministic way; `'prod'` has none: take the exponential of a sum of logarithms"
_FIXES = {
    "index_put": _SETTING,
    "index_put_": _SETTING,
    "_index_put_impl_": _SETTING,
    "index_copy": _SETTING,
    "index_copy_": _SETTING,
    "index_add": _SETTING,
    "index_add_": _SETTING,
    "scatter": _SETTING,
    "scatter_": _SETTING,
    "scatter_add": _SETTING,
    "scatter_add_": _SETTING,
    "scatter_reduce": _REDUCE,
    "scatter_reduce_": _REDUCE,
    "put": _UNIQUE,
    "put_": _UNIQUE,
    "max_unpool2d": "`torch.nn.Upsample` in its place, or run it on the CPU",
    "max_unpool3d": "`torch.nn.Upsample` in its place, or run it on the CPU",
    "histc": "run it on the CPU: `torch.histc(x.cpu(), ...)`",
    "bincount": "run it on the CPU, or count with `torch.nn.functional.one_hot(x).sum(0)`",
    "median": "`torch.sort` and take the middle, or run it on the CPU",
    "kthvalue": "`torch.sort` and take the k-th, or run it on the CPU",
    "cumsum": "run it on the CPU, or multiply with a triangular matrix",
    "embedding_dense_backward": _SETTING,
    "_embedding_bag_dense_backward": "`mode='sum'` or `'mean'` in place of `'max'`",
    "avg_pool3d_backward": "a convolution with equal weights in its place",
    "_adaptive_avg_pool2d_backward": "`x.mean((-2, -1))` where the output is 1 x 1, else `AvgPool2d`",
    "_adaptive_avg_pool3d_backward": "`x.mean((-3, -2, -1))` where the output is 1 x 1 x 1",
    "adaptive_max_pool2d_backward": "`MaxPool2d` with a fixed kernel in its place",
    "fractional_max_pool2d_backward": "`MaxPool2d` in its place",
    "fractional_max_pool3d_backward": "`MaxPool3d` in its place",
    "upsample_linear1d_backward": "`mode='nearest'`, which has a deterministic way",
    "upsample_bilinear2d_backward": "`mode='nearest'`, which has a deterministic way",
    "upsample_bicubic2d_backward": "`mode='nearest'`, which has a deterministic way",
    "upsample_trilinear3d_backward": "`mode='nearest'`, which has a deterministic way",
    "reflection_pad1d_backward": "pad with `mode='constant'` or `'replicate'`",
    "reflection_pad2d_backward": "pad with `mode='constant'` or `'replicate'`",
    "reflection_pad3d_backward": "pad with `mode='constant'` or `'replicate'`",
    "replication_pad1d_backward": _SETTING,
    "replication_pad2d_backward": _SETTING,
    "replication_pad3d_backward": _SETTING,
    "nll_loss2d_forward": "flatten the pixels first, so that the loss is that of a 2-dimensional input",
    "_ctc_loss_backward": "compute the loss on the CPU",
    "grid_sampler_2d_backward": "run it on the CPU",
    "grid_sampler_3d_backward": "run it on the CPU",
}


def is_documented(base: str) -> bool:
    """Whether an op of that name, without overload, is among them."""
    return base in _FIXES


def fix_for(name: str) -> str:
    """What to change, by the dispatcher's name of an op; empty where nothing is known."""
    return _FIXES.get(name.removeprefix("aten.").partition(".")[0], "")
