"""Chooses the tests that ``make test`` runs: ``cover_set.py FOLDER [FILE ...] [--from-record]``, with Python 3.12 or later.

Every test runs once, and what it reaches is recorded in FOLDER (`cover_record.py`). Of the tests of many cases, the cheapest cases are then
chosen that, with the tests of one case, reach each branch of the package twice; each test keeps at least one case, and a few branches that
would cost too much are left out (`WORTH`). The choice goes to ``tests/cover.txt``. ``--from-record`` chooses anew from what FOLDER holds.
With files of tests, only these run, and the choice of all others stays: it takes minutes, and as what others reach is not known, each file
reaches all that it can reach by itself.
"""

from __future__ import annotations

import argparse
import heapq
import json
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from tests.selection import COVER, KNOWN, cover, known, number  # noqa: E402 - the repository is no package that is installed

RECORDED = ("tests/unit", "tests/plants", "tests/reports", "tests/kernel/test_hang_cases.py")
"""Notebooks and browser tests are chosen otherwise, and other kernels serve many tests each, so that what they reach is nobody's."""
WORTH = (4.0, 30.0)
"""Branches a second that a case must reach for the first time, or for the second, to be run for them."""
CHEAP_S = 0.01
"""A case that costs no more runs: branches do not tell the rows of a table of values apart."""
OVERHEAD_S = 0.03
"""What a test costs beside its own seconds: fixtures, guards, reporting."""
HANGS = "tests/kernel/test_hang_cases.py"
HANG_S = {"modern": 2.5, "colab": 10.0}
"""Core-seconds of a case that hangs, by its stack: it mostly waits, beside others, and the kernels of a second stack must start first."""
FORKED = "tests/reports/"
"""Where a server that tests share forks what they run, so that its seconds are counted when that ends."""
KNOWN_HEAD = """\
# The numbers (crc32) of all cases that `make cover` had to choose from: one that is not among them is new, and runs.
"""
HEAD = """\
# The cases that `make test` runs of the tests that have many, chosen by `make cover`: every branch twice, in the fewest seconds.
"""


@dataclass(frozen=True, eq=False)
class Recorded:
    """What a test took, in seconds, and the branches that it reached."""

    test: str
    cost_s: float
    branches: frozenset[str]

    @property
    def function(self) -> str:
        """The test without its case."""
        return self.test.partition("[")[0]

    @property
    def is_case(self) -> bool:
        """Whether the test has others."""
        return "[" in self.test

    @property
    def is_cheap(self) -> bool:
        """Whether it costs too little to be left out."""
        return self.cost_s <= CHEAP_S + OVERHEAD_S


def record(folder: Path, files: Iterable[str]) -> None:
    """Run every test, or those of the files, on two workers and write what it reaches; SystemExit where it could not be run."""
    if not hasattr(sys, "monitoring"):
        sys.exit(f"{sys.executable} has no sys.monitoring: it takes Python 3.12 or later")
    shutil.rmtree(folder, ignore_errors=True)
    where = [str(ROOT / name) for name in files or RECORDED if (ROOT / name).exists()]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "--whole",
        "-q",
        "-n2",
        "-p",
        "tools.cover_record",
        "--cover-to",
        str(folder.resolve()),
        *where,
    ]
    status = subprocess.run(command, cwd=ROOT, check=False).returncode
    if status not in {0, 1}:  # a test that fails, such as for a package that is missing, counts all the same
        sys.exit(f"pytest ended with status {status}: {COVER} stays as it is")


def read(folder: Path) -> list[Recorded]:
    """The tests, with the processes that ended, or were asked, while they ran."""
    lines = [json.loads(line) for file in folder.glob("tests-*.jsonl") for line in file.read_text(encoding="utf-8").splitlines()]
    children = [json.loads(file.read_text(encoding="utf-8")) for file in folder.glob("child-*.json")]
    named: dict[str, set[str]] = {}
    for child in children:
        if child["test"]:
            named.setdefault(child["test"], set()).update(child["branches"])
    return [_recorded(line, named, [child for child in children if not child["test"]]) for line in lines]


def _recorded(line: dict[str, object], named: dict[str, set[str]], children: list[dict[str, object]]) -> Recorded:
    test, case = str(line["test"]), str(line["test"]).partition("[")[2].removesuffix("]")
    branches = {*line["branches"], *named.get(case, ())}  # type: ignore[misc]
    for child in children:
        if child["worker"] == line["worker"] and line["began"] <= child["ended"] <= line["ended"]:  # type: ignore[operator]
            branches.update(child["branches"])  # type: ignore[arg-type]
    took = "took_s" if test.startswith(FORKED) else "cpu_s"
    cost_s = HANG_S[case.partition("-")[0]] if test.startswith(HANGS) and case else float(line[took])  # type: ignore[arg-type]
    return Recorded(test, cost_s + OVERHEAD_S, frozenset(branches))


def choose(tests: Iterable[Recorded]) -> list[Recorded]:
    """The cases to run: greedily the most branches a second, first until each is reached once, then until each is reached twice."""
    tests = list(tests)
    possible = Counter(branch for test in tests for branch in test.branches)
    alone = [test for test in tests if not test.is_case or test.is_cheap]
    cases = [test for test in tests if test.is_case and not test.is_cheap]
    chosen: list[Recorded] = []
    for times, worth in enumerate(WORTH, start=1):
        missing = Counter({branch: min(times, count) for branch, count in possible.items()})
        for test in [*alone, *chosen]:
            _reach(test, missing)
        chosen += _greedy([case for case in cases if case not in chosen], missing, worth=worth)
        reached = Counter(branch for test in [*alone, *chosen] for branch in test.branches)
        chosen = _without_spare(chosen, alone, {branch: min(times, count) for branch, count in reached.items()})
    chosen += [test for test in alone if test.is_case]
    functions = {test.function for test in chosen}
    cheapest = [min(cases, key=lambda test: test.cost_s) for cases in _by_function(tests).values()]
    return chosen + [test for test in cheapest if test.function not in functions]


def _greedy(cases: list[Recorded], missing: Counter[str], *, worth: float) -> list[Recorded]:
    def gain(case: Recorded) -> float:
        branches = sum(missing[branch] > 0 for branch in case.branches) / case.cost_s
        return branches if branches > worth else 0.0

    chosen = []
    heap = [(-gain(case), number) for number, case in enumerate(cases)]
    heapq.heapify(heap)
    while heap:
        before, number = heapq.heappop(heap)
        now = -gain(cases[number])
        if now == 0:
            continue
        if now > before and heap and now > heap[0][0]:  # others have reached some of it since: it waits for its turn
            heapq.heappush(heap, (now, number))
            continue
        chosen.append(cases[number])
        _reach(cases[number], missing)
    return chosen


def _without_spare(chosen: list[Recorded], alone: list[Recorded], wanted: dict[str, int]) -> list[Recorded]:
    """The same without the cases, dearest first, that later choices have made superfluous."""
    counts = Counter(branch for test in [*chosen, *alone] for branch in test.branches)
    kept = []
    for test in sorted(chosen, key=lambda test: -test.cost_s):
        if all(counts[branch] > wanted[branch] for branch in test.branches):
            counts.subtract(test.branches)
        else:
            kept.append(test)
    return kept


def _reach(test: Recorded, missing: Counter[str]) -> None:
    for branch in test.branches:
        if missing[branch] > 0:
            missing[branch] -= 1


def _by_function(tests: list[Recorded]) -> dict[str, list[Recorded]]:
    functions: dict[str, list[Recorded]] = {}
    for test in tests:
        if test.is_case:
            functions.setdefault(test.function, []).append(test)
    return functions


def rows(words: list[str], width: int = 15) -> list[list[str]]:
    """The words in lines of so many."""
    return [words[place : place + width] for place in range(0, len(words), width)]


def main() -> None:
    """Record, choose, write, and say what the choice costs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("files", nargs="*", metavar="FILE", help="choose anew of this file alone, as tests/unit/test_fixes.py")
    parser.add_argument("--from-record", action="store_true", help="choose anew from what FOLDER holds")
    options = parser.parse_args()
    if not options.from_record:
        record(options.folder, options.files)
    tests = read(options.folder)
    chosen = choose(tests)
    others = {test for test in cover() if test.partition("::")[0] not in options.files} if options.files else set()
    COVER.write_text(HEAD + "".join(f"{test}\n" for test in sorted({*others, *(test.test for test in chosen)})), encoding="utf-8")
    numbers = {number(test.test) for test in tests if test.is_case} | (known() if options.files else set())
    words = [f"{one:08x}" for one in sorted(numbers)]
    KNOWN.write_text(KNOWN_HEAD + "".join(f"{' '.join(row)}\n" for row in rows(words)), encoding="utf-8")
    always = [test for test in tests if not test.is_case]
    possible, reached = (Counter(branch for test in some for branch in test.branches) for some in (tests, [*always, *chosen]))
    print(
        f"{len(tests)} tests of {sum(test.cost_s for test in tests):.0f} s:",
        f"{len(always)} of one case take {sum(test.cost_s for test in always):.0f} s,",
        f"{len(chosen)} cases chosen take {sum(test.cost_s for test in chosen):.0f} s;",
        f"{len(reached)} of {len(possible)} branches are reached,",
        f"{sum(count > 1 for count in reached.values())} of {sum(count > 1 for count in possible.values())} twice",
    )


if __name__ == "__main__":
    main()
