"""Loops that keep something for a while: caches, bounded collections, results of an evaluation, graphs for one update."""

from __future__ import annotations

from tests.plants.memtrace.loops import healthy

_CELLS = {
    "a-cache-that-is-full-after-a-third-of-the-loop": """
        cache = {}
        for i, (a, b) in enumerate(batches(15)):
            learn(a, b)
            if i % 5 not in cache:
                cache[i % 5] = torch.randn(64, 64)
        """,
    "a-cache-whose-keys-come-in-any-order": """
        cache, keys = {}, [0, 3, 1, 0, 4, 2, 3, 1, 0, 5, 2, 4, 1, 0, 3, 5, 2, 1, 4, 0, 3, 2, 5, 1]
        for key in keys:
            learn(x, y)
            if key not in cache:
                cache[key] = torch.randn(64, 64)
        """,
    "a-data-set-that-is-read-once": """
        class Read(torch.utils.data.Dataset):
            def __init__(self):
                self.rows = {}
            def __len__(self):
                return 64
            def __getitem__(self, at):
                if at not in self.rows:
                    self.rows[at] = (torch.randn(64), at % 10)
                return self.rows[at]
        loader = torch.utils.data.DataLoader(Read(), 8)
        for epoch in range(4):
            for a, b in loader:
                learn(a, b)
        """,
    "a-cache-inside-the-model-by-length": """
        class Placed(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner, self.places = nn.Linear(64, 10), {}
            def forward(self, a):
                if len(a) not in self.places:
                    self.places[len(a)] = torch.randn(len(a), 64)
                return self.inner(a + self.places[len(a)])
        model = Placed()
        for size in (8, 16, 24, 32, 40, 48) * 5:
            F.cross_entropy(model(torch.randn(size, 64)), torch.randint(10, (size,))).backward()
        """,
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
    "texts-that-are-written-one-after-another": """
        head = nn.Linear(512, 512)
        def write():
            text = torch.zeros(1, 512)
            with torch.no_grad():
                for _ in range(9):
                    text = torch.cat([text, head(text[-1:])])
            return text.mean()
        for _ in range(3):
            write()
        """,
    "a-text-that-is-written-in-a-function": """
        head = nn.Linear(512, 512)
        def write():
            text = torch.zeros(1, 512)
            with torch.no_grad():
                for _ in range(24):
                    text = torch.cat([text, head(text[-1:])])
            return text.mean()
        write()
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
    "scores-of-an-evaluation": """
        scores = []
        with torch.no_grad():
            for a, b in batches(20):
                scores.append(net(a).repeat(1, 20))
        scores = torch.cat(scores)
        """,
    "features-that-are-made-before-a-training": """
        found = []
        with torch.no_grad():
            for a, b in batches():
                found.append((net[0](a), b))
        head = nn.Linear(128, 10)
        for hidden, b in found:
            F.cross_entropy(head(hidden), b).backward()
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
    "states-at-random-from-all-that-were": """
        kept, places = [], [0, 3, 5, 1, 9, 12, 2, 20, 4, 30, 0, 17, 25, 3, 33, 11]
        for i, (a, b) in enumerate(batches(40)):
            learn(a, b)
            if len(kept) < 6:
                kept.append(net[0](a).detach())
            elif places[i % 16] < 6:
                kept[places[i % 16]] = net[0](a).detach()
        """,
    "every-fifth-output-the-last-three": """
        kept = []
        for i, (a, b) in enumerate(batches(60)):
            out = net(a.repeat(4, 1))
            opt.zero_grad(); out.sum().backward(); opt.step()
            if i % 5 == 0:
                kept = [*kept, out.detach()][-3:]
        """,
    "the-log-probabilities-of-an-episode-for-one-update": """
        policy = nn.Linear(8, 2)
        update, chosen = torch.optim.Adam(policy.parameters()), []
        for t in range(30):
            odds = torch.distributions.Categorical(logits=policy(torch.randn(16, 8)))
            chosen.append(odds.log_prob(odds.sample()))
        update.zero_grad(); (-torch.stack(chosen).sum()).backward(); update.step()
        """,
    "embeddings-of-all-batches-for-one-loss": """
        encoder, found = nn.Linear(64, 32), []
        for a, b in batches():
            found.append(encoder(a))
        whole = torch.cat(found)
        (whole @ whole.T).mean().backward()
        """,
    "losses-that-are-summed-up-for-each-update": """
        for step in range(4):
            total = 0
            for a, b in batches(6):
                total = total + F.cross_entropy(net(a), b)
            opt.zero_grad(); total.backward(); opt.step()
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
    "a-model-that-grows-and-its-optimizer-with-it": """
        model = nn.Sequential(nn.Linear(64, 64))
        update = torch.optim.Adam(model.parameters())
        for stage in range(5):
            for a, b in batches(4):
                update.zero_grad(); model(a).sum().backward(); update.step()
            model.append(nn.Linear(64, 64))
            update.add_param_group({"params": model[-1].parameters()})
        """,
    "a-deque-with-a-limit-that-is-far-away": """
        replay = deque(maxlen=1000)
        for a, b in batches(20):
            replay.append((a, b))
            learn(*replay[0])
        """,
    "a-functions-cache-with-a-limit-that-is-far-away": """
        import functools
        @functools.lru_cache(maxsize=128)
        def table(at):
            return torch.randn(64, 64)
        for i, (a, b) in enumerate(batches(20)):
            learn(a, b)
            table(i)
        """,
    "weak-references": """
        import weakref
        seen = []
        for a, b in batches(14):
            out = net(a)
            seen.append(weakref.ref(out))
            opt.zero_grad(); F.cross_entropy(out, b).backward(); opt.step()
        """,
    "the-last-graphs-without-a-model": """
        w = torch.randn(64, 256, requires_grad=True)
        last = deque(maxlen=5)
        for i in range(30):
            last.append((torch.randn(32, 64) @ w).tanh().sum())
        """,
}
PLANTS = tuple(healthy(name)(cell) for name, cell in _CELLS.items())
