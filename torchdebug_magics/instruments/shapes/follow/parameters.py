"""Whose parameters are whose: each is counted once, where it is met first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from torchdebug_magics.probing.modules import followed
from torchdebug_magics.probing.storages import local_of, ranks_of, sharding_of
from torchdebug_magics.report import Sharding


@dataclass(frozen=True)
class Owned:
    """What one module itself holds and no module before it."""

    params: int
    trainable: int
    note: str
    shards: Mapping[str, Sharding] = field(default_factory=dict)
    """How the parameters are sharded of which other ranks hold parts, by name."""


NOTHING = Owned(0, 0, "")


class Parameters:
    """The parameters and buffers of a model as they are before it runs."""

    def __init__(self, *roots: torch.nn.Module) -> None:
        self._tensors: dict[int, torch.Tensor] = {}
        self._buffers: dict[int, torch.Tensor] = {}
        self._counted: dict[int, str] = {}
        self._met: set[int] = set()
        # Held as they are now: while the model runs, stand-ins may take their places.
        self._held: dict[int, list[tuple[str, torch.Tensor]]] = {}
        self._packed = 0
        self._packed_bytes = 0
        for root in roots:
            self.learn(root)

    def learn(self, root: torch.nn.Module) -> None:
        """Add what a root and its parts hold now."""
        for module in followed(root):
            if id(module) in self._held:
                continue
            self._held[id(module)] = list(own_parameters(module))
            for _, parameter in self._held[id(module)]:
                self._tensors.setdefault(id(parameter), parameter)
            for buffer in module._buffers.values():
                if buffer is not None:
                    self._buffers.setdefault(id(buffer), buffer)
            for packed in packed_weights(module):
                self._packed += packed.numel()
                self._packed_bytes += packed.numel() * packed.element_size()

    def held_by(self, module: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
        """What it itself held before the run, by name."""
        return self._held.get(id(module), [])

    def stand_ins(self, model: torch.nn.Module) -> dict[int, int]:
        """The id of what stands in the place of a parameter now -> the id of the parameter."""
        followable = (module for module in followed(model) if not isinstance(module, torch.jit.ScriptModule))
        places = ((module._parameters.get(name), parameter) for module in followable for name, parameter in self.held_by(module))
        return {id(stand_in): id(parameter) for stand_in, parameter in places if stand_in is not None}

    def counted_at(self, parameter: torch.Tensor) -> str | None:
        """The path of the module that it was counted with."""
        return self._counted.get(id(parameter))

    def totals(self) -> dict[str, Any]:
        """What they come to, by the report's names for it: tied ones once, those of quantised modules too."""
        tensors = self._tensors.values()
        ranks = ranks_of(tensors)
        return {
            "total_params": sum(map(size, tensors)) + self._packed,
            "trainable_params": sum(size(tensor) for tensor in tensors if tensor.requires_grad),
            "buffer_count": len(self._buffers),
            "buffer_bytes": sum(map(size_bytes, self._buffers.values())),
            "param_bytes": sum(map(size_bytes, tensors)) + self._packed_bytes,
            "sharded_over": ranks,
            "local_param_bytes": self.local_bytes if ranks > 1 else None,
        }

    @property
    def local_bytes(self) -> int:
        """Bytes of the parts of parameters in this process."""
        return sum(size_bytes(local_of(tensor)) for tensor in self._tensors.values()) + self._packed_bytes

    @property
    def trainable_bytes(self) -> int:
        """How many bytes the gradients will have."""
        return sum(size_bytes(local_of(tensor)) for tensor in self._tensors.values() if tensor.requires_grad)

    def take(self, path: str, module: torch.nn.Module) -> Owned:
        """What `module` holds; whatever an earlier call has taken is named and not counted again."""
        if id(module) in self._met:
            return Owned(0, 0, "called before")
        self._met.add(id(module))
        params = sum(weight.numel() for weight in packed_weights(module))
        trainable = 0
        notes: list[str] = []
        shards: dict[str, Sharding] = {}
        if isinstance(module, torch.jit.ScriptModule):
            notes.append("scripted: its submodules are not seen")
        if id(module) not in self._held and any(True for _ in own_parameters(module)):
            notes.append("no registered part: its parameters are not the model's")
        for name, parameter in self._held.get(id(module)) or own_parameters(module):
            owner = self._counted.setdefault(id(parameter), path)
            if owner != path:
                notes.append(f"{name} shared with {owner or 'the root'}")
                continue
            params += size(parameter)
            shards |= {name: sharding} if (sharding := sharding_of(parameter)) is not None else {}
            trainable += size(parameter) if parameter.requires_grad else 0
        return Owned(params, trainable, ", ".join(notes), shards)


def own_parameters(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The parameters that the module itself holds, by name; of a scripted one all, as its parts run out of sight."""
    if isinstance(module, torch.jit.ScriptModule):
        yield from module.named_parameters()
        return
    for name, parameter in module._parameters.items():
        if parameter is not None:
            yield name, parameter


def size(tensor: torch.Tensor) -> int:
    """Elements; none where a lazy one has no shape yet."""
    return 0 if is_lazy(tensor) else tensor.numel()


def size_bytes(tensor: torch.Tensor) -> int:
    """Bytes, likewise."""
    return size(tensor) * tensor.element_size()


def packed_weights(module: Any) -> Iterator[torch.Tensor]:
    """The weight and bias of a quantised module, which are no parameters of torch's."""
    if "quantized" not in type(module).__module__:
        return
    for name in ("weight", "bias"):
        part = getattr(module, name, None)
        if callable(part) and isinstance(tensor := part(), torch.Tensor):
            yield tensor
