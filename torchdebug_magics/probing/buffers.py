"""Buffers before a step, and back again."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch.nn.modules.batchnorm import _NormBase

__all__ = ["BufferKeeper", "Buffers"]


@dataclass(frozen=True)
class _Held:
    names: dict[str, torch.Tensor | None]
    name: str
    tensor: torch.Tensor
    copy: torch.Tensor

    def put_back(self) -> None:
        with torch.no_grad():
            if not torch.is_inference(self.tensor) or torch.is_inference_mode_enabled():
                self.tensor.copy_(self.copy)
        self.names[self.name] = self.tensor


@dataclass(frozen=True)
class Buffers:
    """Values and identities of buffers at one moment."""

    held: tuple[_Held, ...]

    def put_back(self) -> None:
        """Make every buffer hold what it held."""
        for one in self.held:
            one.put_back()


class BufferKeeper:
    """Takes the buffers of some modules again and again, copying only what can have changed.

    Batch norm writes its running statistics without a version bump, so those are always copied; any other buffer (a causal mask,
    say) is copied again only when its version moved.
    """

    def __init__(self, modules: Iterable[torch.nn.Module]) -> None:
        self._always: list[dict[str, torch.Tensor | None]] = []
        self._rarely: list[dict[str, torch.Tensor | None]] = []
        for module in modules:
            if module._buffers:
                (self._always if isinstance(module, _NormBase) else self._rarely).append(module._buffers)
        self._copies: dict[tuple[int, str], tuple[torch.Tensor, int, torch.Tensor]] = {}

    def take(self) -> Buffers:
        """The buffers as they are now."""
        held = []
        with torch.no_grad():
            for names in self._always:
                held += [_Held(names, name, buffer, buffer.clone()) for name, buffer in _present(names)]
            for names in self._rarely:
                held += [self._rare(names, name, buffer) for name, buffer in _present(names)]
        return Buffers(tuple(held))

    def _rare(self, names: dict[str, torch.Tensor | None], name: str, buffer: torch.Tensor) -> _Held:
        key = id(names), name
        version = -1 if buffer.is_inference() else buffer._version
        known = self._copies.get(key)
        if known is None or known[0] is not buffer or known[1] != version or version < 0:
            known = self._copies[key] = buffer, version, buffer.clone()
        return _Held(names, name, buffer, known[2])


def _present(names: dict[str, torch.Tensor | None]) -> list[tuple[str, torch.Tensor]]:
    return [(name, buffer) for name, buffer in names.items() if buffer is not None and not buffer.is_meta]
