"""`Exercise`, the type of every `check`: tasks in order, each of which looks at names of the learner's and says what is still missing."""

from __future__ import annotations

import hashlib
import inspect
import random
import reprlib
import sys
import textwrap
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Judge = Callable[..., None]
_LONGEST = 120
"""Characters of an error of torch's; some of them go on for a paragraph."""
# So few answers are possible that none is safe from someone who tries them all; it should only be quicker to solve the exercise.
_ROUNDS = 20_000


class UnsolvedError(Exception):
    """A task is not solved; the message is the sentence that the learner reads."""


def expect(condition: object, hint: str) -> None:
    """Go on if `condition` holds; else an UnsolvedError with `hint`, which says what is missing and not how it is done."""
    if not condition:
        raise UnsolvedError(hint)


def expect_kind(value: object, kind: type, wanted: str) -> None:
    """Go on if `value` is a `kind`; else say what is `wanted`, as in "`train` should give a list", and what came in its place."""
    came = "nothing yet; does it end in a `return`?" if value is None or value is ... else f"a value of type {type(value).__name__}."
    expect(isinstance(value, kind), f"{wanted}, and gives {came}")


def shown(answer: object) -> str:
    """An answer as one line of a sentence, however long it is."""
    return " ".join(_SHORT.repr(answer).split())


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 60
_SHORT.maxlist = 1


@dataclass(frozen=True)
class Verdict:
    """How far the learner is: true when all is solved, and shown as one sentence."""

    solved: bool
    sentence: str

    def __bool__(self) -> bool:
        return self.solved

    def __repr__(self) -> str:
        return f"{'✓' if self.solved else '○'} {self.sentence}"


class Exercise:
    """``check()`` judges every task, ``check(2)`` the second one.

    A judge is registered with `task`. The names of its parameters are those of the learner's variables, as in the notebook; it returns
    when they are right, and calls `expect` for what must hold.
    """

    def __init__(self, farewell: str) -> None:
        self._farewell = farewell
        self._judges: list[Judge] = []

    def task(self, judge: Judge) -> Judge:
        """Add a task behind the others."""
        self._judges.append(judge)
        return judge

    def __repr__(self) -> str:
        return f"check() looks at all {len(self._judges)} tasks, check(1) at the first one"

    def __call__(self, number: int | None = None) -> Verdict:
        """How far the names in the caller's namespace solve task `number`, or every one."""
        known = range(1, len(self._judges) + 1)
        if number is not None and number not in known:
            return Verdict(solved=False, sentence=f"There is no task {number!r} here: they are 1 to {len(self._judges)}.")
        names = sys._getframe(1).f_globals  # noqa: SLF001 - a notebook's namespace, without IPython: an exercise may be a script
        for task in known if number is None else [number]:
            if missing := _missing(self._judges[task - 1], names):
                return Verdict(solved=False, sentence=f"Task {task}: {missing}")
        return Verdict(solved=True, sentence=self._farewell if number is None else f"Task {number} is solved.")


def _missing(judge: Judge, names: Mapping[str, Any]) -> str:
    """What the learner has still to do, as a sentence; empty when the task is solved."""
    wanted = list(inspect.signature(judge).parameters)
    if absent := [name for name in wanted if name not in names]:
        return f"there is no `{absent[0]}` yet; run the cell that makes it, then this one again."
    if still := [name for name in wanted if names[name] is ...]:
        return f"put your answer in place of the dots behind `{still[0]} =`."
    if empty := [name for name in wanted if names[name] is None]:
        return f"`{empty[0]}` is None, which is no answer yet."
    try:
        _judged(judge, [names[name] for name in wanted])
    except UnsolvedError as unsolved:
        return str(unsolved)
    except Exception as error:  # noqa: BLE001 - the learner's own code may raise anything, and that is what to tell them
        said = textwrap.shorten(str(error).partition("\n")[0], _LONGEST, placeholder=" and so on").rstrip(".")
        return f"your code was tried, and stopped with {type(error).__name__}{f': {said}' if said else ''}."
    return ""


def _judged(judge: Judge, values: list[Any]) -> None:
    """Let the judge run the learner's code: from the same random numbers each time, without touching those of the notebook."""
    import numpy as np  # noqa: PLC0415 - late: only who checks an answer needs it
    import torch  # noqa: PLC0415 - as above

    before = random.getstate(), np.random.get_state()  # noqa: NPY002 - the very generator that the learner's code may draw from
    try:
        with torch.random.fork_rng(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of code that is known to be broken, the sentence says enough
            for seed in (random.seed, np.random.seed, torch.manual_seed):
                seed(0)
            judge(*values)
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])  # noqa: NPY002 - as above


def seal(place: str, answer: object) -> str:
    """The hash of an answer, salted with the place that asks for it, so that equal answers to two questions look different.

    Case, blanks and quotation marks at the ends make no difference: ``"Log "`` is as good as ``log``.
    """
    plain = str(answer).strip(" \t\n'\"`").casefold()
    return hashlib.pbkdf2_hmac("sha256", plain.encode(), place.encode(), _ROUNDS).hex()[:32]


@dataclass(frozen=True)
class Sealed:
    """One right answer; its author takes `digest` from `seal(place, answer)`."""

    place: str
    digest: str

    def fits(self, answer: object) -> bool:
        """Whether that is the answer."""
        return seal(self.place, answer) == self.digest
