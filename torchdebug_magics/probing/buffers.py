"""Buffers before a step, and back again."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch.nn.modules.batchnorm import _NormBase

__all__ = ["BufferKeeper", "Buffers"]

_SMALL_COUNT = 1 << 16
"""Copying so few numbers takes no longer than a few ops."""


@dataclass(frozen=True)
class _Held:
    names: dict[str, torch.Tensor | None]
    name: str
    tensor: torch.Tensor
    copy: torch.Tensor

    def put_back(self) -> None:
        with torch.no_grad():
            if _can_change(self.tensor):
                _own_elements(self.tensor).copy_(self.copy)
        self.names[self.name] = self.tensor


@dataclass(frozen=True)
class Buffers:
    """Values and identities of buffers at one moment."""

    held: tuple[_Held, ...]

    def put_back(self) -> None:
        """Make every buffer hold what it held."""
        for one in self.held:
            one.put_back()


_NONE = Buffers(())


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
        self._copies: dict[tuple[int, str], tuple[torch.Tensor, int, torch.Tensor]] = {}

    def take(self) -> Buffers:
        """The buffers as they are now."""
        if not self._always and not self._rarely:
            return _NONE
        held = []
        with torch.no_grad():
            for names in self._always:
                held += [_Held(names, name, buffer, _copy(buffer)) for name, buffer in _present(names)]
            for names in self._rarely:
                held += [self._rare(names, name, buffer) for name, buffer in _present(names)]
        return Buffers(tuple(held))

    def _rare(self, names: dict[str, torch.Tensor | None], name: str, buffer: torch.Tensor) -> _Held:
        key = id(names), name
        if buffer.is_inference() or _own_elements(buffer).numel() <= _SMALL_COUNT:
            return _Held(names, name, buffer, _copy(buffer))
        known = self._copies.get(key)
        if known is None or known[0] is not buffer or known[1] != buffer._version:
            known = self._copies[key] = buffer, buffer._version, _copy(buffer)
        return _Held(names, name, buffer, known[2])


def _copy(buffer: torch.Tensor) -> torch.Tensor:
    return _own_elements(buffer).clone()


def _can_change(buffer: torch.Tensor) -> bool:
    return not buffer._is_zerotensor() and (not buffer.is_inference() or torch.is_inference_mode_enabled())


def _own_elements(buffer: torch.Tensor) -> torch.Tensor:
    """An expanded tensor has each element many times, and cannot be written: the first of each."""
    if buffer.layout is not torch.strided or buffer.is_nested or 0 not in buffer.stride():
        return buffer
    return buffer[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in buffer.stride())]


def _present(names: dict[str, torch.Tensor | None]) -> list[tuple[str, torch.Tensor]]:
    return [(name, buffer) for name, buffer in names.items() if buffer is not None and not buffer.is_meta]
