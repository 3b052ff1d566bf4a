"""Runs the body a second time, and says whether it gave the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torchdebug_magics.instruments.deterministic.twice.compare import Comparison
from torchdebug_magics.instruments.deterministic.twice.culprit import culprit
from torchdebug_magics.instruments.deterministic.twice.potential import Repetitions
from torchdebug_magics.instruments.deterministic.twice.results import different, plain_results_of, results_of
from torchdebug_magics.probing.modules import live_modules

if TYPE_CHECKING:
    from torchdebug_magics.instruments.deterministic.ops.recording import Recording
    from torchdebug_magics.instruments.deterministic.twice.runs import Runs

__all__ = ["NOT_SEEN", "second_run"]

NOT_SEEN = "looking at the ops failed, see the problems"


def second_run(
    runs: Runs, first: Recording, results: Mapping[str, int], used_up: Sequence[str], plain: dict[str, int] | None = None
) -> dict[str, Any]:
    """Fields of the report: whether two runs agree, and else what differs first. `plain` gets what the run leaves besides tensors."""
    comparison = Comparison(first, live_modules(), runs.guard, runs.hooks, to_its_end=bool(used_up), poison=True)
    repetitions = Repetitions(comparison.here)
    comparison.recorder.ahead = repetitions.before
    now: dict[str, int] = {}

    def at_end() -> None:
        now.update(results_of(runs.body, comparison.recorder.is_unwritten))
        if plain is not None:
            plain.update(plain_results_of(runs.body))

    error = runs.again(comparison, at_end)
    if comparison.recorder.failed and comparison.difference is None:
        return {"not_verified": NOT_SEEN}
    if error is None:
        comparison.end()
    elif comparison.difference is not None:
        error = None  # a consequence
    if comparison.difference is None and error is None:
        divergence = different(results, now, runs.body)
    else:
        divergence = culprit(comparison, error, runs, used_up)
    return {
        "verified": divergence is None,
        "divergence": divergence,
        "ops_count": len(first) if comparison.difference is None else comparison.difference.place + 1,
        "potential": repetitions.found(),
    }
