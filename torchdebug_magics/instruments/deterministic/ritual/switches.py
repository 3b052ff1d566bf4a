"""Every switch that the ritual turns: how it is read, what it should be, how it is set."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Final

import torch

COMPILER = "torch._inductor.config"
"""The module of the compiler's settings, which is imported with the compiler: that takes seconds."""
INDUCTOR = "inductor.deterministic"
_MODES: Final = {"off": "default", "warn only": "warn", "on": "error"}
_WORKSPACE = ":4096:8"
"""Of the two that NVIDIA calls deterministic, the one that is not slow."""
_LESS = {"tf32": "ieee", "bf16": "ieee", "high": "highest", "medium": "highest", True: False}
_BACKENDS: Any = torch.backends


@dataclass(frozen=True)
class Switch:
    """One switch of torch's or of the environment."""

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], object]
    wanted: Callable[[Any], Any]
    """From its value to the one for the same numbers twice: the very same where nothing has to change."""

    def set(self) -> None:
        """Set it as it is wanted."""
        self.turn(self.wanted(self.read()))

    def turn(self, value: object) -> None:
        """Set it to a value, if it stands otherwise."""
        if self.read() != value:
            self.write(value)


def switches(seed: int, *, strict: bool) -> tuple[Switch, ...]:
    """In the order in which they are set, and put back: what a setter moves besides its own stands after it."""
    return (
        Switch("deterministic_algorithms", mode, _set_mode, _always("on" if strict else "warn only")),
        Switch(INDUCTOR, _inductor, _set_inductor, lambda now: now if now is None else True),
        _attribute("fill_uninitialized_memory", torch.utils.deterministic, "fill_uninitialized_memory", _always(True)),  # noqa: FBT003 - the value
        _attribute("cudnn.deterministic", torch.backends.cudnn, "deterministic", _always(True)),  # noqa: FBT003 - the value
        _attribute("cudnn.benchmark", torch.backends.cudnn, "benchmark", _always(False)),  # noqa: FBT003 - the value
        *_PRECISIONS,
        *_attention(strict=strict),
        _variable("CUBLAS_WORKSPACE_CONFIG", lambda now: now or _WORKSPACE),
        _variable("PYTHONHASHSEED", _always(str(seed))),
    )


def _always(value: object) -> Callable[[Any], Any]:
    return lambda _: value


def mode() -> str:
    """What torch does of a non-deterministic op: nothing, warn, or raise."""
    if not torch.are_deterministic_algorithms_enabled():
        return "off"
    return "warn only" if torch.is_deterministic_algorithms_warn_only_enabled() else "on"


def _set_mode(mode: str) -> None:
    # `use_deterministic_algorithms` would import the compiler for its flag, which takes seconds; see `COMPILER`.
    torch.set_deterministic_debug_mode(_MODES[mode])


def _inductor() -> bool | None:
    """The compiler's own, which `use_deterministic_algorithms` moves as well; None where it is not imported, or this torch has none."""
    value: bool | None = getattr(sys.modules.get(COMPILER), "deterministic", None)
    return value


def _set_inductor(value: bool | None) -> None:
    config: Any = sys.modules.get(COMPILER)
    if value is not None and config is not None:
        config.deterministic = value


def _attribute(name: str, owner: Any, attribute: str, wanted: Callable[[Any], Any]) -> Switch:
    return Switch(name, lambda: getattr(owner, attribute), lambda value: setattr(owner, attribute, value), wanted)


def _attention(*, strict: bool) -> tuple[Switch, ...]:
    """While torch only warns, it keeps the backward of its fused attention as it is, which sums in any order; strictly, it takes another.

    On the CPU all are deterministic, so they are left alone in a torch that knows no GPU.
    """
    if strict or not torch.backends.cuda.is_built():
        return ()
    cuda: Any = torch.backends.cuda
    names = {"math": True, "flash": False, "mem_efficient": False, "cudnn": False}
    return tuple(
        Switch(f"sdpa.{name}", getattr(cuda, f"{name}_sdp_enabled"), getattr(cuda, f"enable_{name}_sdp"), _always(on))
        for name, on in names.items()
    )


def _variable(name: str, wanted: Callable[[Any], Any]) -> Switch:
    def write(value: str | None) -> None:
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value

    return Switch(name, lambda: os.environ.get(name), write, wanted)


# Both must say the same: once only the new ones are changed, whoever reads an old one, as ``cudnn.flags()`` does, gets a RuntimeError.
# So the old ones are set first, where they can be read; the new ones then say what is left to say, from the whole to the part.
def _full(now: object) -> object:
    """The same, or what is as precise as float32 is."""
    return _LESS.get(now, now) if isinstance(now, (str, bool)) else now


def _old(name: str, read: Callable[[], Any], write: Callable[[Any], object]) -> Switch:
    """It reads as None where old and new ones are at odds: then the old ones are nothing that could be kept."""

    def readable() -> Any:
        try:
            return read()
        except RuntimeError:  # "mix of the legacy and new APIs"
            return None

    return Switch(name, readable, lambda value: None if value is None else write(value), _full)


def _new(path: str) -> Switch:
    return _attribute(f"{path}.fp32_precision".lstrip("."), attrgetter(path)(_BACKENDS) if path else _BACKENDS, "fp32_precision", _full)


_PRECISIONS = (
    _old("float32_matmul_precision", torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    _old("cudnn.allow_tf32", lambda: _BACKENDS.cudnn.allow_tf32, lambda value: setattr(_BACKENDS.cudnn, "allow_tf32", value)),
    *map(_new, ("", "cudnn", "mkldnn", "cuda.matmul", "cudnn.conv", "cudnn.rnn", "mkldnn.matmul", "mkldnn.conv", "mkldnn.rnn")),
)
