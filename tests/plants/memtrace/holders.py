"""Loops that leak into variables: lists, attributes, caches, closures, default arguments."""

from __future__ import annotations

from tests.plants.memtrace.loops import ALL, KEPT, OUT, growth, plant

PLANTS = (
    plant(
        "only-at-times",
        """
        kept = []
        for i, (a, b) in enumerate(batches(32)):
            learn(a, b)
            if i % 4 == 0:
                kept.append(torch.ones(64, 64))  # <- here
        """,
        growth("kept[0]", 64 * 64, 64 * 64 * 2, "kept"),
    ),
    plant(
        "the-larger-of-two-at-one-line",
        """
        few, many = [], []
        for a, b in batches():
            learn(a, b)
            few.append(a[0] * 2); many.append(a * 2)  # <- here
        """,
        growth("many[0]", 32 * 64 * 4, 33 * 64 * 4, "many"),
    ),
    plant(
        "callbacks-of-a-trainer-that-has-returned",
        """
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
        """,
        growth("trainer.callbacks[0].outs", OUT, OUT),
    ),
    plant(
        "a-cache-of-a-function-without-a-limit",
        """
        import functools
        @functools.lru_cache(maxsize=None)
        def table(at):
            return torch.ones(64, 64)  # <- here
        for i in range(12):
            learn(x, y)
            table(i)
        """,
        growth("table.<cache>", 64 * 64 * 4, 64 * 64 * 4, "`table.cache_clear()`"),
    ),
    plant(
        "objects-that-hold-each-other",
        """
        class Row:
            def __init__(self, value, before):
                self.value, self.before = value, before
        row = None
        for a, b in batches():
            learn(a, b)
            row = Row(a * 2, row)  # <- here
        """,
        growth("row.before", 32 * 64 * 4, 32 * 64 * 4, "keep in `row` only"),
    ),
    plant(
        "a-list-of-losses-evaluation",
        """
        losses = []
        for a, b in batches():
            loss = F.cross_entropy(net(a), b)  # <- here
            losses.append(loss)
        """,
        growth("losses[0]", KEPT, ALL, "no_grad"),
    ),
    plant(
        "a-list-of-outputs",
        """
        outs = []
        for a, b in batches():
            opt.zero_grad()
            out = net(a)  # <- here
            F.cross_entropy(out, b).backward()
            opt.step()
            outs.append(out)
        """,
        growth("outs[0]", OUT, ALL, "outs"),
    ),
    plant(
        "a-dict-by-step",
        """
        seen = {}
        for i, (a, b) in enumerate(batches()):
            learn(a, b)
            seen[i] = net(a)  # <- here
        """,
        growth("seen[0]", KEPT, ALL, "detach"),
    ),
    plant(
        "a-deque-without-a-limit",
        """
        last = deque()
        for a, b in batches():
            learn(a, b)
            with torch.no_grad():
                last.append(net(a))  # <- here
        """,
        growth("last[0]", OUT, OUT),
    ),
    plant(
        "a-dict-of-lists",
        """
        log = defaultdict(list)
        for a, b in batches():
            learn(a, b)
            log['features'].append(net[0](a))  # <- here
        """,
        growth("log['features'][0]", KEPT, ALL, "detach"),
    ),
    plant(
        "an-attribute-of-a-trainer",
        """
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
        """,
        growth("trainer.history[0]", OUT, ALL, "trainer.history"),
    ),
    plant(
        "an-attribute-of-a-class",
        """
        class Seen:
            kept = []
        for a, b in batches():
            learn(a, b)
            Seen.kept.append(net(a).detach())  # <- here
        """,
        growth("Seen.kept[0]", OUT, OUT),
    ),
    plant(
        "a-model-that-keeps-its-outputs",
        """
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
        """,
        growth("model.kept[0]", OUT, ALL, "model.kept"),
    ),
    plant(
        "a-closure",
        """
        def recorder():
            kept = []
            def record(value):
                kept.append(value)
            return record
        record = recorder()
        for a, b in batches():
            learn(a, b)
            record(net(a).detach())  # <- here
        """,
        growth("record.<closure kept>[0]", OUT, OUT),
    ),
    plant(
        "a-default-argument",
        """
        def note(value, kept=[]):
            kept.append(value)
        for a, b in batches():
            learn(a, b)
            note(net(a).detach())  # <- here
        """,
        growth("note.", OUT, OUT, "kept"),
    ),
    plant(
        "a-generator-that-remembers",
        """
        def remembering():
            kept = []
            while True:
                a = torch.randn(32, 64)  # <- here
                kept.append(a)
                yield a
        source = remembering()
        for _ in range(12):
            learn(next(source), y)
        """,
        growth("source", 32 * 64 * 4, 32 * 64 * 4),
    ),
    plant(
        "lru-cache",
        """
        from functools import lru_cache
        @lru_cache(maxsize=None)
        def features(step):
            return torch.randn(32, 64)  # <- here
        for step in range(12):
            learn(features(step), y)
        """,
        growth("", 32 * 64 * 4, 32 * 64 * 4),
    ),
    plant(
        "a-cache-of-a-module-of-its-own",
        """
        import sys, types
        lib = types.ModuleType("lib")
        sys.modules["lib"] = lib
        lib._CACHE = {}
        for i, (a, b) in enumerate(batches()):
            learn(a, b)
            lib._CACHE[i] = net(a).detach()  # <- here
        """,
        growth("lib._CACHE[0]", OUT, OUT, "cache"),
    ),
)
