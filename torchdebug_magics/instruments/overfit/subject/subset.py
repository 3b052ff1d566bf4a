"""A loader of a few samples of another: the tiny subset on which a training must succeed first."""

from __future__ import annotations

from collections.abc import Sized
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Subset

from torchdebug_magics.errors import TorchDebugError
from torchdebug_magics.probing.rng import RandomState

__all__ = ["subset"]

_MOST_READ = 10_000
"""Samples that are looked at for their labels."""


def subset(loader: DataLoader[Any], samples: int = 100) -> DataLoader[Any]:
    """A loader of `samples` samples of the same data set, spread evenly over the classes where samples have labels.

    Batch size, collation, transforms and shuffling are those of `loader`. Raises `TorchDebugError` where the data set has no length.
    """
    data: Any = loader.dataset
    if not isinstance(data, Sized) or not isinstance(data, Dataset):
        msg = "the data set has no length: a subset needs one whose samples are numbered"
        raise TorchDebugError(msg)
    chosen = _balanced(data, min(samples, len(data)))
    shuffles = isinstance(loader.sampler, torch.utils.data.RandomSampler)
    return DataLoader(
        Subset(data, chosen),
        batch_size=loader.batch_size or 1,
        shuffle=shuffles,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        drop_last=False,
        generator=loader.generator,
    )


def _balanced(data: Any, many: int) -> list[int]:
    """Sample numbers, one of each class in turns; the first ones where there are no labels."""
    labels = _labels(data)
    if labels is None:
        return list(range(many))
    by_label: dict[Any, list[int]] = {}
    for place, label in enumerate(labels):
        by_label.setdefault(label, []).append(place)
    chosen: list[int] = []
    for turn in range(max(map(len, by_label.values()))):
        chosen += [places[turn] for places in by_label.values() if turn < len(places)]
        if len(chosen) >= many:
            break
    return sorted(chosen[:many])


def _labels(data: Any) -> list[Any] | None:
    """Of a data set that keeps them, or of its first samples."""
    kept = getattr(data, "targets", None)
    if kept is None and isinstance(tensors := getattr(data, "tensors", None), tuple) and len(tensors) > 1:
        kept = tensors[-1]
    if kept is not None and len(kept) == len(data):
        found = kept.tolist() if hasattr(kept, "tolist") else list(kept)
    elif len(data) <= _MOST_READ:
        with RandomState.kept():
            found = [_label(data[place]) for place in range(len(data))]
    else:
        return None
    return found if all(isinstance(one, (int, str)) for one in found) else None


def _label(sample: Any) -> Any:
    if isinstance(sample, dict):
        label = next((sample[name] for name in ("label", "labels", "target") if name in sample), None)
    else:
        label = sample[-1] if isinstance(sample, (tuple, list)) and len(sample) > 1 else None
    if isinstance(label, torch.Tensor) and label.numel() == 1 and not label.is_floating_point():
        return int(label)
    return label
