"""How each thing that a notebook holds is let go: all the places in which IPython keeps it."""

from __future__ import annotations

import re
import sys
from types import ModuleType
from typing import Any

import torch

from torchdebug_magics.probing.holders.roots import named, outputs
from torchdebug_magics.probing.shell import our_extension

__all__ = ["cached_bytes", "empty_cache", "forget_debugger", "forget_error", "forget_outputs", "forget_session"]

_LAST = ("last_type", "last_value", "last_traceback", "last_exc")
_KEPT = ("tb", "etype", "evalue", "last_syntax_error")
_DEBUGGERS_FRAME = "__pdb_convenience_variables"
"""Where pdb keeps ``$_frame`` among the globals of the frame that it looked at, from Python 3.12 on."""
_OUTPUT = re.compile(r"_(\d+)$")
_LATEST = ("_", "__", "___")


def forget_error(shell: Any | None) -> None:
    """As if no cell had failed; `%debug` and `%tb` then say that there is no traceback."""
    for name in _LAST:
        if hasattr(sys, name):
            delattr(sys, name)
    for keeper in (getattr(shell, "InteractiveTB", None), getattr(shell, "SyntaxTB", None)):
        for name in _KEPT:
            if getattr(keeper, name, None) is not None:
                setattr(keeper, name, None)
    result = getattr(shell, "last_execution_result", None)
    if result is not None:
        result.error_in_exec = result.error_before_exec = None


def forget_debugger(shell: Any | None) -> None:
    """Drop the debugger, with the frame that it left in globals; IPython creates a new one at the next ``%debug``."""
    keeper: Any = getattr(shell, "InteractiveTB", None)
    if getattr(keeper, "pdb", None) is not None:
        keeper.pdb = None
        for module in tuple(sys.modules.values()):
            if isinstance(module, ModuleType):
                vars(module).pop(_DEBUGGERS_FRAME, None)


def forget_session(shell: Any | None) -> None:
    """The last session of one of our own magics, which keeps what it found for inspection."""
    extension = our_extension(shell)
    if extension is not None:
        extension.last_session = None


def forget_outputs(shell: Any, only: int | None = None) -> None:
    """`Out`, and each other place where an output is known; a name that the user has given to something else stays."""
    held = outputs(shell)
    hidden = shell.user_ns_hidden
    values = [value for number, value in held.items() if only in {None, number}]
    values += [value for name, value in named(hidden) if (match := _OUTPUT.match(name)) and only in {None, int(match[1])}]
    for space in (shell.user_ns, hidden):
        for name in [name for name, value in named(space) if _OUTPUT.match(name) and _is_any(value, values)]:
            del space[name]
    hook = shell.displayhook
    for name in _LATEST:
        # Where the user gave the name to something else, neither of IPython's two is what stands there.
        latest = [one for one in (getattr(hook, name, ""), hidden.get(name, "")) if only is None or _is_any(one, values)]
        for space in (shell.user_ns, hidden):
            if name in space and _is_any(space[name], latest):
                space[name] = ""
        if _is_any(getattr(hook, name, ""), latest):
            setattr(hook, name, "")
    result = shell.last_execution_result
    if result is not None and (only is None or _is_any(result.result, values)):
        result.result = None
    for number in [number for number in held if only in {None, number}]:
        del held[number]


def _is_any(value: object, values: list[object]) -> bool:
    return any(value is one for one in values)


def cached_bytes() -> int:
    """What the CUDA allocator keeps to reuse; 0 where it is not in use."""
    if not torch.cuda.is_initialized():
        return 0
    return sum(torch.cuda.memory_reserved(one) - torch.cuda.memory_allocated(one) for one in range(torch.cuda.device_count()))


def empty_cache() -> int | None:
    """The bytes that the CUDA allocator gave back; None where it is not in use. CUDA is not initialised for that."""
    if not torch.cuda.is_initialized():
        return None
    devices = range(torch.cuda.device_count())
    before = sum(map(torch.cuda.memory_reserved, devices))
    torch.cuda.empty_cache()
    return before - sum(map(torch.cuda.memory_reserved, devices))
