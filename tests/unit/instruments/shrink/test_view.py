"""What is shown of a report made by hand."""

from __future__ import annotations

import json
import pickle

from torchdebug_magics.html.page import Table
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


def test_the_savings_are_a_table() -> None:
    shown = page(REPORT)
    assert shown.status == "good"
    assert shown.verdict == (
        "7G parameters became 350M · `model.layers` keeps layers 0 and 3 of 48 · attention skipped in 1 layer · "
        "the forward runs on fake tensors"
    )
    savings, stacks = (block for block in shown.blocks if isinstance(block, Table))
    assert [row[0] for row in savings.rows] == ["parameters", "bytes", "FLOPs of a forward", "time of a forward"]
    assert savings.rows[0] == ("parameters", "7G", "350M", "5%")
    assert stacks.rows == [("model.layers", "Layer", 48, "0, 3", 2)]


def test_what_was_undone_shows_the_reason() -> None:
    report = ShrinkReport(
        stacks=(STACK,), before=REPORT.before, after=REPORT.before, undone=True, reason="it fails", error="IndexError: 7", location="a.py:3"
    )
    shown = page(report)
    assert (shown.status, shown.verdict) == ("warn", "Not shrunk, the model is as before: it fails")
    assert "a.py:3" in str(shown.blocks)
    assert dict(report.kept) == {}


def test_it_is_plain_data() -> None:
    assert pickle.loads(pickle.dumps(REPORT)) == REPORT
    said = json.loads(REPORT.to_json())
    assert said["stacks"][0]["kept"] == [0, 3]
    assert said["before"]["parameters"] == 7_000_000_000
    assert (REPORT.parameters_before, REPORT.parameters_after) == (7_000_000_000, 350_000_000)
    assert dict(REPORT.kept) == {"model.layers": (0, 3)}
