"""Errors of devices: a module that stayed on the CPU, in a plain list or as nobody moved it; and a failed assertion of a GPU kernel.

Such an assertion is raised by whatever line comes next, and after it nothing on the GPU can be read.
"""

from __future__ import annotations

import ast
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import FrameType
from typing import Any

import torch

from torchdebug_magics.instruments.shapes.explain import refusal
from torchdebug_magics.instruments.shapes.repair.failure_facts import module_calls
from torchdebug_magics.instruments.shapes.report import Failure, Fix
from torchdebug_magics.probing.dry_runs.inputs import named_tensors
from torchdebug_magics.probing.source.call_sites import attribute_assignment, value_of
from torchdebug_magics.probing.source.edited_source import Source, cells, same
from torchdebug_magics.probing.source.syntax import as_atom, dotted, exchanged, expression, nodes, targets_of, tree_of
from torchdebug_magics.probing.source.user_code import is_user_code, location

_CPU = torch.device("cpu")
_SENTENCE = "In this line or one before it, the GPU met an index or a class out of range; it answers nothing more in this process"
_ON_CPU = "restart the kernel and run the cell with the model and its data on the CPU: `%torchdebug` then names the tensor and its values"
_DEEPEST = 3
"""Containers in containers."""


def gpu_assertion(error: BaseException) -> Failure | None:
    """What is certain; None for any other error."""
    if "device-side assert" not in str(error):
        return None
    return refusal(error, _SENTENCE, fixes=[Fix(code=_ON_CPU, verified=False)])


def left_on_cpu(error: BaseException) -> Failure | None:
    """The module, and the statement that moves it, alone or with its model; None where the module that failed is where it should be."""
    if "device" not in str(error):
        return None
    frames = list(traceback.walk_tb(error.__traceback__))
    running = module_calls([frame for frame, _ in frames])
    for at, call in enumerate(running):
        own = {tensor.device for tensor in (*call.module.parameters(), *call.module.buffers())}
        given = {tensor.device for _, tensor in named_tensors((call.args, dict(call.kwargs)))} - {_CPU, torch.device("meta")}
        if own == {_CPU} and len(given) == 1:
            user = [(frame, line) for frame, line in frames if is_user_code(frame.f_code)]
            return _not_moved(error, call.module, user, *given) if not at else _in_container(error, call.module, running[at - 1].module)
    return None


def _in_container(error: BaseException, module: torch.nn.Module, owner: torch.nn.Module) -> Failure | None:
    """The plain container of `owner` that holds the module."""
    for attribute, value in list(vars(owner).items()):
        if not attribute.startswith("_") and any(part is module for part in _modules_in(value)):
            return _unregistered(error, owner, attribute, value)
    return None


def _modules_in(value: Any, depth: int = 0) -> Iterator[torch.nn.Module]:
    """Those in a plain container; each with its parts."""
    if isinstance(value, torch.nn.Module) and depth:
        yield from value.modules()
    elif type(value) in {list, tuple, dict} and depth < _DEEPEST:
        for part in value.values() if isinstance(value, dict) else value:
            yield from _modules_in(part, depth + 1)


def _unregistered(error: BaseException, owner: torch.nn.Module, attribute: str, value: Any) -> Failure:
    """The container as one that registers what it holds."""
    kind = type(value).__name__
    sentence = f"`{type(owner).__name__}.{attribute}` is a plain {kind}: moving the model leaves the modules in it on the CPU"
    container = "ModuleDict" if kind == "dict" else "ModuleList"
    statement = attribute_assignment(type(owner).__init__, attribute)
    if statement is None:
        return refusal(error, sentence, fixes=[Fix(code=f"keep its modules in an `nn.{container}`", verified=False)])
    constructor = type(owner).__init__
    names = constructor.__globals__
    module = "nn" if names.get("nn") is torch.nn else "torch.nn"
    value_text = ast.unparse(statement.value)
    made = f"{module}.{container}({'' if value_text in {'[]', '{}', 'list()', 'dict()'} else value_text})"
    return _replacing(error, sentence, constructor.__code__.co_filename, statement, made)


def _not_moved(error: BaseException, module: torch.nn.Module, user: list[tuple[FrameType, int]], device: torch.device) -> Failure | None:
    """The module moved where it is made; where that is not known, where it is called."""
    if not user:
        return None
    frame, line = user[-1]
    file = frame.f_code.co_filename
    statement = Source(location(file, line, frame.f_code.co_name), tree).statement if (tree := tree_of(file)) is not None else None
    calls = [node for node in nodes(ast.Call, statement) if value_of(node.func, frame) is module]
    if not calls or statement is None:
        return None
    name = ast.unparse(calls[0].func)
    sentence = f"`{name}` is on the CPU, and what it is given is on {device}"
    place = _named_device({**frame.f_globals, **frame.f_locals}, device)
    if isinstance(calls[0].func, ast.Name) and frame.f_globals.get(name) is module:
        for source in cells():
            made = [node for node in source.tree.body if name in map(dotted, targets_of(node))]
            if made and isinstance(made[-1], ast.Assign) and len(made[-1].targets) == 1 and isinstance(made[-1].value, ast.Call):
                return _replacing(error, sentence, source.where.file, made[-1], f"{as_atom(made[-1].value)}.to({place})")
    moved = ast.Call(expression(f"{name}.to({place})"), calls[0].args, calls[0].keywords)
    new = exchanged(statement, lambda node: moved if isinstance(node, ast.Call) and same(node, calls[0]) else None)
    return _edited(error, sentence, file, statement, ast.unparse(new))


def _named_device(names: Mapping[str, Any], device: torch.device) -> str:
    """The user's variable for it, else its name as a string."""
    same = (name for name, value in names.items() if isinstance(value, torch.device) and value.type == device.type)
    return next(same, repr(str(device)))


def _replacing(error: BaseException, sentence: str, file: str, statement: ast.Assign, value: str) -> Failure:
    return _edited(error, sentence, file, statement, f"{ast.unparse(statement.targets[0])} = {value}")


def _edited(error: BaseException, sentence: str, file: str, statement: ast.stmt, text: str) -> Failure:
    where = location(file, statement.lineno, "")
    tree = tree_of(file)
    edits = () if tree is None else (Source(where, tree).replacing(statement, text),)
    failure = refusal(error, sentence, fixes=[Fix(code=text, verified=False)])
    return replace(failure, location=where, underlined=None, edits=edits, fix_state="compiles" if edits else "advice")
