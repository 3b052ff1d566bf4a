"""Verdicts and pages of reports made by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from torchdebug_magics.html import markup, plain
from torchdebug_magics.instruments.deterministic.report import (
    Cost,
    Dependence,
    DeterministicReport,
    Divergence,
    LiveRitual,
    Potential,
    Setting,
    Warned,
)
from torchdebug_magics.instruments.deterministic.view import after_cell, page
from torchdebug_magics.report import Location

HERE = Location(cell=4, file="cell", line=7, function="<module>", source="x = torch.randn(3, generator=g)")
THERE = Location(cell=4, file="cell", line=9, function="<module>", source="x = x * 2")
FOUND = Divergence(
    op="aten.randn.generator",
    module="model.0",
    location=HERE,
    occurrence=2,
    cause="unseeded_generator",
    explanation="`g` drew other numbers, as nothing seeds it",
    fix="write `g.manual_seed(42)` first",
)
MET = Warned(op="put_", location=HERE, message="put_ does not have ...", count=3, fix="write `x[index] = values`")
RACE = Potential(
    op="aten.index_put_", module=None, location=THERE, differed_count=3, repetitions_count=20, explanation="threads", fix="sort"
)
SETTINGS = {"cudnn.benchmark": Setting(True, False), "PYTHONHASHSEED": Setting(None, "42")}

LINE = "In[4] line 7: `x = torch.randn(3, generator=g)`"
ELSEWHERE = Divergence(op="", module=None, location=None, occurrence=1, cause="hash_order", explanation="sets differ", fix="")
COSTS = (Cost("cudnn.benchmark", 1.7), Cost("sdpa.flash", 1.1))
DRAWN = Dependence(
    on="seed",
    op="aten.randperm.default",
    location=FOUND.location,
    what="`randperm` draws from torch's generator, which nothing seeded",
    fix="`torch.manual_seed(42)` before it",
)
RACED = Dependence(on="race", op="aten.index_put_.default", location=None, what="`index_put_` adds in any order", fix="")

VERDICTS = [
    (
        {"divergence": FOUND, "verified": False},
        f"Different every run: aten.randn.generator · `model.0` · {LINE} · {FOUND.explanation} · fix: {FOUND.fix}",
    ),
    (
        {"divergence": replace(FOUND, op="aten.lift_fresh.default", module=None), "verified": False},
        f"Different every run: data that enters torch · {LINE} · {FOUND.explanation} · fix: {FOUND.fix}",
    ),
    ({"divergence": ELSEWHERE, "against": "ref"}, "Different from ref: sets differ"),
    ({"verified": False}, "Different every run, and no PyTorch op could be identified as the cause"),
    ({"verified": True, "ops_count": 1204}, "Same numbers twice: 1,204 ops are bit-identical (seed 42)"),
    ({"verified": True, "ops_count": 1}, "Same numbers twice: 1 op is bit-identical (seed 42)"),
    ({"verified": True, "ops_count": 0}, "Seeded with 42; no PyTorch op ran, so there was nothing to compare"),
    ({"verified": True, "ops_count": 9, "against": "ref", "rtol": 1e-5}, "Same numbers as ref: 9 ops are equal to within 1e-05 (seed 42)"),
    (
        {"verified": True, "ops_count": 9, "depends_on": (DRAWN, RACED)},
        f"Equal only because this magic seeded it · {LINE} · {DRAWN.what} · fix: {DRAWN.fix}",
    ),
    ({"verified": True, "ops_count": 9, "depends_on": (RACED,)}, f"Same numbers in these two runs, by chance · {RACED.what}"),
    ({"settings": SETTINGS}, "Seeded with 42; 2 settings changed, all put back"),
    ({"settings": SETTINGS, "keep_rng": True}, "Seeded with 42; 2 settings changed, all put back, the generators left as they are"),
    ({"settings": SETTINGS, "restored": False}, "Seeded with 42; not all of what was set could be put back"),
    ({}, "Seeded with 42; no setting had to change"),
    ({"not_verified": "the cell reads input"}, "Seeded with 42; no setting had to change · not compared: the cell reads input"),
    (
        {"warnings": (MET, MET)},
        f"Seeded with 42, yet `put_` at {LINE} may give different numbers in every run, and 1 more op · fix: {MET.fix}",
    ),
    (
        {"settings": SETTINGS, "slowdown_ratio": 1.8, "costs": COSTS},
        (
            "Seeded with 42; 2 settings changed, all put back · "
            "determinism settings slow this cell down 1.80x, most by cudnn.benchmark (1.70x)"
        ),
    ),
]


@pytest.mark.parametrize(("fields", "verdict"), VERDICTS)
def test_the_verdict(fields: dict, verdict: str):
    assert DeterministicReport(seed=42, **fields).verdict == verdict


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"divergence": FOUND}, "bad"), ({"verified": True, "ops_count": 3}, "good"), ({"verified": True, "potential": (RACE,)}, "warn"),
        ({"warnings": (MET,)}, "warn"), ({"restored": False}, "warn"), ({"problems": ("x",)}, "warn"), ({}, "info"),
    ],
)  # fmt: skip
def test_the_status(fields: dict, status: str):
    assert page(DeterministicReport(seed=42, **fields)).status == status


def test_a_divergence_shows_both_lines_the_fix_and_why():
    found = Divergence(**{**vars(FOUND), "other": THERE, "phase": "backward"})
    text = plain.render(page(DeterministicReport(seed=42, divergence=found, settings=SETTINGS, too_late=("Too late.",))))
    for part in (
        "where it comes from: In[4] line 9",
        "x = x * 2",
        "write `g.manual_seed(42)` first",
        "call 2 at this line, backward",
        "unseeded generator",
    ):
        assert part in text
    assert text.index("fix") < text.index("where it comes from") < text.index("cudnn.benchmark") < text.index("Too late.")


def test_all_that_is_to_be_said_is_there_and_escaped():
    report = DeterministicReport(
        seed=42, settings=SETTINGS, warnings=(MET,), potential=(RACE,), unrestorable=("iterator `it`",), overruled=("The cell set a<b.",),
        costs=(Cost("cudnn.benchmark", 1.7),), generators=("rng", "loader.generator"), threads_count=2, problems=("seeding x failed",),
    )  # fmt: skip
    text, html = plain.render(page(report)), markup.render(page(report))
    for part in ("3 of 20", "iterator `it`", "1.70x", "`rng`, `loader.generator`", "not set", "seeding x failed", "The cell set a<b."):
        assert part in text
    assert "a&lt;b" in html
    assert "<details" in html
    assert report.to_dict()["settings"]["PYTHONHASHSEED"] == [None, "42"]
    assert '"verified": null' in report.to_json()


def test_the_cell_in_which_it_begins_says_that_it_lasts():
    live = LiveRitual(7, 8, ())
    first = after_cell(None, live)
    assert first is not None
    assert first.verdict == "Seeded with 7, 8 settings changed, until `%deterministic off`"
    assert after_cell(live, live) is None
