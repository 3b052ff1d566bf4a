"""Time `%%gradwatch` beside Lightning's ``grad_norm`` and a loop of ``.norm().item()``; ``python -m tests.bench.gradwatch``.

It prints, and never fails on a figure. The ratios that count are those of CPU time: the process has one thread.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __package__ in {None, ""}:  # `python tests/bench/gradwatch.py`
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

import torchdebug_magics
from tests.bench import measure
from tests.bench.models import WORKLOADS
from tests.bench.rivals import Contender, nothing, off
from tests.bench.run import device_name, hush_transformers, print_costs

if TYPE_CHECKING:
    from tests.bench.models import Training

ASKED = {"gpt2": 1.05, "cnn": 1.05, "mlp": 1.30}
LONG = {"gpt2": (4, 20), "cnn": (16, 20), "mlp": (120, 40)}
"""Steps timed in one go, and those before, of which the first are looked at closely: memory at the 2nd, 3rd, 5th, 8th and 13th."""
MOST_ROUNDS = 12


@contextmanager
def _at_each_step(training: Training, look: Callable[[torch.nn.Module], object]) -> Iterator[None]:
    handle = training.optimizer.register_step_pre_hook(lambda *_: look(training.model) and None)
    try:
        yield
    finally:
        handle.remove()


def _items(model: torch.nn.Module) -> dict[str, float]:
    """What tutorials have people paste."""
    return {name: one.grad.norm().item() for name, one in model.named_parameters() if one.grad is not None}


def _grad_norm(model: torch.nn.Module) -> Any:
    from lightning.pytorch.utilities import grad_norm

    return grad_norm(model, 2)


CONTENDERS = (
    Contender("plain", nothing, off),
    Contender("gradwatch", nothing, lambda _: torchdebug_magics.gradwatch()),
    Contender(".norm().item(), each parameter", nothing, lambda training: _at_each_step(training, _items)),
    Contender("Lightning's grad_norm", nothing, lambda training: _at_each_step(training, _grad_norm)),
)


def main(arguments: Sequence[str] | None = None) -> None:
    compare(CONTENDERS, {name: {"gradwatch": asked} for name, asked in ASKED.items()}, sys.argv[1:] if arguments is None else arguments)


def compare(contenders: Sequence[Contender], asked: Mapping[str, Mapping[str, float]], arguments: Sequence[str]) -> None:
    """Print what each contender costs in long runs of each workload, with what it is asked to cost; `--cuda`: on a GPU."""
    device = torch.device("cuda" if "--cuda" in arguments else "cpu")
    quick, names = "--quick" in arguments, [name for name in arguments if not name.startswith("-")]
    torch.set_num_threads(1)
    hush_transformers()
    print(f"torch {torch.__version__}, {device_name(device)}, load {os.getloadavg()[0]:.1f}")
    for workload in WORKLOADS:
        if not names or workload.name in names:
            print(f"\n{workload.title}", flush=True)
            block, settling = LONG[workload.name]
            rounds = 4 if quick else MOST_ROUNDS
            costs = measure.costs(replace(workload, block=block), device, rounds, contenders, settling)
            print_costs(costs, asked[workload.name], settling, by_cpu=device.type == "cpu")
    print(f"\nload at the end {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
