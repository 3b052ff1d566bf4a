"""What this CPU cannot run, plain torch is asked first: a test of such a model then holds that torch's own error passes unchanged.

An LSTM in bfloat16 asks oneDNN for a primitive that it has for CPUs with AVX512-BF16 or AMX only; a build for arm64 may lack oneDNN, and
one without FBGEMM and QNNPACK cannot quantize a model. ``ONEDNN_MAX_CPU_ISA=AVX2`` stands in for such a CPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["refusal"]


def refusal(work: Callable[[], object]) -> str:
    """The message with which plain torch refuses to do it on this machine; nothing where it can."""
    try:
        work()
    except RuntimeError as error:
        return str(error)
    return ""
