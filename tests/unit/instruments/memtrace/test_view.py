"""What a trace shows before the first fold, from reports made by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from torchdebug_magics.html import plain
from torchdebug_magics.html.page import Areas, Bars, Code, Facts, Fold, Note
from torchdebug_magics.instruments.memtrace.report import MemtraceReport
from torchdebug_magics.instruments.memtrace.trace import (
    HELD_BEFORE,
    Advice,
    GraphGrowth,
    Growth,
    Holder,
    Oom,
    Peak,
    Timeline,
    Undeleted,
)
from torchdebug_magics.instruments.memtrace.view import page
from torchdebug_magics.machine.guard_interrupt import Interrupt
from torchdebug_magics.report import Location

if TYPE_CHECKING:
    from torchdebug_magics.html.page import Block

MIB, GIB = 2**20, 2**30
LINE = Location(cell=9, file="a", line=5, function="<module>", source="outs.append(out)")
FAR = Location(cell=None, file="/home/someone/model.py", line=1234, function="a_function_with_a_rather_long_name", source="h = layer(x)")
PEAK = Peak(phase="backward", op="aten.mm", location=LINE, by_category={"activation": 3 * MIB, "other": MIB}, by_module={"lstm": MIB})
NAMES = ("parameter", "gradient", "optimizer state", "activation", "buffer", "temporary", "other")
TIMELINE = Timeline(categories={HELD_BEFORE: (GIB,) * 3, **{name: (0, MIB, MIB * at) for at, name in enumerate(NAMES, 1)}})
QUIET = MemtraceReport(
    net_bytes=0,
    start_bytes=GIB,
    peak_bytes=2 * GIB,
    peak=PEAK,
    timeline=TIMELINE,
    steps_count=9,
    excerpt=((4, "for x in data:"), (5, LINE.source)),
)
GROWTH = Growth(
    bytes_per_iteration=75 << 10,
    iterations_count=30,
    location=FAR,
    holder="outs[0].grad_fn -> UnsafeViewBackward0 -> … -> MkldnnRnnLayerBackward0.saved_hx_",
    variable="outs",
    fix="write `outs.append(out.detach())`",
    keeps_graph=True,
    kept_at=LINE,
)
OOM = Oom(
    asked_bytes=GIB, op="aten.mm", module="lstm", location=FAR, phase="forward", iteration=1234, kind="sizing", live_bytes=GIB,
    by_category=dict.fromkeys(NAMES, MIB), by_module={}, advice=(Advice(what="half the batch", saved_bytes=MIB, how="so"),),
)  # fmt: skip
FOUND = {
    "graph kept": replace(QUIET, growth=GROWTH),
    "objects": replace(
        QUIET,
        growth=replace(
            GROWTH, what="objects", holder="a_module.a_dataset.rows_of_the_table[0]", variable="a_module.a_dataset.rows_of_the_table"
        ),
    ),
    "workers": replace(QUIET, growth=replace(GROWTH, what="workers", holder="data.rows", variable="data.rows")),
    "profiler": replace(QUIET, growth=replace(GROWTH, what="profiler", holder="prof", variable="prof")),
    "graph": replace(
        QUIET,
        graph_growth=GraphGrowth(
            nodes_per_iteration=17, iterations_count=40, holder="total", variable="total", fix="cut it", location=LINE
        ),
    ),
    "del": replace(QUIET, undeleted=Undeleted(name="model", location=LINE, live_bytes=GIB, holder="kept", fix="delete it")),
    "handled": replace(QUIET, undeleted=Undeleted(name="", location=FAR, live_bytes=GIB, holder="error", fix="later")),
    "refused": replace(QUIET, oom=OOM),
    "refused after growth": replace(QUIET, oom=replace(OOM, kind="leak"), growth=GROWTH),
    "fragmented": replace(QUIET, oom=replace(OOM, kind="fragmentation", unused_reserved_bytes=GIB)),
}
STOP = Interrupt(9 * GIB, 10 * GIB, "container limit", 0.9)
FOUND |= {f"{name}, stopped": replace(report, interrupts=(STOP,)) for name, report in FOUND.items()}
CALM = {
    "in a file with a long name": replace(QUIET, peak=replace(PEAK, location=replace(FAR, file=f"/home/someone/{'a_long_name_' * 3}.py"))),
    "light": replace(QUIET, is_light=True, rss_peak_bytes=GIB, timeline=Timeline(), net_bytes=MIB),
    "unnamed": replace(QUIET, unnamed_bytes=GIB),
    "stopped": replace(QUIET, interrupts=(STOP,), holders=(Holder(path="kept[0]", variable="kept", live_bytes=GIB, location=LINE),)),
}


def seen_first(report: MemtraceReport) -> list[Block]:
    blocks = list(page(report).blocks)
    at = next(number for number, block in enumerate(blocks) if isinstance(block, Fold))
    assert all(isinstance(block, Fold) for block in blocks[at:])
    return blocks[:at]


@pytest.mark.parametrize("case", [*FOUND, *CALM])
def test_a_title_is_short_before_the_line_that_it_quotes(case: str):
    title = {**FOUND, **CALM}[case].title
    assert len(title.partition(": `")[0]) <= 90
    assert "fix" not in title
    assert "\n" not in title


@pytest.mark.parametrize("case", FOUND)
def test_the_fix_the_line_and_one_picture_come_before_the_folds(case: str):
    kinds = [type(block) for block in seen_first(FOUND[case])]
    assert kinds[:2] == [Facts, Code]
    assert kinds[2:] in ([Areas], [Bars])


@pytest.mark.parametrize("case", CALM)
def test_a_quiet_page_is_a_line_of_facts_and_the_picture(case: str):
    facts, *rest = seen_first(CALM[case])
    assert isinstance(facts, Facts)
    assert len(facts.rows) <= (3 if CALM[case].interrupts else 1)
    assert [type(block) for block in rest] == ([] if CALM[case].is_light else [Areas])


def test_the_headline_names_the_variable_and_the_line_and_the_graph_folds():
    shown = page(FOUND["graph kept"])
    assert shown.headline == "`outs` keeps each iteration's graph (+75.0 KiB each) · In[9] line 5: `outs.append(out)`"
    before = plain.render(replace(shown, blocks=tuple(seen_first(FOUND["graph kept"]))))
    assert "Backward0" not in before
    assert "kept by  `outs[0]`, allocated at model.py:1234" in before
    assert "Path from `outs` to the memory: 4 steps:\n\nouts[0].grad_fn\n-> UnsafeViewBackward0" in plain.render(shown)


def test_nothing_is_said_twice():
    shown = page(FOUND["graph kept"])
    rows = dict(seen_first(FOUND["graph kept"])[0].rows)  # type: ignore[union-attr]
    assert not any(text in shown.headline for text in rows.values())
    assert shown.headline.count("outs.append") == 1


def test_a_graph_that_grows_has_its_line_with_its_neighbours():
    code = seen_first(FOUND["graph"])[1]
    assert code == Code(((4, "for x in data:"), (5, "outs.append(out)")), 5, "In[9] line 5")


def test_what_was_held_before_does_not_flatten_the_rest():
    picture = seen_first(QUIET)[-1]
    assert isinstance(picture, Areas)
    assert picture.series[0][0] == HELD_BEFORE
    assert GIB - 8 * MIB < picture.bottom < GIB
    flat = replace(QUIET, timeline=replace(TIMELINE, categories={HELD_BEFORE: (MIB, MIB), "activation": (0, 9 * MIB)}))
    assert seen_first(flat)[-1].bottom == 0  # type: ignore[union-attr]


def test_at_most_five_kinds_are_drawn_and_no_byte_is_lost():
    picture = seen_first(QUIET)[-1]
    assert isinstance(picture, Areas)
    assert len(picture.series) == 5
    assert picture.series[-1][0] == "other"
    drawn = [sum(values) for values in zip(*(values for _, values in picture.series), strict=True)]
    assert drawn == [sum(values) for values in zip(*TIMELINE.categories.values(), strict=True)]


def test_after_the_guard_the_largest_variables_are_named():
    assert ("held by", "`kept` 1.0 GiB") in seen_first(CALM["stopped"])[0].rows  # type: ignore[union-attr]
    assert page(CALM["stopped"]).status == "warn"
    assert page(CALM["stopped"]).headline == "Stopped by guard at 9.0 GiB of 10.0 GiB (container limit)"


def test_what_else_was_found_folds():
    both = replace(FOUND["del"], growth=GROWTH, graph_growth=FOUND["graph"].graph_growth)
    assert [block.title for block in page(both).blocks if isinstance(block, Fold)][1] == "Also found: 1 more"


def test_problems_are_seen():
    assert any(isinstance(block, Note) for block in seen_first(replace(QUIET, problems=("a reading failed",))))
