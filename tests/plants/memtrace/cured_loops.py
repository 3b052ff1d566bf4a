"""Loops whose fix is applied: the plant grows, and once it is repaired nothing does. Also what a fix would free."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.plants.memtrace.loops import graph_growth, plant
from tests.plants.plant import HERE, between, ends, has, starts

if TYPE_CHECKING:
    from tests.plants.plant import Plant


def _epochs(steps: int) -> Plant:
    """Make a plant of a sum that begins anew with each epoch, and keeps the graphs of one."""
    cell = f"""
    for epoch in range(4):
        running_loss = 0.0
        for a, b in batches({steps}):
            running_loss += learn(a, b)  # <- here
    """
    expect = graph_growth("running_loss", "`running_loss += learn(a, b).detach()`")
    return plant(f"a-sum-over-epochs-of-{steps}", expect, repair=(("learn(a, b)", "learn(a, b).detach()"),))(cell)


PLANTS = (
    _epochs(6),
    _epochs(20),
    plant(
        "a-graph-in-a-gradient",
        {"growth.holder": "", "growth.kept_at": HERE, "growth.fix": has("torch.autograd.grad(..., create_graph=True)")},
        repair=(("y.backward(create_graph=True)", "g, = torch.autograd.grad(y, x, create_graph=True)"), ("    g = x.grad\n", "")),
    )("""
        for i in range(20):
            x = torch.randn(100, 100, requires_grad=True)
            y = (x ** 3).sum()
            y.backward(create_graph=True)  # <- here
            g = x.grad
    """),
    plant(
        "a-metric-that-is-never-reset",
        {"growth.fix": starts("call `curve.reset()`"), "growth.kept_at": HERE},
        repair=(("curve.update(net(a).repeat(1, 8))\n", "curve.update(net(a).repeat(1, 8))\n    curve.reset()\n"),),
    )("""
        class Curve:
            def __init__(self):
                self.preds = []
            def update(self, preds):
                self.preds.append(preds)  # <- here
            def reset(self):
                self.preds = []
        curve = Curve()
        for epoch in range(6):
            for a, b in batches(4):
                learn(a, b)
                with torch.no_grad():
                    curve.update(net(a).repeat(1, 8))
    """),
    plant(
        "what-cutting-the-graph-does-not-free", {"growth.keeps_graph": False, "growth.fix": starts("keep in `log` only what is needed")}
    )("""
        log = []
        for a, b in batches(16):
            loss = learn(a, b)
            log.append((loss, torch.randn(64, 256)))
    """),
    plant(
        "a-loop-over-models",
        {"growth.holder": ends(".seen"), "growth.kept_at": HERE, "growth.fix": starts("delete it after use, `del module.seen`")},
    )("""
        def look(model, a):
            def keep(module, given, out):
                module.seen = out.detach().repeat(1, 4)  # <- here
            handle = model[1].register_forward_hook(keep)
            model(a).sum().backward()
            handle.remove()
        models = [nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(10)]
        for model in models:
            look(model, x)
    """),
    plant(
        "a-tensor-that-is-resized-again-and-again",
        {
            "growth.holder": "seen",
            "growth.bytes_per_iteration": between(8192, 9000),
            "growth.fix": starts("allocate `seen` at its final size"),
        },
        repair=(("(i + 1) * 2048", "2048"),),
    )("""
        seen = torch.empty(0)
        for i, (a, b) in enumerate(batches(16)):
            learn(a, b)
            seen.resize_((i + 1) * 2048)  # <- here
    """),
)
