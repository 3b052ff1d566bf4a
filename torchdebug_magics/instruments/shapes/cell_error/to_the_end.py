"""Fixes of a failed call, tried to the end of the step: the first that lets all that follows it run is the one that was meant."""

from __future__ import annotations

import gc
import linecache
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import CodeType, FrameType, FunctionType

from torchdebug_magics.fixes import applied
from torchdebug_magics.instruments.shapes.repair.failure_facts import module_calls
from torchdebug_magics.instruments.shapes.report import Failure, ShapesReport
from torchdebug_magics.probing.outside.effects import Irrevocable
from torchdebug_magics.probing.safety import Guard
from torchdebug_magics.probing.source.edits import with_edits
from torchdebug_magics.probing.source.syntax import parsed
from torchdebug_magics.probing.source.user_code import is_user_code
from torchdebug_magics.probing.state.what_follows import FailedBlock
from torchdebug_magics.report import Edit

_MOST_FLOPS = 1e11
"""Of a forward that is run again with data, several times."""
_MOST_FIXES = 4
RERUN = "the line that raised, and what follows it in its block, were run again with the fix; all that they changed is as it was"


def tried_to_the_end(report: ShapesReport, error: BaseException) -> ShapesReport:
    """With the fix first that lets the step go on; where none does, what was verified is so no more. Others are left as they are."""
    failure = report.failure
    if failure is None or not failure.fixes or not failure.fixes[0].verified or report.total_flops > _MOST_FLOPS:
        return report
    frames = list(traceback.walk_tb(error.__traceback__))
    caller = _caller(frames)
    block = None if caller is None else FailedBlock(*caller, Guard())
    if block is None or block.statement is None or not block.is_repeatable:
        return report
    candidates = [_led_by(failure, place) for place in range(min(_MOST_FIXES, len(failure.fixes)))]
    codes = {frame.f_code for frame, _ in frames if frame is not block.frame}
    first: bool | None = None
    try:
        with block.opened():
            for candidate in candidates:
                goes_on = _goes_on(block, codes, with_edits(replace(report, failure=candidate)).edits)
                first = goes_on if candidate is candidates[0] else first
                if goes_on or first is None:  # what nobody can try is left as it is
                    return replace(report, failure=candidate, notes=(*report.notes, RERUN)) if goes_on else report
    except Irrevocable:
        return report
    first_fix = replace(failure.fixes[0], verified=False)
    return replace(
        report, failure=replace(failure, fixes=(first_fix, *failure.fixes[1:]), fix_state="compiles"), notes=(*report.notes, RERUN)
    )


def _led_by(failure: Failure, place: int) -> Failure:
    fixes = (replace(failure.fixes[place], to_the_end=True), *failure.fixes[:place], *failure.fixes[place + 1 :])
    return replace(failure, fixes=fixes) if place == 0 else replace(failure, fixes=fixes, fix="", edits=(), fix_state="advice")


def _goes_on(block: FailedBlock, codes: set[CodeType], edits: Sequence[Edit]) -> bool | None:
    """Whether the block runs to its end with the edits; None where they are not in what runs."""
    file, own = block.frame.f_code.co_filename, None
    statement = block.statement
    assert statement is not None
    inner: list[Edit] = []
    for edit in edits:
        if edit.file == file and edit.old and edit.line == statement.lineno and len(edits) == 1:
            own = parsed(edit.new)
        else:
            inner.append(edit)
    if not edits or (own is not None and len(own.body) != 1) or (own is not None and hasattr(statement, "body")):
        return None
    changed = [(code, new) for code in codes if (new := _edited(code, inner)) is not None]
    if own is None and not changed:
        return None
    with _exchanged(changed):
        return block.run(statement if own is None else own.body[0]).error is None


def _edited(code: CodeType, edits: Sequence[Edit]) -> CodeType | None:
    """The code of a function with the edits in its lines; None where none is."""
    last = max((line for _, _, line in code.co_lines() if line), default=0)
    here = [edit for edit in edits if edit.file == code.co_filename and code.co_firstlineno <= edit.line <= last]
    if not here:
        return None
    text = "".join(linecache.getlines(code.co_filename))
    whole = compile(applied(text, here), code.co_filename, "exec")
    return next((new for new in _inside(whole) if new.co_qualname == code.co_qualname), None)


def _inside(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _inside(constant)


@contextmanager
def _exchanged(codes: list[tuple[CodeType, CodeType]]) -> Iterator[None]:
    """Inside, the functions of these codes run the others."""
    functions = [(each, old, new) for old, new in codes for each in gc.get_referrers(old) if isinstance(each, FunctionType)]
    try:
        for function, _, new in functions:
            function.__code__ = new
        yield
    finally:
        for function, old, _ in functions:
            function.__code__ = old


def _caller(frames: list[tuple[FrameType, int]]) -> tuple[FrameType, int] | None:
    """The innermost frame of the user's that no module has called."""
    innermost: tuple[FrameType, int] | None = None
    for frame, line in frames:
        if module_calls([frame]):
            break
        innermost = (frame, line) if is_user_code(frame.f_code) else innermost
    return innermost
