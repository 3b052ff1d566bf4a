"""A line a case, and the totals: ``python -m tests.hang_cases.score [--stack STACK] [--plain] [SUBSTRING ...]``."""

from __future__ import annotations

import argparse
import os
import time
from collections import Counter
from pathlib import Path

from tests import stacks
from tests.hang_cases import all_cases
from tests.hang_cases.door import KERNELS, Outcome, run_all


def main() -> int:
    """Print the score; the exit status is the number of cases that are not right."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="SUBSTRING", help="only cases whose name holds one of these")
    parser.add_argument("--stack", default="modern", choices=stacks.STACKS)
    parser.add_argument("--kernels", type=int, default=KERNELS, metavar="N", help=f"how many at a time (default {KERNELS})")
    parser.add_argument("--plain", action="store_true", help="without the magic: only how the cells end, and what they leave")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    root = str(Path(__file__).parents[2])
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    cases = [case for case in all_cases() if not options.parts or any(part in case.name for part in options.parts)]
    cases = [case for case in cases if options.stack == "modern" or not case.needs]
    begin = time.monotonic()
    outcomes = []
    for outcome in run_all(cases, options.stack, kernels=options.kernels, magic=not options.plain):
        outcomes.append(outcome)
        _show(outcome, plain=options.plain)
    wrong = [outcome for outcome in outcomes if outcome.differs]
    fields = Counter(name for outcome in wrong for name in outcome.differs)
    quiet = [outcome for outcome in outcomes if "stuck" not in outcome.case.state]
    print(
        f"\n{len(outcomes) - len(wrong)} of {len(outcomes)} right in {time.monotonic() - begin:.0f} s;",
        ", ".join(f"{name} wrong in {count}" for name, count in fields.most_common()) or "nothing wrong",
    )
    print(f"{sum(outcome.false_alarm for outcome in outcomes)} false alarms in {len(quiet)} cells that are not stuck")
    return min(len(wrong), 100)


def _show(outcome: Outcome, *, plain: bool) -> None:
    differs = {name: text for name, text in outcome.differs.items() if not (plain and name == "report")}
    mark = "ok   " if not differs else "ALARM" if outcome.false_alarm else "wrong"
    print(mark, outcome.case.name, *(f"    {name}: {text}" for name, text in differs.items()), sep="\n" if differs else " ", flush=True)
    if outcome.report is not None and differs:
        print(f"    > {outcome.report['verdict']}", *(f"    ! {problem}" for problem in outcome.report["problems"]), sep="\n", flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
