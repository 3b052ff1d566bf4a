"""A checkpoint of a model of other sizes: which module has them, and how to make it."""

from __future__ import annotations

import itertools
import traceback
from collections.abc import Mapping
from types import FrameType
from typing import Any

import torch

from torchdebug_magics.format import listed, shape
from torchdebug_magics.instruments.shapes.explain import refusal
from torchdebug_magics.instruments.shapes.repair.rebuild import arguments, made_on_meta, rebuilt_module
from torchdebug_magics.instruments.shapes.report import Failure, Fix
from torchdebug_magics.probing.source.user_code import is_user_code

_SHOWN = 2
_MOST_CHANGED = 2
"""Arguments of a module that may have been others when the checkpoint was written."""
Sizes = tuple[int, ...]


def refused_checkpoint(error: BaseException) -> Failure | None:
    """Where `load_state_dict` refused sizes; None elsewhere."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    loading = next((frame for frame in frames if frame.f_code is torch.nn.Module.load_state_dict.__code__), None)
    if loading is None or "size mismatch for" not in str(error):
        return None
    model, held = loading.f_locals.get("self"), loading.f_locals.get("state_dict")
    if not isinstance(model, torch.nn.Module) or not isinstance(held, Mapping):
        return None
    own = {name: tuple(one.shape) for name, one in model.state_dict().items() if isinstance(one, torch.Tensor)}
    given = {name: tuple(one.shape) for name, one in held.items() if isinstance(one, torch.Tensor)}
    wrong = [name for name in own if name in given and own[name] != given[name]]
    if not wrong:
        return None
    told = [f"`{name}` is {shape(own[name])} in the model, {shape(given[name])} in the checkpoint" for name in wrong[:_SHOWN]]
    more = f", and {len(wrong) - _SHOWN} more differ" if len(wrong) > _SHOWN else ""
    sizes, names = (own[wrong[0]], given[wrong[0]]), ("model", "checkpoint")
    return refusal(error, f"{listed(told)}{more}", sizes=sizes, names=names, fixes=_fixes(model, given, wrong, frames))


def _fixes(model: torch.nn.Module, given: Mapping[str, Sizes], wrong: list[str], frames: list[FrameType]) -> list[Fix]:
    """The parts made as the checkpoint has them, where that is known of all."""
    name = _name_of(model, frames)
    lines: list[str] = []
    for path in dict.fromkeys(one.rpartition(".")[0] for one in wrong):
        code = _remade(model.get_submodule(path), path, given)
        if not code:
            return []
        where, _, made = code.partition(" = ")
        part = "" if not path else where.removeprefix("model") if where.startswith("model[") else f".{where}"
        lines.append(f"{name}{part} = {made}" if name else code)
    return [Fix(code="\n".join(lines), verified=True, why="before the checkpoint is loaded", edits=len(lines))]


def _name_of(model: torch.nn.Module, frames: list[FrameType]) -> str:
    names = (name for frame in reversed(frames) if is_user_code(frame.f_code) for name, one in frame.f_locals.items() if one is model)
    return next(names, "")


def _remade(module: torch.nn.Module, path: str, given: Mapping[str, Sizes]) -> str:
    """What to type for a part whose tensors are to have the sizes in the checkpoint; empty where that is not known."""
    prefix = f"{path}." if path else ""
    wanted = {
        name: given.get(f"{prefix}{name}") for name, _ in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
    }
    found = arguments(module)
    if found is None or None in wanted.values():
        return ""
    kind, made_with = found
    numbers = [name for name, value in made_with.items() if type(value) is int and value > 0]
    sizes = sorted({size for one in wanted.values() if one for size in one})
    for many in range(1, _MOST_CHANGED + 1):
        for names in itertools.combinations(numbers, many):
            for values in itertools.product(sizes, repeat=many):
                changes = dict(zip(names, values, strict=True))
                if _has_sizes(kind, {**made_with, **changes}, wanted):
                    return "".join(edit.code for edit in rebuilt_module(module, path, **dict[str, Any](changes)))
    return ""


def _has_sizes(kind: type[torch.nn.Module], made_with: Mapping[str, Any], wanted: Mapping[str, Sizes | None]) -> bool:
    new = made_on_meta(kind, made_with)
    tensors = (*new.named_parameters(recurse=False), *new.named_buffers(recurse=False)) if new is not None else ()
    return new is not None and {name: tuple(one.shape) for name, one in tensors} == wanted
