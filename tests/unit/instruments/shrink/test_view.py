"""What is shown of a report made by hand."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace

from torchdebug_magics.html.page import Facts, Fold, Note, Table
from torchdebug_magics.instruments.shrink.report import Costs, ShrinkReport, StackRow
from torchdebug_magics.instruments.shrink.view import page

STACK = StackRow(path="model.layers", type="Layer", layers_before=48, kept=(0, 3), kinds=2)
REPORT = ShrinkReport(
    stacks=(STACK,),
    before=Costs(parameters=7_000_000_000, bytes=28 << 30, flops=10**12, seconds_s=2.0),
    after=Costs(parameters=350_000_000, bytes=1 << 30, flops=10**11, seconds_s=0.1),
    proof="fake tensors",
    input="input_ids 1 x 8 int64",
    skipped_attention=1,
    problems=("a note",),
)


def test_the_savings_are_a_table_and_the_stacks_fold() -> None:
    shown = page(REPORT)
    assert shown.status == "warn"
    assert page(replace(REPORT, problems=())).status == "good"
    assert shown.headline == "7G parameters became 350M · `model.layers` keeps layers 0 and 3 of 48"
    facts, note, savings, fold = shown.blocks
    assert isinstance(facts, Facts)
    assert dict(facts.rows) == {"also": "attention skipped in 1 layer", "forward": "runs on fake tensors", "undo": "`%shrink MODEL --undo`"}
    assert note == Note("a note", "warn")
    assert isinstance(savings, Table)
    assert [row[0] for row in savings.rows] == ["parameters", "bytes", "FLOPs of a forward", "time of a forward"]
    assert savings.rows[0] == ("parameters", "7G", "350M", "5%")
    assert isinstance(fold, Fold)
    stacks, proof = fold.blocks
    assert isinstance(stacks, Table)
    assert stacks.rows == [("model.layers", "Layer", 48, "0, 3", 2)]
    assert isinstance(proof, Facts)
    assert proof.rows == (("proof", "a forward before and after, on fake tensors: input_ids 1 x 8 int64"),)


def test_many_stacks_do_not_make_a_long_headline() -> None:
    stacks = tuple(replace(STACK, path=f"model.encoder.stage{at}.layers") for at in range(5))
    report = replace(REPORT, stacks=stacks)
    assert len(report.title) <= 90
    assert report.title.count("keeps") + str(report.further).count("keeps") == 3
    assert "2 more stacks" in report.further


def test_what_was_undone_shows_the_reason() -> None:
    report = ShrinkReport(
        stacks=(STACK,), before=REPORT.before, after=REPORT.before, undone=True, reason="it fails", error="IndexError: 7", location="a.py:3"
    )
    shown = page(report)
    assert (shown.status, shown.headline) == ("warn", "Not shrunk: the model is unchanged")
    assert report.verdict == "Not shrunk, the model is unchanged: it fails"
    assert shown.blocks[0] == Facts((("why", "it fails"), ("error", "IndexError: 7"), ("at", "a.py:3")))
    assert [type(block) for block in shown.blocks] == [Facts, Fold]
    assert dict(report.kept) == {}


def test_it_is_plain_data() -> None:
    assert pickle.loads(pickle.dumps(REPORT)) == REPORT
    said = json.loads(REPORT.to_json())
    assert said["stacks"][0]["kept"] == [0, 3]
    assert said["before"]["parameters"] == 7_000_000_000
    assert (REPORT.parameters_before, REPORT.parameters_after) == (7_000_000_000, 350_000_000)
    assert dict(REPORT.kept) == {"model.layers": (0, 3)}
