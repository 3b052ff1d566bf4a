"""Learning rates, schedulers and losses of a wrong scale.

Under plain gradient descent the two are one: a scaled loss is a scaled rate.
"""

from __future__ import annotations

from tests.plants.overfit.training import planted

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
    planted("learning-rate-of-zero", "learning_rate", repair=(("model, 0.0", "model, 1e-2"),))("""
        model = mlp(10, 32, 4)
        batch, loss_function, optimizer = classes(), nn.CrossEntropyLoss(), adam(model, 0.0)
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
)
