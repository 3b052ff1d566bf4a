"""What a row leaves under a door: ``with notebooks() as run: run(writer, "verify")``."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import re
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from tests.children import launched
from tests.writers import forms

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.writers.writer import Writer

_CHILD = Path(__file__).with_name("child.py")
_RANDOM_NAME = re.compile(r"(?<=tmp)[a-z0-9_]{8}(?=$|[/.])")
_PID = re.compile(r"(?<=[_.-])\d{3,7}(?=$|[/._-])")


@dataclass(frozen=True)
class Outcome:
    """All that can be compared after the cells, and what the report says."""

    files: tuple[tuple[str, ...], ...]
    """Path, kind, mode and content; names that are drawn or are a process's number are written ``*``."""
    variables: dict[str, Any]
    after: dict[str, Any]
    """Variables after the cell that closes what is open, which also shows the positions of descriptors."""
    cwd: str
    environ: dict[str, str]
    requests: int
    threads: tuple[str, ...]
    processes: tuple[str, ...]
    printed: tuple[str, ...]
    text: str
    """All that was printed, a report shown by a magic included."""
    errors: tuple[str, ...]
    report: dict[str, Any] | None
    verdict: str
    shown: str
    seconds: float
    failed: str = ""
    """Why there is no outcome: it ran too long, or the harness failed."""


class Run(Protocol):
    """Run the row under the door, a name of `forms.DOORS` or `forms.BASELINES`."""

    def __call__(self, writer: Writer, door: str) -> Outcome: ...


@contextlib.contextmanager
def notebooks(limit_s: float = 3600.0, job_limit_s: float = 60.0, **environment: str) -> Iterator[Run]:
    """Start a process that has imported torch, and in which each run is a fork with fresh folders; `environment` is added to its own."""
    with tempfile.TemporaryDirectory(prefix="writers_") as folder:
        command = (sys.executable, "-P", str(_CHILD), folder)
        environment = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **environment}
        with launched(command, limit_s=limit_s, cwd=Path(folder), envs=(environment,), stdin=-1) as (child,):
            child.wait_for("ready ")
            numbers = itertools.count(1)

            @functools.cache
            def run(writer: Writer, door: str) -> Outcome:
                cells, in_notebook = forms.form(writer, door)
                job = {
                    "id": f"job{next(numbers)}", "cells": cells, "notebook": in_notebook, "names": forms.names(writer),
                    "imports": [writer.needs] if writer.needs else [], "limit_s": job_limit_s,
                }  # fmt: skip
                assert child.process.stdin is not None
                child.process.stdin.write(json.dumps(job).encode() + b"\n")
                child.process.stdin.flush()
                ended = child.wait_for(f"done {job['id']} ", job_limit_s + 60)
                root = Path(folder, job["id"])
                outcome = _read(root, ended)
                shutil.rmtree(root, ignore_errors=True)
                return outcome

            yield run


def _read(root: Path, ended: str) -> Outcome:
    aside = root / "aside"
    text = aside / "out.txt"
    if not (aside / "outcome.json").exists():
        broken = aside / "broken.txt"
        why = broken.read_text() if broken.exists() else f"{ended} without an outcome"
        return Outcome((), {}, {}, "", {}, 0, (), (), (), text.read_text() if text.exists() else "", (), None, "", "", 0.0, why)
    values = json.loads((aside / "outcome.json").read_text())
    files = ((_settled(path), kind, mode, _settled(text) if kind == "link" else text) for path, kind, mode, text in values.pop("files"))
    known = {"shown": "", **{name: value for name, value in values.items() if name in Outcome.__dataclass_fields__}}
    return Outcome(tuple(sorted(files)), **{name: tuple(value) if isinstance(value, list) else value for name, value in known.items()})


def _settled(name: str) -> str:
    """A path without what differs from run to run: the random part of a temporary name, the number of a process."""
    return _PID.sub(lambda number: number[0] if len(number[0]) == 4 and number[0].startswith("00") else "*", _RANDOM_NAME.sub("*", name))
