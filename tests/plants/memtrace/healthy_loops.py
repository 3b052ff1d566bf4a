"""Loops that keep nothing: trainings, evaluations, models and optimizers of many kinds."""

from __future__ import annotations

from tests.plants.memtrace.loops import healthy

_CELLS = {
    "training": """
        for a, b in batches():
            opt.zero_grad()
            loss = F.cross_entropy(net(a), b)
            loss.backward()
            opt.step()
        """,
    "truncated-backpropagation": """
        cell = nn.GRUCell(64, 32)
        h, loss = torch.zeros(32, 32), 0
        for i, (a, b) in enumerate(batches(24)):
            h = cell(a, h)
            loss = loss + h.square().mean()
            if i % 4 == 3:
                loss.backward()
                h, loss = h.detach(), 0
        """,
    "a-key-value-cache-within-each-sequence": """
        head = nn.Linear(64, 64)
        with torch.no_grad():
            for sequence in range(4):
                keys = torch.zeros(1, 0, 64)
                for t in range(6):
                    keys = torch.cat([keys, head(torch.randn(1, 1, 64))], 1)
        """,
    "predictions": """
        preds = []
        with torch.no_grad():
            for a, b in batches(20):
                preds.append(net(a).argmax(1))
        """,
}
PLANTS = tuple(healthy(name)(cell) for name, cell in _CELLS.items())
