"""Which tests a run takes: the cover set, what a change touches, and a notebook by turns.

``tests/cover.txt`` holds the cases that reach every branch of the package twice, in the fewest seconds (`tools/cover_set.py`);
``tests/cover_known.txt`` holds the numbers of all cases that these were chosen from. Of a test of many cases, those in the cover set run,
and new ones; a test of one case always runs, unless it is `thorough`. ``--whole`` takes every test, ``--only`` all of one instrument.
"""

from __future__ import annotations

import re
import subprocess
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path

MOST_TOUCHED = 30
"""A change that touches more cases than these runs as many; which ones is fixed."""
MOST_NOTEBOOKS = 2
"""Runs of notebooks that a change touches, at most; where it touches none, one comes by turns. `tests/browser` always runs the tour."""

ROOT = Path(__file__).parent.parent
COVER = ROOT / "tests/cover.txt"
KNOWN = ROOT / "tests/cover_known.txt"
INSTRUMENTS = sorted(folder.parent.name for folder in (ROOT / "torchdebug_magics/instruments").glob("*/__init__.py"))
OF_CASES = {"nan_cases": "nanhunt", "hang_cases": "hangwatch"}
NAME = re.compile(rf"(?<![a-z])({'|'.join([*OF_CASES, *INSTRUMENTS])})(?![a-z])")


def left_out(tests: Mapping[str, bool], cover: frozenset[str], known: frozenset[int], changed: frozenset[str], turn: int = 0) -> set[str]:
    """The node ids of `tests` that are not run after a change of the files `changed`.

    `tests` says of each node id whether it is thorough; `known` holds the numbers of those that `cover` was chosen from; `turn` picks the
    notebooks that come by turns.
    """
    rest, notebooks = set(), {}
    for test, is_thorough in tests.items():
        function, bracket, case = test.partition("[")
        if function.startswith("tests/notebooks/") and (run := notebook_run(function, case.removesuffix("]"))):
            notebooks[test] = run
        elif is_thorough or (bracket and number(test) in known and test not in cover):
            rest.add(test)
    touched = sorted((test for test in rest if is_touched(test, changed)), key=lambda test: (_file(test) not in changed, number(test)))
    runs = notebook_runs(set(notebooks.values()), changed, turn)
    return rest - set(touched[:MOST_TOUCHED]) | {test for test, run in notebooks.items() if run not in runs}


def left_out_by_instrument(tests: Iterable[str], instrument: str) -> set[str]:
    """The node ids that do not name the instrument."""
    return {test for test in tests if instrument not in instruments_in(test)}


def notebook_run(function: str, case: str) -> str:
    """The run of a notebook that a test reads: ``NOTEBOOK-STACK``, or ``solved/EXERCISE``; empty where it reads none."""
    if function.endswith("test_with_the_solutions_each_check_passes"):
        return f"solved/{case}"
    return case if case.endswith(("-modern", "-colab")) else ""


def notebook_runs(runs: set[str], changed: frozenset[str], turn: int) -> set[str]:
    """The runs to take: those of notebooks that a change touches, exercises last, or else one, which differs from commit to commit."""
    code = frozenset(file for file in changed if file.startswith(("torchdebug_magics/", "notebooks/")))
    touched = [run for run in runs if is_touched(run, code) or not code.isdisjoint(_files_of(run))]
    by_turns = sorted(runs, key=number)[turn % len(runs) :][:1] if runs else []
    return set(sorted(touched, key=lambda run: (run.startswith("solved/"), number(run)))[:MOST_NOTEBOOKS] or by_turns)


def _files_of(run: str) -> tuple[str, ...]:
    """The notebook of a run, and the judge of an exercise."""
    name = run.removesuffix("-modern").removesuffix("-colab").replace("solved/", "exercises/")
    return f"notebooks/{name}.ipynb", f"torchdebug_magics/{name}.py"


def is_touched(test: str, changed: frozenset[str]) -> bool:
    """Whether its file was changed, or a file that carries the name of an instrument which the node id carries, too."""
    return _file(test) in changed or any(instruments_in(test) & instruments_in(file) for file in changed)


def instruments_in(text: str) -> set[str]:
    """The instruments that the path of a file, or the node id of a test, names."""
    return {OF_CASES.get(name, name) for name in NAME.findall(text)}


def number(test: str) -> int:
    """A node id as a number that is the same everywhere; also an order without meaning, from which a part can be taken."""
    return zlib.crc32(test.encode())


def known() -> frozenset[int]:
    return frozenset(int(word, 16) for line in KNOWN.read_text(encoding="utf-8").splitlines() if line[0] != "#" for word in line.split())


def cover() -> frozenset[str]:
    return frozenset(line for line in COVER.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#"))


def changed_files(base: str, root: Path = ROOT) -> frozenset[str]:
    """The files that differ from where this branch left `base`, or on `base` itself from the commit before; none where git cannot say."""
    head, fork = _git(root, "rev-parse", "HEAD"), _git(root, "merge-base", "HEAD", base)
    start = fork if fork and fork != head else "HEAD^"
    lists = _git(root, "diff", "--name-only", start, "--"), _git(root, "ls-files", "--others", "--exclude-standard")
    return frozenset(file for files in lists for file in files.splitlines())


def turn(root: Path = ROOT) -> int:
    """The number of commits: each lands with other notebooks than the one before."""
    return int(_git(root, "rev-list", "--count", "HEAD") or 0)


def _git(root: Path, *words: str) -> str:
    try:
        return subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def _file(test: str) -> str:
    return test.partition("::")[0]
