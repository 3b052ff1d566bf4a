"""Which cases of the corpora a run takes."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

import pytest

from tests import corpora

if TYPE_CHECKING:
    from pathlib import Path

NANHUNT = [f"tests/unit/instruments/nanhunt/test_cases.py::test_the_finding[{number}]" for number in range(200)]
SHAPES = [f"tests/unit/instruments/shapes/test_engine.py::test_every_form[{number}]" for number in range(200)]
LITTLE = [f"tests/unit/instruments/shapes/test_engine.py::test_a_few[{number}]" for number in range(corpora.FEW)]
NOTHING: frozenset[str] = frozenset()


def run(changed: frozenset[str]) -> set[str]:
    names = [*NANHUNT, *SHAPES, *LITTLE]
    return set(names) - corpora.left_out(names, changed)


def test_a_quarter_of_each_is_run_and_it_is_always_the_same() -> None:
    taken = run(NOTHING)
    for names in (NANHUNT, SHAPES):
        assert 30 <= len(taken.intersection(names)) <= 70
    assert taken.issuperset(LITTLE)
    assert run(NOTHING) == taken


@pytest.mark.parametrize(
    "file",
    [
        "torchdebug_magics/instruments/nanhunt/causes/walk.py", "tests/unit/instruments/nanhunt/test_cases.py", "tests/nan_cases/loss.py",
        "tests/kernel/test_nan_cases.py", "notebooks/nanhunt.ipynb", "docs/magics/nanhunt.md",
    ],
)  # fmt: skip
def test_what_a_change_touches_runs_whole(file: str) -> None:
    taken = run(frozenset({file}))
    assert taken.issuperset(NANHUNT)
    assert taken.intersection(SHAPES) == run(NOTHING).intersection(SHAPES)


@pytest.mark.parametrize("file", ["torchdebug_magics/probing/dispatch.py", "README.md", "tests/reshapes.py"])
def test_what_all_share_touches_no_instrument(file: str) -> None:
    assert run(frozenset({file})) == run(NOTHING)


def test_a_file_of_tests_that_was_changed_runs_whole() -> None:
    names = [f"tests/reports/test_training.py::test_it_stalls[{number}]" for number in range(50)]
    assert corpora.left_out(names, frozenset({"tests/reports/test_training.py"})) == set()
    assert corpora.left_out(names, frozenset({"tests/reports/test_reports.py"}))


def test_a_large_change_adds_no_more_than_a_fixed_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpora, "MOST", 10)
    both = frozenset({"torchdebug_magics/instruments/nanhunt/probe.py", "torchdebug_magics/instruments/shapes/probe.py"})
    assert len(run(both)) == len(run(NOTHING)) + 10
    assert run(both) == run(both)


def test_reports_go_by_the_magic_in_their_names() -> None:
    assert corpora.instruments_in("tests/reports/test_reports.py::test_the_answer[shapes-linear_after_conv]") == {"shapes"}
    assert corpora.instruments_in("tests/kernel/test_hang_cases.py::test_it[modern-a_lock]") == {"hangwatch"}
    assert corpora.instruments_in("tests/unit/test_session.py::test_reshapes") == set()


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
    assert corpora.changed_files("main", tmp_path) == NOTHING  # there is no commit before
    commit("second")
    assert corpora.changed_files("main", tmp_path) == {"second"}
    git("checkout", "-b", "work")
    commit("third")
    commit("fourth")
    (tmp_path / "first").write_text("edited, and not committed")
    assert corpora.changed_files("main", tmp_path) == {"first", "third", "fourth"}
    assert corpora.changed_files("no-such-branch", tmp_path) == {"first", "fourth"}


def test_a_notebook_runs_on_the_stacks_by_turns_and_on_both_when_touched() -> None:
    names = ["00_tour", "exercises/nan", "nanhunt", "ranks", "shapes"]
    runs = [f"{name}-{stack}" for name in names for stack in ("colab", "modern") if (name, stack) != ("exercises/nan", "colab")]
    once = set(runs) - corpora.other_stack(runs, NOTHING)
    assert once == {"00_tour-colab", "exercises/nan-modern", "nanhunt-colab", "ranks-modern", "shapes-colab"}
    changed = frozenset({"torchdebug_magics/instruments/shapes/probe.py", "notebooks/ranks.ipynb"})
    assert set(runs) - corpora.other_stack(runs, changed) == once | {"shapes-modern", "ranks-colab"}


def test_without_git_nothing_is_touched(tmp_path: Path) -> None:
    assert corpora.changed_files("main", tmp_path / "is not there") == NOTHING
