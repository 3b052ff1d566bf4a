"""What keeps a model from being shrunk, and what the user should know of the layers that went."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from torchdebug_magics.format import listed, plural, shape
from torchdebug_magics.probing.shards import is_shard
from torchdebug_magics.probing.where import is_user_code, location

if TYPE_CHECKING:
    from torch import nn

    from torchdebug_magics.instruments.shrink.stacks import Stack
    from torchdebug_magics.probing.dry_runs.inputs import Inputs

__all__ = ["failure", "has_other_outputs", "notes_on", "sharded_by"]

_SHARDED = {"DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule", "DeepSpeedEngine"}
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def sharded_by(model: nn.Module) -> str | None:
    """What has taken account of every parameter, the class of a wrapper or a `DTensor` in the place of each; or None."""
    names = (kind.__name__ for part in model.modules() for kind in type(part).__mro__)
    found = next((name for name in names if name in _SHARDED), None)
    return found or ("a mesh of ranks" if any(map(is_shard, model.parameters())) else None)


def failure(error: Exception | None) -> tuple[str, str]:
    """(the error, the line of the user's code that raised it), as text."""
    if error is None:
        return "", ""
    where, trace = "", error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if is_user_code(code):
            where = str(location(code.co_filename, trace.tb_lineno, code.co_name))
        trace = trace.tb_next
    first = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {first[:200]}" if first else type(error).__name__, where


Outputs = Sequence[tuple[str, tuple[int, ...]]]


def has_other_outputs(before: Outputs, after: Outputs, lengths: Iterable[tuple[int, int]]) -> str:
    """Why these outputs are not those of the same model with fewer layers: a sentence, or nothing.

    `lengths`: how many layers each stack had and has. An output for each layer, such as hidden states, has become as many fewer.
    """
    large, small = _by_name(before), _by_name(after)
    for name, shapes in large.items():
        now, said = small.get(name, []), f"output {name}" if name else "output"
        if not _fits(len(shapes), len(now), lengths):
            return f"its {said} was {plural(len(shapes), 'tensor')} and became {len(now)}: the forward selects layers by number"
        for was, became in zip(shapes, now, strict=False):
            if len(was) != len(became) or not all(_fits(one, other, lengths) for one, other in zip(was, became, strict=True)):
                return f"its {said} was {shape(was)} and became {shape(became)}: these layers change the shape, so all are needed"
    return ""


def _by_name(outputs: Outputs) -> dict[str, list[tuple[int, ...]]]:
    found: dict[str, list[tuple[int, ...]]] = {}
    for name, sizes in outputs:
        found.setdefault(re.sub(r"\[\d+\]", "", name), []).append(sizes)
    return found


def _fits(before: int, after: int, lengths: Iterable[tuple[int, int]]) -> bool:
    """Whether it is the same amount, or the same for each layer that is left: ``a * layers + b``, where b is no more than a."""
    if before == after:
        return True
    for large, small in lengths:
        each, rest = divmod(before - after, large - small)
        if not rest and each > 0 and 0 <= before - each * large <= each:
            return True
    return False


def notes_on(kept: Mapping[Stack, tuple[int, ...]], inputs: Inputs) -> Iterator[str]:
    """Hooks that no longer run, and a cache of the large model."""
    for stack, left in kept.items():
        gone = [place for place in range(len(stack.layers)) if place not in left]
        hooked = [place for place in gone if _is_hooked(stack.layers[place])]
        if hooked:
            names = listed([f"`{stack.path}`[{place}]" for place in hooked])
            yield f"hooks on {names} do not run while {'this layer is' if len(hooked) == 1 else 'these layers are'} removed"
    amounts = {len(stack.layers) for stack in kept}
    for name, value in inputs.named_values().items():
        entries = getattr(value, "layers", None)
        if isinstance(entries, list) and len(entries) in amounts:
            yield f"`{name}` holds an entry for each layer of the large model: create a new one"


def _is_hooked(layer: nn.Module) -> bool:
    return any(getattr(part, table, None) for part in layer.modules() for table in _HOOKS)
