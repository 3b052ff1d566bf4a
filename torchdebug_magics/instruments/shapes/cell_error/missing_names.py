"""A name that is not there: ``fc = ...`` in a constructor for ``self.fc``, another key, a module's own name, one ``enumerate`` too many."""

from __future__ import annotations

import ast
import difflib
import inspect
import re
import traceback
from collections.abc import Mapping
from dataclasses import replace
from types import FrameType, FunctionType, ModuleType
from typing import Any

import torch

from torchdebug_magics.format import listed
from torchdebug_magics.instruments.shapes.cell_error.changes import near_names
from torchdebug_magics.instruments.shapes.cell_error.program_slice import UNKNOWN, value_named
from torchdebug_magics.instruments.shapes.explain import edited
from torchdebug_magics.instruments.shapes.report import Failure
from torchdebug_magics.probing.source.call_sites import function_node
from torchdebug_magics.probing.source.edited_source import Source, exchanging
from torchdebug_magics.probing.source.syntax import (
    SIMPLE,
    called,
    enclosing,
    expression,
    nodes,
    own_nodes,
    read_names,
    statement_at,
    tree_of,
)
from torchdebug_magics.probing.source.user_code import is_user_code, location
from torchdebug_magics.report import Edit, Location

_ALIKE = 0.6
"""Likeness of two keys of which one may be meant by the other."""
_FILE = re.compile(r"\.(?:pt|pth|bin|ckpt|tar|pkl|safetensors)$")
_UNEXPECTED = re.compile(r"got an unexpected keyword argument '(\w+)'")
_NO_OPTIMIZER = re.compile(r"(\w+) is not an Optimizer")
_TOO_FEW = re.compile(r"not enough values to unpack \(expected \d+, got 2\)")


def missing_name(error: BaseException) -> Failure | None:
    """What has not got the name, and the one that is meant; None where that is not why it raised."""
    frames = [(frame, line) for frame, line in traceback.walk_tb(error.__traceback__) if is_user_code(frame.f_code)]
    if not frames or type(error) not in {AttributeError, KeyError, TypeError, ValueError}:
        return None
    frame, line = frames[-1]
    where = location(frame.f_code.co_filename, line, frame.f_code.co_name)
    if isinstance(error, AttributeError):
        return _local_in_constructor(error)
    if isinstance(error, KeyError):
        return _other_key(error, frame, where)
    if str(error) == "'module' object is not callable":
        return _of_module(error, frame, where)
    return _other_argument(error, frame, where) or _unpacked(error, frame, where)


def _local_in_constructor(error: AttributeError) -> Failure | None:
    """An attribute that the constructor gives to a variable of its own."""
    raising = list(traceback.walk_tb(error.__traceback__))[-1][0].f_locals
    owner, name = (error.obj, error.name) if error.name else (raising.get("self"), raising.get("name"))
    constructor = getattr(type(owner), "__init__", None)
    if not isinstance(constructor, FunctionType) or not is_user_code(constructor.__code__) or not isinstance(name, str):
        return None
    function, tree = function_node(constructor.__code__), tree_of(constructor.__code__.co_filename)
    if function is None or tree is None or f"'{name}'" not in str(error):
        return None
    statements = [node for node in own_nodes(function) if isinstance(node, SIMPLE)]
    made = [node for node in statements if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name]
    first = made[0] if len(made) == 1 and made[0] in getattr(function, "body", ()) and isinstance(made[0].value, ast.Call) else None
    others = {part.attr for part in nodes(ast.Attribute, tree) if isinstance(part.ctx, ast.Store)}
    alike = difflib.get_close_matches(name, [*vars(owner), *getattr(owner, "_modules", ())], 1, _ALIKE)
    begun = [node.lineno for node in statements if "super()" in ast.unparse(node)]
    is_own_access = any("__getattr__" in vars(kind) for kind in type(owner).__mro__ if kind.__module__ == type(owner).__module__)
    if first is None or name in others or alike or is_own_access or any(line > first.lineno for line in begun):
        return None  # what another method sets, or another name that is meant
    own = constructor.__code__.co_varnames[0]
    source = Source(location(constructor.__code__.co_filename, first.lineno, "__init__"), tree)
    is_read = any(node.id == name and isinstance(node.ctx, ast.Load) for node in nodes(ast.Name, function))
    text = source.text(first).replace(name, f"{own}.{name}", 1)
    edits = [source.after(first, f"{own}.{name} = {name}") if is_read else source.replacing(first, text)]
    return edited(error, f"`{name}` is a variable of the constructor, and no attribute of `{type(owner).__name__}`", edits)


def _other_key(error: KeyError, frame: FrameType, where: Location) -> Failure | None:
    """A key of a mapping: that under which the state of the model or optimizer is that loads it."""
    key, names = error.args[0] if error.args else None, {**frame.f_globals, **frame.f_locals}
    for node in nodes(ast.Subscript, statement_at(tree_of(where.file), where.line)):
        mapping = value_named(node.value, names) if isinstance(node.slice, ast.Constant) and node.slice.value == key else UNKNOWN
        if (
            not isinstance(mapping, dict)
            or not mapping
            or not isinstance(node.ctx, ast.Load)
            or not all(isinstance(each, str) for each in (key, *mapping))
        ):
            continue
        loads = (call for call in nodes(ast.Call, statement_at(tree_of(where.file), where.line)) if called(call) == "load_state_dict")
        receivers = [value_named(call.func.value, names) for call in loads if isinstance(call.func, ast.Attribute)]
        known = [set(each.state_dict()) for each in receivers if isinstance(each, (torch.nn.Module, torch.optim.Optimizer))]
        meant = [each for each, value in mapping.items() if isinstance(value, Mapping) and value and set(value) in known]
        keys = [f"`{each!r}`" for each in mapping]
        sentence = f"`{ast.unparse(node.value)}` has no key `{key!r}`: it has {listed(keys)}"
        new = ast.Subscript(node.value, ast.Constant(meant[0]), ast.Load()) if len(meant) == 1 else None
        return replace(edited(error, sentence, exchanging(where, node, new)), location=where)
    return None


def _of_module(error: BaseException, frame: FrameType, where: Location) -> Failure | None:
    """A module that is called, and has a function or class of its own name."""
    names = {**frame.f_globals, **frame.f_locals}
    for call in nodes(ast.Call, statement_at(tree_of(where.file), where.line)):
        module = value_named(call.func, names)
        name = module.__name__.rpartition(".")[2] if isinstance(module, ModuleType) else ""
        if isinstance(module, ModuleType):
            code = ast.unparse(call.func)
            is_there = callable(vars(module).get(name))
            new = ast.Call(expression(f"{code}.{name}"), call.args, call.keywords) if is_there else None
            what = f": `{code}.{name}` can be called" if is_there else ""
            return edited(error, f"`{code}` is a module, which cannot be called{what}", exchanging(where, call, new))
    return None


def _other_argument(error: BaseException, frame: FrameType, where: Location) -> Failure | None:
    """An option by its nearest name, an optimizer where a model was given, a checkpoint by its file."""
    names, text = {**frame.f_globals, **frame.f_locals}, str(error)
    option, given = _UNEXPECTED.search(text), _NO_OPTIMIZER.fullmatch(text)
    for call in nodes(ast.Call, statement_at(tree_of(where.file), where.line)):
        function = value_named(call.func, names)
        if option is not None and callable(function) and any(each.arg == option[1] for each in call.keywords):
            initials = "".join(part[:1] for part in option[1].split("_"))  # as `lr` for `learning_rate`
            known = _options(function)
            near = [initials] if len(initials) > 1 and initials in known else near_names(option[1], known)
            alike = [each for each in near if all(each != other.arg for other in call.keywords)]
            if len(alike) > 1 or not (alike or _is_of_another(option[1], function)):
                return None
            others = [each for each in call.keywords if each.arg != option[1]]
            keywords = [ast.keyword(alike[0], each.value) if each.arg == option[1] else each for each in call.keywords] if alike else others
            new = ast.Call(call.func, call.args, keywords)
            what = f"`{ast.unparse(call.func)}` has no option `{option[1]}`" + (f": `{alike[0]}` is near" if alike else "")
            return edited(error, what, exchanging(where, call, new))
        if given is not None and call.args and type(value_named(call.args[0], names)).__name__ == given[1]:
            optimizers = [name for name, value in names.items() if isinstance(value, torch.optim.Optimizer) and not name.startswith("_")]
            stepped = ast.Call(call.func, [expression(optimizers[0]), *call.args[1:]], call.keywords) if len(optimizers) == 1 else None
            what = f"`{called(call)}` takes an optimizer, and gets `{ast.unparse(call.args[0])}`, a {given[1]}"
            return edited(error, what, exchanging(where, call, stepped))
        is_of_text = "Expected state_dict to be dict-like, got <class 'str'>" in text and called(call) == "load_state_dict"
        value = call.args[0] if is_of_text and len(call.args) == 1 else None
        if value is not None and _FILE.search(str(value.value if isinstance(value, ast.Constant) else value_named(value, names))):
            file = ast.unparse(value)
            edits = exchanging(where, call, ast.Call(call.func, [expression(f"torch.load({file})")], call.keywords))
            return edited(error, f"`{file}` is the name of a file, which `torch.load` reads", edits)
    return None


def _is_of_another(option: str, function: Any) -> bool:
    """Whether it is an option that another optimizer has, or that schedulers had before PyTorch 2.7."""
    optimizers = [kind for kind in vars(torch.optim).values() if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)]
    is_scheduler = isinstance(function, type) and issubclass(function, torch.optim.lr_scheduler.LRScheduler)
    return (function in optimizers and any(option in _options(kind) for kind in optimizers)) or (is_scheduler and option == "verbose")


def _options(function: Any) -> list[str]:
    """What a call may name; of a module, what its forward takes."""
    signed = function.forward if isinstance(function, torch.nn.Module) else function
    try:
        parameters = inspect.signature(signed).parameters.values()
    except (TypeError, ValueError):  # of a function in C
        return []
    return [each.name for each in parameters if each.kind in {each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY}]


def _unpacked(error: BaseException, frame: FrameType, where: Location) -> Failure | None:
    """The number that `enumerate` puts before each item, in the place of the first part of that."""
    names = {**frame.f_globals, **frame.f_locals}
    for loop in [node for node in enclosing(tree_of(where.file), where.line) if isinstance(node, ast.For)]:
        call, target = loop.iter, loop.target
        is_number = type(value_named(call, names)) is int or called(call) == "len"
        if "'int' object is not iterable" in str(error) and loop.lineno == where.line and is_number and _counts(loop):
            sentence = f"`{ast.unparse(call)}` is a number, and a loop goes through items"
            return edited(error, sentence, _with_head(where, loop, ast.unparse(target), f"range({ast.unparse(call)})"))
        if not isinstance(target, ast.Tuple) or called(call) != "enumerate" or not isinstance(call, ast.Call) or not call.args:
            continue
        at = location(where.file, loop.lineno, where.function)
        item, parts = ast.unparse(call.args[0]), target.elts
        if loop.lineno == where.line and _TOO_FEW.search(str(error)):
            new = f"({', '.join(map(ast.unparse, parts[1:]))})"
            sentence = f"`enumerate({item})` gives a number and an item: put its parts in parentheses"
            return edited(error, sentence, _with_head(at, loop, f"{ast.unparse(parts[0])}, {new}", ast.unparse(call)))
        first, second = [value_named(part, names) for part in parts[:2]]
        reads = read_names(failing) if (failing := statement_at(tree_of(where.file), where.line)) is not None else set()
        uses = [node for node in nodes(ast.Name, *loop.body) if node.id == ast.unparse(parts[0])]
        if "must be Tensor, not int" not in str(error) or ast.unparse(parts[0]) not in reads or len(uses) > 1 or _is_taken_apart(loop):
            continue
        is_item = isinstance(second, (list, tuple)) and len(second) == len(parts) == 2 and type(first) is int  # noqa: PLR2004 - number and item
        if is_item and isinstance(error, TypeError):
            sentence = f"`{ast.unparse(parts[0])}` is the number from `enumerate`, and no part of an item"
            return edited(error, sentence, _with_head(at, loop, ast.unparse(target).strip("()"), item))
    return None


def _counts(loop: ast.For) -> bool:
    """Whether its variable can be a number: it is a single name, and nothing calls it or takes an item or attribute of it."""
    name = loop.target.id if isinstance(loop.target, ast.Name) else ""
    uses = [node.func for node in nodes(ast.Call, *loop.body)] + [node.value for node in nodes((ast.Attribute, ast.Subscript), *loop.body)]
    return bool(name) and not any(isinstance(use, ast.Name) and use.id == name for use in uses)


def _is_taken_apart(loop: ast.For) -> bool:
    """Whether the body takes items of the second variable, or gives its parts names."""
    second = ast.unparse(loop.target.elts[1]) if isinstance(loop.target, ast.Tuple) else ""
    subscripts = [node.value for node in nodes(ast.Subscript, *loop.body)]
    unpacked = [node.value for node in nodes(ast.Assign, *loop.body) if isinstance(node.targets[0], ast.Tuple)]
    return any(ast.unparse(node) == second for node in (*subscripts, *unpacked))


def _with_head(where: Location, loop: ast.For, target: str, items: str) -> tuple[Edit, ...]:
    """The first line of the loop."""
    tree = tree_of(where.file)
    source = None if tree is None else Source(where, tree)
    return () if source is None or loop.body[0].lineno == loop.lineno else (source.replacing(loop, f"for {target} in {items}:"),)
