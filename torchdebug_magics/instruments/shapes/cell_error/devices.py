"""Errors of devices: a module that stayed on the CPU, in a plain list or as nobody moved it; and a failed assertion of a GPU kernel.

Such an assertion is raised by whatever line comes next, and after it nothing on the GPU can be read.
"""

from __future__ import annotations

import ast
import traceback
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch

from torchdebug_magics.instruments.shapes.explain import edited, refusal
from torchdebug_magics.instruments.shapes.repair.failure_facts import module_calls
from torchdebug_magics.instruments.shapes.report import Failure, Fix
from torchdebug_magics.probing.dry_runs.inputs import named_tensors
from torchdebug_magics.probing.source.call_sites import attribute_assignment, value_of
from torchdebug_magics.probing.source.edited_source import exchanging, made_as
from torchdebug_magics.probing.source.syntax import as_atom, expression, nodes, statement_at, tree_of
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
            if not at:
                return _not_moved(error, call.module, [(frame, line) for frame, line in frames if is_user_code(frame.f_code)], *given)
            owner = running[at - 1].module
            held = ((name, value) for name, value in list(vars(owner).items()) if not name.startswith("_"))
            containers = ((name, value) for name, value in held if any(part is call.module for part in _modules_in(value)))
            return next((_unregistered(error, owner, name, value) for name, value in containers), None)
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
    module = "nn" if constructor.__globals__.get("nn") is torch.nn else "torch.nn"
    held = ast.unparse(statement.value)
    made = expression(f"{module}.{container}({'' if held in {'[]', '{}', 'list()', 'dict()'} else held})")
    where = location(constructor.__code__.co_filename, statement.lineno, "")
    return edited(error, sentence, exchanging(where, statement.value, made))


def _not_moved(error: BaseException, module: torch.nn.Module, user: list[tuple[FrameType, int]], device: torch.device) -> Failure | None:
    """The module moved where it is made; where that is not known, where it is called."""
    frame, line = user[-1] if user else (None, 0)
    file = "" if frame is None else frame.f_code.co_filename
    statement = statement_at(tree_of(file), line) if frame is not None else None
    call = next((node for node in nodes(ast.Call, statement) if frame is not None and value_of(node.func, frame) is module), None)
    if call is None or frame is None:
        return None
    name, names = ast.unparse(call.func), {**frame.f_globals, **frame.f_locals}
    variables = [name for name, value in names.items() if isinstance(value, torch.device) and value.type == device.type]
    moved = f"to({next(iter(variables), repr(str(device)))})"
    made = made_as(file, name) if isinstance(call.func, ast.Name) and frame.f_globals.get(name) is module else []
    where, old = made[0] if made else (location(file, line, ""), call)
    new = expression(f"{as_atom(old)}.{moved}") if made else ast.Call(expression(f"{name}.{moved}"), call.args, call.keywords)
    return edited(error, f"`{name}` is on the CPU, and what it is given is on {device}", exchanging(where, old, new))
