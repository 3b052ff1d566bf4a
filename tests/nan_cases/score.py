"""A line a case, and how many of each field are right: ``python -m tests.nan_cases.score [-k SUBSTRING] [-v]``."""

from __future__ import annotations

import argparse
import importlib.util
import signal
import time
import traceback
import warnings
from collections import Counter

from tests.nan_cases import Case, all_cases
from tests.nan_cases.door import Outcome, compare, compare_location, plain, purity, raised, watch


def main() -> int:
    """Print the score; the exit status is the number of cases that are not right."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-k", default="", help="only cases whose name holds this")
    parser.add_argument("-v", action="store_true", help="verdicts, problems and tracebacks too")
    parser.add_argument("--plain", action="store_true", help="compare the states with a plain run's as well (twice the time)")
    parser.add_argument("--limit", type=int, default=20, metavar="S", help="seconds after which a case is given up (default 20)")
    options = parser.parse_args()
    signal.signal(signal.SIGALRM, _too_long)
    warnings.simplefilter("ignore")
    wrong: Counter[str] = Counter()
    cases = [case for case in all_cases() if options.k in case.name and (not case.needs or importlib.util.find_spec(case.needs))]
    bad = 0
    for case in cases:
        started = time.perf_counter()
        signal.alarm(options.limit)
        outcome, differs = _score(case, verbose=options.v, measured=options.plain)
        signal.alarm(0)
        bad += bool(differs)
        wrong.update(differs.keys())
        lines = [f"    {name}: {text}" for name, text in differs.items()]
        if options.v and outcome is not None and outcome.report is not None:
            lines += [f"    > {outcome.report['verdict']}", *(f"    ! {problem}" for problem in outcome.report["problems"])]
        print(f"{'FAIL' if differs else 'ok  '} {case.name} ({time.perf_counter() - started:.2f} s)", *lines, sep="\n", flush=True)
    print(
        f"\n{len(cases) - bad} of {len(cases)} right;",
        ", ".join(f"{name} wrong in {count}" for name, count in wrong.most_common()) or "nothing wrong",
    )
    return min(bad, 100)


class TooLongError(BaseException):
    """Past every `except Exception` of the case and of the engine."""


def _too_long(_number: int, _frame: object) -> None:
    raise TooLongError


def _score(case: Case, *, verbose: bool, measured: bool) -> tuple[Outcome | None, dict[str, str]]:
    try:
        outcome = watch(case)
        assert outcome.report is not None
        differs = {**raised(case, outcome), **compare(case, outcome.report), **compare_location(case, outcome.report)}
        if measured:
            differs |= purity(case, outcome, plain(case))
    except (Exception, TooLongError) as error:
        return None, {"crash": traceback.format_exc() if verbose else f"{type(error).__name__}: {error}"}
    else:
        return outcome, differs


if __name__ == "__main__":
    raise SystemExit(main())
