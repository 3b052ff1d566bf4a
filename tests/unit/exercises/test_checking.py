"""What a check says: which task is open, what is missing, that all is solved; and that it leaves the notebook as it was."""

from __future__ import annotations

import warnings

import pytest
import torch

from torchdebug_magics.exercises.checking import Exercise, expect

check = Exercise("Well done.")


@check.task
def doubled(double):
    expect(double(2) == 4, "twice two is four.")


@check.task
def chosen(colour):
    expect(colour == "red", f"{colour} is not the colour.")


def said(code: str, number: int | None = None) -> str:
    """What `check` says in a namespace in which `code` has run."""
    names = {"check": check}
    exec(f"{code}\nsaid = check({'' if number is None else number})", names)
    return repr(names["said"])


RIGHT = "double = lambda x: 2 * x\ncolour = 'red'"


@pytest.mark.parametrize(
    ("code", "number", "sentence"),
    [
        ("", None, "○ Task 1: there is no `double` yet; run the cell that makes it, then this one again."),
        ("double = ...", 1, "○ Task 1: put your answer in place of the dots behind `double =`."),
        ("double = lambda x: x", None, "○ Task 1: twice two is four."),
        ("double = lambda x: 2 * x", 1, "✓ Task 1 is solved."),
        ("double = lambda x: 2 * x\ncolour = 'blue'", None, "○ Task 2: blue is not the colour."),
        ("colour = 'red'", 2, "✓ Task 2 is solved."),
        ("def double(x):\n    raise LookupError", 1, "○ Task 1: your code was tried, and stopped with LookupError."),
        ("def double(x):\n    return x @ 2", 1, "○ Task 1: your code was tried, and stopped with TypeError: unsupported"),
        (RIGHT, None, "✓ Well done."),
        (RIGHT, 3, "○ There is no task 3 here: they are 1 to 2."),
    ],
)
def test_it_says_in_one_sentence_what_is_missing(code: str, number: int | None, sentence: str) -> None:
    assert said(code, number).startswith(sentence)
    assert len(said(code, number)) < 220


def test_a_long_error_is_cut_to_a_sentence() -> None:
    assert len(said("def double(x):\n    raise ValueError('word ' * 500 + '\\nmore')", 1)) < 220


def test_the_verdict_is_true_when_all_is_solved() -> None:
    names = {"check": check}
    exec(f"{RIGHT}\nassert check() and check(1)\ncolour = ''\nassert not check() and check(1)", names)


def test_an_interrupt_goes_through() -> None:
    with pytest.raises(KeyboardInterrupt):
        said("def double(x):\n    raise KeyboardInterrupt", 1)


@pytest.mark.keeps_rng
def test_random_numbers_are_the_same_at_each_try_and_those_of_the_notebook_stay() -> None:
    drawn = []
    random = Exercise("Well done.")
    random.task(lambda draw: drawn.append(draw()))
    names = {"check": random, "draw": lambda: torch.rand(1).item()}
    exec("check(); check()", names)
    assert drawn[0] == drawn[1]


def test_warnings_of_broken_code_are_not_shown() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        said("import warnings\ndef double(x):\n    warnings.warn('odd')\n    return 2 * x", 1)


def test_it_says_how_it_is_used() -> None:
    assert repr(check) == "check() looks at all 2 tasks, check(1) at the first one"
