"""Time `%overfit` of a training that passes, beside as many plain steps; ``python -m tests.bench.overfit``.

It prints, and never fails on a figure. The ratio that counts is that of CPU time: the process has one thread.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

if __package__ in {None, ""}:  # `python tests/bench/overfit.py`
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

import torchdebug_magics
from tests.bench.measure import Spread
from tests.bench.run import hush_transformers
from torchdebug_magics.format import duration

ASKED = 1.1
ROUNDS = 7


def _training() -> tuple[Any, dict[str, torch.Tensor], torch.optim.Optimizer]:
    """A GPT-2 of 4 layers, and 8 x 64 tokens: small, so that what is done beside the steps weighs the more."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"vocab_size": 1000, "n_positions": 64, "n_embd": 64, "n_layer": 4, "n_head": 4}
    without_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}  # %overfit turns it off, and would be the faster one
    config = GPT2Config(**sizes, **without_dropout, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(config).train()
    words = torch.randint(0, 1000, (8, 64))
    return model, {"input_ids": words, "labels": words}, torch.optim.AdamW(model.parameters(), lr=1e-3)


def _plain(steps: int) -> Callable[[], None]:
    model, batch, optimizer = _training()

    def run() -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            model(**batch).loss.backward()
            optimizer.step()

    return run


def _overfit() -> Callable[[], Any]:
    model, batch, optimizer = _training()
    return lambda: torchdebug_magics.overfit(model, batch, optimizer=optimizer)


def _timed_s(run: Callable[[], object]) -> tuple[float, float]:
    wall_s, processor_s = time.perf_counter(), time.process_time()
    run()
    return time.perf_counter() - wall_s, time.process_time() - processor_s


def main(arguments: Sequence[str] | None = None) -> None:
    given = sys.argv[1:] if arguments is None else arguments
    torch.set_num_threads(1)
    hush_transformers()
    print(f"torch {torch.__version__}, CPU ({os.cpu_count()} cores), load {os.getloadavg()[0]:.1f}")
    report = _overfit()()
    steps = len(report.losses)
    print(f"\nGPT-2, 4 layers, 64 wide, batch 8 x 64: {report.verdict}")
    ratios, own_s = [], []
    for _ in range(2 if "--quick" in given else ROUNDS):
        plain, ours = _timed_s(_plain(steps)), _timed_s(_overfit())
        ratios.append((ours[0] / plain[0], ours[1] / plain[1]))
        own_s.append(ours[1])
    wall, processor = (Spread.of(column) for column in zip(*ratios, strict=True))
    word = "within" if processor.median <= ASKED else "above"
    print(f"  to as many plain steps   wall {wall.median:.3f} ({wall.low:.3f}-{wall.high:.3f})")
    print(f"                           CPU  {processor.median:.3f} ({processor.low:.3f}-{processor.high:.3f})   asked: {ASKED} ({word})")
    print(f"  one run                  {duration(Spread.of(own_s).median)} of CPU time")
    print(f"\nload at the end {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
