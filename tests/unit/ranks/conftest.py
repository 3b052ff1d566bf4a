"""Processes with agents, which end with the test."""

from __future__ import annotations

import multiprocessing
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

from tests.children import none_outlives
from torchdebug_magics.instruments.hangwatch.everybody.looking_around import processes_with_agents
from torchdebug_magics.ranks.launching import Children

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture(autouse=True)
def nothing_is_left(agents_folder: Path) -> None:
    """In any of these tests."""


@pytest.fixture
def children() -> Iterator[Children]:
    found = Children()
    with ExitStack() as stack:
        found.attach(stack)
        yield found


@pytest.fixture
def start() -> Iterator[Callable[..., Any]]:
    """Start a function in a process by a method; those that still run are killed at the end."""

    def begin(function: Callable[..., object], *args: object, method: str = "fork", **options: object) -> Any:
        process = multiprocessing.get_context(method).Process(target=function, args=args, **options)  # type: ignore[attr-defined]
        process.start()
        return process

    with none_outlives():
        yield begin


@pytest.fixture
def with_agent(start: Callable[..., Any], children: Children, until: Callable[..., bool]) -> Callable[..., Any]:
    """As `start`, and its agent is there."""

    def begin(function: Callable[..., object], *args: object, **options: Any) -> Any:
        process = start(function, *args, **options)
        assert until(lambda: process.pid in processes_with_agents(children.folder))
        return process

    return begin
