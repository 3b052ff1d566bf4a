"""``%shapes`` after a cell that failed: read from the error's own frames; nothing of the cell is run again.

The frames of a traceback still hold the model and what it was called with. The very same call on fakes then shows every row up to the
failure, and lets fixes be tried.
"""

from __future__ import annotations

import ast
import inspect
import traceback
from dataclasses import replace
from types import FrameType, TracebackType
from typing import Any

import torch

from torchdebug_magics.instruments.shapes.cell_error.beyond_the_end import read_beyond_the_end
from torchdebug_magics.instruments.shapes.cell_error.collated import unequal_samples
from torchdebug_magics.instruments.shapes.cell_error.devices import gpu_assertion, left_on_cpu
from torchdebug_magics.instruments.shapes.cell_error.meant_values import RERUN, drops_result, meant_value, tried_to_the_end
from torchdebug_magics.instruments.shapes.cell_error.missing_names import missing_name
from torchdebug_magics.instruments.shapes.cell_error.other_kinds import of_another_kind
from torchdebug_magics.instruments.shapes.cell_error.per_channel import numbers_per_channel
from torchdebug_magics.instruments.shapes.cell_error.program_slice import UNKNOWN, expression_of, lines_to, value_named
from torchdebug_magics.instruments.shapes.cell_error.rebound import rebound_name
from torchdebug_magics.instruments.shapes.cell_error.state_dicts import refused_checkpoint
from torchdebug_magics.instruments.shapes.cell_error.unfinished_class import unfinished_class
from torchdebug_magics.instruments.shapes.explain import place, underlined
from torchdebug_magics.instruments.shapes.follow.seen import Seen
from torchdebug_magics.instruments.shapes.forward_table import see, see_call, tabulated
from torchdebug_magics.instruments.shapes.outline import layout as layout_of
from torchdebug_magics.instruments.shapes.repair.failure_facts import FailedCall, is_loss, module_calls
from torchdebug_magics.instruments.shapes.repair.fix_search import ALWAYS_THROUGH
from torchdebug_magics.instruments.shapes.repair.source import site_at, traces
from torchdebug_magics.instruments.shapes.report import Layout, ShapesReport
from torchdebug_magics.probing.safety import Guard
from torchdebug_magics.probing.source.call_sites import function_node
from torchdebug_magics.probing.source.syntax import nodes
from torchdebug_magics.probing.source.user_code import is_user_code, raised_at
from torchdebug_magics.probing.state.worker_error import raised_here


def after_error(error: BaseException, *, layout: Layout | None = None, **options: Any) -> ShapesReport | None:
    """The report on a failed call; None where no op of torch's failed, neither in a module nor outside of any."""
    if not isinstance(error, Exception):
        return None
    layout = layout or layout_of(**options)
    error = raised_here(error) or error
    guard = Guard()  # what is run again may ask objects of the user's, which raise whatever they like
    report = None if drops_result(error) else _explained(error, layout)
    if report is not None and report.fix:
        report = guard.run("the trial to the end of the step", tried_to_the_end, report, error) or report
    else:
        meant = guard.run("the search for what was meant", meant_value, error)
        report = ShapesReport(failure=meant, layout=layout, notes=(RERUN,)) if meant is not None else report or _explained(error, layout)
    return report if report is None else replace(report, problems=(*report.problems, *guard.problems))


def _explained(error: Exception, layout: Layout) -> ShapesReport | None:
    """The report on what a call of torch's refused."""
    called = outermost_call(error)
    beyond = read_beyond_the_end(error, in_model=called is not None)
    known = gpu_assertion(error) or beyond or rebound_name(error) or missing_name(error) or unfinished_class(error)
    known = known or of_another_kind(error) or left_on_cpu(error)
    if known is None and called is not None and not is_loss(called.module) and (report := _of_model(called, error, layout)) is not None:
        return report
    if _is_of_compiler(error):
        return None
    if known is None and (called is None or is_loss(called.module)) and (led := _led_to(error, layout)) is not None:
        return led
    if (refused := known or refused_checkpoint(error) or unequal_samples(error) or numbers_per_channel(error)) is not None:
        return ShapesReport(failure=refused, layout=layout)
    return _alone(error, layout)


def _of_model(called: FailedCall, error: Exception, layout: Layout) -> ShapesReport | None:
    """The report on the call of a model, made again without data."""
    seen = see(called.module, called.args, dict(called.kwargs), site=called.site)
    if seen.error is None or seen.run.error is None:
        return None
    if not _is_of_compiler(error) and _deepest(seen.run.error) != _deepest(error):
        return None  # the call on fakes did not fail where the real one did
    seen.notes.append("read from the error of the previous cell; the cell was not run again")
    return _in_the_words_of(error, tabulated(seen, layout))


def _led_to(error: Exception, layout: Layout) -> ShapesReport | None:
    """The report on an op outside every model, to which lines of the user's led from one; None where they cannot be run again."""
    call = lines_to(error)
    if call is None:
        return None
    lines, given = call
    seen = see_call(lines, given)
    failed = seen.run.failed
    if failed is not None and (failed.op in ALWAYS_THROUGH or not failed.operands[1:]):
        return None  # nothing comes after it, or stands beside it, that would tell what was meant
    again, first = raised_at(seen.run.error), raised_at(error)
    if again is None or first is None or (again.file, again.line) != (first.file, first.line):
        return None
    return _of_lines(seen, error, layout)


def _alone(error: Exception, layout: Layout) -> ShapesReport | None:
    """The report on an expression outside every model, run again by itself; None where that cannot be, or where it is not what failed."""
    expression = expression_of(error)
    if expression is None:
        return None
    seen = see_call(*expression, are_named=False)
    failed = seen.run.failed
    if failed is None or failed.error is not seen.run.error:
        return None
    report = _of_lines(seen, error, layout)
    if report.failure is None:
        return report
    op = failed.op[2:-2] if failed.op.startswith("__") else failed.op
    fixes = report.failure.fixes
    if op in ALWAYS_THROUGH:
        fixes = tuple(replace(fix, verified=False) for fix in fixes[:2])
    return replace(report, failure=replace(report.failure, op=op, fixes=fixes))


def _of_lines(seen: Seen, error: Exception, layout: Layout) -> ShapesReport:
    """The models that were called in the lines, and why these failed."""
    seen.notes.append("read from the error of the previous cell; only the lines that led to it were run again, without data")
    report = _in_the_words_of(error, tabulated(seen, layout))
    models = [part for part in seen.model.children() if next(part.parameters(), None) is not None]
    failure = None if report.failure is None else replace(report.failure, module=None)
    return replace(report, failure=failure, rows=report.rows[1:], model=", ".join(type(model).__name__ for model in models))


def _is_of_compiler(error: BaseException) -> bool:
    """Whether it was raised while the compiler looked at the code: its frames are the compiler's own, not the model's."""
    return type(error).__module__.partition(".")[2].startswith("_dynamo")


def _deepest(error: BaseException) -> tuple[int | None, tuple[str, int] | None]:
    """(the innermost module that ran, the innermost line of the user's inside a module)."""
    module: int | None = None
    line: tuple[str, int] | None = None
    for frame, number in traceback.walk_tb(error.__traceback__):
        if calls := module_calls([frame]):
            module = id(calls[0].module)
        elif module is not None and is_user_code(frame.f_code):
            line = (frame.f_code.co_filename, number)
    return module, line


def _in_the_words_of(error: BaseException, report: ShapesReport) -> ShapesReport:
    if report.failure is None:
        return report
    failure = replace(report.failure, error=f"{type(error).__name__}: {error}")
    is_of_user = not _is_of_compiler(error)
    if is_of_user or failure.location is None:
        failure = replace(failure, location=place(error), underlined=underlined(error) if is_of_user else failure.underlined)
    return replace(report, failure=failure)


def outermost_call(error: BaseException) -> FailedCall | None:
    """The first one among the frames; None where no module was running."""
    outer: TracebackType | None = None
    user: TracebackType | None = None
    for step in traces(error):
        frame = step.tb_frame
        user = step if is_user_code(frame.f_code) else user
        if calls := module_calls([frame]):
            site = site_at(user.tb_frame.f_code, user.tb_lineno, user.tb_lasti, dict(user.tb_frame.f_locals)) if user is not None else None
            return replace(calls[0], site=site)
        if (call := _of_generator(frame, outer)) is not None:
            return call
        outer = step
    return None


def _of_generator(frame: FrameType, outer: TracebackType | None) -> FailedCall | None:
    """The call of a forward that is a generator, which has returned when that runs.

    It stands in the line that asks for the next value, as in a loop, or is known by the arguments in the frame, where none was given anew.
    """
    model = frame.f_locals.get("self")
    if not frame.f_code.co_flags & inspect.CO_GENERATOR or not isinstance(model, torch.nn.Module):
        return None
    if getattr(type(model).forward, "__code__", None) is not frame.f_code:
        return None
    names = {} if outer is None else {**outer.tb_frame.f_globals, **outer.tb_frame.f_locals}
    statement = None if outer is None else site_at(outer.tb_frame.f_code, outer.tb_lineno, outer.tb_lasti).statement
    for call in nodes(ast.Call, statement):
        args = tuple(value_named(argument, names) for argument in call.args)
        kwargs = {keyword.arg or "**": value_named(keyword.value, names) for keyword in call.keywords}
        if value_named(call.func, names) is model and "**" not in kwargs and all(each is not UNKNOWN for each in (*args, *kwargs.values())):
            return FailedCall(model, args, kwargs)
    taken = inspect.getargvalues(frame)
    given_anew = {node.id for node in nodes(ast.Name, function_node(frame.f_code)) if isinstance(node.ctx, ast.Store)}
    if taken.varargs or taken.keywords or given_anew.intersection(taken.args):
        return None
    return FailedCall(model, (), {name: taken.locals[name] for name in taken.args[1:] if name in taken.locals})
