"""What a rank knows of gradients that were finite before they were averaged over ranks, and are not after it."""

from __future__ import annotations

from dataclasses import dataclass

from torchdebug_magics.format import number

__all__ = ["Averaging"]


@dataclass(frozen=True, kw_only=True)
class Averaging:
    """What this rank gave to the averaging of gradients that brought NaN or an infinity."""

    dtype: str
    """Of the numbers that were summed, such as ``"float16"``."""
    local_peak: float
    """The largest magnitude of what this rank gave."""
    limit: float
    """The largest number of that type."""
    world_size: int
    tensor: str = ""
    """The first parameter whose gradient came back bad."""
    rank: int = 0
    """The rank whose gradients these are."""

    @property
    def may_overflow(self) -> bool:
        """Whether as much from each rank leaves the range of the type."""
        return self.local_peak * self.world_size > self.limit

    def explanation(self, kind: str) -> str:
        """What is known in this rank, in one sentence."""
        came = f"{kind} comes from averaging the gradients over ranks: those of this rank (rank {self.rank}) are finite before it"
        if not self.may_overflow:
            return came
        return (
            f"{came}, but as large as {number(self.local_peak)}: their sum over {self.world_size} ranks can exceed the range of "
            f"{self.dtype}, which ends at {number(self.limit)}"
        )

    def fix(self) -> str:
        """What to do about it, as far as one rank can tell."""
        if not self.may_overflow:
            return "check the reports of the other ranks: the rank whose own gradients are non-finite names the cause"
        return (
            "reduce the gradients in float32 (without a communication hook that compresses to float16; with autocast instead of"
            " `model.half()`), or"
            f" divide them by the number of ranks before the sum: `p.grad /= {self.world_size}` before `all_reduce`"
        )
