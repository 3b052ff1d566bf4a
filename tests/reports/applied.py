"""How many fixes of the real reports are edits, and how many of these, applied by a machine, end the fault.

``python -m tests.reports.applied [--magic NAME] [REPORT...]`` prints a line for each report, and the sums.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections import Counter
from dataclasses import replace

from tests.reports import ReportCase, all_reports
from tests.reports.answers import ANSWERS
from tests.reports.door import close, run
from torchdebug_magics.fixes import applied

MOST_ROUNDS = 5


def outcome(case: ReportCase) -> tuple[str, str]:
    """(``works``, ``wrong``, ``advice`` or ``no report``, what it is about).

    The notebook is repaired and run again until nothing is found: behind one finding another may come to light, as for a person.
    """
    ran, changes = run(case), ""
    for at in range(MOST_ROUNDS):
        if ran.crash or ran.report is None:
            return ("wrong" if at else "no report"), f"{changes}: {ran.crash[-200:]}"
        if at and ran.works and not ANSWERS[case.magic](ran.report).found:
            return "works", changes
        if not ran.report.edits:
            return ("wrong", f"{changes}: {ran.works}, {ran.report.verdict}") if at else ("advice", ran.report.fix)
        cells = list(case.cells)
        for number in {edit.cell for edit in ran.report.edits}:
            if number is None:
                return "wrong", "the fix changes no cell"
            cells[number - 1] = applied(cells[number - 1], [edit for edit in ran.report.edits if edit.cell == number])
        changes += "; ".join(f"{edit.old} -> {edit.new}" for edit in ran.report.edits) + " // "
        case = replace(case, cells=tuple(cells[1:]), fixed=())
        ran = run(case, repaired=True)
    return "wrong", f"{changes}: not at an end"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--magic", choices=sorted(ANSWERS))
    parser.add_argument("reports", nargs="*")
    asked = parser.parse_args()
    sums: Counter[tuple[str, str]] = Counter()
    for case in all_reports():
        is_asked = (not asked.magic or case.magic == asked.magic) and (not asked.reports or case.name in asked.reports)
        if case.healthy or not case.fixed or not is_asked or (case.needs and importlib.util.find_spec(case.needs) is None):
            continue
        result, about = outcome(case)
        sums[case.magic, result] += 1
        print(f"{result:10} {case.magic} {case.name}: {about}".replace("\n", " | "), flush=True)
    for (magic, result), count in sorted(sums.items()):
        print(f"{magic:14} {result:10} {count}")
    close()


if __name__ == "__main__":
    main()
