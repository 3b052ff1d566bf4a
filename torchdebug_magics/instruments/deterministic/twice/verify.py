"""Runs the body a second time, and says whether it gave the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.utils._pytree import tree_map_only

from torchdebug_magics.instruments.deterministic.counterfactual.set_order import OrderWatch
from torchdebug_magics.instruments.deterministic.ops.op_recording import Recording, is_documented, plan_of, repair
from torchdebug_magics.instruments.deterministic.report import Dependence
from torchdebug_magics.instruments.deterministic.twice.culprit import Culprit
from torchdebug_magics.instruments.deterministic.twice.run_comparison import Comparison, different, plain_results_of, results_of
from torchdebug_magics.instruments.deterministic.twice.runs import Runs
from torchdebug_magics.probing.modules import live_modules
from torchdebug_magics.probing.ops import written_by
from torchdebug_magics.probing.source.lines import Line
from torchdebug_magics.probing.state.digest import number_of, of_plain, of_tensor
from torchdebug_magics.probing.tensors import tensors_in

NOT_SEEN = "the ops could not be recorded"
Here: TypeAlias = Callable[[], tuple[Line | None, str | None]]
"""The user's line that runs, and the path of its module."""
_TIMES = 10
_MOST_CALLS = 3
"""Of one op at one line."""
_MOST_BYTES = 1 << 28


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
    found["by_chance"] = repetitions.found()
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


@dataclass
class _Row:
    line: Line | None
    module: str | None
    differed: int = 0
    repetitions: int = 0


class Repetitions:
    """Repeats the documented ones, on copies, before they run for real."""

    def __init__(self, here: Here) -> None:
        self._here = here
        self._calls: Counter[tuple[str, Line | None]] = Counter()
        self._rows: dict[tuple[str, Line | None], _Row] = {}

    def before(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Told of an op that is about to run."""
        plan = plan_of(func)
        if not is_documented(plan.base):
            return
        line, module = self._here()
        key = plan.name, line
        self._calls[key] += 1
        if self._calls[key] > _MOST_CALLS or sum(one.nbytes for one in tensors_in((args, kwargs))) > _MOST_BYTES:
            return
        row = self._rows.setdefault(key, _Row(line, module))
        gave = [_repeated(func, args, kwargs) for _ in range(_TIMES)]
        row.differed += sum(1 for one in gave if one != gave[0])
        row.repetitions += _TIMES

    def found(self) -> tuple[Dependence, ...]:
        """Those that did not give the same each time."""
        return tuple(
            Dependence(
                on="race",
                op=name,
                module=row.module,
                location=None if row.line is None else row.line.location,
                what=f"`{name}` gave different numbers in {row.differed} of {row.repetitions} repetitions on equal inputs",
                fix=repair(name.split(".")[1]),
            )
            for (name, _), row in self._rows.items()
            if row.differed
        )


def _repeated(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    own_args, own_kwargs = tree_map_only(torch.Tensor, torch.clone, (args, kwargs))
    result = func(*own_args, **own_kwargs)
    tensors = [*tensors_in(result), *written_by(func, own_args, own_kwargs)]
    return number_of([*map(of_tensor, tensors), of_plain(result)])
