"""Ops run beside the user's to see which samples meet: weights, buffers, gradients and random numbers are the same to the bit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.unit.instruments.autograd.case import HEAD

if TYPE_CHECKING:
    from tests.doors import Observe

_LAYERS = {
    "batch norm, dropout": "nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.4)",
    "cumulative statistics": "nn.BatchNorm1d(6, momentum=None), nn.RReLU(), nn.AlphaDropout(0.2)",
    "instance norm": "nn.Unflatten(1, (2, 3)), nn.InstanceNorm1d(2, track_running_stats=True), nn.Flatten()",
    "spectral norm": "nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6)), nn.ReLU(inplace=True)",
    "recurrent with dropout": "nn.Unflatten(1, (3, 2)), Last(nn.LSTM(2, 6, num_layers=2, dropout=0.3)), nn.Identity()",
    "attention with dropout": "nn.Unflatten(1, (3, 2)), nn.TransformerEncoderLayer(2, 1, 4), nn.Flatten()",
    "a table written in its forward": "Cells(), nn.Embedding(9, 6, max_norm=0.5), Sum()",
}
_BODY = """\
class Last(nn.Module):
    def __init__(self, rnn):
        super().__init__()
        self.rnn = rnn

    def forward(self, x):
        return self.rnn(x)[0][:, -1]

class Cells(nn.Module):
    def forward(self, x):
        return (x.abs() * 3).long().clamp(max=8)

class Sum(nn.Module):
    def forward(self, x):
        return x.sum(1) + torch.rand_like(x[:, 0]) + F.gumbel_softmax(x[:, 1])

net = nn.Sequential({layers}, nn.Linear(6, 3))
optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
for x, y in [(torch.randn(7, 6), torch.randint(3, (7,))) for _ in range(3)]:
    loss = F.cross_entropy(net(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
numbers = torch.rand(4)
"""


def _left(namespace: dict[str, Any]) -> list[torch.Tensor]:
    net = namespace["net"]
    gradients = [torch.zeros(0) if one.grad is None else one.grad for one in net.parameters()]
    return [*net.state_dict().values(), *gradients, namespace["loss"], namespace["numbers"]]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("layers", _LAYERS.values(), ids=_LAYERS)
def test_the_same_bits(layers: str, observe: Observe) -> None:
    body = HEAD + _BODY.format(layers=layers)
    plain: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(body, "<plain>", "exec", dont_inherit=True), plain)
    observed = observe("autograd", body)
    assert observed.error is None
    assert observed.report.problems == ()
    assert all(torch.equal(one, other) for one, other in zip(_left(observed.namespace), _left(plain), strict=True))
