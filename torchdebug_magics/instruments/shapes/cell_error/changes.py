"""Changes of a statement that raised: each part of the failing expression turned into what its value may have been meant to be."""

from __future__ import annotations

import ast
import builtins
import difflib
import inspect
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from types import GeneratorType, ModuleType
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from torchdebug_magics.instruments.shapes.cell_error.call_changes import CallChanges, Change, instance_called
from torchdebug_magics.instruments.shapes.cell_error.meanings import DIVIDED, Meaning, asked_truths, meanings
from torchdebug_magics.probing.source.call_sites import MISSING, function_node, value_of
from torchdebug_magics.probing.source.fix_check import ALIASES
from torchdebug_magics.probing.source.syntax import (
    as_atom,
    called,
    dotted,
    exchanged,
    expression,
    names_in,
    nodes,
    span_of,
)

_ALIKE = 0.75
"""Likeness of two names of which one is the other, mistyped."""
_LONG_NAME, _LETTERS_FOR_ONE = 6, 8
"""Letters of a name that may be the end of another one, and of which one may be left out beside a first."""
_PAIR = 2
_COUNTERS = frozenset({"i", "j", "k", "n", "idx", "index", "step", "it", "iteration", "epoch", "batch"})
"""What the number of an item is called."""
_MAKERS = frozenset({"tensor", "as_tensor", "array", "asarray", "Tensor", "FloatTensor", "LongTensor", "from_numpy"})
"""What makes one tensor or array of a list."""
GIVEN_TENSORS = "`{}` is a class, and is given tensors as its options: make an instance, then call that"
_MOST_KEYS = 10_000
_UNKNOWN = re.compile(r"\W*(unk|oov)\W*", re.IGNORECASE)
"""What stands in a vocabulary for all words that are not in it."""
_WRAPPED = ("module", "dataset", "_orig_mod")
"""The attributes in which a model or a dataset has the one that it wraps."""


class Changes(CallChanges):
    """All changes of the statement of a block, the likeliest first."""

    def __iter__(self) -> Iterator[Change]:
        failing = self._failing
        if isinstance(self._error, NameError):
            yield from self._named(self._error.name or "")
            return
        yield from self._of_statement()
        for part in _parts(failing):
            yield from self._made_otherwise(part)
        kind = self._value(failing.func) if isinstance(failing, ast.Call) else None
        is_of_modules = isinstance(failing, ast.Call) and isinstance(kind, type) and issubclass(kind, torch.nn.Module)
        if isinstance(failing, ast.Call) and is_of_modules and any(isinstance(self._value(part), torch.Tensor) for part in failing.args):
            yield self._change(failing, instance_called(failing), GIVEN_TENSORS.format(ast.unparse(failing.func)))
        if isinstance(self._error, AttributeError) and isinstance(failing, ast.Attribute):
            yield from self._compared(failing)
            yield from self.without_run()
            yield from self._attributes(failing)
        if isinstance(self._error, KeyError) and isinstance(failing, ast.Subscript):
            yield from self._keys(failing)
        if isinstance(failing, ast.Call):
            yield from self._options(failing)
            yield from self._of_values(failing)
        yield from () if isinstance(self._error, IndexError) else self._meant(failing)
        if isinstance(failing, ast.Call):
            yield from self._arguments(failing)
            yield from self._numbers(failing)
            yield from self._lengths(failing)

    def _of_statement(self) -> Iterator[Change]:
        """What a statement means as a whole: a dropped result, a parameter, a truth."""
        match self._statement:
            case ast.Expr(ast.BinOp(ast.Name() as left, _, right) as whole) if is_difference(whole):
                text = ast.Assign([ast.Name(left.id, ast.Store())], right, lineno=self._statement.lineno)
                sentence = f"the result of `{ast.unparse(self._statement)}` is dropped: no `=` gives it to a variable"
                yield Change(text, self._statement.value, right, sentence)
            case ast.Assign([ast.Tuple(parts)], value) if "values to unpack" in str(self._error):
                yield from self._unpacked_once(parts, value)
            case ast.Assign([ast.Attribute() as target], value) if "as parameter" in str(self._error):
                sentence = f"`{ast.unparse(target)}` is a parameter, and `{ast.unparse(value)}` is not"
                yield self._change(value, expression(f"torch.nn.Parameter({ast.unparse(value)})"), sentence)
        for old, new, sentence, is_certain in asked_truths(self._error, self._statement, self._value):
            yield replace(self._change(old, new, sentence), is_certain=is_certain)

    def _unpacked_once(self, parts: list[ast.expr], value: ast.expr) -> Iterator[Change]:
        """A result that is a tensor, where the statement takes a pair, as of another layer, and nothing reads the second of it."""
        results = self._value(value)
        later = {node.id for node in nodes(ast.Name, *self._block.rest) if isinstance(node.ctx, ast.Load)}
        for at, part in enumerate(parts):
            taken = part.elts if isinstance(part, ast.Tuple) else []
            layer = self._value(value.func) if isinstance(value, ast.Call) else None
            is_tensor = isinstance(layer, (torch.nn.GRU, torch.nn.RNN)) and isinstance(results, tuple)
            if taken and is_tensor and not {*map(ast.unparse, taken[1:])} & later:
                whole: list[ast.expr] = [ast.Tuple([*parts[:at], taken[0], *parts[at + 1 :]], ast.Store())]
                sentence = f"a {type(layer).__name__} has one state, where `{ast.unparse(part)}` takes {len(taken)}"
                yield Change(ast.Assign(whole, value, lineno=self._statement.lineno), value, value, sentence)

    def without_run(self) -> Iterator[Change]:
        """A function of Python's that is called as a method: ``batches.next()``."""
        call = next((node for node in nodes(ast.Call, self._statement) if node.func is self._failing), None)
        if isinstance(self._failing, ast.Attribute) and call is not None and not call.args and not call.keywords:
            name, text = self._failing.attr, ast.unparse(self._failing.value)
            if callable(getattr(builtins, name, None)):
                yield self._change(call, expression(f"{name}({text})"), f"`{text}` has no method `{name}`, which is a function")

    def _meant(self, failing: ast.expr) -> Iterator[Change]:
        """Each part by itself, then all parts of a type."""
        parts = [(part, value) for part in _parts(failing) if (value := self._value(part)) is not MISSING]
        iterated = getattr(self._statement, "iter", None)
        parts = [(part, value) for part, value in parts if part is not iterated or not isinstance(value, DataLoader)]  # which can be
        # Then the types are right, and sizes or dtypes are not; a state is a matter of its keys.
        if isinstance(self._error, RuntimeError) and not isinstance(self._error, NotImplementedError):
            parts = [(part, value) for part, value in parts if isinstance(value, Mapping)]
        given = [*failing.args, *failing.keywords] if isinstance(failing, ast.Call) else []
        makes_tensor = called(failing) in _MAKERS and len(given) == 1
        for part, value in parts:
            if isinstance(part, ast.BinOp) and self._is_whole_division(part, value):
                yield self._change(part, ast.BinOp(part.left, ast.FloorDiv(), part.right), DIVIDED.format(ast.unparse(part)))
            numbered = self._numbered(value) if part is iterated else ()
            for meaning in (*numbered, *self._of_list(part, value), *meanings(value)):
                is_remade = makes_tensor and isinstance(value, list) and meaning.code.startswith("torch.") and part in given
                changed = self._change(
                    failing if is_remade else part, _written(meaning.code, part), f"`{ast.unparse(part)}` {meaning.sentence}"
                )
                yield replace(changed, choice=ast.unparse(part) if meaning.is_choice else "")
            if isinstance(failing, ast.Call) and part in given and isinstance(value, list):
                yield from self._one_by_one(failing, part, value)
            if isinstance(value, Mapping) and isinstance(self._error, AttributeError):
                yield from self._state(value, part)
        for kind in (float, np.ndarray, GeneratorType):
            alike = [(part, value) for part, value in parts if isinstance(value, kind)]
            for meaning in meanings(alike[0][1]) if len(alike) > 1 else ():
                yield self._all_changed([part for part, _ in alike], meaning)
        owner = getattr(self._value(failing.func), "__module__", None) if isinstance(failing, ast.Call) else None
        if isinstance(failing, ast.Call) and len(failing.args) > 1 and str(owner).partition(".")[0] in {"torch", "torchvision", "None"}:
            gathered = ast.Call(failing.func, [ast.List(failing.args, ast.Load())], failing.keywords)
            sentence = f"`{ast.unparse(failing.func)}` takes one list, and is given {len(failing.args)} arguments"
            yield self._change(failing, gathered, sentence)

    def _of_list(self, part: ast.expr, value: Any) -> Iterator[Meaning]:
        """Of a list whose place tells more than its type: a batch, of which the first part is what a model is given; terms of a loss."""
        tensors = [item for item in value if isinstance(item, torch.Tensor)] if isinstance(value, (list, tuple)) else []
        if not tensors or len(tensors) < len(value):
            return
        if isinstance(self._error, AttributeError) and self._error.name == "backward" and all(item.numel() == 1 for item in tensors):
            yield Meaning("sum({})", f"is a {type(value).__name__} of {len(value)} terms of a loss")
        function = function_node(self._block.frame.f_code)
        loops = [node for node in nodes(ast.For, function) if isinstance(part, ast.Name) and dotted(node.target) == part.id]
        if any(isinstance(value_of(loop.iter, self._block.frame), DataLoader) for loop in loops):
            yield Meaning("{}[0]", f"is a batch of {len(value)} parts, of which the first is the input")

    def _one_by_one(self, failing: ast.Call, part: ast.expr, value: list[Any]) -> Iterator[Change]:
        """The items of a list as arguments."""
        if any(isinstance(item, torch.Tensor) for item in value):
            return
        sentence = f"`{ast.unparse(part)}` is a list, whose items are expected one by one"
        if isinstance(part, ast.List) and len(failing.args) == 1 and not failing.keywords:
            yield self._change(failing, ast.Call(failing.func, part.elts, []), sentence)
        else:
            yield self._change(part, ast.Starred(part, ast.Load()), sentence)

    def _numbered(self, value: Any) -> Iterator[Meaning]:
        """A loop that has a name for the number of each item."""
        target = getattr(self._statement, "target", None)
        if isinstance(target, ast.Tuple) and len(target.elts) == _PAIR and not isinstance(value, (int, float, Mapping)):
            is_nested, name = isinstance(target.elts[1], ast.Tuple), dotted(target.elts[0])
            if is_nested or name in _COUNTERS or name.endswith(("_i", "_idx", "_index", "_id")):
                yield Meaning("enumerate({})", "gives its items without their numbers")

    def _all_changed(self, parts: list[ast.expr], meaning: Meaning) -> Change:
        places = {span_of(part): _written(meaning.code, part) for part in parts}
        text = exchanged(self._statement, lambda node: places.get(span_of(node)) if isinstance(node, ast.expr) else None)
        return Change(text, parts[0], _written(meaning.code, parts[0]), f"`{ast.unparse(parts[0])}` {meaning.sentence}")

    def _named(self, name: str) -> Iterator[Change]:
        """The name that is not defined: mistyped, or of a module that was not imported."""
        known = {**vars(builtins), **self._block.frame.f_globals, **self._block.names}
        reads = [node for node in nodes(ast.Name, self._statement) if node.id == name]
        if not reads:
            return
        for near in near_names(name, known):
            yield replace(self._change(reads[0], ast.Name(near, ast.Load()), f"`{name}` is not defined, `{near}` is"), choice=name)
        if name in ALIASES:
            module = ALIASES[name]
            statement = f"import {module}" if name == module else f"import {module} as {name}"
            yield self._change(reads[0], reads[0], f"`{name}` is not imported", statement)

    def _attributes(self, failing: ast.Attribute) -> Iterator[Change]:
        """An attribute that does not exist: of what is wrapped, a key, or mistyped."""
        owner, name, text = self._value(failing.value), failing.attr, ast.unparse(failing.value)
        if owner is MISSING or owner is None:
            return
        kind = type(owner).__name__
        if isinstance(owner, Mapping) and name in owner:
            new = ast.Subscript(failing.value, ast.Constant(name), ast.Load())
            yield self._change(failing, new, f"`{text}` is a {kind}, whose items are taken with brackets")
        for attribute in _WRAPPED:
            part = getattr(owner, attribute, None) if isinstance(owner, (torch.nn.Module, Dataset)) else None
            own = {*part._modules, *part._parameters} if isinstance(part, torch.nn.Module) else set()
            if part is not None and (name in own or inspect.getattr_static(part, name, MISSING) is not MISSING):
                deeper = ast.Attribute(ast.Attribute(failing.value, attribute, ast.Load()), name, ast.Load())
                yield self._change(failing, deeper, f"`{text}` is a {kind}, and `{name}` is of its `{attribute}`")
        parts = owner._modules if isinstance(owner, torch.nn.Module) else {}
        for near in near_names(name, (*dir(owner), *parts)):
            what = f"`{text}`" if isinstance(owner, ModuleType) else f"`{text}`, a {kind},"
            new_name = ast.Attribute(failing.value, near, ast.Load())
            yield replace(self._change(failing, new_name, f"{what} has no `{name}`: `{near}` is what it has"), choice=name)

    def _keys(self, failing: ast.Subscript) -> Iterator[Change]:
        """A key that a mapping does not have: mistyped, or one of many of which another one stands for all that are unknown."""
        owner, key = self._value(failing.value), failing.slice.value if isinstance(failing.slice, ast.Constant) else None
        unknown = next((each for each in owner if isinstance(each, str) and _UNKNOWN.fullmatch(each)), "") if type(owner) is dict else ""
        word = self._error.args[0] if self._error.args else None
        is_word = isinstance(word, str) and len(word) > 1 and word.isalpha() and word.lower() not in owner if unknown else False
        if is_word and key is None:
            text, sought = ast.unparse(failing.value), ast.unparse(failing.slice)
            sentence = f"`{text}` has no {self._error}, and {unknown!r} for what it does not have"
            yield self._change(failing, expression(f"{text}.get({sought}, {text}[{unknown!r}])"), sentence)
        if not isinstance(owner, (Mapping, torch.nn.ModuleDict)) or not isinstance(key, str) or len(owner) > _MOST_KEYS:
            return
        for near in near_names(key, [each for each in owner if isinstance(each, str)]):
            sentence = f"`{ast.unparse(failing.value)}` has no key {key!r}: {near!r} is what it has"
            yield replace(self._change(failing.slice, ast.Constant(near), sentence), choice=key)

    def _state(self, value: Mapping[Any, Any], part: ast.expr) -> Iterator[Change]:
        """The state of a model in the place of the model, of which there is one with these names."""
        text = ast.unparse(part)
        for name, model in {**self._block.frame.f_globals, **self._block.names}.items():
            if isinstance(model, torch.nn.Module) and value and model.state_dict().keys() == value.keys() and isinstance(part, ast.Name):
                above = f"{name}.load_state_dict({text})\n{text} = {name}"
                yield self._change(part, part, f"`{text}` is the state of a model, as `state_dict()` gives it, and not the model", above)


def near_names(name: str, known: Iterable[str]) -> list[str]:
    """The names that are this one with letters left out, put in or exchanged; of two that differ in a letter or number, each is another."""
    near = difflib.get_close_matches(name, {each for each in known if not each.startswith("_")}, 5, _ALIKE)
    alike = (name.lower() == each.lower() or sorted(name) == sorted(each) or _is_part(name, each) or _is_part(each, name) for each in near)
    return [*itertools.compress(near, alike)]


def _is_part(short: str, long: str) -> bool:
    """Whether it is the other name with a few letters, or one end, but no number, left out."""
    letters = iter(long)
    if len(short) >= len(long) or sorted(filter(str.isdigit, short)) != sorted(filter(str.isdigit, long)):
        return False
    is_end = len(short) >= _LONG_NAME and (long.startswith(short) or long.endswith(short))
    lacks_few = len(short) > _PAIR and len(long) - len(short) <= len(long) // _LETTERS_FOR_ONE + 1
    return is_end or (lacks_few and all(each in letters for each in short))


def is_difference(node: ast.expr) -> bool:
    """``x - f(x)``, which is ``x = f(x)`` but for one sign."""
    match node:
        case ast.BinOp(ast.Name(name), ast.Sub(), ast.Call() as right):
            return name in names_in(*right.args)
    return False


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
            slices = index.elts if isinstance(index, ast.Tuple) else [index]
            ends = [getattr(each, end, None) for each in slices for end in ("lower", "upper")]
            yield from (end for end in ends if end is not None)
        case ast.Attribute(value):
            yield value
        case _:
            yield failing
