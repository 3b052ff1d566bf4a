"""What is known of ops that torch cannot run in the same order twice: what to write in their place."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["is_documented", "repair"]

_ATTENTION = "run it under `sdpa_kernel(SDPBackend.MATH)`, or use `--strict`: PyTorch then selects a deterministic backward"
_REPAIRS: Mapping[str, str] = {
    "put_": "assign to the flat view `.view(-1)` by index, which is deterministic",
    "max_unpool": "scatter into zeros with `.scatter`, both flattened by `.flatten(-2)`, which is deterministic",
    "flash attention": _ATTENTION,
    "memory efficient attention": _ATTENTION,
    "upsample": "use `mode='nearest'` in `F.interpolate`",
    "grid_sampler": "compute it on the CPU: call `F.grid_sample` with `.cpu()` tensors",
    "cumsum": "compute it on the CPU, as `.cpu().cumsum(0)` does",
    "adaptive_avg_pool": "where the sizes divide, average each dimension with `.unflatten` and `.mean(-1)`",
    "avg_pool3d": "average each dimension with `.unflatten` and `.mean(-1)`",
    "adaptive_max_pool": "use `F.max_pool2d` of a fixed size",
    "fractional_max_pool": "use `F.max_pool2d` of a fixed size",
    "reflection_pad": "use `mode='constant'`, or pad by indexing",
    "nll_loss2d": "flatten first: `.movedim(1, -1).flatten(0, -2)` for the scores, `.flatten()` for the targets",
    "ctc_loss": "compute it on the CPU: call `F.ctc_loss` with `.cpu()` tensors",
    "histc": "count on the CPU, as `.cpu().histc()` does",
    "bincount": "add the weights to zeros with `.index_add_`, which is deterministic",
    "scatter_reduce": "reduce on the CPU; `reduce='sum'` and `'mean'` are deterministic",
    "median": "take the value from `torch.sort`",
    "embedding_bag": "use `mode='sum'` or `'mean'`",
}
_SETTING = "`torch.use_deterministic_algorithms(True)` makes it deterministic"
_WITH_SETTING = (
    "embedding_dense_backward", "index_add", "index_copy", "index_put", "put", "replication_pad", "scatter",
)  # fmt: skip
_ON_GPUS = ("convolution", "cudnn_convolution", "bmm", "max_pool3d", "repeat_interleave", "gather", "index_select")
"""Only there, and only without the setting, which holds in each run that is compared."""


def is_documented(base: str) -> bool:
    """Whether torch's documentation calls an op non-deterministic on some device; by its ATen name without the overload."""
    name = base.lstrip("_")
    return name.startswith((*_WITH_SETTING, *_REPAIRS))


def repair(op: str) -> str:
    """What to write in the place of an op, by its ATen name or the one in torch's warning; empty where nothing is known."""
    name = op.lower().lstrip("_")
    known = next((text for begin, text in _REPAIRS.items() if name.startswith(begin)), "")
    return known or (_SETTING if name.startswith((*_WITH_SETTING, *_ON_GPUS)) else "")
