"""How much slower the ritual makes a body, and which of its settings the most: by running it again with and without."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from torchdebug_magics.instruments.deterministic.report import Cost
from torchdebug_magics.probing.contents import Contents

if TYPE_CHECKING:
    from torchdebug_magics.instruments.deterministic.ritual.ritual import Ritual
    from torchdebug_magics.instruments.deterministic.twice.runs import Runs

__all__ = ["measured"]

_LEAST_S = 1.0
"""In all, of each: a short body is run more often."""
_MOST_ROUNDS = 15
_FOR_GPUS = ("cudnn.", "cuda.", "sdpa.", "CUBLAS_")
_FOR_OTHERS = ("PYTHONHASHSEED", "inductor.")
"""Of child processes and of the compiler: no run that is repeated here knows them."""


class _Clock:
    """Times a run, with nothing between its ops; what it will write is known from an earlier one, and copied beforehand."""

    def __init__(self, written: Sequence[torch.Tensor]) -> None:
        self.contents = Contents()
        self.taken_s = 0.0
        self._written = written

    def attach(self, stack: ExitStack) -> None:
        """From here until the stack closes."""
        for tensor in self._written:
            self.contents.keep(tensor)
        _wait()
        begin_s = time.perf_counter()
        stack.callback(self._stop, begin_s)

    def _stop(self, begin_s: float) -> None:
        _wait()
        self.taken_s = time.perf_counter() - begin_s


def measured(runs: Runs, written: Sequence[torch.Tensor], ritual: Ritual) -> dict[str, Any]:
    """Fields of the report: the ratio of the whole ritual, and of each setting alone. The shortest of several runs counts."""
    none = _FOR_OTHERS if torch.cuda.is_initialized() else (*_FOR_OTHERS, *_FOR_GPUS)
    times: dict[str, list[float]] = {name: [] for name in ("", "all", *(name for name in ritual.settings if not name.startswith(none)))}
    for _ in range(_MOST_ROUNDS):
        # In turns, so that a busy machine is as unfair to the one as to the other.
        for name, taken_s in times.items():
            with ritual.with_only(name) if name != "all" else nullcontext():
                clock = _Clock(written)
                error = runs.again(clock)
                if error is not None:
                    runs.guard.note(f"the cost was not measured: a rerun raised {type(error).__name__}: {error}")
                    return {}
                taken_s.append(clock.taken_s)
        if sum(times[""]) >= _LEAST_S:
            break
    plain_s = min(times.pop("")) or 1e-9
    whole_s = min(times.pop("all"))
    costs = tuple(Cost(name, min(taken) / plain_s) for name, taken in times.items())
    return {"slowdown_ratio": whole_s / plain_s, "costs": tuple(sorted(costs, key=lambda cost: -cost.ratio))}


def _wait() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
