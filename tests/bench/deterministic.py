"""Time `%%deterministic` against torch's own flags set by hand: ``python -m tests.bench.deterministic``. It prints, and never fails."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if __package__ in {None, ""}:  # `python tests/bench/deterministic.py`
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

import torchdebug_magics
from tests.bench import measure
from tests.bench.models import WORKLOADS
from tests.bench.rivals import Contender, nothing, off
from tests.bench.run import hush_transformers, print_costs

if TYPE_CHECKING:
    from tests.bench.models import Training


@contextlib.contextmanager
def _by_hand(_training: Training) -> Iterator[None]:
    torch.manual_seed(42)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.deterministic, torch.backends.cudnn.allow_tf32 = True, False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.backends.cudnn.deterministic, torch.backends.cudnn.allow_tf32 = False, True


CONTENDERS = (
    Contender("plain", nothing, _by_hand),  # what the others are measured by
    Contender("deterministic", nothing, lambda _: torchdebug_magics.deterministic()),
    Contender("no flags", nothing, off),
)


def main(arguments: Sequence[str] | None = None) -> None:
    quick = "--quick" in (sys.argv[1:] if arguments is None else arguments)
    torch.set_num_threads(1)
    hush_transformers()
    print(f"torch {torch.__version__}, CPU ({os.cpu_count()} cores), load {os.getloadavg()[0]:.1f}; plain: torch's flags, set by hand")
    for workload in WORKLOADS:
        print(f"\n{workload.title}", flush=True)
        rounds = max(3, workload.rounds // 4) if quick else workload.rounds
        print_costs(measure.costs(workload, torch.device("cpu"), rounds, CONTENDERS), {"deterministic": 1.01})


if __name__ == "__main__":
    main()
