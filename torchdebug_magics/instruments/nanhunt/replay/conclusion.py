"""What a bad sink call is, what of a replay of it is bad, and what comes of that; without a replay, what is known of the sink itself."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch

from torchdebug_magics.instruments.nanhunt.causes.evidence import Context, Evidence
from torchdebug_magics.instruments.nanhunt.causes.op_table import Diagnosis
from torchdebug_magics.instruments.nanhunt.causes.tensor_names import parameter_name, shares_memory, uncalled, variable_name
from torchdebug_magics.instruments.nanhunt.finding import here, kind_word, marked, surfaced, write
from torchdebug_magics.instruments.nanhunt.report import Averaging, LayerRow, NanFinding, Phase, Sink
from torchdebug_magics.instruments.nanhunt.rerun.attempt import Position, Replayed, agree, line_of, names_seen, no_less_bad
from torchdebug_magics.instruments.nanhunt.walk.birth_walk import Birth, is_bad_weight, walk
from torchdebug_magics.probing.distributed.this_rank import rank, world_size
from torchdebug_magics.probing.source.user_code import is_user_code, location, user_frame
from torchdebug_magics.probing.state.contents import memory_of
from torchdebug_magics.probing.tensors import NAN, bad_mask, is_bad, kind_of, largest, tensors_in
from torchdebug_magics.report import Location

Sinks: TypeAlias = list[tuple[torch.Tensor, Sink]]
"""Bad tensors, each with what it is."""


@dataclass(frozen=True)
class Inquiry:
    """A bad sink call."""

    tensors: tuple[torch.Tensor, ...]
    """The loss, or what was differentiated."""
    leaves: dict[int, torch.Tensor]
    chain: tuple[Position, ...]
    context: Context
    only_adds: bool = False
    """Whether there were bad gradients before the call: it may only have added to them."""

    @property
    def place(self) -> Location | None:
        """The user's line that makes the call."""
        return here(self.chain[0].frame) if self.chain else None


@dataclass(frozen=True)
class Outcome:
    """What came of an inquiry."""

    finding: NanFinding | None
    bad: dict[str, torch.Tensor]
    layers: tuple[LayerRow, ...] = ()
    reproduced: bool | None = None
    way: str = ""
    evidence: Evidence | None = None
    """What the finding was written from; gone when the look into the step is over, as it holds the step's tensors."""
    overflow: tuple[Any, ...] | None = None
    """The scalers that skip this step by design."""


def sinks_of(replayed: Replayed, inquiry: Inquiry) -> Sinks:
    """Bad losses, then bad gradients."""
    names = {str(key): leaf for key, leaf in inquiry.leaves.items()}
    found = [(loss, Sink("loss")) for loss in replayed.losses if kind_of(loss)]
    for key, gradient in replayed.gradients.items():
        if kind_of(gradient):
            leaf = names.get(key)
            name = "" if leaf is None else parameter_name(leaf, inquiry.context.roots) or "an input"
            found.append((gradient, Sink("gradient", name)))
    return found


def same_gradients(replayed: Replayed, inquiry: Inquiry) -> bool:
    """Whether a bad loss has made the elements of the gradients bad that it made bad before."""
    pairs = ((leaf.grad, replayed.gradients.get(str(key))) for key, leaf in inquiry.leaves.items())
    return not any(map(is_bad, replayed.losses)) or all(agree(now, then, no_less_bad, unknown=True) for then, now in pairs)


def needs_others(replayed: Replayed) -> bool:
    """Whether a loss that other ranks have a part in may be bad because of theirs: what this rank gives is finite."""
    given = [math.isfinite(exchange.peak) for exchange in replayed.exchanges]
    return any(given) and (replayed.reproduced is False or any(map(is_bad, replayed.losses)))


def why_not_reproduced(replayed: Replayed) -> str:
    """A line for the report."""
    if replayed.exchanges:
        return f"not reproduced: the step depends on data from other ranks (`{replayed.exchanges[0].op}`), which a replay cannot receive"
    return (
        "not reproduced: the replay computed different values, so the step depends on state that cannot be restored"
        " (an external source of randomness, a clock, data that is read again)"
    )


def variables_of(chain: tuple[Position, ...]) -> dict[str, Any]:
    """What the user can name: the variables of the nearest frame of theirs, and its globals."""
    return names_seen(user_frame(chain[0].frame) if chain else None)


def bad_outputs(replayed: Replayed) -> Sinks:
    """What a model, or a computation, returned."""
    return [(tensor, Sink("output")) for tensor in replayed.outputs if kind_of(tensor)]


def born_beside(replayed: Replayed, outcome: Outcome) -> Sinks:
    """What ops made NaN of finite values in the step, in the elements in which a tensor from before the step is NaN."""
    if outcome.finding is None or outcome.finding.phase != "data":
        return []
    masks = [bad_mask(tensor, NAN) for tensor in outcome.bad.values()]
    made = [op for op in replayed.observer.ops if op.is_bad and not op.backward and not op.late and not any(map(is_bad, op.inputs()))]
    wanted = [mask for mask in masks if mask is not None and bool(mask.any())]
    outputs = [(output, bad_mask(output, NAN)) for op in made for output in op.outputs]
    same = [output for output, mask in outputs if mask is not None and any(torch.equal(mask, other) for other in wanted)]
    return [(output, Sink("output")) for output in same[:1]]


def conclude(
    inquiry: Inquiry, replayed: Replayed, sinks: Sinks, way: str, note: Callable[[str], None], *, only_births: bool = False
) -> Outcome:
    """The birth of what is bad among the sinks; `only_births`: an infinity that somebody put there is none."""
    rows = replayed.observer.layer_rows()
    losses = [sink for sink in sinks if sink[1].kind != "gradient"]
    # A bad loss explains bad gradients, so it goes first.
    for wanted in filter(None, (losses, [sink for sink in sinks if sink[1].kind == "gradient"])):
        births = walk(replayed.observer, [tensor for tensor, _ in wanted])
        if only_births:
            # Nobody differentiates this output: an infinity that somebody put there is a result, not a fault.
            births = [
                birth
                for birth in births
                if not birth.on_purpose
                and (birth.op is not None or birth.kind == NAN or is_bad_weight(birth.tensor, inquiry.context.roots))
            ]
        if births:
            variables, roots = {**variables_of(inquiry.chain), **replayed.names}, inquiry.context.roots
            context = replace(
                inquiry.context,
                variables=variables,
                roots=(*roots, *uncalled(variables.values(), roots)),
                chain=inquiry.chain,
                sink=wanted[0][1],
                sink_kind=kind_word(wanted[0][0]),
            )
            evidence = Evidence(_first(births, context), replayed.observer, context, tuple(births))
            inputs = evidence.birth.op.inputs() if evidence.birth.op is not None else []
            bad = {**{f"input {place}": one.detach() for place, one in enumerate(inputs)}, "output": evidence.birth.tensor.detach()}
            return Outcome(write(evidence), bad, rows, replayed.reproduced, way, evidence)
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
    sink = (losses or gradients)[0]
    phase: Phase = "loss" if losses else "backward"
    explanation = "the loss is non-finite" if losses else "a gradient is non-finite, and the loss is finite"
    cause = Diagnosis(None, explanation, "unknown: the cause could not be traced, for the reason given below")
    finding = surfaced(sink, phase, Sink("loss" if losses else "gradient"), inquiry.place, inquiry.context, cause)
    return Outcome(finding, {"loss" if losses else "gradient": sink.detach()})


def _given(inquiry: Inquiry) -> Outcome | None:
    """NaN in what the model was called with. An infinity there may be meant, as in a mask."""
    calls = [entry for entry in inquiry.context.entries if entry.recorded and entry.unchanged()]
    given = ((entry, tensor) for entry in calls for tensor in tensors_in((entry.args, entry.kwargs)))
    entry, bad = next(((entry, tensor) for entry, tensor in given if kind_of(tensor) & NAN), (None, None))
    if entry is None or bad is None:
        return None
    where = next((place for place in entry.place if is_user_code(place[0])), None)
    place = None if where is None else location(where[0].co_filename, line_of(where), where[0].co_name)
    cause = Diagnosis(
        None,
        "the model was called with NaN; what computed this input was not run again",
        "look at what computes this input: it is NaN before the model is called",
    )
    name = variable_name(bad, variables_of(inquiry.chain), inquiry.context.entries)
    finding = surfaced(bad, "data", Sink("loss"), place, inquiry.context, cause, tensor=name)
    return Outcome(marked(finding, bad.detach(), bad_mask(bad.detach(), NAN)), {"input": bad.detach()})


def _first(births: list[Birth], context: Context) -> Birth:
    """The earliest; of tensors that were all there before the step, the first in the order of the model's parameters."""
    parameters = [parameter for root in context.roots for parameter in root.parameters()]

    def place(birth: Birth) -> int:
        return next((place for place, one in enumerate(parameters) if shares_memory(one, birth.tensor)), len(parameters))

    return min((birth for birth in births if birth.op is births[0].op), key=place)


def averaged(inquiry: Inquiry, replayed: Replayed) -> Outcome | None:
    """The finding; None where the bad gradients are this rank's own, or nothing says that they were averaged."""
    if world_size() == 1 or inquiry.only_adds or not replayed.finished or replayed.problem or not replayed.reproduced:
        return None
    own = replayed.gradients
    if any(map(is_bad, (*inquiry.tensors, *own.values()))):
        return None
    bad = [leaf for leaf in inquiry.leaves.values() if leaf.grad is not None and is_bad(leaf.grad)]
    for leaf in bad:
        sent = _sent(leaf, replayed, inquiry)
        if sent is not None and leaf.grad is not None:
            gradient, dtype = leaf.grad.detach(), sent[0]
            name, kind = parameter_name(leaf, inquiry.context.roots) or "an input", kind_word(gradient)
            averaging = Averaging(
                dtype=str(dtype).removeprefix("torch."),
                local_peak=sent[1],
                limit=torch.finfo(dtype).max,
                location=sent[2],
                world_size=world_size(),
                tensor=name,
                rank=rank() or 0,
            )
            cause = Diagnosis("averaged_from_other_ranks", averaging.explanation("NaN" if kind == "nan" else "inf"), averaging.fix())
            finding = surfaced(gradient, "backward", Sink("gradient", name), sent[2], inquiry.context, cause, averaging=averaging)
            rows = replayed.observer.layer_rows()
            return Outcome(marked(finding, gradient), {"gradient": gradient}, rows, reproduced=True, way="statements")
    return None


def _sent(leaf: torch.Tensor, replayed: Replayed, inquiry: Inquiry) -> tuple[torch.dtype, float, Location | None] | None:
    """Type and largest magnitude of what this rank has put into the averaging of a gradient, and the line that does it."""
    own = replayed.gradients
    for wrapper in replayed.averaging:
        parameters = [parameter for parameter in wrapper.parameters() if parameter.requires_grad]
        if wrapper.require_backward_grad_sync and any(parameter is leaf for parameter in parameters):
            peak = largest([own[key] for parameter in parameters if (key := str(id(parameter))) in own])
            return leaf.dtype, peak, inquiry.place
    gradient = own.get(str(id(leaf)))
    if gradient is None:
        return None
    large = [exchange for exchange in replayed.exchanges if exchange.dtype.is_floating_point and exchange.element_count >= gradient.numel()]
    # Where the gradients were joined first, it is the only line that sent as much.
    same = [one for one in large if memory_of(gradient) in one.memory] or (large if len({one.location for one in large}) == 1 else [])
    return (same[-1].dtype, same[-1].peak, same[-1].location) if same else None
