"""What is shown of reports made by hand, and of the live snapshots."""

from __future__ import annotations

import json
import math
import pickle
from dataclasses import replace

import pytest

from torchdebug_magics.html import markup, plain
from torchdebug_magics.html.page import Chart, Code, Facts, Fold, Heatmap, Note, Table
from torchdebug_magics.instruments.gradwatch.report import GradFinding, GradReport, ModuleRow, verdict
from torchdebug_magics.instruments.gradwatch.view import live_page, page
from torchdebug_magics.report import Location

HERE = Location(cell=4, file="x", line=7, function="<module>", source="loss.backward()")
SPIKE = GradFinding(
    kind="exploding_spike", step=25, module="0", value=40.0, headline="gradient norm 80.0 in step 25", fix="`clip`", location=HERE,
    excerpt=((6, "loss = f()"), (7, "loss.backward()")), explanation="one batch",
)  # fmt: skip
CLIPPED = GradFinding(kind="clipped_always", step=0, module=None, value=100.0, headline="clipping cuts every gradient", fix="`max_norm=5`")


def row(name: str) -> ModuleRow:
    return ModuleRow(
        module=name, type="Linear", parameters_count=12, steps_count=4, norm_median=1.0, norm_max=80.0, ratio_median=1e-3, zero_share=0.25
    )


ROWS = (row(""), row("0"))
VALUES = {"": [1.0, 2.0, None, 0.0], "0": [1.0, math.inf, 1.0, 1.0]}
REPORT = verdict(
    GradReport(
        findings=(SPIKE, CLIPPED), modules=("", "0"), norms=VALUES, ratios=VALUES, zeros=VALUES,
        losses=[3.0, 2.0, None, 1.0], totals=[1.0, 3.0, 2.0, 1.0], steps_count=4, backward_count=4, rows=ROWS,
    )
)  # fmt: skip


def test_the_finding_comes_first_then_the_heatmap_and_the_rest_folds() -> None:
    shown = page(REPORT)
    assert shown.status == "bad"
    assert shown.headline == "Gradient norm 80.0 in step 25 · In[4] line 7: `loss.backward()`"
    assert [type(block) for block in shown.blocks] == [Facts, Code, Heatmap, Fold, Fold, Fold, Fold]
    folds = [block for block in shown.blocks if isinstance(block, Fold)]
    assert [fold.title for fold in folds] == [
        "Also: Clipping cuts every gradient", "Loss and gradient norm by step", "Updates and zeros by module", "Modules: 2 rows",
    ]  # fmt: skip
    assert [[type(block) for block in fold.blocks] for fold in folds] == [[Facts], [Chart, Chart], [Heatmap, Heatmap], [Table]]
    table = folds[-1].blocks[0]
    assert isinstance(table, Table)
    assert table.text(0) == ("(model)", "Linear", "12", "1.0", "80.0", "0.001", "25%")
    assert table.marked == {1}


def test_html_and_text_hold_all_of_it_and_stay_small() -> None:
    html, text = markup.render(page(REPORT)), plain.render(page(REPORT))
    assert len(html) < 100_000
    assert html.count("<img") == 5
    assert "alt=" in html
    assert "NaN or inf" in html
    assert "Gradient norm by module: 2 rows over 4 steps, from 0.0 to 2.0, largest in (model)" in text


def test_a_thousand_modules_over_256_bins_stay_below_100_kb() -> None:
    names = tuple(f"transformer.h.{number}.attention.projection" for number in range(1000))
    values = {name: [1.0 + number % 7 for number in range(256)] for name in names}
    rows = tuple(map(row, names))
    report = GradReport(
        modules=names, norms=values, ratios=values, zeros=values, losses=[1.0] * 256, totals=[1.0] * 256, rows=rows, steps_count=256
    )
    shown = page(verdict(report))
    assert len(markup.render(shown)) < 100_000
    assert len(markup.render(live_page(report))) < 120_000
    heatmap = shown.blocks[0]
    assert isinstance(heatmap, Heatmap)
    assert heatmap.title == "Gradient norm by module (20 of 1,000 modules, evenly chosen)"
    assert [heatmap.rows[0][0], heatmap.rows[-1][0], len(heatmap.rows)] == [names[0], names[-1], 20]


@pytest.mark.parametrize(
    ("report", "status", "words"),
    [
        (GradReport(), "info", "No optimizer step in this cell: nothing to watch"),
        (GradReport(backward_count=3), "info", "Nothing to watch: 3 backward passes, no optimizer step"),
        (GradReport(steps_count=3), "info", "No gradients to watch: 3 optimizer steps without gradients"),
        (GradReport(steps_count=3, rows=ROWS, modules=("a",)), "good", "Gradients and updates look healthy: 3 steps of 1 module"),
        (GradReport(steps_count=3, rows=ROWS, nonfinite_step=2), "warn", "Gradients are NaN or inf from step 2 on"),
        (GradReport(steps_count=3, rows=ROWS, findings=(CLIPPED,)), "warn", "Clipping cuts every gradient"),
    ],
)  # fmt: skip
def test_the_other_verdicts(report: GradReport, status: str, words: str) -> None:
    shown = page(verdict(report))
    assert shown.status == status
    assert shown.headline.startswith(words)


def test_while_it_runs() -> None:
    shown = live_page(replace(REPORT, learning_rate=1e-3))
    assert shown.headline == "Step 3 · loss 1.0 · learning rate 0.001"
    assert [type(block) for block in shown.blocks] == [Note, Facts, Heatmap]
    html = markup.render(shown)
    assert "<img" not in html
    assert "█" in html
    assert live_page(GradReport()).headline == "Waiting for the first optimizer step"


def test_a_report_is_plain_data() -> None:
    assert pickle.loads(pickle.dumps(REPORT)) == REPORT
    read = json.loads(REPORT.to_json())
    assert read["finding"]["step"] == 25
    assert read["norms"]["0"] == [1.0, "inf", 1.0, 1.0]
