"""Measurements: ratios block by block, from bad step to verdict, memory, synchronisations."""

from __future__ import annotations

import gc
import resource
import statistics
import subprocess
import sys
import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import torchdebug_magics
from tests.bench.models import BATCHES_COUNT, Training, Workload, plant_in_first_layer, train, train_badly
from tests.bench.rivals import CONTENDERS, Contender

SETTLING_STEPS = BATCHES_COUNT
"""Steps before the timed ones of a block. nanhunt learns in its first three which modules are called outermost."""


@dataclass(frozen=True)
class Spread:
    """A median and the middle half around it."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        if len(values) < 2:
            return cls(values[0], values[0], values[0])
        return cls(*statistics.quantiles(values, n=4, method="inclusive"))


@dataclass(frozen=True)
class Cost:
    """What one contender costs, as a ratio to the plain loop."""

    contender: str
    step_s: Spread
    wall_ratio: Spread
    cpu_ratio: Spread
    """Of process CPU time, which a busy neighbour disturbs less; meaningless on an accelerator."""
    entering_s: Spread
    """To open the session and to close it."""
    settling_s: Spread
    """What its first steps take beyond as many plain ones."""


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _timed(device: torch.device, call: Callable[[], object]) -> tuple[float, float]:
    _wait(device)
    wall, cpu = time.perf_counter(), time.process_time()
    call()
    _wait(device)
    return time.perf_counter() - wall, time.process_time() - cpu


def _fresh(workload: Workload, device: torch.device) -> Training:
    torch.manual_seed(0)
    return workload.make(device)


# --- ratios --------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Block:
    wall_s: float
    cpu_s: float
    entering_s: float
    settling_s: float


def _block(contender: Contender, training: Training, steps_count: int, device: torch.device, settling_steps: int) -> _Block:
    began = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # detect_anomaly warns that it is slow
        with contender.watch(training):
            entered = time.perf_counter()
            train(training, settling_steps)
            _wait(device)
            settled = time.perf_counter()
            wall, cpu = _timed(device, lambda: train(training, steps_count))
            timed = time.perf_counter()
    return _Block(wall / steps_count, cpu / steps_count, (entered - began) + (time.perf_counter() - timed), settled - entered)


def costs(
    workload: Workload,
    device: torch.device,
    rounds: int,
    contenders: Sequence[Contender] = CONTENDERS,
    settling_steps: int = SETTLING_STEPS,
) -> list[Cost]:
    """Blocks of A B C D E, B C D E A, ...: the ratio of each to the plain block of its own round."""
    field = [(contender, _fresh(workload, device)) for contender in contenders]
    for contender, training in field:
        contender.prepare(training)
        _block(contender, training, 1, device, SETTLING_STEPS)
    blocks: dict[str, list[_Block]] = {contender.name: [] for contender in contenders}
    gc.collect()
    for number in range(rounds):
        first = number % len(field)
        for contender, training in (*field[first:], *field[:first]):
            blocks[contender.name].append(_block(contender, training, workload.block, device, settling_steps))
    plain = blocks["plain"]
    return [
        Cost(
            name,
            Spread.of([one.wall_s for one in own]),
            Spread.of([one.wall_s / other.wall_s for one, other in zip(own, plain, strict=False)]),
            Spread.of([one.cpu_s / max(other.cpu_s, 1e-9) for one, other in zip(own, plain, strict=False)]),
            Spread.of([one.entering_s for one in own]),
            Spread.of([one.settling_s - other.settling_s for one, other in zip(own, plain, strict=False)]),
        )
        for name, own in blocks.items()
    ]


# --- from bad step to verdict --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Hunt:
    """How long the cell stood still before it could say what went wrong."""

    plant: str
    step_s: float
    """A plain step, timed just before."""
    verdict_s: Spread
    limit_s: float
    sentence: str
    right: bool


def hunt(workload: Workload, device: torch.device, plant: str, times: int) -> Hunt:
    """From the call of the bad backward() to the error that names the bug."""
    taken, plain, sentence, right = [], [], "", True
    for _ in range(times):
        training = _fresh(workload, device)
        plant_in_first_layer(training)
        train(training, 2)
        began_plain = time.perf_counter()
        train(training, workload.block)
        _wait(device)
        plain.append((time.perf_counter() - began_plain) / workload.block)
        began: dict[int, float] = {}
        try:
            with torchdebug_magics.nanhunt():
                train_badly(training, 8, plant, began)
        except torchdebug_magics.NonFiniteError as error:
            taken.append(time.perf_counter() - began[7])
            sentence = str(error).splitlines()[0]
            right = right and error.finding.op == ("log" if "log" in plant else "sqrt") and error.finding.step == 7
        else:
            return Hunt(plant, statistics.median(plain), Spread(0, 0, 0), 0.0, "nothing was found", right=False)
    step = statistics.median(plain)
    return Hunt(plant, step, Spread.of(taken), 10 * step + 1, sentence, right)


# --- memory --------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Memory:
    """What is kept because of us."""

    plain_peak_bytes: int
    watched_peak_bytes: int
    outliving: dict[str, tuple[int, int]]
    """By kind of step: how many outputs of modules were alive after it, in the plain loop and under nanhunt."""


def memory(workload: Workload, device: torch.device) -> Memory:
    """Peaks of processes of their own, and a count of activations that outlive their step."""
    return Memory(
        _peak_of(workload, "plain", device),
        _peak_of(workload, "nanhunt", device),
        {
            kind: (outliving(workload, device, retain, watched=False), outliving(workload, device, retain, watched=True))
            for kind, retain in (("usual", False), ("retain_graph", True))
        },
    )


def _peak_of(workload: Workload, contender: str, device: torch.device) -> int:
    command = [sys.executable, "-m", "tests.bench.run", "--peak-of", f"{workload.name}:{contender}", "--device", str(device)]
    root = Path(__file__).parents[2]
    answer = subprocess.run(command, check=True, capture_output=True, text=True, cwd=root)
    return int(answer.stdout.split()[-1])


def peak_here(workload: Workload, contender: str, device: torch.device) -> int:
    """The peak of this process (on an accelerator: of its allocator) after some steps. Asked in a process made for it."""
    training = _fresh(workload, device)
    watch = next(one for one in CONTENDERS if one.name == contender).watch
    with watch(training):
        train(training, 8)
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def outliving(workload: Workload, device: torch.device, retain: bool, *, watched: bool) -> int:
    """How many outputs of modules are alive when their step is over and its own variables are gone."""
    training = _fresh(workload, device)
    contender = CONTENDERS[1 if watched else 0]
    alive: list[weakref.ref[torch.Tensor]] = []

    def see(_module: Any, _args: Any, output: Any) -> None:
        if isinstance(output, torch.Tensor):
            alive.append(weakref.ref(output))

    handles = [module.register_forward_hook(see) for module in training.model.modules()]
    most = 0
    with contender.watch(training):
        for number in range(6):
            alive.clear()
            _one_step(training, number, retain)
            most = max(most, sum(reference() is not None for reference in alive))
    for handle in handles:
        handle.remove()
    return most


def _one_step(training: Training, number: int, retain: bool) -> None:
    inputs, target = training.batches[number % BATCHES_COUNT]
    training.optimizer.zero_grad()
    training.loss(training.model(inputs), target).backward(retain_graph=retain)
    training.optimizer.step()


# --- synchronisations ----------------------------------------------------------------------------------------------------------------


def synchronisations(workload: Workload, contender: Contender, device: torch.device, steps_count: int = 10) -> float:
    """How often the host waits for the device in one step, as torch itself counts it. Only on CUDA."""
    training = _fresh(workload, device)
    contender.prepare(training)
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as seen, contender.watch(training):
        warnings.simplefilter("always")
        train(training, SETTLING_STEPS)
        torch.cuda.synchronize(device)
        seen.clear()
        torch.cuda.set_sync_debug_mode("warn")
        try:
            train(training, steps_count)
        finally:
            torch.cuda.set_sync_debug_mode(mode)
        return sum("synchroniz" in str(one.message) for one in seen) / steps_count
