"""Runs the body a second time, and says whether it gave the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torchdebug_magics.instruments.deterministic.twice.cause.culprit import Culprit
from torchdebug_magics.instruments.deterministic.twice.cause.repeated_ops import Repetitions
from torchdebug_magics.instruments.deterministic.twice.left_results import different, plain_results_of, results_of
from torchdebug_magics.instruments.deterministic.twice.run_comparison import Comparison
from torchdebug_magics.probing.modules import live_modules

if TYPE_CHECKING:
    from contextlib import ExitStack

    from torchdebug_magics.instruments.deterministic.counterfactual.set_order import OrderWatch
    from torchdebug_magics.instruments.deterministic.ops.op_recording import Recording
    from torchdebug_magics.instruments.deterministic.twice.runs import Runs

__all__ = ["NOT_SEEN", "second_run"]

NOT_SEEN = "the ops could not be recorded"


def second_run(
    runs: Runs,
    first: Recording,
    results: Mapping[str, int],
    used_up: Sequence[str],
    found: dict[str, Any],
    *,
    orders: OrderWatch | None = None,
) -> dict[str, int]:
    """Puts fields of the report into `found`: whether two runs agree, and else what differs first, even if an interrupt ends the search.

    Gives a digest of each plain value that the run has left. `orders` watches it, too.
    """
    comparison = Comparison(first, live_modules(), runs.guard, runs.hooks, to_its_end=bool(used_up), poison=True)
    repetitions = Repetitions(comparison.here)
    comparison.recorder.ahead = repetitions.before
    now: dict[str, int] = {}
    plain: dict[str, int] = {}

    def at_end() -> None:
        now.update(results_of(runs.body, comparison.recorder.is_unwritten))
        plain.update(plain_results_of(runs.body))

    with runs.otherwise(orders.attach if orders is not None else _nothing):
        error = runs.again(comparison, at_end)
    runs.second_heard = runs.heard
    found["potential"] = repetitions.found()
    if comparison.recorder.failed and comparison.difference is None:
        found["not_verified"] = NOT_SEEN
        return plain
    if error is None:
        comparison.end()
    elif comparison.difference is not None:
        error = None  # a consequence
    found["ops_count"] = len(first) if comparison.difference is None else comparison.difference.place + 1
    if comparison.difference is None and error is None:
        divergence = different(results, now, runs.body)
    else:
        culprit = Culprit(comparison, error, runs, used_up, () if orders is None else orders.found)
        found |= {"not_verified": "", "verified": False, "divergence": culprit.unexplained()}
        divergence = culprit.divergence()
    found |= {"not_verified": "", "verified": divergence is None, "divergence": divergence}
    return plain


def _nothing(_stack: ExitStack) -> None:
    return None
