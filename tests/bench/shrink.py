"""Time `%shrink`: ``python -m tests.bench.shrink``. It prints, and never fails on a figure."""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path
from typing import Any

if __package__ in {None, ""}:  # `python tests/bench/shrink.py`
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

import torchdebug_magics

_ROUNDS = 5


def main() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    torch.set_num_threads(1)
    sizes = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8}
    with torch.device("meta"):
        llama = LlamaForCausalLM(LlamaConfig(vocab_size=128_256, **sizes))
    _print("Llama of 70 billion on meta", llama, "asked: below 1 s")
    _print("GPT-2 of 48 layers", GPT2LMHeadModel(GPT2Config(n_layer=48)), "")


def _print(what: str, model: Any, asked: str) -> None:
    times = []
    for _ in range(_ROUNDS):
        wall, processor = time.perf_counter(), time.process_time()
        torchdebug_magics.shrink(model)
        times.append((time.perf_counter() - wall, time.process_time() - processor))
        torchdebug_magics.shrink(model, undo=True)
    walls, processors = zip(*times, strict=True)
    print(f"{what:35} {statistics.median(walls):6.2f} s, {statistics.median(processors):5.2f} s of a processor   {asked}")


if __name__ == "__main__":
    main()
