"""Loops that keep something for a while: caches, bounded collections, results of an evaluation, graphs for one update."""

from __future__ import annotations

from tests.plants.memtrace.loops import healthy

_CELLS = {
    "a-cache-of-a-function": """
        import functools
        @functools.lru_cache(maxsize=None)
        def table(size):
            return torch.arange(size * 1000.0)
        for i in range(30):
            learn(x, y)
            table(i % 6 + 1).sum()
        """,
    "the-last-six-states": """
        import copy
        last = deque(maxlen=6)
        for a, b in batches():
            learn(a, b)
            last.append(copy.deepcopy(net.state_dict()))
        """,
    "predictions-in-a-function": """
        wide = nn.Linear(64, 512)
        def predict():
            found = []
            with torch.no_grad():
                for a, b in batches(20):
                    found.append(wide(a))
            return torch.cat(found).argmax(1)
        predict()
        """,
    "weights-that-are-adapted-to-each-task": """
        for task in range(6):
            fast = dict(net.named_parameters())
            for _ in range(3):
                loss = F.cross_entropy(torch.func.functional_call(net, fast, (x,)), y)
                slopes = torch.autograd.grad(loss, list(fast.values()), create_graph=True)
                fast = {name: one - 0.1 * slope for (name, one), slope in zip(fast.items(), slopes)}
            outer = F.cross_entropy(torch.func.functional_call(net, fast, (x,)), y)
            opt.zero_grad(); outer.backward(); opt.step()
        """,
    "a-model-of-each-run": """
        models = []
        for fold in range(6):
            model = nn.Linear(64, 10)
            update = torch.optim.Adam(model.parameters())
            for a, b in batches(4):
                update.zero_grad(); F.cross_entropy(model(a), b).backward(); update.step()
            models.append(model)
        """,
    "what-a-teacher-says-asked-once-of-each-batch": """
        teacher, said, batch = nn.Linear(64, 10), {}, list(batches(8))
        for epoch in range(5):
            for i, (a, b) in enumerate(batch):
                if i not in said:
                    with torch.no_grad():
                        said[i] = teacher(a).repeat(1, 8)
                opt.zero_grad(); F.mse_loss(net(a).repeat(1, 8), said[i]).backward(); opt.step()
        """,
    "embeddings-of-all-batches-for-one-loss": """
        encoder, found = nn.Linear(64, 32), []
        for a, b in batches():
            found.append(encoder(a))
        whole = torch.cat(found)
        (whole @ whole.T).mean().backward()
        """,
    "a-model-that-grows-in-stages": """
        class Grows(nn.Module):
            def __init__(self):
                super().__init__()
                self.blocks = nn.ModuleList([nn.Linear(64, 64)])
            def forward(self, a):
                for block in self.blocks:
                    a = F.relu(block(a))
                return a
        model = Grows()
        for stage in range(5):
            update = torch.optim.Adam(model.parameters())
            for a, b in batches(4):
                update.zero_grad(); model(a).sum().backward(); update.step()
            model.blocks.append(nn.Linear(64, 64))
        """,
    "a-deque-with-a-limit-that-is-far-away": """
        replay = deque(maxlen=1000)
        for a, b in batches(20):
            replay.append((a, b))
            learn(*replay[0])
        """,
    "the-last-graphs-without-a-model": """
        w = torch.randn(64, 256, requires_grad=True)
        last = deque(maxlen=5)
        for i in range(30):
            last.append((torch.randn(32, 64) @ w).tanh().sum())
        """,
}
PLANTS = tuple(healthy(name)(cell) for name, cell in _CELLS.items())
