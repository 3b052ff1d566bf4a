"""How precisely float32 is computed, in torch's old words and in its new ones.

Both must say the same: once only the new ones are changed, whoever reads an old one, as ``cudnn.flags()`` does, gets a RuntimeError.
So the old ones are set first, where they can be read; the new ones then say what is left to say, from the whole to the part.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

__all__ = ["PRECISIONS", "Precision", "full"]

_LESS = {"tf32": "ieee", "bf16": "ieee", "high": "highest", "medium": "highest", True: False}


class Precision(NamedTuple):
    """One of the words. It reads as None where old and new ones are at odds: then the old ones are nothing that could be kept."""

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], object]


def full(now: object) -> object:
    """The same, or what is as precise as float32 is."""
    return _LESS.get(now, now) if isinstance(now, (str, bool)) else now


def _old(name: str, read: Callable[[], Any], write: Callable[[Any], object]) -> Precision:
    def readable() -> Any:
        try:
            return read()
        except RuntimeError:  # "mix of the legacy and new APIs"
            return None

    return Precision(name, readable, lambda value: None if value is None else write(value))


def _new(name: str, backend: Any) -> Precision:
    return Precision(
        f"{name}.fp32_precision".lstrip("."),
        lambda: backend.fp32_precision,
        lambda value: setattr(backend, "fp32_precision", value),
    )


def _cudnn_tf32() -> bool:
    return bool(torch.backends.cudnn.allow_tf32)


def _set_cudnn_tf32(value: bool) -> None:
    torch.backends.cudnn.allow_tf32 = value


_BACKENDS: Any = torch.backends
PRECISIONS = (
    _old("float32_matmul_precision", torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    _old("cudnn.allow_tf32", _cudnn_tf32, _set_cudnn_tf32),
    _new("", _BACKENDS),
    _new("cudnn", _BACKENDS.cudnn),
    _new("mkldnn", _BACKENDS.mkldnn),
    _new("cuda.matmul", _BACKENDS.cuda.matmul),
    _new("cudnn.conv", _BACKENDS.cudnn.conv),
    _new("cudnn.rnn", _BACKENDS.cudnn.rnn),
    _new("mkldnn.matmul", _BACKENDS.mkldnn.matmul),
    _new("mkldnn.conv", _BACKENDS.mkldnn.conv),
    _new("mkldnn.rnn", _BACKENDS.mkldnn.rnn),
)
