"""What a bad sink call is, what came of looking into it, and what of a replay is bad."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product
from typing import Any, TypeAlias

import torch

from torchdebug_magics.instruments.nanhunt.causes.evidence import Context, Evidence
from torchdebug_magics.instruments.nanhunt.causes.tensor_names import shares_memory
from torchdebug_magics.instruments.nanhunt.replay.op_trace import Trace
from torchdebug_magics.instruments.nanhunt.report import LayerRow, NanFinding, Sink
from torchdebug_magics.instruments.nanhunt.rerun.attempt import Position, Replayed, agree, no_less_bad
from torchdebug_magics.probing.source.code_owner import frames_above, local_values
from torchdebug_magics.probing.source.where import user_frame
from torchdebug_magics.probing.tensors import is_bad, kind_of

StepReplay: TypeAlias = "Replayed[Trace]"
"""A replay with all its ops."""
Sinks: TypeAlias = list[tuple[torch.Tensor, Sink]]
"""Bad tensors, each with what it is."""

_WRITTEN_DOWN = frozenset(product(("fill_", "copy_"), ("nan_constant", "inf_constant")))


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


def sinks_of(replayed: StepReplay, inquiry: Inquiry) -> Sinks:
    """Bad losses, then bad gradients."""
    names = {str(key): leaf for key, leaf in inquiry.leaves.items()}
    parameters = {id(parameter): name for root in inquiry.context.roots for name, parameter in root.named_parameters()}
    found = [(loss, Sink("loss")) for loss in replayed.losses if kind_of(loss)]
    for key, gradient in replayed.gradients.items():
        if kind_of(gradient):
            leaf = names.get(key)
            found.append((gradient, Sink("gradient", parameters.get(id(leaf), "an input") if leaf is not None else "")))
    return found


def same_gradients(replayed: StepReplay, inquiry: Inquiry) -> bool:
    """Whether a bad loss has made the elements of the gradients bad that it made bad before."""
    pairs = ((leaf.grad, replayed.gradients.get(str(key))) for key, leaf in inquiry.leaves.items())
    return not any(map(is_bad, replayed.losses)) or all(agree(now, then, no_less_bad, unknown=True) for then, now in pairs)


def needs_others(replayed: StepReplay) -> bool:
    """Whether a loss that other ranks have a part in may be bad because of theirs: what this rank gives is finite."""
    given = [math.isfinite(one.peak) for one in replayed.exchanges]
    return any(given) and (replayed.reproduced is False or any(map(is_bad, replayed.losses)))


def why_not_reproduced(replayed: StepReplay) -> str:
    """A line for the report."""
    if replayed.exchanges:
        return f"not reproduced: the step depends on data from other ranks (`{replayed.exchanges[0].op}`), which a replay cannot receive"
    return (
        "not reproduced: the replay computed different values, so the step depends on state that cannot be restored"
        " (an external source of randomness, a clock, data that is read again)"
    )


def variables_of(chain: tuple[Position, ...]) -> dict[str, Any]:
    """What the user can name: the variables of the nearest frame of theirs, and its globals."""
    frame = user_frame(chain[0].frame) if chain else None
    for one in frames_above(frame):
        return {**one.f_globals, **local_values(one)}
    return {}


def bad_outputs(replayed: StepReplay) -> Sinks:
    """What a model, or a computation, returned."""
    return [(tensor, Sink("output")) for tensor in replayed.outputs if kind_of(tensor)]


def names_a_maker(finding: NanFinding | None) -> bool:
    """Whether it names an op that made the data bad. A number that was written into them is bad data."""
    return finding is not None and finding.op is not None and (finding.op, finding.diagnosis) not in _WRITTEN_DOWN


def is_further_back(one: Outcome, other: Outcome) -> bool:
    """Whether it names other bad data, which the first were made of; a part of a tensor is still that tensor."""
    if one.finding is None:
        return False
    named = one.finding.phase == "data" and (one.finding.tensor or "").partition("[")[0].isidentifier()
    return named and not shares_memory(one.bad["output"], other.bad["output"])
