"""Loops that leak into variables: lists, attributes, caches, closures, default arguments."""

from __future__ import annotations

from tests.plants.memtrace.loops import ALL, KEPT, OUT, growth, plant

PLANTS = (
    plant("only-at-times", growth("kept[0]", 64 * 64, 64 * 64 * 2, "kept"))("""
        kept = []
        for i, (a, b) in enumerate(batches(32)):
            learn(a, b)
            if i % 4 == 0:
                kept.append(torch.ones(64, 64))  # <- here
    """),
    plant("the-larger-of-two-at-one-line", growth("many[0]", 32 * 64 * 4, 33 * 64 * 4, "many"))("""
        few, many = [], []
        for a, b in batches():
            learn(a, b)
            few.append(a[0] * 2); many.append(a * 2)  # <- here
    """),
    plant("callbacks-of-a-trainer-that-has-returned", growth("trainer.callbacks[0].outs", OUT, OUT))("""
        class Callback:
            def __init__(self):
                self.outs = {}
        class Trainer:
            def __init__(self):
                self.callbacks = [Callback()]
            def fit(self):
                for i, (a, b) in enumerate(batches()):
                    learn(a, b)
                    out = net(a).detach()  # <- here
                    for callback in self.callbacks:
                        callback.outs[i] = out
        trainer = Trainer()
        trainer.fit()
    """),
    plant("a-cache-of-a-function-without-a-limit", growth("table.<cache>", 64 * 64 * 4, 64 * 64 * 4, "`table.cache_clear()`"))("""
        import functools
        @functools.lru_cache(maxsize=None)
        def table(at):
            return torch.ones(64, 64)  # <- here
        for i in range(12):
            learn(x, y)
            table(i)
    """),
    plant("objects-that-hold-each-other", growth("row.before", 32 * 64 * 4, 32 * 64 * 4, "keep in `row` only"))("""
        class Row:
            def __init__(self, value, before):
                self.value, self.before = value, before
        row = None
        for a, b in batches():
            learn(a, b)
            row = Row(a * 2, row)  # <- here
    """),
    plant("a-list-of-losses-evaluation", growth("losses[0]", KEPT, ALL, "no_grad"))("""
        losses = []
        for a, b in batches():
            loss = F.cross_entropy(net(a), b)  # <- here
            losses.append(loss)
    """),
    plant("a-list-of-outputs", growth("outs[0]", OUT, ALL, "outs"))("""
        outs = []
        for a, b in batches():
            opt.zero_grad()
            out = net(a)  # <- here
            F.cross_entropy(out, b).backward()
            opt.step()
            outs.append(out)
    """),
    plant("a-dict-by-step", growth("seen[0]", KEPT, ALL, "detach"))("""
        seen = {}
        for i, (a, b) in enumerate(batches()):
            learn(a, b)
            seen[i] = net(a)  # <- here
    """),
    plant("a-deque-without-a-limit", growth("last[0]", OUT, OUT))("""
        last = deque()
        for a, b in batches():
            learn(a, b)
            with torch.no_grad():
                last.append(net(a))  # <- here
    """),
    plant("a-dict-of-lists", growth("log['features'][0]", KEPT, ALL, "detach"))("""
        log = defaultdict(list)
        for a, b in batches():
            learn(a, b)
            log['features'].append(net[0](a))  # <- here
    """),
    plant("an-attribute-of-a-trainer", growth("trainer.history[0]", OUT, ALL, "trainer.history"))("""
        class Trainer:
            def __init__(self):
                self.history = []
            def step(self, a, b):
                opt.zero_grad()
                out = net(a)
                loss = F.cross_entropy(out, b)
                loss.backward()
                opt.step()
                self.history.append(out.softmax(1))  # <- here
        trainer = Trainer()
        for a, b in batches():
            trainer.step(a, b)
    """),
    plant("an-attribute-of-a-class", growth("Seen.kept[0]", OUT, OUT))("""
        class Seen:
            kept = []
        for a, b in batches():
            learn(a, b)
            Seen.kept.append(net(a).detach())  # <- here
    """),
    plant("a-model-that-keeps-its-outputs", growth("model.kept[0]", OUT, ALL, "model.kept"))("""
        class Keeps(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner, self.kept = nn.Linear(64, 10), []
            def forward(self, a):
                out = self.inner(a)  # <- here
                self.kept.append(out)
                return out
        model = Keeps()
        update = torch.optim.SGD(model.parameters(), 0.1)
        for a, b in batches():
            update.zero_grad()
            F.cross_entropy(model(a), b).backward()
            update.step()
    """),
    plant("a-closure", growth("record.<closure kept>[0]", OUT, OUT))("""
        def recorder():
            kept = []
            def record(value):
                kept.append(value)
            return record
        record = recorder()
        for a, b in batches():
            learn(a, b)
            record(net(a).detach())  # <- here
    """),
    plant("a-default-argument", growth("note.", OUT, OUT, "kept"))("""
        def note(value, kept=[]):
            kept.append(value)
        for a, b in batches():
            learn(a, b)
            note(net(a).detach())  # <- here
    """),
    plant("a-generator-that-remembers", growth("source", 32 * 64 * 4, 32 * 64 * 4))("""
        def remembering():
            kept = []
            while True:
                a = torch.randn(32, 64)  # <- here
                kept.append(a)
                yield a
        source = remembering()
        for _ in range(12):
            learn(next(source), y)
    """),
    plant("lru-cache", growth("", 32 * 64 * 4, 32 * 64 * 4))("""
        from functools import lru_cache
        @lru_cache(maxsize=None)
        def features(step):
            return torch.randn(32, 64)  # <- here
        for step in range(12):
            learn(features(step), y)
    """),
    plant("a-cache-of-a-module-of-its-own", growth("lib._CACHE[0]", OUT, OUT, "cache"))("""
        import sys, types
        lib = types.ModuleType("lib")
        sys.modules["lib"] = lib
        lib._CACHE = {}
        for i, (a, b) in enumerate(batches()):
            learn(a, b)
            lib._CACHE[i] = net(a).detach()  # <- here
    """),
)
