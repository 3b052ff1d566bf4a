"""Time `%%autograd`: while nothing is wrong, every step recorded, and from an error to the verdict; ``python -m tests.bench.autograd``.

It prints, and never fails on a figure. The ratios that count are those of CPU time: the process has one thread.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

if __package__ in {None, ""}:  # `python tests/bench/autograd.py`
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

import torchdebug_magics
from tests.bench import measure
from tests.bench.models import BATCHES_COUNT, WORKLOADS, train
from tests.bench.rivals import Contender, nothing, off
from tests.bench.run import hush_transformers, print_costs
from torchdebug_magics.format import duration

if TYPE_CHECKING:
    from tests.bench.models import Training, Workload

ASKED = {"gpt2": 1.03, "cnn": 1.03, "mlp": 1.20}
LONG = {"gpt2": (6, 10), "cnn": (96, 40), "mlp": (1500, 40)}
"""Steps timed in one go, and those before, in which it settles. Of the small models, later recorded steps are among them; GPT-2 would
need a minute for the next one, which then takes its 2 %."""
MOST_ROUNDS = 10
ERRORS = ("inplace", "second_backward", "cut")
ERROR_STEPS = (0, 9)
"""The first step is recorded; the other one comes when the loop runs at full speed."""

PLAIN = Contender("plain", nothing, off)
WATCHING = Contender("autograd", nothing, lambda _: torchdebug_magics.autograd())
RECORDING = (
    PLAIN,
    Contender("autograd --every-step", nothing, lambda _: torchdebug_magics.autograd(every_step=True)),
    Contender("detect_anomaly", nothing, lambda _: torch.autograd.set_detect_anomaly(True)),
)


def _costs(workload: Workload, *, quick: bool) -> None:
    device = torch.device("cpu")
    rounds = 3 if quick else MOST_ROUNDS
    block, settling = LONG[workload.name]
    long = replace(workload, block=block)
    print_costs(measure.costs(long, device, rounds, (PLAIN, WATCHING), settling), {"autograd": ASKED[workload.name]}, settling, by_cpu=True)
    print_costs(measure.costs(workload, device, rounds, RECORDING), {})


# --- from an error to the verdict ----------------------------------------------------------------------------------------------------


def _until_error(training: Training, steps_count: int, kind: str, began: list[float]) -> None:
    train(training, steps_count)
    inputs, target = training.batches[training.done_count % BATCHES_COUNT]
    loss = training.loss(training.model(inputs), target)
    if kind == "inplace":
        saved = loss.exp()
        saved += 1
        loss = saved
    elif kind == "cut":
        loss = loss.detach()
    else:
        loss.backward()
    began.append(time.thread_time())
    loss.backward()  # raises


def _verdicts(workload: Workload, times: int) -> None:
    device = torch.device("cpu")
    training = workload.make(device)
    train(training, 2)
    began_s = time.thread_time()
    train(training, workload.block)
    step_s = (time.thread_time() - began_s) / workload.block
    limit_s = 10 * step_s + 1
    for kind in ERRORS:
        for steps_count in ERROR_STEPS:
            taken = []
            for _ in range(times):
                training = workload.make(device)
                began: list[float] = []
                session = torchdebug_magics.autograd()
                with contextlib.suppress(RuntimeError), session:
                    _until_error(training, steps_count, kind, began)
                taken.append(time.thread_time() - began[0])
                found = session.report.finding
                right = found is not None and found.kind == kind and found.location is not None
            took_s = statistics.median(taken)
            word = "within" if took_s <= limit_s else "above"
            what = f"{kind} in step {steps_count}"
            wrong = "" if right else f"; WRONG: {session.report.verdict}"
            print(f"  {what:28} {duration(took_s):>9}   asked: {duration(limit_s)} ({word}){wrong}", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    given = sys.argv[1:] if arguments is None else arguments
    quick, names = "--quick" in given, [one for one in given if not one.startswith("-")]
    torch.set_num_threads(1)
    hush_transformers()
    print(f"torch {torch.__version__}, CPU ({os.cpu_count()} cores), load {os.getloadavg()[0]:.1f}")
    for workload in WORKLOADS:
        if not names or workload.name in names:
            print(f"\n{workload.title}", flush=True)
            _costs(workload, quick=quick)
            _verdicts(workload, 1 if quick else 5)
    print(f"\nload at the end {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
