"""Somebody whom others wait for has ended: a rank or a worker that raised, was killed or left."""

from __future__ import annotations

import re
import signal
from typing import TYPE_CHECKING, Any

from torchdebug_magics.format import listed
from torchdebug_magics.instruments.hangwatch.causes.wording import named, short_error
from torchdebug_magics.probing.source.code_owner import owner
from torchdebug_magics.probing.where import location

if TYPE_CHECKING:
    from torchdebug_magics.instruments.hangwatch.everybody.participants import Participant
    from torchdebug_magics.instruments.hangwatch.hang_evidence import Evidence
    from torchdebug_magics.instruments.hangwatch.report import Finding
    from torchdebug_magics.report import Location

__all__ = ["error_fix", "exit_fix", "failed", "how_it_ended", "last_line"]

_UNUSED = re.compile(r"did not receive grad for rank \d+: ([\d ]+)")
_REDUCTION = "Expected to have finished reduction"


def failed(case: Evidence) -> Finding | None:
    """The first participant that ended by an error, a signal or an exit code while the main thread waits, directly or not."""
    waiting = [state for state in case.ranks if (state.pending is not None or state.one.kind == "collective") and state.one.error is None]
    everybody = case.look.everybody.values()
    dead = [one for one in everybody if one.kind == "dead" and (one.exit_code or one.error) and _matters(case, one)]
    dead += [state.one for state in case.ranks if state.one.error is not None and waiting]  # it waits in a `finally:`
    if not dead or any(case.moved.get(one.who) for one in case.chain.path):
        return None
    first = min(dead, key=lambda one: (one.error is None, (one.error or {}).get("at_s", 0.0)))
    if waiting:
        return _rank(case, first, f"{waiting[0].one.who} waits for it in {waiting[0].pending or waiting[0].one.what}")
    whose = next((one for one in reversed(case.chain.path) if one is not first), case.main)
    what = f"{named(first.who)} {how_it_ended(first)}, and {named(whose.who)} waits for {whose.what or 'it'}"
    fix = error_fix(first) if first.error else exit_fix(first.exit_code)
    return case.found("stuck", "worker_died", what, fix, at=first)


def error_fix(one: Participant) -> str:
    """What to change where a process ended with an exception."""
    if "Can't get attribute" in (one.error or {}).get("message", ""):
        return "move what the process needs into an importable module, or use the `fork` method: code in a cell cannot be imported"
    return "fix the error in the process"


def how_it_ended(one: Participant) -> str:
    """``"raised ValueError: bad label"``, ``"was killed (SIGKILL)"``, ``"ended with exit code 3"``."""
    if one.error is not None:
        return f"raised {short_error(one.error)}"
    code = one.exit_code
    if code is not None and code < 0:
        return f"was killed by {_signal(-code)}"
    return "has ended" if not code else f"ended with exit code {code}"


def _rank(case: Evidence, first: Participant, waits: str) -> Finding:
    message = (first.error or {}).get("message", "")
    if _REDUCTION in message:
        unused = _unused_names(first)
        names = listed([f"`{name}`" for name in unused]) or "some parameters"
        return case.found(
            "stuck", "unused_parameters", f"{first.who} computed no gradient for {names}, and {waits}",
            "pass `find_unused_parameters=True` to `DistributedDataParallel`, or use every parameter on every rank in each step", at=first,
        )  # fmt: skip
    if first.exit_code == -signal.SIGABRT:
        return case.found(
            "stuck", "collective_mismatch", f"{first.who} was aborted by gloo because its tensor has a different size, and {waits}",
            "use the same shape and dtype on every rank", at=first,
        )  # fmt: skip
    fix = "fix the error in this rank" if first.error else exit_fix(first.exit_code)
    return case.found("stuck", "rank_died", f"{first.who} {how_it_ended(first)}, and {waits}", fix, at=first)


def _unused_names(one: Participant) -> list[str]:
    error = one.error or {}
    match = _UNUSED.search(error.get("message", ""))
    names = error.get("parameters", [])
    places = [int(word) for word in match[1].split()] if match else []
    return [names[place] for place in places if place < len(names)]


def _matters(case: Evidence, one: Participant) -> bool:
    """Whether the wait could be for it: on the way, or a rank of the job, or it could have fed a queue that is waited for."""
    if one in case.chain.path or one.who.startswith("rank "):
        return True
    return case.root.kind in {"queue", "io", "event"} or any(waiting.facts.get("pool") for waiting in case.chain.path)


def exit_fix(code: int | None) -> str:
    """What to change where a process ended with this code."""
    if code == -getattr(signal, "SIGKILL", 9):
        return "use fewer workers or smaller batches: the system most likely killed it because memory ran out"
    if code == -getattr(signal, "SIGBUS", 7):
        return "raise the container's `--shm-size`, or use fewer workers: shared memory is full"
    if code is not None and code < 0:
        return "run its code in this process (`num_workers=0`) to see the crash"
    return "raise an exception instead of calling `os._exit`, so that the waiting process sees it"


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def last_line(error: dict[str, Any] | None) -> Location | None:
    """The user's line that raised, of a recorded error."""
    frames = [tuple(frame) for frame in error["frames"] if owner(frame[0]) == "user" and not frame[0].startswith("<")] if error else []
    return location(*frames[-1]) if frames else None
