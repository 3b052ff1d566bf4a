"""Losses that are given something else than they ask for: probabilities for logits, logits for probabilities, softmax twice.

Several causes stand where several names fit: softmax in the loss function is a double softmax and a wrong input.
"""

from __future__ import annotations

from tests.plants.overfit.training import STEP, planted

PLANTS = (
    planted(
        "mlp-that-ends-in-softmax", "double_softmax", repair=(("nn.Sequential(mlp(10, 32, 4), nn.Softmax(dim=1)", "mlp(10, 32, 4"),)
    )("""
        model = nn.Sequential(mlp(10, 32, 4), nn.Softmax(dim=1))
        batch, loss_function, optimizer = classes(), nn.CrossEntropyLoss(), adam(model)
    """),
    planted("binary-cnn-that-ends-in-softmax", "double_softmax", repair=(("nn.Sequential(cnn(2), nn.Softmax(dim=-1)", "cnn(2"),))("""
        model = nn.Sequential(cnn(2), nn.Softmax(dim=-1))
        batch, loss_function, optimizer = pictures(2), nn.CrossEntropyLoss(), adam(model)
    """),
    planted(
        "ten-classes-after-softmax-in-an-lstm",
        "double_softmax",
        repair=(("nn.Sequential(Recurrent(outputs=10), nn.Softmax(dim=1)", "Recurrent(outputs=10"),),
    )("""
        model = nn.Sequential(Recurrent(outputs=10), nn.Softmax(dim=1))
        batch, loss_function, optimizer = words(8), nn.CrossEntropyLoss(), adam(model, 2e-2)
    """),
    planted("segmentation-after-softmax-over-channels", "double_softmax", repair=(("nn.Sequential(body, nn.Softmax2d())", "body"),))("""
        body = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 3, 1))
        model = nn.Sequential(body, nn.Softmax2d())
        x = torch.randn(8, 1, 8, 8)
        y = (x[:, 0] > 0.4).long() + (x[:, 0] > -0.4).long()
        batch, loss_function, optimizer = (x, y), nn.CrossEntropyLoss(), adam(model, 3e-2)
    """),
    planted("tags-with-padding-after-softmax-in-the-loss", ("double_softmax", "wrong_loss_input"), repair=((".softmax(1)", ""),))("""
        model = Tagger()
        ids = torch.randint(0, 20, (8, 6))
        tags = (ids % 5).masked_fill(torch.arange(6) > 3, -100)
        def loss_function(output, target):
            probabilities = output.softmax(1)
            return F.cross_entropy(probabilities, target, ignore_index=-100)
        batch, optimizer = (ids, tags), adam(model)
    """),
    planted(
        "step-with-softmax-before-cross-entropy",
        ("double_softmax", "wrong_loss_input"),
        repair=(("torch.softmax(logits, -1)", "logits"),),
        subjects=STEP,
    )("""
        model = bert()
        optimizer, ids, y = adam(model, 1e-3), torch.randint(0, 32, (8, 8)), torch.arange(8) % 4
        def step():
            optimizer.zero_grad()
            logits = model(input_ids=ids).logits
            loss = F.cross_entropy(torch.softmax(logits, -1), y)
            loss.backward()
            optimizer.step()
            return loss
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
    planted(
        "multi-label-with-sigmoid-twice",
        "wrong_loss_input",
        repair=(("nn.Sequential(Recurrent(outputs=6), nn.Sigmoid()", "Recurrent(outputs=6"),),
    )("""
        model = nn.Sequential(Recurrent(outputs=6), nn.Sigmoid())
        batch, loss_function = (words()[0], torch.randint(0, 2, (8, 6)).float()), nn.BCEWithLogitsLoss()
        optimizer = adam(model, 2e-2)
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
