"""All that a deterministic cell may move, and must put back."""

from __future__ import annotations

import os
import random
import warnings
from typing import Any

import numpy as np
import torch

BACKENDS = {
    "all": torch.backends,
    "cudnn": torch.backends.cudnn,
    "mkldnn": torch.backends.mkldnn,
    "cuda.matmul": torch.backends.cuda.matmul,
    "cudnn.conv": torch.backends.cudnn.conv,
    "cudnn.rnn": torch.backends.cudnn.rnn,
    "mkldnn.matmul": torch.backends.mkldnn.matmul,
    "mkldnn.conv": torch.backends.mkldnn.conv,
    "mkldnn.rnn": torch.backends.mkldnn.rnn,
}


def flags() -> dict[str, Any]:
    return {
        "deterministic": (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
        "inductor": torch._inductor.config.deterministic,
        "fill": torch.utils.deterministic.fill_uninitialized_memory,
        "cudnn": (torch.backends.cudnn.enabled, torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark),
        "sdpa": [getattr(torch.backends.cuda, f"{name}_sdp_enabled")() for name in ("math", "flash", "mem_efficient", "cudnn")],
        "old words": (_old(torch.get_float32_matmul_precision), _old(lambda: torch.backends.cudnn.allow_tf32)),
        **{f"{name}.fp32_precision": backend.fp32_precision for name, backend in BACKENDS.items()},
        "environment": dict(os.environ),
        "warnings": (list(warnings.filters), warnings.showwarning),
    }


def random_states(*generators: Any) -> dict[str, Any]:
    return {
        "random": random.getstate(),
        "numpy": str(np.random.get_state(legacy=False)),  # noqa: NPY002 - the global one is meant
        "torch": torch.get_rng_state().tolist(),
        "queued": vars(torch.cuda._lazy_seed_tracker).copy(),
        **{f"generator {position}": _state(one) for position, one in enumerate(generators)},
    }


def _old(read: Any) -> Any:
    try:
        return read()
    except RuntimeError:
        return "at odds with the new ones"


def _state(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state().tolist()
    if isinstance(generator, random.Random):
        return generator.getstate()
    return str(generator.bit_generator.state) if isinstance(generator, np.random.Generator) else str(generator.get_state())
