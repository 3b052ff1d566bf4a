"""Healthy trainings of many kinds of models, whose least loss is zero.

Some of them look like a fault: frozen bodies, tied weights, unused labels, log-softmax before a cross entropy.
"""

from __future__ import annotations

from tests.plants.overfit.training import healthy

PLANTS = (
    healthy("mlp-classifies")("""
        model = mlp(10, 32, 4)
        batch, loss_function, optimizer = classes(), nn.CrossEntropyLoss(), adam(model)
    """),
    healthy("cnn-with-batch-norm-and-dropout")("""
        model = nn.Sequential(
            nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout2d(0.2), nn.Flatten(), nn.Linear(288, 4)
        )
        batch, loss_function, optimizer = pictures(), nn.CrossEntropyLoss(), adam(model)
    """),
    healthy("half-of-all-units-dropped")("""
        model = nn.Sequential(
            nn.Linear(10, 64), nn.ReLU(), nn.Dropout(0.5), nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.5), nn.Linear(64, 4)
        )
        batch, loss_function, optimizer = classes(), nn.CrossEntropyLoss(), adam(model)
    """),
    healthy("lstm-over-words")("""
        model = Recurrent(nn.LSTM)
        batch, loss_function, optimizer = words(), nn.CrossEntropyLoss(), adam(model, 2e-2)
    """),
    # Takes the states of the batch before, and keeps its own, detached as truncated backpropagation asks for.
    healthy("lstm-that-keeps-its-states")("""
        class Stateful(nn.Module):
            def __init__(self):
                super().__init__()
                self.rnn, self.head = nn.LSTM(6, 24, batch_first=True), nn.Linear(24, 1)
                self.states = None
            def forward(self, x):
                output, states = self.rnn(x, self.states)
                self.states = (states[0].detach(), states[1].detach())
                return self.head(output[:, -1])
        model = Stateful()
        batch, loss_function, optimizer = (torch.randn(8, 5, 6), torch.randn(8, 1)), nn.MSELoss(), adam(model)
    """),
    healthy("tags-with-padding")("""
        model = Tagger()
        ids = torch.randint(0, 20, (8, 6))
        batch = (ids, (ids % 5).masked_fill(torch.arange(6) > 3, -100))
        loss_function, optimizer = nn.CrossEntropyLoss(ignore_index=-100), adam(model)
    """),
    healthy("frozen-body-on-purpose")("""
        model = mlp(10, 64, 4)
        model[0].requires_grad_(False)
        batch, loss_function = classes(), nn.CrossEntropyLoss()
        optimizer = torch.optim.Adam(model[2].parameters(), lr=3e-2)
    """),
    healthy("adapters-of-low-rank")("""
        class Adapted(nn.Module):
            def __init__(self, layer, rank=4):
                super().__init__()
                self.layer = layer.requires_grad_(False)
                self.down = nn.Parameter(torch.randn(rank, layer.in_features) / 3)
                self.up = nn.Parameter(torch.zeros(layer.out_features, rank))
            def forward(self, x):
                return self.layer(x) + x @ self.down.T @ self.up.T
        model = nn.Sequential(Adapted(nn.Linear(10, 32)), nn.ReLU(), Adapted(nn.Linear(32, 4)))
        optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
        batch, loss_function = classes(), nn.CrossEntropyLoss()
    """),
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
    healthy("two-heads-of-one-body")("""
        class TwoHeads(nn.Module):
            def __init__(self):
                super().__init__()
                self.body, self.kind, self.size = mlp(10, 32, 32), nn.Linear(32, 4), nn.Linear(32, 1)
            def forward(self, x):
                features = torch.relu(self.body(x))
                return (self.kind(features), self.size(features))
        model, (x, y) = TwoHeads(), classes()
        def loss_function(outputs, targets):
            return F.cross_entropy(outputs[0], targets[0]) + 0.5 * F.mse_loss(outputs[1], targets[1])
        batch, optimizer = (x, (y, torch.randn(8, 1))), adam(model)
    """),
    healthy("equal-rows-with-equal-labels")("""
        model, (x, y) = mlp(10, 32, 4), classes()
        x[4:] = x[:4].clone()
        batch, loss_function, optimizer = (x, y), nn.CrossEntropyLoss(), adam(model)
    """),
    healthy("all-rows-equal-and-of-one-class")("""
        model, (x, _) = mlp(10, 32, 4), classes()
        batch, loss_function, optimizer = (x[:1].repeat(8, 1), torch.full((8,), 2)), nn.CrossEntropyLoss(), adam(model)
    """),
    # Which changes nothing: a second log-softmax is the identity.
    healthy("log-softmax-before-cross-entropy")("""
        model = mlp(10, 32, 4).append(nn.LogSoftmax(dim=1))
        batch, loss_function, optimizer = classes(), nn.CrossEntropyLoss(), adam(model)
    """),
    healthy("labels-from-one-for-one-class-more")("""
        model, (x, y) = mlp(10, 32, 5), classes()
        batch, loss_function, optimizer = (x, y + 1), nn.CrossEntropyLoss(), adam(model)
    """),
    # Which keeps the parameters: they have a new name.
    healthy("pruned-after-the-optimizer")("""
        model = mlp(10, 32, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
        for layer in model[::2]:
            prune.l1_unstructured(layer, "weight", 0.2)
        batch, loss_function = classes(), nn.CrossEntropyLoss()
    """),
    healthy("weight-norm-and-a-buffer")("""
        model = nn.Sequential(parametrizations.weight_norm(nn.Linear(6, 32)), nn.Tanh(), nn.BatchNorm1d(32), nn.Linear(32, 1))
        batch, loss_function, optimizer = (torch.randn(8, 6), torch.randn(8, 1)), nn.MSELoss(), adam(model)
    """),
    healthy("zero-head-as-of-a-diffusion-model")("""
        model = mlp(10, 32, 4)
        nn.init.zeros_(model[2].weight)
        nn.init.zeros_(model[2].bias)
        batch, loss_function, optimizer = classes(), nn.CrossEntropyLoss(), adam(model)
    """),
    healthy("compiled-model")("""
        model = torch.compile(mlp(10, 32, 4), backend="eager")
        batch, loss_function, optimizer = classes(), nn.CrossEntropyLoss(), adam(model)
    """),
    healthy("pictures-of-0-to-255-under-batch-norm")("""
        model = nn.Sequential(nn.BatchNorm2d(1), *cnn())
        x, y = pictures()
        batch, loss_function, optimizer = ((x * 64 + 128).clamp(0, 255), y), nn.CrossEntropyLoss(), adam(model)
    """),
    healthy("batch-of-thirty-two")("""
        model = mlp(10, 64, 4)
        batch, loss_function, optimizer = classes(samples=32), nn.CrossEntropyLoss(), adam(model)
    """),
    healthy("one-sample")("""
        model = mlp(10, 32, 4)
        batch, loss_function, optimizer = classes(samples=1), nn.CrossEntropyLoss(), adam(model)
    """),
    healthy("half-of-the-units-dead")("""
        model = mlp(10, 64, 4)
        nn.init.constant_(model[0].bias[:32], -50)
        batch, loss_function, optimizer = classes(), nn.CrossEntropyLoss(), adam(model)
    """),
    healthy("in-double-precision-and-evaluation")("""
        model = (
            nn.Sequential(nn.Linear(10, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 4)).double().eval()
        )
        x, y = classes()
        batch, loss_function, optimizer = (x.double(), y), nn.CrossEntropyLoss(), adam(model)
    """),
    # A straight-through estimator: the codes are detached on purpose.
    healthy("straight-through-a-code-book")("""
        class Prototypes(nn.Module):
            def __init__(self):
                super().__init__()
                self.encoder, self.codes, self.head = nn.Linear(10, 16), nn.Parameter(torch.randn(16, 16)), nn.Linear(16, 4)
            def forward(self, x):
                z = self.encoder(x)
                nearest = self.codes[torch.cdist(z, self.codes).argmin(1)]
                return self.head(z + (nearest - z).detach() + 0.1 * z)
        model = Prototypes()
        batch, loss_function, optimizer = classes(), nn.CrossEntropyLoss(), adam(model, 3e-2)
    """),
)
