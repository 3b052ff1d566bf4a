"""Forks the ranks of gloo jobs from one process that imports their programs once: ``python -m tests.rank_job FOLDER MODULE=SIZE...``.

A program has a ``main(rank, size, folder)``. The jobs run one after the other, each in a folder of its own. If a rank fails, its job ends.
"""

from __future__ import annotations

import gc
import importlib
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed.fsdp
import torch.distributed.tensor.parallel

from tests import children

LIMIT_S = 200.0
"""For all jobs of one launch; a deadlock ends then."""


def launch(folder: Path, *jobs: tuple[str, int]) -> list[Path]:
    """Run jobs of (program, size) to their ends, which must all be good, and return the folder of each."""
    words = [f"{module}={size}" for module, size in jobs]
    children.python("-W", "ignore", "-m", "tests.rank_job", str(folder), *words, limit_s=LIMIT_S, OMP_NUM_THREADS="1")
    return [_folder(folder, module, size) for module, size in jobs]


def _folder(folder: Path, module: str, size: int) -> Path:
    return folder / f"{module}.{size}"


def _run(program: Any, size: int, folder: Path) -> None:
    """By `os.fork`, so that a rank does not know: it passes for a process that a launcher has started."""
    folder.mkdir()
    running = {_forked(program, rank, size, folder): rank for rank in range(size)}
    while running:
        pid, status = os.wait()
        rank = running.pop(pid)
        if code := os.waitstatus_to_exitcode(status):
            for other in running:
                os.kill(other, signal.SIGKILL)  # it may wait for this one
            sys.exit(f"rank {rank} of {size} of {program.__name__} ended with exit code {code}")


def _forked(program: Any, rank: int, size: int, folder: Path) -> int:
    if pid := os.fork():
        return pid
    code = 1
    try:
        program.main(rank, size, folder)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _warm() -> None:
    """Do once what each rank would do: import what an optimizer's step imports, and leave all of torch out of the ranks' collections.

    The program is imported after it, as an instrument looks among what is collected for the functions and models of the user.
    """
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1).step()
    gc.collect()
    gc.freeze()


if __name__ == "__main__":
    _warm()
    for job in sys.argv[2:]:
        name, _, number = job.partition("=")
        _run(importlib.import_module(name), int(number), _folder(Path(sys.argv[1]), name, int(number)))
