"""Loops that leak through hooks, graphs that go on, and tensors that swell."""

from __future__ import annotations

from tests.plants.memtrace.loops import ALL, KEPT, growth, plant

PLANTS = (
    plant("a-forward-hook", growth("kept[0]", KEPT, ALL, "kept"))("""
        kept = []
        net[1].register_forward_hook(lambda m, i, o: kept.append(o))
        for a, b in batches():
            opt.zero_grad()
            loss = F.cross_entropy(net(a), b)  # <- here
            loss.backward()
            opt.step()
    """),
    plant("hidden-state-with-its-history", growth("h.grad_fn", 32 * 32 * 4, 1 << 20, "no_grad"))("""
        cell = nn.GRUCell(64, 32)
        h = torch.zeros(32, 32)
        for a, b in batches():
            h = cell(a, h)  # <- here
    """),
    plant("a-running-loss-before-backward", growth("total.grad_fn", KEPT, ALL, "no_grad"))("""
        total = 0
        for a, b in batches():
            total = total + F.cross_entropy(net(a), b)  # <- here
    """),
)
