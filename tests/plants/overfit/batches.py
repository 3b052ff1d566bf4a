"""Batches that no model could learn, and models that could learn no batch: conflicts, scales, norms of one value, lost inputs, capacity."""

from __future__ import annotations

from tests.plants.overfit.training import STEP, planted

PLANTS = (
    planted("three-rows-twice-with-other-labels", "conflicting_labels", repair=(("(twice", "(x"),), rows=(0, 1, 2, 3, 4, 5))("""
        model, (x, y) = mlp(10, 32, 4), classes()
        twice = x.clone()
        twice[1], twice[3], twice[5] = x[0], x[2], x[4]
        batch, loss_function, optimizer = (twice, y), nn.CrossEntropyLoss(), adam(model)
    """),
    # A mask that is drawn once and held would tell the equal rows apart.
    planted(
        "one-sample-eight-times-under-dropout", "conflicting_labels", repair=(("[:1].repeat(8, 1)", ""),), rows=(0, 1, 2, 3, 4, 5, 6, 7)
    )("""
        model, (x, y) = mlp(10, 64, 4), classes()
        model.insert(2, nn.Dropout(0.2))
        batch, loss_function, optimizer = (x[:1].repeat(8, 1), y), nn.CrossEntropyLoss(), adam(model, 3e-2)
    """),
    planted(
        "multi-label-rows-repeated-in-a-step",
        "conflicting_labels",
        repair=(("x[[3, 6]], x[[4, 7]] = x[0].clone(), x[1].clone()\n", ""),),
        subjects=STEP,
        rows=(0, 3, 6, 1, 4, 7),
    )("""
        model, (x, _) = Recurrent(nn.GRU, outputs=6), words()
        x[[3, 6]], x[[4, 7]] = x[0].clone(), x[1].clone()
        y = torch.randint(0, 2, (8, 6)).float()
        optimizer = adam(model, 2e-2)
        def step():
            optimizer.zero_grad()
            loss = F.binary_cross_entropy_with_logits(model(x), y)
            loss.backward()
            optimizer.step()
            return loss
    """),
    planted("features-with-a-mean-of-100-000", "input_scale", repair=(("optimizer = (x + 1e5", "optimizer = (x"),))("""
        model, (x, y) = mlp(10, 32, 4), classes()
        batch, loss_function, optimizer = (x + 1e5, y), nn.CrossEntropyLoss(), adam(model)
    """),
    planted("pictures-of-a-hundred-thousandth", "input_scale", repair=(("x * 1e-5", "x"),))("""
        model, (x, y) = cnn(), pictures()
        batch, loss_function = (x * 1e-5, y), nn.CrossEntropyLoss()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    """),
    planted("exclusive-or-with-a-linear-model", "capacity", repair=(("nn.Linear(2", "mlp(2, 32"),))("""
        x = torch.tensor([[0.0, 0], [0, 1], [1, 0], [1, 1]]).repeat(2, 1) + 0.01 * torch.randn(8, 2)
        y = (x.round()[:, 0] != x.round()[:, 1]).long()
        model = nn.Linear(2, 2)
        batch, loss_function, optimizer = (x, y), nn.CrossEntropyLoss(), adam(model, 5e-2)
    """),
    planted("bigrams-for-what-needs-context", "capacity", repair=(("nn.Embedding(12, 12", "Reads("),))("""
        ids = torch.randint(0, 3, (8, 6))
        ids[:, 0] = torch.arange(8) + 3
        class Reads(nn.Module):
            def __init__(self):
                super().__init__()
                self.embedding, self.rnn, self.head = nn.Embedding(12, 32), nn.GRU(32, 64, batch_first=True), nn.Linear(64, 12)
            def forward(self, ids):
                return self.head(self.rnn(self.embedding(ids))[0])
        model = nn.Embedding(12, 12)
        batch = (ids[:, :-1], ids[:, 1:])
        loss_function = lambda o, y: F.cross_entropy(o.transpose(1, 2), y)
        optimizer = adam(model, 3e-2)
    """),
)
