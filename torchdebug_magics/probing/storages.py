"""The memory behind a tensor: its storages, whatever kind of tensor it is."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from torchdebug_magics.report import Sharding

Owner = Literal["torch", "borrowed", "file"]
"""Whose memory a storage is: torch's own, another library's (``from_numpy``), or a mapped file's."""
_SHARED = ("/dev/shm/", "/memfd:")  # noqa: S108 - how the system names memory that processes share: no file stands behind it
_WORDS = 5
"""The words of a storage that are read: up to its memory's context, behind which its device and its size stand."""
_COMPRESSED_ROWS = frozenset({torch.sparse_csr, torch.sparse_bsr})
_COMPRESSED_COLUMNS = frozenset({torch.sparse_csc, torch.sparse_bsc})
_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})


def storages(tensor: torch.Tensor) -> Iterator[torch.UntypedStorage]:
    """Every storage that holds a part of it; nothing for a tensor without memory (meta, fake, wrapped by a transform)."""
    if type(tensor) is torch.Tensor and tensor.layout is torch.strided:
        if not tensor.is_meta and not torch._C._functorch.is_functorch_wrapped_tensor(tensor) and not tensor._is_zerotensor():
            yield tensor.untyped_storage()
        return
    if isinstance(tensor, FakeTensor) or tensor.is_meta or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return
    for part in _parts(tensor):
        if part is tensor:
            yield from _own(part)
        else:
            yield from storages(part)


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """Where its numbers are, if it is of the plain kind; of a DTensor, those in this process."""
    tensor = held_of(tensor)
    if tensor.layout is not torch.strided or tensor.is_nested or is_lazy(tensor) or tensor._is_zerotensor():
        return None
    try:
        return tensor.untyped_storage()
    except (RuntimeError, NotImplementedError):  # a wrapper that has none of its own
        return None


def is_freed(tensor: torch.Tensor) -> bool:
    """Whether a plain tensor's memory was freed under it, as FSDP does between two calls of a module: to read it kills the process."""
    return not tensor.is_meta and tensor.numel() > 0 and not tensor.untyped_storage().nbytes()


def bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    """What they hold together; memory that several share counts once."""
    return sum({storage._cdata: storage.nbytes() for tensor in tensors for storage in storages(tensor)}.values())


def _parts(tensor: Any) -> tuple[torch.Tensor, ...]:
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in _COMPRESSED_ROWS:
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in _COMPRESSED_COLUMNS:
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    if is_traceable_wrapper_subclass(tensor):
        inner = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
        return tuple(part for part in inner if isinstance(part, torch.Tensor) and part is not tensor)
    return (tensor,)


def _own(tensor: torch.Tensor) -> Iterator[torch.UntypedStorage]:
    try:
        storage = tensor.untyped_storage()
        if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            storage.data_ptr()  # refused for a wrapper, whose storage has a size and no memory
    except (NotImplementedError, RuntimeError, ValueError):  # opaque ones (mkldnn, lazy parameters) have none to be seen
        return
    yield storage


def owner_of(storage: torch.UntypedStorage) -> Owner:
    """Whose memory it is; what ``torch.load`` reads is torch's own, although torch does not resize it."""
    if storage.device.type != "cpu" or storage.resizable() or _is_freed_by_torch(storage):
        return "torch"
    if _is_mapped(storage.data_ptr()):
        return "file"
    return "torch" if storage.is_shared() else "borrowed"


def _is_freed_by_torch(storage: torch.UntypedStorage) -> bool:
    """Whether torch's CPU allocator frees it: only the storage's deleter says so, which has no name in Python."""
    position, deleter = _torch_deleter()
    return position is not None and _words(storage)[position] == deleter


@cache
def _torch_deleter() -> tuple[int | None, int]:
    """(position in a storage, address) of what frees torch's own memory; (None, 0) if this torch lays storages out otherwise."""
    own = [_words(torch.UntypedStorage(size, device="cpu")) for size in (8, 8, 64)]
    lent = [_words(torch.asarray(bytearray(size), dtype=torch.uint8, device="cpu", copy=False).untyped_storage()) for size in (8, 8, 64)]
    for position, deleter in enumerate(own[0]):
        others = {words[position] for words in lent}
        if deleter and {words[position] for words in own} == {deleter} and len(others) == 1 and not others & {0, deleter}:
            return position, deleter
    return None, 0


def _words(storage: torch.UntypedStorage) -> tuple[int, ...]:
    """What a storage begins with: its counts of references, its memory's address, deleter and context."""
    return tuple((ctypes.c_size_t * _WORDS).from_address(storage._cdata))


def _is_mapped(address: int) -> bool:
    """Whether a file stands behind the memory at an address, as after ``torch.load(mmap=True)``; False where the system does not tell."""
    try:
        with Path("/proc/self/maps").open(encoding="utf-8", errors="replace") as maps:
            for line in maps:
                span, *_, name = line.split(maxsplit=5) if line.count(" ") > 4 else (line.split()[0], "")  # noqa: PLR2004 - the fields before the name
                first, _, last = span.partition("-")
                if int(first, 16) <= address < int(last, 16):
                    return name.startswith("/") and not name.startswith(_SHARED)
    except OSError:
        return False
    return False


# Any operator on a DTensor may communicate, even ``norm()`` or ``item()``: one rank alone would then wait for the others for ever. So all
# that looks at numbers or memory looks at the local tensor. Nothing here communicates, or imports ``torch.distributed.tensor``.
def shards_may_be() -> bool:
    """Whether there may be DTensors in this process at all."""
    return "torch.distributed.tensor" in sys.modules


def is_shard(tensor: object) -> bool:
    """Whether it is a DTensor, however it is laid out."""
    return type(tensor) not in _PLAIN and is_shard_type(type(tensor))


def is_shard_type(kind: type) -> bool:
    """Whether tensors of that type are DTensors."""
    dtensor: Any = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return dtensor is not None and issubclass(kind, dtensor)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The plain tensor behind a DTensor in this process, without a graph; any other tensor is given back as it is.

    Where a collective that was begun before is still on its way, it waits for its result.
    """
    if not is_shard(tensor):
        return tensor
    dtensor: Any = tensor
    waits = getattr(dtensor._local_tensor, "trigger_wait", None)  # of an `AsyncCollectiveTensor`
    local: torch.Tensor = dtensor._local_tensor if waits is None else waits()
    return local


def held_of(tensor: torch.Tensor) -> torch.Tensor:
    """What `local_of` gives, for who asks for its memory and not for its numbers: waits for nothing."""
    if type(tensor) in _PLAIN:
        return tensor
    local: Any = tensor
    local = local._local_tensor if is_shard(local) else local
    plain: torch.Tensor = local.elem if hasattr(type(local), "trigger_wait") else local
    return plain


def sharding_of(tensor: torch.Tensor) -> Sharding | None:
    """The whole shape, the shape here and the placements of a DTensor; None for any other tensor."""
    if not is_shard(tensor):
        return None
    dtensor: Any = tensor
    return Sharding(tuple(dtensor.shape), tuple(dtensor._local_tensor.shape), tuple(map(_text, dtensor.placements)))


def _text(placement: Any) -> str:
    return f"Shard({placement.dim})" if placement.is_shard() and type(placement).__name__ == "Shard" else repr(placement)


def may_be_gathered() -> bool:
    """Whether FSDP2 shards any module: each gets a class of its own."""
    wrapper: Any = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    return wrapper is not None and bool(wrapper.__subclasses__())


def gathered_for(modules: Iterable[torch.nn.Module]) -> dict[int, torch.Tensor]:
    """The `id` of each tensor that FSDP2 gathers and puts in a parameter's place while a module runs -> that parameter."""
    tensors: dict[int, torch.Tensor] = {}
    for module in modules:
        state_of: Any = getattr(type(module), "_get_fsdp_state", None)
        state = None if state_of is None else state_of(module)
        groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
        for fsdp_param in (param for group in groups for param in getattr(group, "fsdp_params", ())):
            if (gathered := getattr(fsdp_param, "_unsharded_param", None)) is not None:
                tensors[id(gathered)] = fsdp_param.sharded_param
    return tensors


def has_flat_parameters(model: torch.nn.Module) -> bool:
    """Whether `FullyShardedDataParallel`, the older FSDP, holds parameters of it: its forward communicates even on tensors without data."""
    wrapper: Any = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", ())
    return any(isinstance(part, wrapper) for part in model.modules())


def ranks_of(tensors: Iterable[torch.Tensor]) -> int:
    """Over how many ranks they are laid out; 1 where all are whole here."""
    meshes: list[Any] = [getattr(tensor, "device_mesh", None) for tensor in tensors if is_shard(tensor)]
    return max((int(mesh.size()) for mesh in meshes if mesh is not None), default=1)


def shards_note(parameters: Iterable[torch.Tensor], what: str) -> str:
    """A note that `what` is of the shards in this process; empty where no parameter is one."""
    among = list(parameters)
    sharded = sum(map(is_shard, among))
    return f"{sharded} of {len(among)} parameters are sharded: {what} of the shards in this process" if sharded else ""


def can_be_measured(parameter: torch.Tensor) -> bool:
    """Whether it, or its part in this process, is a plain floating-point tensor; of any other kind no hidden operation is asked for."""
    parameter = local_of(parameter)
    is_plain = type(parameter) in {torch.Tensor, torch.nn.Parameter} and not parameter.is_meta and parameter.layout is torch.strided
    return is_plain and parameter.numel() > 0 and (parameter.is_floating_point() or parameter.is_complex())
