"""Leaks that are hard to name: small beside others, compiled, in tuples, in gradients, in views."""

from __future__ import annotations

from tests.plants.memtrace.loops import ALL, KEPT, growth, plant

PLANTS = (
    plant("features-with-their-graph-for-a-training-that-follows", growth("found[0]", KEPT, ALL, "no_grad"))("""
        found = []
        for a, b in batches():
            found.append(net(a))  # <- here
        head = nn.Linear(10, 10)
        for one in found:
            head(one.detach()).sum().backward()
    """),
    plant("without-a-model-among-what-goes", growth("total.grad_fn", 32 * 256 * 4, 2 * 32 * 256 * 4, "no_grad"))("""
        w = torch.randn(64, 256, requires_grad=True)
        total = 0
        for i in range(20):
            total = total + (torch.randn(32, 64) @ w).tanh().sum()  # <- here
    """),
    plant("a-graph-in-each-gradient", growth("net.", KEPT, 2 * ALL, "zero_grad"))("""
        for a, b in batches():
            loss = F.cross_entropy(net(a), b)  # <- here
            loss.backward(create_graph=True)
    """),
    plant("every-fifth-output-of-the-forward-of-each-step", growth("kept[", KEPT // 7, KEPT // 4, "kept"))("""
        kept = []
        for i, (a, b) in enumerate(batches(60)):
            opt.zero_grad()
            out = net[0](a)  # <- here
            net[2](net[1](out)).sum().backward()
            opt.step()
            if i % 5 == 4:
                kept.append(out.detach())
    """),
    plant("slices-of-an-array-on-a-tensor", growth("rows[0]", KEPT, KEPT, "`.copy()`"))("""
        rows = []
        for a, b in batches():
            with torch.no_grad():
                hidden = net[0](a)  # <- here
            rows.append(hidden.numpy()[0])
    """),
    plant("a-buffer-that-is-made-anew-larger-and-filled", growth("seen", 32 * 64 * 4, 32 * 64 * 4, "append to a list"))("""
        seen = torch.zeros(0, 64)
        for a, b in batches():
            learn(a, b)
            larger = torch.zeros(len(seen) + len(a), 64)  # <- here
            larger[:len(seen)] = seen
            larger[len(seen):] = a
            seen = larger
    """),
)
