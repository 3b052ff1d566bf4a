"""How participants are called in a sentence."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchdebug_magics.format import one_line

if TYPE_CHECKING:
    from torchdebug_magics.instruments.hangwatch.everybody.participants import Participant

__all__ = ["in_worker", "named", "short_error", "with_article"]

_LONGEST = 90


def named(who: str) -> str:
    """``"worker 0"`` as ``"DataLoader worker 0"``."""
    return "the main thread" if who == "main" else f"DataLoader {who}" if who.startswith("worker ") else who


def with_article(what: str) -> str:
    """``"lock"`` as ``"a lock"``; calls, names and phrases that have one stay."""
    if "(" in what or what.startswith(("a ", "an ", "the ", "your ", "more ", "room ", "only ")) or "#" in what:
        return what
    return f"{'an' if what[:1] in 'aeiou' else 'a'} {what}"


def in_worker(one: Participant) -> str:
    """A second sentence for a fix in code that runs in another process."""
    if one.process.get("worker") is not None:
        return "; to step through the worker, use `num_workers=0`"
    return ""


def short_error(error: dict[str, str]) -> str:
    """``"ValueError: bad label"``."""
    text = one_line(error["message"]).strip()
    text = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
    return f"{error['type']}: {text}" if text else error["type"]
