"""A sealed answer can be compared, and not read."""

from __future__ import annotations

import ast
import importlib
from types import CodeType
from typing import TYPE_CHECKING, Any

import pytest

from tests.notebooks.runs import EXERCISES, solutions_of
from torchdebug_magics.exercises.checking import Sealed, seal

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.mark.parametrize("answer", ["log", "Log", " log\n", "'log'", '"log"', "`log`"])
def test_the_answer_fits_however_it_is_written(answer: str) -> None:
    assert Sealed("here", seal("here", "log")).fits(answer)


@pytest.mark.parametrize("answer", ["", "lo", "logs", None, ..., 3])
def test_no_other_fits(answer: object) -> None:
    assert not Sealed("here", seal("here", "log")).fits(answer)


def test_a_number_fits_as_a_word() -> None:
    assert Sealed("here", seal("here", 51)).fits("51")


def test_the_same_answer_looks_different_in_two_places() -> None:
    assert seal("here", "log") != seal("there", "log")


def constants(code: CodeType) -> Iterator[Any]:
    for value in code.co_consts:
        if isinstance(value, CodeType):
            yield from constants(value)
        elif isinstance(value, tuple | frozenset):
            yield from value
        else:
            yield value


def answers(stem: str) -> set[str]:
    """What the solutions assign in the clear: numbers and words, and not code."""
    trees = [ast.parse(code.replace("%%", "# %%")) for code in solutions_of(stem)]
    assigned = [node.value for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Assign)]
    given = [value for node in assigned for value in (node.values if isinstance(node, ast.Dict) else [node])]
    return {str(node.value).casefold() for node in given if isinstance(node, ast.Constant)}


def test_these_exercises_ask_for_words_and_numbers() -> None:
    assert answers("nan") == {"51", "1", "addmmbackward0", "log"}
    assert len(answers("overfit")) == 8
    assert answers("leak") == {"activity"}


@pytest.mark.parametrize("stem", ["nan", "overfit", "reproduce", "learn"])
def test_no_answer_stands_in_the_module_that_judges_it(stem: str) -> None:
    """Reading `check`, its module, and all that hangs on them gives nothing away; that of `leak` is the name of a variable."""
    module = importlib.import_module(f"torchdebug_magics.exercises.{stem}")
    source = compile(module.__loader__.get_source(module.__name__), module.__file__, "exec")
    found = {str(value).casefold() for value in constants(source)}
    # A bare 1 is in every module, as a count.
    assert answers(stem) - {"1"} & found == set()
    assert not any(answer in text for answer in answers(stem) - {"1", "log"} for text in found)


@pytest.mark.parametrize("stem", EXERCISES)
def test_every_exercise_has_its_checks_in_a_module_of_the_same_name(stem: str) -> None:
    assert importlib.import_module(f"torchdebug_magics.exercises.{stem}").check
