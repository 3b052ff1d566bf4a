"""Which tests a run takes."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

import pytest

from tests import selection

if TYPE_CHECKING:
    from pathlib import Path

NANHUNT = [f"tests/unit/instruments/nanhunt/test_cases.py::test_the_finding[{number}]" for number in range(selection.MOST_TOUCHED)]
SHAPES = [f"tests/unit/instruments/shapes/test_engine.py::test_every_form[{number}]" for number in range(200)]
NEW = [f"tests/unit/instruments/shapes/test_engine.py::test_every_form[new {number}]" for number in range(20)]
ALONE = "tests/unit/test_session.py::test_a_session_runs_once"
THOROUGH = "tests/browser/test_shapes.py::test_what_is_seen_of_a_model"
COVER = frozenset({*NANHUNT[:9], *SHAPES[:7]})
KNOWN = frozenset(map(selection.number, [*NANHUNT, *SHAPES]))
NOTHING: frozenset[str] = frozenset()


def run(changed: frozenset[str]) -> set[str]:
    tests = {**dict.fromkeys([*NANHUNT, *SHAPES, *NEW, ALONE], False), THOROUGH: True}
    return set(tests) - selection.left_out(tests, COVER, KNOWN, changed)


def test_the_cover_set_runs_and_what_it_does_not_know_and_what_has_one_case() -> None:
    assert run(NOTHING) == {*COVER, *NEW, ALONE}


@pytest.mark.parametrize(
    "file",
    [
        "torchdebug_magics/instruments/nanhunt/causes/walk.py", "tests/unit/instruments/nanhunt/test_cases.py", "tests/nan_cases/loss.py",
        "tests/kernel/test_nan_cases.py", "notebooks/nanhunt.ipynb", "docs/magics/nanhunt.md",
    ],
)  # fmt: skip
def test_what_a_change_touches_runs_whole(file: str) -> None:
    assert run(frozenset({file})) == {*NANHUNT, *SHAPES[:7], *NEW, ALONE}


@pytest.mark.parametrize("file", ["torchdebug_magics/probing/dispatch.py", "README.md", "tests/reshapes.py"])
def test_what_all_share_touches_no_instrument(file: str) -> None:
    assert run(frozenset({file})) == run(NOTHING)


def test_a_file_of_tests_that_was_changed_runs_whole() -> None:
    tests = dict.fromkeys([f"tests/reports/test_training.py::test_it_stalls[{number}]" for number in range(selection.MOST_TOUCHED)], False)
    cover = frozenset(list(tests)[:1])
    known = frozenset(map(selection.number, tests))
    assert selection.left_out(tests, cover, known, frozenset({"tests/reports/test_training.py"})) == set()
    assert selection.left_out(tests, cover, known, frozenset({"tests/reports/test_reports.py"})) == set(tests) - cover


def test_a_thorough_test_runs_where_a_change_touches_it() -> None:
    tests = {**dict.fromkeys(SHAPES[:20], False), THOROUGH: True}
    assert selection.left_out(tests, COVER, KNOWN, frozenset({"torchdebug_magics/instruments/shapes/view.py"})) == set()


def test_the_lists_in_the_repository_go_together() -> None:
    assert selection.known().issuperset(map(selection.number, selection.cover()))


def test_a_large_change_adds_no_more_than_a_fixed_number() -> None:
    both = frozenset({"torchdebug_magics/instruments/nanhunt/probe.py", "torchdebug_magics/instruments/shapes/probe.py"})
    assert len(run(both)) == len(run(NOTHING)) + selection.MOST_TOUCHED
    assert run(both) == run(both)


def test_one_instrument_is_asked_for() -> None:
    assert selection.left_out_by_instrument([*NANHUNT, *SHAPES, ALONE], "shapes") == {*NANHUNT, ALONE}


def test_reports_go_by_the_magic_in_their_names() -> None:
    assert selection.instruments_in("tests/reports/test_reports.py::test_the_answer[shapes-linear_after_conv]") == {"shapes"}
    assert selection.instruments_in("tests/kernel/test_hang_cases.py::test_it[modern-a_lock]") == {"hangwatch"}
    assert selection.instruments_in("tests/unit/test_session.py::test_reshapes") == set()


def test_the_files_of_a_branch_and_of_the_last_commit_on_main(tmp_path: Path) -> None:
    def git(*words: str) -> None:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", *identity, *words], cwd=tmp_path, check=True, capture_output=True)

    def commit(name: str) -> None:
        (tmp_path / name).write_text(name)
        git("add", name)
        git("commit", "-m", name)

    git("init", "-b", "main")
    commit("first")
    assert selection.changed_files("main", tmp_path) == NOTHING  # there is no commit before
    commit("second")
    assert selection.changed_files("main", tmp_path) == {"second"}
    git("checkout", "-b", "work")
    commit("third")
    commit("fourth")
    (tmp_path / "first").write_text("edited, and not committed")
    (tmp_path / "fifth").write_text("not added yet")
    assert selection.changed_files("main", tmp_path) == {"first", "third", "fourth", "fifth"}
    assert selection.changed_files("no-such-branch", tmp_path) == {"first", "fourth", "fifth"}


NAMES = ["00_tour", "exercises/nan", "nanhunt", "ranks", "shapes"]
RUNS = {f"{name}-{stack}" for name in NAMES for stack in ("colab", "modern")} | {"solved/nan", "solved/shapes"}


def test_all_notebooks_come_by_turns() -> None:
    taken = [selection.notebook_runs(RUNS, NOTHING, turn) for turn in range(len(RUNS))]
    assert all(len(runs) == 1 for runs in taken)
    assert set().union(*taken) == RUNS


def test_a_notebook_runs_on_both_stacks_when_touched() -> None:
    taken = selection.notebook_runs(RUNS, frozenset({"torchdebug_magics/instruments/shapes/probe.py"}), turn=0)
    assert taken == {"shapes-modern", "shapes-colab"}
    assert selection.notebook_runs(RUNS, frozenset({"notebooks/ranks.ipynb"}), turn=0) == {"ranks-modern", "ranks-colab"}
    assert "exercises/nan-modern" in selection.notebook_runs(RUNS, frozenset({"torchdebug_magics/exercises/nan.py"}), turn=0)
    tests_of_shapes = frozenset({"tests/unit/instruments/shapes/test_engine.py"})
    assert selection.notebook_runs(RUNS, tests_of_shapes, 3) == selection.notebook_runs(RUNS, NOTHING, 3)


def test_the_tests_of_a_notebook_go_with_its_run() -> None:
    file = "tests/notebooks/test_notebooks.py"
    tests = {f"{file}::test_outputs_stay_small[{run}]": False for run in RUNS if not run.startswith("solved/")}
    exercises = {
        f"tests/notebooks/test_exercises.py::test_with_the_solutions_each_check_passes[{name}]": False for name in ("nan", "shapes")
    }
    alone = {f"{file}::test_there_is_a_tour": False}
    left = selection.left_out({**tests, **exercises, **alone}, COVER, KNOWN, NOTHING, turn=4)
    assert len(tests) + len(exercises) - len(left) == 1
    assert not left.intersection(alone)


def test_without_git_nothing_is_touched(tmp_path: Path) -> None:
    assert selection.changed_files("main", tmp_path / "is not there") == NOTHING
