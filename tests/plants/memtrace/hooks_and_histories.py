"""Loops that leak through hooks, graphs that go on, and tensors that swell."""

from __future__ import annotations

from tests.plants.memtrace.loops import ALL, KEPT, OUT, growth, plant

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
    plant("a-hook-whose-list-has-no-name", growth("net", KEPT, KEPT, "handle"))("""
        def spy(module):
            store = []
            module.register_forward_hook(lambda m, i, o: store.append(o.detach().clone()))  # <- here
        spy(net[1])
        for a, b in batches():
            learn(a, b)
    """),
    plant("hooks-added-at-each-step", growth("net", 32 * 64 * 4, 32 * 64 * 4, "remove()"))("""
        for a, b in batches():
            big = torch.randn(32, 64)  # <- here
            net[1].register_forward_hook(lambda m, i, o, big=big: None)
            learn(a, b)
    """),
    plant("hooks-on-a-weight", growth("net", 128 * 64 * 4, 128 * 64 * 4, "remove()"))("""
        for a, b in batches():
            mask = (torch.rand(128, 64) > 0.5).float()  # <- here
            net[0].weight.register_hook(lambda grad, mask=mask: grad * mask)
            learn(a, b)
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
    plant("retain-graph-and-a-list", growth("losses[0].grad_fn", KEPT, ALL, ".item()"))("""
        losses = []
        for a, b in batches():
            opt.zero_grad()
            loss = F.cross_entropy(net(a), b)  # <- here
            loss.backward(retain_graph=True)
            opt.step()
            losses.append(loss)
    """),
    plant("a-metric-that-keeps-the-graph", growth("metric.total.grad_fn", KEPT, ALL, "metric.total"))("""
        class Mean:
            def __init__(self):
                self.total, self.count = 0, 0
            def update(self, value):
                self.total = self.total + value
                self.count += 1
        metric = Mean()
        for a, b in batches():
            learn(a, b)
            metric.update(net(a).std())  # <- here
    """),
    plant("a-tensor-that-swells", growth("hist", OUT, OUT, "hist"))("""
        hist = torch.zeros(0, 10)
        with torch.no_grad():
            for a, b in batches():
                hist = torch.cat([hist, net(a)])  # <- here
    """),
    plant("a-tensor-that-swells-in-training", growth("hist", 32 * 64 * 4, 32 * 64 * 4, "hist"))("""
        hist = torch.zeros(0, 64)
        for a, b in batches():
            learn(a, b)
            hist = torch.cat([hist, a])  # <- here
    """),
    plant("a-swelling-attribute", growth("memory.bank", KEPT, KEPT, "memory.bank"))("""
        class Memory:
            bank = torch.zeros(0, 128)
        memory = Memory()
        for a, b in batches():
            learn(a, b)
            memory.bank = torch.vstack((memory.bank, net[0](a).detach()))  # <- here
    """),
    plant("a-key-value-cache-without-an-end", growth("keys", 8 * 64 * 4, 8 * 64 * 4, "keys"))("""
        head = nn.Linear(64, 64)
        keys = torch.zeros(8, 0, 64)
        with torch.no_grad():
            for t in range(16):
                keys = torch.cat([keys, head(torch.randn(8, 1, 64))], 1)  # <- here
    """),
    plant("in-the-evaluation-after-training", growth("outs[0]", KEPT, ALL, "no_grad"))("""
        for a, b in batches():
            learn(a, b)
        outs = []
        for a, b in batches():
            outs.append(net(a))  # <- here
    """),
    plant("every-third-step", growth("kept[0]", OUT * 5, OUT * 21))("""
        kept = []
        for i, (a, b) in enumerate(batches(30)):
            learn(a, b)
            if i % 3 == 0:
                kept.append(net(a).detach().repeat(1, 20))  # <- here
    """),
    plant("every-fifth-step", growth("kept[0]", 64 * 512 * 4 // 6, 64 * 512 * 4))("""
        kept = []
        for i, (a, b) in enumerate(batches(50)):
            learn(a, b)
            if i % 5 == 4:
                kept.append(torch.randn(64, 512))  # <- here
    """),
    plant("from-the-middle-on", growth("kept[0]", OUT * 10, ALL * 4))("""
        kept = []
        for i, (a, b) in enumerate(batches(60)):
            learn(a, b)
            if i >= 30:
                kept.append(net(a).repeat(1, 20))  # <- here
    """),
)
