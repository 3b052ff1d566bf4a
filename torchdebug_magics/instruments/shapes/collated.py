"""A batch that cannot be put together: which part of the samples has unequal shapes, and a `collate_fn` that was tried."""

from __future__ import annotations

import copy
import re
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import default_collate

from torchdebug_magics.format import shape
from torchdebug_magics.instruments.shapes.explain import place
from torchdebug_magics.instruments.shapes.report import Failure, Fix
from torchdebug_magics.probing.rng import RandomState
from torchdebug_magics.probing.where import is_user_code

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from torchdebug_magics.instruments.shapes.report import Shape

__all__ = ["unequal_samples"]

_SHOWN = 4
_IN_WORKER = re.compile(
    r"stack expects each tensor to be equal size, but got \[([\d, ]*)\] at entry (\d+) and \[([\d, ]*)\] at entry (\d+)"
)
_BOXES = range(4, 8)
"""Numbers in a row of what describes one object each: a box, with or without its class."""
_PICTURE = 3


@dataclass(frozen=True)
class _Part:
    """One part of every sample."""

    key: object
    """Of the mapping, or its place in the tuple; None where a sample is nothing else."""
    values: Sequence[Any]

    @property
    def shapes(self) -> list[Shape]:
        return [_shape(one) for one in self.values]

    @property
    def of(self) -> str:
        """``sample["targets"]``."""
        return "sample" if self.key is None else f"sample[{self.key!r}]".replace("'", '"')


def _shape(value: Any) -> Shape:
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return tuple(value.shape)
    return (len(value),) if isinstance(value, (tuple, list)) else ()


def unequal_samples(error: BaseException) -> Failure | None:
    """What is wrong with the samples that torch's default collation was given; None where it did not fail."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    collating = next((frame for frame in frames if frame.f_code is default_collate.__code__), None)
    if collating is None:
        return _told_by_worker(error)
    samples = collating.f_locals.get("batch")
    part = next((one for one in _parts(samples) if len(set(one.shapes)) > 1), None) if isinstance(samples, list) else None
    if part is None or not samples:
        return None
    fetching = next((frame for frame in frames if "possibly_batched_index" in frame.f_code.co_varnames), None)
    which = f"`{part.of}` of " if part.key is not None else ""
    shapes = [shape(one) or "a scalar" for one in part.shapes[:_SHOWN]]
    sentence = f"a batch is made of samples of one shape, and {which}these are {', '.join(shapes)}{_first_other(part, fetching)}"
    return _failure(error, sentence, part.shapes, _fixes(samples, part, frames))


def _parts(samples: list[Any]) -> list[_Part]:
    first = samples[0] if samples else None
    if isinstance(first, Mapping):
        return [_Part(key, [one[key] for one in samples if key in one]) for key in first]
    if isinstance(first, (tuple, list)):
        return [_Part(at, [one[at] for one in samples if len(one) > at]) for at in range(len(first))]
    return [_Part(None, samples)]


def _first_other(part: _Part, fetching: FrameType | None) -> str:
    """Which sample is the first with another shape."""
    at = next(at for at, one in enumerate(part.shapes) if one != part.shapes[0])
    indices = fetching.f_locals.get("possibly_batched_index") if fetching is not None else None
    known = isinstance(indices, list) and at < len(indices) and type(indices[at]) is int
    return f": `dataset[{indices[at]}]` is the first other one" if known and indices is not None else ""


def _told_by_worker(error: BaseException) -> Failure | None:
    """Of a worker process only the text of the error is here."""
    found = _IN_WORKER.search(str(error)) if "DataLoader worker" in str(error) else None
    if found is None:
        return None
    first, other = (tuple(map(int, filter(None, one.replace(" ", "").split(",")))) for one in (found[1], found[3]))
    sentence = f"a batch is made of samples of one shape, and sample {found[2]} has {shape(first)}, sample {found[4]} {shape(other)}"
    advice = Fix(code="num_workers=0", verified=False, why="to see which part of the samples it is; then a `collate_fn` that pads it")
    return _failure(error, sentence, [first, other], [advice])


def _failure(error: BaseException, sentence: str, shapes: Sequence[Shape], fixes: list[Fix]) -> Failure:
    return Failure(
        module=None,
        op="stack",
        location=place(error),
        operand_shapes=tuple(shapes[:_SHOWN]),
        explanation=sentence,
        fixes=tuple(fixes),
        error=f"{type(error).__name__}: {error}",
    )


def _fixes(samples: list[Any], part: _Part, frames: list[FrameType]) -> list[Fix]:
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
    before = RandomState.take()
    try:
        return run(copy.deepcopy(samples)) is not None
    except Exception:  # noqa: BLE001 - whatever a function says to samples that it was not made for
        return False
    finally:
        before.put_back()


@dataclass(frozen=True)
class _Made:
    """What a batch makes of one part of its samples: as text of the list of them, and done."""

    text: Callable[[str], str]
    run: Callable[[list[torch.Tensor]], Any]
    why: str


def _otherwise(part: _Part) -> _Made:
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
            "gray pictures among those in colour; or `.convert('RGB')` where they are read",
        )
    if 0 in differ or shapes[0][0] not in {1, 3, 4}:
        return None
    height, width = shapes[0][1:]
    return _Made(
        lambda them: f"torch.stack([F.interpolate(x[None], size=({height}, {width}))[0] for x in {them}])",
        lambda them: torch.stack([functional.interpolate(one[None], size=(height, width))[0] for one in them]),
        "pictures of one size; or resize them where they are read",
    )


def _tensors(part: _Part) -> tuple[Callable[[Any], Any], Callable[[str], str]]:
    """What makes a tensor of the part, done and as text."""
    if all(isinstance(one, torch.Tensor) for one in part.values):
        return (lambda one: one), (lambda text: text)
    return torch.as_tensor, (lambda text: f"torch.as_tensor({text})")


def _collating(part: _Part, made: _Made) -> Callable[[list[Any]], Any]:
    as_tensor, _ = _tensors(part)

    def collate(batch: list[Any]) -> Any:
        if part.key is None:
            return made.run([as_tensor(one) for one in batch])
        own = made.run([as_tensor(one[part.key]) for one in batch])
        if isinstance(batch[0], Mapping):
            rest = default_collate([{key: value for key, value in one.items() if key != part.key} for one in batch])
            return {**rest, part.key: own}
        return [own if at == part.key else default_collate([one[at] for one in batch]) for at in range(len(batch[0]))]

    return collate


def _written(part: _Part, sample: Any, text: Callable[[str], str]) -> str:
    _, as_tensor = _tensors(part)
    if part.key is None:
        return f"lambda batch: {text('batch')}"
    key = repr(part.key).replace("'", '"')
    own = text(f"[{as_tensor(f's[{key}]')} for s in batch]")
    if isinstance(sample, Mapping):
        rest = f"default_collate([{{k: v for k, v in s.items() if k != {key}}} for s in batch])"
        return f"lambda batch: {{**{rest}, {key}: {own}}}"
    parts = [own if at == part.key else f"default_collate([s[{at}] for s in batch])" for at in range(len(sample))]
    return f"lambda batch: [{', '.join(parts)}]"
