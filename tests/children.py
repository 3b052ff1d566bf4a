"""Starts child processes and ends them: none outlives the block in which it was started, nor does a process that it started itself."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
import uuid
from contextlib import ExitStack, contextmanager, suppress
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import psutil

from tests import processes

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from multiprocessing.process import BaseProcess
    from pathlib import Path

LIMIT_S = 120.0
_MARK = "TORCHDEBUG_TESTS_LAUNCH"
_MOST_OUTPUT = 1 << 24
_KILLED_WITHIN_S = 10.0


class Ended(NamedTuple):
    """How a command ended, and what it wrote."""

    code: int
    out: str
    err: str


class Child:
    """A command that runs, or has run, with the time at which it is killed."""

    def __init__(self, process: subprocess.Popen[bytes], out: IO[bytes], err: IO[bytes], until_s: float) -> None:
        self.process, self._out, self._err, self._until_s = process, out, err, until_s

    @property
    def out(self) -> str:
        return _text(self._out)

    @property
    def err(self) -> str:
        return _text(self._err)

    def wait_for(self, start: str, limit_s: float = LIMIT_S) -> str:
        """Wait for a whole line of the standard output that starts so, and return the rest of it."""
        until_s = time.monotonic() + limit_s
        while True:
            is_over = self.process.poll() is not None or time.monotonic() > until_s  # before the look: nothing can come after it
            if rest := [line[len(start) : -1] for line in self.out.splitlines(keepends=True) if _is_whole(line, start)]:
                return rest[0]
            if is_over:
                raise AssertionError(self._described(f"did not print {start!r}"))
            time.sleep(0.02)

    def ended(self) -> Ended:
        """Wait for its end, whatever its exit code."""
        try:
            code = self.process.wait(max(0.0, self._until_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise AssertionError(self._described("did not end in time")) from None
        return Ended(code, self.out, self.err)

    def check(self) -> Ended:
        """Wait for its end, which must be exit code 0."""
        result = self.ended()
        if result.code:
            raise AssertionError(self._described(f"ended with exit code {result.code}"))
        return result

    def _described(self, what: str) -> str:
        return f"{self.process.args!r} {what}; its output:\n{self.out[-2000:]}{self.err[-6000:]}"


@contextmanager
def launched(
    *commands: tuple[str, ...],
    limit_s: float = LIMIT_S,
    cwd: Path | None = None,
    envs: tuple[Mapping[str, str], ...] = (),
    stdin: int = subprocess.DEVNULL,
) -> Iterator[list[Child]]:
    """Start each command in a session of its own; at the end of the block they and all that they started are killed.

    ``envs`` holds what is added to the environment of each command. Output goes to files without a name, so that no pipe fills up.
    """
    mark, until_s = uuid.uuid4().hex, time.monotonic() + limit_s
    started: list[Child] = []
    with ExitStack() as stack:
        stack.callback(_kill_marked, mark, started)
        for number, command in enumerate(commands):
            out, err = (stack.enter_context(tempfile.TemporaryFile()) for _ in range(2))
            environment = {**os.environ, **(envs[number] if envs else {}), _MARK: mark}
            process = subprocess.Popen(command, cwd=cwd, env=environment, stdin=stdin, stdout=out, stderr=err, start_new_session=True)
            started.append(Child(process, out, err, until_s))
        yield started


def run(*command: str, limit_s: float = LIMIT_S, cwd: Path | None = None, **environment: str) -> Ended:
    """Run a command to its end, whatever its exit code."""
    with launched(command, limit_s=limit_s, cwd=cwd, envs=(environment,)) as (child,):
        return child.ended()


def python(*words: str, limit_s: float = LIMIT_S, cwd: Path | None = None, **environment: str) -> str:
    """Run this interpreter, which must end well, and return its standard output."""
    with launched((sys.executable, *words), limit_s=limit_s, cwd=cwd, envs=(environment,)) as (child,):
        return child.check().out


@contextmanager
def none_outlives() -> Iterator[None]:
    """Kill at the end of the block the processes of `multiprocessing` that were started in it and still run, with their descendants."""
    before = set(multiprocessing.active_children())
    try:
        yield
    finally:
        for process in set(multiprocessing.active_children()) - before:
            kill(process)


def join(*processes: Any, limit_s: float = LIMIT_S) -> None:
    """Join processes of `multiprocessing`, which must all end within the time."""
    until_s = time.monotonic() + limit_s
    for process in processes:
        process.join(max(0.0, until_s - time.monotonic()))
    if running := [process.name for process in processes if process.is_alive()]:
        msg = f"processes did not end within {limit_s:.0f} s: {running}"
        raise AssertionError(msg)


def kill(process: BaseProcess) -> None:
    """Kill a process of `multiprocessing` and its descendants, and reap it."""
    with suppress(ValueError):  # closed already
        if process.pid is not None:
            processes.kill(process.pid)
        process.join(_KILLED_WITHIN_S)


def _is_whole(line: str, start: str) -> bool:
    return line.startswith(start) and line.endswith("\n")


def _text(file: IO[bytes]) -> str:
    """Read from the start, without moving the place at which the child writes."""
    return os.pread(file.fileno(), _MOST_OUTPUT, 0).decode(errors="replace")


def _kill_marked(mark: str, started: list[Child]) -> None:
    """Kill by the mark in the environment, which also processes inherit that have left the session, as ranks of torchrun do."""
    until_s = time.monotonic() + _KILLED_WITHIN_S
    while marked := marked_processes(_MARK, mark):
        for process in marked:
            with suppress(psutil.Error):
                process.kill()
        for child in started:
            child.process.poll()
        if time.monotonic() > until_s:
            msg = f"processes could not be killed: {marked}"
            raise AssertionError(msg)
        time.sleep(0.01)
    for child in started:
        child.process.wait(_KILLED_WITHIN_S)
        if child.process.stdin is not None:
            with suppress(BrokenPipeError):
                child.process.stdin.close()


def marked_processes(variable: str, mark: str) -> list[psutil.Process]:
    """The processes that run with this value of an environment variable, whatever has become of their parents."""
    return [process for process in psutil.process_iter() if _is_marked(process, variable, mark)]


def _is_marked(process: psutil.Process, variable: str, mark: str) -> bool:
    try:
        return process.environ().get(variable) == mark and process.status() != psutil.STATUS_ZOMBIE
    except (psutil.Error, OSError):
        return False
