"""``%shapes`` after a cell that failed: read from the error's own frames; nothing of the cell is run again.

The frames of a traceback still hold the model and what it was called with. The very same call on fakes then shows every row up to the
failure, and lets fixes be tried.
"""

from __future__ import annotations

import traceback
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from torchdebug_magics.instruments.shapes.called import outermost_call
from torchdebug_magics.instruments.shapes.collated import unequal_samples
from torchdebug_magics.instruments.shapes.columns import layout as layout_of
from torchdebug_magics.instruments.shapes.examine import see, see_call
from torchdebug_magics.instruments.shapes.explain import of_op, place
from torchdebug_magics.instruments.shapes.frames import failed_in
from torchdebug_magics.instruments.shapes.program_slice import lines_to
from torchdebug_magics.instruments.shapes.refused import refused_module
from torchdebug_magics.instruments.shapes.repair.facts import is_loss
from torchdebug_magics.instruments.shapes.repair.search import ALWAYS_THROUGH
from torchdebug_magics.instruments.shapes.replay import Replay
from torchdebug_magics.instruments.shapes.report import Layout, ShapesReport
from torchdebug_magics.instruments.shapes.state_dicts import refused_checkpoint
from torchdebug_magics.instruments.shapes.tabulate import tabulated
from torchdebug_magics.probing.where import is_user_code

if TYPE_CHECKING:
    from torchdebug_magics.instruments.shapes.examine import Seen
    from torchdebug_magics.instruments.shapes.report import Failure

__all__ = ["after_error"]


def after_error(error: BaseException, *, layout: Layout | None = None, **options: Any) -> ShapesReport | None:
    """The report on a failed call; None where no op of torch's failed, neither in a module nor outside of any."""
    if not isinstance(error, Exception):
        return None
    layout = layout or layout_of(**options)
    replay = Replay()
    called = outermost_call(error, replay)
    if called is not None and not is_loss(called.model):
        seen = see(called.model, called.args, called.kwargs, site=called.site)
        if seen.error is not None and (_is_of_compiler(error) or _is_same(seen, error)):
            seen.notes.append("read from the error of the cell before; the cell was not run again")
            return _in_the_words_of(error, tabulated(seen, layout))
    if _is_of_compiler(error):
        return None
    if (called is None or is_loss(called.model)) and (led := _led_to(error, layout)) is not None:
        return led
    if (refused := refused_module(error) or refused_checkpoint(error) or unequal_samples(error)) is not None:
        return _without_rows(refused, layout)
    failed = failed_in(error, replay)
    return None if failed is None else _without_rows(of_op(failed, error, replay.known), layout)


def _led_to(error: Exception, layout: Layout) -> ShapesReport | None:
    """The report on an op outside every model, to which lines of the user's led from one; None where they cannot be run again."""
    found = lines_to(error)
    if found is None:
        return None
    lines, given = found
    seen = see_call(lines, given)
    failed = seen.run.failed
    if failed is not None and (failed.op in ALWAYS_THROUGH or not failed.operands[1:]):
        return None  # nothing comes after it, or stands beside it, that would tell what was meant
    if seen.run.error is None or _user_line(seen.run.error) != _user_line(error):
        return None
    seen.notes.append("read from the error of the cell before; only the lines that led to it were run again, without data")
    report = _in_the_words_of(error, tabulated(seen, layout))
    models = [part for part in lines.children() if next(part.parameters(), None) is not None]
    failure = replace(report.failure, module=None) if report.failure is not None else None
    return replace(report, rows=report.rows[1:], model=", ".join(type(one).__name__ for one in models), failure=failure)


def _user_line(error: BaseException) -> tuple[str, int] | None:
    """The innermost line of the user's."""
    lines = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__) if is_user_code(frame.f_code)]
    return lines[-1] if lines else None


def _is_same(seen: Seen, error: BaseException) -> bool:
    """Whether the call on fakes broke where the real one did."""
    return seen.run.error is not None and _deepest(seen.run.error) == _deepest(error)


def _is_of_compiler(error: BaseException) -> bool:
    """Whether it was raised while the compiler looked at the code: its frames are the compiler's own, not the model's."""
    return type(error).__module__.partition(".")[2].startswith("_dynamo")


def _deepest(error: BaseException) -> tuple[int | None, tuple[str, int] | None]:
    """(the innermost module that ran, the innermost line of the user's inside a module)."""
    module: int | None = None
    line: tuple[str, int] | None = None
    for frame, number in traceback.walk_tb(error.__traceback__):
        if frame.f_code.co_name == "_call_impl" and isinstance(own := frame.f_locals.get("self"), torch.nn.Module):
            module = id(own)
        elif module is not None and is_user_code(frame.f_code):
            line = (frame.f_code.co_filename, number)
    return module, line


def _without_rows(failure: Failure, layout: Layout) -> ShapesReport:
    """The report on an op outside every module: there is no table, and there is why."""
    return ShapesReport(
        model="",
        rows=(),
        total_params=0,
        trainable_params=0,
        buffer_count=0,
        total_flops=0,
        param_bytes=0,
        activation_bytes=0,
        mode="fake",
        failure=failure,
        layout=layout,
    )


def _in_the_words_of(error: BaseException, report: ShapesReport) -> ShapesReport:
    if report.failure is None:
        return report
    where = place(error) if not _is_of_compiler(error) else report.failure.location or place(error)
    return replace(report, failure=replace(report.failure, error=f"{type(error).__name__}: {error}", location=where))
