"""Targets of another shape than the outputs, and labels moved by one.

Broadcasting compares each sample with all others; labels that are out of range raise, or leave a loss without a floor.
"""

from __future__ import annotations

from tests.plants.overfit.training import planted

PLANTS = (
    planted("column-of-outputs-against-a-row-of-targets", "target_shape", repair=(("optimizer = (x, y", "optimizer = (x, y[:, None]"),))("""
        model, (x, y) = mlp(6, 32, 1, activation=nn.Tanh), regression()
        batch, loss_function, optimizer = (x, y), nn.MSELoss(), adam(model)
    """),
    planted("absolute-error-of-an-lstm", "target_shape", repair=(("optimizer = (x, y", "optimizer = (x, y[:, None]"),))("""
        model, (x, _), y = Recurrent(outputs=1), words(), torch.randn(8)
        batch, loss_function, optimizer = (x, y), nn.L1Loss(), adam(model)
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
