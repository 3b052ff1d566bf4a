"""Two runs without the determinism settings: what is the same in each run only because the magic has set them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from torchdebug_magics.instruments.deterministic.counterfactual.effect import effect_of
from torchdebug_magics.instruments.deterministic.knowledge import is_documented, repair
from torchdebug_magics.instruments.deterministic.ops.op_recorder import Recorder
from torchdebug_magics.instruments.deterministic.report import Dependence
from torchdebug_magics.instruments.deterministic.twice.cause.op_causes import location_of
from torchdebug_magics.instruments.deterministic.twice.left_results import results_of

if TYPE_CHECKING:
    from torchdebug_magics.instruments.deterministic.ops.op_recording import Recording, Seen
    from torchdebug_magics.instruments.deterministic.ops.seen_op import Op
    from torchdebug_magics.instruments.deterministic.ritual.ritual import Ritual
    from torchdebug_magics.instruments.deterministic.twice.runs import Runs

__all__ = ["on_settings"]


def on_settings(runs: Runs, earlier: Recording, ritual: Ritual) -> Dependence | None:
    """The first op that differs between them; no run where the first one has had no op that the settings are for."""
    if not any(map(_is_set, earlier.ops)):
        return None
    recording, results = earlier.another(), dict[str, int]()

    def add(seen: Seen, _op: Op) -> None:
        recording.add(seen)

    with ritual.with_only(""):
        recorder = Recorder(recording, add, runs.guard, runs.hooks)
        error = runs.again(recorder, lambda: results.update(results_of(runs.body, recorder.is_unwritten)))
        effect = effect_of(runs, recording, results) if error is None and not recorder.failed else None
    if effect is None or not effect.reached:
        return None
    begin = min(effect.reached, key=lambda one: one.place)
    if begin.op is None or not _is_set(begin.op.plan.name):
        return None  # by chance in these two runs and not in the others: no setting does anything for it
    op = begin.op.plan
    return Dependence(
        on="settings",
        op=op.name,
        module=begin.module,
        location=location_of(begin),
        what=f"without the determinism settings, `{op.base}` adds in an order that varies",
        fix="call `torch.use_deterministic_algorithms(True)` before this line",
    )


def _is_set(op: str) -> bool:
    """Whether the settings decide how an op of that name is computed, on a device in use."""
    base = op.split(".")[1]
    return is_documented(base) or (torch.cuda.is_initialized() and bool(repair(base)))
