"""Learning rates, schedulers and losses of a wrong scale.

Under plain gradient descent the two are one: a scaled loss is a scaled rate.
"""

from __future__ import annotations

from tests.plants.overfit.training import MODEL_WITH_LOSS, STEP, planted

PLANTS = (
    planted("adam-at-1e-6", "learning_rate", repair=(("model, 1e-6", "model, 1e-2"),), factor=(1e3, 1e6))("""
        model = mlp(10, 32, 4)
        batch, loss_function, optimizer = classes(), nn.CrossEntropyLoss(), adam(model, 1e-6)
    """),
    planted("cnn-under-sgd-at-1e-4", "learning_rate", repair=(("lr=1e-4", "lr=0.2"),), factor=(100, 1e4))("""
        model = cnn()
        batch, loss_function = pictures(), nn.CrossEntropyLoss()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    """),
    planted("gpt2-under-adamw-at-1e-7", "learning_rate", repair=(("lr=1e-7", "lr=3e-3"),), subjects=MODEL_WITH_LOSS, factor=(1e3, 1e5))("""
        model = gpt2()
        batch, optimizer = sentences(), torch.optim.AdamW(model.parameters(), lr=1e-7)
    """),
    planted("learning-rate-of-zero", "learning_rate", repair=(("model, 0.0", "model, 1e-2"),))("""
        model = mlp(10, 32, 4)
        batch, loss_function, optimizer = classes(), nn.CrossEntropyLoss(), adam(model, 0.0)
    """),
    planted("rate-decays-in-every-step", "learning_rate", repair=(("gamma=0.5", "gamma=1.0"),), subjects=STEP)("""
        model, (x, y) = Recurrent(nn.GRU), words()
        optimizer = adam(model)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        def step():
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            scheduler.step()
            return loss
    """),
    planted("warm-up-that-takes-a-million-steps", "learning_rate", repair=(("epoch + 1) / 1e6", "epoch + 1) / 1"),), subjects=STEP)("""
        model, (x, y) = mlp(10, 32, 4), classes()
        optimizer = adam(model)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: min(1.0, (epoch + 1) / 1e6))
        def step():
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            scheduler.step()
            return loss
    """),
    planted("deep-tanh-net-under-adam-at-30", "learning_rate", repair=(("model, 30.0", "model, 1e-2"),), factor=(1e-7, 1e-2))("""
        model = mlp(6, 32, 32, 32, 1, activation=nn.Tanh)
        batch, loss_function, optimizer = (torch.randn(8, 6), torch.randn(8, 1).sign()), nn.MSELoss(), adam(model, 30.0)
    """),
    planted("regression-under-sgd-at-10", "learning_rate", repair=(("lr=10.0", "lr=0.1"),), factor=(1e-4, 0.1))("""
        model = mlp(6, 64, 1, activation=nn.Tanh)
        batch, loss_function = (torch.randn(8, 6), torch.randn(8, 1)), nn.MSELoss()
        optimizer = torch.optim.SGD(model.parameters(), lr=10.0)
    """),
    planted("deep-cnn-under-momentum-at-3", "learning_rate", repair=(("lr=3.0", "lr=0.03"),), factor=(1e-4, 1e-1))("""
        model = cnn(channels=16)
        batch, loss_function = pictures(), nn.CrossEntropyLoss()
        optimizer = torch.optim.SGD(model.parameters(), lr=3.0, momentum=0.9)
    """),
    planted("adagrad-at-1e-5", "learning_rate", repair=(("lr=1e-5", "lr=5e-2"),), factor=(100, 1e6))("""
        model = Recurrent()
        batch, loss_function = words(), nn.CrossEntropyLoss()
        optimizer = torch.optim.Adagrad(model.parameters(), lr=1e-5)
    """),
    planted("segmentation-summed-over-pixels", ("reduction", "learning_rate"), repair=(("sum", "mean"),), factor=(512, 512))("""
        model = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 2, 1)
        )
        x = torch.randn(8, 1, 8, 8)
        loss_function = nn.CrossEntropyLoss(reduction="sum")
        batch, optimizer = (x, (x[:, 0] > 0).long()), torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    """),
    planted(
        "loss-divided-by-ten-thousand", ("reduction", "learning_rate"), repair=(("scale = 1e-4", "scale = 1.0"),), factor=(1e-4, 1e-4)
    )("""
        model = mlp(10, 32, 4)
        scale = 1e-4
        batch = classes()
        loss_function = lambda o, y: scale * F.cross_entropy(o, y)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    """),
    planted("loss-divided-under-weight-decay", "reduction", repair=(("scale = 1e-4", "scale = 1.0"),), factor=(1e-4, 1e-4))("""
        model = mlp(10, 32, 4)
        scale = 1e-4
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3, weight_decay=1e-3)
        batch = classes()
        loss_function = lambda o, y: scale * F.cross_entropy(o, y)
    """),
    planted("loss-below-the-epsilon-of-adam", ("reduction", "learning_rate"), repair=(("scale = 1e-13", "scale = 1.0"),))("""
        model = mlp(10, 32, 4)
        scale = 1e-13
        batch = classes()
        loss_function = lambda o, y: scale * F.cross_entropy(o, y)
        optimizer = adam(model)
    """),
    planted("mean-over-words-of-which-most-are-masked", ("reduction", "learning_rate"), repair=(("mean()", "sum() / 8"),))("""
        model = Tagger()
        ids = torch.randint(0, 20, (8, 30))
        tags = torch.full_like(ids, -100)
        tags[:, 0] = torch.arange(8) % 5
        def loss_function(output, target):
            losses = F.cross_entropy(output, target, reduction="none")
            return losses.mean()
        batch, optimizer = (ids, tags), torch.optim.SGD(model.parameters(), lr=0.5)
    """),
)
