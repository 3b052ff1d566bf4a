"""Values that were meant to be others: each cell fails, its edit repairs it, and nothing is left behind by the trials."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from tests.unit.instruments.shapes.failed_cells import after_error
from torchdebug_magics import fixed_source

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

SETUP = """\
import numpy as np
import torch
import torch.nn.functional as F
from collections import namedtuple
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, random_split
torch.manual_seed(0)
x, y = torch.randn(8, 4), torch.randint(3, (8,))
loader = DataLoader(TensorDataset(x, y), batch_size=4)
net = nn.Linear(4, 3)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(4, 3)
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 3)])

    def forward(self, x):
        return self.fc1(x)
"""
CASES: dict[str, tuple[str, str, str]] = {
    # the cell, the line that repairs it, the beginning of the verdict
    "method": ("opt = torch.optim.Adam(net.parameters)", "opt = torch.optim.Adam(net.parameters())", "`net.parameters` is a method"),
    "size of a method": ("z = torch.zeros(x.size)", "z = torch.zeros(x.size())", "`x.size` is a method"),
    "module for its parameters": ("opt = torch.optim.SGD(net, lr=0.1)", "torch.optim.SGD(net.parameters(), lr=0.1)", "`net` is a module"),
    "generators added": (
        "opt = torch.optim.SGD(net.parameters() + net.parameters(), lr=0.1)",
        "torch.optim.SGD(list(net.parameters()) + list(net.parameters()), lr=0.1)",
        "`net.parameters()` is a generator",
    ),
    "class for an instance": ("model = Net\nout = model(x)", "model = Net()", "`model` is a class"),
    "class in a Sequential": (
        "m = nn.Sequential(nn.Flatten, nn.Linear(4, 2))",
        "nn.Sequential(nn.Flatten(), nn.Linear(4, 2))",
        "`nn.Flatten` is a",
    ),
    "function for a module": ("m = nn.Sequential(nn.Linear(4, 2), F.relu)", "nn.ReLU()", "`F.relu` is a function"),
    "list of modules": (
        "m = nn.Sequential([nn.Linear(4, 4), nn.ReLU()])",
        "m = nn.Sequential(nn.Linear(4, 4), nn.ReLU())",
        "`[nn.Linear(4, 4), nn.ReLU()]` is a list",
    ),
    "container called": (
        "class Deep(Net):\n    def forward(self, x):\n        return self.layers(x)\nout = Deep()(x)",
        "return torch.nn.Sequential(*self.layers)(x)",
        "`self.layers` only holds modules",
    ),
    "number as text": ('opt = torch.optim.Adam(net.parameters(), lr="0.01")', "lr=float('0.01')", "`'0.01'` is text"),
    "list of tensors": ("outs = [x[0], x[1]]\nt = torch.tensor(outs)", "t = torch.stack(outs)", "`outs` is a list of 2 tensors of 4"),
    "method of a list": ("losses = [x.sum(), x.mean()]\nm = losses.mean()", "m = torch.stack(losses).mean()", "`losses` is a list"),
    "images in a list": ("images = [x, x]\nout = net(images)", "out = net(torch.stack(images))", "`images` is a list of 2 tensors"),
    "rows of unequal length": (
        "rows = [[1, 2, 3], [4]]\nt = torch.tensor(rows)",
        "pad_sequence([torch.tensor(row) for row in rows]",
        "`rows` has rows of 1 to 3",
    ),
    "labels in a list": (
        "labels = [0, 1, 2, 0, 1, 2, 0, 1]\nloss = nn.CrossEntropyLoss()(net(x), labels)",
        "nn.CrossEntropyLoss()(net(x), torch.tensor(labels))",
        "`labels` is a list",
    ),
    "arguments for a list": ("both = torch.cat(x, x)", "both = torch.cat([x, x])", "`torch.cat` takes one list"),
    "array for a tensor": ("a = np.ones((5, 4), dtype='float32')\nout = net(a)", "out = net(torch.from_numpy(a))", "`a` is a NumPy array"),
    "array among tensors": (
        "a = np.ones((8, 2), dtype='float32')\nz = torch.cat([x, a], dim=1)",
        "torch.cat([x, torch.from_numpy(a)], dim=1)",
        "`a` is a NumPy array",
    ),
    "flipped array": (
        "t = torch.from_numpy(np.ones((3, 3))[::-1])",
        "np.ones((3, 3))[::-1].copy()",
        "`np.ones((3, 3))[::-1]` is a flipped view",
    ),
    "tensor for an array": ("c = x.astype(float)", "c = x.numpy().astype(float)", "`x` is a tensor of 8 x 4"),
    "float for an index": ("n = 10\npart = torch.arange(n)[:n * 0.8]", "torch.arange(n)[:int(n * 0.8)]", "`n * 0.8` is a float"),
    "floats for lengths": (
        "n = 10\na, b = random_split(range(n), [n * 0.8, n * 0.2])",
        "[int(n * 0.8), int(n * 0.2)]",
        "`n * 0.8` is a float",
    ),
    "items of a loader": ("a, b = loader[0]", "a, b = loader.dataset[0]", "`loader` is a DataLoader"),
    "next of a loader": ("a, b = next(loader)", "a, b = next(iter(loader))", "`loader` is a DataLoader"),
    "next as a method": ("batches = iter(loader)\na, b = batches.next()", "a, b = next(batches)", "`batches` has no method `next`"),
    "loop without enumerate": ("for i, (a, b, c) in [(x, y, x)]:\n    pass", "in enumerate([(x, y, x)]):", "`[(x, y, x)]` gives its items"),
    "loop over a dict": (
        "d = {'train': [1.0], 'val': [2.0]}\nfor name, values in d:\n    sum(values)",
        "for name, values in d.items():",
        "`d` is a dict",
    ),
    "wrapped model": ("w = nn.DataParallel(Net())\nout = w.fc1(x)", "out = w.module.fc1(x)", "`w` is a DataParallel"),
    "wrapped dataset": ("part = Subset(loader.dataset, [0, 1])\nt = part.tensors", "t = part.dataset.tensors", "`part` is a Subset"),
    "key as an attribute": ("out = {'logits': x}\np = out.logits.argmax(1)", "p = out['logits'].argmax(1)", "`out` is a dict"),
    "size called": ("n = x.shape(0)", "n = x.shape[0]", "`x.shape` is a Size"),
    "checkpoint of more": (
        "state = {'model': net.state_dict(), 'epoch': 3}\nnet.load_state_dict(state)",
        "net.load_state_dict(state['model'])",
        "`state` is a dict: `model`, `epoch`",
    ),
    "prefix of a wrapper": (
        "state = nn.DataParallel(net).state_dict()\nnet.load_state_dict(state)",
        "net.load_state_dict({key.removeprefix('module.'): value for key, value in state.items()})",
        "`state` has `module.` before each name",
    ),
    "state for a model": ("model = net.state_dict()\nmodel.eval()", "net.load_state_dict(model)", "`model` is the state of a model"),
    "parameter": ("net.weight = torch.ones(3, 4)", "net.weight = torch.nn.Parameter(torch.ones(3, 4))", "`net.weight` is a parameter"),
    "comma at the end": (
        "loss = F.cross_entropy(net(x), y),\nloss.backward()",
        "loss = F.cross_entropy(net(x), y)",
        "`loss` is a tuple: a comma",
    ),
    "loss as a number": (
        "loss = F.cross_entropy(net(x), y).item()\nloss.backward()",
        "loss = F.cross_entropy(net(x), y)",
        "`loss` is a number",
    ),
    "argument that lacks": (
        "sched = torch.optim.lr_scheduler.ReduceLROnPlateau(torch.optim.SGD(net.parameters(), 0.1))\nval_loss = 0.5\nsched.step()",
        "sched.step(val_loss)",
        "`sched.step` needs `metrics`",
    ),
    "heads that do not divide": (
        "layer = nn.MultiheadAttention(100, 8)",
        "nn.MultiheadAttention(100, 10)",
        "8 does not fit the other arguments: 10 does",
    ),
    "mistyped name": ("learning_rate = 0.1\nz = x * learing_rate", "z = x * learning_rate", "`learing_rate` is not defined"),
    "mistyped attribute": ("out = Net().fc_1(x)", "out = Net().fc1(x)", "`Net()`, a Net, has no `fc_1`"),
    "mistyped key": ("d = nn.ModuleDict({'encoder': net})\nout = d['encodr'](x)", "out = d['encoder'](x)", "`d` has no key 'encodr'"),
    "mistyped class": ("loss_fn = nn.CrossEntropy()", "loss_fn = nn.CrossEntropyLoss()", "`nn` has no `CrossEntropy`"),
    "missing import": ("del np\nz = np.ones(3)", "import numpy as np", "`np` is not imported"),
    "tensor for there": ("def f(m):\n    if m:\n        return m * 2\nz = f(x)", "if m is not None:", "`m` is a tensor of 8 x 4"),
    "tensor or default": (
        "def f(h=None):\n    h = h or torch.zeros(4)\n    return h\nz = f(x)",
        "h = h if h is not None else torch.zeros(4)",
        "`h` is a tensor",
    ),
    "tensors with and": ("m = (x > 0) and (x < 1)", "m = (x > 0) & (x < 1)", "`and` takes no tensors"),
    "chained comparison": ("m = 0 < x < 1", "m = (0 < x) & (x < 1)", "`0 < x < 1` asks for the truth"),
    "tensor in a list": (
        "seen = [x, x + 1]\nz = x + 2 in seen",
        "any([torch.equal(item, x + 2) for item in seen])",
        "`in` compares tensors",
    ),
    "largest of tensors": ("z = max(x, x + 1)", "z = torch.maximum(x, x + 1)", "Python's `max` compares whole tensors"),
    "equal tensors": ("if x == x:\n    pass", "if (x == x).all():", "`x == x` is a tensor of 8 x 4"),
    "dropped result": (
        "class Head(Net):\n    def forward(self, x):\n        x - self.fc1(x)\n        return x\nloss = F.cross_entropy(Head()(x), y)",
        "x = self.fc1(x)",
        "the result of `x - self.fc1(x)` is dropped",
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_edit_repairs_the_cell(case: tuple[str, str, str], shell: InteractiveShell) -> None:
    from IPython.utils.capture import capture_output

    cell, line, verdict = case
    report = after_error(shell, SETUP, cell)
    assert report.verdict.startswith(verdict), report.verdict
    assert report.fix_state == ("compiles" if "next(batches)" in line else "verified")  # an iterator cannot be put back: nothing is run
    (source,) = fixed_source(report).values()
    assert line in source
    with capture_output():
        assert shell.run_cell(SETUP).success
        assert shell.run_cell(source).success


@pytest.mark.parametrize(
    "cell",
    [
        "z = undefined_thing + 1",
        "z = [1, 2][7]",
        "raise RuntimeError('of the user')",
        "z = {'a': 1}['zzz']",
        "assert x.shape == (1,)",
        "z = int('abc')",
        "z = open('/nowhere/at/all')",
        "def f():\n    raise ValueError('no')\nf()",
        "z = 1 / 0",
        "z = x.nothing_like_it",
    ],
)
def test_an_error_of_another_kind_gets_no_code(cell: str, shell: InteractiveShell) -> None:
    assert after_error(shell, SETUP, cell).edits == ()


def test_a_file_that_may_run_code_is_not_loaded(shell: InteractiveShell, tmp_path: Path) -> None:
    file = tmp_path / "model.pt"
    cell = f"import torch\nfrom torch import nn\ntorch.save(nn.Linear(2, 2), {str(file)!r})"
    report = after_error(shell, cell, f"m = torch.load({str(file)!r})")
    assert report.fix_state == "compiles"
    assert "weights_only=False" in report.fix


def test_the_trials_leave_nothing_behind(shell: InteractiveShell, tmp_path: Path) -> None:
    """Each trial runs the statement and what follows it: numbers, lists, parameters, random state and files are as before."""
    file = tmp_path / "log.txt"
    cell = (
        "log, counted = [], {'calls': 0}\n"
        "def count(value):\n"
        "    counted['calls'] += 1\n"
        "    log.append(torch.rand(1).item())\n"
        "    return value\n"
        "outs = [x[0], x[1]]\n"
        "t = count(torch.tensor(outs))\n"
        f"open({str(file)!r}, 'w').write('run')\n"
        "net.weight.data.zero_(); new_name = 1; x.add_(1); print('not', 'seen')\n"
    )
    from IPython.utils.capture import capture_output

    with capture_output():
        assert shell.run_cell(SETUP, store_history=True).success
        assert not shell.run_cell(cell, store_history=True).success
        random, weight, x = torch.get_rng_state(), shell.user_ns["net"].weight.detach().clone(), shell.user_ns["x"].clone()
        names = {name: id(value) for name, value in shell.user_ns.items() if not re.match(r"_|In|Out|get_ipython", name)}
    with capture_output() as output:
        shell.run_cell("%torchdebug -o report", store_history=True)
    assert shell.user_ns["report"].fix_state == "verified"
    assert torch.equal(random, torch.get_rng_state())
    assert torch.equal(weight, shell.user_ns["net"].weight)
    assert torch.equal(x, shell.user_ns["x"])
    assert (shell.user_ns["log"], shell.user_ns["counted"]) == ([], {"calls": 0})
    assert {name: id(value) for name, value in shell.user_ns.items() if name in names} == names
    assert not {"new_name", "t", "_torchdebug_passed"} & shell.user_ns.keys()
    assert not file.exists()
    assert "not seen" not in output.stdout


def test_a_change_that_only_passes_its_own_line_is_not_verified(shell: InteractiveShell) -> None:
    """The rest of the block raises whatever is done: it is told so."""
    report = after_error(shell, SETUP, "t = torch.tensor([x[0], x[1]])\nassert t.dim() == 5")
    assert report.fix_state == "compiles"


UNDECIDED = {
    "samples of unequal shapes": "for z in DataLoader([torch.zeros(2, 3), torch.zeros(4, 3, 5)], batch_size=2):\n    pass",
    "which part of a checkpoint": "both = {'gen': net.state_dict(), 'disc': net.state_dict()}\nnet.load_state_dict(both)",
    "which value of a dict": "out = {'loss': x, 'logits': x}\nz = out.softmax(-1)",
    "an attribute of few letters": "z = x.foo()",
    "which item of a tuple": "out = (x, x)\nz = out.softmax(-1)",
    "another layer of the same kind": "z = Net().fc2(x)",
    "the other of two": "loss_G = x.sum()\nz = loss_D * 2",
    "a dimension": "c = nn.Conv(3, 4, 3)",
    "a word of a vocabulary": "vocab = {'dog': 1}\nword = 'dogs'\nz = vocab[word]",
    "an argument of a method": "z = (37 / 50).round(4)",
    "a picture": "h, w = torch.rand(3, 4, 5).shape",
    "an index too large": "z = (x,)[1]",
    "more arguments than the model takes": "z = net(x, y)",
    "three defaults": "def f(h=None, g=None):\n    return h or g or x\nz = f(x)",
}


@pytest.mark.parametrize("cell", UNDECIDED.values(), ids=UNDECIDED)
def test_what_nobody_can_know_is_not_guessed(cell: str, shell: InteractiveShell) -> None:
    assert after_error(shell, SETUP, cell).edits == ()


def test_a_branch_stays_a_branch(shell: InteractiveShell) -> None:
    report = after_error(shell, SETUP, "flag = 0\nif flag > 3:\n    z = 1\nelif x:\n    z = 2")
    (source,) = fixed_source(report).values()
    assert "elif x is not None:" in source


def test_an_object_that_refuses_to_be_looked_at_is_left_alone(shell: InteractiveShell) -> None:
    cell = "class Odd:\n    def __dir__(self):\n        raise RuntimeError('no')\nz = Odd().missing()"
    assert after_error(shell, SETUP, cell).edits == ()


def test_where_several_parts_would_do_all_are_named(shell: InteractiveShell) -> None:
    cell = "class Two(Net):\n    def forward(self, x):\n        return self.fc1(x), self.fc1(x) + 1\nz = F.cross_entropy(Two()(x), y)"
    report = after_error(shell, SETUP, cell)
    assert report.verdict.startswith("`Two()(x)` is a tuple of 2: `Two()(x)[0]` or `Two()(x)[1]` would do")
    assert report.edits == ()
