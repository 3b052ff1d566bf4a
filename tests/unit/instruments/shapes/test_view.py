"""What a shapes report shows, from reports built by hand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from IPython.core.error import UsageError

from torchdebug_magics.errors import TorchDebugError
from torchdebug_magics.html import markup, plain
from torchdebug_magics.html.page import Bars, Block, Code, Facts, Fold, Note, Table
from torchdebug_magics.instruments.shapes.outline import COLUMNS, column_named, layout
from torchdebug_magics.instruments.shapes.report import Failure, Fix, Layout, Need, Row, ShapesReport, Step
from torchdebug_magics.instruments.shapes.view import page
from torchdebug_magics.report import Location

LINE = Location(cell=2, file="<cell>", line=9, function="forward", source="return self.fc(x)")


def row(path: str, type_: str = "Linear", **facts: object) -> Row:
    given = {"call": 1, "output_shapes": ((4, 8),), "output_names": ("",), "dtype": "float32", "device": "cpu"} | facts
    return Row(path=path, type=type_, depth=path.count(".") + 1 if path else 0, **given)


def report(*rows: Row, **facts: object) -> ShapesReport:
    given = {
        "model": "Net",
        "total_params": sum(one.own_params for one in rows),
        "trainable_params": sum(one.trainable_params for one in rows),
        "buffer_count": 0,
        "total_flops": rows[0].flops if rows else 0,
        "param_bytes": 4 * sum(one.own_params for one in rows),
        "activation_bytes": 0,
        "mode": "fake",
    } | facts
    return ShapesReport(rows=rows, **given)


def unfolded(shown: Sequence[Block]) -> Iterator[Block]:
    for block in shown:
        yield block
        yield from unfolded(block.blocks) if isinstance(block, Fold) else ()


def blocks(one: ShapesReport, kind: type) -> list:
    return [block for block in unfolded(page(one).blocks) if isinstance(block, kind)]


def kinds(one: ShapesReport) -> list[str]:
    return [type(block).__name__ for block in page(one).blocks]


def table(one: ShapesReport) -> Table:
    return next(block for block in blocks(one, Table) if "module" in block.columns and block.caption.startswith("Every"))


def labels(one: ShapesReport) -> list[str]:
    shown = table(one)
    return [shown.label(at) for at in range(len(shown.rows))]


def column(one: ShapesReport, name: str) -> list[object]:
    shown = table(one)
    return [cells[shown.columns.index(name)] for cells in shown.rows]


def fact(one: ShapesReport, name: str) -> str:
    return " ".join(value for block in blocks(one, Facts) for said, value in block.rows if said == name)


def block_rows(*numbers: int, wide: int = 10) -> list[Row]:
    parts = []
    for number in numbers:
        parts += [
            row(f"layers.{number}", "Block", flops=100, activation_bytes=50 + number),
            row(f"layers.{number}.fc", own_params=wide, trainable_params=wide, flops=100),
        ]
    return parts


# The tree ---------------------------------------------------------------------------------------------------------------


def test_a_module_stands_in_the_one_whose_path_begins_its_own():
    one = report(row("", "Net"), row("body.0", "Block"), row("body.0.fc"), row("head"))
    assert labels(one) == ["Net", "  body.0", "    fc", "  head"]


def test_blocks_that_are_alike_are_folded_and_show_the_numbers_of_one():
    one = report(row("", "Net", flops=300), *block_rows(0, 1, 2))
    assert labels(one) == ["Net", "  layers.0 … 2  (x 3)", "    fc"]
    assert column(one, "params") == [30, 10, 10]
    assert column(one, "FLOPs") == [300, 100, 100]
    asked = replace(one, layout=layout(columns="share"))
    assert column(asked, "share of FLOPs") == [1.0, pytest.approx(1 / 3), pytest.approx(1 / 3)]
    assert column(one, "activations") == [None, 51, None]
    assert column(one, "module") == ["Net", "layers.0 … 2  (x 3)", "layers.0 … 2.fc  (x 3)"]
    assert "`layers.0 … 2  (x 3)` stands for 3 equal calls, with the numbers of one" in fact(one, "table")


def test_folded_and_single_rows_agree():
    one = report(row("", "Net", flops=300), *block_rows(0, 1, 2))
    single = table(one).whole
    assert single is not None
    assert table(one).rows[2][1:7] == single.rows[2][1:7]


def test_blocks_in_blocks_say_how_many_there_are_in_one():
    experts = [
        part
        for layer in range(2)
        for part in (row(f"layers.{layer}", "Block"), *(row(f"layers.{layer}.experts.{at}", own_params=5) for at in range(4)))
    ]
    one = report(row("", "Net"), *experts)
    assert labels(one) == ["Net", "  layers.0 … 1  (x 2)", "    experts.0 … 3  (x 4)"]
    assert column(one, "params") == [40, 20, 5]


def test_the_whole_is_kept_for_a_view_in_which_one_can_search():
    whole = table(report(row("", "Net"), *block_rows(0, 1, 2))).whole
    assert whole is not None
    assert [cells[0] for cells in whole.rows] == ["Net", *(f"layers.{at}{part}" for at in range(3) for part in ("", ".fc"))]


def test_blocks_that_differ_stay_apart():
    one = report(row("", "Net"), *block_rows(0, 1), *block_rows(2, wide=11), *block_rows(3, 4), *block_rows(6))
    assert labels(one)[1::2] == ["  layers.0 … 1  (x 2)", "  layers.2", "  layers.3 … 4  (x 2)", "  layers.6"]


def test_lists_that_are_called_in_turn_are_folded():
    turns = [part for at in range(4) for part in (row(f"convs.{at}", own_params=5), row(f"norms.{at}", "Norm", own_params=2))]
    one = report(row("", "Net"), *turns)
    assert labels(one) == ["Net", "  convs.0 … 3  (x 4)", "  norms.0 … 3  (x 4)"]
    assert column(one, "params") == [28, 5, 2]


def test_calls_of_one_module_are_folded_and_its_parameters_counted_once():
    calls = [row("cell", call=1, own_params=7, flops=5)] + [row("cell", call=at, note="called before", flops=5) for at in (2, 3)]
    one = report(row("", "Net", flops=15), *calls)
    assert labels(one) == ["Net", "  cell  (x 3)"]
    assert column(one, "call") == [1, "1 … 3"]
    assert column(one, "params") == [7, 7]
    assert column(one, "FLOPs") == [15, 5]
    assert "note" not in table(one).columns


def test_a_module_that_was_never_called_stands_where_it_belongs_and_is_said_above():
    one = report(row("", "Net"), row("body", "Body"), row("body.fc"), row("head"), unused=("body.aux",))
    assert labels(one) == ["Net", "  body", "    fc", "    aux", "  head"]
    assert column(one, "note")[3] == "never called"
    assert one.verdict.endswith("never called: `body.aux`")
    assert page(one).status == "info"
    assert fact(one, "never called").startswith("`body.aux`")


def test_thousands_of_calls_are_quick_to_fold():
    rows = [row("", "Net"), *(row(f"cells.{at % 2}", call=at // 2 + 1) for at in range(8000))]
    assert labels(report(*rows)) == ["Net", "  cells.0  (x 4,000)", "  cells.1  (x 4,000)"]


def test_a_tree_200_deep():
    rows = [row("", "Net"), *(row(".".join("a" * depth)) for depth in range(1, 201))]
    one = report(*rows)
    assert len(table(one).rows) == 201
    assert len(markup.render(page(one)).encode()) < 100_000
    assert plain.render(page(one))


def test_1000_modules_stay_below_100_kb():
    rows = [row("", "Net"), *(row(f"part{at // 50}.{at}", note=f"weight shared with part0.{at}" * 3) for at in range(1000))]
    assert len(markup.render(page(report(*rows, layout=Layout(plot=True)))).encode()) < 100_000


# Columns ----------------------------------------------------------------------------------------------------------------


def test_what_all_share_is_said_once():
    one = report(row("", "Net"), row("fc"))
    assert not {"call", "dtype", "trainable", "own params", "note"} & set(table(one).columns)
    assert "all outputs float32 on cpu" in table(one).caption
    mixed = report(row("", "Net"), row("fc", dtype="float16"), row("on", device="cuda:0"))
    assert column(mixed, "dtype") == ["float32 on cpu", "float16 on cpu", "float32 on cuda:0"]


def test_what_differs_is_shown():
    one = report(row("", "Net", own_params=3, trainable_params=0), row("fc", own_params=4, trainable_params=4))
    assert column(one, "own params") == [3, 4]
    assert column(one, "trainable") == [4, 4]
    assert "4 trainable, 3 frozen" in fact(one, "parameters")


def test_nested_outputs_are_named_and_formulas_take_their_place():
    many = row("", "Net", output_shapes=((2, 5), (2, 8), (), (1,), (1,)), output_names=("logits", "hidden[0]", "loss", "a", "b"))
    assert column(report(many), "output") == ["logits 2 x 5, hidden[0] 2 x 8, loss () and 2 more"]
    assert column(report(row("", "Net", formula="(B, T, 4*D)")), "output") == ["(B, T, 4*D)"]


@pytest.mark.parametrize(
    ("word", "name"),
    [
        *((one.name, one.name) for one in COLUMNS),
        ("FLOPS", "FLOPs"),
        ("flop", "FLOPs"),
        ("act", "activations"),
        ("parameters", "params"),
        ("own-params", "own params"),
        ("share", "share of FLOPs"),
        ("memory", "activations"),
        ("out", "output"),
    ],
)
def test_a_column_may_be_named_in_many_ways(word, name):
    assert column_named(word) == name


@pytest.mark.parametrize("option", ["columns", "sort"])
def test_an_unknown_column_is_one_line_that_lists_them(option):
    with pytest.raises(TorchDebugError, match=r"^there is no column 'weird'; the columns are module, .*own-params.*note$"):
        layout(**{option: "weird"})


def test_the_columns_that_were_asked_for():
    one = report(row("", "Net", flops=5), row("fc", flops=5), layout=layout(columns="flops,output params"))
    assert table(one).columns == ("module", "FLOPs", "output", "params")


def test_down_to_a_depth_the_numbers_hold_what_is_left_out():
    one = report(row("", "Net"), *block_rows(0, 1), layout=Layout(depth=1))
    assert labels(one) == ["Net", "  layers.0 … 1  (x 2)"]
    assert column(one, "params") == [20, 10]


def test_sorted_it_is_a_list_of_every_call():
    one = report(row("", "Net", flops=5), row("a", flops=1), row("b"), row("c.0", flops=3), layout=layout(sort="flops"))
    assert [cells[0] for cells in table(one).rows] == ["Net", "c.0", "a", "b"]
    assert not table(one).tree
    by_name = report(row("", "Net"), row("b"), row("a"), layout=layout(sort="module"))
    assert [cells[0] for cells in table(by_name).rows] == ["Net", "a", "b"]


# A failure --------------------------------------------------------------------------------------------------------------

FAILED = report(
    row("", "Net", output_shapes=(), output_names=(), note="did not return"),
    row("conv"),
    row("fc", input_shapes=((1, 576),), output_shapes=(), output_names=(), note="did not return"),
    failure=Failure(
        module="fc",
        op="linear",
        location=LINE,
        operand_shapes=((1, 576), (10, 256)),
        operand_names=("x", "fc.weight"),
        explanation="`fc` expects 256 features, gets 576: `flatten` merged the batch",
        underlined=(7, 17),
        fixes=(Fix(code="fc = nn.Linear(576, 10)", verified=True), Fix(code="a\nb", verified=False, why="because")),
        error="RuntimeError: mat1 and mat2",
        chain=(
            Step(op="conv2d", module="conv", input_shapes=((1, 3, 8, 8), (16, 3, 3, 3)), output_shape=(1, 16, 6, 6)),
            Step(op="flatten", module="", input_shapes=((1, 16, 6, 6),), output_shape=(1, 576)),
        ),
    ),
)


def test_a_failure_shows_the_fix_and_the_line_and_folds_the_rest():
    assert kinds(FAILED) == ["Facts", "Code", "Fold", "Fold", "Fold"]
    facts, code, path, layers, details = page(FAILED).blocks
    assert page(FAILED).status == "bad"
    assert page(FAILED).headline == f"{FAILED.failure.explanation} · In[2] line 9: `return self.fc(x)`"
    assert facts.rows == (
        ("fix", "`fc = nn.Linear(576, 10)` · verified on a copy"),
        ("or", "`a` and `b` · because · not verified"),
    )
    assert code == Code(((9, "return self.fc(x)"),), 9, "In[2] line 9", (7, 17))
    assert [fold.title for fold in (path, layers, details)] == [
        "Path of the shape `1 x 576`: 2 operations",
        "Layers: 3 module calls up to the failure",
        "Details: operands and error, totals and method",
    ]
    assert fact(FAILED, "operands") == "`x` 1 x 576, `fc.weight` 10 x 256"
    steps = path.blocks[0]
    assert steps.columns == ("#", "operation", "module", "from", "to")
    assert steps.rows == [(1, "conv2d", "conv", "1 x 3 x 8 x 8", "1 x 16 x 6 x 6"), (2, "flatten", None, "1 x 16 x 6 x 6", "1 x 576")]


def test_a_verified_fix_says_so_once_and_nothing_is_said_twice():
    shown = plain.render(page(FAILED))
    assert shown.count("verified on a copy") == 1
    assert shown.count("nn.Linear(576, 10)") == 1
    assert shown.count("expects 256 features") == 1


def test_what_the_headline_leaves_out_stands_below_the_fix():
    explanation = f"{FAILED.failure.explanation}, and {'the input is longer than the model was made for, ' * 2}too"
    long = replace(FAILED, failure=replace(FAILED.failure, explanation=explanation))
    assert page(long).headline == f"{FAILED.failure.explanation} · In[2] line 9: `return self.fc(x)`"
    assert page(long).blocks[0].rows[-1] == ("why", explanation)


def test_further_fixes_are_in_the_details():
    fixes = tuple(Fix(code=f"a{at}", verified=True) for at in range(4))
    one = replace(FAILED, failure=replace(FAILED.failure, fixes=fixes))
    assert [name for name, _ in page(one).blocks[0].rows] == ["fix", "or"]
    assert fact(one, "fix 4") == "`a3` · verified on a copy"


def test_what_is_suspected_keeps_the_table_open():
    one = report(row("", "Net"), row("fc"), suspect=replace(FAILED.failure, error=""))
    assert page(one).status == "warn"
    assert kinds(one) == ["Facts", "Code", "Table", "Fold", "Fold"]


def test_a_page_without_a_finding_has_one_line_and_the_table():
    one = report(row("", "Net", flops=5), row("fc"), inputs="x 4 x 3 float32", needs=(need(),), total_flops=5)
    assert kinds(one) == ["Facts", "Table", "Fold", "Fold"]
    assert page(one).headline == "Net: x 4 x 3 float32 → 4 x 8 · 0 parameters · 5 FLOPs"
    assert len(page(one).blocks[0].rows) == 1


def test_a_long_input_is_a_fact():
    long = ", ".join(f"input_{at} 4 x 3 float32" for at in range(9))
    one = report(row("", "Net"), inputs=long)
    assert page(one).headline == "Net: 0 parameters · 0 FLOPs"
    assert fact(one, "input") == long


def test_the_row_in_which_it_broke_is_marked():
    assert table(FAILED).marked == {2}
    assert column(FAILED, "note") == ["", "", "failed here"]


def test_the_failing_one_of_many_alike_is_not_folded_away():
    broken = row("layers.2", output_shapes=(), output_names=())
    one = report(row("", "Net", output_shapes=()), row("layers.0"), row("layers.1"), broken, failure=Failure(
        module="layers.2", op=None, location=None, operand_shapes=(), explanation="no", error="E",
    ))  # fmt: skip
    assert labels(one) == ["Net", "  layers.0 … 1  (x 2)", "  layers.2"]
    assert table(one).marked == {2}


def test_a_failure_outside_every_module_has_no_table():
    failure = Failure(module=None, op="cat", location=LINE, operand_shapes=((1, 2), (1, 3)), explanation="they differ", error="E")
    shown = plain.render(page(report(failure=failure)))
    assert "they differ" in shown
    assert "parameters" not in shown


# Below ------------------------------------------------------------------------------------------------------------------


def need(**facts: object) -> Need:
    given = {
        "optimizer": "Adam", "parameters_bytes": 2**30, "gradients_bytes": 2**30, "optimizer_bytes": 2**31, "activations_bytes": 2**32,
        "limit_bytes": 2**34, "limit": "NVIDIA T4", "batch": 8, "largest_batch": 24,
    }  # fmt: skip
    return Need(**(given | facts))


@pytest.mark.parametrize(
    ("facts", "sentence"),
    [
        ({}, "raining with Adam at batch size 8 needs about 8.0 GiB: fits the 16.0 GiB of NVIDIA T4; so does batch size 24"),
        ({"largest_batch": 8}, "raining with Adam at batch size 8 needs about 8.0 GiB: fits the 16.0 GiB of NVIDIA T4"),
        (
            {"limit_bytes": 2**32 + 2**31, "largest_batch": 4},
            "raining with Adam at batch size 8 needs about 8.0 GiB: does not fit the 6.0 GiB of NVIDIA T4; batch size 4 fits",
        ),
        (
            {"limit_bytes": 2**31, "largest_batch": 0},
            "raining with Adam at batch size 8 needs about 8.0 GiB: does not fit the 2.0 GiB of NVIDIA T4; no batch size fits",
        ),
        ({"limit_bytes": None, "largest_batch": None, "batch": None}, "raining with Adam needs about 8.0 GiB"),
    ],
)
def test_what_training_takes_is_one_sentence(facts, sentence):
    one = report(row("", "Net"), needs=(need(optimizer="SGD"), need(**facts)))
    fits = "does not fit" not in sentence
    shown = fact(one, "cost") if fits else next(block.text for block in page(one).blocks if isinstance(block, Note))
    assert shown.endswith(sentence)
    needs = blocks(one, Table)[-1]
    assert needs.text(0)[:6] == ("SGD", "1.0 GiB", "1.0 GiB", "2.0 GiB", "4.0 GiB", "8.0 GiB")


@pytest.mark.parametrize(("mode", "words"), [("fake", "nothing was computed"), ("real", "ran on real tensors"), ("meta", "`meta`")])
def test_how_it_was_found_is_said_in_words(mode, words):
    assert words in fact(report(row("", "Net"), mode=mode), "method")


def test_parameters_alone():
    rows = [row("", "Net", call=0, output_shapes=()), row("fc", call=0, output_shapes=(), own_params=5, trainable_params=5)]
    one = report(*(r for r in rows), mode="params")
    assert table(one).columns[:2] == ("module", "type")
    assert not {"FLOPs", "activations", "input", "output", "call"} & set(table(one).columns)
    assert not fact(one, "FLOPs")


def test_what_is_not_counted_is_in_a_fold():
    fold = blocks(report(row("", "Net"), uncounted_ops=("relu", "add")), Fold)[0]
    assert fold.title == "Details: totals and method"
    assert ("not counted", "FLOPs of `relu`, `add`") in fold.blocks[0].rows


def test_the_picture_shows_the_largest_parts_and_together_all():
    rows = [row("", "Net", flops=100), *block_rows(0, 1, 2), row("head", own_params=4, flops=0), row("drop", "Dropout")]
    one = report(*rows, layout=Layout(plot=True))
    bars = blocks(one, Bars)[0]
    assert bars.labels[-2:] == ("layers.0 … 2.fc  (x 3)", "head") or "head" in bars.labels
    for measure in bars.measures:
        if measure.name == "parameters":
            assert sum(measure.values) == one.total_params
    assert not blocks(report(*rows), Bars)


@pytest.mark.parametrize("cell", ["%shapes model (4, 2) --sort weird", "%%shapes --columns weird\nmodel", "%shapes 3"])
def test_what_is_asked_in_the_wrong_way_is_said_in_one_line(shell: Any, capsys: pytest.CaptureFixture[str], cell: str) -> None:
    shell.run_cell("import torch; model = torch.nn.Linear(2, 3)")
    assert type(shell.run_cell(cell).error_in_exec) is UsageError
    assert "Traceback" not in capsys.readouterr().out
