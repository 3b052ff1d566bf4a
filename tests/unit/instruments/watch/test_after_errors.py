"""Bare `%torchdebug` after errors that no rule of sizes explains: refused memory, other devices, NumPy, workers. The edits are applied."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch

from torchdebug_magics import fixed_source

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

IMPORTS = "import torch, numpy as np\nfrom torch import nn\nfrom torch.utils.data import DataLoader, Dataset\n"
FAKE_GPU = """\
from torch._subclasses.fake_tensor import FakeTensorMode
device = torch.device("cuda")
with FakeTensorMode(allow_non_fake_inputs=True):
    x = torch.empty(4, 8, device="cuda")
    y = torch.zeros(4, dtype=torch.long, device="cuda")
    scale = nn.Parameter(torch.empty(8, device="cuda"), requires_grad=False)
"""
"""Tensors that are on a GPU as far as torch tells; no op on them has a result."""
IN_LIST = """\
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = scale
        self.layers = {value}
    def forward(self, x):
        for layer in {iterated}:
            x = torch.relu(layer(x))
        return x
net = Net()
"""
DATA = """\
class Data(Dataset):
    def __init__(self):
        self.x, self.w = torch.randn(8, 4), torch.randn({rows}, 3)
    def __len__(self):
        return {many}
    def __getitem__(self, i):
        return self.x[i] @ self.w
loader = DataLoader(Data(), batch_size=4, num_workers=1)
"""


class Answer(NamedTuple):
    report: Any
    fixed: dict[int, str]
    """By the number of the cell, 1 for the first."""
    result: Any
    """Of the last cell, run again as it was fixed."""


def asked(shell: InteractiveShell, *cells: str) -> Answer:
    """Run the cells, of which the last one fails, ask, and run them as the report fixes them."""
    from IPython.utils.capture import capture_output

    with capture_output():
        first = shell.execution_count
        results = [shell.run_cell(cell, store_history=True) for cell in cells]
        assert [result.success for result in results] == [True] * (len(cells) - 1) + [False]
        shell.run_cell("%torchdebug -o report", store_history=True)
        report = shell.user_ns.pop("report")
        fixed = {number - first + 1: source for number, source in fixed_source(report).items()} if report.edits else {}
        again = [shell.run_cell(fixed.get(number, cell), store_history=True) for number, cell in enumerate(cells, 1)]
    return Answer(report, fixed, again[-1])


READ = {
    "a result": ("scores = nn.Linear(3, 2)(torch.randn(4, 3))", "a = scores.numpy()", "a = scores.detach().numpy()"),
    "given to NumPy": ("w = torch.ones(3, requires_grad=True) * 2", "m = np.mean(w)", None),
    "a list of numbers": (
        "values = [torch.ones((), requires_grad=True) * 2 for _ in range(3)]",
        "m = np.mean(values)",
        "m = np.mean([x.item() for x in values])",
    ),
    "a list of rows": (
        "rows = [torch.ones(2, requires_grad=True) * 2 for _ in range(3)]",
        "m = np.asarray(rows)",
        "m = np.asarray([x.detach() for x in rows])",
    ),
    "another list than that of the losses": (
        "rows, losses = [torch.ones(2, requires_grad=True) * 2] * 3, []\nloss = rows[0].sum()\nloss.backward()\nlosses.append(loss)",
        "m = np.asarray(rows)",
        "m = np.asarray([x.detach() for x in rows])",
    ),
}


@pytest.mark.parametrize("case", READ.values(), ids=READ)
def test_what_numpy_cannot_read(case: tuple[str, str, str | None], shell: InteractiveShell) -> None:
    before, cell, fixed = case
    if fixed is None:  # NumPy asks the tensor itself for its mean, and that works
        assert shell.run_cell(f"{IMPORTS}{before}").success
        return
    answer = asked(shell, IMPORTS + before, cell)
    assert answer.fixed == {2: fixed}
    assert answer.result.success


ON_GPU = """
class OnGpu(torch.Tensor):
    def numpy(self):
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host memory first.")
    def cpu(self):
        return self.as_subclass(torch.Tensor)
"""
"""Refuses NumPy, as a tensor on a GPU does, in code that is not the user's."""


def test_what_numpy_cannot_read_on_a_gpu(shell: InteractiveShell) -> None:
    names = {"torch": torch}
    exec(compile(ON_GPU, "<frozen gpu>", "exec"), names)
    shell.user_ns["there"] = torch.ones(3).as_subclass(names["OnGpu"])  # type: ignore[arg-type]
    answer = asked(shell, "a = there.numpy()")
    assert answer.fixed == {1: "a = there.detach().cpu().numpy()"}
    assert answer.report.verdict.startswith("can't convert cuda:0 device type tensor to numpy")
    assert answer.result.success


@pytest.mark.parametrize(
    ("value", "iterated", "fixed"),
    [
        ("[nn.Linear(8, 8) for _ in range(3)]", "self.layers", "nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])"),
        ("{'a': nn.Linear(8, 8)}", "self.layers.values()", "nn.ModuleDict({'a': nn.Linear(8, 8)})"),
        ("[nn.Sequential(nn.Linear(8, 8), nn.ReLU())]", "self.layers", "nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.ReLU())])"),
    ],
)
def test_modules_in_a_plain_container_stay_on_the_cpu(value: str, iterated: str, fixed: str, shell: InteractiveShell) -> None:
    net = IN_LIST.format(value=value, iterated=iterated)
    report, sources, _ = asked(shell, IMPORTS + FAKE_GPU, net, "net(x)")
    kind = "dict" if value.startswith("{") else "list"
    assert report.verdict.startswith(f"`Net.layers` is a plain {kind}: moving the model leaves the modules in it on the CPU")
    assert sources == {2: net.replace(value, fixed).rstrip("\n")}


@pytest.mark.parametrize(
    ("made", "cell", "fixed"),
    [
        ("net = nn.Linear(8, 2)", "out = net(x)", "net = nn.Linear(8, 2).to(device)"),
        ("net = nn.Sequential(nn.Linear(8, 2), nn.ReLU())", "out = net(x)", "net = nn.Sequential(nn.Linear(8, 2), nn.ReLU()).to(device)"),
        (
            "criterion = nn.CrossEntropyLoss(weight=torch.ones(8))",
            "loss = criterion(x, y)",
            "criterion = nn.CrossEntropyLoss(weight=torch.ones(8)).to(device)",
        ),
    ],
)
def test_a_module_that_nobody_moved(made: str, cell: str, fixed: str, shell: InteractiveShell) -> None:
    report, sources, _ = asked(shell, IMPORTS + FAKE_GPU, made, cell)
    assert sources == {2: fixed}
    assert f"is on the CPU, and what it is given is on {shell.user_ns['x'].device}" in report.verdict


def test_a_module_held_by_no_variable_is_moved_where_it_is_called(shell: InteractiveShell) -> None:
    report, sources, _ = asked(
        shell, IMPORTS + FAKE_GPU, "parts = {'loss': nn.CrossEntropyLoss(weight=torch.ones(8))}", "parts['loss'](x, y)"
    )
    assert sources == {3: "parts['loss'].to(device)(x, y)"}
    assert report.fix_state == "compiles"


def test_an_input_that_was_not_moved_is_the_input_s_fault(shell: InteractiveShell) -> None:
    made = "with FakeTensorMode(allow_non_fake_inputs=True):\n    net = nn.Linear(8, 2, device='meta')\n"
    made += "    net.weight = nn.Parameter(torch.empty(2, 8, device='cuda'), requires_grad=False)\n    net.bias = None\n"
    made += "here = torch.randn(4, 8)"
    report, sources, _ = asked(shell, IMPORTS + FAKE_GPU + made, "net(here)")
    assert sources == {2: "net(here.to('cuda:0'))"}
    assert "plain" not in report.verdict


def test_refused_memory_is_explained_by_what_is_alive(shell: InteractiveShell) -> None:
    before = "net = nn.Sequential(*(nn.Linear(500, 500) for _ in range(6)))\nopt = torch.optim.Adam(net.parameters())\n"
    before += "net(torch.randn(800, 500)).sum().backward()\nopt.step()\nkept = []"
    answer = asked(shell, IMPORTS + before, "for _ in range(2):\n    kept.append(net(torch.randn(800, 500)))\n    torch.empty(1 << 46)")
    report = answer.report
    assert report.verdict.startswith("Out of memory: 256.0 TiB refused · ")
    assert report.oom.location.source == "torch.empty(1 << 46)"
    sizes = report.oom.by_category
    weights = 6 * (500 * 500 + 500) * 4
    assert (sizes["parameter"], sizes["gradient"]) == (weights, weights)
    assert 2 * weights <= sizes["optimizer state"] <= 2 * weights + 6 * 2 * 64
    assert sizes["activation"] >= 5 * 800 * 500 * 4
    assert "kept" in [holder.variable.partition("[")[0] for holder in report.holders]
    assert report.net_bytes == 0
    assert not report.sites


def test_an_error_that_speaks_of_memory_only_by_the_way_is_none_of_refused_memory(shell: InteractiveShell) -> None:
    report, *_ = asked(shell, IMPORTS, "raise RuntimeError('no room at the inn')")
    assert report.instrument is None
    assert report.suggestion == "%%torchdebug"


def read_by_workers(shell: InteractiveShell, data: str, magic: str) -> Any:
    from IPython.utils.capture import capture_output

    with capture_output():
        shell.run_cell(IMPORTS + data, store_history=True)
        assert not shell.run_cell(f"{magic}batches = iter(loader)\nfirst = list(batches)", store_history=True).success
        if not magic:
            shell.run_cell("%torchdebug -o report", store_history=True)
    shell.user_ns.pop("batches")._shutdown_workers()
    return shell.user_ns.pop("report")


@pytest.mark.parametrize("magic", ["", "%%torchdebug -o report\n"])
def test_an_error_of_a_worker_is_explained_by_the_same_error_in_this_process(magic: str, shell: InteractiveShell) -> None:
    report = read_by_workers(shell, DATA.format(rows=4, many=9), magic)
    assert report.fix == "write `return len(self.x)`"
    assert report.edits
    assert "`Data.__len__` returns 9, and `self.x` has 8 items" in report.verdict, report.verdict


@pytest.mark.parametrize("magic", ["", "%%torchdebug -o report\n"])
def test_an_error_that_only_a_worker_raises_is_told_with_its_line(magic: str, shell: InteractiveShell) -> None:
    number = shell.execution_count
    alone = "        if torch.utils.data.get_worker_info(): raise OSError('no such picture')\n        return"
    report = read_by_workers(shell, DATA.format(rows=4, many=8).replace("        return self.x[i]", f"{alone} self.x[i]"), magic)
    assert (report.error, report.suggestion) == ("OSError: no such picture (in DataLoader worker 0)", "num_workers=0")
    assert report.stopped_at.cell == number
    assert report.stopped_at.source.endswith("raise OSError('no such picture')")


def test_a_failed_assertion_of_a_gpu_says_what_is_certain(shell: InteractiveShell) -> None:
    cell = "raise torch.AcceleratorError('CUDA error: device-side assert triggered')"
    report, *_ = asked(shell, IMPORTS, cell)
    assert report.verdict.startswith("In this line or one before it, the GPU met an index or a class out of range")
    assert "restart the kernel" in report.fix


PRECOMPUTED = """\
embed = nn.Embedding(20, 4)
features = embed(torch.randint(20, (64,)))
train_x, test_x = features[:48], features[48:]
net = nn.Linear(4, 1)
opt = torch.optim.SGD([*net.parameters(){also}], lr=0.1)
"""
TRAINED = """\
for rows in torch.arange(48).split(16):
    loss = net(train_x[rows]).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()"""


@pytest.mark.parametrize("magic", ["", "%%torchdebug -o report\n"])
def test_what_was_computed_before_the_loop_is_detached_where_it_is_made(magic: str, shell: InteractiveShell) -> None:
    from IPython.utils.capture import capture_output

    before = IMPORTS + PRECOMPUTED.format(also="")
    with capture_output():
        number = shell.execution_count
        shell.run_cell(before, store_history=True)
        shell.run_cell(magic + TRAINED, store_history=True)
        if not magic:
            shell.run_cell("%torchdebug -o report", store_history=True)
        report = shell.user_ns.pop("report")
        fixed = fixed_source(report)
        assert "`features` has a graph that was made before the loop" in report.verdict
        assert fixed[number] == before.replace("(64,)))", "(64,)))\nfeatures = features.detach()").rstrip("\n")
        shell.run_cell(fixed[number], store_history=True)
        assert shell.run_cell(TRAINED, store_history=True).success


def test_what_is_trained_is_not_detached(shell: InteractiveShell) -> None:
    report, fixed, _ = asked(shell, IMPORTS + PRECOMPUTED.format(also=", *embed.parameters()"), TRAINED)
    assert "`features` was computed once, before the loop, from what is trained" in report.verdict
    assert not fixed


LOADED = """\
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 4, 3), nn.BatchNorm1d(4), nn.Linear(4, 2)
    def forward(self, x):
        return self.head(self.norm(self.conv(x).mean((2, 3))))
net, data = Net(), [(torch.randn(3, 8, 8), 0) for _ in range(9)]
"""
PICTURE = """\
from PIL import Image
Image.fromarray((np.random.rand(8, 8, 4) * 255).astype("uint8"), "RGBA").save("picture.png")
def picture(path):
    img = np.array(Image.open(path))
    return torch.from_numpy(img).permute(2, 0, 1).float()[None] / 255
"""
POSITIONS = """\
class Positions(nn.Module):
    def __init__(self, width, longest=6, rate=0.0):
        super().__init__()
        self.drop = nn.Dropout(rate)
        self.register_buffer("pe", torch.ones(1, longest, width))
    def forward(self, x):
        pe = self.pe[:, :x.size(1)]
        return self.drop(x + pe)
class Net(nn.Module):
    def __init__(self, width, rate):
        super().__init__()
        self.embed = nn.Embedding(10, width)
        self.pe = Positions(width, rate=rate)
    def forward(self, ids):
        return self.pe(self.embed(ids))
net = Net(4, 0.1)
"""
PIXELS = "net, loss = nn.Sequential(nn.Linear(6, 6), nn.Sigmoid()), nn.BCELoss()\nx = torch.randint(256, (4, 6)).float()\n"
PROJECTION = """\
class Projection(nn.Module):
    def __init__(self):
        super().__init__()
        self.mod = nn.Sequential(nn.Linear(8, 4), nn.ReLU())
    def forward(self, x):
        return self.mod(x)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = Projection()
    def forward(self, pair):
        return self.head(pair[0])
net = Net()
"""
BRANCHES = """\
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.part, self.head = nn.Linear(4, 6), nn.Linear(12, 2)
    def forward(self, a, b):
        both = torch.cat((self.part(a), self.part(b)), 0)
        return self.head(both)
net = Net()
def score(a, b):
    return net(a, b).sum()
"""
MADE = {
    "a concatenation in an earlier line": ((BRANCHES, "score(torch.randn(3, 4), torch.randn(3, 4))"), "self.part(b)), -1)"),
    "numbers of another precision": (
        (
            BRANCHES.replace("(a), self.part(b)), 0", "(a.float()), self.part(b)), 1"),
            "score(torch.randn(3, 4), torch.randn(3, 4).double())",
        ),
        "return net(a, b.float()).sum()",
    ),
    "an input that is not flat": (
        (PROJECTION, "net((torch.randn(3, 2, 2, 2), 0))"),
        "        x = x.flatten(1)\n        return self.mod(x)",
    ),
    "a loader whose last batch is one row": (
        (LOADED, "loader = DataLoader(data, batch_size=4)", "for x, y in loader:\n    net(x)"),
        "batch_size=4, drop_last=True)",
    ),
    "a file with transparency": ((LOADED, PICTURE, "net.eval()(picture('picture.png'))"), "Image.open(path).convert('RGB')"),
    "a table that is too short": ((POSITIONS, "net(torch.zeros(2, 9, dtype=torch.long))"), "Positions(4, rate=rate, longest=9)"),
    "pixels as targets of probabilities": ((PIXELS, "loss(net(x / 255), x)"), "loss(net(x / 255), x / 255)"),
    "targets from -1 to 1": ((PIXELS, "x = x / 127.5 - 1\nloss(net(x), x)"), "loss(net(x), (x + 1) / 2)"),
    "logits as probabilities": ((PIXELS, "out = net[0](x)\nloss(out, x / 255)"), "loss(out.sigmoid(), x / 255)"),
}


@pytest.mark.parametrize("case", MADE.values(), ids=MADE)
def test_what_another_line_made_is_changed_there(
    case: tuple[tuple[str, ...], str], shell: InteractiveShell, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    cells, wanted = case
    monkeypatch.chdir(tmp_path)
    report, fixed, result = asked(shell, IMPORTS + cells[0], *cells[1:])
    assert wanted in "\n".join(fixed.values()), report.fix
    assert report.fix_state == "verified"
    assert result.success


BLOBS = """\
x = torch.randn(120, 2); y = (x[:, 0] > 0).float()
net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 2))
loss_fn = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
"""
WITHOUT_GRAPH = """\
for epoch in range(30):
    logits = net(x)
    classes = torch.softmax(logits, dim=1).argmax(dim=1).type(torch.float32)
    loss = loss_fn(classes, y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_a_loss_without_a_graph_is_computed_from_what_has_one(shell: InteractiveShell) -> None:
    answer = asked(shell, IMPORTS + BLOBS, WITHOUT_GRAPH)
    assert answer.report.fix_state == "verified", answer.report.fix
    assert [edit.new for edit in answer.report.edits] == ["loss = loss_fn(logits, y.long())"]
    assert answer.result.success


OVERLAP = """\
def dice(scores, targets):
    return 1 - 2 * (scores * targets).sum() / (scores + targets).sum()
"""


def test_a_loss_of_one_hot_classes_is_computed_from_their_softmax(shell: InteractiveShell) -> None:
    classes = "torch.softmax(logits, dim=1).argmax(dim=1).type(torch.float32)"
    one_hot = WITHOUT_GRAPH.replace(classes, "torch.eye(2)[logits.argmax(dim=1)]")
    answer = asked(shell, IMPORTS + BLOBS + OVERLAP, one_hot.replace("loss_fn(classes, y)", "dice(classes, torch.eye(2)[y.long()])"))
    assert [edit.new for edit in answer.report.edits] == ["loss = dice(logits.softmax(dim=1), torch.eye(2)[y.long()])"]
    assert answer.result.success


KEEPS = """\
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last, self.cache = nn.Linear(4, 4), nn.Linear(4, 1), {start}
    def forward(self, x):
        if self.cache is None:
            self.cache = self.first(x)
        return self.last(self.cache.tanh())
net = Net()
x, y = torch.randn(8, 4), torch.randn(8, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
"""


def test_a_value_that_a_module_keeps_is_computed_anew_in_each_step(shell: InteractiveShell) -> None:
    steps = "for step in range(4):\n    loss = ((net(x) - y) ** 2).mean()\n    optimizer.zero_grad()\n    loss.backward()\n"
    steps += "    optimizer.step()\n"
    answer = asked(shell, IMPORTS + KEEPS.format(start="None"), steps)
    assert (answer.report.fix, answer.report.fix_state) == ("run `net.cache = None` at the start of each step", "verified")
    assert "`net.cache` keeps the graph of an earlier step" in answer.report.verdict
    assert answer.result.success


STATE = """\
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(4, 8), nn.Linear(8, 1)
        self.h, self.c = torch.zeros(1, 2, 8), torch.zeros(1, 2, 8)
    def forward(self, x):
        out, _ = self.lstm(x, (self.h, self.c))
        (self.h, self.c) = _
        return self.head(out)
net = Net()
x, y = torch.randn(6, 5, 2, 4), torch.randn(6, 5, 2, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
"""


def test_what_only_a_tape_shows_is_seen_in_a_second_run(shell: InteractiveShell) -> None:
    steps = "for step in range(6):\n    loss = ((net(x[step]) - y[step]) ** 2).mean()\n    optimizer.zero_grad()\n    loss.backward()\n"
    answer = asked(shell, IMPORTS + STATE, steps + "    optimizer.step()\n")
    assert "`net.h`, `net.c` keep the graph of an earlier step" in answer.report.verdict
    assert answer.report.backward_count > 0  # of the second run
    assert answer.result.success


@pytest.mark.parametrize("name", ["_init_", "_init__", "init"])
def test_a_constructor_of_another_name_makes_no_layers(name: str, shell: InteractiveShell) -> None:
    net = f"class Net(nn.Module):\n    def {name}(self):\n        super().{name}()\n        self.last = nn.Linear(4, 1)\n"
    answer = asked(shell, IMPORTS + net + "net = Net()", "optimizer = torch.optim.SGD(net.parameters(), lr=0.1)")
    assert f"`Net.{name}` should be `__init__`" in answer.report.verdict
    assert answer.report.fix_state == "verified"
    assert answer.result.success


SAMPLES = """\
class ToTensor:
    def __call__(self, sample):
        return 0
        return {"input": torch.from_numpy(sample["input"]).float()}

class Pictures(Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, place):
        return ToTensor()({"input": np.ones((3, 4, 4), dtype="float32")})
"""
"""Rebuilt from https://github.com/theodumont/superpixels-segmentation/issues/1."""


def test_a_statement_that_was_left_over_is_removed_where_the_cell_then_runs(shell: InteractiveShell) -> None:
    read = 'for sample in DataLoader(Pictures(), batch_size=4):\n    pictures = sample["input"].flatten(1)'
    answer = asked(shell, IMPORTS, SAMPLES, read)
    assert answer.report.fix.startswith("remove `return 0` from ToTensor.__call__()")
    assert answer.report.fix_state == "verified"
    assert answer.result.success
    assert shell.user_ns["pictures"].shape == (4, 48)


def test_a_statement_that_was_left_over_stays_where_the_error_does(shell: InteractiveShell) -> None:
    harmless = 'def weight():\n    return 2.0\n    print("a test")'
    answer = asked(shell, IMPORTS, harmless, 'x = torch.ones(2) * weight()\nraise RuntimeError("no data")')
    assert not answer.report.edits


ANGLE = """\
class Rotation(nn.Module):
    def __init__(self):
        super().__init__()
        self.angle = nn.Parameter(torch.tensor(0.0))
        self.cos, self.sin = torch.ones(1), torch.zeros(1)
        self.cos = torch.cos(self.angle)
        self.sin = torch.sin(self.angle)
        self.scale = torch.exp(self.angle)
    def forward(self, x):
        return self.scale * x

net = Rotation()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
"""
"""After https://discuss.pytorch.org/t/26780."""


def test_what_a_constructor_computes_of_parameters_is_computed_in_the_forward(shell: InteractiveShell) -> None:
    step = "optimizer.zero_grad()\n    loss = (net(torch.ones(4)) - 2).pow(2).mean()\n    loss.backward()\n    optimizer.step()"
    answer = asked(shell, IMPORTS, ANGLE, f"for number in range(20):\n    {step}")
    assert [edit.new for edit in answer.report.edits] == ["self.scale = torch.exp(self.angle)"]
    assert answer.result.success
    assert float(shell.user_ns["loss"]) < 0.1


FIT = "torch.manual_seed(0)\nnet, x, y = nn.Linear(4, 1), torch.randn(32, 4), torch.randn(32, 1)\n"
STEPS = "for step in range(3):\n    loss = loss(net(x), y)\n    loss.backward()"
OF_AN_ARGUMENT = (
    "def fit(loss):\n    for step in range(3):\n        loss = loss(net(x), y)\n        loss.backward()\n    return loss.item()"
)
STACKED = """\
Layer = nn.Linear

class Block(nn.Module):
    def __init__(self, layer, size):
        super().__init__()
        self.layers = nn.Sequential(*[layer(size, size) for _ in range(2)])
    def forward(self, x):
        return self.layers(x)
"""
RESULTS_WITH_THE_NAME_OF_WHAT_IS_CALLED = {
    "in a loop": (
        (FIT + "loss = nn.MSELoss()", STEPS),
        "`loss` is a Tensor here",
        ["loss = criterion(net(x), y)", "criterion = nn.MSELoss()"],
    ),
    "of an argument": (
        (FIT + OF_AN_ARGUMENT, "fit(nn.MSELoss())"),
        "`loss` is a Tensor here",
        ["loss_value = loss(net(x), y)", "loss_value.backward()", "return loss_value.item()"],
    ),
    "of a class that is an argument": (
        ("def stack(layer):\n    for size in (2, 2):\n        layer = layer(size, size)\n    return layer\n", "stack(nn.Linear)"),
        "`layer` is a Linear here",
        ["layer_value = layer(size, size)", "return layer_value"],
    ),
    "of a class": (  # https://stackoverflow.com/questions/68011125
        (STACKED, "block = Layer\nparts = []\nfor size in (2, 3):\n    block = Block(block, size)\n    parts.append(block)"),
        "`block` is a Block here",
        ["block = Block(block_class, size)", "block_class = Layer"],
    ),
}


@pytest.mark.parametrize("case", RESULTS_WITH_THE_NAME_OF_WHAT_IS_CALLED.values(), ids=RESULTS_WITH_THE_NAME_OF_WHAT_IS_CALLED)
def test_a_result_with_the_name_of_what_is_called(case: tuple[tuple[str, str], str, list[str]], shell: InteractiveShell) -> None:
    (setup, failing), sentence, new = case
    answer = asked(shell, IMPORTS + setup, failing)
    assert sentence in answer.report.verdict
    assert [edit.new for edit in answer.report.edits] == new
    assert answer.report.fix_state == "verified"
    assert answer.result.success


def test_a_variable_with_the_name_of_a_function_of_python(shell: InteractiveShell) -> None:
    answer = asked(shell, "max = 3.0", "best = max([1, 2])")
    assert "no longer Python's own function" in answer.report.verdict
    assert answer.report.fix == "give the variable another name, and run `del max` once"
    assert not answer.report.edits


CONSTRUCTED = """\
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        fc = nn.Linear(4, 1)
    def forward(self, x):
        return self.fc(x)
"""
LOADED = """\
loader = DataLoader(torch.utils.data.TensorDataset(torch.ones(8, 4), torch.ones(8)), batch_size=4)
linear = nn.Linear(4, 1)
"""
WITHOUT_A_NAME = {
    "a variable of the constructor": (CONSTRUCTED, "out = Net()(torch.ones(2, 4))", "self.fc = nn.Linear(4, 1)"),
    "the key of a state": (
        "net = nn.Linear(2, 2)\nstate = {'model': net.state_dict(), 'epoch': 3}",
        "net.load_state_dict(state['state_dict'])",
        "net.load_state_dict(state['model'])",
    ),
    "a module": ("import pprint", "pprint([1])", "pprint.pprint([1])"),
    "a number before each item": (LOADED, "for x, y in enumerate(loader):\n    out = linear(x)", "for x, y in loader:"),
    "a comma behind a data set": (  # https://github.com/xu-ji/IIC/issues/96
        DATA.format(rows=4, many=8) + "data = Data(),\n",
        "for batch in DataLoader(data, batch_size=4):\n    print(batch.shape)",
        "data = Data()",
    ),
    "a number for its range": ("sizes = [1, 2]", "for i in len(sizes):\n    size = sizes[i]", "for i in range(len(sizes)):"),
    "an option": ("", "linear = nn.Linear(in_feature=4, out_features=2)", "linear = nn.Linear(in_features=4, out_features=2)"),
    "a scheduler of a model": (
        "net = nn.Linear(2, 1)\noptimizer = torch.optim.SGD(net.parameters(), lr=0.1)",
        "scheduler = torch.optim.lr_scheduler.StepLR(net, step_size=3)",
        "scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3)",
    ),
    "what loading returns": (
        "net = nn.Linear(2, 1)\nstate = net.state_dict()",
        "net = net.load_state_dict(state)\nout = net(torch.ones(1, 2))",
        "net.load_state_dict(state)",
    ),
    "what a method without a result returns": (
        "class Counted(nn.Linear):\n    def begin(self):\n        self.count = 0\nnet = Counted(2, 1)",
        "net = net.begin()\nout = net(torch.ones(1, 2))",
        "net.begin()",
    ),
    "parts without parentheses": (LOADED, "for i, x, y in enumerate(loader):\n    out = linear(x)", "for i, (x, y) in enumerate(loader):"),
}


@pytest.mark.parametrize("case", WITHOUT_A_NAME.values(), ids=WITHOUT_A_NAME)
def test_a_name_that_is_not_there(case: tuple[str, str, str], shell: InteractiveShell) -> None:
    setup, failing, new = case
    answer = asked(shell, IMPORTS + setup, failing)
    assert [edit.new for edit in answer.report.edits] == [new]
    assert answer.report.fix_state in {"verified", "compiles"}
    assert answer.result.success


def test_keys_that_are_there_are_listed(shell: InteractiveShell) -> None:
    answer = asked(shell, "sizes = {'in': 1, 'out': 2}", "size = sizes['hidden']")
    assert "`sizes` has no key `'hidden'`: it has `'in'`, `'out'`" in answer.report.verdict
    assert not answer.report.edits


NUMBERS_FOR_LOSSES = {
    "of a function of Python's": ("import math", "loss = math.sqrt(w * 4)\nloss.backward()", "loss = torch.sqrt(w * 4)"),
    "added up": ("loss = 0", "for i in range(2):\n    loss += (w * i).item()\nloss.backward()", "loss += w * i"),
}


@pytest.mark.parametrize("case", NUMBERS_FOR_LOSSES.values(), ids=NUMBERS_FOR_LOSSES)
def test_a_number_for_a_loss(case: tuple[str, str, str], shell: InteractiveShell) -> None:
    setup, failing, new = case
    answer = asked(shell, f"{IMPORTS}w = torch.ones((), requires_grad=True)\n{setup}", failing)
    assert "has left the graph behind" in answer.report.verdict
    assert [edit.new for edit in answer.report.edits] == [new]
    assert answer.result.success
    assert shell.user_ns["w"].grad is not None


SET_LATER = """\
class Meter:
    def __init__(self):
        mean = float(0)
    def finish(self):
        self.mean = 1.0
"""
FOR_OTHER_REASONS = {
    "a counter that is used as one": ("", "for i, batch in enumerate([(1, 2), (3, 4)]):\n    name = 'step ' + i"),
    "a key that is near by chance": ("history = {'val_loss': []}", "history['train_loss'].append(1.0)"),
    "a key that was not set": ("counts = {'cats': 0}", "counts['dogs'] += 1"),
    "an entry that is missing": ("config = {'sgd': {'lr': 0.1}}", "config = config.get('adam')\nrate = config['lr']"),
    "an attribute that another method sets": (SET_LATER, "mean = Meter().mean"),
    "a function that was not given": ("def scaled(x, norm=None):\n    norm = norm(x)\n    return norm", "y = scaled(torch.ones(2))"),
    "a number in the place of a loader": ("def fit(loader):\n    for x, y in loader:\n        pass", "fit(32)"),
    "an option of a function in C": ("", "x = torch.tensor([1.0], require_grad=True)"),
}


@pytest.mark.parametrize("case", FOR_OTHER_REASONS.values(), ids=FOR_OTHER_REASONS)
def test_no_other_name_is_put_where_another_cause_is_near(case: tuple[str, str], shell: InteractiveShell) -> None:
    setup, failing = case
    answer = asked(shell, IMPORTS + setup, failing)
    assert not answer.report.edits
    assert answer.report.problems == ()
