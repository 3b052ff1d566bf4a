"""Looks at every source of random numbers that can be found, and changes none."""

from __future__ import annotations

import importlib
import os
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple
from zlib import crc32

import torch
from torch.utils.data import DataLoader

from torchdebug_magics.instruments.deterministic.report import LiveRitual, Loader, SeededBy, Source, StatusReport
from torchdebug_magics.instruments.deterministic.ritual.switches import switches
from torchdebug_magics.probing.names import Named, user_names, values_found
from torchdebug_magics.probing.safety import Guard
from torchdebug_magics.probing.state.states import is_generator, ways_of

_DEFAULT_SEED = 67280421310721
"""Torch's own, for a generator that nobody has seeded."""
_BY_HAND = 2**48
"""People give smaller seeds than the system's entropy does: torch takes 53 bits of it, NumPy 128."""
_ENVIRONMENT = Path("/proc/self/environ")
_MADE = {"Generator": "np.random.default_rng(42)", "RandomState": "np.random.RandomState(42)", "Random": "random.Random(42)"}
"""How the user makes one with a seed, by its class; torch's own is told by its module."""


def status(on: LiveRitual | None = None) -> StatusReport:
    """As everything stands now, with what is known of a ``%deterministic`` that is on. CUDA is not started for it."""
    guard = Guard()
    found = guard.run("looking for generators and loaders", Sources.found_from, sys._getframe()) or Sources((), ())
    names = {id(generator.value): generator.name for generator in found.generators}
    own = (guard.run(f"looking at {generator.name}", source_of, generator) for generator in found.generators)
    sources = (*global_sources(), *filter(None, own))
    return StatusReport(
        sources=sources if on is None else tuple(_under(on, source) for source in sources),
        settings={switch.name: switch.read() for switch in switches(0, strict=False)},
        loaders=tuple(_loader(loader, names) for loader in found.loaders),
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
        state=_letters(ways_of(found.value)[0].read(found.value)),
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


class Sources(NamedTuple):
    """Each once, by its shortest name."""

    generators: tuple[Named, ...]
    loaders: tuple[Named, ...]

    @classmethod
    def found_from(cls, frame: FrameType | None) -> Sources:
        """From the notebook's or script's names, and from those of the calls that `frame` stands in."""
        found = values_found(user_names(frame), lambda value: is_generator(value) or _is_loader(value))
        loaders = tuple(one for one in found if _is_loader(one.value))
        return cls(tuple(one for one in found if is_generator(one.value) and not is_shared(one.value)), loaders)


def _is_loader(value: object) -> bool:
    return issubclass(type(value), DataLoader)


def derived_seed(seed: int, name: str) -> int:
    """A seed of its own for each, the same in every process: two that began alike would draw the same numbers."""
    return crc32(name.encode(), seed)


def _sow(generator: Any, seed: int) -> None:
    """Begin a generator of the user's anew."""
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    elif isinstance(generator, random.Random) or not hasattr(generator, "bit_generator"):
        generator.seed(seed)
    else:
        source = generator.bit_generator
        source.state = type(source)(seed).state


def is_shared(generator: object) -> bool:
    """Whether it is one of the global ones, which are seeded by their own functions."""
    return any(generator is one for one in _shared())


def _shared() -> Iterator[object]:
    yield getattr(random, "_inst", None)
    yield torch.default_generator
    yield from torch.cuda.default_generators
    numpy: Any = sys.modules.get("numpy.random")
    if numpy is not None:
        yield numpy.mtrand._rand


def too_late(loaders: Iterable[Named]) -> Iterator[str]:
    """A sentence each, to be asked before anything is set."""
    if sys.flags.hash_randomization and not (began_with("PYTHONHASHSEED") or "random").isdigit():
        yield (
            "PYTHONHASHSEED needs a restart: Python reads it once, at startup, so the order of string sets and `hash()` still vary between "
            "kernels. It is set for child processes; for this one, start the kernel with PYTHONHASHSEED=0, or sort what you iterate over."
        )
    if torch.cuda.is_initialized() and "CUBLAS_WORKSPACE_CONFIG" not in os.environ:
        yield (
            "CUBLAS_WORKSPACE_CONFIG needs a restart: it is read when CUDA is initialized, which has already happened. This PyTorch no "
            "longer needs it for matrix products, but cuDNN RNN layers do: for those, restart the kernel and open the session first."
        )
    for name in (loader.name for loader in loaders if has_workers(loader.value)):
        yield (
            f"`{name}` keeps its workers' seeds: they have been running since an earlier cell (persistent_workers=True). "
            f"Create `{name}` in this cell."
        )


def began_with(variable: str) -> str | None:
    """What the interpreter found in its environment when it started; None where it found nothing."""
    try:
        entries = _ENVIRONMENT.read_bytes().split(b"\0")
    except OSError:  # another system: nothing tells what stood there at the start
        return os.environ.get(variable)
    found = dict(entry.partition(b"=")[::2] for entry in entries)
    return os.fsdecode(found[variable.encode()]) if variable.encode() in found else None


def has_workers(loader: Any) -> bool:
    """Whether a DataLoader's workers are alive between two loops."""
    return vars(loader).get("_iterator") is not None


class Seedable(NamedTuple):
    """One generator."""

    name: str
    """``"torch"``, ``"numpy.random"``, ``"random"``, or as the user writes it."""
    seeded: SeededBy
    """Before the magic seeded it."""
    read: Callable[[], Any]
    write: Callable[[Any], object]
    sow: Callable[[int], object]
    fix: str
    """The user's line that seeds it."""
    is_global: bool = True


def seedables(named: Iterable[Named], guard: Guard) -> tuple[Seedable, ...]:
    """The global generators, and the user's own; to be asked before the magic seeds them."""
    own = (guard.run(f"reading {one.name}", _own, one) for one in named)
    return (*_global(), *filter(None, own))


def _global() -> Iterator[Seedable]:
    if "numpy" in sys.modules:
        importlib.import_module("numpy.random")  # which NumPy itself puts off until somebody draws
    seeded = {source.name: source.seeded for source in global_sources()}
    yield Seedable("torch", seeded["torch"], torch.get_rng_state, torch.set_rng_state, torch.manual_seed, "torch.manual_seed(42)")
    if "numpy.random" in seeded:
        numpy: Any = sys.modules["numpy.random"]
        yield Seedable("numpy.random", seeded["numpy.random"], numpy.get_state, numpy.set_state, sow_numpy, "np.random.seed(42)")
    is_by_hand = seeded["torch"] == seeded.get("numpy.random") == "hand"  # who seeds both by hand seeds all three
    yield Seedable("random", "hand" if is_by_hand else "unknown", random.getstate, random.setstate, random.seed, "random.seed(42)")


def _own(found: Named) -> Seedable:
    value, way = found.value, ways_of(found.value)[0]
    is_torchs = isinstance(value, torch.Generator)
    make = "torch.Generator().manual_seed(42)" if is_torchs else _MADE.get(type(value).__name__, "torch.Generator().manual_seed(42)")
    seeded = source_of(found).seeded
    return Seedable(
        name=found.name,
        seeded=seeded,
        read=lambda: way.read(value),
        write=lambda state: way.write(value, state),
        sow=lambda seed: _sow(value, seed),
        fix=f"{found.name} = {make}",
        is_global=False,
    )


def sow_numpy(seed: int) -> None:
    """Seed NumPy's global generator. `np.random.seed` would also hide whether the user has seeded it, see `seed_seq`."""
    numpy: Any = sys.modules["numpy"]
    numpy.random.set_state(numpy.random.RandomState(seed).get_state())
