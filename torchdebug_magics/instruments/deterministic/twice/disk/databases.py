"""Databases of SQLite's, which reach the disk by themselves: those that a run opens are copies, those that were open are looked at."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from torchdebug_magics.instruments.deterministic.twice.disk.disk_calls import path_of

if TYPE_CHECKING:
    from torchdebug_magics.probing.names import Named

__all__ = ["Databases", "connecting", "is_database"]


def is_database(value: object) -> bool:
    """Whether it is an open one."""
    return issubclass(type(value), sqlite3.Connection)


def connecting(lead: Callable[[str], str]) -> tuple[Any, str, Any]:
    """What stands in for `sqlite3.connect`, and where: it opens the file that `lead` says."""
    original = sqlite3.connect

    def connect(database: Any, *args: Any, **kwargs: Any) -> sqlite3.Connection:
        path = None if database == ":memory:" or kwargs.get("uri") else path_of(database, {})
        connection: sqlite3.Connection = original(database if path is None else lead(path), *args, **kwargs)
        return connection

    return sqlite3, "connect", connect


class Databases:
    """Those that were open before the first run."""

    def __init__(self, found: Iterable[Named]) -> None:
        self._found = [(one.name, one.value, _changes_count(one.value)) for one in found]

    def changed(self) -> str:
        """The name of one that was changed since; empty where none was."""
        return next((name for name, one, count in self._found if count is not None and _changes_count(one) not in {count, None}), "")


def _changes_count(database: sqlite3.Connection) -> int | None:
    """None where it is closed, or another thread's."""
    try:
        return database.total_changes
    except sqlite3.Error:
        return None
