"""What was meant, found by going on: the statement that raised, and the rest of its block, run with one change after the other.

What raises nothing is the answer. A change is a fix of the failed call, or another value than the one that was written: a method that is
called, a tensor of a list of tensors, the iterator of a loader. What a value may become is a matter of its type: hardly ever is the text of
the error read.
"""

from __future__ import annotations

import ast
import gc
import itertools
import linecache
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import CodeType, FrameType, FunctionType, TracebackType

from torchdebug_magics.errors import TorchDebugError
from torchdebug_magics.fixes import applied
from torchdebug_magics.instruments.shapes.cell_error.call_changes import Change
from torchdebug_magics.instruments.shapes.cell_error.changes import Changes, is_difference
from torchdebug_magics.instruments.shapes.explain import innermost, refusal
from torchdebug_magics.instruments.shapes.repair.failure_facts import module_calls
from torchdebug_magics.instruments.shapes.repair.source import site_at, traces
from torchdebug_magics.instruments.shapes.report import Failure, Fix, ShapesReport
from torchdebug_magics.probing.outside.effects import Irrevocable
from torchdebug_magics.probing.safety import Guard
from torchdebug_magics.probing.source.edited_source import HEADS, Source, same
from torchdebug_magics.probing.source.edits import with_edits
from torchdebug_magics.probing.source.syntax import parsed, statement_at, tree_of
from torchdebug_magics.probing.source.user_code import is_user_code, location
from torchdebug_magics.probing.state.what_follows import FailedBlock, Outcome
from torchdebug_magics.report import Edit

_MOST_TRIALS = 60
_LEFT_TO_OTHERS = (
    *("require grad", "requires grad", "gradient", "backward", "in-place", "inplace"),
    *("out of memory", "DataLoader worker", "device-side assert"),
)
"""What errors say that are the subject of another instrument, or of another part of this one."""
_MOST_FLOPS = 1e11
"""Of a forward that is run again with data, several times."""
_MOST_FIXES = 4
RERUN = "the line that raised, and what follows it in its block, were run again with the fix; all that they changed is as it was"


def meant_value(error: BaseException) -> Failure | None:
    """The change with which the statement that raised, and what follows it, run; None where there is none."""
    is_of_others = isinstance(error, RuntimeError) and any(words in str(error) for words in _LEFT_TO_OTHERS)
    if isinstance(error, (TorchDebugError, MemoryError)) or is_of_others:
        return None
    trace = innermost(error, ("user",))
    if trace is None:
        return None
    failing = site_at(trace.tb_frame.f_code, trace.tb_lineno, trace.tb_lasti).expression
    trace = _around_comprehensions(error, trace)
    frame = trace.tb_frame
    block = FailedBlock(frame, trace.tb_lineno, Guard())
    if not isinstance(failing, ast.expr) or isinstance(getattr(failing, "ctx", None), ast.Store):
        wholes = (getattr(block.statement, name, None) for name in ("iter", "test", "value"))
        failing = next((whole for whole in wholes if isinstance(whole, ast.expr)), None)
    if block.statement is None or failing is None:
        return None
    passing = _passing(error, block, failing)
    if len(passing) > 1:
        first, choices = passing[0][0], " or ".join(f"`{ast.unparse(change.new)}`" for change, _ in passing)
        is_part = isinstance(first.new, ast.Subscript)  # of several names that are near, none is meant
        return refusal(error, f"{first.sentence}: {choices} would do") if is_part else None
    return _failure(error, frame, block.statement, *passing[0]) if passing else None


def _around_comprehensions(error: BaseException, inner: TracebackType) -> TracebackType:
    """Where the statement runs, of which a comprehension is a part: before Python 3.12, that has a frame of its own."""
    steps = list(traces(error))
    for step in reversed(steps[: steps.index(inner) + 1]):
        if not step.tb_frame.f_code.co_name.endswith("comp>"):
            return step
    return inner


def drops_result(error: BaseException) -> bool:
    """Whether the statement that raised would only have computed what nothing reads: that it runs does not tell that it is right."""
    trace = innermost(error, ("user",))
    tree = None if trace is None else tree_of(trace.tb_frame.f_code.co_filename)
    statement = None if trace is None else statement_at(tree, trace.tb_lineno)
    is_shown = tree is not None and statement in tree.body[-1:]  # as the last line of a cell
    return isinstance(statement, ast.Expr) and is_difference(statement.value) and not is_shown


def _passing(error: BaseException, block: FailedBlock, failing: ast.expr) -> list[tuple[Change, Outcome]]:
    """The first change with which the whole block goes on, with others of its choice; else the first with which the statement passes."""
    changes = Changes(error, block, failing)
    if not block.is_repeatable:
        certain = changes.without_run() if isinstance(error, AttributeError) else ()
        return [(change, Outcome(None, has_passed=True, is_complete=False)) for change in itertools.islice(certain, 1)]
    try:
        with block.opened():
            return _tried(error, block, changes)
    except Irrevocable:
        return []


def _tried(error: BaseException, block: FailedBlock, changes: Changes) -> list[tuple[Change, Outcome]]:
    passing: list[tuple[Change, Outcome]] = []
    partly: tuple[Change, Outcome] | None = None
    for change in itertools.islice(changes, _MOST_TRIALS):
        if passing and change.choice != passing[0][0].choice:
            break
        outcome = block.run(*ast.parse(change.above).body, change.statement) if change.may_run else Outcome(error, has_passed=True)
        if outcome.has_passed and (outcome.error is None or not change.may_run):
            passing.append((change, outcome))
            if not change.choice:
                break
        elif outcome.has_passed and not change.choice and partly is None:
            partly = change, outcome
    return passing or ([partly] if partly is not None else [])


def _failure(error: BaseException, frame: FrameType, statement: ast.stmt, change: Change, outcome: Outcome) -> Failure:
    file = change.file or frame.f_code.co_filename
    tree = tree_of(file)
    assert tree is not None
    where = location(file, change.old.lineno if change.remade is None else change.remade[0].lineno, frame.f_code.co_name)
    edits = tuple(_edits(Source(where, tree), statement, change))
    was_tried = change.may_run and outcome.error is None and outcome.is_complete
    code = edits[0].new if edits else ast.unparse(change.new)
    fix = Fix(code=code, verified=bool(edits) and was_tried and change.is_certain, changes=edits, to_the_end=was_tried)
    return replace(refusal(error, change.sentence, fixes=[fix]), location=where)


def _edits(source: Source, statement: ast.stmt, change: Change) -> Iterator[Edit]:
    if change.remade is not None:
        yield source.replacing(*change.remade)
        return
    if change.above:
        yield source.before(statement, change.above)
    if not same(statement, change.statement):
        text = ast.unparse(change.statement)
        is_branch = source.text(statement).startswith("elif")
        yield source.replacing(statement, f"{'el' * is_branch}{text}".partition("\n")[0] if isinstance(statement, HEADS) else text)


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
    fixes = (replace(failure.fixes[0], verified=False), *failure.fixes[1:])
    return replace(report, failure=replace(failure, fixes=fixes, fix_state="compiles"), notes=(*report.notes, RERUN))


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
