"""The instrument's session around a script, from the import of torch to the report; in a job of several, one report for all."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from types import FrameType
from typing import TYPE_CHECKING, Any

from torchdebug_magics.errors import TorchDebugError
from torchdebug_magics.machine.sampler import Sampler
from torchdebug_magics.probing import this_rank
from torchdebug_magics.probing.children.rank_traces import record_of, standing_here
from torchdebug_magics.probing.where import locate, user_frame
from torchdebug_magics.ranks.merging import merged
from torchdebug_magics.run.last_ranks import collected, sign_every_s
from torchdebug_magics.run.meeting import Meeting, meeting_place

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from torchdebug_magics.instrument import Instrument
    from torchdebug_magics.ranks.compared import RankRecord
    from torchdebug_magics.run.outputs import Outputs
    from torchdebug_magics.session import Session

__all__ = ["Terminated", "Watch"]

_ENDING_S = 15.0
"""Time for the report of a process that received SIGTERM."""


class Terminated(KeyboardInterrupt):
    """Stands for SIGTERM when the session closes; never raised."""


class Watch:
    """Watches the process it is created in; a fork of that process ends as it would without."""

    def __init__(self, row: Instrument, options: Mapping[str, Any], outputs: Outputs) -> None:
        self._row = row
        self._options = options
        self._outputs = outputs
        self._rank, self._ranks_count = this_rank.launched_as()
        self._began_s = time.monotonic()
        self._owner = os.getpid()
        self._session: Session[Any] | None = None
        self._stack = ExitStack()
        self._meeting: Meeting | None = None
        self._is_finishing = False

    @property
    def is_here(self) -> bool:
        """Whether this is not a fork."""
        return os.getpid() == self._owner

    def __enter__(self) -> Self:
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._told_to_end)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._session is not None:
            self._session.__exit__(*((None, None, None) if _exit_code(error) == 0 else (kind, error, trace)))

    def open(self) -> None:
        """Called when torch is there. An option with a wrong value ends the script; what else fails leaves it alone."""
        try:
            self._session = self._row.session(**self._options).__enter__()
            if self._ranks_count > 1:
                self._meeting = Meeting(meeting_place(self._rank), self._rank, self._ranks_count)
                self._stack.enter_context(Sampler(self._stand, name="rank", every_s=sign_every_s(self._ranks_count), first_s=0.05))
        except TorchDebugError as wrong:
            message = f"{self._row.name}: {wrong}"
            raise SystemExit(message) from None
        except Exception as failure:  # noqa: BLE001 - as it says above
            self._outputs.say(f"not everything is watched: {type(failure).__name__}: {failure}")

    def traceback_of(self, error: BaseException) -> list[str]:
        """The session's own lines in place of a traceback, where it has interrupted the script."""
        return [] if self._session is None else self._session.traceback_of(error)

    def finish(self, error: BaseException | None, /, **ended: Any) -> None:
        """Make the report, and show it; what fails here is a line, never the script's error. `ended` is what is known of its end."""
        self._is_finishing = True
        exit_code = _exit_code(error)
        error = None if exit_code == 0 else error
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
        try:
            if self._session is not None:
                record = record_of(self._row.name, self._rank, self._session.report, error, time.monotonic() - self._began_s)
                self._deliver(replace(record, rank=replace(record.rank, **{"exit_code": exit_code, **ended})), is_hurried=error is not None)
            elif self._rank == 0 and error is None:
                self._outputs.say("the script did not import torch: nothing was watched")
        except Exception as failure:  # noqa: BLE001 - as it says above
            self._outputs.say(f"no report could be made: {type(failure).__name__}: {failure}")
        finally:
            self._stack.close()
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _deliver(self, record: RankRecord, *, is_hurried: bool) -> None:
        assert record.rank.report is not None
        self._outputs.own(record.rank.report, self._rank)
        if self._meeting is not None and self._rank:
            self._meeting.leave(record)
        elif self._meeting is not None:
            records = collected(self._meeting, record, is_hurried=is_hurried)
            self._outputs.of_all(merged(self._row.name, records, self._meeting.details_beside(record)))
            self._meeting.clear()
        elif self._rank == 0:
            self._outputs.of_all(record.rank.report)

    def _stand(self) -> None:
        if self._meeting is not None:
            self._meeting.stand(standing_here(self._rank, time.monotonic() - self._began_s, is_in_job=True))

    def _told_to_end(self, number: int, frame: FrameType | None) -> None:
        """SIGTERM, by a launcher or a scheduler: the report is made, and the process ends by that signal, as it would have done."""
        if self.is_here and self._is_finishing:
            return  # in a moment it has ended
        signal.signal(number, signal.SIG_DFL)
        if self.is_here:
            end = threading.Timer(_ENDING_S, os.kill, (self._owner, number))
            end.daemon = True
            end.start()
            line = user_frame(frame)
            error = Terminated()
            with contextlib.suppress(Exception):
                self.__exit__(Terminated, error, None)
                self.finish(error, state="died", exit_code=-number, error="", location=None if line is None else locate(line))
        os.kill(os.getpid(), number)


def _exit_code(error: BaseException | None) -> int | None:
    """Python's for what ends the script."""
    if error is None:
        return 0
    if not isinstance(error, SystemExit):
        return 1
    return error.code if isinstance(error.code, int) else 0 if error.code is None else 1
