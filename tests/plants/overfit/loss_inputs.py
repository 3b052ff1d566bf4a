"""Losses that are given something else than they ask for: probabilities for logits, logits for probabilities, softmax twice.

Several causes stand where several names fit: softmax in the loss function is a double softmax and a wrong input.
"""

from __future__ import annotations

from tests.plants.overfit.training import planted

PLANTS = (
    planted(
        "mlp-that-ends-in-softmax", "double_softmax", repair=(("nn.Sequential(mlp(10, 32, 4), nn.Softmax(dim=1)", "mlp(10, 32, 4"),)
    )("""
        model = nn.Sequential(mlp(10, 32, 4), nn.Softmax(dim=1))
        batch, loss_function, optimizer = classes(), nn.CrossEntropyLoss(), adam(model)
    """),
    planted(
        "sigmoid-before-cross-entropy", "wrong_loss_input", repair=(("nn.Sequential(mlp(10, 32, 4), nn.Sigmoid()", "mlp(10, 32, 4"),)
    )("""
        model = nn.Sequential(mlp(10, 32, 4), nn.Sigmoid())
        batch, loss_function, optimizer = classes(), nn.CrossEntropyLoss(), adam(model)
    """),
    planted(
        "sigmoid-before-bce-with-logits", "wrong_loss_input", repair=(("nn.Sequential(mlp(10, 32, 1), nn.Sigmoid()", "mlp(10, 32, 1"),)
    )("""
        model = nn.Sequential(mlp(10, 32, 1), nn.Sigmoid())
        x, y = classes(2)
        batch, loss_function, optimizer = (x, y[:, None].float()), nn.BCEWithLogitsLoss(), adam(model)
    """),
    planted("mask-with-sigmoid-twice", "wrong_loss_input", repair=(("nn.Sequential(body, nn.Sigmoid())", "body"),))("""
        body = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 1, 1))
        model = nn.Sequential(body, nn.Sigmoid())
        x = torch.randn(8, 1, 8, 8)
        batch, loss_function, optimizer = (x, (x > 0).float()), nn.BCEWithLogitsLoss(), adam(model, 3e-2)
    """),
    planted(
        "raw-logits-into-nll-loss",
        "wrong_loss_input",
        repair=(("model = mlp(10, 32, 4)", "model = mlp(10, 32, 4)\nmodel.append(nn.LogSoftmax(dim=1))"),),
    )("""
        model = mlp(10, 32, 4)
        batch, loss_function, optimizer = classes(), nn.NLLLoss(), adam(model)
    """),
    planted("probabilities-into-nll-loss", "wrong_loss_input", repair=(("Softmax", "LogSoftmax"),))("""
        model = cnn()
        model.append(nn.Softmax(dim=1))
        batch, loss_function, optimizer = pictures(), nn.NLLLoss(), adam(model)
    """),
    planted(
        "raw-logits-into-bce-loss",
        "wrong_loss_input",
        repair=(("model = mlp(10, 32, 1)", "model = mlp(10, 32, 1)\nmodel.append(nn.Sigmoid())"),),
        raises=True,
    )("""
        model = mlp(10, 32, 1)
        x, y = classes(2)
        batch, loss_function, optimizer = (x, y[:, None].float()), nn.BCELoss(), adam(model)
    """),
    planted("probabilities-into-kl-div", "wrong_loss_input", repair=(("Softmax", "LogSoftmax"),))("""
        model = mlp(10, 32, 4)
        model.append(nn.Softmax(dim=1))
        x, y = classes()
        batch, loss_function, optimizer = (x, F.one_hot(y, 4).float()), nn.KLDivLoss(reduction="batchmean"), adam(model)
    """),
    planted("softmax-over-the-batch-before-a-log", "wrong_loss_input", repair=(("dim=0", "dim=1"),))("""
        model = mlp(10, 32, 4)
        model.append(nn.LogSoftmax(dim=0))
        batch, loss_function, optimizer = classes(), nn.NLLLoss(), adam(model)
    """),
    planted("logits-through-a-tanh", "wrong_loss_input", repair=(("nn.Sequential(Recurrent(nn.GRU), nn.Tanh()", "Recurrent(nn.GRU"),))("""
        model = nn.Sequential(Recurrent(nn.GRU), nn.Tanh())
        batch, loss_function, optimizer = words(), nn.CrossEntropyLoss(), adam(model, 2e-2)
    """),
)
