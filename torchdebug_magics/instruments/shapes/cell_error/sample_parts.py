"""The parts of the samples of which a batch is made: those of mappings and tuples, one in another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torchdebug_magics.instruments.shapes.report import Shape

__all__ = ["Part", "as_key", "unequal"]


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
