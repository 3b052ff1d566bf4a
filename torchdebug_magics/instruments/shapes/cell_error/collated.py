"""A batch that cannot be put together: which part of the samples has unequal shapes, and a `collate_fn` that was tried."""

from __future__ import annotations

import copy
import pickle
import re
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType, FunctionType
from typing import Any

import numpy as np
import torch
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler, default_collate

from torchdebug_magics.format import shape
from torchdebug_magics.instruments.shapes.explain import place, underlined
from torchdebug_magics.instruments.shapes.report import Failure, Fix, Shape
from torchdebug_magics.probing.rng import RandomState
from torchdebug_magics.probing.source.code_owner import is_user_code

_SHOWN = 4
_IN_WORKER = re.compile(
    r"stack expects each tensor to be equal size, but got \[([\d, ]*)\] at entry (\d+) and \[([\d, ]*)\] at entry (\d+)"
    r"|each element in list of batch should be of equal size|Trying to resize storage that is not resizable"
)
_BOXES = range(4, 8)
"""Numbers in a row of what describes one object each: a box, with or without its class."""
_PICTURE = 3
"""Dimensions."""
_MOST_BATCHES = 64
"""That a worker of ours is asked for."""
_LONGEST_S = 5
"""How long it may take."""


def unequal_samples(error: BaseException) -> Failure | None:
    """What is wrong with the samples that torch's default collation was given; None where it did not fail."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    collating = next((frame for frame in frames if frame.f_code is default_collate.__code__), None)
    if collating is None:
        return _of_worker(error, frames)
    samples = collating.f_locals.get("batch")
    fetching = next((frame for frame in frames if "possibly_batched_index" in frame.f_code.co_varnames), None)
    indices = fetching.f_locals.get("possibly_batched_index") if fetching is not None else None
    return _explained(error, samples, indices, frames)


def _explained(error: BaseException, samples: Any, indices: Any, frames: list[FrameType]) -> Failure | None:
    part = unequal(samples) if isinstance(samples, list) else None
    if part is None:
        return None
    which = f"`{part.of}` of " if part.path else ""
    shapes = [shape(one) or "a scalar" for one in part.shapes[:_SHOWN]]
    sentence = f"samples of a batch must have one shape, and {which}these have {', '.join(shapes)}{_first_other(part, indices)}"
    return _failure(error, sentence, part.shapes, other_batches(samples, part, frames))


def _first_other(part: Part, indices: Any) -> str:
    """Which sample is the first with another shape."""
    at = next(at for at, one in enumerate(part.shapes) if one != part.shapes[0])
    known = isinstance(indices, list) and at < len(indices) and type(indices[at]) is int
    return f": `dataset[{indices[at]}]` is the first that differs" if known else ""


# Worker processes --------------------------------------------------------------------------------------------------------
def _of_worker(error: BaseException, frames: list[FrameType]) -> Failure | None:
    """Of a worker process only the text of the error is here: one more worker is asked for the samples."""
    found = _IN_WORKER.search(str(error)) if "DataLoader worker" in str(error) else None
    if found is None:
        return None
    loading = next((frame.f_locals.get("self") for frame in reversed(frames) if hasattr(frame.f_locals.get("self"), "_rcvd_idx")), None)
    if loading is not None:
        for samples, indices in from_worker(loading):
            part = unequal(samples)
            if part is not None and _are_said(part.shapes, found):
                return _explained(error, samples, indices, frames)
    if found[1] is None:
        return None
    first, other = _said(found)
    sentence = f"samples of a batch must have one shape, and sample {found[2]} has {shape(first)}, sample {found[4]} {shape(other)}"
    advice = Fix(code="num_workers=0", verified=False, why="to see which part of the samples it is; then a `collate_fn` that pads it")
    return _failure(error, sentence, [first, other], [advice])


def _said(found: re.Match[str]) -> tuple[Shape, Shape]:
    first, other = (tuple(map(int, filter(None, one.replace(" ", "").split(",")))) for one in (found[1], found[3]))
    return first, other


def _are_said(shapes: Sequence[Shape], found: re.Match[str]) -> bool:
    """Whether these may be the shapes of which the error speaks: as many dimensions, and the same sizes wherever these are equal."""
    if found[1] is None:
        return True
    said = _said(found)
    alike = [dim for dim, sizes in enumerate(zip(*shapes, strict=False)) if len(set(sizes)) == 1]
    return all(len(one) == len(shapes[0]) and all(one[dim] == shapes[0][dim] for dim in alike) for one in said)


def _failure(error: BaseException, sentence: str, shapes: Sequence[Shape], fixes: list[Fix]) -> Failure:
    return Failure(
        module=None,
        op="stack",
        location=place(error),
        underlined=underlined(error),
        operand_shapes=tuple(shapes[:_SHOWN]),
        explanation=sentence,
        fixes=tuple(fixes),
        error=f"{type(error).__name__}: {error}",
    )


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


@dataclass(frozen=True)
class Part:
    """One part of every sample."""

    path: tuple[Any, ...]
    """Keys of mappings and places in tuples, the outermost first; empty where a sample is nothing else."""
    values: Sequence[Any]

    @property
    def shapes(self) -> list[Shape]:
        """Of each sample's."""
        return [_shape(one) for one in self.values]

    @property
    def of(self) -> str:
        """``sample["targets"]``."""
        return "sample" + "".join(f"[{as_key(key)}]" for key in self.path)


def as_key(key: object) -> str:
    """As it is written in brackets."""
    return repr(key).replace("'", '"')


def _shape(value: Any) -> Shape:
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return tuple(value.shape)
    return (len(value),) if isinstance(value, (tuple, list)) else ()


def unequal(samples: list[Any]) -> Part | None:
    """The first part, in the order in which torch puts a batch together, whose shapes are not all the same."""
    return next((one for one in _parts((), samples) if len(set(one.shapes)) > 1), None)


def _parts(path: tuple[Any, ...], values: list[Any]) -> Iterator[Part]:
    first = values[0] if values else None
    if isinstance(first, Mapping):
        for key in first:
            yield from _parts((*path, key), [one[key] for one in values if isinstance(one, Mapping) and key in one])
    elif isinstance(first, (tuple, list)) and len({_shape(one) for one in values}) == 1 and any(_shape(one) for one in first):
        for at in range(len(first)):
            yield from _parts((*path, at), [one[at] for one in values])
    else:
        yield Part(path, values)


def from_worker(loading: Any) -> Iterator[tuple[list[Any], list[int] | None]]:
    """Batches of samples as they are before they are put together, with their indices, from a process of their own as the user's were.

    They begin with the batch that failed, where the samples are read in order, and else with the first.
    """
    dataset, sampler = loading._dataset, loading._index_sampler
    many = getattr(sampler, "batch_size", None)
    if not isinstance(many, int):
        return
    options: dict[str, Any] = {"batch_size": many}
    batches: list[list[int]] = []
    if not isinstance(dataset, IterableDataset):
        in_order = isinstance(sampler, BatchSampler) and isinstance(sampler.sampler, SequentialSampler)
        first = max(loading._rcvd_idx - 1, 0) * many if in_order else 0
        last = min(len(dataset), first + _MOST_BATCHES * many)
        batches = [list(range(at, min(at + many, last))) for at in range(first, last, many)]
        options = {"batch_sampler": batches}
    until = time.monotonic() + _LONGEST_S
    before = RandomState.take()
    try:
        loader: DataLoader[Any] = DataLoader(
            dataset,
            num_workers=1,
            collate_fn=pickle.dumps,
            timeout=_LONGEST_S,
            worker_init_fn=loading._worker_init_fn,
            multiprocessing_context=loading._workers[0]._start_method,
            **options,
        )
        for number, packed in enumerate(loader):
            yield pickle.loads(packed), batches[number] if batches else None  # noqa: S301 - what our own worker has packed
            if number >= _MOST_BATCHES or time.monotonic() > until:
                return
    except Exception:  # noqa: BLE001 - whatever a data set, or a process that dies, raises: then its key is not known
        return
    finally:
        before.put_back()
