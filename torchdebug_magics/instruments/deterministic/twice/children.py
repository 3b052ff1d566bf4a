"""Child processes that the user's code starts: they cannot be taken back, and a later run starts them again. They are told of."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from typing import Any

from torchdebug_magics.instruments.deterministic.twice.disk.disk_calls import asker

__all__ = ["Children"]


class Children:
    """Of the first run. Workers of a DataLoader, and what torch starts for itself, are none."""

    def __init__(self, refuse: Callable[[str], None]) -> None:
        self._refuse = refuse
        """Told of each before it starts; may raise."""
        self._started: dict[str, None] = {}

    @property
    def said(self) -> tuple[str, ...]:
        """A phrase each."""
        return tuple(f"the child process `{name}`, which each run starts" for name in self._started)

    def calls(self) -> list[tuple[Any, str, Any]]:
        """What stands in, and where."""
        opened = self._noting(vars(subprocess.Popen)["__init__"], lambda _self, args=(), *_, **__: _name(args))
        started = self._noting(vars(BaseProcess)["start"], lambda process: process.name)
        return [(subprocess.Popen, "__init__", opened), (BaseProcess, "start", started), (os, "system", self._noting(os.system, _name))]

    def _noting(self, original: Callable[..., Any], name_of: Callable[..., str]) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            __tracebackhide__ = True
            if asker(sys._getframe(1)) in {"user", "library"}:
                name = name_of(*args, **kwargs)
                self._refuse(name)
                self._started[name] = None
            return original(*args, **kwargs)

        return noted


def _name(command: Any) -> str:
    """The program, without its folder."""
    try:
        words = shlex.split(command) if isinstance(command, str) else [os.fsdecode(one) for one in command]
    except (TypeError, ValueError):
        words = []
    return words[0].rpartition(os.sep)[2] if words else "a command"
