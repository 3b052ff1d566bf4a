"""What a value may have been meant to be: by its type alone, a method its result, a list of tensors a tensor, a loader its iterator.

Two questions take more than the type. `if`, `and`, `in` and chained comparisons ask for the truth of a tensor, and one of several elements
has none. And a whole number is a float after a division: as `/` does even of two integers without a rest.
"""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import BuiltinFunctionType, BuiltinMethodType, FunctionType, MethodType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader

from torchdebug_magics.format import shape
from torchdebug_magics.probing.source.edited_source import statements
from torchdebug_magics.probing.source.syntax import FUNCTIONS, called, dotted, enclosing, expression, names_in, nodes, targets_of, tree_of
from torchdebug_magics.report import Location

_BITWISE: dict[type[ast.boolop], ast.operator] = {ast.And: ast.BitAnd(), ast.Or: ast.BitOr()}
_PAIR = 2
_PAIRWISE = {"max": "maximum", "min": "minimum"}
Rewritten = tuple[ast.expr, ast.expr, str, bool]
"""(an expression, what was meant, why, whether nothing else can be meant)."""

DIVIDED = "`{}` is a float, where an integer is expected: `//` divides integers"


class Meaning(NamedTuple):
    """What to write for an expression, and what its value is."""

    code: str
    """With ``{}`` for the expression."""
    sentence: str
    is_choice: bool = False
    """Whether it is one part of several: if another one would do as well, nobody knows which was meant."""


_FEW = 12
"""Keys of a dict that are told from each other."""


def meanings(value: Any) -> Iterator[Meaning]:
    """The likeliest first; none for a value that is not of a known type."""
    for kinds, ways in _TABLE:
        if isinstance(value, kinds):
            yield from ways if isinstance(ways, tuple) else ways(value)
            return
    if isinstance(value, type) and not issubclass(value, BaseException):
        yield Meaning("{}()", "is a class, where an instance of it is expected")
    elif inspect.isgenerator(value):
        yield Meaning("list({})", "is a generator, which is read once and in order")
    elif hasattr(type(value), "iloc"):
        yield Meaning("{}.iloc", "is indexed by its labels, and not by position")
        yield Meaning("{}.to_numpy()", f"is a {type(value).__name__}, where an array is expected")


def _of_function(value: Any) -> Iterator[Meaning]:
    name = getattr(value, "__name__", "").replace("_", "").lower()
    modules = [each for each, kind in vars(torch.nn).items() if each.lower() == name and isinstance(kind, type)]
    yield from (Meaning(f"torch.nn.{module}()", "is a function, where a module is expected") for module in modules)
    yield Meaning("{}()", "is a function, and is not called")


def _of_text(value: str) -> Iterator[Meaning]:
    try:
        number = ast.literal_eval(value.strip())
    except (SyntaxError, ValueError):
        return
    if type(number) in {int, float}:
        yield Meaning(f"{type(number).__name__}({{}})", "is text, where a number is expected")


def _of_list(value: list[Any]) -> Iterator[Meaning]:
    if len(value) == 1:
        yield Meaning("{}[0]", "is a list of one item")
    if value and all(isinstance(item, torch.Tensor) for item in value):
        sizes = {tuple(item.shape) for item in value}
        of = shape(next(iter(sizes)))
        if len(sizes) == 1:
            # A list that was collated has the batch second.
            for code in ("torch.stack({})", "torch.stack({}, 1)", "torch.stack({}, 1).float()"):
                yield Meaning(code, f"is a list of {len(value)} tensors{f' of {of}' if of else ''}, and not a tensor")
        else:
            padded = "torch.nn.utils.rnn.pad_sequence({}, batch_first=True)"
            yield Meaning(padded, "is a list of tensors of unequal sizes, and not a tensor")
    elif value and all(isinstance(row, (list, tuple)) for row in value) and len(set(map(len, value))) > 1:
        rows = "torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in {}], batch_first=True)"
        yield Meaning(rows, f"has rows of {min(map(len, value))} to {max(map(len, value))} values")
    else:
        yield Meaning("torch.tensor({})", "is a list, where a tensor is expected")


def _of_tuple(value: tuple[Any, ...]) -> Iterator[Meaning]:
    for place, item in enumerate(value[:_FEW]):
        if isinstance(item, torch.Tensor) or len(value) == 1:
            yield Meaning(f"{{}}[{place}]", f"is a tuple of {len(value)}", is_choice=len(value) > 1)


def _of_array(value: np.ndarray[Any, Any]) -> Iterator[Meaning]:
    if any(step < 0 for step in value.strides):
        yield Meaning("{}.copy()", "is a flipped view of an array, of which torch cannot be a view")
    if value.dtype == object:
        yield Meaning("{}.astype('float32')", "is an array of Python objects")
    yield Meaning("torch.from_numpy({})", "is a NumPy array, where a tensor is expected")
    yield Meaning("torch.from_numpy({}).float()", "is a NumPy array, where a tensor is expected")
    yield Meaning("{}.tolist()", "is a NumPy array")


def _of_tensor(value: torch.Tensor) -> Iterator[Meaning]:
    for code in ("{}.item()", "{}.numpy()") if value.numel() == 1 else ("{}.numpy()", "{}.tolist()"):
        yield Meaning(code, f"is a tensor{f' of {shape(tuple(value.shape))}' if value.dim() else ''}")


def _of_mapping(value: Mapping[Any, Any]) -> Iterator[Meaning]:
    keys = [key for key in value if isinstance(key, str)]
    prefixes = {key.partition(".")[0] for key in keys}
    if len(prefixes) == 1 and all("." in key for key in keys):
        prefix = f"{prefixes.pop()}."
        yield Meaning(f"{{{{key.removeprefix({prefix!r}): value for key, value in {{}}.items()}}}}", f"has `{prefix}` before each name")
    for key in keys:
        if isinstance(value[key], (Mapping, torch.nn.Module, torch.Tensor)) and len(keys) <= _FEW:
            yield Meaning(f"{{}}[{key!r}]", f"is a dict: {', '.join(f'`{name}`' for name in keys[:4])}", is_choice=True)
    yield Meaning("{}.items()", "is a dict, of which a loop gives the keys alone")


_OF_LOADER = (Meaning("iter({})", "is a DataLoader, and not its iterator"), Meaning("{}.dataset", "is a DataLoader, and not its dataset"))
_UNCALLED = Meaning("{}()", "is a method, and is not called")
_TABLE: tuple[tuple[Any, Callable[[Any], Iterable[Meaning]] | tuple[Meaning, ...]], ...] = (
    ((MethodType, BuiltinMethodType), lambda value: _of_function(value) if getattr(value, "__self__", None) is None else [_UNCALLED]),
    ((FunctionType, BuiltinFunctionType), _of_function),
    (str, _of_text),
    (list, _of_list),
    (tuple, _of_tuple),
    (np.ndarray, _of_array),
    (torch.Tensor, _of_tensor),
    (float, (Meaning("int({})", "is a float, where an integer is expected"),)),
    ((torch.nn.ModuleList, torch.nn.ModuleDict), (Meaning("torch.nn.Sequential(*{})", "only holds modules, and cannot be called"),)),
    (torch.nn.Module, (Meaning("{}.parameters()", "is a module, where its parameters are expected"),)),
    (DataLoader, _OF_LOADER),
    (Mapping, _of_mapping),
    ((zip, map, filter), lambda value: [Meaning("list({})", f"is a {type(value).__name__}, which is read once and in order")]),
)


def asked_truths(error: BaseException, statement: ast.stmt, value: Callable[[ast.expr], Any]) -> Iterator[Rewritten]:
    """What a statement may have meant that asks for the truth of a tensor of several elements, the likeliest first."""
    if not isinstance(error, (RuntimeError, ValueError)) or "ambiguous" not in str(error):
        return
    for node in _compounds(statement):
        yield from _compound(node, value)
    for test in _tests(statement):
        yield from _plain(test, value, is_asserted=isinstance(statement, ast.Assert))


def _compound(node: ast.expr, value: Callable[[ast.expr], Any]) -> Iterator[Rewritten]:
    """Of an expression that asks for the truth of its parts."""
    match node:
        case ast.Compare(left, ops, comparators) if len(ops) > 1:
            sides = [left, *comparators]
            pairs = [ast.Compare(sides[at], [op], [sides[at + 1]]) for at, op in enumerate(ops)]
            yield node, _joined(pairs, ast.BitAnd()), f"`{ast.unparse(node)}` asks for the truth of its first half, which is a tensor", True
        case ast.Compare(left, [ast.In() | ast.NotIn() as op], [container]) if isinstance(items := value(container), (list, tuple)):
            how = "item is {}" if isinstance(left, (ast.Name, ast.Attribute)) else "torch.equal(item, {})"
            word = "any" if isinstance(op, ast.In) else "not any"
            new = expression(f"{word}([{how.format(ast.unparse(left))} for item in {ast.unparse(container)}])")
            yield node, new, f"`in` compares tensors element by element, here with those of a {type(items).__name__} of {len(items)}", True
        case ast.BoolOp(op, values):
            tensors = [each for each in values if _is_array(value(each))]
            if isinstance(op, ast.Or) and len(values) == _PAIR and values[0] in tensors and not _is_bool(value(values[0])):
                new = ast.IfExp(_is_there(values[0], ast.IsNot()), values[0], values[1])
                yield node, new, _said(values[0], value, "`or` asks whether it is true, not whether it is there"), True
            elif tensors:
                word, sign = ("and", "&") if isinstance(op, ast.And) else ("or", "|")
                yield node, _joined(values, _BITWISE[type(op)]), f"`{word}` takes no tensors of several elements: `{sign}` does", True
        case ast.Call(args=args):
            function = _PAIRWISE[called(node)]
            new = ast.Call(ast.Attribute(ast.Name("torch", ast.Load()), function, ast.Load()), args, [])
            yield node, new, f"Python's `{called(node)}` compares whole tensors: `torch.{function}` compares their elements", True


def _compounds(statement: ast.stmt) -> Iterator[ast.expr]:
    """The innermost first."""
    for node in reversed([*nodes(ast.expr, *_heads(statement))]):
        match node:
            case ast.BoolOp() | ast.Compare(ops=[_, _, *_]) | ast.Compare(ops=[ast.In() | ast.NotIn()]):
                yield node
            case ast.Call(args=[_, _, *_]) if called(node) in _PAIRWISE:
                yield node
            case _:
                pass


def _tests(statement: ast.stmt) -> Iterator[ast.expr]:
    """The conditions of a statement, the innermost first."""
    for node in reversed([*nodes(ast.AST, *_heads(statement))]):
        match node:
            case ast.IfExp(test):
                yield test
            case ast.UnaryOp(ast.Not()):
                yield node
            case ast.comprehension(ifs=ifs):
                yield from ifs
            case _:
                pass
    yield from [statement.test] if isinstance(statement, (ast.If, ast.While, ast.Assert)) else []


def _heads(statement: ast.stmt) -> Iterator[ast.AST]:
    """A statement without its body."""
    for name, value in ast.iter_fields(statement):
        if name not in {"body", "orelse", "finalbody", "handlers"}:
            yield from (part for part in (value if isinstance(value, list) else [value]) if isinstance(part, ast.AST))


def _plain(node: ast.expr, value: Callable[[ast.expr], Any], *, is_asserted: bool) -> Iterator[Rewritten]:
    """``if mask:``, ``if not mask:`` of a variable that may be None; of a comparison, whether all or any of its elements are meant."""
    inner = node.operand if isinstance(node, ast.UnaryOp) else node
    tensor = value(inner)
    if not _is_array(tensor):
        return
    said = _said(inner, value, "it has no single truth value")
    if isinstance(inner, (ast.Name, ast.Attribute, ast.Subscript)) and not _is_bool(tensor):
        yield node, _is_there(inner, ast.Is() if inner is not node else ast.IsNot()), said, True
        return
    is_equality = isinstance(inner, ast.Compare) and isinstance(inner.ops[0], ast.Eq)
    way = "all" if is_asserted or inner is not node or is_equality else "any"
    truth = ast.Call(ast.Attribute(inner, way, ast.Load()), [], [])
    new = truth if inner is node else ast.UnaryOp(ast.Not(), truth)
    yield node, new, f"{said}: `.any()` or `.all()` of its elements has", is_equality


def _said(node: ast.expr, value: Callable[[ast.expr], Any], words: str) -> str:
    return f"`{ast.unparse(node)}` is a tensor of {shape(tuple(value(node).shape))}, and {words}"


def _is_there(node: ast.expr, op: ast.cmpop) -> ast.Compare:
    return ast.Compare(node, [op], [ast.Constant(None)])


def _joined(values: Iterable[ast.expr], op: ast.operator) -> ast.expr:
    return functools.reduce(lambda joined, each: ast.BinOp(joined, op, each), values)


def _is_array(value: Any) -> bool:
    return isinstance(value, (torch.Tensor, np.ndarray)) and np.prod(value.shape) != 1


def _is_bool(value: Any) -> bool:
    return value.dtype in {torch.bool, np.dtype(bool)}


def dividing(file: str, part: ast.expr, value: Any) -> tuple[Location, ast.stmt, ast.BinOp] | None:
    """Where an attribute, or an option of a module, was given a whole float; None where it has none, or where several divisions may have.

    `value` is that of the expression `part` in a file.
    """
    is_module = isinstance(value, torch.nn.Module)
    kept = [value] if isinstance(part, ast.Attribute) else []
    if is_module:
        kept = [each for held in vars(value).values() for each in (held if isinstance(held, tuple) else [held])]
    if not any(type(each) is float and each.is_integer() for each in kept):
        return None
    if is_module:
        makers = _makers(file, type(value).__name__)
    else:
        makers = ((where, node) for where, node in statements(file) if dotted(part) in map(dotted, targets_of(node)))
    places = [(where, statement, division) for where, statement in makers for division in _divisions(statement)]
    return places[0] if len(places) == 1 else None


def _makers(file: str, kind: str) -> Iterator[tuple[Location, ast.stmt]]:
    """The statements that make a module of this class, and those of the same function that make what they read."""
    for where, statement in statements(file):
        if kind in map(called, nodes(ast.Call, statement)):
            around = [node for node in enclosing(tree_of(where.file), statement.lineno) if isinstance(node, FUNCTIONS)]
            yield where, statement
            made = [node for node in nodes(ast.Assign, *around[-1:]) if names_in(statement) & set(map(dotted, targets_of(node)))]
            yield from ((where, node) for node in made)


def _divisions(statement: ast.stmt) -> list[ast.BinOp]:
    """Those of a statement in which no float is written."""
    if any(type(node.value) is float for node in nodes(ast.Constant, statement)):
        return []
    return [node for node in nodes(ast.BinOp, statement) if isinstance(node.op, ast.Div)]
