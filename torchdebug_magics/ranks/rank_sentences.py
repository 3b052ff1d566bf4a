"""The sentence and the fix of each way in which ranks can differ."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from torchdebug_magics.format import plural

if TYPE_CHECKING:
    from torchdebug_magics.ranks.report import RankFindingKind

__all__ = ["FIXES", "SENTENCES", "Said", "others_named", "ranks_named"]

_MOST_NAMED = 8


class Said(NamedTuple):
    """What differs, and what to change."""

    sentence: str
    fix: str


def ranks_named(ranks: Sequence[int]) -> str:
    """``rank 3``, or ``ranks 0, 2 and 5``."""
    shown = [str(one) for one in ranks[:_MOST_NAMED]] + ([f"{len(ranks) - _MOST_NAMED} more"] if len(ranks) > _MOST_NAMED else [])
    return f"rank {shown[0]}" if len(shown) == 1 else f"ranks {', '.join(shown[:-1])} and {shown[-1]}"


def others_named(ranks: Sequence[int]) -> str:
    """``rank 0``, or ``the others``."""
    return ranks_named(ranks) if len(ranks) == 1 else "the others"


def _those_of(others: str) -> str:
    return f"{others}'s" if others.startswith("rank ") else f"{others}'"


def _after(step: int | None) -> str:
    return "" if step is None else f" after {plural(step, 'step')}" if step else " before the first step"


def _first(tensor: str) -> str:
    return f", first {tensor}" if tensor else ""


FIXES: Mapping[str, str] = {
    "bypassed": "call the model through its wrapper, as `ddp_model(x)`: after a call of `ddp_model.module` no gradient is averaged, "
    "because `DistributedDataParallel.forward` prepares that",
    "unsynced": "run the last backward pass of every step outside `no_sync()`: only that one averages the accumulated gradients",
    "late": "wrap the model in DistributedDataParallel after its last parameter is replaced, added or unfrozen: it averages only the "
    "gradients of parameters that required one when it was made",
    "averaged": "use the same optimizer options and the same GradScaler scale on every rank, and do not change gradients or weights on one "
    "rank alone: DistributedDataParallel has averaged the gradients",
    "own_buffers": "remove `broadcast_buffers=False` from `DistributedDataParallel(...)`: each forward then begins with rank 0's buffers; "
    "or convert the model with `nn.SyncBatchNorm.convert_sync_batchnorm(model)` (on GPUs)",
}
"""Of causes that a rank knows itself."""

SENTENCES: Mapping[RankFindingKind, Callable[[str, str, int | None, str], Said]] = {
    "initial_weights": lambda ranks, others, _, tensor: Said(
        f"the initial weights of {ranks} differ from {_those_of(others)}{_first(tensor)}",
        "call `torch.manual_seed(seed)` with the same seed on every rank before the model is made, and with `seed + rank` after it",
    ),
    "same_batch": lambda ranks, _, step, __: Said(
        f"{ranks} drew the same batch at every step" if not step else f"{ranks} drew the same batch from step {step} on",
        "use `DataLoader(..., sampler=DistributedSampler(dataset))`, or draw with a generator seeded with `seed + rank`",
    ),
    "replicas_part": lambda ranks, others, step, tensor: Said(
        f"the weights of {ranks} part from {_those_of(others)}{_after(step)}{_first(tensor)}",
        f"average the gradient of {f'`{tensor}`' if tensor else 'every parameter'} over the ranks before `optimizer.step()`: "
        "wrap its model in DistributedDataParallel, or call `all_reduce` on the gradient"
        if step != 0
        else "load or change weights on every rank, or before `DistributedDataParallel(model)`, which copies rank 0's to every rank",
    ),
    "buffers_drift": lambda ranks, others, step, tensor: Said(
        f"the buffers of {ranks} drift from {_those_of(others)}{_after(step)}{_first(tensor)}",
        "call `dist.broadcast(buffer, 0)` for every buffer in `model.buffers()` before buffers are used or saved, or convert the model "
        "with `nn.SyncBatchNorm.convert_sync_batchnorm(model)` (on GPUs)",
    ),
    "shapes_differ": lambda ranks, others, _, tensor: Said(
        f"the shapes of {ranks} differ from {_those_of(others)}" + (f", first at {tensor}" if tensor else ""),
        "give every rank batches of the same size: `drop_last=True`, or pad to the longest over all ranks",
    ),
}
