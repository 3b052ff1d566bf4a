"""A loop of which more rounds change nothing: they are run from where it was stopped, and undone.

Only rounds that nothing from outside can end: they call nothing but functions of torch's, NumPy's and Python's own that do not wait.
"""

from __future__ import annotations

import ast
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

import torch

from torchdebug_magics.instruments.hangwatch.report import HangFinding
from torchdebug_magics.probing.outside.effects import Irrevocable
from torchdebug_magics.probing.safety import Guard
from torchdebug_magics.probing.source.call_sites import value_of
from torchdebug_magics.probing.source.edited_source import Source
from torchdebug_magics.probing.source.syntax import Loop, bound_inside, bound_names, copied, dotted, expression, nodes, read_names, tree_of
from torchdebug_magics.probing.source.user_code import frames_above, is_user_code, location
from torchdebug_magics.probing.state.what_follows import FailedBlock

_ROUNDS = 20
_QUIET = frozenset({"torch", "numpy", "builtins", "math", "operator", "random"})
"""Whose functions may be called."""


def idle_loop(loops: Sequence[Loop], frame: FrameType) -> HangFinding | None:
    """The innermost ``while`` whose condition is as it was after twenty more rounds; None where a round may end it, or cannot be undone."""
    loop = loops[-1] if loops else None
    tree = tree_of(frame.f_code.co_filename)
    if not isinstance(loop, ast.While) or isinstance(loop.test, ast.Constant) or tree is None:
        return None
    block = FailedBlock(frame, loop.lineno, Guard())
    is_waiting = all(isinstance(node, (ast.Pass, ast.Expr)) and not any(nodes(ast.Call, node)) for node in loop.body)
    if block.statement is not loop or is_waiting or not block.is_repeatable or _others_run():
        return None
    operands = _operands(loop.test)
    known = {**frame.f_globals, **block.names}
    if not all(_is_plain(call.func, frame, known) for call in nodes(ast.Call, loop)):
        return None
    state = [*operands, *(ast.Name(name, ast.Load()) for name in sorted((read_names(*loop.body) | bound_names(*loop.body)) & known.keys()))]
    try:
        with block.opened():
            if not block.is_idle(_ROUNDS, _tuple(state)):
                return None
            before = block.value(_tuple(operands))
            guarded = next(
                (each for each in _guarded(loop, block.names) if (outcome := block.run(each)).has_passed and outcome.error is None), None
            )
    except (Irrevocable, Exception):  # noqa: BLE001 - a round that cannot be undone, or that raises
        return None
    text, values = ast.unparse(loop.test), zip(map(ast.unparse, operands), before, strict=False)
    where = location(frame.f_code.co_filename, loop.lineno, frame.f_code.co_name)
    source = Source(where, tree)
    new = "" if guarded is None else f"while {ast.unparse(guarded.test)}:"
    return HangFinding(
        state="stuck",
        cause="infinite_loop",
        headline=f"`while {text}` never ends: {_ROUNDS} more rounds change nothing of that",
        location=where,
        fix=f"`{new}`" if new else f"change `{ast.unparse(operands[0])}` inside the loop",
        fix_state="verified" if new else "advice",
        edits=(source.replacing(loop, new),) if new else (),
        reason=f"when it was stopped: {', '.join(f'{part} = {value}' for part, value in values if type(value) in {int, float})}",
    )


def _is_plain(func: ast.expr, frame: FrameType, known: Mapping[str, Any]) -> bool:
    """Whether a call runs none of the user's code, and waits for nothing."""
    if isinstance(func, ast.Attribute) and dotted(func.value).partition(".")[0] not in known:
        return False
    value = value_of(func, frame, dict(known))
    owner = value_of(func.value, frame, dict(known)) if isinstance(func, ast.Attribute) else None
    of_data = isinstance(owner, (torch.Tensor, list, dict, set, tuple, str, int, float)) or type(owner).__module__ == "numpy"
    module = str(getattr(value, "__module__", None) or type(getattr(value, "__self__", None)).__module__).partition(".")[0]
    return of_data or (callable(value) and module in _QUIET and getattr(value, "__name__", "") != "input")


def _operands(test: ast.expr) -> list[ast.expr]:
    """What a condition compares, or asks the truth of."""
    match test:
        case ast.BoolOp(_, values):
            return [operand for value in values for operand in _operands(value)]
        case ast.UnaryOp(ast.Not(), inner):
            return _operands(inner)
        case ast.Compare(left, _, comparators):
            return [left, *comparators]
    return [test]


def _tuple(parts: list[ast.expr]) -> ast.expr:
    return ast.Tuple([copied(part) for part in parts], ast.Load())


def _others_run() -> bool:
    """Whether another thread runs code of the user's, which may end the loop."""
    here = threading.get_ident()
    frames = (frame for thread, frame in sys._current_frames().items() if thread != here)
    return any(is_user_code(each.f_code) for frame in frames for each in frames_above(frame))


def _guarded(loop: ast.While, names: Mapping[str, Any]) -> Iterator[ast.While]:
    """The loop under the condition that something which it reads, and does not make, is not empty."""
    for name in sorted(read_names(*loop.body) - bound_inside(loop)):
        value = names.get(name)
        if isinstance(value, (torch.Tensor, list, tuple, dict, set)) and not (
            value.numel() if isinstance(value, torch.Tensor) else len(value)
        ):
            new = copied(loop)
            new.test = ast.BoolOp(ast.And(), [loop.test, expression(f"len({name}) > 0")])
            yield new
