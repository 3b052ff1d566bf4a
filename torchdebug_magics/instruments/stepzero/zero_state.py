"""The state of models and optimizers at one moment: taken, and put back into the same tensors."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from torchdebug_magics.format import plural
from torchdebug_magics.instruments.stepzero.data_digest import digest_of
from torchdebug_magics.probing.modules import unwrapped
from torchdebug_magics.probing.rng import RandomState
from torchdebug_magics.probing.shards import local_of

__all__ = ["Trained", "ZeroState", "address"]


@dataclass(frozen=True)
class Trained:
    """What is trained: models and optimizers, and the data that was named with them."""

    models: Mapping[str, torch.nn.Module]
    optimizers: tuple[torch.optim.Optimizer, ...] = ()
    data: Mapping[str, Any] = field(default_factory=dict)

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """By name, each once; of several models, after the name of its own."""
        return {name: tensor for name, tensor in self._named("named_parameters") if not torch.nn.parameter.is_lazy(tensor)}

    def buffers(self) -> dict[str, torch.Tensor]:
        """The same."""
        return {name: tensor for name, tensor in self._named("named_buffers") if not torch.nn.parameter.is_lazy(tensor)}

    def _named(self, what: str) -> Iterable[tuple[str, Any]]:
        several = len(self.models) > 1
        for model, module in self.models.items():
            for name, tensor in getattr(_inner(module), what)():
                yield f"{model}.{name}" if several else name, tensor


@dataclass(frozen=True, kw_only=True)
class ZeroState:
    """Copies of all of it."""

    tensors: Mapping[str, torch.Tensor]
    """Parameters and buffers, by name; of a DTensor, the part in this process."""
    frozen: tuple[str, ...]
    optimizers: tuple[dict[str, Any], ...]
    random: RandomState
    digests: Mapping[str, str]
    steps: int | None
    """Optimizer steps that had been taken."""

    @classmethod
    def of(cls, trained: Trained) -> ZeroState:
        """As it is now."""
        parameters = trained.parameters()
        with torch.no_grad():
            tensors = {name: _kept(tensor) for name, tensor in {**parameters, **trained.buffers()}.items()}
        return cls(
            tensors=tensors,
            frozen=tuple(name for name, parameter in parameters.items() if not parameter.requires_grad),
            optimizers=tuple(copy.deepcopy(optimizer.state_dict()) for optimizer in trained.optimizers),
            random=RandomState.take(),
            digests={name: digest_of(value) for name, value in trained.data.items()},
            steps=steps_of(trained.optimizers),
        )

    def put_back(self, trained: Trained) -> list[str]:
        """Write into the same tensors; what has another shape now, or is not there, is left and noted."""
        problems = []
        now: dict[str, torch.Tensor] = {**trained.parameters(), **trained.buffers()}
        with torch.no_grad():
            for name, kept in self.tensors.items():
                if name not in now or local_of(now[name]).shape != kept.shape:
                    problems.append(f"`{name}` {'has another shape' if name in now else 'is no longer in the model'}: not restored")
                else:
                    local_of(now[name]).copy_(kept)
        if len(trained.optimizers) != len(self.optimizers):
            problems.append(
                f"step zero has {plural(len(self.optimizers), 'optimizer')}, you passed {len(trained.optimizers)}: none is restored"
            )
        else:
            for optimizer, state in zip(trained.optimizers, self.optimizers, strict=True):
                optimizer.load_state_dict(copy.deepcopy(state))
        for parameter in trained.parameters().values():
            parameter.grad = None
        self.random.put_back()
        return problems

    def shared_with(self, trained: Trained) -> int:
        """Bytes of kept tensors whose memory is still the model's."""
        now: dict[str, torch.Tensor] = {**trained.parameters(), **trained.buffers()}
        return sum(
            _bytes(kept) for name, kept in self.tensors.items() if name in now and address(kept) == address(local_of(now[name])) != 0
        )

    @property
    def bytes(self) -> int:
        """Of all copies."""
        held = [value for state in self.optimizers for entry in state["state"].values() for value in entry.values()]
        return sum(map(_bytes, (*self.tensors.values(), *(one for one in held if isinstance(one, torch.Tensor)))))


def _inner(module: torch.nn.Module) -> torch.nn.Module:
    """What a compiler or a parallel wrapper wraps, so that names are the model's own."""
    inner = unwrapped(module)
    wrapped = inner.module if isinstance(inner, (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel)) else inner
    return wrapped if isinstance(wrapped, torch.nn.Module) else inner


def steps_of(optimizers: Iterable[torch.optim.Optimizer]) -> int | None:
    """How many steps the first that counts them has taken; None where none does."""
    for optimizer in optimizers:
        counts = [int(entry["step"]) for entry in optimizer.state.values() if isinstance(entry, dict) and "step" in entry]
        if counts:
            return max(counts)
        if not optimizer.state and "betas" in optimizer.defaults:
            return 0
    return None


def address(tensor: torch.Tensor) -> int:
    """Where its numbers are, without making a shared memory its own; 0 where they are nowhere."""
    look = getattr(torch._C, "_data_address", None)
    return 0 if look is None or tensor.layout is not torch.strided or tensor.is_meta else int(look(tensor))


def _kept(tensor: torch.Tensor) -> torch.Tensor:
    """Of a GPU's in the memory of the system."""
    tensor = local_of(tensor)
    if _may_be_shared(tensor):
        return torch._lazy_clone(tensor.detach())
    plain = tensor.detach()
    return plain if plain.is_meta else plain.clone() if plain.device.type == "cpu" else plain.cpu()


def _may_be_shared(tensor: torch.Tensor) -> bool:
    """Whether the memory is this tensor's alone. A view of NumPy's that is older would not see the model's later writes."""
    if not hasattr(torch, "_lazy_clone") or type(tensor) not in {torch.Tensor, torch.nn.Parameter}:
        return False
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided or tensor.is_shared():
        return False
    memory = tensor.untyped_storage()
    alone = 2  # the tensor, and `memory` itself
    return memory.nbytes() == _bytes(tensor) and memory.resizable() and bool(torch._C._storage_Use_Count(memory._cdata) == alone)


def _bytes(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_meta else local_of(tensor).numel() * tensor.element_size()
