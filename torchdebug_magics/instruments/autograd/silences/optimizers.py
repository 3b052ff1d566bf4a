"""``stale_optimizer`` and ``not_in_optimizer``: the tensors that get gradients are not those that are updated."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import torch

from torchdebug_magics.format import listed
from torchdebug_magics.instruments.autograd.report import Finding
from torchdebug_magics.instruments.autograd.silences.named import assigned_at, names_of_tensors
from torchdebug_magics.probing.modules import live, live_modules, parts_of
from torchdebug_magics.probing.where import excerpt

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torchdebug_magics.instruments.autograd.course import Course
    from torchdebug_magics.instruments.autograd.recording.tape import Tape
    from torchdebug_magics.instruments.autograd.silences.watched import Watched

__all__ = ["wrong_tensors"]


def wrong_tensors(watched: Watched, tape: Tape, _course: Course) -> list[Finding]:
    """Where a step was made in the recorded steps."""
    optimizers = [one for seen in watched.steps if (one := seen.optimizer()) is not None]
    if not optimizers or not watched.backwards:
        return []
    stepped = {id(one): one for one in optimizers}
    called = {seen.key: seen.name for seen in watched.steps}
    held = {id(one) for optimizer in live(torch.optim.Optimizer) for group in optimizer.param_groups for one in group["params"]}
    reached = {id(leaf): leaf for seen in watched.backwards for ref in seen.leaves if (leaf := ref()) is not None}
    by_hand = watched.written_by_hand(tape)
    unowned = [
        leaf
        for key, leaf in reached.items()
        if key not in held and isinstance(leaf, torch.nn.Parameter) and watched.recorder.use(leaf).memory not in by_hand
    ]
    if not unowned:
        return []
    files = [op.line.file for op in reversed(tape.ops) if op.line is not None]
    for optimizer in stepped.values():
        idle = [one for group in optimizer.param_groups for one in group["params"] if id(one) not in reached and one.requires_grad]
        all_held = [one for group in optimizer.param_groups for one in group["params"]]
        if (
            idle
            and len(idle) == len(all_held)
            and not Counter(tuple(one.shape) for one in unowned) - Counter(tuple(one.shape) for one in idle)
        ):
            return [_stale(called[id(optimizer)], unowned, files)]
    updated = {id(one) for optimizer in stepped.values() for group in optimizer.param_groups for one in group["params"]}
    missing = {id(one): one for one in unowned}
    hidden = {id(one): name for name, one in _in_plain_containers(updated) if id(one) in missing}
    if hidden:
        return [_told(tuple(hidden.values()), next(iter(called.values())), files, is_hidden=True)]
    forgotten = [one for root in _trained_roots(updated, missing) for one in root.parameters() if id(one) in missing]
    return [_told(names_of_tensors(forgotten), next(iter(called.values())), files, is_hidden=False)] if forgotten else []


def _told(names: tuple[str, ...], optimizer: str, files: list[str], *, is_hidden: bool) -> Finding:
    where = assigned_at(optimizer, files)
    one = len(names) == 1
    told = listed(names)
    return Finding(
        kind="not_in_optimizer",
        raised=False,
        headline=f"{told} {'gets gradients' if one else 'get gradients'}, and no optimizer updates {'it' if one else 'them'}",
        location=where,
        parameters=names,
        tensor=names[0] if names else None,
        fix=f"keep the modules of `{names[0].partition('[')[0]}` in an `nn.ModuleList`, and make `{optimizer}` again"
        if is_hidden
        else f"make `{optimizer}` from all parameters: those of {told}, too",
        explanation="`parameters()` does not look into a plain list or dict" if is_hidden else "",
        excerpt=excerpt(where) if where is not None else (),
    )


def _roots() -> list[torch.nn.Module]:
    modules = list(live_modules())
    inner = parts_of(modules)
    return [module for module in modules if id(module) not in inner]


def _in_plain_containers(updated: set[int]) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """The parameters that a model which is trained holds in lists and dicts, where `parameters()` does not find them."""
    for root in _roots():
        if not any(id(one) in updated for one in root.parameters()):
            continue
        for path, module in root.named_modules():
            for attribute, value in list(vars(module).items()):
                if attribute.startswith("_") or type(value) not in {list, tuple, dict}:
                    continue
                for key, part in value.items() if isinstance(value, dict) else enumerate(value):
                    prefix = f"{path}.{attribute}[{key!r}]".lstrip(".")
                    if isinstance(part, torch.nn.Parameter):
                        yield prefix, part
                    elif isinstance(part, torch.nn.Module):
                        yield from ((f"{prefix}.{name}", one) for name, one in part.named_parameters())


def _trained_roots(updated: set[int], missing: Mapping[int, torch.nn.Parameter]) -> Iterator[torch.nn.Module]:
    """Models with a part of which the optimizer holds some and misses some. Whole parts that are missing are left out on purpose."""
    for root in _roots():
        parts: dict[str, set[bool]] = {}
        for name, one in root.named_parameters():
            if id(one) in updated or id(one) in missing:
                parts.setdefault(name.rpartition(".")[0], set()).add(id(one) in updated)
        if any(len(kinds) > 1 for kinds in parts.values()):
            yield root


def _stale(name: str, unowned: list[torch.nn.Parameter], files: list[str]) -> Finding:
    where = assigned_at(name, files)
    source = where.source if where is not None else f"{name} = ..."
    return Finding(
        kind="stale_optimizer",
        raised=False,
        headline=f"`{name}` updates other tensors than the model's: it was made before the model",
        location=where,
        parameters=names_of_tensors(unowned),
        tensor=name,
        fix=f"run `{source}` again after the model is made",
        explanation="the parameters of the model get gradients, and those that the optimizer holds get none",
        excerpt=excerpt(where) if where is not None else (),
    )
