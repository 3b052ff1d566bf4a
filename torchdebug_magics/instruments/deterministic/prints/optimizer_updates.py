"""Compares an optimizer's step with the same step of an earlier run."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from torchdebug_magics.format import listed

if TYPE_CHECKING:
    from torchdebug_magics.instruments.deterministic.fingerprint import Update
    from torchdebug_magics.instruments.deterministic.prints.alignment import Run

__all__ = ["UpdatedOtherwise", "updated_otherwise"]


class UpdatedOtherwise(NamedTuple):
    """What an optimizer's step began with, that the earlier run's did not."""

    explanation: str
    fix: str
    words: tuple[str, ...]
    """One of them is in the line that was edited, if one was; none where the run was resumed."""


def updated_otherwise(earlier: Run, later: Run, number: int) -> UpdatedOtherwise | None:
    """Of the step that the op with that number is in; None where it is in none, or both began alike."""
    now = next((update for update in later.updates if update.first <= number < update.end), None)
    then = None if now is None else _same_step(earlier, later, now)
    if now is None or then is None:
        return None
    place = later.ops[number].place
    receiver = re.search(r"([\w.]+)\.step\(", "" if place is None else place.source)
    name = receiver.group(1) if receiver else now.optimizer
    missing = [f"`{one}`" for one in then.state if one not in now.state]
    if missing:
        said = f"`{name}` is new and lacks {listed(missing)}, which the earlier run had"
        return UpdatedOtherwise(
            said, f"save `{name}.state_dict()` with the checkpoint, and load it with `{name}.load_state_dict(...)`", words=()
        )
    values = dict(now.settings)
    changed = [(setting, value, values[setting]) for setting, value in then.settings if values.get(setting, value) != value]
    if not changed:
        return None
    said = listed([f"`{setting}` of `{name}` was {value} in the earlier run and is {present} now" for setting, value, present in changed])
    setting, value, _ = changed[0]
    if earlier.updates.index(then) != later.updates.index(now):
        fix = (
            "save the scheduler's `state_dict()` with the checkpoint, and load it with `load_state_dict`"
            if setting.startswith("lr")
            else f"set `{setting}={value}`"
        )
        return UpdatedOtherwise(said, fix, ())
    return UpdatedOtherwise(said, f"set `{setting}={value}`", ("sched", name.rsplit(".", 1)[-1]))


def _same_step(earlier: Run, later: Run, now: Update) -> Update | None:
    """The earlier run's step after the same gradients: the last results of a backward pass that both runs had."""
    for number in reversed(range(now.first)):
        op = later.ops[number]
        if op.is_backward and op.gave in earlier.values:
            return next((update for update in earlier.updates if update.first > earlier.values[op.gave]), None)
    return None
