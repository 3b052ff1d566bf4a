"""``hangwatch.look()``: where everything stands now."""

from __future__ import annotations

from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, Any

from torchdebug_magics.instruments.hangwatch.causes.wording import named
from torchdebug_magics.instruments.hangwatch.everybody.links import link
from torchdebug_magics.instruments.hangwatch.everybody.looking_around import look_around
from torchdebug_magics.probing.children.launching import Children
from torchdebug_magics.probing.wrappers import MARK

if TYPE_CHECKING:
    from torchdebug_magics.instruments.hangwatch.everybody.participants import Participant

__all__ = ["look"]


def look() -> None:
    """Print where each thread, worker, process and rank stands, and what it waits for; from any thread.

    Processes answer that were started while a `hangwatch` session is open; of others, the system's own words are printed.
    """
    watching: Any = getattr(BaseProcess.start, MARK, None)
    everybody = look_around(watching if isinstance(watching, Children) else None)
    link(everybody, {})
    for one in everybody.everybody.values():
        if one.location is not None or one.process.get("pid") != one.pid or one.kind == "dead":
            print(_line(one))  # noqa: T201 - as it was asked to


def _line(one: Participant) -> str:
    where = f" · {one.location}: {one.location.source}" if one.location is not None else ""
    waits = f" waits for {one.what}" if one.facts.get("is_waiting") else f" {one.what or 'computes'}"
    whom = f" -> {', '.join(named(who) for who in one.targets)}" if one.targets else ""
    return f"{named(one.who)} (pid {one.pid}){waits}{whom}{where}"
