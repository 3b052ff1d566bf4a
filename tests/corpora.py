"""Which cases of the corpora a run takes: a fixed quarter, and with it the cases of what a change touches.

A change touches an instrument when a file that was changed since ``--base`` carries the name of the instrument in its path, and it touches
the tests of each file of tests that was changed. What all instruments share touches none of them: ``make test-all`` runs every case.
"""

from __future__ import annotations

import re
import subprocess
import zlib
from pathlib import Path

__all__ = ["FEW", "MOST", "changed_files", "instruments_in", "is_touched", "left_out", "other_stack"]

FEW = 8
"""A test with no more cases runs all of them."""
PART = 4
MOST = 300
"""A change that touches more cases than these runs as many; which ones is fixed."""

ROOT = Path(__file__).parent.parent
INSTRUMENTS = sorted(folder.parent.name for folder in (ROOT / "torchdebug_magics/instruments").glob("*/__init__.py"))
OF_CASES = {"nan_cases": "nanhunt", "hang_cases": "hangwatch"}
NAME = re.compile(rf"(?<![a-z])({'|'.join([*OF_CASES, *INSTRUMENTS])})(?![a-z])")


def left_out(names: list[str], changed: frozenset[str]) -> set[str]:
    """Those of the tests of corpora, by their node ids, that are not run after a change of these files."""
    of_tests: dict[str, list[str]] = {}
    for name in names:
        of_tests.setdefault(name.partition("[")[0], []).append(name)
    rest = [name for cases in of_tests.values() if len(cases) > FEW for name in cases if _number(name) % PART]
    touched = sorted((name for name in rest if is_touched(name, changed)), key=_number)
    return set(rest) - set(touched[:MOST])


def other_stack(runs: list[str], changed: frozenset[str]) -> set[str]:
    """Those of the runs, ``NOTEBOOK-STACK``, that are not run: a notebook that no change touches runs on one of its stacks, by turns."""
    stacks: dict[str, list[str]] = {}
    for run in runs:
        stacks.setdefault(run.rpartition("-")[0], []).append(run)
    rest = [name for name in sorted(stacks) if not is_touched(name, changed) and f"notebooks/{name}.ipynb" not in changed]
    kept = {name: stacks[name][sorted(stacks).index(name) % len(stacks[name])] for name in rest}
    return {run for name in rest for run in stacks[name] if run != kept[name]}


def is_touched(name: str, changed: frozenset[str]) -> bool:
    return name.partition("::")[0] in changed or any(instruments_in(name) & instruments_in(file) for file in changed)


def instruments_in(text: str) -> set[str]:
    """The instruments that the path of a file, or the node id of a test, names."""
    return {OF_CASES.get(name, name) for name in NAME.findall(text)}


def changed_files(base: str, root: Path = ROOT) -> frozenset[str]:
    """The files that differ from where this branch left `base`, or on `base` itself from the commit before; none where git cannot say."""
    head, fork = _git(root, "rev-parse", "HEAD"), _git(root, "merge-base", "HEAD", base)
    start = fork if fork and fork != head else "HEAD^"
    return frozenset(_git(root, "diff", "--name-only", start, "--").splitlines())


def _git(root: Path, *words: str) -> str:
    try:
        return subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def _number(name: str) -> int:
    return zlib.crc32(name.encode())
