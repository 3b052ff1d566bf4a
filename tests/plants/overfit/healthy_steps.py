"""Healthy trainings under many optimizers, and whole steps: schedulers, clipping, scalers, closures, accumulated gradients.

A callable does one step and returns the loss.
"""

from __future__ import annotations

from tests.plants.overfit.training import STEP, healthy

PLANTS = (
    healthy("plain-gradient-descent")("""
        model = mlp(10, 32, 4)
        batch, loss_function, optimizer = classes(), nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.3)
    """),
    healthy("adagrad")("""
        model = mlp(10, 32, 4)
        batch, loss_function = classes(), nn.CrossEntropyLoss()
        optimizer = torch.optim.Adagrad(model.parameters(), lr=5e-2)
    """),
    healthy("lbfgs-on-the-model")("""
        model = mlp(6, 16, 1, activation=nn.Tanh)
        batch, loss_function = (torch.randn(8, 6), torch.randn(8, 1)), nn.MSELoss()
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4)
    """),
    healthy("lbfgs-in-a-step", subjects=STEP)("""
        model, x, y = mlp(6, 16, 1, activation=nn.Tanh), torch.randn(8, 6), torch.randn(8, 1)
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4)
        def closure():
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            return loss
        step = lambda: optimizer.step(closure)
    """),
    healthy("scaler-and-autocast-in-a-step", subjects=STEP)("""
        model, (x, y) = mlp(10, 64, 4), classes()
        optimizer, scaler = adam(model), torch.amp.GradScaler("cpu", init_scale=1024.0)
        def step():
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = F.cross_entropy(model(x), y)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            return loss
    """),
    healthy("two-optimizers-in-a-step", subjects=STEP)("""
        body, head, (x, y) = mlp(10, 32, 16), nn.Linear(16, 4), classes()
        optimizers = (torch.optim.SGD(body.parameters(), lr=0.05), adam(head, 2e-2))
        def step():
            loss = F.cross_entropy(head(F.relu(body(x))), y)
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
            return loss
    """),
    healthy("logged-with-its-features-detached", subjects=STEP)("""
        model, (x, y) = mlp(10, 32, 4), classes()
        optimizer, history = adam(model), []
        def step():
            optimizer.zero_grad()
            output = model(x)
            loss = F.cross_entropy(output, y)
            history.append(output.detach().argmax(1).eq(y).float().mean().item())
            loss.backward()
            optimizer.step()
            return loss.item()
    """),
)
