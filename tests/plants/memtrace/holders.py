"""Loops that leak into variables: lists, attributes, caches, closures, default arguments."""

from __future__ import annotations

from tests.plants.memtrace.loops import ALL, KEPT, OUT, growth, plant

PLANTS = (
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
    plant("a-dict-by-step", growth("seen[0]", KEPT, ALL, "detach"))("""
        seen = {}
        for i, (a, b) in enumerate(batches()):
            learn(a, b)
            seen[i] = net(a)  # <- here
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
