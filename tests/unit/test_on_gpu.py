"""On a GPU: faults are named as on the CPU, healthy cells stay as they are, and every fix is applied."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch

from torchdebug_magics import fixed_source

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
IMPORTS = "import torch\nfrom torch import nn\ntorch.manual_seed(0)\n"
STEP = "    opt.zero_grad()\n    loss = {loss}\n    loss.backward()\n    opt.step()\n"
MODEL = "net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, {width})).cuda()\nopt = torch.optim.SGD(net.parameters(), lr=0.1)\n"
X = "x = torch.randn(64, 8, device='cuda')\n"


class Case(NamedTuple):
    before: str
    cell: str
    says: str
    """A part of the verdict."""
    fixed: str | None
    """A part of the source with the fix applied; None where the fix is advice."""


FAILING = {
    "input on the CPU": Case("net = nn.Linear(8, 4).cuda()\nx = torch.randn(2, 8)", "net(x)", "`input` is on cpu", "net(x.to('cuda:0'))"),
    "state made in the forward": Case(
        "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n        self.rnn = nn.GRU(8, 4)\n"
        "    def forward(self, x):\n        h = torch.zeros(1, x.size(1), 4)\n        return self.rnn(x, h)[0]\nnet = Net().cuda()",
        "net(torch.randn(3, 2, 8, device='cuda'))",
        "`h` is on cpu",
        "h.to('cuda:0')",
    ),
    "layers in a list": Case(
        "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n        self.out = nn.Linear(8, 8)\n"
        "        self.layers = [nn.Linear(8, 8)]\n    def forward(self, x):\n        for layer in self.layers:\n            x = layer(x)\n"
        "        return self.out(x)\nnet = Net().cuda()",
        "net(torch.randn(2, 8, device='cuda'))",
        "`Net.layers` is a plain list",
        "nn.ModuleList([nn.Linear(8, 8)])",
    ),
    "a model that nobody moved": Case("net = nn.Linear(8, 4)\n" + X, "net(x)", "`net` is on the CPU", "nn.Linear(8, 4).to('cuda:0')"),
    "weights of a loss": Case(
        MODEL.format(width=3) + X + "y = torch.randint(0, 3, (64,), device='cuda')\nloss_of = nn.CrossEntropyLoss(weight=torch.ones(3))",
        "loss_of(net(x), y)",
        "`loss_of` is on the CPU",
        "nn.CrossEntropyLoss(weight=torch.ones(3)).to('cuda:0')",
    ),
    "halves": Case(MODEL.format(width=3) + X, "net(x.half())", "float32 weights, gets", "x.half().float()"),
    "NumPy": Case(
        MODEL.format(width=3) + X, "best = net(x).argmax(1).numpy()", "can't convert cuda:0", ".argmax(1).detach().cpu().numpy()"
    ),
    "classes on the CPU": Case(
        MODEL.format(width=3) + X + "y = torch.randint(0, 3, (64,))",
        "nn.functional.cross_entropy(net(x), y)",
        "is on cpu",
        "y.to('cuda:0')",
    ),
}


def _run(shell: InteractiveShell, *cells: str) -> tuple[Any, Any]:
    """(the report that the cells keep as ``report``, the result of the last one)."""
    from IPython.utils.capture import capture_output

    with capture_output():
        results = [shell.run_cell(cell, store_history=True) for cell in cells]
    return shell.user_ns.pop("report", None), results[-1]


@pytest.mark.parametrize("case", FAILING.values(), ids=FAILING)
def test_what_failed_is_explained_and_the_fix_runs(case: Case, shell: InteractiveShell) -> None:
    number = shell.execution_count
    cells = (IMPORTS + case.before, case.cell)
    report, _ = _run(shell, *cells, "%torchdebug -o report")
    assert case.says in report.verdict
    fixed = fixed_source(report)
    assert case.fixed is not None
    assert any(case.fixed in source for source in fixed.values()), fixed
    _, result = _run(shell, *(fixed.get(number + at, cell) for at, cell in enumerate(cells)))
    assert result.success


TRAINED = {
    "nan": Case(
        MODEL.format(width=1) + X,
        "for _ in range(9):\n" + STEP.format(loss="torch.log(net(x).clamp(min=0)).mean()"),
        "Inf from log in forward · step 0",
        "clamp(min=1e-6)",
    ),
    "kept losses": Case(
        MODEL.format(width=1) + X + "losses = []",
        "for _ in range(40):\n" + STEP.format(loss="net(x).square().mean()") + "    losses.append(loss)",
        "`losses` keeps each iteration's graph",
        "losses.append(loss.detach())",
    ),
    "scaled gradients are clipped": Case(
        MODEL.format(width=1) + X + "scaler = torch.amp.GradScaler('cuda')",
        "for _ in range(30):\n    opt.zero_grad()\n    with torch.autocast('cuda', dtype=torch.float16):\n"
        "        loss = net(x).square().mean()\n    scaler.scale(loss).backward()\n"
        "    nn.utils.clip_grad_norm_(net.parameters(), 1.0)\n    scaler.step(opt)\n    scaler.update()",
        "gradients are clipped",
        "scaler.unscale_(opt)",
    ),
}


@pytest.mark.parametrize("case", TRAINED.values(), ids=TRAINED)
def test_what_a_training_does_wrong_is_found(case: Case, shell: InteractiveShell) -> None:
    report, _ = _run(shell, IMPORTS + case.before, f"%%torchdebug -o report\n{case.cell}")
    assert case.says in report.verdict
    assert case.fixed is not None
    assert any(case.fixed in source for source in fixed_source(report).values())


def test_a_healthy_training_is_bit_equal(shell: InteractiveShell) -> None:
    body = MODEL.format(width=3) + "x, y = torch.randn(64, 8, device='cuda'), torch.randint(0, 3, (64,), device='cuda')\n"
    body = f"torch.manual_seed(0)\n{body}for _ in range(30):\n" + STEP.format(loss="nn.functional.cross_entropy(net(x), y)")
    _run(shell, IMPORTS, body)
    plain = [parameter.detach().clone() for parameter in shell.user_ns["net"].parameters()]
    report, _ = _run(shell, f"%%torchdebug -o report\n{body}")
    assert all(torch.equal(old, new) for old, new in zip(plain, shell.user_ns["net"].parameters(), strict=True))
    assert report.status == "good", report.verdict


def test_memory_that_was_refused_is_explained_afterwards(shell: InteractiveShell) -> None:
    cell = "h = net(x)\nh.sum().backward()\nbig = torch.empty(1 << 40, dtype=torch.uint8, device='cuda')"
    report, _ = _run(shell, IMPORTS + MODEL.format(width=4) + X, cell, "%torchdebug -o report")
    assert report.verdict.startswith("Out of memory: 1.0 TiB refused · ")
    assert report.oom.by_category["parameter"] == (8 * 16 + 16 + 16 * 4 + 4) * 4
    assert any(device.device == "cuda:0" for device in report.devices)


CHILD = """
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
for cell in {cells!r}:
    shell.run_cell(cell, store_history=True)
print("@@", shell.user_ns["report"].verdict, shell.user_ns["report"].fix)
"""


def _in_child(*cells: str) -> str:
    """The verdict of the report; what they do to CUDA ends with their process."""
    code = CHILD.format(cells=["%load_ext torchdebug_magics", *cells])
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    return next((line for line in run.stdout.splitlines() if line.startswith("@@")), run.stdout + run.stderr)


@pytest.mark.parametrize(("above", "below"), [("", "%torchdebug -o report"), ("%%torchdebug -o report\n", "None")])
def test_after_a_failed_assertion_only_what_is_certain_is_said(above: str, below: str) -> None:
    before = IMPORTS + MODEL.format(width=3) + X + "y = torch.randint(1, 4, (64,), device='cuda')"
    body = "for _ in range(3):\n" + STEP.format(loss="nn.functional.cross_entropy(net(x), y)") + "    print(loss.item())"
    said = _in_child(before, above + body, below)
    assert "the GPU met an index or a class out of range" in said
    assert "restart the kernel" in said


def test_a_generator_that_came_up_in_the_first_run_is_set_back() -> None:
    body = "x = torch.randn(4, 8, device='cuda')\nprint(x.sum().item())"
    said = _in_child("import torch\nfrom torch import nn", f"%%deterministic --verify -o report\n{body}")
    assert said.startswith("@@")
    assert "Different" not in said
