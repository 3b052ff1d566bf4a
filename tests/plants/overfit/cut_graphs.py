"""Losses that lead to no weight, or not to all: detached, rounded, made anew of numbers.

The line to blame is in the cell.
"""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from tests.plants.overfit.training import planted

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
    _detaches("features-under-no-grad", "with torch.no_grad():\n    features = self.body(x).clone()"),
    _detaches("features-rounded", "features = torch.round(features)"),
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
)
