"""What a rank has noted of its replicas: plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchdebug_magics.ranks.compared import Details, Moment
    from torchdebug_magics.ranks.report import RankFindingKind

__all__ = ["ReplicaRecord"]


@dataclass(frozen=True)
class ReplicaRecord:
    """Digests of the weights, buffers and batches of this process at a few steps."""

    moments: tuple[Moment, ...] = ()
    details: Mapping[tuple[RankFindingKind, int | None], Details] = field(default_factory=dict, repr=False, compare=False)
    """By the name of each tensor; only in the process itself, as they may be a million."""

    def __getstate__(self) -> dict[str, object]:
        return {"moments": self.moments, "details": {}}
