"""Growth outside the tensors, and results of a loop: Python objects, a profiler, workers, optimizers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.plants.memtrace.loops import SETUP, healthy, plant
from tests.plants.plant import HERE, between, ends, has, starts

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.plants.plant import Plant

_TRAIN = "for i, (a, b) in enumerate(batches(40)):\n    learn(a, b)\n"
_ROWS = "[{'id': n, 'text': str(n) * 40} for n in range(1500)]"
_PREDICT = "preds = []\nwith torch.no_grad():\n    for a, b in batches(20):\n        preds.append({kept})\n"
_COLLECTED = "only `preds` grows"


def _objects(name: str, holder: str) -> Callable[[str], Plant]:
    """Make a plant in which Python objects grow; a line is marked."""
    expect = {"growth.what": "objects", "growth.holder": holder, "growth.kept_at": HERE, "growth.share_ratio": between(1 / 3, 1)}
    return plant(name, {**expect, "growth.fix": has(f"`{holder}.clear()`"), "growth.what": "objects"})


PLANTS = (
    _objects("a-list-of-dicts", "rows")(f"rows = []\n{_TRAIN}    rows.append({_ROWS})  # <- here"),
    # Arrays of 96 MB in all: what the process has freed before would hold smaller ones, and it would not grow.
    _objects("arrays-in-an-attribute", "log.pictures")(f"""
import numpy
class Log:
    def __init__(self):
        self.pictures = []
    def add(self, picture):
        self.pictures.append(picture)  # <- here
log = Log()
{_TRAIN}    log.add(numpy.ones(300_000))
    """),
    healthy("objects-bound-anew")(f"{_TRAIN}    rows = {_ROWS}"),
    healthy("objects-in-a-bounded-deque")(f"last = deque(maxlen=3)\n{_TRAIN}    last.append([{{'id': n}} for n in range(3000)])"),
    healthy("objects-in-a-cache-that-is-full")(f"seen = {{}}\n{_TRAIN}    seen.setdefault(i % 4, [{{'id': n}} for n in range(3000)])"),
    healthy("numbers-in-a-list")(f"numbers = []\n{_TRAIN}    numbers.append(learn(a, b).item())"),
    healthy("texts-as-results-of-a-loop-that-trains-nothing")("""
        rows = []
        with torch.no_grad():
            for a, b in batches(40):
                net(a)
                rows.append(['x' * 100 + str(n) for n in range(2000)])
    """),
    healthy("memory-that-is-not-torch-s-by-the-counter-alone", options={"light": True})(
        "rows = []\nfor a, b in batches():\n    learn(a, b)\n    rows.append(bytearray(1 << 18))"
    ),
    healthy("what-a-loop-was-for", {"collects": "preds", "title": ends(_COLLECTED)})(_PREDICT.format(kept="net(a)")),
    healthy("what-a-loop-was-for-detached", {"collects": "preds", "title": ends(_COLLECTED)})(_PREDICT.format(kept="net(a).detach()")),
    healthy("nothing-that-grows-is-collected", {"collects": "", "title": ends("no growth over 20 steps")})(
        "for a, b in batches(20):\n    preds = net(a).detach()"
    ),
    plant(
        "a-profiler-that-runs-all-the-time",
        {"growth.what": "profiler", "growth.holder": "prof", "growth.kept_at": HERE, "growth.fix": has("`prof.step()`")},
    )("""
        from torch.profiler import profile, ProfilerActivity
        with profile(activities=[ProfilerActivity.CPU], with_stack=True, record_shapes=True) as prof:  # <- here
            for a, b in batches(60):
                learn(a, b)
    """),
    plant(
        "lists-of-objects-in-workers",
        {"growth.what": "workers", "growth.holder": ends(".rows"), "growth.fix": has("as a NumPy array")},
        setup=f"""
import torch, gc
class Rows(torch.utils.data.Dataset):
    def __init__(self):
        self.rows = [{{'id': n, 'text': str(n) * 8}} for n in range(120_000)]
    def __len__(self):
        return len(self.rows)
    def __getitem__(self, at):
        row = self.rows[at]
        return torch.full((64,), float(row['id'] % 7)), len(row['text']) % 10
data = Rows()
loader = torch.utils.data.DataLoader(data, 2000, num_workers=2)
gc.collect()
{SETUP}""",
    )("for a, b in loader:\n    learn(a, b)"),
    plant(
        "optimizers-in-a-list",
        {"growth.holder": starts("kept["), "growth.kept_at": HERE, "growth.fix": starts("create the optimizer once, before the loop")},
        repair=(("kept.append(update)", "kept = [update]"),),
    )("""
        kept = []
        for epoch in range(6):
            update = torch.optim.Adam(net.parameters())
            kept.append(update)  # <- here
            for a, b in batches(4):
                update.zero_grad(); F.cross_entropy(net(a), b).backward(); update.step()
    """),
    healthy("optimizers-that-are-made-once")("""
        nets = [nn.Linear(64, 10) for _ in range(4)]
        updates = [torch.optim.Adam(one.parameters()) for one in nets]
        for a, b in batches(12):
            for one, update in zip(nets, updates):
                update.zero_grad(); F.cross_entropy(one(a), b).backward(); update.step()
    """),
    plant("a-loop-that-is-not-understood", {"unseen_loop": HERE, "verdict": has("growth was not checked in the loop at ")})("""
        kept = []
        for i in range(6):  # <- here
            kept.append(torch.randn(100, 100))
    """),
)
