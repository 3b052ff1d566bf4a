"""A training that stands still, less one part at a time: each change of the user's code with which it is tried again.

As in an ablation study, what a part does is seen by how the training goes without it; no part is suspected by its name.
"""

from __future__ import annotations

import ast
import inspect
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import islice
from types import ModuleType
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from torchdebug_magics.format import listed, number
from torchdebug_magics.instruments.gradwatch.record import GradientHistory
from torchdebug_magics.instruments.gradwatch.repairs import finding, rated, rounded
from torchdebug_magics.instruments.gradwatch.report import GradFinding, GradKind
from torchdebug_magics.probing.dispatch import modes_aside
from torchdebug_magics.probing.source.edited_source import Source, cells, exchanging, made_as
from torchdebug_magics.probing.source.syntax import (
    LOOPS,
    as_atom,
    bound_names,
    called,
    copied,
    dotted,
    enclosing,
    expression,
    last_name,
    loops_around,
    method,
    names_in,
    nodes,
    read_names,
    root_of,
    tree_of,
)
from torchdebug_magics.probing.source.user_code import location
from torchdebug_magics.report import Edit, Location

_MOST = 40
"""Changes that are tried."""
_OTHER_RATES, _NEAR_RATES, _HIGHEST = (0.1, 0.01, 0.001, 10.0, 100.0, 1e3, 1e4, 1e5, 1e6, 1e7), (10.0, 100.0, 0.1), 1.0
_LEARNED = 0.5
"""Of the loss in the first quarter of a training: below it, the training has learned."""
_ADAPTIVE, _USUAL_RATE = frozenset({"Adam", "AdamW", "NAdam", "RAdam", "LBFGS"}), 1e-3
_ALWAYS_CALLED = frozenset({"__init__", "__call__", "__getitem__", "forward"})
_NO_MATTER_OF_LEARNING = frozenset({"lr", "batch_size", "bias", "num_workers", "pin_memory"})
_NEEDED = frozenset({"backward", "zero_grad", "load_state_dict", "append", "print", "display", "__init__", "detach", "item"})
"""Calls that make a training what it is, or that only look at it."""
_DRAWS = "rand"
_OF_MODELS = frozenset({"__init__", "forward"})
"""Functions that make and run a model: what is changed in them leaves the loss as it is."""
_STANDARDIZED = "({0} - {0}.mean({1})) / {0}.std({1})"
_OF_THIS_SCALE, _INPUTS_OF_THIS_SCALE = "from data of this scale", "from inputs of this scale"
_LOSSES = frozenset({"HuberLoss", "L1Loss", "MSELoss", "SmoothL1Loss"})
_OF_NUMBERS = frozenset({"huber_loss", "l1_loss", "mse_loss", "smooth_l1_loss"})
_FAR_FROM_1, _NEAR_1 = 5.0, 3.0
_DEVIATIONS, _WIDE = 3.0, 30.0
"""Between 0 and the mean of inputs that are far from 0; the deviation of those that are far apart."""


def ablations(history: GradientHistory) -> Iterator[GradFinding]:
    """What is to be said of each part of the training's code if the loss falls without it; the parts next to the loss first."""
    return islice((_finding(history, *change) for change in _changes(history)), _MOST)


def other_rates(history: GradientHistory) -> Iterator[GradFinding]:
    """What is to be said of each other learning rate with which the loss falls."""
    rate = history.steps[-1].rate
    for factor in _OTHER_RATES if 0 < rate < math.inf and not history.is_scheduled else ():
        new = rounded(rate * factor)
        if rate * factor <= _HIGHEST:
            kind: GradKind = "too_fast" if new < rate else "not_learning"
            headline = f"the training does not learn: a learning rate of {number(rate)} is too {'high' if new < rate else 'low'}"
            yield finding(history, kind, *rated(history, new), value=rate, headline=headline, why="", keeps_loss=True)


def other_settings(history: GradientHistory, early: float, level: float) -> Iterator[GradFinding]:
    """What is to be said of each setting with which a loss that was `early`, and has stopped at `level`, comes much lower.

    Adam, another learning rate, inputs of mean 0 and deviation 1, and two of these: what is minimized stays the same.
    """
    code = _Code(history)
    if code.has_copies or not history.is_alone:
        return
    say = partial(finding, history, "stalled", value=level, goal=level / 3, why="")
    stops = f"the loss stops at {number(level)}"
    has_learned = level < _LEARNED * early  # by larger steps, it would learn the noise, too
    others = [*(() if has_learned else _with_adam(history, say, stops)), *_at_near_rates(history, say, stops, is_lower=has_learned)]
    scaled = [
        replace(say(where, fix, headline=f"{stops}: the inputs are not standardized"), edits=edits, fix_state="compiles")
        for where, fix, edits in _of_models_inputs(code)
    ]
    yield from (*others, *scaled)
    for first in scaled:
        for second in others:
            if second.edits and {edit.line for edit in first.edits}.isdisjoint(edit.line for edit in second.edits):
                yield replace(first, fix=f"{first.fix}, and {second.fix}", edits=(*first.edits, *second.edits))


def scaled_inputs(history: GradientHistory, level: float) -> Iterator[GradFinding]:
    """What is to be said of inputs that lie far from 0, or far apart, where with standardized ones the loss comes to half of its level."""
    code = _Code(history)
    if code.has_copies or not history.is_alone or {name for name in code.given_to_models() if not code.is_far(name)}:
        return
    headline = f"the loss falls only to {number(level)}: the inputs are not standardized"
    for where, _, fix, edits in islice(_with_standard_data(code), 1):
        said = finding(history, "stalled", where, fix, value=level, goal=level / 2, headline=headline, why="")
        yield replace(said, edits=edits, fix_state="compiles")


def _of_models_inputs(code: _Code) -> Iterator[tuple[Location, str, tuple[Edit, ...]]]:
    """The only call of a model, of all samples at once, with standardized inputs: what it is evaluated with would need the same numbers."""
    called_at = {call: where for statement, where in code.statements() for call in nodes(ast.Call, statement) if code.is_of_model(call)}
    batches = {name for tree in code.trees.values() for loop in nodes((ast.For, ast.comprehension), tree) for name in names_in(loop.target)}
    places = {(where.file, call.lineno, call.col_offset) for call, where in called_at.items()}
    for call, where in called_at.items() if len(places) == 1 else ():
        for _, new in code.called_otherwise(call) if not names_in(call) & batches else ():
            yield where, f"replace `{ast.unparse(call)}` by `{ast.unparse(new)}`", exchanging(where, call, new)
        return


def _with_adam(history: GradientHistory, say: Callable[..., GradFinding], stops: str) -> Iterator[GradFinding]:
    """The parameters with Adam, and its usual learning rate; weight decay, which it takes otherwise, is a part of what is minimized."""
    for where, call in made_as(history.file, history.name, history.kind) if history.kind not in _ADAPTIVE else ():
        if not call.args or any(option.arg == "weight_decay" for option in call.keywords):
            continue
        adam = ast.Attribute(call.func.value, "Adam") if isinstance(call.func, ast.Attribute) else expression("torch.optim.Adam")
        new = ast.Call(adam, call.args[:1], [ast.keyword("lr", ast.Constant(_USUAL_RATE))])
        fix, edits = f"use `{ast.unparse(new)}` in place of `{ast.unparse(call)}`", exchanging(where, call, new)
        yield replace(say(where, fix, headline=f"{stops} with `{history.kind}`"), edits=edits, fix_state="compiles")


def _at_near_rates(history: GradientHistory, say: Callable[..., GradFinding], stops: str, *, is_lower: bool) -> Iterator[GradFinding]:
    """Learning rates that are some 10 times smaller and, unless `is_lower`, larger."""
    rate = history.steps[-1].rate
    for factor in _NEAR_RATES if 0 < rate < math.inf and not history.is_scheduled else ():
        new = rounded(rate * factor)
        if new <= _HIGHEST and (new < rate or not is_lower):
            headline = f"{stops}: a learning rate of {number(rate)} is too {'high' if new < rate else 'low'}"
            yield say(*rated(history, new), headline=headline)


def _finding(history: GradientHistory, where: Location, what: str, fix: str, edits: tuple[Edit, ...]) -> GradFinding:
    said = finding(history, "not_learning", where, fix, headline=f"the training does not learn {what}", why="")
    is_of_model = any(isinstance(node, ast.FunctionDef) and node.name in _OF_MODELS for node in enclosing(tree_of(where.file), where.line))
    return replace(said, edits=edits, fix_state="compiles", keeps_loss=is_of_model or what == _INPUTS_OF_THIS_SCALE)


def _changes(history: GradientHistory) -> Iterator[tuple[Location, str, str, tuple[Edit, ...]]]:
    """(line, what is wrong, fix, edits) of each."""
    code = _Code(history)
    if code.has_copies:
        return
    seen = set[tuple[Edit, ...]]()
    yield from _with_standard_data(code)
    for statement, where in code.statements():
        for what, fix, edits in (*_without_parts(code, statement, where), *_without(code, statement, where)):
            if edits and edits not in seen:
                seen.add(edits)
                yield where, what, fix, edits


def _with_standard_data(code: _Code) -> Iterator[tuple[Location, str, str, tuple[Edit, ...]]]:
    """The data set of tensors, or the tensors that the loop reads, with mean 0 and deviation 1: the inputs alone, then all."""
    sets = [(file, call) for file, tree in code.trees.items() for call in nodes(ast.Call, tree) if called(call) == "TensorDataset"]
    for file, call in sets:
        where = location(file, call.lineno, "<module>")
        for names in _first_then_all({ast.unparse(part): code.standardized(part) for part in call.args}):
            parts = [expression(names.get(ast.unparse(part), ast.unparse(part))) for part in call.args]
            edits = exchanging(where, call, ast.Call(call.func, parts, call.keywords))
            what = _INPUTS_OF_THIS_SCALE if list(names) == [ast.unparse(call.args[0])] else _OF_THIS_SCALE
            yield where, what, f"standardize {listed([f'`{name}`' for name in names])}", edits
    for file, loop in code.loops if not sets else ():
        inside = bound_names(loop)
        read = [call for call in nodes(ast.Call, loop) if code.is_of_model(call)]
        inputs = {ast.unparse(part) for call in read for part in call.args}
        read += [call for call in nodes(ast.Call, loop) if code.is_of_loss(call)]
        given = [part for call in read for part in call.args if isinstance(part, ast.Name)]
        where = location(file, loop.lineno, "<module>")
        for names in _first_then_all({part.id: code.standardized(part) for part in given if part.id not in inside}):
            lines = [f"{name} = {text}" for name, text in names.items()]
            edits = (Source(where, code.trees[file]).before(loop, "\n".join(lines)),)
            what = _INPUTS_OF_THIS_SCALE if names.keys() <= inputs else _OF_THIS_SCALE
            yield where, what, f"run {listed([f'`{line}`' for line in lines])} before the loop", edits


def _first_then_all(texts: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """By its name, what stands for each tensor that is not standard: of the first one, and of all if there are more."""
    new = {name: text for name, text in texts.items() if text}
    yield from [dict(list(new.items())[:count]) for count in sorted({1, len(new)}) if new]


def _without_parts(code: _Code, statement: ast.stmt, where: Location) -> Iterator[tuple[str, str, tuple[Edit, ...]]]:
    """The statement with one part of an expression left out, or with a usual one put in."""
    for node in nodes(ast.expr, statement):
        for what, new in code.otherwise(node, is_made=isinstance(statement, ast.Assign)):
            old_text, new_text = ast.unparse(node), ast.unparse(new)
            if isinstance(statement, ast.Assign) and node is statement.value and new_text == ast.unparse(statement.targets[0]):
                yield what, f"remove `{ast.unparse(statement)}`", code.without(statement, where)
            else:
                yield what, f"replace `{old_text}` by `{new_text}`", exchanging(where, node, new)


def _without(code: _Code, statement: ast.stmt, where: Location) -> Iterator[tuple[str, str, tuple[Edit, ...]]]:
    """The block without the statement, where that is a call for its effect, or freezes a parameter."""
    is_setting = isinstance(statement, ast.Assign) and last_name(statement.targets[0]) == "requires_grad"
    if is_setting or (isinstance(statement, ast.Expr) and code.is_optional(statement.value)):
        text = ast.unparse(statement)
        yield f"with `{text}`", f"remove `{text}`", code.without(statement, where)


class _Code:
    """The statements that make a training: its outermost loop, the functions and classes that it uses, and the cells before."""

    def __init__(self, history: GradientHistory) -> None:
        self._history = history
        self._space: dict[str, Any] = vars(sys.modules["__main__"])
        self._cells = list(cells())
        self.trees = {cell.where.file: cell.tree for cell in self._cells}
        self._computed = self._of_the_output()
        loops = [node for tree in self.trees.values() for node in nodes(ast.stmt, tree) if isinstance(node, LOOPS)]
        self.has_copies = any(method(call) == "load_state_dict" for call in nodes(ast.Call, *loops))
        """Whether a loop loads a state, as into a target network: its loss need not fall."""
        where = history.line
        at_line = [(where.file, loop) for loop in loops_around(self.trees.get(where.file), where.line)] if where is not None else []
        self.loops = [(file, loop) for file, loop in at_line[:1] if loop in self.trees[file].body]
        """The outermost loop of the training, where it stands in no function."""

    def statements(self) -> Iterator[tuple[ast.stmt, Location]]:
        """Those of the functions first, from the last one on: it is next to the loss."""
        loops: list[tuple[str, ast.stmt]] = []
        line = self._history.line
        for file, tree in self.trees.items():
            if line is not None and line.file == file:
                loops += [(file, loop) for loop in loops_around(tree, line.line)[:1]]
        functions = self._functions([loop for _, loop in loops] or [*self.trees.values()])
        functions = [(file, node) for file, node in functions if node not in self._of_data_sets()]
        inner = sorted(functions, key=lambda place: place[1].name == "__init__")
        tops = [(file, node) for file, tree in self.trees.items() for node in reversed(tree.body) if not _is_scope(node)]
        for file, root in (*inner, *loops, *tops):
            simple = [node for node in nodes(ast.stmt, root) if not hasattr(node, "body")]
            for statement in sorted(simple, key=lambda node: -node.lineno):
                yield statement, location(file, statement.lineno, "<module>")

    def _of_data_sets(self) -> list[ast.stmt]:
        """What the classes of data sets define: without a part of it there is another task."""
        classes = [node for tree in self.trees.values() for node in nodes(ast.ClassDef, tree)]
        kinds = [(node, self._space.get(node.name)) for node in classes]
        return [part for node, kind in kinds if inspect.isclass(kind) and issubclass(kind, Dataset) for part in node.body]

    def _functions(self, roots: list[Any]) -> list[tuple[str, ast.FunctionDef]]:
        """Those whose names are read in these trees, or in one that is; of a class that is read, what is always called."""
        known = [(file, node) for file, tree in self.trees.items() for node in _defined(tree)]
        used: list[tuple[str, ast.FunctionDef]] = []
        read = {name for root in roots for name in _mentioned(root)}
        for _ in known:
            more = [place for place in known if place not in used and place[1].name in read | _ALWAYS_CALLED]
            if not more:
                break
            used += more
            read |= {name for _, node in more for name in _mentioned(node)}
        return used

    def _of_the_output(self) -> set[str]:
        """Variables of the cells that are computed from what a model returns."""
        models = {name for name, value in self._space.items() if isinstance(value, torch.nn.Module)}
        names = set[str]()
        assigned = [node for tree in self.trees.values() for node in nodes((ast.Assign, ast.AugAssign), tree)]
        for _ in range(3):
            for node in assigned:
                if names_in(node.value) & names or any(root_of(call.func) in models for call in nodes(ast.Call, node.value)):
                    names |= bound_names(node)
        return names | models

    def is_of_model(self, call: ast.Call) -> bool:
        """Whether it is a call of a module with weights."""
        module = self._module_of(call)
        return module is not None and next(module.parameters(), None) is not None

    def given_to_models(self) -> set[str]:
        """The texts of what any call of a model, or of a method of one, is given."""
        called_on = [call for tree in self.trees.values() for call in nodes(ast.Call, tree) if self.is_of_model(call)]
        models = {ast.unparse(call.func) for call in called_on}
        methods = [call for tree in self.trees.values() for call in nodes(ast.Call, tree) if dotted(call.func).rpartition(".")[0] in models]
        names = {ast.unparse(part) for call in (*called_on, *methods) for part in call.args}
        return {name for name in names if isinstance(self._space.get(name.partition("[")[0], 0), (torch.Tensor, int))}

    def is_far(self, name: str) -> bool:
        """Whether it is a tensor whose mean is several deviations from 0, or that deviates by far more than 1."""
        value = self._space.get(name)
        if not isinstance(value, torch.Tensor) or not value.is_floating_point() or value.numel() < 2:  # noqa: PLR2004 - of which none deviates
            return False
        with modes_aside(), torch.no_grad():
            mean, deviation = float(value.mean()), float(value.std())
        return abs(mean) > _DEVIATIONS * deviation > 0 or deviation > _WIDE

    def _module_of(self, call: ast.Call) -> torch.nn.Module | None:
        """The module that ``model(...)`` or ``model.forward(...)`` calls."""
        func = call.func
        module = self._value(func.value if isinstance(func, ast.Attribute) and func.attr == "forward" else func)
        return module if isinstance(module, torch.nn.Module) else None

    def is_of_loss(self, call: ast.Call) -> bool:
        """Whether it is one of a loss that compares numbers with numbers."""
        kind = self._value(call.func)
        return type(kind).__name__ in _LOSSES or getattr(kind, "__name__", "") in _OF_NUMBERS

    def standardized(self, part: ast.expr) -> str:
        """What stands for a variable with data of another scale; empty for all else."""
        value = self._space.get(part.id) if isinstance(part, ast.Name) else None
        if not isinstance(value, torch.Tensor) or not value.is_floating_point() or value.requires_grad or _is_standard(value):
            return ""
        with modes_aside(), torch.no_grad():
            if bool(((value == 0) | (value == 1)).all()):  # labels, or a mask
                return ""
            is_by_feature = value.dim() > 1 and len(value) > 1 and bool((value.std(0) > 0).all())
        return _STANDARDIZED.format(ast.unparse(part), "0" if is_by_feature else "")

    def without(self, statement: ast.stmt, where: Location) -> tuple[Edit, ...]:
        """The edit that removes a statement; none where others begin in its line."""
        source = Source(where, self.trees[where.file])
        is_only = any(getattr(node, "body", None) == [statement] for node in nodes(ast.stmt, source.tree))
        return (source.replacing(statement, "pass" if is_only else ""),) if source.is_alone(statement) else ()

    def is_optional(self, call: ast.expr) -> bool:
        """Whether it is a call without which a training still is one."""
        is_needed = root_of(call) in {self._history.name, "get_ipython"} or called(call) in _NEEDED or "seed" in called(call)
        return isinstance(call, ast.Call) and not is_needed

    def otherwise(self, node: ast.expr, *, is_made: bool) -> Iterator[tuple[str, ast.expr]]:
        """(what it is then without, or with what it was; what may stand in its place) of an expression."""
        is_of_output = bool(names_in(node) & self._computed) or root_of(node) == "self" or not is_made
        match node:
            case ast.BinOp(left, ast.Mult() | ast.Div() as sign, ast.Constant(float() | int() as factor)) if is_of_output:
                if not 1 / _FAR_FROM_1 < abs(factor) < _FAR_FROM_1:
                    yield f"with `{'*' if isinstance(sign, ast.Mult) else '/'} {factor:g}`", left
            case ast.BinOp(ast.Constant(float() | int() as factor), ast.Mult(), right) if is_of_output:
                if not 1 / _FAR_FROM_1 < abs(factor) < _FAR_FROM_1:
                    yield f"with `{factor:g} *`", right
            case ast.Call():
                kind = self._value(node.func)
                yield from self._made_otherwise(node, kind) if inspect.isclass(kind) else self.called_otherwise(node)
                if is_of_output and not inspect.isclass(kind):
                    yield from self._not_called(node, kind)

    def _made_otherwise(self, call: ast.Call, kind: type) -> Iterator[tuple[str, ast.expr]]:
        """A module, an optimizer or a loader with the default of its class for one option, or without a part."""
        known = inspect.signature(kind).parameters if issubclass(kind, torch.nn.Module) else {}
        for option in call.keywords:
            parameter = known.get(option.arg or "")
            is_needed = parameter is not None and parameter.default is inspect.Parameter.empty
            if isinstance(option.value, (ast.Constant, ast.Tuple)) and option.arg not in _NO_MATTER_OF_LEARNING and not is_needed:
                kept = [other for other in call.keywords if other is not option]
                yield f"with `{ast.unparse(option)}`", ast.Call(call.func, call.args, kept)
        for part in call.args if issubclass(kind, torch.nn.Sequential) else ():
            if isinstance(part, ast.Call) and _is_plain(self._value(part.func)):
                yield f"with `{ast.unparse(part)}`", ast.Call(call.func, [other for other in call.args if other is not part], call.keywords)
        if _is_plain(kind):
            yield f"with `{ast.unparse(call)}`", expression("torch.nn.Identity()" if "torch" in self._space else "nn.Identity()")
        if issubclass(kind, DataLoader) and not {"shuffle", "sampler", "batch_sampler"} & {option.arg for option in call.keywords}:
            shuffle = ast.keyword("shuffle", ast.Constant(value=True))
            yield f"without `{ast.unparse(shuffle)}`", ast.Call(call.func, call.args, [*call.keywords, shuffle])

    def called_otherwise(self, call: ast.Call) -> Iterator[tuple[str, ast.expr]]:
        """A model with standardized inputs: by the feature, or all alike."""
        is_plain = self._module_of(call) is not None and bool(call.args) and isinstance(call.args[0], (ast.Name, ast.Subscript))
        if is_plain and not _is_standard(self._space.get(root_of(call.args[0]))):
            for axis in ("0", ""):
                new = expression(_STANDARDIZED.format(as_atom(call.args[0]), axis))
                yield _INPUTS_OF_THIS_SCALE, ast.Call(call.func, [new, *call.args[1:]], call.keywords)

    def _not_called(self, call: ast.Call, kind: Any) -> Iterator[tuple[str, ast.expr]]:
        """The first argument of a function of torch's, or of a module without weights; the tensor of a method."""
        name = ast.unparse(call.func)
        if called(call) in _NEEDED or _DRAWS in called(call) or isinstance(kind, torch.nn.Module):
            return
        is_own = isinstance(call.func, ast.Attribute) and root_of(call.func) == "self"
        is_function = not is_own and getattr(kind, "__module__", "").startswith("torch")
        if call.args and (is_function or (is_own and self._is_plain_part(call.func))):
            if not isinstance(call.args[0], (ast.Constant, ast.Starred, ast.List, ast.Tuple)):
                yield f"with `{name}(...)`", copied(call.args[0])
        elif isinstance(call.func, ast.Attribute) and kind is None and hasattr(torch.Tensor, call.func.attr):
            yield f"with `.{call.func.attr}()`", copied(call.func.value)

    def _is_plain_part(self, part: ast.expr) -> bool:
        """Whether ``self.drop`` is a module without weights of its own."""
        assigned = [node for tree in self.trees.values() for node in nodes(ast.Assign, tree)]
        made = [node.value for node in assigned if last_name(node.targets[0]) == last_name(part)]
        return any(_is_plain(self._value(value.func)) for value in made if isinstance(value, ast.Call))

    def _value(self, node: ast.expr) -> Any:
        """What a dotted name of the notebook stands for, as far as modules go; None where that is not known."""
        if isinstance(node, ast.Name):
            return self._space.get(node.id)
        if isinstance(node, ast.Attribute):
            base = self._value(node.value)
            return getattr(base, node.attr, None) if isinstance(base, ModuleType) else None
        return None


def _is_standard(value: Any) -> bool:
    """Whether it is known to be a tensor of about mean 0 and deviation 1."""
    if not isinstance(value, torch.Tensor) or not value.is_floating_point() or value.numel() < 2:  # noqa: PLR2004 - of which none deviates
        return False
    with modes_aside(), torch.no_grad():
        mean, deviation = float(value.mean()), float(value.std())
    return abs(mean) < deviation and 1 / _NEAR_1 < deviation < _NEAR_1


def _is_plain(kind: Any) -> bool:
    """Whether it is a class of torch's modules that keep the shape, and without which a model still is one."""
    return inspect.isclass(kind) and kind.__module__.rpartition(".")[2] in {"activation", "dropout", "batchnorm", "normalization"}


def _is_scope(node: ast.stmt) -> bool:
    return isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom))


def _defined(tree: ast.Module) -> Iterator[ast.FunctionDef]:
    """The functions and methods of a cell, the last one first."""
    for node in reversed(tree.body):
        parts = reversed(node.body) if isinstance(node, ast.ClassDef) else [node]
        yield from (part for part in parts if isinstance(part, ast.FunctionDef))


def _mentioned(root: ast.AST) -> set[str]:
    return read_names(root) | {node.attr for node in nodes(ast.Attribute, root)}
