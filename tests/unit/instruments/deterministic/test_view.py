"""Verdicts and pages of reports made by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from torchdebug_magics.html import markup, plain
from torchdebug_magics.html.page import Code, Facts, Fold, Note
from torchdebug_magics.instruments.deterministic.report import (
    Dependence,
    DeterministicReport,
    Divergence,
    LiveRitual,
    Setting,
    Warned,
)
from torchdebug_magics.instruments.deterministic.view import page, page_after_cell
from torchdebug_magics.report import Location

HERE = Location(cell=4, file="cell", line=7, function="<module>", source="x = torch.randn(3, generator=g)")
IN_A_FUNCTION = Location(cell=None, file="/here/model.py", line=7, function="forward", source="x = torch.randn(3, generator=g)")
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
NO_KERNEL = "PyTorch has no deterministic implementation of `put_`"
MET = Warned(op="put_", location=HERE, message="put_ does not have ...", count=3, fix="write `x[index] = values`")
RACE = Dependence(on="race", op="aten.index_put_", location=THERE, what="differed in 3 of 20 repetitions", fix="sort")
SETTINGS = {"cudnn.benchmark": Setting(True, False), "PYTHONHASHSEED": Setting(None, "42")}

LINE = "In[4] line 7: `x = torch.randn(3, generator=g)`"
ELSEWHERE = Divergence(op="", module=None, location=None, occurrence=1, cause="hash_order", explanation="sets differ", fix="")
DRAWN = Dependence(
    on="seed",
    op="aten.randperm.default",
    location=FOUND.location,
    what="`randperm` draws from torch's generator, which is not seeded",
    fix="`torch.manual_seed(42)` before it",
)
RACED = Dependence(on="race", op="aten.index_put_.default", location=None, what="`index_put_` adds in any order", fix="")

REPRODUCIBLE = "Reproducible only with the seed set here"
CHANGED = "Seeded with 42; 2 settings changed and restored"

WORDS = [
    (
        {"divergence": FOUND, "verified": False},
        f"Different every run: unseeded torch generator · {LINE}",
        f" · {FOUND.explanation} · fix: {FOUND.fix}",
    ),
    (
        {"divergence": replace(FOUND, cause="wall_clock", other=THERE), "verified": False},
        "Different every run: the clock is read · In[4] line 9: `x = x * 2`",
        f" · {FOUND.explanation} · fix: {FOUND.fix}",
    ),
    (
        {"divergence": replace(FOUND, cause="unknown", location=IN_A_FUNCTION), "verified": False},
        "Different every run: aten.randn.generator · model.py:7: `x = torch.randn(3, generator=g)`",
        f" · {FOUND.explanation} · fix: {FOUND.fix}",
    ),
    (
        {"divergence": FOUND, "verified": False, "interrupted": True, "unchecked": ("other seeds",)},
        f"Different every run: unseeded torch generator · {LINE} · interrupted",
        None,
    ),
    ({"divergence": ELSEWHERE, "against": "ref"}, "Different from ref", " · sets differ"),
    (
        {"divergence": ELSEWHERE, "against": "/a/very/long/folder/" + "run" * 20 + ".json"},
        f"Different from ...{('run' * 20 + '.json')[-24:]}",
        None,
    ),
    ({"verified": False}, "Different every run: no PyTorch op could be identified as the cause", ""),
    ({"verified": True, "ops_count": 1204}, "Same numbers twice: 1,204 ops are bit-identical (seed 42)", ""),
    ({"verified": True, "ops_count": 1}, "Same numbers twice: 1 op is bit-identical (seed 42)", ""),
    ({"verified": True, "ops_count": 0}, "Seeded with 42; no PyTorch op ran, so there was nothing to compare", ""),
    (
        {"verified": True, "ops_count": 9, "against": "ref", "rtol": 1e-5},
        "Same numbers as ref: 9 ops are equal to within 1e-05 (seed 42)",
        "",
    ),
    ({"verified": True, "ops_count": 9, "depends_on": (DRAWN, RACED)}, f"{REPRODUCIBLE} · {LINE}", f" · {DRAWN.what} · fix: {DRAWN.fix}"),
    ({"verified": True, "ops_count": 9, "depends_on": (RACED,)}, "Same numbers twice, but a nondeterministic op ran", f" · {RACED.what}"),
    (
        {"verified": True, "ops_count": 9, "depends_on": (replace(RACED, on="carried_state"),)},
        "Same numbers twice, but different when the cell runs again",
        f" · {RACED.what}",
    ),
    ({"settings": SETTINGS}, CHANGED, ""),
    ({"settings": SETTINGS, "keep_rng": True}, f"{CHANGED}, RNG states kept", ""),
    ({"settings": SETTINGS, "restored": False}, "Seeded with 42; not every setting could be restored", ""),
    ({}, "Seeded with 42; no setting had to change", ""),
    ({"not_verified": "the cell reads input"}, "Seeded with 42; no setting had to change · runs not compared", " · the cell reads input"),
    ({"warnings": (MET, MET)}, f"2 nondeterministic ops, first put_ · {LINE}", f" · {NO_KERNEL} · fix: {MET.fix}"),
    ({"warnings": (MET,)}, f"Nondeterministic op put_ · {LINE}", f" · {NO_KERNEL} · fix: {MET.fix}"),
]


@pytest.mark.parametrize(("fields", "title", "rest"), WORDS)
def test_the_title_says_what_and_where_and_the_verdict_why_and_the_fix(fields: dict, title: str, rest: str | None):
    report = DeterministicReport(seed=42, **fields)
    assert report.title == title
    assert page(report).headline == title
    assert rest is None or report.verdict == title + rest
    assert len(title.partition("`")[0]) <= 90


def test_an_interrupt_says_what_was_left_unchecked():
    report = DeterministicReport(seed=42, verified=True, ops_count=1, interrupted=True, unchecked=("other seeds", "the next run"))
    assert report.verdict.endswith("interrupted before other seeds, the next run could be checked")
    assert "not checked because of the interrupt: other seeds, the next run" in plain.render(page(report))


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"divergence": FOUND}, "bad"), ({"verified": True, "ops_count": 3}, "good"), ({"verified": True, "depends_on": (RACE,)}, "warn"),
        ({"warnings": (MET,)}, "warn"), ({"restored": False}, "warn"), ({"problems": ("x",)}, "warn"), ({}, "info"),
    ],
)  # fmt: skip
def test_the_status(fields: dict, status: str):
    assert page(DeterministicReport(seed=42, **fields)).status == status


def test_a_divergence_shows_the_fix_the_reason_and_the_lines_before_any_fold():
    found = replace(FOUND, other=replace(THERE, source="g = torch.Generator()"), phase="backward")
    shown = page(
        DeterministicReport(
            seed=42, divergence=found, verified=False, settings=SETTINGS, too_late=("X needs a restart: why.",), runs_count=3, runs_s=0.2
        )
    )
    facts, code, details, settings = shown.blocks
    assert isinstance(facts, Facts)
    assert facts.rows == (("fix", "write `g.manual_seed(42)` first"), ("why", FOUND.explanation))
    assert isinstance(code, Code)
    assert (code.marked, code.title) == (9, "line 7: where the numbers first differ")
    assert code.lines == ((7, "x = torch.randn(3, generator=g)"), (9, "g = torch.Generator()"))
    assert code.underlined == (0, 1)  # `g`, as the reason quotes it
    assert isinstance(details, Fold)
    text = " ".join(plain.render(replace(shown, blocks=details.blocks)).split())
    for part in ("`aten.randn.generator` (backward, call 2 on this line)", "`model.0`", "reran the cell 3 times, 200 ms"):
        assert part in text
    assert isinstance(settings, Fold)
    assert settings.title == "2 settings changed and restored · X needs a restart"


def test_a_line_elsewhere_has_an_excerpt_of_its_own():
    found = replace(FOUND, other=IN_A_FUNCTION)
    _, first, second, *_ = page(DeterministicReport(seed=42, divergence=found)).blocks
    assert isinstance(first, Code)
    assert isinstance(second, Code)
    assert (first.lines, second.title) == (((7, IN_A_FUNCTION.source),), "where the numbers first differ: In[4] line 7")


@pytest.mark.parametrize(
    ("fields", "kinds"),
    [
        ({"divergence": FOUND}, [Facts, Code]),
        ({"verified": True, "ops_count": 3}, []),
        ({"verified": True, "ops_count": 3, "runs_count": 4}, [Facts]),
        ({"verified": True, "depends_on": (DRAWN, RACED), "carried": ("net",)}, [Facts, Code]),
        ({"warnings": (MET,)}, [Facts, Code]),
        ({"warnings": (MET, MET)}, [Facts, Code]),
        ({"settings": SETTINGS, "overruled": ("a", "b"), "problems": ("c",)}, [Note, Note]),
    ],
)
def test_what_stands_above_the_first_fold(fields: dict, kinds: list[type]):
    blocks = page(DeterministicReport(seed=42, **fields)).blocks
    first = next(at for at, block in enumerate(blocks) if isinstance(block, Fold))
    assert [type(block) for block in blocks[:first]] == kinds
    assert all(isinstance(block, Fold) for block in blocks[first:])


def test_a_title_already_says_what_was_restored():
    *_, settings = page(DeterministicReport(seed=42, settings=SETTINGS)).blocks
    assert isinstance(settings, Fold)
    assert settings.title == "Settings and seeds"


def test_all_that_is_to_be_said_is_there_and_escaped():
    report = DeterministicReport(
        seed=42, settings=SETTINGS, warnings=(MET,), depends_on=(DRAWN, RACE),
        unrestorable=("iterator `it`",), overruled=("The cell set a<b.",),
        generators=("rng", "loader.generator"), threads_count=2, problems=("seeding x failed",),
    )  # fmt: skip
    text, html = plain.render(page(report)), markup.render(page(report))
    for part in ("3 of 20", "iterator `it`", "`rng`, `loader.generator`", "not set", "seeding x failed", "The cell set a<b."):
        assert part in text
    assert "a&lt;b" in html
    assert "<details" in html
    assert report.to_dict()["settings"]["PYTHONHASHSEED"] == {"before": None, "during": "42"}
    assert '"verified": null' in report.to_json()


def test_the_cell_in_which_it_begins_says_that_it_lasts():
    live = LiveRitual(7, 8, ())
    first = page_after_cell(None, live)
    assert first is not None
    assert first.headline == "Seeded with 7, 8 settings changed, until `%deterministic off`"
    assert page_after_cell(live, live) is None
