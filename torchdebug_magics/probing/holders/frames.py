"""The locals of frames, and the calls that run now in any thread."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Collection, Iterator
from inspect import CO_OPTIMIZED
from types import FrameType, TracebackType
from typing import TYPE_CHECKING

from torchdebug_magics.probing.attributes import attributes_of
from torchdebug_magics.probing.holders.outside import is_machinery
from torchdebug_magics.probing.where import frames_above, local_values, owner

if TYPE_CHECKING:
    from torchdebug_magics.probing.holders.containers import Named

__all__ = ["in_frame", "in_traceback", "is_function", "names_in_frame", "names_in_traceback", "running_frames", "thread_names"]

_MOST_FRAMES = 500


def is_function(frame: FrameType) -> bool:
    """Whether it has locals of its own: at the top of a module or a cell, they are the namespace."""
    return bool(frame.f_code.co_flags & CO_OPTIMIZED)


def running_frames() -> Iterator[tuple[str, FrameType]]:
    """(thread, empty for this one; frame) of each call of the user's, and of those that these make.

    The outermost come first, as whoever made a value keeps it longer.
    """
    here = threading.get_ident()
    names = dict(thread_names())
    # Our own frames, this one too, are met only inside a call that ends at once: held by one of them, they would hold all for good.
    calls = {
        identity: _calls_up_to(innermost, {"user"} if identity == here else {"user", "torch"})
        for identity, innermost in sys._current_frames().items()
    }
    for identity, frames in calls.items():
        thread = "" if identity == here else names.get(identity, str(identity))
        yield from ((thread, frame) for frame in frames)


def _calls_up_to(innermost: FrameType, starts: Collection[str]) -> list[FrameType]:
    """From the outermost call to the last one of these owners, without those that are ours."""
    frames = [frame for frame, _ in zip(frames_above(innermost), range(_MOST_FRAMES), strict=False)]
    whose = [owner(frame.f_code.co_filename) for frame in frames]
    last = max((at for at, one in enumerate(whose) if one in starts), default=-1)
    calls = list(zip(frames, whose, strict=True))[: last + 1]
    return [frame for frame, one in reversed(calls) if one != "own" and not _is_cut(frame)]


def thread_names() -> Iterator[tuple[int | None, str]]:
    """(identity, name) of each thread; a subclass of the user's may have properties of these names."""
    for held in map(attributes_of, threading.enumerate()):
        yield (held or {}).get("_ident"), str((held or {}).get("_name"))


def _is_cut(frame: FrameType) -> bool:
    name = dict.get(frame.f_globals, "__name__")
    return isinstance(name, str) and is_machinery(name)


def in_frame(frame: FrameType) -> list[object]:
    """The locals of a call that has ended, and its callers: a frame that is held holds them."""
    if _is_cut(frame):
        return []
    spaces = (frame.f_globals, frame.f_builtins)
    return [one for one in gc.get_referents(frame) if not any(one is space for space in spaces)]


def names_in_frame(frame: FrameType) -> Named:
    """Each local, and the caller."""
    yield from ((f" {name!r}", value) for name, value in local_values(frame).items())
    yield f" called by {frame.f_back.f_code.co_name}" if frame.f_back else "", frame.f_back


def in_traceback(trace: TracebackType) -> list[object]:
    """All frames of the chain at once: there may be a thousand."""
    return [one.tb_frame for one in _chain(trace)]


def names_in_traceback(trace: TracebackType) -> Named:
    """Function and line, as they are read in a traceback."""
    return ((f" -> {one.tb_frame.f_code.co_name}:{one.tb_lineno}", one.tb_frame) for one in _chain(trace))


def _chain(trace: TracebackType | None) -> Iterator[TracebackType]:
    while trace is not None:
        yield trace
        trace = trace.tb_next
