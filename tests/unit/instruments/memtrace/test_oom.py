"""When memory is refused: where, of what kind, what was alive, and what would help."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from torchdebug_magics.instruments.memtrace.ledger.op_tracer import refused_bytes

SETUP = """import torch
from torch import nn
torch.manual_seed(0)
net = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(6)))
opt = torch.optim.Adam(net.parameters())
x = torch.randn(128, 64)
HUGE = 1 << 46
def step(a):
    opt.zero_grad()
    net(a).square().mean().backward()
    opt.step()
"""


def test_in_the_first_iteration(observe: Any) -> None:
    seen = observe("memtrace", f"{SETUP}out = net(x)\nbig = torch.empty(HUGE)\n")
    assert isinstance(seen.error, RuntimeError)
    oom = seen.report.oom
    assert (oom.asked_bytes, oom.kind, oom.iteration) == (1 << 48, "sizing", 1)
    assert oom.location.source == "big = torch.empty(HUGE)"
    assert oom.op.startswith("aten.empty")
    assert sum(oom.by_category.values()) == oom.live_bytes
    assert "activation" in oom.by_category
    assert seen.report.verdict.startswith("Out of memory: 256.0 TiB refused in the first iteration")
    assert seen.report.verdict.endswith("shrink this allocation: freeing live tensors would not make room for it")
    whats = [one.what for one in oom.advice]
    assert whats[0].startswith("half the batch")
    assert any("checkpointing each of the 6 blocks" in what for what in whats)


def test_outside_any_loop(observe: Any) -> None:
    oom = observe("memtrace", "import torch\nkept = torch.ones(100)\ntorch.empty(1 << 46)").report.oom
    assert (oom.iteration, oom.kind, oom.phase) == (0, "sizing", "other")


def test_in_a_later_iteration_in_which_nothing_grew(observe: Any) -> None:
    body = f"{SETUP}for i in range(6):\n    step(x)\n    if i == 4:\n        torch.empty(HUGE)\n"
    report = observe("memtrace", body).report
    assert (report.oom.kind, report.oom.iteration) == ("sizing", 5)
    assert "though nothing grew" in report.verdict


def test_after_a_leak(observe: Any) -> None:
    body = f"{SETUP}outs = []\nfor i in range(9):\n    outs.append(net(x))\n    if i == 7:\n        torch.empty(HUGE)\n"
    report = observe("memtrace", body).report
    assert (report.oom.kind, report.oom.iteration) == ("leak", 8)
    assert "`outs" in report.oom.best.what
    assert report.oom.best.saved_bytes >= 7 * 128 * 64 * 4


INSIDE = {
    "backward": (
        """class Bad(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a): return a * 1
    @staticmethod
    def backward(ctx, slope): return torch.empty(HUGE)
Bad.apply(net(x)).sum().backward()""",
        "backward",
    ),
    "forward": (
        """class Bad(nn.Module):
    def forward(self, a): return torch.empty(HUGE)
nn.Sequential(net, Bad())(x)""",
        "forward",
    ),
}


@pytest.mark.parametrize("where", INSIDE)
def test_inside(observe: Any, where: str) -> None:
    code, phase = INSIDE[where]
    oom = observe("memtrace", f"{SETUP}{code}").report.oom
    assert (oom.phase, oom.asked_bytes) == (phase, 1 << 48)
    assert "HUGE" in oom.location.source


def test_one_that_led_to_another_error(observe: Any) -> None:
    body = f"{SETUP}try:\n    torch.empty(HUGE)\nexcept RuntimeError as error:\n    raise ValueError('no') from error"
    assert observe("memtrace", body).report.oom is not None


def test_one_that_was_caught_is_no_finding(observe: Any) -> None:
    body = f"""{SETUP}
size = HUGE
while True:
    try:
        got = torch.empty(size)
        break
    except RuntimeError:
        size = 100
for _ in range(3):
    step(x)
"""
    seen = observe("memtrace", body)
    assert seen.error is None
    assert seen.report.oom is None
    assert not seen.report.verdict.startswith("Out of memory")


def test_another_error_after_one_that_was_caught_is_no_finding(observe: Any) -> None:
    body = f"{SETUP}try:\n    torch.empty(HUGE)\nexcept RuntimeError:\n    pass\n1 / 0"
    assert observe("memtrace", body).report.oom is None


@pytest.mark.parametrize(
    ("error", "wanted"),
    [
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 123 bytes. Error code 12"), 123),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has"), 3 << 29),
        (MemoryError(), 0),
        (RuntimeError("CUDA error: out of memory"), 0),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), None),
        (ValueError("the list"), None),
    ],
)
def test_what_was_asked_for(error: Exception, wanted: int | None) -> None:
    assert refused_bytes(error) == wanted
