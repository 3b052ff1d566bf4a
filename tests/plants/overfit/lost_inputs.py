"""Models of which the outputs are the same whatever the input: norms over one value, variables that are not read.

Where such a norm is the reason, both slugs are right.
"""

from __future__ import annotations

from tests.plants.overfit.training import STEP, planted

PLANTS = (
    planted(
        "group-norm-with-one-value-a-group", ("batchnorm_of_one", "output_ignores_input"), repair=(("GroupNorm(32", "GroupNorm(4"),)
    )("""
        class Normalized(nn.Module):
            def __init__(self, norm):
                super().__init__()
                self.inner, self.norm, self.head = mlp(10, 32, 32), norm, nn.Linear(32, 4)
            def forward(self, x):
                return self.head(self.norm(self.inner(x)))
        model = Normalized(nn.GroupNorm(32, 32))
        batch, loss_function, optimizer = classes(), nn.CrossEntropyLoss(), adam(model)
    """),
    planted("batch-norm-of-a-single-sample", "batchnorm_of_one", repair=(("BatchNorm1d(32", "Identity("),), raises=True)("""
        class Normalized(nn.Module):
            def __init__(self, norm):
                super().__init__()
                self.inner, self.norm, self.head = mlp(10, 32, 32), norm, nn.Linear(32, 4)
            def forward(self, x):
                return self.head(self.norm(self.inner(x)))
        model = Normalized(nn.BatchNorm1d(32))
        x, y = classes()
        batch, loss_function, optimizer = (x[:1], y[:1]), nn.CrossEntropyLoss(), adam(model)
    """),
    planted(
        "samples-normalized-one-by-one",
        ("batchnorm_of_one", "output_ignores_input"),
        repair=(("torch.cat([model(row[None]) for row in x]", "model(x"),),
        subjects=STEP,
    )("""
        class Normalized(nn.Module):
            def __init__(self, norm):
                super().__init__()
                self.inner, self.norm, self.head = mlp(10, 32, 32), norm, nn.Linear(32, 4)
            def forward(self, x):
                return self.head(self.norm(self.inner(x)))
        class BatchedByHand(nn.Module):
            def forward(self, x):
                return (x - x.mean(0)) / (x.std(0, unbiased=False) + 1e-5)
        model, (x, y) = Normalized(BatchedByHand()), classes()
        optimizer = adam(model)
        def step():
            optimizer.zero_grad()
            output = torch.cat([model(row[None]) for row in x])
            loss = F.cross_entropy(output, y)
            loss.backward()
            optimizer.step()
            return loss
    """),
    planted("transformer-of-positions-alone", "output_ignores_input", repair=((".expand(len(ids), -1, -1)", " + self.words(ids)"),))("""
        class Forgets(nn.Module):
            def __init__(self):
                super().__init__()
                self.words, self.positions = nn.Embedding(20, 16), nn.Embedding(6, 16)
                self.encoder = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
                self.head = nn.Linear(16, 4)
            def forward(self, ids):
                x = self.positions(torch.arange(ids.shape[1])).expand(len(ids), -1, -1)
                return self.head(self.encoder(x).mean(1))
        model = Forgets()
        batch, loss_function, optimizer = words(), nn.CrossEntropyLoss(), adam(model, 3e-3)
    """),
    planted(
        "softmax-over-a-single-output",
        ("output_ignores_input", "wrong_loss_input", "double_softmax"),
        repair=(("Softmax(dim=1", "Sigmoid("),),
    )("""
        model = mlp(10, 32, 1).append(nn.Softmax(dim=1))
        x, y = classes(2)
        batch, loss_function, optimizer = (x, y[:, None].float()), nn.MSELoss(), adam(model, 2e-2)
    """),
    planted("graph-without-edges-or-self-loops", "output_ignores_input", repair=(("zeros(8, ", "eye("),))("""
        class Graph(nn.Module):
            def __init__(self):
                super().__init__()
                self.first, self.second = nn.Linear(6, 32), nn.Linear(32, 3)
            def forward(self, x, adjacency):
                return self.second(adjacency @ torch.relu(self.first(adjacency @ x)))
        model, y = Graph(), torch.arange(8) % 3
        adjacency = torch.zeros(8, 8)
        batch, loss_function, optimizer = (torch.randn(8, 6), adjacency, y), nn.CrossEntropyLoss(), adam(model, 2e-2)
    """),
)
