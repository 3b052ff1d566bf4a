"""From what a replay saw to its finding; without a replay, what is known of the sink itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from torchdebug_magics.instruments.nanhunt.causes.evidence import Context, Evidence
from torchdebug_magics.instruments.nanhunt.causes.tensor_names import shares_memory, uncalled, variable_name
from torchdebug_magics.instruments.nanhunt.finding import bad_tensors, kind_word, marked, write
from torchdebug_magics.instruments.nanhunt.replay.bad_step import Inquiry, Outcome, Sinks, StepReplay, variables_of
from torchdebug_magics.instruments.nanhunt.report import Averaging, NanFinding, Sink
from torchdebug_magics.instruments.nanhunt.rerun.attempt import line_of
from torchdebug_magics.instruments.nanhunt.walk.birth_walk import Birth, walk
from torchdebug_magics.instruments.nanhunt.walk.intentional_inf import is_bad_weight
from torchdebug_magics.probing.source.code_owner import is_user_code
from torchdebug_magics.probing.source.where import excerpt, locate, location, user_frame
from torchdebug_magics.probing.state.contents import memory_of
from torchdebug_magics.probing.tensors import NAN, bad_mask, is_bad, kind_of, largest, tensors_in
from torchdebug_magics.probing.this_rank import rank, world_size
from torchdebug_magics.report import Location

_MOST_ROWS = 20


def conclude(
    inquiry: Inquiry, replayed: StepReplay, sinks: Sinks, way: str, note: Callable[[str], None], *, only_births: bool = False
) -> Outcome:
    """The birth of what is bad among the sinks; `only_births`: an infinity that somebody put there is none."""
    rows = replayed.observer.layer_rows()
    for wanted in _by_priority(sinks):
        births = walk(replayed.observer, [tensor for tensor, _ in wanted])
        if only_births:
            # Nobody differentiates this output: an infinity that somebody put there is a result, not a fault.
            births = [birth for birth in births if not birth.on_purpose and not _is_a_result(birth, inquiry.context)]
        if births:
            variables, roots = _visible(replayed, inquiry), inquiry.context.roots
            context = replace(
                inquiry.context,
                variables=variables,
                roots=(*roots, *uncalled(variables.values(), roots)),
                chain=inquiry.chain,
                sink=wanted[0][1],
                sink_kind=kind_word(wanted[0][0]),
            )
            evidence = Evidence(_first(births, context), replayed.observer, context, tuple(births))
            return Outcome(write(evidence), bad_tensors(evidence), rows, replayed.reproduced, way, evidence)
    if only_births:
        return Outcome(None, {})
    if not sinks and replayed.reproduced and (inquiry.only_adds or not replayed.averaging):
        note("the gradients were non-finite before this backward(): it only added to them")
        return Outcome(None, {})
    if sinks:
        note("could not trace the value back to the op that produced it")
    return replace(bare(inquiry), layers=rows, reproduced=replayed.reproduced, way=way)


def bare(inquiry: Inquiry) -> Outcome:
    """What is known without a replay: that the loss, or a gradient, is bad, and who asked for it."""
    losses = [tensor for tensor in inquiry.tensors if kind_of(tensor)]
    own = () if inquiry.only_adds else inquiry.leaves.values()
    gradients = [leaf.grad for leaf in own if leaf.grad is not None and kind_of(leaf.grad)]
    if not losses and not gradients:
        return Outcome(None, {})
    if losses and (given := _given(inquiry)) is not None:
        return given
    frame = user_frame(inquiry.chain[0].frame) if inquiry.chain else None
    context, sink = inquiry.context, (losses or gradients)[0]
    finding = NanFinding(
        kind=kind_word(sink),
        phase="loss" if losses else "backward",
        location=locate(frame) if frame is not None else None,
        step=context.step,
        backward=context.backward,
        sink=Sink("loss" if losses else "gradient"),
        sink_kind=kind_word(sink),
        weights="weights untouched",
        explanation="the loss is non-finite" if losses else "a gradient is non-finite, and the loss is finite",
        fix="unknown: the cause could not be traced, for the reason given below",
    )
    return Outcome(finding, {"loss" if losses else "gradient": sink.detach()})


def _given(inquiry: Inquiry) -> Outcome | None:
    """NaN in what the model was called with. An infinity there may be meant, as in a mask."""
    context = inquiry.context
    calls = [entry for entry in context.entries if entry.recorded and entry.unchanged()]
    given = ((entry, tensor) for entry in calls for tensor in tensors_in((entry.args, entry.kwargs)))
    entry, bad = next(((entry, tensor) for entry, tensor in given if kind_of(tensor) & NAN), (None, None))
    if entry is None or bad is None:
        return None
    where = next((place for place in entry.place if is_user_code(place[0])), None)
    mask = bad_mask(bad.detach(), NAN)
    finding = NanFinding(
        kind="nan",
        phase="data",
        location=None if where is None else location(where[0].co_filename, line_of(where), where[0].co_name),
        step=context.step,
        backward=context.backward,
        rows=tuple(mask.flatten(1).any(1).nonzero().flatten().tolist()[:_MOST_ROWS]) if mask is not None and mask.dim() > 1 else (),
        tensor=variable_name(bad, variables_of(inquiry.chain), context.entries),
        sink=Sink("loss"),
        sink_kind="nan",
        weights="weights untouched",
        explanation="the model was called with NaN; what computed this input was not run again",
        fix="look at what computes this input: it is NaN before the model is called",
    )
    return Outcome(finding, {"input": bad.detach()})


def _by_priority(sinks: Sinks) -> list[Sinks]:
    """A bad loss explains bad gradients, so it goes first."""
    losses = [sink for sink in sinks if sink[1].kind != "gradient"]
    others = [sink for sink in sinks if sink[1].kind == "gradient"]
    return [group for group in (losses, others) if group]


def _is_a_result(birth: Birth, context: Context) -> bool:
    return birth.op is None and birth.kind != NAN and not is_bad_weight(birth.tensor, birth.via, context.roots)


def _first(births: list[Birth], context: Context) -> Birth:
    """The earliest; of tensors that were all there before the step, the first in the order of the model's parameters."""
    if births[0].op is not None:
        return births[0]
    parameters = [parameter for root in context.roots for parameter in root.parameters()]

    def place(birth: Birth) -> int:
        return next((place for place, one in enumerate(parameters) if shares_memory(one, birth.tensor)), len(parameters))

    return min((birth for birth in births if birth.op is None), key=place)


def _visible(replayed: StepReplay, inquiry: Inquiry) -> dict[str, Any]:
    return {**variables_of(inquiry.chain), **replayed.names}


@dataclass(frozen=True)
class _Given:
    """What this rank has put into the averaging of one gradient."""

    dtype: torch.dtype
    peak: float
    location: Location | None


def averaged(inquiry: Inquiry, replayed: StepReplay) -> Outcome | None:
    """The finding; None where the bad gradients are this rank's own, or nothing says that they were averaged."""
    if world_size() == 1 or inquiry.only_adds or not replayed.finished or replayed.problem or not replayed.reproduced:
        return None
    own = replayed.gradients
    if any(map(is_bad, (*inquiry.tensors, *own.values()))):
        return None
    bad = [leaf for leaf in inquiry.leaves.values() if leaf.grad is not None and is_bad(leaf.grad)]
    for leaf in bad:
        given = _by_wrapper(leaf, replayed, inquiry) or _by_hand(own.get(str(id(leaf))), replayed)
        if given is not None and leaf.grad is not None:
            rows, bad_gradient = replayed.observer.layer_rows(), leaf.grad.detach()
            return Outcome(
                _finding(leaf, bad_gradient, given, inquiry), {"gradient": bad_gradient}, rows, reproduced=True, way="statements"
            )
    return None


def _by_wrapper(leaf: torch.Tensor, replayed: StepReplay, inquiry: Inquiry) -> _Given | None:
    for wrapper in replayed.averaging:
        parameters = [one for one in wrapper.parameters() if one.requires_grad]
        if wrapper.require_backward_grad_sync and any(one is leaf for one in parameters):
            frame = user_frame(inquiry.chain[0].frame) if inquiry.chain else None
            gradients = [replayed.gradients[key] for one in parameters if (key := str(id(one))) in replayed.gradients]
            return _Given(leaf.dtype, largest(gradients), None if frame is None else locate(frame))
    return None


def _by_hand(gradient: torch.Tensor | None, replayed: StepReplay) -> _Given | None:
    """The collective that was given this gradient or, where the gradients were joined first, the only line that sent as much."""
    if gradient is None:
        return None
    there = memory_of(gradient)
    large = [one for one in replayed.exchanges if one.dtype.is_floating_point and one.element_count >= gradient.numel()]
    same = [one for one in large if there in one.memory]
    if not same and len({one.location for one in large}) == 1:
        same = large
    return _Given(same[-1].dtype, same[-1].peak, same[-1].location) if same else None


def _finding(leaf: torch.Tensor, gradient: torch.Tensor, given: _Given, inquiry: Inquiry) -> NanFinding:
    names = (name for root in inquiry.context.roots for name, one in root.named_parameters() if one is leaf)
    name, kind = next(names, "an input"), kind_word(gradient)
    averaging = Averaging(
        dtype=str(given.dtype).removeprefix("torch."),
        local_peak=given.peak,
        limit=torch.finfo(given.dtype).max,
        world_size=world_size(),
        tensor=name,
        rank=rank() or 0,
    )
    finding = NanFinding(
        kind=kind,
        phase="backward",
        location=given.location,
        step=inquiry.context.step,
        backward=inquiry.context.backward,
        diagnosis="averaged_from_other_ranks",
        explanation=averaging.explanation("NaN" if kind == "nan" else "inf"),
        fix=averaging.fix(),
        sink=Sink("gradient", name),
        sink_kind=kind,
        weights="weights untouched",
        excerpt=excerpt(given.location) if given.location is not None else (),
        averaging=averaging,
    )
    return marked(finding, gradient)
