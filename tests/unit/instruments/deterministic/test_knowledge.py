"""What torch's documentation calls non-deterministic is known by the names of its ops."""

from __future__ import annotations

import pytest
import torch

from torchdebug_magics.instruments.deterministic.ops.op_recording import is_documented, repair

NAMED = {
    "torch.nn.ReplicationPad2d": "replication_pad2d_backward",
    "torch.bmm": "bmm",
    "index_put": "index_put_",
    "put_": "put_",
    "scatter_add_": "scatter_add_",
    "torch.gather": "gather",
    "torch.index_add": "index_add",
    "torch.index_select": "index_select_backward",
    "torch.repeat_interleave": "repeat_interleave",
    "index_copy": "index_copy_",
    "scatter_reduce": "scatter_reduce",
    "torch.nn.MaxPool3d": "max_pool3d_with_indices_backward",
    "torch.nn.AvgPool3d": "avg_pool3d_backward",
    "torch.nn.AdaptiveAvgPool2d": "_adaptive_avg_pool2d_backward",
    "torch.nn.AdaptiveMaxPool2d": "adaptive_max_pool2d_backward",
    "torch.nn.FractionalMaxPool2d": "fractional_max_pool2d_backward",
    "torch.nn.MaxUnpool2d": "max_unpool2d",
    "interpolate": "upsample_bilinear2d_backward",
    "torch.nn.ReflectionPad2d": "reflection_pad2d_backward",
    "torch.nn.NLLLoss": "nll_loss2d_forward",
    "torch.nn.CTCLoss": "_ctc_loss_backward",
    "torch.nn.EmbeddingBag": "_embedding_bag",
    "torch.histc": "histc",
    "torch.bincount": "bincount",
    "torch.median": "median",
    "grid_sample": "grid_sampler_2d_backward",
    "torch.cumsum": "cumsum",
}


@pytest.mark.parametrize("documented", NAMED)
def test_what_torch_documents_has_a_repair(documented: str) -> None:
    assert documented in (torch.use_deterministic_algorithms.__doc__ or ""), "torch no longer names it"
    assert repair(NAMED[documented])


@pytest.mark.parametrize("op", ["_histc_cuda", "upsample_bilinear2d_backward_out_cuda", "Memory Efficient attention"])
def test_what_torch_warns_of_has_a_repair(op: str) -> None:
    assert repair(op)


@pytest.mark.parametrize("op", ["mm", "add", "relu", "native_layer_norm"])
def test_of_any_other_op_nothing_is_said(op: str) -> None:
    assert not is_documented(op)
    assert not repair(op)
