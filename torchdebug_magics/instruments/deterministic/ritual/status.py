"""Looks at every source of random numbers that can be found, and changes none."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from zlib import crc32

import torch

from torchdebug_magics.instruments.deterministic.report import LiveRitual, Loader, SeededBy, Source, StatusReport
from torchdebug_magics.instruments.deterministic.ritual.found_sources import Sources
from torchdebug_magics.instruments.deterministic.ritual.generators import derived_seed, is_shared, state_of
from torchdebug_magics.instruments.deterministic.ritual.late import began_with, has_workers
from torchdebug_magics.instruments.deterministic.ritual.switches import switches
from torchdebug_magics.probing.guard import Guard

if TYPE_CHECKING:
    from torchdebug_magics.probing.names import Named

__all__ = ["global_sources", "source_of", "status"]

_DEFAULT_SEED = 67280421310721
"""Torch's own, for a generator that nobody has seeded."""
_BY_HAND = 2**48
"""People give smaller seeds than the system's entropy does: torch takes 53 bits of it, NumPy 128."""


def status(on: LiveRitual | None = None) -> StatusReport:
    """As everything stands now, with what is known of a ``%deterministic`` that is on. CUDA is not started for it."""
    guard = Guard()
    found = guard.run("looking for generators and loaders", Sources.found_from, sys._getframe()) or Sources((), ())
    names = {id(one.value): one.name for one in found.generators}
    own = (guard.run(f"looking at {one.name}", source_of, one) for one in found.generators)
    sources = (*global_sources(), *filter(None, own))
    return StatusReport(
        sources=sources if on is None else tuple(_under(on, one) for one in sources),
        settings={one.name: one.read() for one in switches(0, strict=False)},
        loaders=tuple(_loader(one, names) for one in found.loaders),
        threads_count=torch.get_num_threads(),
        hash_seed=(began_with("PYTHONHASHSEED") or "random") if sys.flags.hash_randomization else "0",
        problems=tuple(guard.problems),
    )


def global_sources() -> Iterator[Source]:
    """Those that a library draws from by itself."""
    yield Source(name="random", kind="Python", is_global=True, seed=None, seeded="unknown", state=_letters(random.getstate()))
    numpy: Any = sys.modules.get("numpy.random")
    if numpy is not None:
        yield Source(
            name="numpy.random", kind="NumPy", is_global=True, seed=None, seeded=_of_numpy(numpy), state=_letters(numpy.get_state())
        )
    yield _torch("torch", torch.default_generator)
    if torch.cuda.is_initialized():
        yield from (_torch(f"torch.cuda:{index}", one) for index, one in enumerate(torch.cuda.default_generators))


def _of_numpy(numpy: Any) -> SeededBy:
    """`np.random.seed` takes away the sequence from the system that it began with."""
    generator: Any = getattr(numpy.mtrand, "_rand", None)
    return "entropy" if getattr(getattr(generator, "_bit_generator", None), "seed_seq", None) is not None else "hand"


def source_of(found: Named) -> Source:
    """What can be told of a generator of the user's."""
    if isinstance(found.value, torch.Generator):
        return _torch(found.name, found.value)
    sequence: Any = getattr(getattr(found.value, "bit_generator", None), "seed_seq", None)
    entropy = getattr(sequence, "entropy", None)
    seed = entropy if isinstance(entropy, int) else None
    kind = type(found.value)
    return Source(
        name=found.name,
        kind=f"{kind.__module__.partition('.')[0]}.{kind.__name__}",
        seed=None if seed is None or seed >= _BY_HAND or sequence.spawn_key else seed,
        seeded=_seeded(seed),
        state=_letters(state_of(found.value)),
    )


def _under(on: LiveRitual, source: Source) -> Source:
    """A source that the ritual has seeded; one that was made since is not among them."""
    if source.is_global:
        return replace(source, seed=on.seed, seeded="ritual")
    return replace(source, seed=derived_seed(on.seed, source.name), seeded="ritual") if source.name in on.generators else source


def _torch(name: str, generator: torch.Generator) -> Source:
    seed = generator.initial_seed()
    return Source(
        name=name,
        kind=f"torch, {generator.device}",
        is_global=is_shared(generator),
        seed=seed,
        seeded=_seeded(seed),
        state=_letters(generator.get_state().tolist()),
    )


def _seeded(seed: int | None) -> SeededBy:
    if seed is None:
        return "unknown"
    if seed == _DEFAULT_SEED:
        return "default"
    return "hand" if seed < _BY_HAND else "entropy"


def _letters(state: object) -> str:
    return f"{crc32(repr(state).encode()):08x}"


def _loader(found: Named, names: dict[int, str]) -> Loader:
    loader = found.value
    generator = loader.generator
    return Loader(
        name=found.name,
        workers_count=loader.num_workers,
        generator="" if generator is None else names.get(id(generator), "a generator of its own"),
        workers_alive=has_workers(loader),
    )
