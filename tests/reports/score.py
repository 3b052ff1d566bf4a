"""A line a report: ``python -m tests.reports.score [-m MAGIC] [-k SUBSTRING] [-v]``."""

from __future__ import annotations

import argparse
import importlib.util

from tests.reports import all_reports
from tests.reports.test_reports import wrong


def main() -> int:
    """Print the score; the exit status is the number of reports that are not answered rightly."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-m", default="", help="only reports of this magic")
    parser.add_argument("-k", default="", help="only reports whose name holds this")
    options = parser.parse_args()
    cases = [case for case in all_reports() if options.m in case.magic and options.k in case.name]
    cases = [case for case in cases if not case.needs or importlib.util.find_spec(case.needs)]
    bad = 0
    for case in cases:
        differs = wrong(case)
        bad += bool(differs)
        print(
            f"{'FAIL' if differs else 'ok  '} {case.magic} {case.name}",
            *(f"    {name}: {text}" for name, text in differs.items()),
            sep="\n",
        )
    print(f"\n{len(cases) - bad} of {len(cases)} right")
    return min(bad, 100)


if __name__ == "__main__":
    raise SystemExit(main())
