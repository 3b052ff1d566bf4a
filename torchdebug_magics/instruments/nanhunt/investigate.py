"""The ways to look into a bad step: where one is closed, the next best, and a word about it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import chain, product
from typing import TYPE_CHECKING, Any

from torchdebug_magics.instruments.nanhunt.attempt import Attempt, CannotReplay, Replayed
from torchdebug_magics.instruments.nanhunt.conclude import bare, conclude
from torchdebug_magics.instruments.nanhunt.inquiry import Inquiry, Outcome, same_gradients, sinks_of, variables_of
from torchdebug_magics.instruments.nanhunt.naming import shares_memory
from torchdebug_magics.instruments.nanhunt.scaler import at_scale_one, live_scalers, may_be_scaling
from torchdebug_magics.instruments.nanhunt.step import Entry, Step
from torchdebug_magics.probing.tensors import is_bad, kind_of

if TYPE_CHECKING:
    import torch

    from torchdebug_magics.instruments.nanhunt.evidence import Context
    from torchdebug_magics.instruments.nanhunt.replay import Replayer
    from torchdebug_magics.instruments.nanhunt.report import Finding, LayerRow

__all__ = ["Investigator"]

_WRITTEN_DOWN = frozenset(product(("fill_", "copy_"), ("nan_constant", "inf_constant")))


class Investigator:
    """Looks into one bad step."""

    def __init__(self, replayer: Replayer, note: Callable[[str], None]) -> None:
        self._replayer = replayer
        self._note = note

    def sink(self, step: Step, inquiry: Inquiry) -> Outcome:
        """A backward (or grad) call whose loss or gradients are bad."""
        attempt = Attempt(inquiry.tensors, _number(step), inquiry.leaves)
        scalers = self._overflows(step, inquiry, attempt)
        if scalers is not None:
            return Outcome(None, {}, overflow=scalers)
        try:
            replayed = self._replayer.statements(step, inquiry.chain, attempt)
            way = "statements"
        except CannotReplay as reason:
            self._note(f"the step could not be run again as a whole: {reason}")
            return self._by_modules(step, inquiry, attempt)
        if not replayed.finished:
            self._note(replayed.problem or "the replay did not reach backward()")
            return self._by_modules(step, inquiry, attempt)
        replayed.reproduced = replayed.reproduced and same_gradients(replayed, inquiry)
        if replayed.reproduced is False:
            replayed = self._rest(step, inquiry, attempt) or replayed
        if replayed.reproduced is False:
            self._note(
                "not reproduced: the replay gave other numbers, so the step depends on something that cannot be put back"
                " (outside randomness, a clock, data read anew)"
            )
        outcome = conclude(inquiry, replayed, sinks_of(replayed, inquiry), way, self._note)
        return self._before_the_model(step, inquiry, attempt, outcome) or outcome

    def _rest(self, step: Step, inquiry: Inquiry, attempt: Attempt) -> Replayed | None:
        """A bad loss may be made from what the model's calls left, which is at hand; None where that is not how it was made."""
        if not any(map(is_bad, inquiry.tensors)) or not step.entries:
            return None
        try:
            replayed = self._replayer.rest(step, inquiry.chain, attempt)
        except CannotReplay:
            return None
        return replayed if replayed.finished and replayed.reproduced else None

    def _before_the_model(self, step: Step, inquiry: Inquiry, attempt: Attempt, outcome: Outcome) -> Outcome | None:
        """Data that were made bad between the start of the step and the model call were not bad data: look at what made them."""
        finding = outcome.finding
        name = finding.tensor.partition("[")[0] if finding is not None and finding.phase == "data" and finding.tensor else ""
        if not name.isidentifier() or not step.entries:
            return None
        try:
            for held in chain([{}], self._replayer.guesses(step, inquiry.chain, name)):
                replayed = self._replayer.statements(step, inquiry.chain, attempt, name, held)
                if replayed.finished and replayed.reproduced:
                    again = conclude(inquiry, replayed, sinks_of(replayed, inquiry), outcome.way, self._note)
                    if _made_it(again.finding) or _is_further_back(again, outcome):
                        return again
        except CannotReplay:
            pass
        return None

    def update(self, step: Step, inquiry: Inquiry) -> Outcome | None:
        """Gradients that went bad between backward() and the optimizer's step; None where that cannot be run again."""
        attempt = Attempt(inquiry.tensors, _number(step), inquiry.leaves, until_update=True)
        try:
            replayed = self._replayer.statements(step, inquiry.chain, attempt)
        except CannotReplay:
            return None
        sinks = sinks_of(replayed, inquiry)
        outcome = conclude(inquiry, replayed, sinks, "statements", self._note) if replayed.finished and sinks else None
        return outcome if outcome is not None and outcome.finding is not None and outcome.finding.op is not None else None

    def output(self, step: Step, entry: Entry, tensors: list[torch.Tensor], context: Context) -> Outcome:
        """An outermost module call, without gradients, whose output is bad."""
        alone = Step(entries=[entry], buffers=step.buffers, python=step.python)
        replayed = self._replayer.modules(alone, Attempt((), 0, {}))
        bad = [tensor for tensor in replayed.outputs if kind_of(tensor)]
        same = [kind_of(tensor) for tensor in tensors] == [kind_of(tensor) for tensor in replayed.outputs]
        replayed = replace(replayed, reproduced=same, names=variables_of(step.chain))
        inquiry = Inquiry(tuple(tensors), {}, step.chain, replace(context, sink="output"))
        return conclude(inquiry, replayed, [(tensor, "output") for tensor in bad], "module", self._note, only_births=True)

    def look(self, step: Step, inquiry: Inquiry) -> tuple[LayerRow, ...]:
        """The layer table of a step with nothing wrong."""
        replayed = self._replayer.statements(step, inquiry.chain, Attempt(inquiry.tensors, _number(step), inquiry.leaves))
        return replayed.layers.rows() if replayed.layers is not None else ()

    def _overflows(self, step: Step, inquiry: Inquiry, attempt: Attempt) -> tuple[Any, ...] | None:
        """The scalers without which the same step is finite: they skip it, and that is how it is meant."""
        scalers = live_scalers()
        if not scalers:
            return None
        try:
            with at_scale_one(scalers) as used:
                replayed = self._replayer.statements(step, inquiry.chain, attempt)
        except CannotReplay as reason:
            if not may_be_scaling(inquiry.tensors, scalers, inquiry.context.losses):
                return None
            self._note(f"taken for an overflow that a GradScaler skips, as the step could not be run again without its scale: {reason}")
            return tuple(scalers)
        if not replayed.finished or replayed.reproduced or not used:
            return None  # the loss is the same at scale 1: no scaler is at work here
        bad = any(kind_of(tensor) for tensor in (*replayed.losses, *replayed.gradients.values()))
        return None if bad else tuple(used)

    def _by_modules(self, step: Step, inquiry: Inquiry, attempt: Attempt) -> Outcome:
        """Only the model calls again; then what is known of the sink."""
        try:
            replayed = self._replayer.modules(step, Attempt(attempt.original, 0, attempt.leaves))
        except CannotReplay as reason:
            self._note(f"the model could not be called again: {reason}")
            return bare(inquiry)
        replayed = replace(replayed, reproduced=None, names=variables_of(inquiry.chain))
        bad = [(tensor, "output") for tensor in replayed.outputs if kind_of(tensor)]
        if bad:
            return conclude(inquiry, replayed, bad, "module", self._note)
        return bare(inquiry)


def _made_it(finding: Finding | None) -> bool:
    """Whether it names an op that made the data bad. A number that was written into them is bad data."""
    return finding is not None and finding.op is not None and (finding.op, finding.diagnosis) not in _WRITTEN_DOWN


def _is_further_back(one: Outcome, other: Outcome) -> bool:
    """Whether it names other bad data, which the first were made of; a part of a tensor is still that tensor."""
    if one.finding is None:
        return False
    named = one.finding.phase == "data" and (one.finding.tensor or "").partition("[")[0].isidentifier()
    return named and not shares_memory(one.bad["output"], other.bad["output"])


def _number(step: Step) -> int:
    """Which backward() of the step this is, 1-based; without a model call the step begins right before it."""
    return max(1, step.backwards) if step.entries else 1
