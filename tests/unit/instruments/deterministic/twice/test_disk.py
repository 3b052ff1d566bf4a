"""Files: a later run finds them as the first one did, and each is afterwards as one run leaves it."""

from __future__ import annotations

import re
import sqlite3
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.unit.instruments.deterministic.planted import IMPORTS
from tests.unit.instruments.deterministic.planted_disk import CELLS
from torchdebug_magics.instruments.deterministic.twice.runs import REPEATS

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

SETUP = IMPORTS + "import contextlib, shutil, sqlite3, tempfile\nfrom pathlib import Path\n"
STAMPS = re.compile(r"\d{8,}|tmp\w{8}")
"""Names that are other ones each time."""
CLOSE = "log.close() if 'log' in globals() else None\nos.close(number) if 'number' in globals() else None"


def run(shell: InteractiveShell, root: Path, setup: str, body: str, flags: str = "--verify") -> Any:
    root.mkdir()
    shell.user_ns["root"] = root
    shell.run_cell(f"{SETUP}{setup}").raise_error()
    result = shell.run_cell(f"%%deterministic -q -o d {flags}\n{body}", store_history=True)
    shell.run_cell(CLOSE).raise_error()
    result.raise_error()
    return shell.user_ns["d"]


def tree(root: Path) -> dict[str, list[bytes]]:
    found: dict[str, list[bytes]] = {}
    for path in sorted(root.rglob("*")):
        name = STAMPS.sub("new", str(path.relative_to(root)))
        found.setdefault(name, []).append(path.read_bytes() if path.is_file() and path.suffix not in {".zip", ".db"} else b"")
    return found


@pytest.mark.parametrize("name", CELLS)
def test_a_later_run_finds_the_disk_as_the_first_one_did_and_leaves_it(shell: InteractiveShell, tmp_path: Path, name: str) -> None:
    setup, body = CELLS[name]
    once = run(shell, tmp_path / "once", setup, body, flags="")
    shell.run_cell("%reset -f")
    found = run(shell, tmp_path / "twice", setup, body)
    assert once.verified is None
    assert (found.verified, found.divergence, found.problems) == (True, None, ())
    assert tree(tmp_path / "twice") == tree(tmp_path / "once")


@pytest.mark.parametrize("name", CELLS)
def test_also_where_the_runs_differ_and_are_made_again_and_again(shell: InteractiveShell, tmp_path: Path, name: str) -> None:
    setup, body = CELLS[name]
    run(shell, tmp_path / "once", setup, body, flags="")
    shell.run_cell("%reset -f")
    found = run(shell, tmp_path / "twice", setup, f"{body}\nz = torch.ones(2) * int.from_bytes(os.urandom(6), 'little')")
    assert (found.divergence.cause, found.divergence.location.source[:5]) == ("os_entropy", "z = t")
    assert tree(tmp_path / "twice") == tree(tmp_path / "once")


def test_a_database_that_is_open_already_is_changed_once(shell: InteractiveShell, tmp_path: Path) -> None:
    setup = "runs = sqlite3.connect(root / 'runs.db')\nruns.execute('create table run(loss)')\nruns.commit()"
    found = run(shell, tmp_path / "here", setup, "x = torch.ones(2) * 2\nruns.execute('insert into run values (2)')\nruns.commit()")
    shell.run_cell("runs.close()").raise_error()
    assert found.not_verified == REPEATS.format("changes the database behind `runs`")
    with sqlite3.connect(tmp_path / "here" / "runs.db") as runs:
        assert runs.execute("select count(*) from run").fetchone() == (1,)
    runs.close()


def test_a_file_that_the_first_run_closes_is_open_for_the_second_and_closed_afterwards(shell: InteractiveShell, tmp_path: Path) -> None:
    setup = "log = open(root / 'log', 'w')\nlog.write('a')\nwriter = csv.writer(log)"
    body = "x = torch.ones(2) * 2\nwriter.writerow([log.tell()])\nlog.close()"
    found = run(shell, tmp_path / "here", f"import csv\n{setup}", body)
    assert (found.verified, found.problems) == (True, ())
    assert shell.user_ns["log"].closed
    assert (tmp_path / "here" / "log").read_bytes() == b"a1\r\n"


def test_an_error_of_a_later_run_speaks_of_the_users_path(shell: InteractiveShell, tmp_path: Path) -> None:
    body = """\
x = torch.ones(2) * 2
(root / "made").mkdir()
if hasattr(torch, "been"):
    (root / "made" / "no").read_text()
torch.been = 1
"""
    found = run(shell, tmp_path / "here", "", body)
    shell.run_cell("del torch.been").raise_error()
    assert str(tmp_path / "here" / "made" / "no") in found.divergence.explanation


def test_a_cell_that_runs_a_command_is_run_again_only_anyway(shell: InteractiveShell, tmp_path: Path) -> None:
    body = """\
import subprocess, multiprocessing
said = subprocess.run([sys.executable, "-c", "print(6)"], capture_output=True, text=True).stdout
x = torch.ones(2) * float(said)
"""
    found = run(shell, tmp_path / "here", "", body)
    program = Path(sys.executable).name
    assert (found.verified, found.not_verified) == (None, REPEATS.format(f"runs the command `{program}`"))
    assert run(shell, tmp_path / "anyway", "", body, "--verify --anyway").verified is True
    ran = shell.run_cell(f"%%deterministic --verify --strict -q\n{body}", store_history=True)
    assert f"--strict: the cell runs the command `{program}`" in str(ran.error_in_exec)


def test_a_cell_that_shares_a_variable_with_an_older_thread_is_not_run_again(shell: InteractiveShell, tmp_path: Path) -> None:
    setup = """\
go, lines = threading.Event(), []
def work():
    go.wait(20)
    Path(root, "theirs").write_text("".join(lines))
threading.Thread(target=work, name="writer").start()
"""
    found = run(shell, tmp_path / "here", setup, "lines.append('kept')\nx = torch.ones(2) * 2")
    shell.run_cell("go.set()\nfor thread in threading.enumerate():\n    if thread.name == 'writer': thread.join()").raise_error()
    assert found.not_verified == REPEATS.format("shares `lines` with the thread `writer`, which is older")
    assert (tmp_path / "here" / "theirs").read_text() == "kept"
