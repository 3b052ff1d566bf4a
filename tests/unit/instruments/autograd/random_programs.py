"""Small training programs at random: modules, writes in place, detach, several backwards, all kinds of optimizers."""

from __future__ import annotations

import random

__all__ = ["program"]

_HEAD = """\
import random
import torch
from torch import nn
import torch.nn.functional as F
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint
random.seed({seed})
torch.manual_seed({seed})
log, refs, freed = [], [], []
layers = nn.ModuleList([{layers}])
extra = nn.Parameter(torch.randn(6))
optimizer = {optimizer}

def note(loss=None):
    every = [*layers.parameters(), extra]
    log.append([None if p.grad is None else p.grad.clone() for p in every])
    log.append([p._version for p in every] + [b._version for b in layers.buffers()])
    log.append(None if loss is None else loss.detach().clone())

def step(x):
    h = [x]
"""
_LAYERS = (
    "nn.Linear(6, 6)",
    "nn.Sequential(nn.Linear(6, 6), nn.ReLU(inplace=True))",
    "nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Dropout(0.3))",
    "nn.BatchNorm1d(6)",
    "nn.LayerNorm(6)",
    "nn.RNNCell(6, 6)",
)
_OPTIMIZERS = (
    "torch.optim.SGD([*layers.parameters(), extra], lr=0.1, momentum=0.9)",
    "torch.optim.SGD([*layers.parameters()], lr=0.1, foreach=True)",
    "torch.optim.Adam([*layers.parameters(), extra], lr=0.01, foreach=True)",
    "torch.optim.Adam([*layers.parameters(), extra], lr=0.01, fused=True)",
    "torch.optim.AdamW([{'params': layers.parameters()}, {'params': [extra], 'lr': 0.1}], lr=0.01)",
    "torch.optim.RMSprop(layers.parameters(), lr=0.01, foreach=False)",
)
_PURE = (
    "h.append(layers[{i}](h[{a}]))",
    "h.append(layers[{i}](h[{a}]))",
    "h.append(checkpoint(layers[{i}], h[{a}], use_reentrant=False))",
    "h.append(h[{a}] * h[{b}])",
    "h.append(h[{a}] * extra + h[{b}])",
    "h.append(h[{a}].tanh())",
    "h.append(h[{a}].softmax(-1))",
    "h.append(torch.cat([h[{a}][:, :3], h[{b}][:, 3:]], 1))",
    "h.append(h[{a}].sigmoid().clamp(max=0.9))",
    "h.append(h[{a}].detach() + h[{b}])",
    "h.append(F.dropout(h[{a}], 0.2))",
    "h[{a}] = h[{a}].view(2, -1).view(-1, 6)",
)
_RISKY = (
    "h[{a}] += 1",
    "h[{a}].mul_(0.5)",
    "h[{a}][0] = 0",
    "h[{a}][:, :2].add_(h[{b}][:, 2:4])",
    "F.relu_(h[{a}])",
    "h[{a}].data.mul_(0.9)",
    "h[{a}].chunk(2, 1)[0].neg_()",
    "h[{a}] = h[{a}].detach().requires_grad_()",
    "h[{a}].register_hook(lambda g: g * 0.5) if h[{a}].requires_grad else None",
    "h[{a}].retain_grad() if h[{a}].requires_grad else None",
)
_GRADLESS = ("extra.mul_(0.99)", "layers[{i}](h[{a}])", "h[{a}].add_(0.1)", "h.append(h[{a}].exp())")
_BACKWARDS = (
    "optimizer.zero_grad(); loss.backward(); optimizer.step()",
    "optimizer.zero_grad(); loss.backward(); optimizer.step()",
    "optimizer.zero_grad(); loss.backward(retain_graph=True); loss.backward(); optimizer.step()",
    "loss.backward(); optimizer.step(); optimizer.zero_grad()",
    "loss.backward(retain_graph=True); optimizer.step(); h[{a}].mean().backward()",
    (
        "g = torch.autograd.grad(loss, list(layers.parameters()), create_graph=True, allow_unused=True); "
        "(loss + sum(x.square().sum() for x in g if x is not None)).backward(); optimizer.step()"
    ),
    "torch.autograd.grad(loss, [extra]); loss.backward()",
    "torch.autograd.backward([loss, h[{a}].sum()]); optimizer.step()",
    "loss.backward(); loss.backward()",
    "h[{a}].backward()",
)


def program(seed: int, *, safe: bool = False) -> str:
    """The text of a program; a `safe` one writes nothing in place, so that it comes further."""
    dice = random.Random(seed)
    layers = [dice.choice(_LAYERS) for _ in range(3)]
    lines = [_HEAD.format(seed=seed, layers=", ".join(layers), optimizer=dice.choice(_OPTIMIZERS))]
    names = 1

    def filled(text: str) -> str:
        return text.format(i=dice.randrange(3), a=dice.randrange(names), b=dice.randrange(names))

    for _ in range(dice.randint(4, 9)):
        roll = dice.random()
        if roll < 0.7 or safe:
            text = dice.choice(_PURE)
            lines.append(f"    {filled(text)}\n")
        elif roll < 0.9:
            text = dice.choice(_RISKY)
            lines.append(f"    {filled(text)}\n")
        else:
            text = dice.choice(_GRADLESS)
            lines.append(f"    with torch.no_grad():\n        {filled(text)}\n")
        names += text.startswith("h.append")
        lines.append("    refs.append(StorageWeakRef(h[-1].untyped_storage()))\n")
    lines.append(f"    loss = sum(t.square().mean() for t in h[-{dice.randint(1, 3)}:]) + 0.01 * extra.sum()\n")
    backward = _BACKWARDS[dice.randrange(3)] if safe else dice.choice(_BACKWARDS)
    lines += [f"    {statement.strip()}\n" for statement in filled(backward).split(";")]
    lines.append("    log.append([t._version for t in h])\n    note(loss)\n\n")
    lines.append(f"for x in torch.randn({dice.randint(2, 5)}, 4, 6):\n    step(x)\n")
    lines.append("    freed.append([ref.expired() for ref in refs])\n    log.append(torch.rand(1))\n")
    return "".join(lines)
