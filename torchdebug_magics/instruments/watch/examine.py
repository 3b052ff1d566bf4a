"""After a cell that failed or was stopped: the explanation of the instrument that has one, else what to run next."""

from __future__ import annotations

import ast
import re
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any

import torch

from torchdebug_magics import catalog
from torchdebug_magics.instrument import SCRIPT, CellContext, finished
from torchdebug_magics.instruments.watch.report import WatchReport
from torchdebug_magics.instruments.watch.tried_fixes import tried
from torchdebug_magics.probing.outside.effects import Irrevocable
from torchdebug_magics.probing.safety import Guard
from torchdebug_magics.probing.source.syntax import nodes, statement_at, tree_of
from torchdebug_magics.probing.source.user_code import is_module_code, is_user_code, location, owner
from torchdebug_magics.probing.state.training_again import TrainingAgain
from torchdebug_magics.probing.state.worker_error import raised_here
from torchdebug_magics.probing.tensors import describe
from torchdebug_magics.report import Report
from torchdebug_magics.session import Session

_RECORDING = ("autograd", "nanhunt")
"""What explains an error by what it has seen of the cell before."""
_STEPS = 10_000
"""Of a cell that is run again up to its error: more than its time allows."""
_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')


def examine(context: CellContext, **_of_a_session: object) -> Report | None:
    """The report on the error of the previous cell; None where it ended without one."""
    if context.last_error is None:
        return None
    frames = (frame.f_code for frame, _ in traceback.walk_tb(context.last_error.__traceback__))
    file = next((code.co_filename for code in frames if is_user_code(code) and is_module_code(code)), "")
    again = TrainingAgain(file, Guard(), context.unshown)
    after = explained(context)
    may_come_again = isinstance(context.last_error, Exception)  # a cell that was stopped would go on again
    if may_come_again and (after is None or after[0] == "autograd"):  # which is seen while the cell runs, more than afterwards
        context.progress("the cell is run again, and recorded")
        after = recorded_again(again, context.last_error_line) or after
    if after is not None:
        name, report = after
        return tried(name, report, again, context.progress, steps=0, raised=True)
    return WatchReport(**{"suggestion": "%%torchdebug", **what_ended(context.last_error)})


def recorded_again(again: TrainingAgain, error_line: str) -> tuple[str, Report] | None:
    """The instrument that explains the error while the cell is run again from fresh models, and its report; None where none does."""
    sessions = {name: Session[Any](catalog.instrument(name).probe({}, SCRIPT)) for name in _RECORDING}
    if not again.can_run:
        return None

    @contextmanager
    def watched() -> Iterator[None]:
        with ExitStack() as stack:
            for session in sessions.values():
                stack.enter_context(session)
            yield

    try:
        with again.opened():
            run = again.run((), _STEPS, watched())
    except Irrevocable:
        return None
    if run is None or run.error != error_line:
        return None
    reports = {name: finished(session.report) for name, session in sessions.items() if session.has_ended}
    return next(((name, report) for name, report in reports.items() if report.main_stage() in {"end", "outcome"}), None)


def explained(context: CellContext) -> tuple[str, Report] | None:
    """The instrument that explains an error by what it has left behind, and its report: the first that knows what to change."""
    first: tuple[str, Report] | None = None
    for name in catalog.INSTRUMENTS:
        row = catalog.instrument(name)
        if row.module != __package__ and row.watches and row.examines:
            context.progress(f"{row.name} looks at the error")
            report = row.examined((), {}, context).report
            if report is not None and report.main_finding() is not None:
                if report.fix:
                    return name, report
                first = first or (name, report)
    return first


def what_ended(error: BaseException) -> dict[str, Any]:
    """The fields of a report on a cell whose end nothing explains."""
    again = raised_here(error)
    if again is None and (raised := _raised_in_worker(error)) is not None:
        return raised
    error = again or error
    line = "The cell was stopped" if isinstance(error, KeyboardInterrupt) else CellContext(last_error=error).last_error_line
    own = [(frame, line) for frame, line in traceback.walk_tb(error.__traceback__) if is_user_code(frame.f_code)]
    if not own:
        return {"error": line}
    frame, number = own[-1]
    file = frame.f_code.co_filename
    return {"error": line, "stopped_at": location(file, number, frame.f_code.co_name), "values": _values(frame, tree_of(file), number)}


def _raised_in_worker(error: BaseException) -> dict[str, Any] | None:
    """The same for an error of a `DataLoader`'s worker process, of which this process has the text alone; None for any other."""
    head, is_wrapped, trace = str(error).partition("\nOriginal Traceback")
    worker = re.search(r"in (DataLoader worker)(?: process)? (\d+)", head)
    if not is_wrapped or worker is None:
        return None
    said = [line for line in trace.splitlines() if line.startswith(f"{type(error).__name__}:")]
    places = [(file, int(line), function) for file, line, function in _FRAME.findall(trace) if owner(file) == "user"]
    line = f"{said[-1] if said else type(error).__name__} (in {worker[1]} {worker[2]})"
    return {"error": line, "stopped_at": location(*places[-1]) if places else None, "suggestion": "num_workers=0"}


def _values(frame: FrameType, tree: ast.Module | None, line: int) -> dict[str, str]:
    """The tensors and numbers that are named at a line."""
    known = {**frame.f_globals, **frame.f_locals}
    named = {node.id: known.get(node.id) for node in nodes(ast.Name, statement_at(tree, line)) if node.lineno == line}
    shown = {name: value for name, value in named.items() if isinstance(value, (torch.Tensor, int, float))}
    return {name: describe(value) if isinstance(value, torch.Tensor) else str(value) for name, value in shown.items()}
