"""A layer of the wrong size is repaired where it is made: in a class, in an `nn.Sequential`, by its name. The edits are applied."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.unit.instruments.shapes.failed_cells import after_error
from torchdebug_magics import fixed_source

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

IMPORTS = "import torch\nfrom collections import OrderedDict\nfrom torch import nn\nimport torch.nn.functional as F\n"
NET = """\
class Net(nn.Module):
    def __init__(self, width, classes):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, width, 3, padding=1), nn.MaxPool2d(2))
        self.head = {}

    def forward(self, x):
        return self.head(self.body(x))
net = Net(4, classes=10)
"""
CASES = {
    # the cell before, the failing one, what stands in each after the repair
    "a sequence in a class": (
        NET.format("nn.Sequential(nn.Flatten(), nn.Linear(in_features=width, out_features=classes, bias=False))"),
        "net(torch.randn(2, 1, 8, 8))",
        "nn.Sequential(nn.Flatten(), nn.Linear(in_features=64, out_features=classes, bias=False))",
        "",
    ),
    "a sequence with names": (
        NET.format("nn.Sequential(OrderedDict([('flat', nn.Flatten()), ('fc', nn.Linear(width, classes))]))"),
        "net(torch.randn(2, 1, 8, 8))",
        "('fc', nn.Linear(64, classes))",
        "",
    ),
    "a sequence in a sequence": (
        NET.format("nn.Sequential(nn.Flatten(), nn.Sequential(nn.Linear(width, 32), nn.ReLU()), nn.Linear(32, classes))"),
        "net(torch.randn(2, 1, 8, 8))",
        "nn.Sequential(nn.Linear(64, 32), nn.ReLU())",
        "",
    ),
    "a sequence of the notebook": (
        "hidden = 16\nnet = nn.Sequential(nn.Flatten(), nn.Linear(12, hidden), nn.ReLU(), nn.Linear(hidden, 3))",
        "net(torch.randn(5, 4, 2))",
        "nn.Linear(8, hidden)",
        "",
    ),
    "a layer and the one image that it is given": (
        NET.format("nn.Sequential(nn.Flatten(), nn.Linear(width, classes))"),
        "image = torch.randn(1, 8, 8)\nwith torch.no_grad():\n    out = net(image)",
        "nn.Linear(64, classes)",
        "out = net(image.unsqueeze(0))",
    ),
    "a loss by the name that it was given": (
        (
            "loss_of = nn.MSELoss()\nmodel = nn.Linear(4, 3)\ndef step(model, criterion):\n"
            "    scores = model(torch.randn(8, 4))\n    target = torch.randint(3, (8,))\n    return criterion(scores, target)"
        ),
        "step(model, loss_of).backward()",
        "loss_of = nn.CrossEntropyLoss()",
        "",
    ),
    "the last step of each sample": (
        (
            "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
            "        self.lstm, self.fc = nn.LSTM(5, 6, batch_first=True), nn.Linear(6, 3)\n\n"
            "    def forward(self, x):\n        out, _ = self.lstm(x)\n        return self.fc(out[-1])\n"
            "net, y = Net(), torch.randint(3, (8,))"
        ),
        "loss = F.cross_entropy(net(torch.randn(8, 12, 5)), y)",
        "return self.fc(out[:, -1])",
        "",
    ),
    "classes that are numbered from 1 on": (
        "model, x, y = nn.Linear(4, 3), torch.randn(9, 4), torch.arange(9) % 3 + 1",
        "loss = F.cross_entropy(model(x), y)",
        "",
        "F.cross_entropy(model(x), y - 1)",
    ),
    "numbers that are joined": (
        "model = nn.Linear(3, 1)\nouts = [model(torch.randn(3)).squeeze() for _ in range(4)]",
        "pred = torch.cat(outs)",
        "",
        "torch.stack(outs)",
    ),
    "a checkpoint of other classes": (
        NET.format("nn.Linear(1, classes)") + "state = Net(4, classes=7).state_dict()\ndef step(x):\n    net(x).sum().backward()",
        "net.load_state_dict(state)",
        "",
        "not key.startswith('head.')}, strict=False)",
    ),
    "a layer that is made in a loop": (
        (
            "class Net(nn.Module):\n    def __init__(self, widths=(4, 8)):\n        super().__init__()\n        layers, channels = [], 3\n"
            "        for width in widths:\n            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]\n"
            "            channels = width\n        self.features = nn.Sequential(*layers)\n\n"
            "    def forward(self, x):\n        return self.features(x).mean((2, 3))\nnet = Net()\n"
        ),
        "out = net(torch.randn(2, 1, 8, 8))",
        "net = Net()\nnet.features[0] = nn.Conv2d(1, 4, 3, padding=1)",
        "",
    ),
    "shortcuts of blocks that are narrower than what they are added to": (
        (
            "class Block(nn.Module):\n    def __init__(self, before, after, stride=1):\n        super().__init__()\n"
            "        self.conv, self.shortcut = nn.Conv2d(before, after, 3, stride, 1), nn.Identity()\n\n"
            "    def forward(self, x):\n        return F.relu(self.conv(x) + self.shortcut(x))\n"
            "model = nn.Sequential(Block(3, 3), Block(3, 8, 2)).to('cpu')\n"
        ),
        "out = model(torch.randn(2, 3, 8, 8))",
        "model[1].shortcut = nn.Conv2d(3, 8, 1, stride=2).to('cpu')",
        "",
    ),
    "a normalization of three channels for a picture of one": (
        (
            "class Normalize:\n    def __init__(self, mean, std):\n        self.mean, self.std = mean, std\n\n    def __call__(self, x):\n"
            "        return x.clone().sub_(torch.tensor(self.mean).view(-1, 1, 1)).div_(torch.tensor(self.std).view(-1, 1, 1))\n"
            "normalize = Normalize(mean=(0.4, 0.5, 0.6), std=[0.2, 0.2, 0.2])\n"
        ),
        "x = normalize(torch.rand(1, 8, 8))",
        "Normalize(mean=(0.5,), std=[0.2])",
        "",
    ),
    "lengths that leave a sample out": (
        "from torch.utils.data import TensorDataset, random_split\ndata = TensorDataset(torch.randn(23, 2))\nn = int(0.8 * len(data))",
        "train, test = random_split(data, [n, int(0.2 * len(data))])",
        "",
        "[n, len(data) - n]",
    ),
    "values and indices that are compared with labels": (
        (
            "net, x, labels = nn.Linear(4, 3), torch.randn(8, 4), torch.randint(3, (8,))\ndef accuracy(net):\n    net.eval()\n"
            "    found = torch.max(net(x), 1)\n    return (found == labels).sum().item() / 8"
        ),
        "share = accuracy(net)",
        "(found.indices == labels).sum()",
        "",
    ),
    "an option of another optimizer": (
        "net = nn.Linear(2, 2)",
        "opt = torch.optim.Adam(net.parameters(), lr=0.1, momentum=0.9)",
        "",
        "Adam(net.parameters(), lr=0.1)",
    ),
    "a batch that is a dict of arguments": (
        (
            "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n        self.embed = nn.Embedding(9, 4)\n\n"
            "    def forward(self, ids, mask=None):\n        return self.embed(ids) * mask[..., None]\n"
            "net, batch = Net(), {'ids': torch.arange(6).view(2, 3), 'mask': torch.ones(2, 3)}"
        ),
        "out = net(batch)",
        "",
        "net(**batch)",
    ),
    "a language model without labels": (
        (
            "from transformers import GPT2Config, GPT2LMHeadModel\n"
            "model = GPT2LMHeadModel(GPT2Config(vocab_size=11, n_positions=8, n_embd=8, n_layer=1, n_head=2))\n"
            "batch = {'input_ids': torch.arange(8).view(1, 8)}"
        ),
        "outputs = model(**batch)\nloss = outputs.loss\nloss.backward()",
        "",
        "model(**batch, labels=batch['input_ids'])",
    ),
    "a picture with its channels first": (
        "import matplotlib.pyplot as plt\npicture, (figure, axes) = torch.rand(3, 8, 8), plt.subplots()\nplt.close(figure)",
        "image = axes.imshow(picture)",
        "",
        "axes.imshow(picture.permute(1, 2, 0))",
    ),
    "scores that are given as probabilities": (
        "from torch.distributions import Categorical\nscores = torch.randn(8, 3)",
        "action = Categorical(scores, validate_args=True).sample()",
        "",
        "Categorical(logits=scores, validate_args=True)",
    ),
    "a word that the vocabulary does not have": (
        "words = {'<unk>': 0, 'good': 1}\ndef encoded(text):\n    return torch.tensor([words[word] for word in text.split()])",
        "ids = encoded('good film')",
        "words.get(word, words['<unk>'])",
        "",
    ),
    "a recurrent layer without a cell state": (
        "rnn, x = nn.GRU(3, 4, batch_first=True), torch.randn(2, 5, 3)",
        "out, (h, c) = rnn(x)\nlast = h[-1]",
        "",
        "out, h = rnn(x)",
    ),
    "a function among modules": (
        "def made(width):\n    layers = [nn.Linear(2, width)]\n    layers.append(F.relu)\n    return nn.Sequential(*layers)",
        "net = made(4)",
        "layers.append(nn.ReLU())",
        "",
    ),
    "losses that a function has read": (
        (
            "net = nn.Linear(2, 1)\ndef losses(out, y):\n    squared = F.mse_loss(out, y).item()\n    absolute = F.l1_loss(out, y).item()\n"
            "    return squared, absolute"
        ),
        "first, second = losses(net(torch.randn(4, 2)), torch.randn(4, 1))\nloss = first + 0.1 * second\nloss.backward()",
        "absolute = F.l1_loss(out, y)\n",
        "",
    ),
    "steps of a schedule, without those of the last batch": (
        (
            "from torch.utils.data import DataLoader, TensorDataset\ndata = TensorDataset(torch.randn(20, 2))\n"
            "loader, net = DataLoader(data, batch_size=8), nn.Linear(2, 1)\nopt = torch.optim.SGD(net.parameters(), lr=0.1)"
        ),
        (
            "schedule = torch.optim.lr_scheduler.OneCycleLR(opt, 0.1, epochs=2, steps_per_epoch=len(data) // 8)\n"
            "for epoch in range(2):\n    for (x,) in loader:\n        net(x).sum().backward()\n        opt.step()\n        schedule.step()"
        ),
        "",
        "steps_per_epoch=len(loader)",
    ),
    "targets that a loader has collated of lists": (
        (
            "from torch.utils.data import DataLoader\ndata = [(torch.randn(4), [0.1 * n, 0.2, 0.3]) for n in range(8)]\n"
            "model = nn.Linear(4, 3)\nx, y = next(iter(DataLoader(data, batch_size=8)))"
        ),
        "loss = F.mse_loss(model(x), y)\nloss.backward()",
        "",
        "torch.stack(y, 1)",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_edits_repair_it(name: str, shell: InteractiveShell) -> None:
    before, cell, made, called = CASES[name]
    report = after_error(shell, IMPORTS + before, cell)
    assert report.fix_state == "verified"
    fixed = fixed_source(report)
    texts = [fixed.get(number, text) for number, text in ((1, IMPORTS + before), (2, cell))]
    assert made in texts[0]
    assert called in texts[1]
    for text in texts:
        shell.run_cell(text, store_history=True).raise_error()


def test_a_class_is_not_changed_for_one_of_several_that_differ(shell: InteractiveShell) -> None:
    made = NET.format("nn.Sequential(nn.Flatten(), nn.Linear(16 * width, classes))").replace("net = Net(4, classes=10)", "")
    report = after_error(shell, f"{IMPORTS}{made}small, net = Net(2, 3), Net(4, 10)", "net(torch.randn(2, 1, 6, 6))")
    assert report.fix
    assert report.edits == ()
