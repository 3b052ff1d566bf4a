"""Whether the processes that the main thread waits for go on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchdebug_magics.probing.source.code_owner import owner

if TYPE_CHECKING:
    from torchdebug_magics.instruments.hangwatch.everybody.participants import Look

__all__ = ["OthersProgress"]


class OthersProgress:
    """Remembers the lines at which each process was, its latest values, and when one of them was new."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[set[tuple[str, int, str]], object, float]] = {}

    def last_s(self, look: Look) -> float:
        """When the last of the processes whose end the main thread waits for was at a new line, or had other values."""
        for one in look.everybody.values():
            if one.child is not None and one.process and one.process.get("worker") is None:
                lines = {frame for frame in one.frames if owner(frame[0]) == "user"}
                seen, before, last_s = self._seen.get(one.who, (set(), None, look.at_s))
                is_new = not lines <= seen or one.at[2:] != before
                self._seen[one.who] = (seen | lines, one.at[2:], look.at_s if is_new else last_s)
        if look.main.kind not in {"join", "queue", "io"}:
            return 0.0
        waited = [look.everybody[who] for who in look.main.targets if who in look.everybody]
        times = [self._seen[one.who][2] for one in waited if one.who in self._seen and not one.facts.get("idle") and one.kind != "dead"]
        return min(times, default=0.0)
