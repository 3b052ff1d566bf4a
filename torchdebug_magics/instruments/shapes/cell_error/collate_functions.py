"""Other ways to make a batch of samples of unequal shapes, each tried on the samples themselves, and the code of them."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import default_collate

from torchdebug_magics.instruments.shapes.cell_error.sample_parts import Part, as_key
from torchdebug_magics.instruments.shapes.report import Fix
from torchdebug_magics.probing.rng import RandomState
from torchdebug_magics.probing.where import is_user_code

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from torchdebug_magics.instruments.shapes.report import Shape

__all__ = ["other_batches"]

_BOXES = range(4, 8)
"""Numbers in a row of what describes one object each: a box, with or without its class."""
_PICTURE = 3
"""Dimensions."""


def other_batches(samples: list[Any], part: Part, frames: list[FrameType]) -> list[Fix]:
    """A function of the user's that was made for this, then one that makes this part alone otherwise."""
    own = [value for frame in frames if is_user_code(frame.f_code) for value in frame.f_globals.values() if _collates(value)]
    tried = [(f"collate_fn={one.__name__}", one, "of your own") for one in {id(one): one for one in own}.values()]
    made = _otherwise(part)
    tried.append((f"collate_fn={_written(part, samples[0], made.text)}", _collating(part, made), made.why))
    return [Fix(code=code, verified=True, why=why) for code, run, why in tried if _works(run, samples)]


def _collates(value: object) -> bool:
    return (
        isinstance(value, FunctionType) and "collate" in value.__name__ and is_user_code(value.__code__) and value.__code__.co_argcount == 1
    )


def _works(run: Callable[[list[Any]], Any], samples: list[Any]) -> bool:
    try:
        with RandomState.kept():
            return run(copy.deepcopy(samples)) is not None
    except Exception:  # noqa: BLE001 - whatever a function says to samples that it was not made for
        return False


@dataclass(frozen=True)
class _Made:
    """What a batch makes of one part of its samples: as text of the list of them, and done."""

    text: Callable[[str], str]
    run: Callable[[list[torch.Tensor]], Any]
    why: str


def _otherwise(part: Part) -> _Made:
    shapes = part.shapes
    ranks = {len(one) for one in shapes}
    many = ranks.pop() if len(ranks) == 1 else 0
    differ = [dim for dim, sizes in enumerate(zip(*shapes, strict=False)) if len(set(sizes)) > 1]
    if many == _PICTURE and (made := _pictures(shapes, differ)) is not None:
        return made
    if differ == [0] and not (many > 1 and shapes[0][-1] in _BOXES):
        return _Made(lambda them: f"pad_sequence({them}, batch_first=True)", lambda them: pad_sequence(them, batch_first=True), "padded")
    if many > 1 and differ == [many - 1]:
        longest = max(one[-1] for one in shapes)
        return _Made(
            lambda them: f"torch.stack([F.pad(x, (0, max(y.shape[-1] for y in {them}) - x.shape[-1])) for x in {them}])",
            lambda them: torch.stack([functional.pad(one, (0, longest - one.shape[-1])) for one in them]),
            "padded at the end",
        )
    return _Made(lambda them: them, list, "kept in a list")


def _pictures(shapes: Sequence[Shape], differ: list[int]) -> _Made | None:
    """Pictures of several sizes, or with and without colour."""
    if differ == [0] and 1 in {one[0] for one in shapes}:
        channels = max(one[0] for one in shapes)
        return _Made(
            lambda them: f"torch.stack([x.expand({channels}, -1, -1) for x in {them}])",
            lambda them: torch.stack([one.expand(channels, -1, -1) for one in them]),
            "grayscale images among those in color; or `.convert('RGB')` where they are loaded",
        )
    if 0 in differ or shapes[0][0] not in {1, 3, 4}:
        return None
    height, width = shapes[0][1:]
    return _Made(
        lambda them: f"torch.stack([F.interpolate(x[None], size=({height}, {width}))[0] for x in {them}])",
        lambda them: torch.stack([functional.interpolate(one[None], size=(height, width))[0] for one in them]),
        "images of one size; or resize them where they are loaded",
    )


def _tensors(part: Part) -> tuple[Callable[[Any], Any], Callable[[str], str]]:
    """What makes a tensor of the part, done and as text."""
    if all(isinstance(one, torch.Tensor) for one in part.values):
        return (lambda one: one), (lambda text: text)
    return torch.as_tensor, (lambda text: f"torch.as_tensor({text})")


def _collating(part: Part, made: _Made) -> Callable[[list[Any]], Any]:
    as_tensor, _ = _tensors(part)

    def collate(values: list[Any], path: tuple[Any, ...] = part.path) -> Any:
        if not path:
            return made.run([as_tensor(one) for one in values])
        own = collate([one[path[0]] for one in values], path[1:])
        if isinstance(values[0], Mapping):
            rest = default_collate([{key: value for key, value in one.items() if key != path[0]} for one in values])
            return {**rest, path[0]: own}
        return [own if at == path[0] else default_collate([one[at] for one in values]) for at in range(len(values[0]))]

    return collate


def _written(part: Part, sample: Any, text: Callable[[str], str]) -> str:
    """The same as code."""
    _, as_tensor = _tensors(part)

    def written(value: Any, item: str, path: tuple[Any, ...]) -> str:
        if not path:
            return text("batch" if item == as_tensor(item) == "s" else f"[{as_tensor(item)} for s in batch]")
        key = as_key(path[0])
        own = written(value[path[0]], f"{item}[{key}]", path[1:])
        if isinstance(value, Mapping):
            rest = f"default_collate([{{k: v for k, v in {item}.items() if k != {key}}} for s in batch])"
            return f"{{**{rest}, {key}: {own}}}" if len(value) > 1 else f"{{{key}: {own}}}"
        parts = [own if at == path[0] else f"default_collate([{item}[{at}] for s in batch])" for at in range(len(value))]
        return f"[{', '.join(parts)}]"

    return f"lambda batch: {written(sample, 's', part.path)}"
