"""Make it reproduce: the same numbers in the same run, in the next one, and after a new start."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from torchdebug_magics.exercises.checking import Exercise, expect
from torchdebug_magics.exercises.sealed import Sealed
from torchdebug_magics.instruments.deterministic.report import DeterministicReport

__all__ = ["check"]

_CAUSE = Sealed("reproduce/cause", "b30ef7fe446d6fab9b270353395f88be")

check = Exercise("All tasks are solved: whoever runs this after you gets your numbers, and when they change, something was changed.")


@check.task
def found(report: DeterministicReport, cause: str) -> None:
    """What %%deterministic --verify said."""
    expect(
        isinstance(report, DeterministicReport),
        "`report` is not a report; write `%%deterministic --verify -o report` as the first line of the training cell.",
    )
    expect(report.verified is not None, "the cell ran only once; with `--verify` it runs twice, and the two are compared.")
    expect(report.divergence is not None, "`report` found no difference; is it that of the training as it was given to you?")
    expect(_CAUSE.fits(cause), f"{cause!r} is not the cause; it is a word in `report.divergence`.")


@check.task
def repeated(train: Callable[[int], Sequence[float]]) -> None:
    """One seed, one run; another seed, another."""
    states = random.getstate(), np.random.get_state()  # noqa: NPY002 - the notebook's, which are put back
    try:
        one, two, other = (list(train(seed)) for seed in (1, 1, 2))
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002 - the very generator that the learner's code draws from
    expect(one == two, "called twice with the same seed, `train` still gives two different runs; which of its sources is not seeded?")
    expect(one != other, "another seed should give another run.")


class _Word(str):
    """A word whose hash is chosen: what a new start of the kernel does to every word."""

    __slots__ = ("start",)
    start: int

    def __hash__(self) -> int:
        return hash((str(self)[::-1], self.start)) if self.start else len(self) * 7919 + ord(self[-1]) * 31


@check.task
def numbered(vocabulary: Callable[[Iterable[str]], Mapping[str, int]]) -> None:
    """The number of a word does not hang on the order of a set."""
    words = ["a", "film", "that", "nobody", "will", "forget", "and", "everybody", "should", "see", "at", "least", "once", "in", "a", "life"]
    numbers = []
    for start in range(4):
        marked = [_Word(word) for word in words]
        for word in marked:
            word.start = start
        numbers.append({str(word): number for word, number in vocabulary(marked).items()})
    expect(
        all(one == numbers[0] for one in numbers),
        "after a new start of the kernel the words would get other numbers, as a set has them in another order then.",
    )
    expect(sorted(numbers[0].values()) == list(range(len(set(words)))), "each different word should get one number, from 0 on.")
