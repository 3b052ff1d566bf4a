"""Graphs that grow while the memory of tensors does not."""

from __future__ import annotations

from tests.plants.memtrace.loops import graph_growth, plant

PLANTS = (
    plant("a-list-of-losses", graph_growth("losses", "item()"))("""
        losses = []
        for a, b in batches(40):
            losses.append(learn(a, b))
    """),
    plant("losses-in-a-list-of-dicts", graph_growth("rows", "`rows.append({**row, 'loss': row['loss'].detach()})`"))("""
        rows = []
        for a, b in batches(40):
            row = {'loss': learn(a, b), 'count': len(a)}
            rows.append(row)
    """),
    plant("records-with-a-loss", graph_growth("log", "store `.item()` (a number) or `.detach()` (a tensor) in `log`"))("""
        class Row:
            def __init__(self, loss):
                self.loss = loss
        log = []
        for a, b in batches(40):
            log.append(Row(learn(a, b)))
    """),
    plant(
        "a-dict-of-an-object-in-an-object",
        graph_growth("trainer.memory.state", "`self.state[name] = (0.9 * self.state[name] + value).detach()`"),
    )("""
        class Memory:
            def __init__(self):
                self.state = {'loss': torch.zeros(())}
            def store(self, name, value):
                self.state[name] = 0.9 * self.state[name] + value
        class Trainer:
            def __init__(self):
                self.memory = Memory()
        trainer = Trainer()
        for a, b in batches(40):
            trainer.memory.store('loss', learn(a, b))
    """),
    plant("an-attribute", graph_growth("log.total", "`log.total = (log.total + learn(a, b)).detach()`"))("""
        class Log:
            total = 0
        log = Log()
        for a, b in batches(40):
            log.total = log.total + learn(a, b)
    """),
)
