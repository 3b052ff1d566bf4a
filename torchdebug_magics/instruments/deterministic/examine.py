"""``%deterministic status``: every random number generator and setting, as they stand."""

from __future__ import annotations

from torchdebug_magics.errors import TorchDebugError
from torchdebug_magics.instrument import CellContext
from torchdebug_magics.instruments.deterministic.report import LiveRitual, StatusReport
from torchdebug_magics.instruments.deterministic.ritual.status import status


def examine(context: CellContext, *words: object, **_of_a_session: object) -> StatusReport | None:
    """The state now, with what is known of a session that is on; without ``status`` there is nothing to report."""
    if not words:
        return None
    if words != ("status",):
        values = ", ".join(map(repr, words))
        msg = f"deterministic takes no value such as {values}: `%deterministic status` alone, or `with torchdebug_magics.deterministic():`"
        raise TorchDebugError(msg)
    return status(context.live if isinstance(context.live, LiveRitual) else None)
