"""The words are torch's own for real tensors, whatever fakes would say."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from torchdebug_magics.instruments.shapes.forward_table import examine_model


class Of(nn.Module):
    def __init__(self, forward: Any) -> None:
        super().__init__()
        self.does = forward

    def forward(self, *inputs: Any) -> Any:
        return self.does(*inputs)


FAILING = {
    "a long into linear": (nn.Linear(3, 2), torch.ones(4, 3, dtype=torch.int64)),
    "a half into linear": (nn.Linear(3, 2), torch.ones(4, 3).half()),
    "conv2d": (nn.Conv2d(3, 2, 3), torch.ones(1, 4, 8, 8)),
    "a double into conv2d": (nn.Conv2d(3, 2, 3), torch.ones(1, 3, 8, 8).double()),
    "pool": (nn.MaxPool2d(4), torch.ones(1, 3, 2, 2)),
    "embedding": (nn.Embedding(4, 2), torch.tensor([1, 4])),
    "a float into embedding": (nn.Embedding(4, 2), torch.tensor([1.0, 2.0])),
    "lstm": (nn.LSTM(3, 2), torch.ones(4, 5, 6)),
    "batch norm": (nn.BatchNorm1d(3), torch.ones(4, 5)),
    "one row": (nn.BatchNorm1d(3), torch.ones(1, 3)),
    "layer norm": (nn.LayerNorm(3), torch.ones(4, 5)),
    "group norm": (nn.GroupNorm(1, 3), torch.ones(4, 5, 2)),
    "attention": (nn.TransformerEncoderLayer(8, 2), torch.ones(4, 5, 6)),
    "matmul": (Of(lambda a: a @ a), torch.ones(4, 5)),
    "einsum": (Of(lambda a: torch.einsum("ij,jk->ik", a, a)), torch.ones(4, 5)),
    "cat": (Of(lambda a: torch.cat([a, a[:2]], 1)), torch.ones(4, 5)),
    "stack": (Of(lambda a: torch.stack([a, a[:2]])), torch.ones(4, 5)),
    "add": (Of(lambda a: a + a.t()), torch.ones(4, 5)),
    "view": (Of(lambda a: a.view(3, 3)), torch.ones(4, 5)),
    "not a view": (Of(lambda a: a.t().view(-1)), torch.ones(4, 5)),
    "permute": (Of(lambda a: a.permute(0, 1, 2)), torch.ones(4, 5)),
    "expand": (Of(lambda a: a.expand(4, 6)), torch.ones(4, 5)),
    "subscript": (Of(lambda a: a[:, 5]), torch.ones(4, 5)),
    "subscripts": (Of(lambda a: a[:, 1, 1]), torch.ones(4, 5)),
    "gather": (Of(lambda a: a.gather(1, torch.tensor([[9]]))), torch.ones(4, 5)),
    "classes": (Of(lambda a: F.cross_entropy(a, torch.tensor([1, 2, 5, 0]))), torch.ones(4, 5)),
    "bce": (Of(lambda a: F.binary_cross_entropy_with_logits(a, torch.ones(4))), torch.ones(4, 1)),
    "pixel shuffle": (nn.PixelShuffle(2), torch.ones(1, 3, 4, 4)),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FAILING)
def test_the_words_are_those_of_a_real_call(name: str) -> None:
    model, x = FAILING[name]
    with pytest.raises(Exception) as real:
        model(x)
    failure = examine_model(model, x).report.failure
    assert failure is not None
    assert failure.error == f"{type(real.value).__name__}: {real.value}"


def test_the_words_for_weights_that_would_not_fit_in_memory() -> None:
    with torch.device("meta"):
        model = nn.Linear(4000, 1 << 20)
    failure = examine_model(model, (2, 3, 4096)).report.failure
    assert failure is not None
    assert failure.error.startswith("RuntimeError: ")  # newer releases of torch name the op here
    assert failure.error.endswith("mat1 and mat2 shapes cannot be multiplied (6x4096 and 4000x1048576)")
    assert failure.fixes[0].code == "model = nn.Linear(4096, 1048576)"
    assert failure.fixes[0].verified
