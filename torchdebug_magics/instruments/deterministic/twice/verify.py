"""Runs the body a second time, and says whether it gave the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from torchdebug_magics.instruments.deterministic.counterfactual.set_order import OrderWatch
from torchdebug_magics.instruments.deterministic.ops.op_recording import Recording
from torchdebug_magics.instruments.deterministic.report import Divergence
from torchdebug_magics.instruments.deterministic.twice.culprit import Culprit
from torchdebug_magics.instruments.deterministic.twice.run_comparison import RunComparison, different, plain_results_of, results_of
from torchdebug_magics.instruments.deterministic.twice.runs import Runs
from torchdebug_magics.probing.modules import live_modules

NOT_SEEN = "the ops could not be recorded"


class TwoRuns(NamedTuple):
    """Whether two runs agree, and else what differs first."""

    ops_count: int | None
    verified: bool | None = None
    divergence: Divergence | None = None
    not_verified: str = ""
    plain: Mapping[str, int] = {}
    """A digest of each plain value that the second run has left."""


def second_run(runs: Runs, first: Recording, results: Mapping[str, int], used_up: Sequence[str], orders: OrderWatch) -> Iterator[TwoRuns]:
    """Gives what is known as soon as it is, though an interrupt may end the search for the cause. `orders` watches the run, too."""
    comparison = RunComparison(first, live_modules(), runs.guard, runs.hooks, to_its_end=bool(used_up), poison=True)
    now: dict[str, int] = {}
    plain: dict[str, int] = {}

    def at_end() -> None:
        now.update(results_of(runs.body, comparison.recorder.is_unwritten))
        plain.update(plain_results_of(runs.body))

    with runs.otherwise(orders.attach):
        error = runs.again(comparison, at_end)
    runs.second_heard = runs.heard
    if comparison.recorder.failed and comparison.difference is None:
        yield TwoRuns(None, not_verified=NOT_SEEN, plain=plain)
        return
    if error is None:
        comparison.end()
    elif comparison.difference is not None:
        error = None  # a consequence
    ops_count = len(first) if comparison.difference is None else comparison.difference.place + 1
    if comparison.difference is None and error is None:
        divergence = different(results, now, runs.body)
    else:
        culprit = Culprit(comparison, error, runs, used_up, orders.found)
        yield TwoRuns(ops_count, verified=False, divergence=culprit.unexplained())
        divergence = culprit.divergence()
    yield TwoRuns(ops_count, divergence is None, divergence, plain=plain)
