"""Processes with agents, which end with the test."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from torchdebug_magics.probing.children import launching
from torchdebug_magics.probing.children.asking import processes_with_agents
from torchdebug_magics.probing.children.launching import Children

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture(autouse=True)
def agents_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the folders of agents are made: empty afterwards. The paths of sockets must be short."""
    with tempfile.TemporaryDirectory(prefix="t") as folder:
        monkeypatch.setattr(launching, "_short_folder", lambda: folder)
        yield Path(folder)
        assert os.listdir(folder) == []  # noqa: PTH208 - names say enough


@pytest.fixture
def children() -> Iterator[Children]:
    found = Children()
    with ExitStack() as stack:
        found.attach(stack)
        yield found


@pytest.fixture
def start() -> Iterator[Callable[..., Any]]:
    """Start a function in a process by a method; those that still run are killed at the end."""
    started: list[Any] = []

    def begin(function: Callable[..., object], *args: object, method: str = "fork", **options: object) -> Any:
        process = multiprocessing.get_context(method).Process(target=function, args=args, **options)  # type: ignore[attr-defined]
        process.start()
        started.append(process)
        return process

    yield begin
    for process in started:
        with contextlib.suppress(ValueError):  # closed already
            process.kill()
            process.join()
            process.close()


@pytest.fixture
def until() -> Callable[..., bool]:
    def wait(holds: Callable[[], object], limit_s: float = 20.0) -> bool:
        end_s = time.monotonic() + limit_s
        while not (found := bool(holds())) and time.monotonic() < end_s:
            time.sleep(0.01)
        return found

    return wait


@pytest.fixture
def with_agent(start: Callable[..., Any], children: Children, until: Callable[..., bool]) -> Callable[..., Any]:
    """As `start`, and its agent is there."""

    def begin(function: Callable[..., object], *args: object, **options: Any) -> Any:
        process = start(function, *args, **options)
        assert until(lambda: process.pid in processes_with_agents(children.folder))
        return process

    return begin
