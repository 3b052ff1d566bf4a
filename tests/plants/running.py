"""Run a plant: its set-up and cell through one of the two doors to the instrument, or plainly, without it."""

from __future__ import annotations

import contextlib
import gc
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tests.doors import Door, FunctionDoor, positional_and_named

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from tests.plants.plant import Plant


@dataclass(frozen=True)
class Run:
    """A plant that has run under its instrument."""

    report: Any
    error: BaseException | None
    namespace: dict[str, Any]
    is_unchanged: bool
    """Whether the state of the subjects is as before; True if it was not compared."""


def observe(plant: Plant, door: Door, *, state: Callable[[Iterable[Any]], Any] | None = None, **options: Any) -> Run:
    """Run the set-up, and the cell under the instrument; `options` come on top of the plant's own.

    `state` is taken of all subjects, before and after.
    """
    settings = {**plant.options, **options}
    with _process_kept():
        door.plain(plant.setup)
        if not plant.subjects:
            seen = door(plant.instrument, plant.cell, **settings)
            return Run(seen.report, seen.error, seen.namespace, is_unchanged=True)
        namespace = door.plain(plant.cell)
        before = state(_subjects(plant, namespace)) if state else None
        seen = door.examine(plant.instrument, plant.subjects, **settings)
        after = state(_subjects(plant, namespace)) if state else None
        return Run(seen.report, seen.error, namespace, is_unchanged=before == after)


def run_plainly(plant: Plant, folder: Path) -> dict[str, Any]:
    """Run the set-up and the cell without the instrument, and return their namespace.

    They run anew each time: a cell changes models and optimizers of its set-up, so that no namespace can be shared.
    """
    door = FunctionDoor(folder)
    with _process_kept():
        door.plain(plant.setup)
        return door.plain(plant.cell)


def _subjects(plant: Plant, namespace: dict[str, Any]) -> list[Any]:
    values, named = positional_and_named(plant.subjects, namespace)
    return [*values, *named.values()]


@contextlib.contextmanager
def _process_kept() -> Iterator[None]:
    """Random numbers and garbage collection are afterwards as before: cells may seed, and turn the collector off."""
    import torch

    collects = gc.isenabled()
    try:
        with torch.random.fork_rng():
            yield
    finally:
        if collects:
            gc.enable()
