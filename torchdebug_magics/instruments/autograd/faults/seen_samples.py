"""Which samples a model was trained on: those that it is evaluated on as well, and equal ones that have different labels."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from torchdebug_magics.format import plural
from torchdebug_magics.instruments.autograd.report import AutogradFinding
from torchdebug_magics.instruments.autograd.source_readings import finding
from torchdebug_magics.probing.dispatch import modes_aside
from torchdebug_magics.probing.source.edited_source import made_as
from torchdebug_magics.probing.source.lines import Line
from torchdebug_magics.probing.tensors import tensors_in

FOR_EVALUATION = re.compile(r"(?:^|[\W_])(?:test|val|valid|validate|validation|eval|dev)(?:$|[\W_\d])")
"""In the user's name for a loader or a data set."""
_MOST_SAMPLES, _MOST_NUMBERS = 20_000, 64
"""Of a loader, and of a sample."""
_FEWEST_SHARED, _SHARE = 10, 0.2
_FEWEST_BATCHES = 3


@dataclass
class _Samples:
    """What a loop over a loader was given."""

    name: str
    line: Line
    steps_count: int
    """Updates before its first batch."""
    is_trained_on: bool = False
    known: set[float] = field(default_factory=set)
    """A number that stands for each sample."""
    contradicting: list[tuple[int, int]] = field(default_factory=list)
    """(samples that equal one with another label, all samples) of its first batches."""


class SampleWatch:
    """Keeps a number of each sample, and no tensor."""

    def __init__(self) -> None:
        self._samples: dict[Line, _Samples] = {}

    def meet(self, line: Line | None, name: str, batch: Any, steps_count: int, *, is_first: bool) -> None:
        """A loop at a line is given a batch, maybe its first, after so many updates."""
        if line is None:
            return
        seen = self._samples.setdefault(line, _Samples(name, line, steps_count))
        seen.is_trained_on |= not is_first and steps_count > seen.steps_count
        seen.steps_count = steps_count
        if len(seen.known) >= _MOST_SAMPLES:
            return
        tensors = list(tensors_in(batch))
        inputs = next((each for each in tensors if each.is_floating_point() and each.dim() > 1 and each.numel()), None)
        if inputs is None or inputs.device.type != "cpu" or inputs.layout is not torch.strided:
            return
        with modes_aside(), torch.no_grad():
            numbers = _numbers(inputs.detach())
            seen.known.update(number for number in numbers if number == number)  # noqa: PLR0124 - NaN
            labels = [each for each in tensors if each.dtype is torch.int64 and each.numel() == len(numbers)]
            if len(labels) == 1 and len(seen.contradicting) < _FEWEST_BATCHES:
                seen.contradicting.append((_contradicting(numbers, labels[0].flatten().tolist()), len(numbers)))

    def restart(self) -> None:
        """A new optimizer begins: what another model was trained on does not count, as in a cross-validation."""
        for seen in self._samples.values():
            seen.known.clear()
            seen.is_trained_on = False

    def faults(self) -> Iterator[AutogradFinding]:
        """What the samples of all loaders show."""
        trained = [seen for seen in self._samples.values() if seen.is_trained_on]
        for seen in trained:
            few = seen.contradicting
            if len(few) == _FEWEST_BATCHES and all(2 * many >= size for many, size in few):
                yield _contradicting_labels(seen)
        for seen in self._samples.values():
            is_for_evaluation = FOR_EVALUATION.search(seen.name) is not None and "train" not in seen.name
            if is_for_evaluation and not seen.is_trained_on:
                yield from _shared(seen, trained)


def _numbers(inputs: torch.Tensor) -> list[float]:
    """A number for each sample; NaN for one of whole numbers alone, of which two may be equal by chance."""
    rows = inputs.flatten(1)
    rows = rows[:, :: max(1, rows.shape[1] // _MOST_NUMBERS)].double()
    factors = torch.arange(1, rows.shape[1] + 1, dtype=torch.float64).sqrt()
    sums = rows @ factors
    sums[(rows == rows.round()).all(1)] = torch.nan
    return sums.tolist()


def _contradicting(numbers: list[float], labels: list[int]) -> int:
    classes: dict[float, set[int]] = {}
    for number, label in zip(numbers, labels, strict=True):
        classes.setdefault(number, set()).add(label)
    return sum(len(classes[number]) > 1 for number in numbers)


def _shared(evaluated: _Samples, trained: Iterable[_Samples]) -> Iterator[AutogradFinding]:
    for seen in trained:
        count, whole = len(evaluated.known & seen.known), len(evaluated.known)
        if count >= max(_FEWEST_SHARED, _SHARE * whole):
            yield _at_loader(
                "evaluated_on_training",
                evaluated,
                f"{count:,} of the {plural(whole, 'sample')} of `{evaluated.name}` are trained on, too: `{seen.name}` has them",
                "split the data so that no sample is in both, as `torch.utils.data.random_split` does",
                "what is measured on samples that the model was trained on says nothing of new ones",
            )
            return


def _contradicting_labels(seen: _Samples) -> AutogradFinding:
    many, size = seen.contradicting[0]
    return _at_loader(
        "contradicting_labels",
        seen,
        f"{many} of the {size} samples in a batch of `{seen.name}` equal another one that has a different label",
        "look at what the data set reads for each label: it is the same data",
        "a model cannot tell them apart: its loss stays at that of guessing",
    )


def _at_loader(kind: Any, seen: _Samples, headline: str, advice: str, explanation: str) -> AutogradFinding:
    looped = seen.line.location
    made = made_as(looped.file, seen.name, "DataLoader")
    where = made[0][0] if made else looped
    saved_at = looped if where is not looped else None
    return finding(kind, headline, where, advice, tensor=seen.name, saved_at=saved_at, explanation=explanation, is_hint=True)
