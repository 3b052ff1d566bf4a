"""From a bad step to its finding: replay, walk, describe; where one way is closed, the next best, and a word about it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torchdebug_magics.instruments.nanhunt.attempt import Attempt, CannotReplay, Replayed
from torchdebug_magics.instruments.nanhunt.evidence import Context, Evidence
from torchdebug_magics.instruments.nanhunt.finding import bad_tensors, kind_word, write
from torchdebug_magics.instruments.nanhunt.livein import local_values
from torchdebug_magics.instruments.nanhunt.report import Finding, LayerRow
from torchdebug_magics.instruments.nanhunt.scaler import at_scale_one, live_scalers
from torchdebug_magics.instruments.nanhunt.step import Entry, Position, Step
from torchdebug_magics.instruments.nanhunt.walk import Birth, walk
from torchdebug_magics.probing.tensors import NAN, kind_of
from torchdebug_magics.probing.where import frames_above, locate, user_frame

if TYPE_CHECKING:
    import torch

    from torchdebug_magics.instruments.nanhunt.replay import Replayer

__all__ = ["Inquiry", "Investigator", "Outcome"]


@dataclass(frozen=True)
class Inquiry:
    """A bad sink call."""

    tensors: tuple[torch.Tensor, ...]
    """The loss, or what was differentiated."""
    leaves: dict[int, torch.Tensor]
    chain: tuple[Position, ...]
    context: Context


@dataclass(frozen=True)
class Outcome:
    """What came of an inquiry."""

    finding: Finding | None
    bad: dict[str, torch.Tensor]
    layers: tuple[LayerRow, ...] = ()
    reproduced: bool | None = None
    way: str = ""
    overflow: bool = False
    """A scaler skips this step by design."""


class Investigator:
    """Looks into one bad step."""

    def __init__(self, replayer: Replayer, note: Callable[[str], None]) -> None:
        self._replayer = replayer
        self._note = note

    def sink(self, step: Step, inquiry: Inquiry) -> Outcome:
        """A backward (or grad) call whose loss or gradients are bad."""
        attempt = Attempt(inquiry.tensors, _number(step), inquiry.leaves)
        if self._overflows(step, inquiry, attempt):
            return Outcome(None, {}, overflow=True)
        try:
            replayed = self._replayer.statements(step, inquiry.chain, attempt)
            way = "statements"
        except CannotReplay as reason:
            self._note(f"the step could not be run again as a whole: {reason}")
            return self._by_modules(step, inquiry, attempt)
        if not replayed.finished:
            self._note(replayed.problem or "the replay did not reach backward()")
            return self._by_modules(step, inquiry, attempt)
        if replayed.reproduced is False:
            self._note(
                "not reproduced: the replay gave another loss, so the step depends on something that cannot be put back"
                " (outside randomness, a clock, data read anew)"
            )
        outcome = self._conclude(inquiry, replayed, _sinks(replayed, inquiry), way)
        return self._before_the_model(step, inquiry, attempt, outcome) or outcome

    def _before_the_model(self, step: Step, inquiry: Inquiry, attempt: Attempt, outcome: Outcome) -> Outcome | None:
        """Data that were made bad between the start of the step and the model call were not bad data: look at what made them."""
        finding = outcome.finding
        name = finding.tensor.partition("[")[0] if finding is not None and finding.phase == "data" and finding.tensor else ""
        if not name.isidentifier() or not step.entries:
            return None
        try:
            replayed = self._replayer.statements(step, inquiry.chain, attempt, name)
        except CannotReplay:
            return None
        if not (replayed.finished and replayed.reproduced):
            return None
        again = self._conclude(inquiry, replayed, _sinks(replayed, inquiry), outcome.way)
        return again if again.finding is not None and again.finding.op is not None else None

    def update(self, step: Step, inquiry: Inquiry) -> Outcome | None:
        """Gradients that went bad between backward() and the optimizer's step; None where that cannot be run again."""
        attempt = Attempt(inquiry.tensors, _number(step), inquiry.leaves, until_update=True)
        try:
            replayed = self._replayer.statements(step, inquiry.chain, attempt)
        except CannotReplay:
            return None
        sinks = _sinks(replayed, inquiry)
        outcome = self._conclude(inquiry, replayed, sinks, "statements") if replayed.finished and sinks else None
        return outcome if outcome is not None and outcome.finding is not None and outcome.finding.op is not None else None

    def output(self, step: Step, entry: Entry, tensors: list[torch.Tensor], context: Context) -> Outcome:
        """An outermost module call, without gradients, whose output is bad."""
        alone = Step(entries=[entry], buffers=step.buffers, python=step.python)
        replayed = self._replayer.modules(alone, Attempt((), 0, {}))
        bad = [tensor for tensor in replayed.outputs if kind_of(tensor)]
        same = [kind_of(tensor) for tensor in tensors] == [kind_of(tensor) for tensor in replayed.outputs]
        replayed = replace(replayed, reproduced=same, names=_variables(step.chain))
        inquiry = Inquiry(tuple(tensors), {}, step.chain, replace(context, sink="output"))
        return self._conclude(inquiry, replayed, [(tensor, "output") for tensor in bad], "module", only_births=True)

    def look(self, step: Step, inquiry: Inquiry) -> tuple[LayerRow, ...]:
        """The layer table of a step with nothing wrong."""
        replayed = self._replayer.statements(step, inquiry.chain, Attempt(inquiry.tensors, _number(step), inquiry.leaves))
        return replayed.layers.rows() if replayed.layers is not None else ()

    def _overflows(self, step: Step, inquiry: Inquiry, attempt: Attempt) -> bool:
        """Whether the same step is finite at scale 1: then the scaler skips it, and that is how it is meant."""
        scalers = live_scalers()
        if not scalers:
            return False
        try:
            with at_scale_one(scalers):
                replayed = self._replayer.statements(step, inquiry.chain, attempt)
        except CannotReplay:
            # Not to be told: with a scaler at work, a finite loss with bad gradients is what it is there for.
            return not any(kind_of(tensor) & NAN for tensor in inquiry.tensors)
        if not replayed.finished or replayed.reproduced:
            return False  # the loss is the same at scale 1: no scaler is at work here
        return not any(kind_of(tensor) for tensor in (*replayed.losses, *replayed.gradients.values()))

    def _by_modules(self, step: Step, inquiry: Inquiry, attempt: Attempt) -> Outcome:
        """Only the model calls again; then what is known of the sink."""
        try:
            replayed = self._replayer.modules(step, Attempt(attempt.original, 0, attempt.leaves))
        except CannotReplay as reason:
            self._note(f"the model could not be called again: {reason}")
            return self.bare(inquiry)
        replayed = replace(replayed, reproduced=None, names=_variables(inquiry.chain))
        bad = [(tensor, "output") for tensor in replayed.outputs if kind_of(tensor)]
        if bad:
            return self._conclude(inquiry, replayed, bad, "module")
        return self.bare(inquiry)

    def _conclude(
        self, inquiry: Inquiry, replayed: Replayed, sinks: list[tuple[torch.Tensor, str]], way: str, *, only_births: bool = False
    ) -> Outcome:
        rows = replayed.layers.rows() if replayed.layers is not None else ()
        for wanted in _by_priority(sinks):
            births = walk(replayed.trace, [tensor for tensor, _ in wanted])
            if only_births:
                # Nobody differentiates this output: an infinity that somebody put there is a result, not a fault.
                births = [birth for birth in births if not birth.on_purpose and (birth.op is not None or birth.kind == NAN)]
            if births:
                context = replace(
                    inquiry.context, variables=_visible(replayed, inquiry), sink=wanted[0][1], sink_kind=kind_word(wanted[0][0])
                )
                evidence = Evidence(_first(births, context), replayed.trace, context)
                return Outcome(write(evidence), bad_tensors(evidence), rows, replayed.reproduced, way)
        if only_births:
            return Outcome(None, {})
        if not sinks and replayed.reproduced:
            self._note("the gradients were bad before this backward(): it only added to them")
            return Outcome(None, {})
        if sinks:
            self._note("the way from the bad value back to its birth was lost")
        return replace(self.bare(inquiry), layers=rows, reproduced=replayed.reproduced, way=way)

    def bare(self, inquiry: Inquiry) -> Outcome:
        """What is known without a replay: that the loss, or a gradient, is bad, and who asked for it."""
        losses = [tensor for tensor in inquiry.tensors if kind_of(tensor)]
        gradients = [leaf.grad for leaf in inquiry.leaves.values() if leaf.grad is not None and kind_of(leaf.grad)]
        if not losses and not gradients:
            return Outcome(None, {})
        frame = user_frame(inquiry.chain[0].frame) if inquiry.chain else None
        context, sink = inquiry.context, (losses or gradients)[0]
        finding = Finding(
            kind=kind_word(sink),
            phase="loss" if losses else "backward",
            op=None,
            module=None,
            call=None,
            location=locate(frame) if frame is not None else None,
            step=context.step,
            backward=context.backward,
            sink="loss" if losses else "gradient",
            sink_kind=kind_word(sink),
            weights="weights untouched",
            explanation="the loss is bad" if losses else "a gradient is bad while the loss is finite",
            fix="the cause could not be traced: the report's problems say why",
        )
        return Outcome(finding, {"loss" if losses else "gradient": sink.detach()})


def _number(step: Step) -> int:
    """Which backward() of the step this is, 1-based; without a model call the step begins right before it."""
    return max(1, step.backwards) if step.entries else 1


def _sinks(replayed: Replayed, inquiry: Inquiry) -> list[tuple[torch.Tensor, str]]:
    """Bad losses, then bad gradients."""
    names = {str(key): leaf for key, leaf in inquiry.leaves.items()}
    parameters = {id(parameter): name for root in inquiry.context.roots for name, parameter in root.named_parameters()}
    found = [(loss, "loss") for loss in replayed.losses if kind_of(loss)]
    for key, gradient in replayed.gradients.items():
        if kind_of(gradient):
            leaf = names.get(key)
            found.append((gradient, f"gradient of {parameters.get(id(leaf), 'an input')}" if leaf is not None else "gradient"))
    return found


def _by_priority(sinks: list[tuple[torch.Tensor, str]]) -> list[list[tuple[torch.Tensor, str]]]:
    """A bad loss explains bad gradients, so it goes first."""
    losses = [sink for sink in sinks if sink[1] in {"loss", "output"}]
    others = [sink for sink in sinks if sink[1] not in {"loss", "output"}]
    return [group for group in (losses, others) if group]


def _first(births: list[Birth], context: Context) -> Birth:
    """The earliest; of tensors that were all there before the step, the first in the order of the model's parameters."""
    if births[0].op is not None:
        return births[0]
    order = {parameter.data_ptr(): place for root in context.roots for place, parameter in enumerate(root.parameters())}
    return min((birth for birth in births if birth.op is None), key=lambda birth: order.get(birth.tensor.data_ptr(), len(order)))


def _visible(replayed: Replayed, inquiry: Inquiry) -> dict[str, Any]:
    return {**_variables(inquiry.chain), **replayed.names}


def _variables(chain: tuple[Position, ...]) -> dict[str, Any]:
    """What the user can name: the variables of the nearest frame of theirs, and its globals."""
    frame = user_frame(chain[0].frame) if chain else None
    for one in frames_above(frame):
        return {**one.f_globals, **local_values(one)}
    return {}
