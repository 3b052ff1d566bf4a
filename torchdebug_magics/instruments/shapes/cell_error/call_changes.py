"""Changes of a call that failed: its options and arguments, numbers in it, and where a variable in it was given another value."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from torchdebug_magics.instruments.shapes.cell_error.meanings import DIVIDED, dividing
from torchdebug_magics.probing.source.call_sites import MISSING, function_node, value_of
from torchdebug_magics.probing.source.edited_source import same
from torchdebug_magics.probing.source.syntax import (
    as_atom,
    called,
    copied,
    covers,
    dotted,
    exchanged,
    expression,
    loops_around,
    nodes,
    span_of,
    tree_of,
)
from torchdebug_magics.probing.state.what_follows import FailedBlock

_NEAR = 12
"""How far from a number another is looked for that its call takes."""
_OPTION = re.compile(r"\b([a-z]\w+)`?\s*(?:=|\bset to\b)\s*`?(True|False)\b")
"""How an error names an option and its value."""
_OF_TRUST = frozenset({"weights_only", "allow_pickle"})
"""Options that let a file run code: what they do is not tried."""
_DIVIDES = re.compile(r"divi|multiple", re.IGNORECASE)
_PICTURE, _COLORS = 3, 3
"""Dimensions, and channels."""
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
    file: str = ""
    """Of that statement, where it is another file."""
    may_run: bool = True
    """Not what the user has to consent to, nor what has overwritten what it would need."""
    choice: str = ""
    """Of which choice it is one: where two of them would do, nobody knows which was meant."""
    is_certain: bool = True
    """Whether that it runs tells that it is meant."""


class CallChanges:
    """Of the statement of a block that raised, and of the expression in it that did."""

    def __init__(self, error: BaseException, block: FailedBlock, failing: ast.expr) -> None:
        assert block.statement is not None
        self._error, self._block, self._failing, self._statement = error, block, failing, block.statement

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
        value = value_of(node, self._block.frame, dict(self._block.names))
        if value is not MISSING or not isinstance(
            node, (ast.Call, ast.BinOp, ast.Attribute, ast.Subscript, ast.Compare, ast.List, ast.Tuple)
        ):
            return value
        try:
            return self._block.value(node)
        except Exception:  # noqa: BLE001 - it is what raised
            return MISSING

    def _is_whole_division(self, node: ast.BinOp, value: Any) -> bool:
        """Whether a float is what ``/`` gives of two integers without a rest."""
        is_division = isinstance(node.op, ast.Div) and type(value) is float and value.is_integer()
        return is_division and all(type(self._value(side)) is int for side in (node.left, node.right))

    def _options(self, failing: ast.Call) -> Iterator[Change]:
        """An option of the call that the error names with a value: ``weights_only=False``."""
        wanted, text = self._parameters(failing), ast.unparse(failing.func)
        for name, value in dict.fromkeys(_OPTION.findall(str(self._error))):
            if name in wanted and name not in {keyword.arg for keyword in failing.keywords}:
                new = ast.Call(failing.func, failing.args, [*failing.keywords, ast.keyword(name, ast.Constant(value == "True"))])
                trusted = f"`{text}` refuses what is in the file, which may be more than numbers: allow it only for a file that you trust"
                sentence = trusted if name in _OF_TRUST else f"`{text}` takes `{name}={value}` for this"
                yield replace(self._change(failing, new, sentence), may_run=name not in _OF_TRUST)

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
            for name in sorted(names, key=lambda name: (name != lacking[0], "val" not in name)):
                new = ast.Call(failing.func, [*failing.args, ast.Name(name, ast.Load())], failing.keywords)
                yield self._change(failing, new, f"`{text}` needs `{lacking[0]}`, and is not given it")

    def _numbers(self, failing: ast.Call) -> Iterator[Change]:
        """Whole numbers written in the call of a module's class: the nearest with which it can be made, of the smallest first."""
        kind = self._value(failing.func)
        given = [*failing.args, *(keyword.value for keyword in failing.keywords)]
        written = [(node.value, node) for node in given if isinstance(node, ast.Constant) and type(node.value) is int]
        if not isinstance(kind, type) or not issubclass(kind, torch.nn.Module) or not _DIVIDES.search(str(self._error)):
            return
        for number, node in sorted(written, key=lambda pair: pair[0]):
            for near in sorted(range(max(1, number - _NEAR), number + _NEAR), key=lambda near, number=number: abs(near - number)):  # type: ignore[misc]
                yield self._change(node, ast.Constant(near), f"{number} does not fit the other arguments: {near} does")

    def _of_values(self, failing: ast.Call) -> Iterator[Change]:
        """A picture whose channels come first, scores where a distribution expects probabilities."""
        if not failing.args:
            return
        first, kind = failing.args[0], self._value(failing.func)
        value, text = self._value(first), ast.unparse(first)
        if called(failing) == "imshow" and isinstance(value, torch.Tensor | np.ndarray) and value.ndim == _PICTURE:
            turned = f".{'permute' if isinstance(value, torch.Tensor) else 'transpose'}(1, 2, 0)"
            turned = "[0]" if value.shape[0] == 1 else turned if value.shape[0] == _COLORS else ""
            sentence = f"`{text}` is a picture of {' x '.join(map(str, value.shape))}, and `imshow` expects the channels last"
            yield from [self._change(first, expression(f"{as_atom(first)}{turned}"), sentence)] if turned else []
        is_score = isinstance(value, torch.Tensor) and value.is_floating_point() and bool((value < 0).any())
        if (
            is_score
            and isinstance(kind, type)
            and issubclass(kind, torch.distributions.Distribution)
            and "parameter probs" in str(self._error)
        ):
            new = ast.Call(failing.func, failing.args[1:], [ast.keyword("logits", first), *failing.keywords])
            yield self._change(failing, new, f"`{ast.unparse(failing.func)}` expects probabilities, and `{text}` are scores")

    def _unlabelled(self, maker: ast.Assign, part: ast.Name) -> Iterator[Change]:
        """The loss of a model of Hugging Face's, which computes one where it is given labels."""
        function = function_node(self._block.frame.f_code) or tree_of(self._block.frame.f_code.co_filename)
        match maker.value:
            case ast.Attribute(ast.Name(output), "loss"):
                calls = [node for node in nodes(ast.Assign, function) if [output] == [*map(dotted, node.targets)]]
                made = max((node for node in calls if node.lineno <= maker.lineno), key=lambda node: node.lineno, default=None)
            case _:
                return
        call = None if made is None else made.value
        model = self._value(call.func) if isinstance(call, ast.Call) else None
        if made is None or not isinstance(call, ast.Call) or not isinstance(model, torch.nn.Module):
            return
        batches = [option.value for option in call.keywords if option.arg is None]
        inputs = [option.value for option in call.keywords if option.arg == "input_ids"] or call.args[:1]
        inputs = [expression(f"{ast.unparse(batch)}['input_ids']") for batch in batches[:1]] or inputs
        for labels in inputs if "labels" in inspect.signature(model.forward).parameters and _is_causal(model) else ():
            new = ast.Call(call.func, call.args, [*call.keywords, ast.keyword("labels", labels)])
            text = f"{output} = {ast.unparse(new)}"
            sentence = f"`{part.id}` is None: `{ast.unparse(call.func)}` computes a loss only where it is given `labels`"
            yield Change(self._statement, part, part, sentence, f"{text}\n{ast.unparse(maker)}", (made, text))

    def _lengths(self, failing: ast.Call) -> Iterator[Change]:
        """Lengths that must add up to that of what is divided: the last is what the others leave."""
        match failing.args:
            case [whole, ast.List([*first, last]), *_] if first:
                size, lengths = self._value(whole), [self._value(each) for each in (*first, last)]
                is_near = called(failing) == "random_split" and hasattr(size, "__len__") and all(type(each) is int for each in lengths)
                if is_near and 0 < abs(len(size) - sum(lengths)) < len(lengths):  # each share was rounded
                    rest = expression(" - ".join([f"len({ast.unparse(whole)})", *map(ast.unparse, first)]))
                    sentence = f"the lengths of `{ast.unparse(failing.args[1])}` add up to {sum(lengths):,} of {len(size):,}"
                    yield self._change(last, rest, sentence)

    def _compared(self, failing: ast.Attribute) -> Iterator[Change]:
        """A tuple that is compared with a tensor, which gives one bool: its part that is like the tensor."""
        for test in nodes(ast.Compare, failing.value):
            sides = [(side, self._value(side)) for side in (test.left, *test.comparators)]
            tensors = [value for _, value in sides if isinstance(value, torch.Tensor)]
            for side, value in sides:
                is_of_max = isinstance(value, tuple) and hasattr(value, "indices")
                like = [at for at, part in enumerate(value) if _is_like(part, *tensors)] if is_of_max else []
                for at in like if len(like) == 1 else ():
                    part = f"{ast.unparse(side)}.{'values' if value.values is value[at] else 'indices'}"
                    sentence = f"`{ast.unparse(side)}` is a tuple: compared with a tensor, it gives one bool"
                    yield self._change(side, expression(part), sentence)

    def _made_otherwise(self, part: ast.expr) -> Iterator[Change]:
        """A variable whose assignment gives what was not meant: a class, a tuple of one, a number for a loss, what a method returns."""
        frame = self._block.frame
        if isinstance(self._error, TypeError):
            yield from self._divided(part)
        if not isinstance(part, ast.Name):
            return
        function = function_node(frame.f_code) or tree_of(frame.f_code.co_filename)
        makers = [node for node in nodes(ast.Assign, function) if [part.id] == [*map(dotted, node.targets)]]
        maker = max((node for node in makers if node.lineno <= self._statement.lineno), key=lambda node: node.lineno, default=None)
        name, value = part.id, value_of(part, frame, dict(self._block.names))
        if isinstance(value, float):
            loops = loops_around(tree_of(frame.f_code.co_filename), self._statement.lineno)
            adding = (node for node in nodes(ast.AugAssign, function) if dotted(node.target) == name)
            added = (
                node for node in adding if not any(covers(loop, node.lineno) for loop in loops)
            )  # else each step would go back through all
            givers: list[ast.Assign | ast.AugAssign] = [*([] if maker is None else [maker]), *added]
            yield from (change for node in givers for change in self._with_graph(node, part))
        if maker is None:
            return
        made = maker.value
        if value is None:
            yield from self._unlabelled(maker, part)
        if isinstance(value, type) and isinstance(made, (ast.Name, ast.Attribute)):
            sentence = f"`{name}` is a class, where an instance of it is expected"
            yield self._remade(maker, part, f"{name} = {ast.unparse(made)}()", sentence)
        if isinstance(value, tuple) and isinstance(made, ast.Tuple) and len(made.elts) == 1:
            sentence = f"`{name}` is a tuple: a comma ends the line that gives it its value"
            yield self._remade(maker, part, f"{name} = {ast.unparse(made.elts[0])}", sentence)
        if isinstance(made, ast.BinOp) and self._is_whole_division(made, value):
            whole = ast.unparse(ast.BinOp(made.left, ast.FloorDiv(), made.right))
            yield self._remade(maker, part, f"{name} = {whole}", DIVIDED.format(ast.unparse(made)))

    def _with_graph(self, node: ast.Assign | ast.AugAssign, part: ast.Name) -> Iterator[Change]:
        """A number that was read out of a tensor, by ``.item()`` or a function of Python's for numbers."""
        read = node.value
        if not isinstance(read, ast.Call) or not isinstance(read.func, ast.Attribute):
            return
        function = read.func.attr
        tensor: ast.expr | None = read.func.value if function == "item" else None
        if dotted(read.func.value) == "math" and hasattr(torch, function):
            tensor = ast.Call(expression(f"torch.{function}"), read.args, [])
        if tensor is not None:
            reader = ".item()" if function == "item" else f"math.{function}"
            text = ast.unparse(exchanged(copied(node), lambda old: tensor if same(old, read) else None))
            change = self._remade(node, part, text, f"`{part.id}` is a number: `{reader}` has left the graph behind")
            yield change if isinstance(node, ast.Assign) else replace(change, may_run=False)

    def _divided(self, part: ast.expr) -> Iterator[Change]:
        """A whole float that an object has from a division, so that nothing can be run."""
        place = dividing(self._block.frame.f_code.co_filename, part, self._value(part))
        if place is not None:
            where, statement, division = place
            whole = ast.BinOp(division.left, ast.FloorDiv(), division.right)
            text = ast.unparse(exchanged(statement, lambda node: whole if same(node, division) else None))
            change = self._remade(statement, part, text, DIVIDED.format(ast.unparse(division)))
            yield replace(change, file=where.file, may_run=False)

    def _remade(self, maker: ast.stmt, part: ast.expr, text: str, sentence: str) -> Change:
        return Change(self._statement, part, part, sentence, text, (maker, text))


def instance_called(call: ast.Call) -> ast.Call:
    """``nn.ReLU()(x)`` for ``nn.ReLU(x)``."""
    return ast.Call(ast.Call(call.func, [], []), call.args, call.keywords)


def _may_be(parameter: str, name: str, value: Any) -> bool:
    is_number = isinstance(value, (int, float)) or (isinstance(value, torch.Tensor) and value.numel() == 1)
    return name == parameter or (parameter == "metrics" and "loss" in name and is_number)


def _is_like(part: object, *tensors: torch.Tensor) -> bool:
    """Whether it is a tensor of the same shape and dtype as the only one given."""
    shapes = {(each.shape, each.dtype) for each in (part, *tensors) if isinstance(each, torch.Tensor)}
    return isinstance(part, torch.Tensor) and len(tensors) == len(shapes) == 1


def _is_causal(model: torch.nn.Module) -> bool:
    """Whether it predicts the next of its own inputs, and shifts labels itself: its labels are its inputs."""
    name = type(model).__name__
    return name.endswith(("ForCausalLM", "LMHeadModel")) and type(model).__module__.startswith("transformers.")
