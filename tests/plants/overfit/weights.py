"""Weights from which nothing can be learnt: dead units and initial values.

A dead layer is also badly initialized, and either word is right for it.
"""

from __future__ import annotations

from tests.plants.overfit.training import planted

PLANTS = (
    planted(
        "relu-below-a-bias-of-minus-fifty",
        ("dead_units", "bad_init"),
        repair=(("nn.init.constant_(model[0].bias, -50)\n", ""),),
        parameters=("0.weight", "0.bias"),
    )("""
        model = mlp(10, 32, 4)
        nn.init.constant_(model[0].bias, -50)
        batch, loss_function, optimizer = classes(), nn.CrossEntropyLoss(), adam(model)
    """),
    planted("killed-by-steps-of-an-earlier-cell", ("dead_units", "bad_init"), repair=(("range(2)", "range(0)"),))("""
        model, (x, y) = mlp(6, 32, 16, 1), (torch.randn(8, 6), torch.randn(8, 1) * 3 + 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        for _ in range(2):
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
        batch, loss_function = (x, y), nn.MSELoss()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    """),
    planted("output-below-its-own-relu", ("dead_units", "bad_init"), repair=(("bias, -20.0", "bias, 1.0"),))("""
        model = mlp(6, 32, 1).append(nn.ReLU())
        nn.init.constant_(model[2].bias, -20.0)
        batch, loss_function, optimizer = (torch.randn(8, 6), torch.rand(8, 1) + 0.5), nn.MSELoss(), adam(model)
    """),
    planted(
        "hard-sigmoid-saturated",
        ("dead_units", "bad_init"),
        repair=(("nn.init.constant_(model[0].bias, 40)\n", ""),),
        parameters=("0.weight", "0.bias"),
    )("""
        model = mlp(10, 32, 4, activation=nn.Hardsigmoid)
        nn.init.constant_(model[0].bias, 40)
        batch, loss_function, optimizer = classes(), nn.CrossEntropyLoss(), adam(model, 3e-2)
    """),
    planted(
        "all-weights-zero",
        ("bad_init", "dead_units"),
        repair=(("for parameter in model.parameters():\n    nn.init.zeros_(parameter)\n", ""),),
    )("""
        model = mlp(10, 32, 32, 4)
        for parameter in model.parameters():
            nn.init.zeros_(parameter)
        batch, loss_function, optimizer = classes(), nn.CrossEntropyLoss(), adam(model)
    """),
    planted(
        "tanh-saturated-by-weights-of-a-hundred",
        "bad_init",
        repair=(("for layer in model[:4:2]:\n    nn.init.normal_(layer.weight, std=100)\n    nn.init.constant_(layer.bias, 300)\n", ""),),
    )("""
        model = mlp(2, 16, 16, 1, activation=nn.Tanh)
        for layer in model[:4:2]:
            nn.init.normal_(layer.weight, std=100)
            nn.init.constant_(layer.bias, 300)
        batch, loss_function, optimizer = (torch.randn(8, 2) * 0.1, torch.randn(8, 1)), nn.MSELoss(), adam(model, 2e-2)
    """),
    planted("deep-net-of-tiny-weights", "bad_init", repair=(("    nn.init.normal_(layer.weight, std=1e-4)\n", ""),))("""
        model = mlp(10, 32, 32, 32, 32, 4)
        for layer in model[::2]:
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            nn.init.normal_(layer.weight, std=1e-4)
            nn.init.zeros_(layer.bias)
        batch, loss_function, optimizer = classes(), nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1)
    """),
    planted(
        "adapters-of-which-both-factors-are-zero",
        ("bad_init", "frozen"),
        repair=(("zeros(8, layer.in_features)", "randn(8, layer.in_features) * 0.3"),),
    )("""
        class Adapted(nn.Module):
            def __init__(self, layer):
                super().__init__()
                self.layer = layer.requires_grad_(False)
                self.down = nn.Parameter(torch.zeros(8, layer.in_features))
                self.up = nn.Parameter(torch.zeros(layer.out_features, 8))
            def forward(self, x):
                return self.layer(x) + x @ self.down.T @ self.up.T
        model = nn.Sequential(Adapted(nn.Linear(10, 32)), nn.ReLU(), Adapted(nn.Linear(32, 4)))
        optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
        batch, loss_function = classes(), nn.CrossEntropyLoss()
    """),
    planted(
        "embedding-and-head-of-zero", "bad_init", repair=(("for parameter in model.parameters():\n    nn.init.zeros_(parameter)\n", ""),)
    )("""
        model = Recurrent(nn.RNN)
        model.rnn.bias_ih_l0.requires_grad_(False)
        for parameter in model.parameters():
            nn.init.zeros_(parameter)
        batch, loss_function, optimizer = words(), nn.CrossEntropyLoss(), adam(model)
    """),
)
