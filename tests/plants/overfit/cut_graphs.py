"""Losses that lead to no weight, or not to all: detached, rounded, made anew of numbers.

The line to blame is in the cell.
"""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from tests.plants.overfit.training import STEP, planted

if TYPE_CHECKING:
    from tests.plants.plant import Plant


def _detaches(name: str, line: str) -> Plant:
    """Make a plant of a model that cuts its features off: two numbers, so that the head alone is not enough."""
    cut = textwrap.indent(f"{line}  # <- here", " " * 8)
    cell = f"""\
class Detaches(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = mlp(10, 32, 2), nn.Linear(2, 4)

    def forward(self, x):
        features = self.body(x)
{cut}
        return self.head(features)

model, batch = Detaches(), classes()
loss_function, optimizer = nn.CrossEntropyLoss(), adam(model, 2e-2)
"""
    return planted(name, "cut_graph", repair=((f"{cut}\n", ""),))(cell)


PLANTS = (
    _detaches("features-detached", "features = features.detach()"),
    _detaches("features-through-numpy", "features = torch.from_numpy(features.data.numpy())"),
    _detaches("features-under-no-grad", "with torch.no_grad():\n    features = self.body(x).clone()"),
    _detaches("features-made-anew-of-their-numbers", "features = torch.tensor(features.tolist())"),
    _detaches("features-rounded", "features = torch.round(features)"),
    planted("codes-detached-in-a-step", "cut_graph", repair=(("    codes = codes.detach()  # <- here\n", ""),), subjects=STEP)("""
        encoder, decoder, x = nn.Linear(10, 3), nn.Linear(3, 6), torch.randn(8, 10)
        y = x @ torch.randn(10, 3) @ torch.randn(3, 6)
        optimizer = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()], lr=5e-2)
        def step():
            optimizer.zero_grad()
            codes = encoder(x)
            codes = codes.detach()  # <- here
            loss = F.mse_loss(decoder(codes), y)
            loss.backward()
            optimizer.step()
            return loss
    """),
    planted("loss-wrapped-anew", "cut_graph", repair=(("torch.tensor(loss.item(), requires_grad=True)  # <- here", "loss"),))("""
        model = mlp(10, 32, 4)
        def loss_function(output, target):
            loss = F.cross_entropy(output, target)
            return torch.tensor(loss.item(), requires_grad=True)  # <- here
        batch, optimizer = classes(), adam(model)
    """),
    planted(
        "accuracy-as-the-loss",
        "cut_graph",
        repair=(("return (predicted != target).float().mean() + 0 * predicted.sum()", "return F.cross_entropy(output, target)"),),
    )("""
        model = mlp(10, 32, 4)
        def loss_function(output, target):
            predicted = output.argmax(1).float().requires_grad_()  # <- here
            return (predicted != target).float().mean() + 0 * predicted.sum()
        batch, optimizer = classes(), adam(model)
    """),
    planted("encoder-cut-off-by-data", "cut_graph", repair=(("        states = states.data  # <- here\n", ""),))("""
        class Encoded(nn.Module):
            def __init__(self):
                super().__init__()
                self.embedding, self.encoder = nn.Embedding(20, 16), nn.GRU(16, 2, batch_first=True)
                self.head = nn.Linear(2, 1)
            def forward(self, ids):
                states, _ = self.encoder(self.embedding(ids))
                states = states.data  # <- here
                return self.head(states[:, -1])
        model = Encoded()
        batch, loss_function, optimizer = (words()[0], torch.randn(8, 1)), nn.MSELoss(), adam(model, 3e-2)
    """),
    planted(
        "model-returns-its-argmax",
        "cut_graph",
        repair=(
            (".argmax(-1).float()  # <- here", ""),
            ("lambda output, target: F.mse_loss(output, target.float()", "nn.CrossEntropyLoss("),
        ),
        raises=True,
    )("""
        class Predicts(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = mlp(10, 32, 4)
            def forward(self, x):
                return self.inner(x).argmax(-1).float()  # <- here
        model = Predicts()
        loss_function = lambda output, target: F.mse_loss(output, target.float())
        batch, optimizer = classes(), adam(model)
    """),
)
