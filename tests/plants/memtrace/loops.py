"""What the plants of memtrace share: set-ups with a small model, and the expectations of a leak, a growing graph and a healthy loop."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

from tests.plants.plant import HERE, Plant, between, has, starts

if TYPE_CHECKING:
    from collections.abc import Callable

SETUP: Final = """\
import torch
from torch import nn
import torch.nn.functional as F
from collections import deque, defaultdict
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 10))
opt = torch.optim.Adam(net.parameters())
x, y = torch.randn(32, 64), torch.randint(10, (32,))

def batches(count=12, size=32):
    for _ in range(count):
        yield torch.randn(size, 64), torch.randint(10, (size,))

def learn(a, b):
    opt.zero_grad()
    loss = F.cross_entropy(net(a), b)
    loss.backward()
    opt.step()
    return loss
"""
STEP: Final = """\
    opt.zero_grad()
    loss = F.cross_entropy(net(a), b)
    loss.backward()
    opt.step()
"""
"""The body of a training loop ``for a, b in batches():``."""
UNCOLLECTED: Final = f"{SETUP}\nimport gc; gc.disable()\n"
"""Without garbage collection, as on a GPU, whose memory does not make it run."""

KEPT: Final = 32 * 128 * 4
"""Bytes of one activation of the hidden layer."""
OUT: Final = 32 * 10 * 4
"""Bytes of one output."""
ALL: Final = KEPT * 8
"""Bytes that the graph of one forward keeps, at most."""


def plant(name: str, expect: dict[str, Any], **fields: Any) -> Callable[[str], Plant]:
    """Make a plant of a cell. A marked line is the location of the finding, unless `expect` has HERE for another attribute."""
    finding = next(iter(expect)).partition(".")[0]

    def made(cell: str) -> Plant:
        is_finding = "# <- here" in cell and HERE not in expect.values()
        located = {f"{finding}.location": HERE} if is_finding else {}
        return Plant(name=name, instrument="memtrace", cell=cell, expect=expect | located, **{"setup": SETUP, **fields})

    return made


def growth(holder: str, low: float, high: float, fix: str = "") -> dict[str, Any]:
    """Expect a loop that grows by so many bytes an iteration, which are kept by a variable whose path begins with `holder`."""
    return {"growth.holder": starts(holder), "growth.bytes_per_iteration": between(low, high), "growth.fix": has(fix)}


def graph_growth(holder: str, fix: str) -> dict[str, Any]:
    """Expect a loop in which only the graph grows, kept by the variable `holder`."""
    nodes = between(1, math.inf)
    return {"graph_growth.holder": holder, "graph_growth.nodes_per_iteration": nodes, "graph_growth.fix": has(fix), "growth": None}


def healthy(name: str, expect: dict[str, Any] | None = None, **fields: Any) -> Callable[[str], Plant]:
    """Make a plant of a cell in which nothing grows."""
    return plant(name, {"growth": None, "graph_growth": None, **(expect or {})}, **fields)
