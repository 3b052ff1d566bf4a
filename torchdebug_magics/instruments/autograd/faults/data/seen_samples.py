"""Which samples a model was trained on: class by class, those that it is evaluated on as well, equal ones with different labels."""

from __future__ import annotations

import ast
import math
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.utils.data import DataLoader, SequentialSampler

from torchdebug_magics.format import plural
from torchdebug_magics.instruments.autograd.report import AutogradFinding, Kind
from torchdebug_magics.instruments.autograd.source_readings import finding, with_option
from torchdebug_magics.probing.dispatch import modes_aside
from torchdebug_magics.probing.names import user_names
from torchdebug_magics.probing.source.edited_source import calls, exchanging, made_as
from torchdebug_magics.probing.source.lines import Line
from torchdebug_magics.probing.source.syntax import called
from torchdebug_magics.probing.tensors import tensors_in
from torchdebug_magics.report import Location

FOR_EVALUATION = re.compile(r"(?:^|[\W_])(?:test|val|valid|validate|validation|eval|dev)(?:$|[\W_\d])")
"""In the user's name for a loader or a data set."""
_MOST_SAMPLES, _MOST_NUMBERS = 20_000, 1_024
"""Of a loader, and of a sample."""
_FEWEST_SHARED, _SHARE = 10, 0.2
_FEWEST_BATCHES = 3
_MOSTLY_DISTINCT = 0.9
_DRAWN_FROM = 97
_FEWEST_ITEMS = 4
"""Different samples, of which fewer may each come as often by chance."""
_MOST_BATCHES, _FEW_BATCHES, _FEW_SAMPLES = 512, 4, 8
"""With fewer, batches of a single class may come by chance."""
_MOSTLY = 3
"""How many batches of one class there are, at least, for each of several."""


@dataclass
class _Samples:
    """What a loader gave."""

    line: Line
    """Of the loop over it."""
    looped: str
    """What the loop calls it."""
    data: int
    """The id of its data set."""
    steps_count: int
    """Updates before its first batch."""
    passes_count: int = 0
    is_trained_on: bool = False
    was_trained_on: bool = False
    """By whatever training."""
    known: set[float] = field(default_factory=set)
    """A number that stands for each sample."""
    count: int = 0
    """Samples of the latest pass."""
    shared: dict[int, int] = field(default_factory=dict)
    """By the id of the data set of another loader: how many of these had been trained on."""
    contradicting: list[tuple[int, int]] = field(default_factory=list)
    """(samples that equal one with another label, all samples) of its first batches."""
    alone: Counter[int] = field(default_factory=Counter)
    """In how many batches each class was alone, where the loader does not shuffle."""
    mixed_count: int = 0
    """Batches of several classes, as where one class ends and the next one begins."""

    @property
    def is_sorted(self) -> bool:
        """Whether a model was trained on it, and the samples come class by class."""
        is_mostly_alone = self.alone.total() >= max(_FEW_BATCHES, _MOSTLY * self.mixed_count)
        return self.was_trained_on and len(self.alone) > 1 and is_mostly_alone


class SampleWatch:
    """Keeps a number of each sample, and no tensor."""

    def __init__(self) -> None:
        self._samples: WeakKeyDictionary[Any, _Samples] = WeakKeyDictionary()
        """By what draws the indices of a loader."""

    def meet(self, line: Line | None, looped: str, iterator: Any, batch: Any, steps_count: int) -> None:
        """A loop at a line is given a batch, after so many updates."""
        if line is None or iterator._index_sampler is None:
            return
        is_first, data = iterator._num_yielded == 1, id(iterator._dataset)
        seen = self._samples.setdefault(iterator._index_sampler, _Samples(line, looped, data, steps_count))
        is_update_between = not is_first and steps_count > seen.steps_count
        seen.is_trained_on |= is_update_between
        seen.was_trained_on |= is_update_between
        seen.steps_count = steps_count
        if is_first:
            seen.passes_count, seen.count, seen.shared = seen.passes_count + 1, 0, {}
        if isinstance(getattr(iterator._index_sampler, "sampler", None), SequentialSampler):
            _meet_classes(seen, batch)
        if len(seen.known) >= _MOST_SAMPLES or (seen.is_trained_on and seen.passes_count > 1):
            return
        tensors = [each for each in tensors_in(batch) if each.dim() and each.device.type == "cpu" and each.layout is torch.strided]
        rows = next((len(each) for each in tensors if each.is_floating_point() and each.dim() > 1 and each.numel()), 0)
        with modes_aside(), torch.no_grad():
            labels = [each for each in tensors if each.dtype is torch.int64 and each.numel() == rows > 0]
            inputs = [each for each in tensors if len(each) == rows and not (len(labels) == 1 and each is labels[0])]
            numbers = _numbers(inputs) if rows else []
            seen.count += len(numbers)
            seen.known.update(number for number in numbers if not math.isnan(number))
            if len(labels) == 1 and len(seen.contradicting) < _FEWEST_BATCHES:
                seen.contradicting.append((_contradicting(numbers, labels[0].flatten().tolist()), len(numbers)))
        for other in self._samples.values():
            if other.is_trained_on and other.data != data:
                seen.shared[other.data] = seen.shared.get(other.data, 0) + sum(number in other.known for number in numbers)

    def restart(self) -> None:
        """A new training begins: what another model was trained on does not count, as in a cross-validation."""
        for seen in self._samples.values():
            seen.known.clear()
            seen.shared.clear()
            seen.is_trained_on, seen.passes_count = False, 0

    def faults(self, *, has_classes: bool) -> Iterator[AutogradFinding]:
        """What the samples of all loaders show; `has_classes`: the labels are those of a loss of classes."""
        loaders = {id(value._index_sampler): name for name, value in user_names(sys._getframe()) if isinstance(value, DataLoader)}
        lines = Counter(seen.line for seen in self._samples.values())  # what a function calls its argument is the name of several
        names = {sampler: seen.looped for sampler, seen in self._samples.items() if lines[seen.line] == 1}
        named = [(loaders.get(id(sampler)) or names.get(sampler, ""), seen) for sampler, seen in self._samples.items()]
        trained = [(name, seen) for name, seen in named if seen.is_trained_on and name]
        for name, seen in named if has_classes else ():
            if seen.is_sorted:
                yield _sorted(name or seen.looped, seen)
        for name, seen in trained if has_classes else ():
            few = seen.contradicting
            if len(few) == _FEWEST_BATCHES and all(2 * many >= size > 1 for many, size in few):
                yield _contradicting_labels(name, seen)
        for name, seen in named:
            is_for_evaluation = FOR_EVALUATION.search(name) is not None and "train" not in name and not seen.is_trained_on
            if is_for_evaluation and len(seen.known) >= _MOSTLY_DISTINCT * seen.count:
                yield from _shared(name, seen, trained)


def _meet_classes(seen: _Samples, batch: Any) -> None:
    """The labels of a batch of a loader that does not shuffle."""
    labels = [each for each in tensors_in(batch) if each.dim() == 1 and each.dtype is torch.int64 and each.device.type == "cpu"]
    if len(labels) == 1 and len(labels[0]) >= _FEW_SAMPLES and seen.alone.total() + seen.mixed_count < _MOST_BATCHES:
        with modes_aside():
            classes = set(labels[0].tolist())
        seen.alone.update(classes if len(classes) == 1 else ())
        seen.mixed_count += len(classes) > 1


class WorkersItems:
    """Counts the samples that the workers of a loader give of a data set without indices, of which each worker has a copy."""

    def __init__(self) -> None:
        self._counts: WeakKeyDictionary[Any, Counter[int]] = WeakKeyDictionary()
        """How often each sample came, by the iterator."""

    def meet(self, iterator: Any, batch: Any) -> None:
        """A batch has come."""
        counts = self._counts.setdefault(iterator, Counter())
        tensors = [each for each in tensors_in(batch) if each.dim() and each.device.type == "cpu" and each.layout is torch.strided]
        if not tensors or len({len(each) for each in tensors}) != 1 or len(counts) >= _MOST_SAMPLES:
            return
        with modes_aside(), torch.no_grad():
            columns = [each.detach().flatten(1)[:, :_MOST_NUMBERS] if each.dim() > 1 else each.detach().unsqueeze(1) for each in tensors]
            parts = [column.clone(memory_format=torch.contiguous_format).view(torch.uint8).numpy() for column in columns if column.numel()]
        counts.update(hash(tuple(part.tobytes() for part in row)) for row in zip(*parts, strict=True))

    def finding(self, iterator: Any, line: Line | None) -> AutogradFinding | None:
        """The loader has come to its end."""
        counts, workers = self._counts.pop(iterator, Counter()), iterator._num_workers
        code = getattr(type(iterator._dataset).__iter__, "__code__", None)
        is_divided = code is None or "get_worker_info" in code.co_names or iterator._worker_init_fn is not None
        if (
            line is None
            or is_divided
            or not _FEWEST_ITEMS <= len(counts) < _MOST_SAMPLES
            or any(count % workers for count in counts.values())
        ):
            return None
        data = type(iterator._dataset).__name__
        variables = {name for name, value in user_names(sys._getframe()) if value is iterator._dataset}
        made = [(at, call) for at, call in calls(line.file) if called(call) == "DataLoader" and _is_given(call, data, variables)]
        at, call = made[0] if len(made) == 1 else (None, None)
        return finding(
            "repeated_samples",
            f"each sample of `{data}` comes {workers} times an epoch: each of {workers} workers reads all of it",
            at or line.location,
            "share the samples among the workers in `__iter__`, by `torch.utils.data.get_worker_info()`, or read them with `num_workers=0`",
            fix="read it with `num_workers=0`, or share its samples in `__iter__` by `torch.utils.data.get_worker_info()`",
            edits=() if call is None else exchanging(at, call, with_option(call, "num_workers", 0)),
            tensor=data,
            explanation="a data set without indices is copied into each worker, and nobody divides it",
        )


def _is_given(call: ast.Call, data: str, variables: set[str]) -> bool:
    """Whether a loader is made with that data set, and with workers."""
    first = next(iter([*call.args, *(option.value for option in call.keywords if option.arg == "dataset")]), None)
    is_it = called(first) == data or (isinstance(first, ast.Name) and first.id in variables)
    return is_it and any(option.arg == "num_workers" for option in call.keywords)


def _numbers(inputs: list[torch.Tensor]) -> list[float]:
    """A number for each sample; NaN for one of whole numbers alone, of which two may be equal by chance."""
    sums = torch.zeros(len(inputs[0]), dtype=torch.float64)
    is_whole = torch.ones(len(inputs[0]), dtype=torch.bool)
    for each in inputs:
        rows = each.detach().flatten(1) if each.dim() > 1 else each.detach().unsqueeze(1)
        rows = rows[:, :: rows.shape[1] // _MOST_NUMBERS | 1].double()  # an odd stride meets all columns of a picture
        sums += rows @ torch.arange(_DRAWN_FROM, _DRAWN_FROM + rows.shape[1], dtype=torch.float64).sqrt()
        is_whole &= (rows == rows.round()).all(1)
    sums[is_whole] = torch.nan
    return [round(number, 6) for number in sums.tolist()]  # a batch of another size is added up in another order


def _contradicting(numbers: list[float], labels: list[int]) -> int:
    classes: dict[float, set[int]] = {}
    for number, label in zip(numbers, labels, strict=True):
        classes.setdefault(number, set()).add(label)
    return sum(len(classes[number]) > 1 for number in numbers)


def _shared(name: str, evaluated: _Samples, trained: list[tuple[str, _Samples]]) -> Iterator[AutogradFinding]:
    for other, seen in trained:
        count = evaluated.shared.get(seen.data, 0)
        if count >= max(_FEWEST_SHARED, _SHARE * evaluated.count) and seen.known:
            yield at_loader(
                "evaluated_on_training",
                name,
                evaluated.line.location,
                f"{count:,} of the {plural(evaluated.count, 'sample')} of `{name}` are trained on, too: `{other}` has them",
                "split the data so that no sample is in both, as `torch.utils.data.random_split` does",
                explanation="what is measured on samples that the model was trained on says nothing of new ones",
                is_hint=True,
            )
            return


def _contradicting_labels(name: str, seen: _Samples) -> AutogradFinding:
    many, size = seen.contradicting[0]
    return at_loader(
        "contradicting_labels",
        name,
        seen.line.location,
        f"{many} of the {size} samples in a batch of `{name}` equal another one that has a different label",
        "look at what the data set reads for each label: it is the same data",
        explanation="a model cannot tell them apart: its loss stays at that of guessing",
        is_hint=True,
    )


def _sorted(name: str, seen: _Samples) -> AutogradFinding:
    """The samples come class by class, and the loader keeps their order."""
    return at_loader(
        "sorted_batches",
        name,
        seen.line.location,
        f"each batch of `{name or 'the loader'}` has samples of a single class",
        f"make `{name or 'the loader'}` with `shuffle=True`",
        option=("shuffle", True),
        explanation="the data set is sorted by class, and the loader does not shuffle: each update forgets the other classes",
    )


def at_loader(
    kind: Kind,
    name: str,
    looped: Location | None,
    headline: str,
    advice: str,
    option: tuple[str, bool | None] | None = None,
    **more: Any,
) -> AutogradFinding:
    """At the line that makes a loader, else at that of a loop over it; `option`: what to make it with, None for without that."""
    made = made_as(looped.file, name, "DataLoader") if looped is not None else []
    where = made[0][0] if made else looped
    return finding(
        kind,
        headline,
        where,
        advice,
        edits=exchanging(where, made[0][1], with_option(made[0][1], *option)) if made and option is not None else (),
        tensor=name or None,
        saved_at=looped if where is not looped else None,
        **more,
    )
