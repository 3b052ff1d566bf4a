"""Changes of a statement that raised: each part of the failing expression turned into what its value may have been meant to be."""

from __future__ import annotations

import ast
import builtins
import difflib
import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import numpy as np
import torch

from torchdebug_magics.instruments.shapes.cell_error.asked_truth import asked_truths
from torchdebug_magics.instruments.shapes.cell_error.meanings import Meaning, meanings
from torchdebug_magics.probing.source.call_sites import MISSING, function_node, value_of
from torchdebug_magics.probing.source.fix_check import ALIASES
from torchdebug_magics.probing.source.syntax import as_atom, called, dotted, exchanged, expression, method, nodes, span_of, tree_of
from torchdebug_magics.probing.what_follows import FailedBlock

_ALIKE = 0.75
"""Likeness of two names of which one is the other, mistyped."""
_NEAR = 12
"""How far from a number another is looked for that its call takes."""
_PAIR = 2
_COUNTERS = frozenset({"i", "j", "k", "n", "idx", "index", "step", "it", "iteration", "epoch", "batch"})
"""What the number of an item is called."""
_MAKERS = frozenset({"tensor", "as_tensor", "array", "asarray", "Tensor", "FloatTensor", "LongTensor", "from_numpy"})
"""What makes one tensor or array of a list."""
_OPTION = re.compile(r"\b([a-z]\w+)`?\s*(?:=|\bset to\b)\s*`?(True|False)\b")
"""How an error names an option and its value."""
_OF_TRUST = frozenset({"weights_only", "allow_pickle"})
"""Options that let a file run code: what they do is not tried."""
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@dataclass(frozen=True)
class Change:
    """Another text of the statement that raised."""

    statement: ast.stmt
    old: ast.expr
    new: ast.expr
    sentence: str
    above: str = ""
    """Statements to be put before it."""
    remade: tuple[ast.stmt, str] | None = None
    """The statement that gave a variable its value, and what replaces it: then the one that raised stays as it is."""
    may_run: bool = True
    """Not what the user has to consent to, nor what has overwritten what it would need."""


class Changes:
    """All changes of the statement of a block, the likeliest first."""

    def __init__(self, error: BaseException, block: FailedBlock, failing: ast.expr) -> None:
        assert block.statement is not None
        self._error, self._block, self._failing, self._statement = error, block, failing, block.statement

    def __iter__(self) -> Iterator[Change]:
        failing = self._failing
        if isinstance(self._error, NameError):
            yield from self._named(self._error.name or "")
            return
        match self._statement:
            case ast.Expr(ast.BinOp(ast.Name() as left, _, right) as whole) if is_difference(whole):
                text = ast.Assign([ast.Name(left.id, ast.Store())], right, lineno=self._statement.lineno)
                sentence = f"the result of `{ast.unparse(self._statement)}` is dropped: no `=` gives it to a variable"
                yield Change(text, self._statement.value, right, sentence)
            case ast.Assign([ast.Attribute() as target], value) if "as parameter" in str(self._error):
                sentence = f"`{ast.unparse(target)}` is a parameter, and `{ast.unparse(value)}` is not"
                yield self._change(value, expression(f"torch.nn.Parameter({ast.unparse(value)})"), sentence)
        for old, new, sentence in asked_truths(self._error, self._statement, self._value):
            yield self._change(old, new, sentence)
        for part in _parts(failing):
            yield from self._made_otherwise(part)
        if isinstance(self._error, AttributeError) and isinstance(failing, ast.Attribute):
            yield from self._attributes(failing)
        if isinstance(self._error, KeyError) and isinstance(failing, ast.Subscript):
            yield from self._keys(failing)
        if isinstance(failing, ast.Call):
            yield from self._options(failing)
        yield from self._meant(failing)
        if isinstance(failing, ast.Call):
            yield from self._arguments(failing)
            yield from self._numbers(failing)
        yield from self._targets()

    def _change(self, old: ast.expr, new: ast.expr, sentence: str, above: str = "") -> Change:
        """With the expression exchanged; a variable wherever the statement reads it."""
        place = span_of(old)

        def exchange(node: ast.AST) -> ast.expr | None:
            is_name = isinstance(old, ast.Name) and isinstance(node, ast.Name) and node.id == old.id and isinstance(node.ctx, ast.Load)
            return new if is_name or (type(node) is type(old) and span_of(node) == place) else None

        head = [name for name in ("body", "orelse") if isinstance(getattr(self._statement, name, None), list)]
        text = exchanged(self._statement, exchange)
        for name in head:  # of a compound statement, the head alone is changed
            setattr(text, name, getattr(self._statement, name))
        return Change(text, old, new, sentence, above)

    def _value(self, node: ast.expr) -> Any:
        """Of a name, an attribute or an item as it stands; of a call what it returns when made again; `MISSING` where it raises."""
        value = value_of(node, self._block.frame)
        if value is not MISSING or not isinstance(
            node, (ast.Call, ast.BinOp, ast.Attribute, ast.Subscript, ast.Compare, ast.List, ast.Tuple)
        ):
            return value
        try:
            return self._block.value(node)
        except Exception:  # noqa: BLE001 - it is what raised
            return MISSING

    def _meant(self, failing: ast.expr) -> Iterator[Change]:
        """Each part by itself, then all parts of a type."""
        parts = [(part, value) for part in _parts(failing) if (value := self._value(part)) is not MISSING]
        is_of_shape = isinstance(self._error, RuntimeError)
        parts = [(part, value) for part, value in parts if not (is_of_shape and isinstance(value, torch.Tensor))]
        given = [*failing.args, *failing.keywords] if isinstance(failing, ast.Call) else []
        makes_tensor = called(failing) in _MAKERS and len(given) == 1
        for part, value in parts:
            numbered = self._numbered(value) if part is getattr(self._statement, "iter", None) else ()
            for code, sentence in (*numbered, *meanings(value)):
                is_remade = makes_tensor and isinstance(value, (list, tuple)) and code.startswith("torch.") and part in given
                yield self._change(failing if is_remade else part, _written(code, part), f"`{ast.unparse(part)}` {sentence}")
            if (
                isinstance(failing, ast.Call)
                and isinstance(value, (list, tuple))
                and part in given
                and not any(isinstance(item, torch.Tensor) for item in value)
            ):
                sentence = f"`{ast.unparse(part)}` is a {type(value).__name__}, whose items are expected one by one"
                alone = (
                    ast.Call(failing.func, part.elts, failing.keywords)
                    if isinstance(part, (ast.List, ast.Tuple)) and len(given) == 1
                    else None
                )
                yield self._change(part if alone is None else failing, alone or ast.Starred(part, ast.Load()), sentence)
            if isinstance(value, Mapping) and isinstance(self._error, AttributeError):
                yield from self._state(value, part)
        for kind in dict.fromkeys(type(value) for _, value in parts):
            alike = [part for part, value in parts if type(value) is kind]
            first = next(value for _, value in parts if type(value) is kind)
            for code, sentence in meanings(first) if len(alike) > 1 else ():
                yield self._all_changed(alike, code, sentence)
        if isinstance(failing, ast.Call) and len(failing.args) > 1:
            gathered = ast.Call(failing.func, [ast.List(failing.args, ast.Load())], failing.keywords)
            yield self._change(
                failing, gathered, f"`{ast.unparse(failing.func)}` takes one list, and is given {len(failing.args)} arguments"
            )

    def _numbered(self, value: Any) -> Iterator[Meaning]:
        """A loop that has a name for the number of each item."""
        target = getattr(self._statement, "target", None)
        if isinstance(target, ast.Tuple) and len(target.elts) == _PAIR and not isinstance(value, (int, float, Mapping)):
            is_nested, name = isinstance(target.elts[1], ast.Tuple), dotted(target.elts[0])
            if is_nested or name in _COUNTERS or name.endswith(("_i", "_idx", "_index", "_id")):
                yield "enumerate({})", "gives its items without their numbers"

    def _all_changed(self, parts: list[ast.expr], code: str, sentence: str) -> Change:
        places = {span_of(part): _written(code, part) for part in parts}
        text = exchanged(self._statement, lambda node: places.get(span_of(node)) if isinstance(node, ast.expr) else None)
        return Change(text, parts[0], _written(code, parts[0]), f"`{ast.unparse(parts[0])}` {sentence}")

    def _named(self, name: str) -> Iterator[Change]:
        """The name that is not defined: mistyped, or of a module that was not imported."""
        known = {**vars(builtins), **self._block.frame.f_globals, **self._block.names}
        reads = [node for node in nodes(ast.Name, self._statement) if node.id == name]
        if not reads:
            return
        for near in difflib.get_close_matches(name, [each for each in known if not each.startswith("_")], 3, _ALIKE):
            yield self._change(reads[0], ast.Name(near, ast.Load()), f"`{name}` is not defined, `{near}` is")
        if name in ALIASES:
            module = ALIASES[name]
            statement = f"import {module}" if name == module else f"import {module} as {name}"
            yield self._change(reads[0], reads[0], f"`{name}` is not imported", statement)

    def _attributes(self, failing: ast.Attribute) -> Iterator[Change]:
        """An attribute that does not exist: of a part, a key, mistyped, or a function of Python's that was called as a method."""
        owner, name, text = self._value(failing.value), failing.attr, ast.unparse(failing.value)
        call = next((node for node in nodes(ast.Call, self._statement) if node.func is failing), None)
        if call is not None and callable(getattr(builtins, name, None)):
            yield self._change(call, expression(f"{name}({text})"), f"`{text}` has no method `{name}`, which is a function")
        if owner is MISSING or owner is None:
            return
        kind = type(owner).__name__
        if isinstance(owner, Mapping) and name in owner:
            new = ast.Subscript(failing.value, ast.Constant(name), ast.Load())
            yield self._change(failing, new, f"`{text}` is a {kind}, whose items are taken with brackets")
        inner = {**getattr(owner, "__dict__", {}), **(owner._modules if isinstance(owner, torch.nn.Module) else {})}
        for attribute, part in inner.items():
            own = {*part._modules, *part._parameters} if isinstance(part, torch.nn.Module) else set()
            if not attribute.startswith("_") and (name in own or inspect.getattr_static(part, name, MISSING) is not MISSING):
                deeper = ast.Attribute(ast.Attribute(failing.value, attribute, ast.Load()), name, ast.Load())
                yield self._change(failing, deeper, f"`{text}` is a {kind}, and `{name}` is of its `{attribute}`")
        for near in difflib.get_close_matches(name, [each for each in (*dir(owner), *inner) if not each.startswith("_")], 3, _ALIKE):
            what = f"`{text}`" if isinstance(owner, ModuleType) else f"`{text}`, a {kind},"
            yield self._change(failing, ast.Attribute(failing.value, near, ast.Load()), f"{what} has no `{name}`: `{near}` is what it has")

    def _keys(self, failing: ast.Subscript) -> Iterator[Change]:
        """A key that a mapping does not have, mistyped."""
        owner, key = self._value(failing.value), self._value(failing.slice)
        known = [each for each in owner if isinstance(each, str)] if isinstance(owner, (Mapping, torch.nn.ModuleDict)) else []
        for near in difflib.get_close_matches(key, known, 3, _ALIKE) if isinstance(key, str) else ():
            sentence = f"`{ast.unparse(failing.value)}` has no key {key!r}: {near!r} is what it has"
            yield self._change(failing.slice, ast.Constant(near), sentence)

    def _state(self, value: Mapping[Any, Any], part: ast.expr) -> Iterator[Change]:
        """The state of a model in the place of the model, of which there is one with these names."""
        text = ast.unparse(part)
        for name, model in {**self._block.frame.f_globals, **self._block.names}.items():
            if isinstance(model, torch.nn.Module) and value and model.state_dict().keys() == value.keys() and isinstance(part, ast.Name):
                above = f"{name}.load_state_dict({text})\n{text} = {name}"
                yield self._change(part, part, f"`{text}` is the state of a model, as `state_dict()` gives it, and not the model", above)

    def _options(self, failing: ast.Call) -> Iterator[Change]:
        """An option of the call that the error names with a value: ``weights_only=False``."""
        wanted, text = self._parameters(failing), ast.unparse(failing.func)
        for name, value in dict.fromkeys(_OPTION.findall(str(self._error))):
            if name in wanted and name not in {keyword.arg for keyword in failing.keywords}:
                new = ast.Call(failing.func, failing.args, [*failing.keywords, ast.keyword(name, ast.Constant(value == "True"))])
                if name in _OF_TRUST:
                    sentence = (
                        f"`{text}` refuses what is in the file, which may be more than numbers: allow it only for a file that you trust"
                    )
                    yield replace(self._change(failing, new, sentence), may_run=False)
                else:
                    yield self._change(failing, new, f"`{text}` takes `{name}={value}` for this")

    def _parameters(self, call: ast.Call) -> Mapping[str, inspect.Parameter]:
        function = self._value(call.func)
        try:
            return inspect.signature(function).parameters if callable(function) else {}
        except (TypeError, ValueError):
            return {}

    def _arguments(self, failing: ast.Call) -> Iterator[Change]:
        """A call that lacks one argument: variables that are called as its parameter is; and parentheses for brackets."""
        text, owner = ast.unparse(failing.func), self._value(failing.func)
        if not isinstance(self._error, TypeError):
            return
        if isinstance(owner, (tuple, list, Mapping, torch.Tensor, np.ndarray)) and len(failing.args) == 1:
            what = f"`{text}` is a {type(owner).__name__}, whose items are taken with brackets"
            yield self._change(failing, ast.Subscript(failing.func, failing.args[0], ast.Load()), what)
        wanted = self._parameters(failing)
        given = [*[*wanted][: len(failing.args)], *(keyword.arg for keyword in failing.keywords)]
        lacking = [name for name, each in wanted.items() if each.kind in _POSITIONAL and each.default is each.empty and name not in given]
        if len(lacking) == 1:
            names = [name for name, value in self._block.names.items() if _may_be(lacking[0], name, value)]
            for name in sorted(names, key=lambda name: -difflib.SequenceMatcher(None, name, lacking[0]).ratio()):
                new = ast.Call(failing.func, [*failing.args, ast.Name(name, ast.Load())], failing.keywords)
                yield self._change(failing, new, f"`{text}` needs `{lacking[0]}`, and is not given it")

    def _numbers(self, failing: ast.Call) -> Iterator[Change]:
        """Whole numbers written in the call of a module's class: the nearest with which it can be made, of the smallest first."""
        kind = self._value(failing.func)
        given = [*failing.args, *(keyword.value for keyword in failing.keywords)]
        written = [(node.value, node) for node in given if isinstance(node, ast.Constant) and type(node.value) is int]
        if not isinstance(kind, type) or not issubclass(kind, torch.nn.Module):
            return
        for number, node in sorted(written, key=lambda pair: pair[0]):
            for near in sorted(range(max(1, number - _NEAR), number + _NEAR), key=lambda near, number=number: abs(near - number)):  # type: ignore[misc]
                yield self._change(node, ast.Constant(near), f"{number} does not fit the other arguments: {near} does")

    def _targets(self) -> Iterator[Change]:
        """More values than there are names for them: the rest is left."""
        if isinstance(self._error, ValueError) and "too many values to unpack" in str(self._error):
            for target in (node for node in nodes(ast.Tuple, self._statement) if isinstance(node.ctx, ast.Store)):
                new = ast.Tuple([*target.elts, ast.Starred(ast.Name("_", ast.Store()), ast.Store())], ast.Store())
                sentence = f"there are more values than the {len(target.elts)} names `{ast.unparse(target)}`"
                yield self._change(target, new, sentence)

    def _made_otherwise(self, part: ast.expr) -> Iterator[Change]:
        """A variable whose assignment gives what was not meant: a class, a tuple of one, a number for a loss, what a method returns."""
        frame = self._block.frame
        if not isinstance(part, ast.Name):
            return
        function = function_node(frame.f_code) or tree_of(frame.f_code.co_filename)
        makers = [node for node in nodes(ast.Assign, function) if [part.id] == [*map(dotted, node.targets)]]
        maker = max((node for node in makers if node.lineno <= self._statement.lineno), key=lambda node: node.lineno, default=None)
        if maker is None:
            return
        name, made = part.id, maker.value
        value = value_of(part, frame)
        if isinstance(value, type) and isinstance(made, (ast.Name, ast.Attribute)):
            sentence = f"`{name}` is a class, where an instance of it is expected"
            yield self._remade(maker, part, f"{name} = {ast.unparse(made)}()", sentence)
        if isinstance(value, tuple) and isinstance(made, ast.Tuple) and len(made.elts) == 1:
            sentence = f"`{name}` is a tuple: a comma ends the line that gives it its value"
            yield self._remade(maker, part, f"{name} = {ast.unparse(made.elts[0])}", sentence)
        if isinstance(value, float) and method(made) == "item" and isinstance(made, ast.Call) and isinstance(made.func, ast.Attribute):
            sentence = f"`{name}` is a number: `.item()` has left the graph behind"
            yield self._remade(maker, part, f"{name} = {ast.unparse(made.func.value)}", sentence)
        if value is None and isinstance(made, ast.Call) and isinstance(made.func, ast.Attribute) and dotted(made.func.value) == name:
            sentence = f"`{name}` is None: `{made.func.attr}` changes it in place, and returns nothing"
            yield replace(self._remade(maker, part, ast.unparse(made), sentence), may_run=False)

    def _remade(self, maker: ast.stmt, part: ast.expr, text: str, sentence: str) -> Change:
        return Change(self._statement, part, part, sentence, text, (maker, text))


def is_difference(node: ast.expr) -> bool:
    """``x - f(x)``, which is ``x = f(x)`` but for one sign."""
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub) and isinstance(node.left, ast.Name)


def _written(code: str, part: ast.expr) -> ast.expr:
    """The code of a meaning with the expression in it."""
    return expression(code.format(as_atom(part) if code.startswith("{}") else ast.unparse(part)))


def _parts(failing: ast.expr) -> Iterator[ast.expr]:
    """What the failing expression works on, itself where it is a value; of a list or tuple that is written there, its items, too."""
    match failing:
        case ast.Call(func, args, keywords):
            given = [argument for argument in args if not isinstance(argument, ast.Starred)] + [keyword.value for keyword in keywords]
            yield from given
            for argument in given:
                yield from argument.elts if isinstance(argument, (ast.List, ast.Tuple)) else ()
            yield from [func.value] if isinstance(func, ast.Attribute) else []
            yield func
        case ast.BinOp(left, _, right):
            yield from (left, right)
        case ast.Compare(left, _, comparators):
            yield from (left, *comparators)
        case ast.Subscript(value, index):
            yield from (value, index)
            yield from (part for part in (getattr(index, "lower", None), getattr(index, "upper", None)) if part is not None)
        case ast.Attribute(value):
            yield value
        case _:
            yield failing


def _may_be(parameter: str, name: str, value: Any) -> bool:
    is_number = isinstance(value, (int, float)) or (isinstance(value, torch.Tensor) and value.numel() == 1)
    return name == parameter or (parameter == "metrics" and "loss" in name and is_number)
