"""A value that was meant to be another: a method that is not called, a list of tensors for a tensor, a loader for its iterator.

The statement that raised, and the rest of its block, run with one change after the other; what raises nothing is the answer. What a value
may become is a matter of its type: hardly ever is the text of the error read.
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator
from dataclasses import replace
from types import FrameType

from torchdebug_magics.errors import TorchDebugError
from torchdebug_magics.instruments.shapes.cell_error.changes import Change, Changes, is_difference
from torchdebug_magics.instruments.shapes.explain import innermost, refusal
from torchdebug_magics.instruments.shapes.repair.source import site_at
from torchdebug_magics.instruments.shapes.report import Failure, Fix
from torchdebug_magics.probing.outside.effects import Irrevocable
from torchdebug_magics.probing.safety import Guard
from torchdebug_magics.probing.source.edited_source import HEADS, Source, same
from torchdebug_magics.probing.source.syntax import statement_at, tree_of
from torchdebug_magics.probing.source.user_code import location
from torchdebug_magics.probing.state.what_follows import FailedBlock, Outcome
from torchdebug_magics.report import Edit

_MOST_TRIALS = 60
_LEFT_TO_OTHERS = (
    "require grad",
    "requires grad",
    "gradient",
    "backward",
    "in-place",
    "inplace",
    "out of memory",
    "DataLoader worker",
    "device-side assert",
)
"""What errors say that are the subject of another instrument, or of another part of this one."""


def meant_value(error: BaseException) -> Failure | None:
    """The change with which the statement that raised, and what follows it, run; None where there is none."""
    is_of_others = isinstance(error, RuntimeError) and any(words in str(error) for words in _LEFT_TO_OTHERS)
    if isinstance(error, (TorchDebugError, MemoryError)) or is_of_others:
        return None
    trace = innermost(error, ("user",))
    if trace is None:
        return None
    frame = trace.tb_frame
    block = FailedBlock(frame, trace.tb_lineno, Guard())
    failing = site_at(frame.f_code, trace.tb_lineno, trace.tb_lasti).expression
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
