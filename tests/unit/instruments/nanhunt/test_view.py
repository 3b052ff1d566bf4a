"""A nanhunt report on a page: from reports built by hand."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import pickle

import pytest

from torchdebug_magics.html import markup, plain
from torchdebug_magics.html.page import Chart, Code, Facts, Fold, Note, Page, Table
from torchdebug_magics.instruments.nanhunt.report import (
    Averaging,
    LayerRow,
    LiveNan,
    NanFinding,
    NanReport,
    PathStep,
    Sink,
    headline,
    sentence,
)
from torchdebug_magics.instruments.nanhunt.view import further_rows, live_page, page
from torchdebug_magics.report import Location

NAN, INF = math.nan, math.inf
LINE = Location(cell=4, file="<ipython-input-4>", line=7, function="forward", source="d = h.pow(2).sum(1).sqrt()")
LOSS_LINE = Location(cell=5, file="<ipython-input-5>", line=3, function="<module>", source="loss = criterion(model(x), y)")
SQRT = NanFinding(
    kind="inf",
    phase="backward",
    op="sqrt",
    module="1.0",
    call=1,
    location=LINE,
    step=5,
    backward=5,
    rows=(3,),
    index=(3,),
    operands=(0.0,),
    diagnosis="sqrt_at_zero",
    fix="add a small constant before the root: `(h.pow(2).sum(1) + 1e-12).sqrt()`",
    path=(
        PathStep(op="sqrt", phase="backward", module="1.0", location=LINE),
        PathStep(op="mul", phase="backward", module="1.0", location=LINE),
        PathStep(op="addmm", phase="backward", module="1", location=None),
    ),
    explanation="The derivative of sqrt is 1 / (2 sqrt(x)), which is infinite at x = 0.",
    model="model",
    bad_count=1,
    element_count=16,
    shape=(16,),
    dtype="float32",
    sink=Sink("gradient", "1.0.weight"),
    weights="weights untouched",
    excerpt=(
        (5, "    def forward(self, x):"),
        (6, "        h = self.proj(x)"),
        (7, "        d = h.pow(2).sum(1).sqrt()"),
        (8, "        return h / d[:, None]"),
    ),
)


def layer(module: str, *, nan_count: int = 0, call: int = 1) -> LayerRow:
    return LayerRow(
        module=module,
        type="Linear",
        call=call,
        shape=(16, 64),
        dtype="float32",
        nan_count=nan_count,
        posinf_count=0,
        neginf_count=0,
        min=-3.217,
        max=2.9961,
        mean_abs=0.7743,
        fp16_share=0.0000491,
        grad_nan_count=nan_count,
        grad_inf_count=0,
        grad_max_abs=0.01234,
        grad_mean_abs=0.0003321,
    )


def report_of(*findings: NanFinding, **fields: object) -> NanReport:
    draft = NanReport(findings=findings, **fields)  # type: ignore[arg-type]
    return dataclasses.replace(draft, sentence=sentence(draft), headline=headline(draft))


FOUND = report_of(
    SQRT,
    steps_count=5,
    backward_count=6,
    history=(2.31, 2.02, 1.9, 3.8, 41.7, INF),
    losses=(2.31, 2.02, 1.9, 1.88, 1.7, 1.65),
    layers=(layer(""), layer("0"), layer("1"), layer("1.0", nan_count=1), layer("1.1")),
    layers_step=5,
    reproduced=True,
    replay="statements",
)
FINE = report_of(steps_count=120, backward_count=120, history=(1.5, 3.1, 2.2))


def blocks(shown: Page, kind: type) -> list:
    """In the order of the page, folded or not."""
    return [block for block in unfolded(shown.blocks) if isinstance(block, kind)]


def unfolded(inside: tuple) -> list:
    return [inner for block in inside for inner in (block, *(unfolded(block.blocks) if isinstance(block, Fold) else ()))]


def before_folds(shown: Page) -> list[type]:
    return [type(block) for block in itertools.takewhile(lambda block: not isinstance(block, Fold), shown.blocks)]


def folds(shown: Page) -> list[str]:
    return [block.title for block in shown.blocks if isinstance(block, Fold)]


# ---------------------------------------------------------------------------------------------------------------- verdicts


@pytest.mark.parametrize(
    ("report", "said"),
    [
        (report_of(SQRT), SQRT.sentence()),
        (report_of(SQRT, SQRT, SQRT), f"{SQRT.sentence()} · and 2 more findings"),
        (
            FINE,
            "No NaN or inf in 120 backward passes and 120 optimizer steps; the largest magnitude was 3.1",
        ),
        (
            report_of(backward_count=1, steps_count=1, overflow_steps_count=2),
            "No NaN or inf in 1 backward pass and 1 optimizer step; 2 steps skipped by the GradScaler by design",
        ),
        (report_of(forward_count=3), "No NaN or inf in 3 forward-only model calls"),
        (report_of(steps_count=2), "No NaN or inf in 2 optimizer steps"),
        (report_of(overflow_steps_count=1), "1 step skipped by the GradScaler by design"),
        (report_of(), "Nothing to check: no backward(), optimizer step or model call"),
    ],
)
def test_the_verdict_is_one_sentence_that_says_what_was_checked(report, said):
    assert report.verdict == said


@pytest.mark.parametrize(
    ("report", "status"),
    [
        (FOUND, "bad"),
        (FINE, "good"),
        (report_of(forward_count=1), "good"),
        (report_of(backward_count=1, overflow_steps_count=4), "good"),
        (report_of(backward_count=1, problems=("not replayed: the source is not at hand",)), "warn"),
        (report_of(), "info"),
    ],
)
def test_every_report_has_a_status_and_its_title_first(report, status):
    # When it is shown
    shown = page(report)
    # Then the status is right, and both renderings begin with the title
    assert (shown.status, shown.headline) == (status, report.title)
    flat = " ".join(plain.render(shown).split())
    assert flat.split("] ", 1)[1].startswith(report.title)
    assert markup.render(shown).index("font-weight:bold") < 1000


# ----------------------------------------------------------------------------------------------------------------- findings


def test_a_finding_shows_fix_code_and_picture_and_folds_all_else():
    # Given a run whose gradients grew before the finding, and one in which they did not
    steady = dataclasses.replace(FOUND, history=(2.31, 2.02, 1.9, INF))
    grown = dataclasses.replace(FOUND, history=(2.0, 2e2, 2e4, INF))
    # Then the picture is seen at once only where it explains something
    assert before_folds(page(grown)) == [Facts, Code, Chart]
    assert before_folds(page(steady)) == [Facts, Code]
    assert folds(page(grown)) == [
        "Path from `sqrt` to the gradient of `1.0.weight`: 2 lines",
        "Details: elements, step, how it was found",
        "Layers: 5 module calls of step 5",
    ]
    assert folds(page(steady))[2] == "History: largest magnitude in each backward pass"


def test_what_is_read_first_is_said_once():
    rows = dict(page(FOUND).blocks[0].rows)
    assert list(rows) == ["fix", "why", "where", "weights"]
    assert (rows["where"], rows["weights"]) == ("row 3 of 16, operand 0.0", "untouched")
    assert FOUND.title == "NaN from sqrt in backward · step 5 · model.1.0 · In[4] line 7: `d = h.pow(2).sum(1).sqrt()`"
    assert not set(rows) & {name for name, _ in further_rows(SQRT, FOUND)}


@pytest.mark.parametrize(
    ("bad", "total", "said"),
    [
        ((3,), 16, "row 3 of 16"),
        ((3, 7), 16, "rows 3, 7 of 16"),
        (tuple(range(16)), 16, "all 16 rows"),
        (tuple(range(20)), 32, "20 of 32 rows (0, 1, 2, …)"),
        ((0,), 1, "row 0 of 1"),
        ((), 16, ""),
    ],
)
def test_rows_are_counted(bad, total, said):
    assert dataclasses.replace(SQRT, rows=bad, row_count=len(bad), shape=(total, 4)).rows_text == said


def test_more_rows_than_a_finding_keeps_are_counted_all_the_same():
    assert dataclasses.replace(SQRT, rows=tuple(range(20)), row_count=58, shape=(64, 1)).rows_text == "58 of 64 rows (0, 1, 2, …)"


@pytest.mark.parametrize("fields", [{}, {"module": "encoder.layers." * 8 + "0"}, {"phase": "data", "tensor": "batch['" + "x" * 100 + "']"}])
def test_a_title_is_short_and_ends_in_the_code(fields):
    title = dataclasses.replace(SQRT, **fields).title
    assert len(title.partition(": `")[0]) <= 90
    assert title.endswith(" · In[4] line 7: `d = h.pow(2).sum(1).sqrt()`")


def test_a_long_place_is_cut_at_its_function_and_then_at_its_start():
    place = Location(cell=None, file="/home/user/project/training.py", line=31, function="a_function_with_a_long_name", source="x")
    assert " · training.py:31: `x`" in dataclasses.replace(SQRT, location=place).title
    place = dataclasses.replace(place, file=f"/home/user/{'long' * 20}_training.py")
    title = dataclasses.replace(SQRT, location=place).title
    assert title.endswith("long_training.py:31: `x`")
    assert title.startswith("NaN from sqrt in backward · step 5 · …")
    assert len(title.partition(": `")[0]) <= 90


def test_a_run_that_diverged_says_so_and_shows_its_growth():
    finding = dataclasses.replace(SQRT, kind="inf", sink_kind="inf", phase="forward", op="addmm", diagnosis="lr_too_high")
    report = report_of(finding, history=(10.6, 1e3, 1.4e31, INF), backward_count=4)
    assert report.title.startswith("The run diverged: Inf from addmm in forward · step 5 · ")
    assert before_folds(page(report)) == [Facts, Code, Chart]
    (chart,) = blocks(page(report), Chart)
    assert chart.log
    assert "log scale" in chart.title


def test_the_expression_is_underlined_where_its_line_is_shown():
    underlined = dataclasses.replace(SQRT, underlined=(12, 34))
    (code,) = blocks(page(report_of(underlined)), Code)
    assert code.underlined == (12, 34)
    (code,) = blocks(page(report_of(dataclasses.replace(underlined, excerpt=()))), Code)
    assert code.underlined is None  # the line alone has lost its indentation


def test_what_is_fine_has_one_line_of_facts_and_the_table_that_was_requested():
    assert before_folds(page(FINE)) == [Facts]
    assert page(FINE).blocks[0].rows == (("checked", "the loss and all gradients; the largest magnitude was 3.1"),)
    assert FINE.title == "No NaN or inf in 120 backward passes and 120 optimizer steps"
    assert before_folds(page(dataclasses.replace(FINE, layers=(layer("0"),)))) == [Facts, Table]


def test_the_bad_line_is_marked_in_its_excerpt():
    (code,) = blocks(page(FOUND), Code)
    assert (code.marked, code.title, len(code.lines)) == (7, "In[4] line 7", 4)
    assert "-> 7 |         d = h.pow(2)" in plain.render(page(FOUND))


def test_without_an_excerpt_the_line_alone_is_shown():
    (code,) = blocks(page(report_of(dataclasses.replace(SQRT, excerpt=()))), Code)
    assert code.lines == ((7, LINE.source),)


def test_without_a_location_there_is_no_code():
    assert not blocks(page(report_of(dataclasses.replace(SQRT, location=None, excerpt=()))), Code)


def test_facts_are_worded_for_a_stranger():
    facts = dict(blocks(page(FOUND), Facts)[1].rows)
    assert facts["kind"] == "inf, and NaN by the time it surfaced"
    assert facts["when"] == "after 5 completed optimizer steps and 5 backward passes in this cell"
    assert facts["module"] == "`1.0` of `model`, call 1 in that step"
    assert facts["bad elements"] == "1 of 16 (6.2%), in a tensor of shape 16 and type float32"
    assert facts["first bad element"] == "[3]"
    assert facts["surfaced in"] == "the gradient of `1.0.weight`"
    assert "reproduced: the loss is the same to the last bit" in facts["how it was found"]


@pytest.mark.parametrize(
    ("replay", "reproduced", "said"),
    [
        ("module", False, "not reproduced"),
        ("graph", None, "nothing was run again"),
        ("", None, "the bad step was not run again"),
    ],
)
def test_the_report_is_honest_about_the_replay(replay, reproduced, said):
    facts = dict(blocks(page(report_of(SQRT, replay=replay, reproduced=reproduced)), Facts)[1].rows)
    assert said in facts["how it was found"]


@pytest.mark.parametrize(
    ("phase", "fields", "said"),
    [
        ("data", {"tensor": "x", "op": None, "module": None}, "NaN in input x · step 5"),
        (
            "parameter",
            {"tensor": "head.weight", "op": None, "module": None},
            "NaN in parameter model.head.weight, from before this cell · step 5",
        ),
        ("forward", {}, "NaN from sqrt in forward · step 5 · model.1.0"),
        ("loss", {"module": None}, "NaN from sqrt in forward · step 5 · In[4]"),
        ("backward", {}, "NaN from sqrt in backward · step 5"),
        ("backward", {"op": None}, "NaN in backward, source op not identified · step 5"),
        (
            "optimizer",
            {"tensor": "w", "op": "addcdiv_", "sink": Sink("tensor", "w")},
            "NaN from addcdiv_ in the optimizer's update of w · step 5",
        ),
        ("optimizer", {"tensor": "w", "op": None, "sink": Sink("gradient", "w")}, "NaN in the gradient of w, before the update · step 5"),
    ],
)
def test_every_phase_has_its_words(phase, fields, said):
    finding = dataclasses.replace(SQRT, phase=phase, **fields)
    assert finding.sentence().startswith(said)
    assert finding.title.startswith(said.partition(" · ")[0])


def path_of(*steps: PathStep, **fields: object) -> Table:
    (table,) = blocks(page(report_of(dataclasses.replace(SQRT, path=steps, **fields))), Table)
    return table


@pytest.mark.parametrize(
    ("dtype", "peak", "limit", "said"),
    [("float16", 44_992.0, 65_504.0, ("which ends at 65504.0", "float32")), ("float32", 0.5, 3e38, ("finite before it", "other ranks"))],
)
def test_gradients_that_were_received_are_not_blamed_on_an_op_of_this_rank(dtype, peak, limit, said):
    averaging = Averaging(dtype=dtype, local_peak=peak, limit=limit, world_size=2, tensor="0.weight", rank=1, location=None)
    finding = dataclasses.replace(SQRT, op=None, module=None, operands=(), diagnosis="averaged_from_other_ranks", averaging=averaging)
    assert finding.sentence().startswith(
        "NaN from averaging the gradients over ranks · step 5 · the gradients of rank 1 are finite before it"
    )
    assert "kind" not in dict(further_rows(finding, NanReport(findings=(finding,))))
    assert averaging.explanation("NaN").startswith("NaN comes from averaging the gradients over ranks: those of this rank (rank 1)")
    assert averaging.may_overflow is (dtype == "float16")
    assert (said[0] in averaging.explanation("NaN"), said[1] in averaging.fix()) == (True, True)


def test_operations_of_one_line_share_a_row():
    table = path_of(*SQRT.path)
    assert [row[:5] for row in table.rows] == [(1, "backward", "sqrt, mul", "1.0", "In[4] line 7"), (2, "backward", "addmm", "1", None)]


def test_the_forward_and_the_backward_of_a_line_are_two_rows():
    step = SQRT.path[0]
    assert [row[1] for row in path_of(dataclasses.replace(step, phase="loss"), step).rows] == ["forward", "backward"]


def test_a_line_that_runs_a_whole_model_names_the_first_and_the_last_operations():
    table = path_of(*(PathStep(op=f"op{place}", phase="forward", module=str(place), location=LOSS_LINE) for place in range(50)))
    assert table.rows[0][2:4] == (
        "op0, op1, op2, … (44 more) …, op47, op48, op49",
        "0, 1, 2, … (44 more) …, 47, 48, 49",
    )


@pytest.mark.parametrize(("phase", "said"), [("data", "input x"), ("parameter", "parameter x")])
def test_what_was_bad_before_any_operation_is_the_first_row(phase, said):
    table = path_of(PathStep(op="addmm", phase="forward", module="0", location=LOSS_LINE), phase=phase, tensor="x", op=None)
    assert [row[1:3] for row in table.rows] == [("before", said), ("forward", "addmm")]
    assert table.marked == {0}


def test_what_an_error_has_cut_short_is_not_called_fine():
    whole, cut = (report_of(backward_count=3, raised=raised) for raised in ("", "ValueError"))
    assert (page(whole).status, page(cut).status) == ("good", "info")
    assert cut.verdict == "No NaN or inf in 3 backward passes until ValueError"
    assert report_of(raised="ValueError").verdict == "Nothing to check until ValueError"
    assert report_of(raised="ValueError").title == "Nothing to check until ValueError"
    assert report_of().title == "Nothing to check: no backward(), optimizer step or model call"


def test_further_findings_fold_with_their_fixes():
    (fold,) = [block for block in blocks(page(report_of(SQRT, SQRT)), Fold) if block.title == "1 more finding"]
    assert fold.blocks == (Facts((("2", f"{SQRT.sentence()}. Fix: {SQRT.fix}"),)),)


# ------------------------------------------------------------------------------------------------------------------- layers


def test_the_layer_table_keeps_numbers_and_marks_the_bad_rows():
    table = blocks(page(FOUND), Table)[-1]
    assert table.caption == "Outputs and gradients of every module call in step 5, all float32, no inf"
    assert table.marked == {3}
    assert table.rows[0][0] == "(root)"
    assert table.rows[3][table.columns.index("NaN")] == 1


def test_the_range_of_fp16_is_a_column_only_where_it_applies():
    single, half = (layer("0"),), (layer("0"), dataclasses.replace(layer("1"), dtype="float16"))
    assert "of fp16 range" not in blocks(page(report_of(SQRT, layers=single)), Table)[-1].columns
    table = blocks(page(report_of(SQRT, layers=half)), Table)[-1]
    assert table.text(0)[table.columns.index("of fp16 range")] == "0.0049%"


@pytest.mark.parametrize(("phase", "marked"), [("backward", {0, 1}), ("loss", {1}), ("forward", {1})])
def test_bad_gradients_mark_a_row_only_where_the_backward_is_at_fault(phase, marked):
    rows = (dataclasses.replace(layer("0"), grad_nan_count=4), layer("1", nan_count=1), layer("2"))
    table = blocks(page(report_of(dataclasses.replace(SQRT, phase=phase), layers=rows)), Table)[-1]
    assert table.marked == marked


def test_what_is_the_same_in_every_row_takes_no_column():
    twice = (layer("0"), layer("0", call=2), dataclasses.replace(layer("1"), dtype="float16"))
    same, other = (blocks(page(report_of(SQRT, layers=rows)), Table)[-1] for rows in ((layer("0"), layer("1")), twice))
    assert {"call", "dtype"}.isdisjoint(same.columns)
    assert {"call", "dtype"} <= set(other.columns)


def test_where_there_is_an_infinity_all_of_their_columns_are_there():
    clean, bad = layer("0"), dataclasses.replace(layer("1"), grad_inf_count=2)
    without, having = (blocks(page(report_of(SQRT, layers=rows)), Table)[-1] for rows in ((clean, clean), (clean, bad)))
    assert {"+Inf", "-Inf", "gradient Inf"}.isdisjoint(without.columns)
    assert without.caption.endswith(", no inf")
    assert {"+Inf", "-Inf", "gradient Inf"} <= set(having.columns)
    assert "no inf" not in having.caption


def test_without_gradients_their_columns_are_gone():
    row = dataclasses.replace(layer("a"), grad_nan_count=None, grad_inf_count=None, grad_max_abs=None, grad_mean_abs=None)
    table = blocks(page(report_of(SQRT, layers=(row,))), Table)[-1]
    assert not [column for column in table.columns if "gradient" in column]


def test_a_thousand_layers_stay_below_100_kb_and_show_the_bad_one():
    # Given a model of 1000 layers whose 900th is bad
    rows = tuple(layer(f"transformer.h.{index}.attention.projection", nan_count=index == 900) for index in range(1000))
    # When its report is shown
    html = markup.render(page(dataclasses.replace(FOUND, layers=rows)))
    # Then the bad row is in the open part, the rest is counted
    assert len(html.encode()) < 100_000
    assert html.index("transformer.<wbr>h.<wbr>900.") < html.index("further rows")
    assert "more, see the report" in html


# ------------------------------------------------------------------------------------------------------ history, notes, live


def test_one_backward_makes_no_chart():
    assert not blocks(page(report_of(SQRT, history=(INF,))), Chart)


def test_the_chart_of_a_long_run_starts_where_its_history_does():
    (chart,) = blocks(page(report_of(backward_count=5000, history=(1.0, 2.0))), Chart)
    assert chart.first_x == 4998


def test_skipped_steps_are_explained_and_are_no_fault():
    (note,) = blocks(page(report_of(backward_count=9, overflow_steps_count=3)), Note)
    assert note.status == "info"
    assert note.text.startswith("3 steps skipped by the GradScaler by design: ")


def test_problems_are_notes():
    (note,) = blocks(page(report_of(SQRT, problems=("the replay was cut short",))), Note)
    assert note == Note("the replay was cut short", "warn")


def test_user_strings_are_escaped():
    # Given a model whose names are markup
    evil = "<script>alert(1)</script>"
    finding = dataclasses.replace(
        SQRT,
        module=evil,
        model=evil,
        fix=evil,
        sink=Sink("tensor", evil),
        operands=(evil,),
        location=dataclasses.replace(LINE, source=evil),
        excerpt=((7, evil),),
        path=(PathStep(op=evil, phase="loss", module=evil, location=LINE),),
    )
    # When it is shown everywhere a name can stand
    html = markup.render(page(report_of(finding, finding, layers=(layer(evil),), problems=(evil,))))
    # Then no element was smuggled in
    assert "<script" not in html
    assert "&lt;script&gt;" in html


def test_the_live_page_is_tiny():
    snapshot = LiveNan(120, 121, 2, 2.3125, tuple(float(value) for value in range(1, 400)), 14.237, "watching")
    shown = live_page(snapshot)
    assert shown.headline == "watching · step 120 · loss 2.312 · 14.2 steps per second · 2 skipped by the GradScaler"
    assert len(markup.render(shown).encode()) < 2000
    assert len(plain.render(shown).splitlines()) == 3


def test_the_live_page_before_the_first_step():
    assert live_page(LiveNan(0, 0, 0, None, (), None, "watching")).headline == "watching · step 0"


# ------------------------------------------------------------------------------------------------------- the report as data


def test_reports_pickle_and_hold_no_tensor():
    data = pickle.dumps(FOUND)
    assert b"torch._" not in data
    assert b"torch.nn" not in data
    assert pickle.loads(data) == FOUND


def test_json_is_strict():
    plain_data = json.loads(FOUND.to_json(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert plain_data["history"][-1] == "inf"
    assert next(iter(plain_data)) == "verdict"
