"""Loops in which a cell was stopped and that would not have ended: told from the source, from values, and from rounds that are undone.

Nothing of the user's runs, save the rounds of a loop that nothing from outside can end: it calls nothing but functions of torch's, NumPy's
and Python's own that do not wait.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from types import FrameType
from typing import Any

import torch

from torchdebug_magics.format import plural
from torchdebug_magics.instruments.hangwatch.report import HangFinding, unending
from torchdebug_magics.probing.outside.effects import Irrevocable
from torchdebug_magics.probing.safety import Guard
from torchdebug_magics.probing.source import syntax
from torchdebug_magics.probing.source.call_sites import MISSING, value_of
from torchdebug_magics.probing.source.edited_source import Source
from torchdebug_magics.probing.source.syntax import Loop, copied, names_in, nodes, read_names, tree_of
from torchdebug_magics.probing.source.user_code import location, runs_alone
from torchdebug_magics.probing.state.what_follows import FailedBlock
from torchdebug_magics.report import Location

_COMPARED: dict[type[ast.cmpop], Any] = {
    ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge, ast.Eq: operator.eq, ast.NotEq: operator.ne,
}  # fmt: skip
_MEMBERS: dict[type[ast.cmpop], bool] = {ast.In: True, ast.NotIn: False}
_NUMBERS = (bool, int, float)
_PLAIN = (*_NUMBERS, str)
_CONTAINERS = (list, tuple, set, frozenset, dict, range)
_MOST_VALUES = 100_000
_DRAWS, _ROUNDS = 100, 20
"""How often an edited loop draws; how many rounds are run."""
_QUIET = frozenset({"torch", "numpy", "builtins", "math", "operator", "random"})
"""Whose functions may be called in these."""


def unreached_end(loops: Sequence[Loop], frame: FrameType) -> HangFinding | None:
    """The loop inside a ``while`` that would have ended: its condition is false by now, and is not evaluated again."""
    for outer, inner in pairwise(loops):
        match outer:
            case ast.While(test=ast.Compare(left, [how], [right])) if type(how) in _COMPARED:
                sides = [value_of(side, frame) for side in (left, right)]
                if not all(type(side) in _NUMBERS for side in sides) or _COMPARED[type(how)](*sides):
                    continue
                head = "" if isinstance(inner, ast.While) else f"for {ast.unparse(inner.target)} in {ast.unparse(inner.iter)}"
                what = f"`{head}`" if head else "the inner `while`"
                return unending(
                    f"{what} does not end, and `while {ast.unparse(outer.test)}` around it, which is false by now, is never asked again",
                    head_of(inner, frame),
                    "leave the inner loop, by `break` or by an iterator that ends",
                    f"when it was stopped: {ast.unparse(left)} = {sides[0]}, {ast.unparse(right)} = {sides[1]}",
                )
    return None


def head_of(loop: Loop, frame: FrameType) -> Location:
    """The line at which a loop begins."""
    return location(frame.f_code.co_filename, loop.lineno, frame.f_code.co_name)


# Loops that draw again until a draw is right, where no draw can be: `while item in taken: item = random.randint(1, 9)`. What can be drawn
# is known from the call, and the condition is asked of each value.


def retry_loop(loops: Sequence[Loop], frame: FrameType) -> HangFinding | None:
    """The innermost loop of a single statement, a draw, that no value which can be drawn leaves; None where one may."""
    for loop in reversed(loops):
        match loop:
            case ast.While(test, [ast.Assign([ast.Name(name)], value) as draw]) if name in names_in(test):
                values = _drawn(value, frame)
                if values and len(values) <= _MOST_VALUES and all(_holds(test, name, each, frame) is True for each in values):
                    return _never_drawn(loop, draw, values, frame)
    return None


def _never_drawn(loop: ast.While, draw: ast.Assign, values: Sequence[Any], frame: FrameType) -> HangFinding:
    where, test, tree = head_of(loop, frame), ast.unparse(loop.test), tree_of(frame.f_code.co_filename)
    source = None if tree is None else Source(where, tree)
    bounded = f"for _ in range({_DRAWS}):\n    if not ({test}):\n        break\n    {ast.unparse(draw)}"
    shown = f"{values[0]!r} alone" if len(values) == 1 else f"one of {plural(len(values), 'value')}"
    return unending(
        f"`while {test}` never ends: `{ast.unparse(draw.value)}` can give {shown}, and the condition holds for all",
        where,
        f"give up after some draws: `for _ in range({_DRAWS}):` in place of `while {test}:`, and leave it by `break`",
        "a loop that draws until a draw is right ends only if one can be",
        edits=() if source is None else (source.replacing(loop, bounded, old=source.text(loop, whole=True)),),
        fix_state="advice" if source is None else "compiles",
    )


def _drawn(node: ast.expr, frame: FrameType) -> Sequence[Any]:
    """All values that a call may return which draws at random; empty for any other call, and where they are not known."""
    if isinstance(node, ast.Call) and (syntax.called(node) == "item" or syntax.dotted(node.func) == "int"):
        inner = node.func.value if isinstance(node.func, ast.Attribute) else next(iter(node.args), node)
        return _drawn(inner, frame) if inner is not node else ()
    if not isinstance(node, ast.Call) or not node.args:
        return ()
    name, given = syntax.last_name(node.func), [value_of(argument, frame) for argument in node.args]
    ends = [_plain(value) for value in given if type(_plain(value)) is int]
    is_torch, is_numpy = (syntax.dotted(node.func).startswith(prefix) for prefix in (("torch.",), ("np.", "numpy.")))
    if name == "choice" and (len(node.args) == 1 or is_numpy):
        return range(ends[0]) if type(given[0]) is not str and ends[:1] == [_plain(given[0])] else _items(given[0])
    if name in {"randint", "randrange"} and ends and len(ends) == min(len(given), 2):
        low, high = (0, ends[0]) if len(ends) == 1 else (ends[0], ends[1])
        return range(low, high + (name == "randint" and not is_torch and not is_numpy))
    if name == "multinomial" and isinstance(given[0], torch.Tensor) and given[0].numel() == given[0].shape[-1]:
        return [int(place) for place in given[0].detach().flatten().nonzero().flatten().tolist()]
    return ()


def _items(values: Any) -> Sequence[Any]:
    """The elements of a sequence of plain values."""
    if type(values).__module__ == "numpy" and getattr(values, "ndim", 0) == 1:
        values = values.tolist()
    if type(values) not in {list, tuple, range, str}:
        return ()
    items = [_plain(value) for value in values[:_MOST_VALUES]]
    return items if all(type(item) in _PLAIN for item in items) else ()


def _plain(value: Any) -> Any:
    """A number of NumPy's, or a tensor of one, as Python's."""
    is_number = isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_meta
    return value.item() if is_number or (type(value).__module__ == "numpy" and getattr(value, "ndim", 1) == 0) else value


def _holds(test: ast.expr, name: str, value: Any, frame: FrameType) -> bool | None:
    """A condition where the variable has that value; None where it is not known."""
    match test:
        case ast.UnaryOp(ast.Not(), operand):
            inner = _holds(operand, name, value, frame)
            return None if inner is None else not inner
        case ast.BoolOp(how, parts):
            held = [_holds(part, name, value, frame) for part in parts]
            return None if None in held else all(held) if isinstance(how, ast.And) else any(held)
        case ast.Compare(left, [how], [right]):
            sides = [_side(node, name, value, frame) for node in (left, right)]
            if type(how) in _MEMBERS and type(sides[1]) in _CONTAINERS and type(sides[0]) in _PLAIN:
                return (sides[0] in sides[1]) is _MEMBERS[type(how)]
            if type(how) in _COMPARED and all(type(side) in _PLAIN for side in sides):
                return bool(_COMPARED[type(how)](*sides))
    return None


def _side(node: ast.expr, name: str, value: Any, frame: FrameType) -> Any:
    match node:
        case ast.Name(id) | ast.Call(ast.Attribute(ast.Name(id), "item"), []) | ast.Call(ast.Name("int"), [ast.Name(id)]) if id == name:
            return value
        case ast.Tuple(parts) | ast.List(parts) | ast.Set(parts):
            return [_side(part, name, value, frame) for part in parts]
    return MISSING if name in names_in(node) else _plain(value_of(node, frame))


def idle_loop(loops: Sequence[Loop], frame: FrameType) -> HangFinding | None:
    """The innermost ``while`` whose condition is as it was after twenty more rounds; None where a round may end it, or cannot be undone."""
    loop = loops[-1] if loops else None
    tree = tree_of(frame.f_code.co_filename)
    if not isinstance(loop, ast.While) or isinstance(loop.test, ast.Constant) or tree is None:
        return None
    block = FailedBlock(frame, loop.lineno, Guard())
    is_waiting = all(isinstance(node, (ast.Pass, ast.Expr)) and not any(nodes(ast.Call, node)) for node in loop.body)
    if block.statement is not loop or is_waiting or not block.is_repeatable or not runs_alone():
        return None
    operands, known = _operands(loop.test), {**frame.f_globals, **block.names}
    if not all(_is_quiet(call.func, frame, known) for call in nodes(ast.Call, loop)):
        return None
    used = sorted((read_names(*loop.body) | syntax.bound_names(*loop.body)) & known.keys())
    try:
        with block.opened():
            if not block.is_idle(_ROUNDS, _tuple([*operands, *(ast.Name(name, ast.Load()) for name in used)])):
                return None
            before = block.value(_tuple(operands))
            outcomes = ((each, block.run(each)) for each in _guarded(loop, block.names))
            guarded = next((each for each, outcome in outcomes if outcome.has_passed and outcome.error is None), None)
    except (Irrevocable, Exception):  # noqa: BLE001 - a round that cannot be undone, or that raises
        return None
    values = [f"{ast.unparse(part)} = {value}" for part, value in zip(operands, before, strict=False) if type(value) in {int, float}]
    where, new = head_of(loop, frame), "" if guarded is None else f"while {ast.unparse(guarded.test)}:"
    return unending(
        f"`while {ast.unparse(loop.test)}` never ends: {_ROUNDS} more rounds change nothing of that",
        where,
        f"`{new}`" if new else f"change `{ast.unparse(operands[0])}` inside the loop",
        f"when it was stopped: {', '.join(values)}",
        fix_state="verified" if new else "advice",
        edits=(Source(where, tree).replacing(loop, new),) if new else (),
    )


def _is_quiet(func: ast.expr, frame: FrameType, known: Mapping[str, Any]) -> bool:
    """Whether a call runs none of the user's code, and waits for nothing."""
    if isinstance(func, ast.Attribute) and syntax.dotted(func.value).partition(".")[0] not in known:
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


def _guarded(loop: ast.While, names: Mapping[str, Any]) -> Iterator[ast.While]:
    """The loop under the condition that something which it reads, and does not make, is not empty."""
    for name in sorted(read_names(*loop.body) - syntax.bound_inside(loop)):
        value = names.get(name)
        if isinstance(value, (torch.Tensor, list, tuple, dict, set)) and not (
            value.numel() if isinstance(value, torch.Tensor) else len(value)
        ):
            new = copied(loop)
            new.test = ast.BoolOp(ast.And(), [loop.test, syntax.expression(f"len({name}) > 0")])
            yield new
