"""Evaluates the expressions on a magic's line as the arguments of a call."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from IPython.core.error import UsageError

__all__ = ["Values", "as_argument", "evaluated"]

Values: TypeAlias = tuple[tuple[object, ...], dict[str, object]]

_COLLECT, _CALLED, _DESCRIBED = "_torchdebug_values", "_torchdebug_called", "_torchdebug_described"


def evaluated(
    sources: tuple[str, ...], user_ns: dict[str, Any], local_ns: Mapping[str, Any], subject_of: Callable[[object], object | None]
) -> Values:
    """``(values, named values)``.

    A single call such as ``model(x, mask=m)`` of what `subject_of` knows is not made: its subject and its arguments are the values.
    """
    names = {**local_ns, _COLLECT: _collect, _DESCRIBED: slice}
    tree = _read(sources)
    only = tree.body.args[0] if isinstance(tree.body, ast.Call) and len(tree.body.args) == 1 and not tree.body.keywords else None
    if isinstance(only, ast.Call):
        names[_CALLED] = _run(ast.Expression(only.func), user_ns, names)
        only.func = ast.copy_location(ast.Name(_CALLED, ast.Load()), only.func)
        subject = subject_of(names[_CALLED])
        if subject is not None:
            names[_CALLED] = subject
            tree.body = ast.Call(ast.Name(_COLLECT, ast.Load()), [only.func, *only.args], only.keywords)
    values: Values = _run(tree, user_ns, names)
    return values


def as_argument(source: str) -> str | None:
    """The source of a value, to stand among the arguments of a call; ``(3, 4):int64`` is a slice, as in a subscript. None for neither.

    Either may have a name: ``mask=(3, 4):bool``.
    """
    try:
        ast.parse(f"f({source}\n)", mode="eval")
    except SyntaxError:
        name, equals, value = source.partition("=")
        described = _as_slice(value if equals else source)
        return f"{name}={described}" if equals and described is not None and name.strip().isidentifier() else described
    return source


def _as_slice(source: str) -> str | None:
    try:
        found = ast.parse(f"_[{source}\n]", mode="eval").body
    except SyntaxError:
        return None
    part = found.slice if isinstance(found, ast.Subscript) else None
    if not isinstance(part, ast.Slice) or not isinstance(part.lower, ast.Tuple) or part.upper is None or part.step is not None:
        return None
    called = ast.Call(ast.Name(_DESCRIBED, ast.Load()), [part.lower, ast.Constant(ast.unparse(part.upper))], [])
    return ast.unparse(called)


def _read(sources: tuple[str, ...]) -> ast.Expression:
    separated = ",\n".join(as_argument(source) or source for source in sources)
    try:
        tree = ast.parse(f"{_COLLECT}({separated}\n)", mode="eval")
        compile(tree, "<magic line>", "eval")  # finds what the grammar allows and a call does not, such as a name given twice
    except SyntaxError as error:
        msg = f"cannot read {' '.join(sources)!r} as the arguments of a call: {error.msg}"
        raise UsageError(msg) from None
    return tree


def _run(tree: ast.Expression, user_ns: dict[str, Any], names: Mapping[str, Any]) -> Any:
    code = compile(ast.fix_missing_locations(tree), "<magic line>", "eval")
    try:
        return eval(code, user_ns, names)  # noqa: S307 - the user's own words
    except NameError as error:
        trace = error.__traceback__
        if trace is None or trace.tb_next is None or trace.tb_next.tb_next is not None:
            raise  # in what the line calls
        msg = f'there is no variable `{error.name}`: define it first, or write "{error.name}" in quotes if it is meant as a text'
        raise UsageError(msg) from None


def _collect(*values: object, **named: object) -> Values:
    return values, named


# So that Python's own words on wrong arguments (`**3`) name a call, and nothing of ours.
_collect.__module__, _collect.__qualname__ = "builtins", "call"
