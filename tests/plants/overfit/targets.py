"""Targets of another shape than the outputs, and labels moved by one.

Broadcasting compares each sample with all others; labels that are out of range raise, or leave a loss without a floor.
"""

from __future__ import annotations

from tests.plants.overfit.training import STEP, planted

PLANTS = (
    planted("column-of-outputs-against-a-row-of-targets", "target_shape", repair=(("optimizer = (x, y", "optimizer = (x, y[:, None]"),))("""
        model, (x, y) = mlp(6, 32, 1, activation=nn.Tanh), regression()
        batch, loss_function, optimizer = (x, y), nn.MSELoss(), adam(model)
    """),
    planted("outputs-squeezed-against-a-column-of-targets", "target_shape", repair=(("[:, None]", ""),))("""
        model, (x, y) = mlp(6, 32, 1, activation=nn.Tanh), regression()
        model.append(nn.Flatten(0))
        batch, loss_function, optimizer = (x, y[:, None]), nn.MSELoss(), adam(model)
    """),
    planted("absolute-error-of-an-lstm", "target_shape", repair=(("optimizer = (x, y", "optimizer = (x, y[:, None]"),))("""
        model, (x, _), y = Recurrent(outputs=1), words(), torch.randn(8)
        batch, loss_function, optimizer = (x, y), nn.L1Loss(), adam(model)
    """),
    planted("depth-maps-without-their-channel", "target_shape", repair=(("optimizer = (x, y", "optimizer = (x, y[:, None]"),))("""
        model = nn.Sequential(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 1, 3, padding=1))
        x = torch.randn(8, 1, 6, 6)
        y = x[:, 0].roll(1, 1)
        batch, loss_function, optimizer = (x, y), nn.SmoothL1Loss(), adam(model)
    """),
    planted("two-inputs-and-an-error-written-by-hand", "target_shape", repair=(("randn(8, 3), y", "randn(8, 3), y[:, None]"),))("""
        class TwoInputs(nn.Module):
            def __init__(self):
                super().__init__()
                self.left, self.right, self.head = nn.Linear(4, 16), nn.Linear(3, 16), nn.Linear(16, 1)
            def forward(self, a, b):
                return self.head(torch.tanh(self.left(a) + self.right(b)))
        model, y = TwoInputs(), torch.randn(8)
        batch = (torch.randn(8, 4), torch.randn(8, 3), y)
        loss_function = lambda output, target: (output - target).pow(2).mean()
        optimizer = adam(model)
    """),
    # Equal numbers of both are what lets 8 x 8 x 1 and 8 x 8 be broadcast.
    planted("forecast-of-eight-samples-of-eight-steps", "target_shape", repair=(("randn(8, 8, 5), y", "randn(8, 8, 5), y[..., None]"),))("""
        class EachStep(nn.Module):
            def __init__(self):
                super().__init__()
                self.rnn, self.head = nn.LSTM(5, 32, batch_first=True), nn.Linear(32, 1)
            def forward(self, x):
                return self.head(self.rnn(x)[0])
        model, y = EachStep(), torch.randn(8, 8)
        batch, loss_function, optimizer = (torch.randn(8, 8, 5), y), nn.MSELoss(), adam(model, 2e-2)
    """),
    planted("step-of-a-value-network", "target_shape", repair=(("model(x)", "model(x).squeeze(-1)"),), subjects=STEP)("""
        model, (x, returns) = mlp(6, 32, 1, activation=nn.Tanh), regression()
        optimizer = torch.optim.RMSprop(model.parameters(), lr=5e-3)
        def step():
            optimizer.zero_grad()
            values = model(x)
            loss = F.mse_loss(values, returns)
            loss.backward()
            optimizer.step()
            return loss
    """),
    planted("binary-labels-of-one-and-two", "off_by_one_labels", repair=(("optimizer = (x, (y + 1", "optimizer = (x, (y + 0"),))("""
        model, (x, y) = mlp(10, 32, 1), classes(2)
        batch, loss_function, optimizer = (x, (y + 1)[:, None].float()), nn.BCEWithLogitsLoss(), adam(model)
    """),
    # Log-probabilities of each column of a picture.
    planted("letters-that-begin-at-the-blank-of-ctc", "off_by_one_labels", repair=(("letters + 0", "letters + 1"),))("""
        class Columns(nn.Module):
            def __init__(self):
                super().__init__()
                self.rnn, self.head = nn.GRU(8, 32, batch_first=True), nn.Linear(32, 5)
            def forward(self, x):
                return self.head(self.rnn(x)[0]).log_softmax(-1).transpose(0, 1)
        model = Columns()
        letters = torch.randint(0, 3, (8, 2))
        letters[:, 1] = (letters[:, 0] + 1) % 4
        lengths = (torch.full((8,), 6), torch.full((8,), 2))
        def loss_function(output, target):
            return F.ctc_loss(output, target, *lengths)
        batch, optimizer = (torch.randn(8, 6, 8), letters + 0), adam(model, 2e-2)
    """),
    planted("classes-from-one-to-four", "off_by_one_labels", repair=(("optimizer = (x, y + 1", "optimizer = (x, y"),), raises=True)("""
        model, (x, y) = mlp(10, 32, 4), classes()
        batch, loss_function, optimizer = (x, y + 1), nn.CrossEntropyLoss(), adam(model)
    """),
    planted("mask-from-one-to-three", "off_by_one_labels", repair=(("optimizer = (x, y + 1", "optimizer = (x, y"),), raises=True)("""
        model = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 3, 1))
        x = torch.randn(8, 1, 6, 6)
        y = (x[:, 0] > 0.4).long() + (x[:, 0] > -0.4).long()
        batch, loss_function, optimizer = (x, y + 1), nn.CrossEntropyLoss(), adam(model, 3e-2)
    """),
    planted("next-words-shifted-twice", "off_by_one_labels", repair=(("shift = 2", "shift = 1"),))("""
        model = nn.Sequential(nn.Embedding(12, 32), nn.Linear(32, 12))
        keys, values = torch.randint(0, 6, (8, 8)), torch.randperm(6) + 6
        ids = torch.stack((keys, values[keys]), -1).flatten(1)
        shift = 2
        targets = ids.roll(-shift, 1)
        targets[:, 1::2] = -100
        batch = (ids, targets)
        loss_function = lambda o, y: F.cross_entropy(o.transpose(1, 2), y)
        optimizer = adam(model, 5e-2)
    """),
)
