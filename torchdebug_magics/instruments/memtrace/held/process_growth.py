"""The process around the tensors: what its heap and the devices' allocators hold, and what grows with a loop and is no tensor."""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch._C._autograd import _profiler_enabled

from torchdebug_magics.instruments.memtrace.growth.loop_steps import FEWEST, Series, Steps
from torchdebug_magics.instruments.memtrace.held.keepers import KeepingLines
from torchdebug_magics.instruments.memtrace.held.leak_fixes import Cause, cleared_where_read, fix
from torchdebug_magics.instruments.memtrace.ledger.blocks import Book, Ledger
from torchdebug_magics.instruments.memtrace.trace import DeviceMemory, Growth
from torchdebug_magics.machine.process import own_bytes, rss_bytes, workers
from torchdebug_magics.memory.containers import is_a
from torchdebug_magics.memory.found import PlainCollection, plain_collections
from torchdebug_magics.memory.gauges import Allocator
from torchdebug_magics.memory.paths import NOWHERE, HolderPath
from torchdebug_magics.memory.walk import roots
from torchdebug_magics.report import Edit, Location

_LEAST_BYTES = 4 << 20
"""In all: less than this a process grows by for many reasons."""
_LEAST_UNEXPLAINED_BYTES = 16 << 20
"""The same where nobody is known who keeps it: the heap of a long process comes apart by several MiB."""
_LEAST_EACH = 16 << 10
_LEAST_OF_WORKERS = 32 << 20
"""What a worker only reads becomes its own in the first epoch, and then no more."""
_LARGE_PART = 1 / 3
"""Of the growth: who holds less is not the cause of it. Our own looks leave something, too."""
_MANY = 10_000
"""Objects of a dataset, whose reference counts all workers write."""


def device_memory(ledger: Ledger, before: Iterable[Allocator], now: Iterable[Allocator]) -> tuple[DeviceMemory, ...]:
    """The memory of every device that was followed, or has an allocator of its own; those as they stood at the start, and now."""
    earlier, later = ({allocator.device: allocator for allocator in allocators} for allocators in (before, now))
    rows = []
    for name in dict.fromkeys((*ledger.devices, *later)):
        book, known, allocator = ledger.devices.get(name, Book()), earlier.get(name), later.get(name)
        row = DeviceMemory(device=name, net_bytes=book.now_bytes - book.start_bytes, peak_bytes=book.peak_bytes)
        if allocator is not None:
            # A counter that stood as high before the cell says nothing of it; a device that was not in use then has counted nothing.
            peak, reserved_peak = (0, 0) if known is None else (known.peak_bytes, known.peak_reserved_bytes)
            row = replace(
                row,
                allocated_bytes=allocator.allocated_bytes,
                allocated_peak_bytes=allocator.peak_bytes if allocator.peak_bytes > peak else None,
                reserved_bytes=allocator.reserved_bytes,
                reserved_peak_bytes=allocator.peak_reserved_bytes if allocator.peak_reserved_bytes > reserved_peak else None,
            )
        rows.append(row)
    return tuple(rows)


class _Info(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    ]


def given_out_bytes() -> int | None:
    """By the C heap of this process, and by CUDA's allocator where that runs; None where the system does not tell."""
    ask = _mallinfo()
    if ask is None:
        return None
    info = ask()
    on_cuda = (
        sum(torch._C._cuda_memoryStats(index)["allocated_bytes"]["all"]["current"] for index in range(torch.cuda.device_count()))
        if torch.cuda.is_initialized()  # never ours to wake
        else 0
    )
    return int(info.uordblks + info.hblkhd) + on_cuda


def kept_free_bytes() -> int:
    """What was freed and is still the C heap's, at most as large in memory; 0 where the system does not tell."""
    ask = _mallinfo()
    return 0 if ask is None else int(ask().fordblks)


@functools.cache
def _mallinfo() -> Callable[[], _Info] | None:
    """Glibc's own counter, since 2.33; macOS, Windows and musl have none."""
    if not sys.platform.startswith("linux"):
        return None
    ask = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if ask is None:
        return None
    ask.restype = _Info
    found: Callable[[], _Info] = ask
    return found


_UNEVEN = {"noise_part": 0.1, "warm_up_part": 0.2}
"""A process goes up and down a little, and its first steps load what the others use."""


@dataclass(frozen=True)
class _Look:
    step: int
    rss_bytes: int
    own_bytes: int
    """Of the process alone, without the files that it reads, what it freed, and its tensors."""
    worker_bytes: int
    is_profiled: bool
    collections: Mapping[HolderPath, PlainCollection] = field(default_factory=dict)

    @property
    def other_bytes(self) -> int:
        """In use by this process and its workers, and no tensor."""
        return self.own_bytes + self.worker_bytes


class ProcessGrowth:
    """Weighs, at some steps, the process, its workers, and the collections of plain objects that variables hold."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._looks: list[_Look] = []
        self._profiler = ""

    def look(self, step: int) -> None:
        """Before that step."""
        own, before = self._own_bytes(), self._looks[-1] if self._looks else None
        of_workers = sum(worker.uss_bytes for worker in workers())
        has_grown = before is not None and own + of_workers - before.other_bytes >= _LEAST_EACH * (step - before.step)
        is_profiled = _profiler_enabled()
        if is_profiled and not self._profiler:
            self._profiler = next((root.label for root in roots() if is_a(type(root.value), torch.profiler.profile)), "")
        known = {} if before is None else before.collections
        collections = plain_collections(known) if has_grown and not is_profiled else known
        self._looks.append(_Look(step, rss_bytes(), own, of_workers, is_profiled, collections))

    def found(self, steps: Steps, lines: KeepingLines) -> Growth | None:
        """What goes on growing; None where it is not known who keeps it."""
        looks = self._looks[1:]  # the first steps load what the others use
        main = steps.main
        if main is None or len(looks) <= FEWEST:
            return None
        times = looks[-1].step - looks[0].step
        kept = max(self._kept(looks, lines, trains=steps.is_training(main)), key=lambda growth: growth.frees_bytes, default=None)
        if kept is None or kept.frees_bytes < max(_LEAST_BYTES, _LEAST_EACH * times):
            return None
        whole_bytes = looks[-1].rss_bytes + looks[-1].worker_bytes - looks[0].rss_bytes - looks[0].worker_bytes
        return replace(
            kept,
            bytes_per_iteration=round(kept.frees_bytes / times * steps.count / main.count),
            iterations_count=main.count,
            share_ratio=kept.frees_bytes / max(whole_bytes, kept.frees_bytes),
        )

    def _own_bytes(self) -> int:
        """Without what was freed, and without tensors."""
        book = self._ledger.devices.get("cpu")
        return own_bytes() - kept_free_bytes() - (0 if book is None else book.now_bytes)

    def grown_bytes(self, step: int) -> int:
        """By how much the process grew, if it did so at each look and to now, whoever keeps it; 0 where it did not.

        `step` is the one that would come, when the cell is over and its garbage is collected.
        """
        sizes = [*((look.step, look.own_bytes) for look in self._looks[1:]), (step, self._own_bytes())]
        series = Series(sizes)
        is_large = series.grown >= max(_LEAST_UNEXPLAINED_BYTES, _LEAST_EACH * (step - sizes[0][0]))
        return series.grown if len(sizes) > FEWEST and is_large and series.is_steady(**_UNEVEN) else 0

    def _kept(self, looks: Sequence[_Look], lines: KeepingLines, *, trains: bool) -> Iterator[Growth]:
        """All that grows and is much of what the process grew by."""
        with_workers = Series([(look.step, look.other_bytes) for look in looks])
        own = Series([(look.step, look.own_bytes) for look in looks])  # a child that is no worker may come and go
        other = with_workers if with_workers.is_steady(**_UNEVEN) else own
        found: list[Growth] = []
        if other.is_steady(**_UNEVEN):
            found += _in_collections(looks, lines, trains=trains)
            if other is with_workers:
                found.append(_in_workers(looks, lines))
        if sum(look.is_profiled for look in looks) >= FEWEST:  # its events come in blocks, so not steadily
            found.append(self._in_profiler(looks, lines))
        grown_bytes = max(0, other.grown)
        for growth in found:
            if growth.frees_bytes >= max(_LARGE_PART * grown_bytes, _LEAST_OF_WORKERS * (growth.what == "workers")):
                yield replace(growth, frees_bytes=min(growth.frees_bytes, grown_bytes))

    def _in_profiler(self, looks: Sequence[_Look], lines: KeepingLines) -> Growth:
        """All that is in no collection: its events are in C++."""
        in_collections = sum(growth.frees_bytes for growth in _in_collections(looks, lines, trains=True))
        name = self._profiler or "profiler"
        how = (
            f"profile only a few steps: `schedule=torch.profiler.schedule(wait=1, warmup=1, active=3)`, with `{name}.step()` in the loop; "
            "a profiler keeps every event until it ends, and with `with_stack=True` also the call stacks"
        )
        size_bytes = max(0, looks[-1].own_bytes - looks[0].own_bytes) - in_collections
        return _growth("profiler", size_bytes, HolderPath(self._profiler), how, lines.call_of(("profile",)))


def _growth(
    what: Literal["objects", "workers", "profiler"],
    size_bytes: int,
    path: HolderPath,
    how: str,
    kept_at: Location | None,
    edits: tuple[Edit, ...] = (),
) -> Growth:
    """Of so many bytes in all; those of an iteration are not known here."""
    return Growth(
        bytes_per_iteration=0,
        iterations_count=0,
        holder=str(path),
        variable=path.variable,
        fix=how,
        edits=edits,
        fix_state="compiles" if edits else "advice",
        kept_at=kept_at,
        what=what,
        frees_bytes=size_bytes,
    )


def _in_collections(looks: Sequence[_Look], lines: KeepingLines, *, trains: bool) -> Iterator[Growth]:
    """Those that got longer from look to look; where nothing is trained, what a variable holds is what the loop is for."""
    for path in {path for look in looks for path in look.collections}:
        seen = [(look.step, one) for look in looks if (one := look.collections.get(path)) is not None]
        length = Series([(step, one.length) for step, one in seen])
        if len(seen) >= FEWEST and length.is_steady(**_UNEVEN) and (trains or seen[-1][1].owner or path.is_hidden):
            last = seen[-1][1]
            owner, size_bytes = last.owner, last.each_bytes * length.grown
            cause = Cause(keeps_graph=False, trains=trains, empties="" if owner is None else owner.empties)
            kept_at = lines.of(path, owner)
            how, edits = cleared_where_read(path.to("[0]"), kept_at)
            yield _growth("objects", size_bytes, path, how or fix(path.to("[0]"), cause), kept_at, edits)


def _in_workers(looks: Sequence[_Look], lines: KeepingLines) -> Growth:
    """What became their own: pages that they wrote to. Reading a Python object writes its reference count."""
    largest = max(
        ((one.length, path, one.owner) for path, one in looks[0].collections.items() if one.owner and "Dataset" in one.owner.type_names),
        key=lambda one: one[0],
        default=(0, NOWHERE, None),
    )
    size_bytes = max(0, looks[-1].worker_bytes - looks[0].worker_bytes)
    if largest[0] >= _MANY:
        how = (
            f"store `{largest[1].as_code}` as a NumPy array or a tensor, not as Python objects: a worker that reads an object "
            "writes its reference count, which copies the page"
        )
        return _growth("workers", size_bytes, largest[1], how, lines.of(largest[1], largest[2]))
    how = "do not store samples in the dataset: each worker has its own copy of it, which is never emptied"
    kept_at = lines.in_function("__getitem__")
    return _growth("workers", size_bytes if kept_at is not None else 0, NOWHERE, how, kept_at)


def larger(growth: Growth | None, other: Growth | None) -> Growth | None:
    """The one that adds more in each iteration, with the other's holder beside it."""
    if growth is None or other is None:
        return growth or other
    first, second = sorted((growth, other), key=lambda one: -one.bytes_per_iteration * one.iterations_count)
    return replace(first, others=(*first.others, second.holder)) if second.holder else first
