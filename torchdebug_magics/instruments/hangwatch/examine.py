"""After a cell that was stopped: a loop around its line that would not have ended, read from the source and the frames."""

from __future__ import annotations

import traceback
from types import FrameType

from torchdebug_magics.errors import refuse
from torchdebug_magics.instrument import CellContext
from torchdebug_magics.instruments.hangwatch.main_thread.endless import endless_loop
from torchdebug_magics.instruments.hangwatch.main_thread.read_again import endless_items, endless_sample
from torchdebug_magics.instruments.hangwatch.main_thread.stopped_loops import idle_loop, unreached_end
from torchdebug_magics.instruments.hangwatch.report import HangFinding, HangReport
from torchdebug_magics.probing.source.syntax import loops_around, tree_of
from torchdebug_magics.probing.source.user_code import is_user_code


def examine(context: CellContext, *values: object, **_of_a_session: object) -> HangReport | None:
    """A report on the previous cell, where it was stopped in a loop without an end."""
    refuse(values, "hangwatch examines no values: write `%%hangwatch` above a cell")
    if not isinstance(context.last_error, KeyboardInterrupt):
        return None
    walked = reversed(list(traceback.walk_tb(context.last_error.__traceback__)))
    endless = next(filter(None, (_endless(frame, line) for frame, line in walked if is_user_code(frame.f_code))), None)
    endless = endless or endless_sample(context.last_error)
    return None if endless is None else HangReport(**vars(endless), ended_by="Stop")


def _endless(frame: FrameType, line: int) -> HangFinding | None:
    loops = loops_around(tree_of(frame.f_code.co_filename), line)
    certain = endless_loop(frame, line, alone=True, is_over=True)
    return certain or unreached_end(loops, frame) or idle_loop(loops, frame) or endless_items(loops, frame)
