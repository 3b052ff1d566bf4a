"""Whatever runs a cell again leaves the disk and the outside world as one plain run does, or says beforehand why it does not run it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from tests.writers import forms
from tests.writers.judge import judged
from tests.writers.outcome import Outcome, notebooks
from tests.writers.writer import Writer
from tests.writers.writers import WRITERS, installed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.writers.outcome import Run

QUICK = {
    "torch_save_over", "safetensors_new", "np_savetxt", "csv_writer_opened_earlier", "mmap_opened_earlier", "event_thread_with_a_queue",
    "chdir_then_write", "keep_last_three", "sqlite_in_a_transaction", "urllib_post", "subprocess_sh",
}  # fmt: skip
"""A row for each way of writing that a mechanism may miss; the others are thorough."""
TURNS = 3
"""Each of these rows comes by a third of the doors, and each door with a third of them; a change that touches them takes more."""
ROWS = [row for row in WRITERS if installed(row.needs)]


def _case(row: Writer, *doors: str) -> object:
    is_quick = row.name in QUICK and all(_comes_by(row, door) for door in doors)
    return pytest.param(row, *doors, id="-".join((row.name, *doors)), marks=() if is_quick else pytest.mark.thorough)


def _comes_by(row: Writer, door: str) -> bool:
    """Whether it is this row's turn to come by the door."""
    turn = sorted(QUICK).index(row.name) + list(forms.DOORS).index(door)
    return turn % TURNS == 0 and door not in {"overfit_function", "nanhunt_function"}


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    with notebooks() as run:
        yield run


@pytest.mark.parametrize(("row", "door"), [_case(row, door) for row in ROWS for door in forms.DOORS])
def test_equal_or_refused_with_a_reason_that_names_the_thing(run: Run, row: Writer, door: str) -> None:
    judgement = judged(run, row, door)
    assert judgement.right, str(judgement)


@pytest.mark.parametrize("row", [_case(row) for row in ROWS])
def test_the_cell_has_an_effect_that_a_second_run_would_change(run: Run, row: Writer) -> None:
    """Else the row could not fail."""
    before, once, often = (run(row, name) for name in ("before", "plain", "growing"))
    assert (once.failed, once.errors, often.failed) == ("", (), "")
    seen = [(each.files, each.after, each.cwd, each.environ, each.requests) for each in (before, once, often)]
    assert seen[0] != seen[1] != seen[2]


def test_the_table_is_in_order() -> None:
    assert len({row.name for row in WRITERS}) == len(WRITERS) >= 60
    assert [row.name for row in WRITERS if len(row.cell.splitlines()) > 5] == []
    assert {row.name for row in WRITERS} >= QUICK


PLAIN = Outcome((("work/a.log", "file", "0o644", "start 1"),), {"n": 1}, {}, "", {}, 1, (), (), (), "", (), None, "", "", 0.0)
REQUEST = Writer("a_request", "", "", ("request", "file a.log"), "refused")


@pytest.mark.parametrize(
    ("door", "outcome", "status"),
    [
        ("verify", replace(PLAIN, verdict="Not run again: a request to 127.0.0.1 · `--anyway` runs it"), "refused"),
        ("verify", replace(PLAIN, verdict="Not run again: something · `--anyway` runs it"), "refused without a name"),
        ("verify", PLAIN, "neither"),
        ("verify", replace(PLAIN, requests=2), "SILENT HARM"),
        ("verify", replace(PLAIN, variables={"n": 2}), "SILENT HARM"),
        ("verify", replace(PLAIN, requests=2, report={"rows": ["not restored for the second run: the file a.log"]}), "harm"),
        ("verify", replace(PLAIN, failed="ran too long"), "failed"),
        ("nanhunt", replace(PLAIN, variables={"n": 2}), "equal"),
        ("nanhunt", replace(PLAIN, files=(*PLAIN.files, ("work/b", "file", "0o644", ""))), "SILENT HARM"),
        ("overfit_step", replace(PLAIN, files=(("work/a.log", "file", "0o644", "start"),), requests=0), "equal"),
        ("overfit_step", PLAIN, "SILENT HARM"),
        ("overfit_cell", PLAIN, "equal"),
        ("overfit_cell", replace(PLAIN, files=(("work/a.log", "file", "0o644", "start 1 1"),)), "SILENT HARM"),
        ("overfit_cell", replace(PLAIN, requests=2), "SILENT HARM"),
        ("overfit_cell", replace(PLAIN, files=(*PLAIN.files, ("work/new", "file", "0o644", "9"))), "equal"),
        ("overfit_cell", replace(PLAIN, files=(*PLAIN.files, ("work/new", "file", "0o644", "8" * 99))), "SILENT HARM"),
    ],
)
def test_the_judge_tells_harm_from_a_refusal(door: str, outcome: Outcome, status: str) -> None:
    before = replace(PLAIN, files=(("work/a.log", "file", "0o644", "start"),), requests=0)
    plain = replace(PLAIN, files=(*PLAIN.files, ("work/new", "file", "0o644", "1"))) if door == "overfit_cell" else PLAIN
    by_door = {"plain": plain, "before": before, door: outcome}
    assert judged(lambda _, name: by_door[name], REQUEST, door).status == status
