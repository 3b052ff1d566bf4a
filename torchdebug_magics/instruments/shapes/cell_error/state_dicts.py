"""A checkpoint of a model of other sizes: which module has them, and how to make it."""

from __future__ import annotations

import ast
import itertools
import traceback
from collections.abc import Mapping
from types import FrameType
from typing import Any

import torch

from torchdebug_magics.format import listed, shape
from torchdebug_magics.instruments.shapes.explain import refusal
from torchdebug_magics.instruments.shapes.repair.fix_search import OUR_NAME
from torchdebug_magics.instruments.shapes.repair.rebuild import arguments, made_on_meta, rebuilt_module
from torchdebug_magics.instruments.shapes.report import Failure, Fix
from torchdebug_magics.probing.source.edited_source import calls, exchanging
from torchdebug_magics.probing.source.syntax import called, dotted, expression, nodes, statement_at, tree_of
from torchdebug_magics.probing.source.user_code import is_user_code, location

_SHOWN = 2
_MOST_CHANGED = 2
"""Arguments of a module that may have been others when the checkpoint was written."""
Sizes = tuple[int, ...]


def refused_checkpoint(error: BaseException) -> Failure | None:
    """Where `load_state_dict` refused sizes; None elsewhere."""
    steps = list(traceback.walk_tb(error.__traceback__))
    frames = [frame for frame, _ in steps]
    loading = next((frame for frame in frames if frame.f_code is torch.nn.Module.load_state_dict.__code__), None)
    if loading is None or "size mismatch for" not in str(error):
        return None
    model, checkpoint = loading.f_locals.get("self"), loading.f_locals.get("state_dict")
    if not isinstance(model, torch.nn.Module) or not isinstance(checkpoint, Mapping):
        return None
    own = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items() if isinstance(tensor, torch.Tensor)}
    given = {name: tuple(tensor.shape) for name, tensor in checkpoint.items() if isinstance(tensor, torch.Tensor)}
    wrong = [name for name in own if name in given and own[name] != given[name]]
    if not wrong:
        return None
    mismatches = [f"`{name}` is {shape(own[name])} in the model, {shape(given[name])} in the checkpoint" for name in wrong[:_SHOWN]]
    more = f", and {len(wrong) - _SHOWN} more differ" if len(wrong) > _SHOWN else ""
    sizes, names = (own[wrong[0]], given[wrong[0]]), ("model", "checkpoint")
    files = dict.fromkeys(frame.f_code.co_filename for frame in frames if is_user_code(frame.f_code))
    trains = any(called(call) == "backward" for file in files for _, call in calls(file))  # else a model is to be used as it was saved
    fixes = [*_without_head(own, given, wrong, steps), *_fixes(model, given, wrong, frames)]
    fixes.sort(key=lambda fix: trains != bool(fix.changes))
    return refusal(error, f"{listed(mismatches)}{more}", sizes=sizes, names=names, fixes=fixes)


def _without_head(own: Mapping[str, Sizes], given: Mapping[str, Sizes], wrong: list[str], steps: list[tuple[FrameType, int]]) -> list[Fix]:
    """The checkpoint without its last layer, where that has other outputs alone: as for a model that is trained on other classes."""
    paths = {name.rpartition(".")[0] for name in wrong}
    head = list(own)[-1].rpartition(".")[0]
    has_inputs = all(own[name][1:] == given[name][1:] for name in wrong)
    frame, line = next(((frame, line) for frame, line in reversed(steps) if is_user_code(frame.f_code)), (None, 0))
    if paths != {head} or not head or not has_inputs or frame is None:
        return []
    where = location(frame.f_code.co_filename, line, frame.f_code.co_name)
    loads = [call for call in nodes(ast.Call, statement_at(tree_of(where.file), line)) if called(call) == "load_state_dict" and call.args]
    if len(loads) != 1:
        return []
    rest = expression(f"{{key: value for key, value in {ast.unparse(loads[0].args[0])}.items() if not key.startswith({head + '.'!r})}}")
    others = [option for option in loads[0].keywords if option.arg != "strict"]
    new = ast.Call(loads[0].func, [rest, *loads[0].args[2:]], [*others, ast.keyword("strict", ast.Constant(value=False))])
    why = f"`{head}` begins anew, for the outputs of this model: load the rest"
    return [Fix(code=ast.unparse(new), verified=True, why=why, changes=exchanging(where, loads[0], new))]


def _fixes(model: torch.nn.Module, given: Mapping[str, Sizes], wrong: list[str], frames: list[FrameType]) -> list[Fix]:
    """The parts made as the checkpoint has them, where that is known of all; beside it, the user's call that made the model."""
    own = [frame.f_locals for frame in reversed(frames) if is_user_code(frame.f_code)]
    name = next((name for names in own for name, value in names.items() if value is model), "")
    lines: list[str] = []
    changed: list[tuple[int, int]] = []
    for path in dict.fromkeys(key.rpartition(".")[0] for key in wrong):
        remade = _remade(model.get_submodule(path), path, given)
        if remade is None:
            return []
        code, changes = remade
        is_whole = not path or code.startswith("model[")
        lines.append(code if not name else OUR_NAME.sub(name, code) if is_whole else f"{name}.{code}")
        changed += changes
    made = _made_with(model, changed, frames)
    beside = f"before the checkpoint is loaded; or `{made}` where the model is made" if made else "before the checkpoint is loaded"
    return [Fix(code="\n".join(lines), verified=True, why=beside, edits=len(lines))]


def _remade(module: torch.nn.Module, path: str, given: Mapping[str, Sizes]) -> tuple[str, list[tuple[int, int]]] | None:
    """(what to type, each number that changes and the new one) for a part whose tensors are to have the sizes in the checkpoint."""
    prefix = f"{path}." if path else ""
    own = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
    wanted = {name: given.get(f"{prefix}{name}") for name, _ in own}
    known = arguments(module)
    if known is None or None in wanted.values():
        return None
    kind, made_with = known
    numbers = [name for name, value in made_with.items() if type(value) is int and value > 0]
    sizes = sorted({size for lengths in wanted.values() if lengths for size in lengths})
    for many in range(1, _MOST_CHANGED + 1):
        for names in itertools.combinations(numbers, many):
            for values in itertools.product(sizes, repeat=many):
                changes = dict(zip(names, values, strict=True))
                new = made_on_meta(kind, {**made_with, **changes})
                tensors = (*new.named_parameters(recurse=False), *new.named_buffers(recurse=False)) if new is not None else ()
                if new is not None and {name: tuple(tensor.shape) for name, tensor in tensors} == wanted:
                    edits = rebuilt_module(module, path, **dict[str, Any](changes))
                    pairs = [(made_with[name], value) for name, value in changes.items()]
                    return (edits[0].code, pairs) if edits else None
    return None


def _made_with(model: torch.nn.Module, changed: list[tuple[int, int]], frames: list[FrameType]) -> str:
    """The user's call of the model's class with the one number that differs, where there is one such call and one such number."""
    if len(set(changed)) != 1:
        return ""
    old, new = changed[0]
    files = dict.fromkeys(frame.f_code.co_filename for frame in frames if is_user_code(frame.f_code))
    name = type(model).__name__
    made = {ast.unparse(node): node for node in nodes(ast.Call, *map(tree_of, files)) if dotted(node.func) == name}
    if len(made) != 1:
        return ""
    call = next(iter(made.values()))
    arguments = (*call.args, *(word.value for word in call.keywords))
    numbers = [argument for argument in arguments if isinstance(argument, ast.Constant) and argument.value == old]
    return ast.unparse(call).replace(str(old), str(new), 1) if len(numbers) == 1 else ""
