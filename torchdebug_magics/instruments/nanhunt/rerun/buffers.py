"""Buffers before a step, and back again."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple

import torch
from torch._C import _functorch as functorch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.nn.modules.batchnorm import _NormBase

from torchdebug_magics.probing.distributed import this_rank
from torchdebug_magics.probing.state.contents import Kept, each_element_once

_SMALL_COUNT = 1 << 16
"""Copying so few numbers takes no longer than a few ops."""
_NOWHERE = nullcontext()
_UNTIL_TOLD_S = 5.0
"""What was found becomes an error, and that a report; then the signal comes again."""


class Held(NamedTuple):
    """A buffer at one moment."""

    names: dict[str, torch.Tensor | None]
    name: str
    kept: Kept

    def put_back(self) -> None:
        """Make it hold what it held."""
        self.kept.put_back()
        self.names[self.name] = self.kept.tensor


class BufferKeeper:
    """Takes the buffers of some modules again and again, copying only what can have changed.

    Batch norm writes its running statistics without a version bump, and so does whoever writes through ``.data``: a buffer is always
    copied. Only a large one (a causal mask, say) that is none of batch norm's is copied again only when its version moved.
    """

    def __init__(self, modules: Iterable[torch.nn.Module]) -> None:
        self._always: list[dict[str, torch.Tensor | None]] = []
        self._rarely: list[dict[str, torch.Tensor | None]] = []
        for module in modules:
            if module._buffers:
                (self._always if isinstance(module, _NormBase) else self._rarely).append(module._buffers)
        self._large: dict[tuple[int, str], Kept] = {}

    def take(self) -> list[Held]:
        """The buffers as they are now."""
        if not self._always and not self._rarely:
            return []
        with torch.no_grad():
            held = [Held(names, name, Kept.of(buffer)) for names in self._always for name, buffer in _present(names)]
            return held + [Held(names, name, self._rare(names, name, buffer)) for names in self._rarely for name, buffer in _present(names)]

    def _rare(self, names: dict[str, torch.Tensor | None], name: str, buffer: torch.Tensor) -> Kept:
        if buffer.is_inference() or each_element_once(buffer).numel() <= _SMALL_COUNT:
            return Kept.of(buffer)
        known = self._large.get((id(names), name))
        if known is None or known.tensor is not buffer or known.version != buffer._version:
            known = self._large[id(names), name] = Kept.of(buffer)
        return known


def _present(names: dict[str, torch.Tensor | None]) -> list[tuple[str, torch.Tensor]]:
    return [(name, buffer) for name, buffer in names.items() if buffer is not None and not buffer.is_meta]


def is_outermost_gradient() -> bool:
    """Whether the one ``grad`` that runs is the innermost transform, in nothing but ``vmap``: what it returns is a gradient to be used."""
    if functorch.peek_interpreter_stack() is None:
        return False
    kinds = [one.key() for one in functorch.get_interpreter_stack() or ()]
    around = {functorch.TransformType.Vmap}
    return bool(kinds) and kinds[-1] == functorch.TransformType.Grad and around.issuperset(kinds[:-1])


def base_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that all transforms have wrapped; any other one itself."""
    while functorch.is_functorch_wrapped_tensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    return tensor


def outside_transforms() -> AbstractContextManager[object]:
    """As if none ran; afterwards they go on."""
    return _NOWHERE if functorch.peek_interpreter_stack() is None else temporarily_clear_interpreter_stack()


@contextmanager
def end_deferred() -> Iterator[None]:
    """Only in a process that was launched, and only while nothing in it waits for another rank: native code would never hear of SIGTERM."""
    is_launched = multiprocessing.parent_process() is not None or this_rank.world_size() > 1
    if not is_launched or threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)
        if came:
            end = threading.Timer(_UNTIL_TOLD_S, os.kill, (os.getpid(), signal.SIGTERM))
            end.daemon = True
            end.start()
