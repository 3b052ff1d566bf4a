"""Loops that call no model and are loops all the same."""

from __future__ import annotations

from tests.plants.memtrace.loops import OUT, growth, healthy, plant

PLANTS = (
    plant("functions-and-an-optimizer", growth("outs[", OUT, OUT, "outs") | {"steps_count": 12, "graph_growth": None})("""
        w = torch.randn(64, 10, requires_grad=True)
        update = torch.optim.SGD([w], 0.1)
        outs = []
        for a, b in batches():
            out = a @ w  # <- here
            loss = F.cross_entropy(out, b)
            update.zero_grad()
            loss.backward()
            update.step()
            outs.append(out.detach())
    """),
    plant("gradients-by-hand", growth("log[", 64 * 10 * 4, 64 * 10 * 4, "log") | {"steps_count": 12, "graph_growth": None})("""
        w = torch.randn(64, 10, requires_grad=True)
        log = []
        for a, b in batches():
            loss = F.cross_entropy(a @ w, b)
            loss.backward()
            with torch.no_grad():
                w -= 0.1 * w.grad
                log.append(w.clone())  # <- here
                w.grad = None
    """),
    healthy("without-a-model-by-hand", {"steps_count": 12})("""
        w = torch.randn(64, 10, requires_grad=True)
        for a, b in batches():
            loss = F.cross_entropy(a @ w, b)
            loss.backward()
            with torch.no_grad():
                w -= 0.1 * w.grad
                w.grad = None
    """),
    healthy("without-a-model-a-compiled-function-alone", {"steps_count": 12})("""
        @torch.compile(backend="eager")
        def score(a):
            return (a * 2).tanh().sum()
        for a, b in batches():
            found = score(a)
    """),
    healthy("without-a-model-compiled-in-place", {"steps_count": 12})("""
        fast = nn.Sequential(nn.Linear(64, 10))
        fast.compile(backend="eager")
        for a, b in batches():
            F.cross_entropy(fast(a), b).backward()
            for one in fast.parameters():
                one.grad = None
    """),
)
