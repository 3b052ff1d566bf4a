"""After a cell that was stopped: a loop around its line that would not have ended, read from the source and the frames."""

from __future__ import annotations

import ast
import traceback
from collections.abc import Sequence
from itertools import pairwise
from types import FrameType

from torchdebug_magics.errors import refuse
from torchdebug_magics.format import listed
from torchdebug_magics.instrument import CellContext
from torchdebug_magics.instruments.hangwatch.main_thread.idle_rounds import idle_loop
from torchdebug_magics.instruments.hangwatch.main_thread.read_again import endless_items, endless_sample
from torchdebug_magics.instruments.hangwatch.main_thread.retries import COMPARED, retry_loop
from torchdebug_magics.instruments.hangwatch.report import HangFinding, HangReport
from torchdebug_magics.probing.source.call_sites import MISSING, value_of
from torchdebug_magics.probing.source.syntax import Loop, bound_inside, loops_around, names_in, nodes, tree_of
from torchdebug_magics.probing.source.user_code import is_user_code, location

_NUMBERS = (bool, int, float)


def examine(context: CellContext, *values: object, **_of_a_session: object) -> HangReport | None:
    """A report on the previous cell, where it was stopped in a loop without an end."""
    refuse(values, "hangwatch examines no values: write `%%hangwatch` above a cell")
    if not isinstance(context.last_error, KeyboardInterrupt):
        return None
    for frame, line in reversed(list(traceback.walk_tb(context.last_error.__traceback__))):
        loops = loops_around(tree_of(frame.f_code.co_filename), line) if is_user_code(frame.f_code) else []
        endless = _unchanged(loops, frame) or retry_loop(loops, frame) or _never_asked(loops, frame) or idle_loop(loops, frame)
        if endless := endless or endless_items(loops, frame):
            return _stopped_at(endless)
    endless = endless_sample(context.last_error)
    return None if endless is None else _stopped_at(endless)


def _stopped_at(endless: HangFinding) -> HangReport:
    return HangReport(
        **vars(endless), still_s=0.0, elapsed_s=0.0, after_s=0.0, rate=None, data_share=None, ended_by="Stop", stopped_count=0
    )


def _unchanged(loops: Sequence[Loop], frame: FrameType) -> HangFinding | None:
    """The innermost ``while`` whose condition is of numbers alone that nothing in it binds, and that only its condition ends."""
    for loop in reversed(loops):
        names = names_in(loop.test) if isinstance(loop, ast.While) else set()
        is_of_names = all(isinstance(node, (ast.Name, ast.Constant, ast.Compare, ast.cmpop, ast.expr_context)) for node in _walk(loop))
        values = {name: value_of(ast.Name(name, ast.Load()), frame) for name in sorted(names)}
        leaves = any(nodes((ast.Break, ast.Return), *loop.body)) or any(nodes((ast.Yield, ast.Raise), *loop.body))
        shared = {name for node in nodes(ast.Global, tree_of(frame.f_code.co_filename)) for name in node.names}
        is_fixed = bool(names) and not names & (bound_inside(loop) | shared) and all(type(value) in _NUMBERS for value in values.values())
        if isinstance(loop, ast.While) and is_of_names and is_fixed and not leaves:
            text, said = ast.unparse(loop.test), [f"`{name}` = {value}" for name, value in values.items()]
            first = next(node.id for node in ast.walk(loop.test) if isinstance(node, ast.Name))
            return _finding(
                loop,
                frame,
                f"`while {text}` never ends: nothing in the loop changes {listed([f'`{name}`' for name in values])}",
                f"change `{first}` inside the loop",
                f"when it was stopped: {', '.join(said)}",
            )
    return None


def _never_asked(loops: Sequence[Loop], frame: FrameType) -> HangFinding | None:
    """A ``while`` that would have ended, around a loop that goes on."""
    for outer, inner in pairwise(loops):
        match outer:
            case ast.While(test=ast.Compare(left, [how], [right])) if type(how) in COMPARED:
                sides = [value_of(side, frame) for side in (left, right)]
                if MISSING in sides or not all(type(side) in _NUMBERS for side in sides) or COMPARED[type(how)](*sides):
                    continue
                head = "" if isinstance(inner, ast.While) else f"{ast.unparse(inner.target)} in {ast.unparse(inner.iter)}"
                what = f"`for {head}`" if head else "the inner `while`"
                return _finding(
                    inner,
                    frame,
                    f"{what} does not end, and `while {ast.unparse(outer.test)}` around it, which is false by now, is never asked again",
                    "leave the inner loop, by `break` or by an iterator that ends",
                    f"when it was stopped: {ast.unparse(left)} = {sides[0]}, {ast.unparse(right)} = {sides[1]}",
                )
    return None


def _walk(loop: Loop) -> list[ast.AST]:
    return list(ast.walk(loop.test)) if isinstance(loop, ast.While) else []


def _finding(loop: Loop, frame: FrameType, headline: str, fix: str, reason: str) -> HangFinding:
    where = location(frame.f_code.co_filename, loop.lineno, frame.f_code.co_name)
    return HangFinding(state="stuck", cause="infinite_loop", headline=headline, location=where, fix=fix, reason=reason)
