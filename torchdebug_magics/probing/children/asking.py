"""Calls the agent of another process, and reads the files that a process has left."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from pathlib import Path
from typing import Any

from torchdebug_magics.machine.process_state import catches
from torchdebug_magics.probing.children.agent import dump_signal, socket_path

__all__ = ["AgentError", "ask", "dumped_stack", "left_error", "processes_with_agents"]


class AgentError(Exception):
    """The agent could not answer; `is_silent` where it is there and no Python thread gets a turn."""

    def __init__(self, message: str, *, is_silent: bool = False) -> None:
        super().__init__(message)
        self.is_silent = is_silent


def ask(folder: str, pid: int, call: str, timeout_s: float = 1.0, **values: object) -> Any:
    """Call ``module:function`` in the process and return its result; raise `AgentError` without an answer in time."""
    end_s = time.monotonic() + timeout_s
    parts = []
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(timeout_s)
            connection.connect(socket_path(folder, pid))
            connection.sendall(json.dumps({"call": call, "with": values}).encode())
            connection.shutdown(socket.SHUT_WR)
            while part := connection.recv(1 << 16):
                parts.append(part)
                connection.settimeout(max(0.01, end_s - time.monotonic()))
        answer = json.loads(b"".join(parts))
    except TimeoutError:
        msg = f"process {pid} did not answer within {timeout_s:g} s"
        raise AgentError(msg, is_silent=True) from None
    except (OSError, ValueError, AttributeError) as error:
        msg = f"process {pid} could not be asked: {type(error).__name__}: {error}"
        raise AgentError(msg) from None
    if "failure" in answer:
        msg = f"process {pid} could not answer: {answer['failure']}"
        raise AgentError(msg)
    return answer["answer"]


def processes_with_agents(folder: str) -> list[int]:
    """The processes that have an agent, or have had one."""
    return sorted(int(name.partition(".")[0]) for name in _names(folder) if name.endswith(".socket"))


def left_error(folder: str, pid: int) -> dict[str, Any] | None:
    """The exception that ended a process: ``type``, ``message``, ``frames``; None where none is recorded."""
    with contextlib.suppress(OSError, ValueError):
        record: dict[str, Any] = json.loads(Path(folder, f"{pid}.error").read_text(encoding="utf-8"))
        return record
    return None


def dumped_stack(folder: str, pid: int, *, is_alive: bool) -> list[tuple[str, int, str]]:
    """(file, line, function), innermost first, of a process in which no Python thread gets a turn, or that was killed by a signal."""
    file, number = Path(folder, f"{pid}.stack"), dump_signal()
    if is_alive and number is not None and catches(pid, number):
        with contextlib.suppress(OSError):
            os.truncate(file, 0)
            os.kill(pid, number)
            time.sleep(0.05)
    with contextlib.suppress(OSError):
        return _parsed(file.read_text(encoding="utf-8", errors="replace"))
    return []


def _parsed(text: str) -> list[tuple[str, int, str]]:
    """Parse the stack that faulthandler wrote for the thread that runs Python, or else for the last thread, which is the main one."""
    stacks = [part for part in text.split("\n\n") if "  File " in part]
    current = [part for part in stacks if part.lstrip().startswith(("Current thread", "Fatal"))] or stacks[-1:]
    lines = [line.strip() for part in current[:1] for line in part.splitlines() if line.startswith("  File ")]
    found = []
    for line in lines:  # File "a.py", line 3 in function
        name, _, rest = line.removeprefix('File "').rpartition('", line ')
        number, _, function = rest.partition(" in ")
        if number.isdigit():
            found.append((name, int(number), function))
    return found


def _names(folder: str) -> list[str]:
    try:
        return os.listdir(folder)  # noqa: PTH208 - names are all that is needed
    except OSError:
        return []
