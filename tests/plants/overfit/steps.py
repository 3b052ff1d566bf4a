"""Steps that are too weak: weight decay, clipping, and gradients that are not set to zero, or too late.

A callable does one step and returns the loss.
"""

from __future__ import annotations

from tests.plants.overfit.training import STEP, planted

PLANTS = (
    planted("adamw-that-decays-all", "weight_decay", repair=(("weight_decay=50.0", "weight_decay=0.01"),))("""
        model = mlp(10, 32, 4)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=50.0)
        batch, loss_function = classes(), nn.CrossEntropyLoss()
    """),
    planted("regression-with-decay-in-one-group", "weight_decay", repair=(('weight_decay": 20.0', 'weight_decay": 0.0'),))("""
        model = mlp(6, 32, 1, activation=nn.Tanh)
        groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "weight_decay": 20.0}]
        batch, loss_function = (torch.randn(8, 6), torch.randn(8, 1)), nn.MSELoss()
        optimizer = torch.optim.Adam(groups, lr=1e-2)
    """),
    planted("gradients-clipped-to-1e-5", ("clipping", "learning_rate"), repair=(("max_norm=1e-5", "max_norm=1.0"),), subjects=STEP)("""
        model, (x, y) = mlp(10, 32, 4), classes()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
        def step():
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1e-5)
            optimizer.step()
            return loss
    """),
    planted(
        "values-clipped-below-the-epsilon-of-adam",
        ("clipping", "learning_rate"),
        repair=(("parameters(), 1e-12", "parameters(), 1.0"),),
        subjects=STEP,
    )("""
        model, (x, y) = Recurrent(), words()
        optimizer = adam(model)
        def step():
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            torch.nn.utils.clip_grad_value_(model.parameters(), 1e-12)
            optimizer.step()
            return loss.item()
    """),
    planted(
        "momentum-on-gradients-that-add-up",
        ("zero_grad_missing", "learning_rate"),
        repair=(("def step():", "def step():\n    optimizer.zero_grad()"),),
        subjects=STEP,
    )("""
        model, (x, y) = mlp(10, 64, 64, 4), classes()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        def step():
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            return loss
    """),
    planted(
        "adam-on-gradients-that-add-up",
        ("zero_grad_missing", "learning_rate"),
        repair=(("def step():", "def step():\n    optimizer.zero_grad()"),),
        subjects=STEP,
    )("""
        model, x, y = mlp(6, 32, 32, 1, activation=nn.Tanh), torch.randn(8, 6), torch.randn(8, 1)
        optimizer = adam(model, 3e-2)
        def step():
            loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            return loss
    """),
    planted(
        "zero-grad-between-backward-and-step",
        "zero_grad_missing",
        repair=(
            ("    loss = F.cross_entropy(model(x), y)", "    loss = F.cross_entropy(model(x), y)\n    optimizer.zero_grad()"),
            ("    optimizer.zero_grad(set_to_none=False)\n", ""),
        ),
        subjects=STEP,
    )("""
        model, (x, y) = cnn(), pictures()
        optimizer = adam(model)
        def step():
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.zero_grad(set_to_none=False)
            optimizer.step()
            return loss
    """),
)
