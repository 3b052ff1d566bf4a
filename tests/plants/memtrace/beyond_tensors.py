"""Growth outside the tensors, and results of a loop: Python objects, a profiler, workers, optimizers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.plants.memtrace.loops import healthy, plant
from tests.plants.plant import HERE, between, ends, has

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
    healthy("texts-as-results-of-a-loop-that-trains-nothing")("""
        rows = []
        with torch.no_grad():
            for a, b in batches(40):
                net(a)
                rows.append(['x' * 100 + str(n) for n in range(2000)])
    """),
    healthy("what-a-loop-was-for", {"collects": "preds", "title": ends(_COLLECTED)})(_PREDICT.format(kept="net(a)")),
    plant(
        "a-profiler-that-runs-all-the-time",
        {"growth.what": "profiler", "growth.holder": "prof", "growth.kept_at": HERE, "growth.fix": has("`prof.step()`")},
    )("""
        from torch.profiler import profile, ProfilerActivity
        with profile(activities=[ProfilerActivity.CPU], with_stack=True, record_shapes=True) as prof:  # <- here
            for a, b in batches(60):
                learn(a, b)
    """),
    healthy("optimizers-that-are-made-once")("""
        nets = [nn.Linear(64, 10) for _ in range(4)]
        updates = [torch.optim.Adam(one.parameters()) for one in nets]
        for a, b in batches(12):
            for one, update in zip(nets, updates):
                update.zero_grad(); F.cross_entropy(one(a), b).backward(); update.step()
    """),
)
