"""Healthy trainings of many kinds of models, whose least loss is zero.

Some of them look like a fault: frozen bodies, tied weights, unused labels, log-softmax before a cross entropy.
"""

from __future__ import annotations

from tests.plants.overfit.training import healthy

PLANTS = (
    healthy("graph-of-eight-nodes")("""
        class Graph(nn.Module):
            def __init__(self):
                super().__init__()
                self.first, self.second = nn.Linear(6, 32), nn.Linear(32, 3)
            def forward(self, x, adjacency):
                return self.second(adjacency @ torch.relu(self.first(adjacency @ x)))
        model, adjacency = Graph(), torch.eye(8) + torch.eye(8).roll(1, 0)
        batch, loss_function = (torch.randn(8, 6), adjacency / 2, torch.arange(8) % 3), nn.CrossEntropyLoss()
        optimizer = adam(model, 2e-2)
    """),
    # Which keeps the parameters: they have a new name.
    healthy("pruned-after-the-optimizer")("""
        model = mlp(10, 32, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
        for layer in model[::2]:
            prune.l1_unstructured(layer, "weight", 0.2)
        batch, loss_function = classes(), nn.CrossEntropyLoss()
    """),
    healthy("one-sample")("""
        model = mlp(10, 32, 4)
        batch, loss_function, optimizer = classes(samples=1), nn.CrossEntropyLoss(), adam(model)
    """),
    healthy("in-double-precision-and-evaluation")("""
        model = (
            nn.Sequential(nn.Linear(10, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 4)).double().eval()
        )
        x, y = classes()
        batch, loss_function, optimizer = (x.double(), y), nn.CrossEntropyLoss(), adam(model)
    """),
)
