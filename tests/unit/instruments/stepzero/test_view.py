"""What is shown of a report made by hand."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace

from torchdebug_magics.html.page import Facts, Fold, Table
from torchdebug_magics.instruments.stepzero.report import BufferRow, DataRow, ParameterRow, StepzeroReport
from torchdebug_magics.instruments.stepzero.view import page

MOVED = ParameterRow(parameter="head.weight", distance=1.5, relative=0.25, learning_rates=12.0)
STILL = ParameterRow(parameter="encoder.bias", distance=0.0, relative=0.0, learning_rates=None, why="not in the optimizer")
FROZEN = ParameterRow(parameter="encoder.weight", distance=0.0, relative=0.0, learning_rates=None, why="frozen")
REPORT = StepzeroReport(
    action="compared",
    steps=20,
    moved=(MOVED,),
    unmoved=(STILL, FROZEN),
    buffers=(BufferRow(buffer="norm.mean", distance=0.5),),
    data=(DataRow(data="x", digest="00ff", changed=False),),
    parameters_count=3,
    elements_count=100,
    held_bytes=400,
)


def test_what_never_moved_comes_first_with_the_reason() -> None:
    shown = page(REPORT)
    assert shown.status == "warn"
    assert shown.headline == "After 20 steps 1 of 3 parameters moved"
    facts, moved, *folds = shown.blocks
    assert facts == Facts((("never moved", "`encoder.bias`: not in the optimizer"),))
    assert isinstance(moved, Table)
    assert (moved.caption, moved.text(0)) == ("Parameters that moved", ("head.weight", "1.5", "25%", "12.0"))
    assert [fold.title for fold in folds if isinstance(fold, Fold)] == [
        "Never moved: 2 parameters",
        "Changed: 1 buffer",
        "Data: 1 digest",
        "Details: memory of step zero, how to restore",
    ]


def test_a_frozen_parameter_that_moved_is_the_headline() -> None:
    report = replace(REPORT, moved=(MOVED, replace(MOVED, parameter="encoder.weight", why="the optimizer updates it")), unmoved=())
    shown = page(report)
    assert shown.headline == "After 20 steps 1 frozen parameter moved"
    assert shown.blocks[0] == Facts((("moved", "`encoder.weight`: the optimizer updates it"),))


def test_frozen_alone_is_fine() -> None:
    report = StepzeroReport(action="compared", steps=20, moved=(MOVED,), unmoved=(FROZEN,), parameters_count=2)
    assert page(report).status == "good"


def test_the_other_verdicts() -> None:
    kept = StepzeroReport(action="kept", parameters_count=3, elements_count=100, held_bytes=1024, shared_bytes=400)
    assert kept.verdict == (
        "Step zero is kept: 3 parameters (100 elements), buffers, optimizer and random state · holds 1.0 KiB, 400 B shared with the model"
    )
    assert page(kept).headline == "Step zero is kept: 3 parameters, buffers, optimizer and random state"
    assert page(kept).blocks == (Facts((("elements", "100"), ("step zero", "holds 1.0 KiB, 400 B shared with the model"))),)
    assert [page(StepzeroReport(action=action)).status for action in ("dropped", "restored")] == ["good", "good"]


def test_it_is_plain_data() -> None:
    assert pickle.loads(pickle.dumps(REPORT)) == REPORT
    assert json.loads(REPORT.to_json())["unmoved"][0]["why"] == "not in the optimizer"
