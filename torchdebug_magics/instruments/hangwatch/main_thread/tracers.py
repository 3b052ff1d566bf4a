"""What slows every line or op down while it is on: trace functions, profilers, anomaly mode, dispatch modes."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import torch

from torchdebug_magics.probing.source.code_owner import frames_above, owner

__all__ = ["installed_tracer"]

_MODES = {"__torch_dispatch__": "TorchDispatchMode", "__torch_function__": "TorchFunctionMode"}


def installed_tracer(frame: FrameType | None) -> tuple[str, str, str] | None:
    """(what, its usual price, how to be without) for the thread that a frame belongs to; None where nothing is on."""
    for one in frames_above(frame):
        if one.f_trace is not None and owner(one.f_code.co_filename) in {"user", "torch", "library"}:
            name = getattr(one.f_trace, "__qualname__", type(one.f_trace).__name__)
            return f"a trace function (`sys.settrace`: {name})", "each Python line takes 2x to 20x as long", "call `sys.settrace(None)`"
    if torch.is_anomaly_enabled():
        repair = "call `torch.autograd.set_detect_anomaly(False)`; `%%nanhunt` finds NaN without it"
        return "anomaly mode", "a training step takes 2x to 3x as long", repair
    if getattr(torch.autograd.profiler, "_is_profiler_enabled", False):
        return "PyTorch's profiler", "small ops take 2x to 5x as long", "profile a few steps only, with `schedule=`"
    for one in frames_above(frame):
        kind = _MODES.get(one.f_code.co_name)
        if kind is not None and owner(one.f_code.co_filename) in {"user", "library"}:
            return f"a `{kind}`", "each op takes tens of microseconds longer", "enter the mode for a few steps only"
    return _monitor()


def _monitor() -> tuple[str, str, str] | None:
    monitoring: Any = getattr(sys, "monitoring", None)
    for number in range(6) if monitoring is not None else ():
        name = monitoring.get_tool(number)
        if name and monitoring.get_events(number):
            return f"the tool {name!r} (`sys.monitoring`)", "each Python line takes longer", f"call `sys.monitoring.free_tool_id({number})`"
    return None
