"""A batch that cannot be put together: which part of the samples has unequal shapes, and a `collate_fn` that was tried."""

from __future__ import annotations

import re
import traceback
from typing import TYPE_CHECKING, Any

from torch.utils.data import default_collate

from torchdebug_magics.format import shape
from torchdebug_magics.instruments.shapes.cell_error.collate_functions import other_batches
from torchdebug_magics.instruments.shapes.cell_error.sample_parts import Part, unequal
from torchdebug_magics.instruments.shapes.cell_error.worker_samples import from_worker
from torchdebug_magics.instruments.shapes.explain import place, underlined
from torchdebug_magics.instruments.shapes.report import Failure, Fix

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import FrameType

    from torchdebug_magics.instruments.shapes.report import Shape

__all__ = ["unequal_samples"]

_SHOWN = 4
_IN_WORKER = re.compile(
    r"stack expects each tensor to be equal size, but got \[([\d, ]*)\] at entry (\d+) and \[([\d, ]*)\] at entry (\d+)"
    r"|each element in list of batch should be of equal size|Trying to resize storage that is not resizable"
)


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
