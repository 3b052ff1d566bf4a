"""The state of models and optimizers at one moment: taken, and put back into the same tensors."""

from __future__ import annotations

import copy
import importlib.util
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Subset

from torchdebug_magics.errors import TorchDebugError
from torchdebug_magics.format import plural
from torchdebug_magics.probing.modules import unwrapped
from torchdebug_magics.probing.state.digest import number_of, of_plain, of_tensor
from torchdebug_magics.probing.state.rng import RandomState
from torchdebug_magics.probing.storages import local_of
from torchdebug_magics.probing.tensors import tensors_in

_OTHERS = "$stepzero"
"""Under which a safetensors file holds what is no tensor of the model, as `torch.save` writes it."""


@dataclass(frozen=True)
class Trained:
    """What is trained: models and optimizers, and the data that was named with them, by name."""

    values: Mapping[str, Any]

    @property
    def models(self) -> dict[str, torch.nn.Module]:
        """The models among them."""
        return {name: value for name, value in self.values.items() if isinstance(value, torch.nn.Module)}

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers among them."""
        return [value for value in self.values.values() if isinstance(value, torch.optim.Optimizer)]

    @property
    def data(self) -> dict[str, Any]:
        """All others."""
        kinds = (torch.nn.Module, torch.optim.Optimizer)
        return {name: value for name, value in self.values.items() if not isinstance(value, kinds)}

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """By name, each once; of several models, after the name of its own."""
        return self._named("named_parameters")

    def buffers(self) -> dict[str, torch.Tensor]:
        """The same."""
        return self._named("named_buffers")

    def tensors(self) -> dict[str, torch.Tensor]:
        """Both."""
        return {**self.parameters(), **self.buffers()}

    def _named(self, what: str) -> dict[str, Any]:
        named, models = {}, self.models
        for model, module in models.items():
            inner: Any = unwrapped(module)  # what a compiler or a parallel wrapper wraps, so that names are the model's own
            inner = inner.module if isinstance(inner, (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel)) else inner
            for name, tensor in getattr(inner, what)():
                if not torch.nn.parameter.is_lazy(tensor):
                    named[f"{model}.{name}" if len(models) > 1 else name] = tensor
        return named


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
            tensors = {name: _kept(tensor) for name, tensor in trained.tensors().items()}
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
        problems, now = [], trained.tensors()
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
        kept = ((self.tensors[name], tensor) for name, tensor in trained.tensors().items() if name in self.tensors)
        return sum(_bytes(copy) for copy, tensor in kept if address(copy) == address(local_of(tensor)) != 0)

    @property
    def bytes(self) -> int:
        """Of all copies."""
        values = [value for state in self.optimizers for entry in state["state"].values() for value in entry.values()]
        return sum(map(_bytes, (*self.tensors.values(), *(value for value in values if isinstance(value, torch.Tensor)))))


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


def digest_of(value: Any) -> str:
    """Of all tensors and arrays in it; of a loader or a data set, those that it holds, and its length. Draws nothing from either."""
    return f"{number_of(_digests(value)):016x}"


def _digests(value: Any) -> Iterator[int]:
    value = value.dataset if isinstance(value, DataLoader) else value
    if isinstance(value, Subset):
        yield of_plain(repr(list(value.indices)))
        yield from _digests(value.dataset)
    elif isinstance(value, Dataset):
        yield of_plain(repr(len(value) if hasattr(value, "__len__") else type(value).__name__))
        yield from _digests(list(vars(value).values()))
    elif isinstance(value, Mapping):
        yield from _digests([part for key, item in value.items() for part in (repr(key), [item])])
    elif isinstance(value, (list, tuple)) and not any(isinstance(item, torch.Tensor) for item in value):
        for item in value:
            yield from _digests(item)
    elif isinstance(value, (str, int, float, bool, bytes)):
        yield of_plain(repr(value))
    elif type(value).__module__.startswith("numpy") and hasattr(value, "tobytes"):
        yield of_plain(repr((value.dtype, value.shape)))
        yield zlib.crc32(value.tobytes())
    else:
        for tensor in tensors_in(value):
            yield of_plain(repr((tensor.dtype, tuple(tensor.shape))))
            yield of_tensor(local_of(tensor).detach().as_subclass(torch.Tensor))


def write(zero: ZeroState, path: Path) -> None:
    """All at once: a reader finds the old file or the new one. Raises `TorchDebugError` for what could not be read again without code."""
    random = {name: value for name, value in vars(zero.random).items() if name != "numpy_words"}
    if zero.random.numpy is not None:
        name, words, *rest = zero.random.numpy
        random["numpy"] = [name, torch.as_tensor(words.astype("int64")), *rest]
    tensors = {name: tensor.clone().contiguous() for name, tensor in zero.tensors.items()}
    others = {**vars(zero), "tensors": {}, "digests": dict(zero.digests), "random": random}
    part = path.with_name(f"{path.name}.part")
    if path.suffix == ".safetensors":
        buffer = BytesIO()
        torch.save(others, buffer)
        _safetensors().save_file({**tensors, _OTHERS: torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8)}, part)
    else:
        torch.save({**others, "tensors": tensors}, part)
    try:
        _read(part, is_safetensors=path.suffix == ".safetensors")
    except Exception as error:  # noqa: BLE001 - what an optimizer keeps may be of any kind
        part.unlink()
        msg = f"the optimizer's state cannot be written to a file: {str(error).partition('. ')[0][:120]}"
        raise TorchDebugError(msg) from None
    part.replace(path)


def read(path: Path) -> ZeroState:
    """What `write` wrote; a `TorchDebugError` for any other file."""
    try:
        return _read(path, is_safetensors=path.suffix == ".safetensors")
    except TorchDebugError:
        raise
    except Exception as error:  # noqa: BLE001 - a file of any other kind may raise anything
        first = next(iter(str(error).splitlines()), "")
        msg = f"{path} holds no step zero: {type(error).__name__}{f': {first[:120]}' if first else ''}"
        raise TorchDebugError(msg) from None


def _read(path: Path, *, is_safetensors: bool) -> ZeroState:
    if is_safetensors:
        tensors = _safetensors().load_file(path)
        others = tensors.pop(_OTHERS).numpy().tobytes()
        state = {**torch.load(BytesIO(others), map_location="cpu", weights_only=True), "tensors": tensors}
    else:
        state = torch.load(path, map_location="cpu", weights_only=True)
    random = RandomState(**state.pop("random"))
    if random.numpy is not None:
        name, words, *rest = random.numpy
        random = replace(random, numpy=(name, words.numpy().astype("uint32"), *rest))
    return ZeroState(**state, random=random)


def _safetensors() -> Any:
    if importlib.util.find_spec("safetensors") is None:
        msg = "safetensors is not installed: install it, or name the file *.pt"
        raise TorchDebugError(msg)
    return importlib.import_module("safetensors.torch")
