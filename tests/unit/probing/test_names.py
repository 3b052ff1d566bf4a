"""What the user's names lead to, and by which path; no code of the user's runs on the way."""

from __future__ import annotations

import sys
from typing import Any

import torch

from torchdebug_magics.probing.names import Named, user_names, values_found


class Wanted:
    """What is looked for."""


class Slotted:
    __slots__ = ("empty", "full")

    def __init__(self, full: object) -> None:
        self.full = full


class Hostile:
    """Asks to be left alone."""

    def __init__(self) -> None:
        self.inner = Wanted()

    @property
    def __class__(self) -> type:
        raise RuntimeError("not to be asked")

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("not to be asked")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("not to be asked")

    __hash__ = None


def found(**names: object) -> list[str]:
    named = values_found((Named(name, value) for name, value in names.items()), lambda value: type(value) is Wanted)
    return [one.name for one in named]


def test_paths_are_written_as_code():
    model = torch.nn.Sequential(torch.nn.Identity())
    model[0].mark = Wanted()
    assert found(a={"k": [Wanted()], 3: (Wanted(),)}) == ["a['k'][0]", "a[3][0]"]
    assert found(model=model) == ["model.0.mark"]
    assert found(slotted=Slotted(Wanted())) == ["slotted.full"]


def test_functions_lead_to_what_they_close_over():
    hidden = Wanted()

    def shown(given: object = Wanted()) -> object:
        return hidden, given

    assert found(shown=shown) == ["hidden of shown()", "a default of shown()"]


def test_each_value_once_by_the_shortest_name_the_first_in_the_alphabet():
    one = Wanted()
    assert found(z=one, a=[one], b=one) == ["b"]


def test_no_code_of_the_users_runs():
    assert found(hostile=Hostile()) == ["hostile.inner"]


def test_circles_and_endless_lists_end():
    circle: list[object] = []
    circle.append(circle)
    deep: Any = Wanted()
    for _ in range(50):
        deep = [deep]
    assert found(circle=circle, deep=deep, long=list(range(10**6)), objects=[object() for _ in range(10**5)]) == []


def test_libraries_are_not_searched():
    torch.planted = Wanted()
    try:
        assert found(torch=torch, kind=torch.nn.Linear) == []
    finally:
        del torch.planted


def test_local_names_of_the_calls_that_run():
    def inner() -> list[Named]:
        local_one = Wanted()
        return [
            one
            for one in user_names(sys._getframe())
            if one.value is local_one or one.name == "outer_one in test_local_names_of_the_calls_that_run()"
        ]

    outer_one = Wanted()
    assert [one.name for one in inner()] == ["local_one in inner()", "outer_one in test_local_names_of_the_calls_that_run()"]
    assert outer_one is not None
