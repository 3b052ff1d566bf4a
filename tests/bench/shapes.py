"""Time `%shapes`: ``python -m tests.bench.shapes``. It prints, and never fails on a figure.

torchinfo, where it is installed, is given the same model and input.
"""

from __future__ import annotations

import resource
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __package__ in {None, ""}:  # `python tests/bench/shapes.py`
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import nn

import torchdebug_magics
from torchdebug_magics.format import duration

_ROUNDS = 5


def main() -> None:
    from transformers import BertConfig, BertModel, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    torch.set_num_threads(1)
    torchdebug_magics.shapes(nn.Linear(2, 2), (1, 2))  # the imports are paid once a process
    bert = BertModel(BertConfig())
    _print("BERT-base at 2 x 512", _median(lambda: torchdebug_magics.shapes(bert, (2, 512))), "asked: below 1 s")
    gpt2, ids = GPT2LMHeadModel(GPT2Config()), torch.zeros(8, 1024, dtype=torch.int64)
    ours = _median(lambda: torchdebug_magics.shapes(gpt2, ids))
    _print("GPT-2 at 8 x 1024", ours, f"asked: a twentieth of torchinfo; {_rival(gpt2, ids, ours)}")
    with torch.device("meta"):
        llama = LlamaForCausalLM(_seventy_billion(LlamaConfig))
    _print("Llama of 70 billion on meta at 1 x 4096", _median(lambda: torchdebug_magics.shapes(llama, (1, 4096)), 3), "asked: below 5 s")
    for depth in (50, 100, 200):
        nest = _nested(depth)
        _print(f"nesting {depth} deep", _median(lambda nest=nest: torchdebug_magics.shapes(nest, (2, 8))), "asked: linear")
    for many in (2000, 4000, 8000):
        wide = nn.Sequential(*(nn.Identity() for _ in range(many)))
        _print(f"{many:,} calls", _median(lambda wide=wide: torchdebug_magics.shapes(wide, (2, 8)), 3), "asked: linear")
    ratio = _cell_ratio()
    print(f"{'%%shapes above a training cell':45} {ratio:9.2f}x   asked: at most 1.10x the plain loop")
    print(f"{'largest memory of this process':45} {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:9.2f} GiB")


def _seventy_billion(config: Any) -> Any:
    return config(
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        max_position_embeddings=4096,
    )


def _nested(depth: int) -> nn.Module:
    module: nn.Module = nn.Linear(8, 8)
    for _ in range(depth):
        module = nn.Sequential(module)
    return module


def _median(call: Callable[[], object], rounds: int = _ROUNDS) -> float:
    return statistics.median(_timed(call) for _ in range(rounds))


def _timed(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def _rival(model: nn.Module, ids: torch.Tensor, ours: float) -> str:
    try:
        import torchinfo
    except ImportError:
        return "torchinfo is not installed here"
    theirs = _timed(lambda: torchinfo.summary(model, input_data=ids, verbose=0))
    return f"torchinfo took {duration(theirs)}, {theirs / ours:,.0f} times as long"


def _cell_ratio() -> float:
    """Of a training loop under ``%%shapes`` to the same loop without it, block by block in turn."""
    model = nn.Sequential(*(part for _ in range(20) for part in (nn.Linear(64, 64), nn.ReLU())))
    optimizer, rows = torch.optim.SGD(model.parameters(), lr=0.01), torch.randn(64, 64)

    def loop() -> None:
        for _ in range(200):
            optimizer.zero_grad()
            model(rows).sum().backward()
            optimizer.step()

    def watched() -> None:
        with torchdebug_magics.shapes():
            loop()

    loop()
    return statistics.median(_timed(watched) / _timed(loop) for _ in range(_ROUNDS))


def _print(what: str, seconds_s: float, asked: str) -> None:
    print(f"{what:45} {duration(seconds_s):>10}   {asked}", flush=True)


if __name__ == "__main__":
    main()
