"""What a report says and shows, from reports built by hand; and that it is plain data."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from typing import Any

import pytest

from torchdebug_magics.html import markup, plain
from torchdebug_magics.html.page import Code, Facts, Fold, Note, Table
from torchdebug_magics.instruments.hangwatch.report import HangFinding, HangReport, LiveHang, Wait
from torchdebug_magics.instruments.hangwatch.view import live_page, page
from torchdebug_magics.report import Location


def at(line: int, source: str = "lock.acquire()") -> Location:
    return Location(cell=3, file="<cell>", line=line, function="work", source=source)


MAIN = Wait(who="main", pid=10, location=at(20, "for x in loader:"), kind="batch", waits_for="worker 0", what="batch 2")
WORKER = Wait(
    who="worker 0", pid=4711, location=at(8), kind="lock", waits_for="worker 0", what="lock", stack=(at(30, "get()"), at(8)), acquired=at(7)
)
REPORT = HangReport(
    state="stuck", cause="self_deadlock", headline="DataLoader worker 0 waits for a lock that it holds itself",
    fix="release it with `with lock:`", reason="", location=at(8), root=WORKER, waits=(MAIN, WORKER),
    chain=("main", "worker 0", "worker 0"), still_s=12.0, elapsed_s=15.0, after_s=10.0, rate=None,
    data_share=None, ended_by="Stop", stopped_count=2, problems=("no /proc here",),
)  # fmt: skip
FINISHED = replace(
    REPORT, state="finished", cause=None, headline="", fix="", location=None, root=None, waits=(), chain=(), rate=3.5, data_share=0.7,
    ended_by="itself", stopped_count=0, problems=(),
)  # fmt: skip
FINDING = HangFinding(
    state="stuck", cause="self_deadlock", headline=REPORT.headline, fix=REPORT.fix, location=at(8), root=WORKER, waits=(MAIN, WORKER),
    chain=REPORT.chain, since_s=12.0,
)  # fmt: skip
LIVE = LiveHang(elapsed_s=15.4, still_s=12.2, finding=FINDING, rate=2.0, at=at(20))


def text(report: HangReport) -> str:
    return " ".join(plain.render(page(report)).split())


def test_a_stuck_cell() -> None:
    assert REPORT.verdict == "Stuck: DataLoader worker 0 waits for a lock that it holds itself · In[3] line 8: `lock.acquire()`"
    shown = text(REPORT)
    assert "Stuck: DataLoader worker 0" in shown
    assert "release it with `with lock:`" in shown
    assert "main thread -> worker 0 (batch 2, pid 4711) -> lock, acquired at In[3] line 7 · for 12" in shown
    assert "2 processes started by the cell were ended" in shown
    assert "no /proc here" in shown
    assert "In[3] line 30" in shown
    assert markup.render(page(REPORT))


def test_what_stands_above_the_first_fold() -> None:
    blocks = page(replace(REPORT, rate=2.0, root=replace(WORKER, acquired=replace(at(7), source="lock.acquire()  # first")))).blocks
    first = next(place for place, block in enumerate(blocks) if isinstance(block, Fold))
    assert [type(block) for block in blocks[:first]] == [Facts, Code, Note, Table]
    assert all(isinstance(block, Fold) for block in blocks[first:])
    facts, code = blocks[0], blocks[1]
    assert isinstance(facts, Facts)
    assert [name for name, _ in facts.rows] == ["fix", "waits"]  # a reason that is not known has no row
    assert isinstance(code, Code)
    assert code.lines == ((7, "lock.acquire()  # first"), (8, "lock.acquire()"))
    assert (code.marked, code.title) == (8, "line 7: where the lock was acquired")
    assert page(FINISHED).blocks == (Facts((("data loading", "70% of the time in the DataLoader"),)),)
    assert page(replace(FINISHED, data_share=0.2)).blocks == ()


def test_the_call_that_waits_is_underlined() -> None:
    main = replace(MAIN, kind="queue", what="queue.get()", location=at(3, "batch = queue.get(timeout=9)"), waits_for=None)
    shown = page(replace(REPORT, location=main.location, root=main, waits=(main,), chain=("main",)))
    code = next(block for block in shown.blocks if isinstance(block, Code))
    assert code.underlined == (8, 17)
    assert dict(next(block for block in shown.blocks if isinstance(block, Facts)).rows)["waits"] == "for 12 s"


LONG = "rank 1 raised ValueError: expected 3 classes, found 4, and rank 0 waits for it in all_reduce #12 [1024, 1024]"


def test_of_a_long_headline_the_first_clause_is_the_title_and_the_whole_stands_in_the_reason() -> None:
    report = replace(REPORT, headline=LONG, reason="world_size is 2")
    assert report.verdict.startswith(f"Stuck: {LONG} · ")
    assert report.title == "Stuck: rank 1 raised ValueError: expected 3 classes, found 4 · In[3] line 8: `lock.acquire()`"
    facts = page(report).blocks[0]
    assert isinstance(facts, Facts)
    assert dict(facts.rows)["why"] == f"{LONG}; world_size is 2"


def test_a_circle_is_closed() -> None:
    one = Wait(who="main", pid=10, location=at(1), kind="lock", waits_for="thread b", what="lock")
    other = replace(one, who="thread b", waits_for="main")
    report = replace(REPORT, root=one, waits=(one, other), chain=("main", "thread b", "main"), reason="each waits for the other")
    assert "each waits for the other" not in text(report)  # the chain says so
    assert "main thread -> thread b (lock) -> main thread (lock)" in text(report)


VERDICTS = {
    "finished": (FINISHED, "Finished in 15 s: no pause of 10 s or longer · 3.5 steps per second, 70% of the time in the DataLoader"),
    "without a rate": (replace(FINISHED, rate=None), "Finished in 15 s: no pause of 10 s or longer"),
    "little data": (replace(FINISHED, data_share=0.2), "or longer · 3.5 steps per second"),
    "interrupted": (replace(FINISHED, state="interrupted", headline="stopped while making progress"), "Interrupted after 15 s: stopped"),
    "slow": (replace(REPORT, state="slow", location=None), "Slow: DataLoader worker 0 waits for a lock that it holds itself"),
    "a crash": (replace(REPORT, state="finished"), "Ended after 15 s: DataLoader worker 0"),
}


@pytest.mark.parametrize("case", VERDICTS)
def test_the_verdict(case: str) -> None:
    report, said = VERDICTS[case]
    assert said in report.verdict
    assert str(report) == report.verdict
    assert report.verdict.split("·")[0].strip().split(":")[0] in text(report)


def test_how_bad_it_is_at_a_glance() -> None:
    states = {"finished": "[✔", "slow": "[▲", "stuck": "[✘"}
    shown = {state: plain.render(page(replace(FINISHED, state=state, headline="x")))[:2] for state in states}  # type: ignore[arg-type]
    assert len(set(shown.values())) == 3
    assert plain.render(page(replace(FINISHED, cause="worker_died", headline="x"))).startswith(shown["slow"])


def test_one_who_has_ended() -> None:
    dead = replace(WORKER, kind="dead", what="was killed by signal 9", exit_code=-9, waits_for=None, stack=(), acquired=None)
    shown = text(replace(REPORT, root=dead, waits=(MAIN, dead), chain=("main", "worker 0")))
    assert "was killed by signal 9 (exit code -9)" in shown


def test_markup_of_the_user_is_text() -> None:
    evil = at(8, "<script>alert(1)</script>")
    shown = markup.render(page(replace(REPORT, location=evil, headline="<b>x</b>", root=replace(WORKER, location=evil))))
    assert "<script>alert" not in shown
    assert "<b>x</b>" not in shown


def test_while_it_runs() -> None:
    quiet = LiveHang(elapsed_s=1.0, still_s=0.1, finding=None, rate=None, at=None)
    assert plain.render(live_page(quiet)).split("\n")[0].endswith("Running for 1 s")
    assert quiet.standing == ""
    still = plain.render(live_page(replace(LIVE, finding=None)))
    assert "no progress for 12 s" in still
    assert "In[3] line 20" in still
    shown = " ".join(plain.render(live_page(LIVE)).split())
    assert "Stuck: DataLoader worker 0" in shown
    assert LIVE.standing.startswith("Stuck for 12 s: DataLoader worker 0 waits for a lock that it holds itself · In[3] line 8")


@pytest.mark.parametrize("report", [REPORT, FINISHED], ids=["stuck", "finished"])
def test_it_is_plain_data(report: HangReport) -> None:
    assert pickle.loads(pickle.dumps(report)) == report
    told: dict[str, Any] = json.loads(report.to_json())
    assert told["verdict"] == report.verdict
    assert next(iter(told)) == "verdict"
    assert {"state", "cause", "fix", "location", "root", "waits", "still_s", "elapsed_s", "rate"} <= set(told)
    if report is REPORT:
        assert told["root"]["who"] == "worker 0"
        assert told["waits"][1]["stack"][0]["line"] == 30
    with pytest.raises(AttributeError):
        report.state = "slow"  # type: ignore[misc]
