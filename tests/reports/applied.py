"""How many fixes of the real reports are edits, and how many of these, applied by a machine, end the fault.

``python -m tests.reports.applied [--magic NAME] [REPORT...]`` prints a line for each report, and the sums.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections import Counter, defaultdict
from dataclasses import replace

from tests.reports import ReportCase, all_reports
from tests.reports.answers import ANSWERS
from tests.reports.door import close, run
from torchdebug_magics.fixes import applied
from torchdebug_magics.report import Edit


def outcome(case: ReportCase) -> tuple[str, str]:
    """(``works``, ``wrong``, ``advice`` or ``no report``, what it is about)."""
    ran = run(case)
    if ran.report is None:
        return "no report", ran.crash[-200:]
    if not ran.report.edits:
        return "advice", ran.report.fix
    by_cell: dict[int | None, list[Edit]] = defaultdict(list)
    for edit in ran.report.edits:
        by_cell[edit.cell].append(edit)
    cells = list(case.cells)
    shown = "; ".join(f"{edit.old} -> {edit.new}" for edit in ran.report.edits)
    for number, edits in by_cell.items():
        if number is None:
            return "wrong", f"not in a cell: {shown}"
        cells[number - 1] = applied(cells[number - 1], edits)
    after = run(replace(case, cells=tuple(cells[1:]), fixed=()), repaired=True)
    if after.crash or after.report is None:
        return "wrong", f"{shown}: {after.crash[-200:]}"
    is_right = after.works and not ANSWERS[case.magic](after.report).found
    return ("works" if is_right else "wrong"), shown if is_right else f"{shown}: {after.works}, {after.report.verdict}"


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
