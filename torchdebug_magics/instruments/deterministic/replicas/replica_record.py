"""The plain data that a rank has recorded about its replicas."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchdebug_magics.ranks.compared import Details, Moment, Samples
    from torchdebug_magics.ranks.report import RankFindingKind

__all__ = ["ReplicaRecord"]


@dataclass(frozen=True)
class ReplicaRecord:
    """Digests of the weights, buffers and batches of this process at a few steps."""

    moments: tuple[Moment, ...] = ()
    samples: tuple[Samples, ...] = ()
    details: Mapping[tuple[RankFindingKind, int | None], Details] = field(default_factory=dict, repr=False, compare=False)
    """Digests by tensor name; they stay in the process, because there may be a million."""

    def __getstate__(self) -> dict[str, object]:
        return {"moments": self.moments, "samples": self.samples, "details": {}}
