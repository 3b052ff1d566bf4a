"""What code must not touch if it is to run once more."""

from __future__ import annotations

import ast
import queue

import pytest
import torch

from torchdebug_magics.probing.state.read_once import is_read_once, reaches_beyond


@pytest.mark.parametrize(("value", "is_once"), [(iter([1]), True), ([{"a": queue.Queue()}], True), ([1, "a", torch.ones(2)], False)])
def test_what_gives_its_values_once_is_known(value: object, is_once: bool) -> None:
    assert is_read_once([value]) == is_once


@pytest.mark.parametrize(
    ("code", "is_beyond"),
    [
        ("threading.Thread(target=len, args=('a',)).start()", True),
        ("F.never_heard_of = 1", True),
        ("try: int('a')\nexcept: pass", True),
        ("try: int('a')\nexcept ValueError: F.relu(x)", False),
    ],
)
def test_what_reaches_beyond_its_names_is_known(code: str, is_beyond: bool) -> None:
    assert reaches_beyond({"F": torch.nn.functional}, ast.parse(code)) == is_beyond
