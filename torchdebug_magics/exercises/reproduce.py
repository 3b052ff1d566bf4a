"""Make it reproduce: the same numbers in the same run, in the next one, and after a new start."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from torchdebug_magics.exercises.checking import Exercise, Sealed, expect, expect_kind, shown
from torchdebug_magics.instruments.deterministic.report import DeterministicReport

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
    expect(
        _CAUSE.fits(str(cause).replace(" ", "_")),  # the report shows it with a blank
        f"{shown(cause)} is not the cause; print `report.divergence`, and look for what follows `cause=`.",
    )


@check.task
def repeated(train: Callable[[int], Sequence[float]]) -> None:
    """One seed, one run; another seed, another."""
    one, two, other = (_losses(train, seed) for seed in (1, 1, 2))
    expect(one == two, "called twice with the same seed, `train` still gives two different runs; which of its sources is not seeded?")
    expect(one != other, "another seed should give another run.")


def _losses(train: Callable[[int], Sequence[float]], seed: int) -> list[float]:
    losses = train(seed)
    expect_kind(losses, Iterable, "`train` should give the list of its losses")
    return list(losses)


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
        numbered = vocabulary(marked)
        expect_kind(numbered, Mapping, "`vocabulary` should give a dictionary, with a number for each word")
        numbers.append({str(word): number for word, number in numbered.items()})
    expect(
        all(number == numbers[0] for number in numbers),
        "after a new start of the kernel the words would get other numbers, as a set has them in another order then.",
    )
    expect(sorted(numbers[0].values()) == list(range(len(set(words)))), "each different word should get one number, from 0 on.")
