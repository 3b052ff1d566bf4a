"""What tensors held before they were first written: kept just before the write, and put back."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from torchdebug_magics.probing.dispatch import OpListener, Run, modes_aside
from torchdebug_magics.probing.ops import written_by
from torchdebug_magics.probing.safety import Guard
from torchdebug_magics.probing.storages import held_of, is_freed, local_of, storage_of
from torchdebug_magics.probing.tensors import tensors_in


class Kept(NamedTuple):
    """What a tensor held, and where: it may have been given another shape or other memory since."""

    tensor: torch.Tensor
    place: torch.Tensor
    """The same memory in the shape of that time."""
    copy: torch.Tensor | None
    version: int

    @classmethod
    def of(cls, tensor: torch.Tensor, place: torch.Tensor | None = None, *, copied: bool = True) -> Kept:
        """What it holds now, itself or in `place`; where it is not `copied`, only how often it was written."""
        place = each_element_once(tensor) if place is None else place
        return cls(tensor, place, place.detach().clone() if copied else None, version_of(tensor))

    def put_back(self) -> None:
        """Let it hold that."""
        if self.copy is not None:
            write_into(self.place, self.copy)
        if not self.tensor.is_inference():  # a graph of the user's that saved it finds it as it was
            torch._C._autograd._unsafe_set_version_counter((self.tensor,), (self.version,))


class Contents:
    """What would be too much to copy beforehand (weights, running sums, data) costs memory only where it is written."""

    def __init__(self) -> None:
        self._kept: dict[tuple[Any, ...], Kept] = {}

    def keep(self, tensor: torch.Tensor, *, copied: bool = True) -> None:
        """Copy it, unless that was done before; of a DTensor, the part in this process. Where it is not `copied`, its version is kept."""
        tensor = local_of(tensor)
        memory = memory_of(tensor)
        key: tuple[Any, ...] = (-id(tensor),)
        if memory:
            key = memory, tensor.storage_offset(), tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype
        if key not in self._kept and not (memory and is_freed(tensor)):
            with modes_aside():
                # A sparse one is written by other memory in its place, which only itself would see.
                place = each_element_once(tensor.detach()) if memory else tensor
                self._kept[key] = Kept.of(tensor, place, copied=copied)

    def __len__(self) -> int:
        return len(self._kept)

    def tensors(self) -> list[torch.Tensor]:
        """The tensors that were kept."""
        return [kept.tensor for kept in self._kept.values()]

    def put_back(self, guard: Guard | None = None) -> None:
        """Undo the writes, the last one first: an earlier copy of the same memory is the older one. `guard` notes a tensor that resists."""
        for kept in reversed(self._kept.values()):
            if guard is None:
                kept.put_back()
            else:
                guard.run("putting back what a tensor held", kept.put_back)

    def exchange(self, now: Contents) -> None:
        """Put everything back; `now` gets what was there instead, in the memory of the copies, where none overlap.

        Each is in `now` before it is written: what an error cuts short, `now` can undo.
        """
        memories = [key[0] for key in self._kept]
        if len(set(memories)) < len(memories):
            now._kept = {key: Kept.of(kept.tensor, kept.place) for key, kept in self._kept.items()}
            self.put_back()
        else:
            for key, kept in self._kept.items():
                present = now._kept[key] = Kept.of(kept.tensor, kept.place)
                kept.put_back()
                if kept.copy is not None and present.copy is not None:
                    with torch.inference_mode():  # the only way to write a copy that was made in it
                        now._kept[key] = present._replace(copy=kept.copy.copy_(present.copy))
        self.forget()

    def forget(self) -> None:
        """Free the copies."""
        self._kept.clear()


class Writes:
    """Keeps what memory that is older than a run holds, before ops of the run write it."""

    def __init__(self, contents: Contents | None = None) -> None:
        self.contents = Contents() if contents is None else contents
        self._own: set[int] = set()
        """Memory that the run made; its addresses were free before, so none of them can be older."""

    def listener(self, owner: object = None) -> OpListener:
        """The mode that sees every op of the run; a sweep of the owner's finds it."""
        return OpListener(self._seen, owner)

    def before(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, computes: bool = True) -> None:
        """Keep what `func` writes. Where it computes nothing, as on fakes, only the count of the writes moves."""
        for tensor in written_by(func, args, kwargs):
            memory = memory_of(held_of(tensor))
            if memory and memory not in self._own and not isinstance(tensor, FakeTensor):
                self.contents.keep(tensor, copied=computes)

    def made(self, values: Any, given: Any = ()) -> None:
        """Results of an op that was given these, and stand-ins: nobody else knows their memory."""
        if memories := _memories(values):
            self._own |= memories - _memories(given)

    def put_back(self, guard: Guard | None = None) -> None:
        """Undo the writes; `guard` as in `Contents.put_back`."""
        self.contents.put_back(guard)

    def _seen(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], run: Run) -> Any:
        self.before(func, args, kwargs)
        result = run()
        self.made(result, (args, kwargs))
        return result


def _memories(values: Any) -> set[int]:
    """The addresses of the real ones."""
    return {memory_of(held_of(tensor)) for tensor in tensors_in(values) if not isinstance(tensor, FakeTensor)} - {0}


def memory_of(tensor: torch.Tensor) -> int:
    """Where its storage is, or 0 where it has none of its own."""
    if tensor.is_meta or tensor.is_quantized or is_traceable_wrapper_subclass(tensor):
        return 0
    storage = storage_of(tensor)
    return 0 if storage is None else storage._cdata


def version_of(tensor: torch.Tensor) -> int:
    """How often it was written; 0 where nobody counts."""
    return 0 if tensor.is_inference() else tensor._version


def each_element_once(tensor: torch.Tensor) -> torch.Tensor:
    """Of an expanded tensor, which cannot be written, the first of those that stand for one element; any other one itself."""
    if tensor.layout is not torch.strided or tensor.is_nested or 0 not in tensor.stride():
        return tensor
    return tensor[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in tensor.stride())]


def write_into(tensor: torch.Tensor, copy: torch.Tensor) -> None:
    """Let a tensor hold what the copy holds, whatever mode it was made in."""
    if tensor._is_zerotensor() or (memory_of(tensor) and is_freed(tensor)):
        return
    with torch.inference_mode():  # a tensor that was made in it is written in it alone; any other one can be, too
        tensor.copy_(copy)
