"""What the plants of memtrace share: a set-up with a small model, and the expectations of a leak, of a graph that grows, and of a healthy loop."""

from __future__ import annotations

import math
from typing import Any, Final

from tests.plants.plant import HERE, Plant, between, has, starts

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


def plant(name: str, cell: str, expect: dict[str, Any], **fields: Any) -> Plant:
    """Make a plant; where a line is marked, and no other attribute is to name it, `growth.location` is."""
    return Plant(name=name, instrument="memtrace", cell=cell, expect=expect, **{"setup": SETUP, **fields})


def leak(
    name: str,
    cell: str,
    holder: str,
    *,
    bytes_per_iteration: tuple[float, float],
    fix: str = "",
    raises: str = "",
    others: tuple[str, ...] | None = None,
    **expect: Any,
) -> Plant:
    """Make a plant whose loop grows by so many bytes, which a variable keeps whose path begins with `holder`. A line may be marked."""
    growth = {"holder": starts(holder), "bytes_per_iteration": between(*bytes_per_iteration), "fix": has(fix)}
    if others is not None:
        growth["others"] = others
    if "# <- here" in cell:
        growth["location"] = HERE
    return plant(name, cell, {f"growth.{field}": value for field, value in growth.items()} | expect, raises=raises)


def graph(name: str, cell: str, holder: str, fix: str = "", **fields: Any) -> Plant:
    """Make a plant in whose loop only the graph grows, kept by the variable `holder`."""
    growth = {"holder": holder, "nodes_per_iteration": between(1, math.inf), "fix": has(fix)}
    if "# <- here" in cell:
        growth["location"] = HERE
    return plant(name, cell, {f"graph_growth.{field}": value for field, value in growth.items()} | {"growth": None}, **fields)


def healthy(name: str, cell: str, **expect: Any) -> Plant:
    """Make a plant in which nothing grows."""
    return plant(name, cell, {"growth": None, "graph_growth": None, **expect})
