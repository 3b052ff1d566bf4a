"""Every source of random numbers that can be found, and every switch that the ritual turns: how each is read, and how it is set."""

from __future__ import annotations

import importlib
import os
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from types import FrameType
from typing import Any, Final, NamedTuple
from zlib import crc32

import torch
from torch.utils.data import DataLoader

from torchdebug_magics.instruments.deterministic.report import LiveRitual, Loader, SeededBy, Source, StatusReport
from torchdebug_magics.probing.names import Named, user_names, values_found
from torchdebug_magics.probing.safety import Guard
from torchdebug_magics.probing.state.states import is_generator, ways_of

DEFAULT_SEED = 67280421310721
"""Torch's own, for a generator that nobody has seeded."""
_BY_HAND = 2**48
"""People give smaller seeds than the system's entropy does: torch takes 53 bits of it, NumPy 128."""
_ENVIRONMENT = Path("/proc/self/environ")
_FIXES = {"Generator": "np.random.default_rng(42)", "RandomState": "np.random.RandomState(42)", "Random": "random.Random(42)"}
"""How the user makes one with a seed, by its class; torch's have a name of their own."""
COMPILER = "torch._inductor.config"
"""The module of the compiler's settings, which is imported with the compiler: that takes seconds."""
_MODES: Final = {"off": "default", "warn only": "warn", "on": "error"}
_WORKSPACE = ":4096:8"
"""Of the two that NVIDIA calls deterministic, the one that is not slow."""
_ATTENTION = {"math": lambda _: True} | dict.fromkeys(("flash", "mem_efficient", "cudnn"), lambda _: False)
_LESS = {"tf32": "ieee", "bf16": "ieee", "high": "highest", "medium": "highest", True: False}
_BACKENDS: Any = torch.backends


def status(on: LiveRitual | None = None) -> StatusReport:
    """As everything stands now, with what is known of a ``%deterministic`` that is on. CUDA is not started for it."""
    guard = Guard()
    generators, loaders = generators_and_loaders(sys._getframe(), guard)
    names = {id(generator.value): generator.name for generator in generators}
    own = (guard.run(f"looking at {named.name}", lambda generator: _own(generator).source, named) for named in generators)
    cuda = enumerate(torch.cuda.default_generators if torch.cuda.is_initialized() else ())
    shared = (*_global_generators(), *(_torch(f"torch.cuda:{index}", generator, is_global=True) for index, generator in cuda))
    sources = (*(generator.source for generator in shared), *filter(None, own))
    return StatusReport(
        sources=sources if on is None else tuple(_under(on, source) for source in sources),
        settings={switch.name: switch.read() for switch in (*switches(0, strict=False), *of_compiler())},
        loaders=tuple(_loader(*named, names) for named in loaders),
        threads_count=torch.get_num_threads(),
        hash_seed=hash_seed(),
        problems=tuple(guard.problems),
    )


class Seedable(NamedTuple):
    """One generator."""

    name: str
    """``"torch"``, ``"numpy.random"``, ``"random"``, or as the user writes it."""
    kind: str
    seeded: SeededBy
    """Before the magic seeded it."""
    read: Callable[[], Any]
    write: Callable[[Any], object]
    sow: Callable[[int], object]
    fix: str
    """The user's line that seeds it."""
    seed: int | None = None
    is_global: bool = False

    @property
    def source(self) -> Source:
        """As it stands now."""
        state = self.read()
        letters = f"{crc32(repr(state.tolist() if isinstance(state, torch.Tensor) else state).encode()):08x}"
        return Source(name=self.name, kind=self.kind, is_global=self.is_global, seed=self.seed, seeded=self.seeded, state=letters)


def seedables(named: Iterable[Named], guard: Guard) -> tuple[Seedable, ...]:
    """The global generators, and the user's own; to be asked before the magic seeds them."""
    shared = {one.name: one for one in _global_generators()}
    if "numpy.random" in shared and shared["torch"].seeded == shared["numpy.random"].seeded == "hand":
        shared["random"] = shared["random"]._replace(seeded="hand")  # who seeds both by hand seeds all three
    own = (guard.run(f"reading {one.name}", _own, one) for one in named)
    return (*shared.values(), *filter(None, own))


def _global_generators() -> Iterator[Seedable]:
    """Those that a library draws from by itself."""
    yield _torch("torch", torch.default_generator, "torch.manual_seed(42)", is_global=True)._replace(sow=torch.manual_seed)
    if "numpy" in sys.modules:
        numpy: Any = importlib.import_module("numpy.random")  # which NumPy itself puts off until somebody draws
        # `np.random.seed` takes away the sequence from the system that it began with.
        bits = getattr(getattr(numpy.mtrand, "_rand", None), "_bit_generator", None)
        seeded: SeededBy = "hand" if getattr(bits, "seed_seq", None) is None else "entropy"
        yield Seedable("numpy.random", "NumPy", seeded, numpy.get_state, numpy.set_state, sow_numpy, "np.random.seed(42)", is_global=True)
    yield Seedable("random", "Python", "unknown", random.getstate, random.setstate, random.seed, "random.seed(42)", is_global=True)


def _torch(name: str, generator: torch.Generator, fix: str = "", *, is_global: bool = False) -> Seedable:
    seed = generator.initial_seed()
    ways = generator.get_state, generator.set_state, generator.manual_seed
    return Seedable(name, f"torch, {generator.device}", _seeded(seed), *ways, fix, seed, is_global)


def _own(found: Named) -> Seedable:
    """What can be told of a generator of the user's."""
    value, kind = found.value, type(found.value)
    if isinstance(value, torch.Generator):
        return _torch(found.name, value, f"{found.name} = torch.Generator().manual_seed(42)")
    way = ways_of(value)[0]
    sequence: Any = getattr(getattr(value, "bit_generator", None), "seed_seq", None)
    entropy = getattr(sequence, "entropy", None)
    seed = entropy if isinstance(entropy, int) else None
    return Seedable(
        name=found.name,
        kind=f"{kind.__module__.partition('.')[0]}.{kind.__name__}",
        seeded=_seeded(seed),
        read=partial(way.read, value),
        write=partial(way.write, value),
        sow=partial(_sow, value),
        fix=f"{found.name} = {_FIXES[kind.__name__]}",
        seed=None if seed is None or seed >= _BY_HAND or sequence.spawn_key else seed,
    )


def _seeded(seed: int | None) -> SeededBy:
    if seed is None or seed == DEFAULT_SEED:
        return "unknown" if seed is None else "default"
    return "hand" if seed < _BY_HAND else "entropy"


def _sow(generator: Any, seed: int) -> None:
    """Begin a generator of the user's anew."""
    if (source := getattr(generator, "bit_generator", None)) is None:
        generator.seed(seed)
    else:
        source.state = type(source)(seed).state


def sow_numpy(seed: int) -> None:
    """Seed NumPy's global generator. `np.random.seed` would also hide whether the user has seeded it, see `seed_seq`."""
    numpy: Any = sys.modules["numpy"]
    numpy.random.set_state(numpy.random.RandomState(seed).get_state())


def _under(on: LiveRitual, source: Source) -> Source:
    """A source that the ritual has seeded; one that was made since is not among them."""
    if source.is_global:
        return replace(source, seed=on.seed, seeded="ritual")
    return replace(source, seed=derived_seed(on.seed, source.name), seeded="ritual") if source.name in on.generators else source


def _loader(name: str, loader: Any, names: dict[int, str]) -> Loader:
    generator = "" if loader.generator is None else names.get(id(loader.generator), "a generator of its own")
    return Loader(name=name, workers_count=loader.num_workers, generator=generator, workers_alive=has_workers(loader))


def generators_and_loaders(frame: FrameType, guard: Guard) -> tuple[list[Named], list[Named]]:
    """Each once by its shortest name, of the notebook's or script's names and those of the calls that `frame` stands in."""

    def is_wanted(value: object) -> bool:
        return (is_generator(value) and not _is_shared(value)) or issubclass(type(value), DataLoader)

    wanted = guard.run("looking for generators and loaders", lambda: values_found(user_names(frame), is_wanted)) or []
    generators = [named for named in wanted if is_generator(named.value)]
    return generators, [named for named in wanted if not is_generator(named.value)]


def derived_seed(seed: int, name: str) -> int:
    """A seed of its own for each, the same in every process: two that began alike would draw the same numbers."""
    return crc32(name.encode(), seed)


def _is_shared(generator: object) -> bool:
    """Whether it is one of the global ones, which are seeded by their own functions."""
    numpy: Any = sys.modules.get("numpy.random")
    shared = (getattr(random, "_inst", None), torch.default_generator, *torch.cuda.default_generators, numpy and numpy.mtrand._rand)
    return any(generator is one for one in shared)


def too_late(loaders: Iterable[Named]) -> Iterator[str]:
    """A sentence each, to be asked before anything is set."""
    if hash_seed() == "random":
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


def hash_seed() -> str:
    """By which Python hashes texts in this process: a number, or ``"random"``."""
    began = began_with("PYTHONHASHSEED") or "random"
    return "0" if not sys.flags.hash_randomization else began if began.isdigit() else "random"


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


@dataclass(frozen=True)
class Switch:
    """One switch of torch's or of the environment."""

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], object]
    wanted: Callable[[Any], Any]
    """From its value to the one for the same numbers twice: the very same where nothing has to change."""

    def turn(self, value: object) -> None:
        """Set it to a value, if it stands otherwise."""
        if self.read() != value:
            self.write(value)


def switches(seed: int, *, strict: bool) -> tuple[Switch, ...]:
    """In the order in which they are set, and put back: what a setter moves besides its own stands after it."""
    wanted_mode = "on" if strict else "warn only"
    return (
        # `use_deterministic_algorithms` would import the compiler for its flag, which takes seconds; see `COMPILER`.
        Switch("deterministic_algorithms", mode, lambda to: torch.set_deterministic_debug_mode(_MODES[to]), lambda _: wanted_mode),
        _attribute("fill_uninitialized_memory", torch.utils.deterministic, lambda _: True),
        _attribute("cudnn.deterministic", torch.backends.cudnn, lambda _: True),
        _attribute("cudnn.benchmark", torch.backends.cudnn, lambda _: False),
        *_PRECISIONS,
        *_attention(strict=strict),
        _variable("CUBLAS_WORKSPACE_CONFIG", lambda now: now or _WORKSPACE),
        _variable("PYTHONHASHSEED", lambda _: str(seed)),
    )


def mode() -> str:
    """What torch does of a non-deterministic op: nothing, warn, or raise."""
    if not torch.are_deterministic_algorithms_enabled():
        return "off"
    return "warn only" if torch.is_deterministic_algorithms_warn_only_enabled() else "on"


def of_compiler() -> tuple[Switch, ...]:
    """The compiler's own, which `use_deterministic_algorithms` moves as well; none where it is not imported, or this torch has none."""
    config: Any = sys.modules.get(COMPILER)
    return (_attribute("inductor.deterministic", config, lambda _: True),) if hasattr(config, "deterministic") else ()


def _attribute(name: str, owner: Any, wanted: Callable[[Any], Any]) -> Switch:
    """Of an attribute by the last part of the name."""
    attribute = name.rpartition(".")[2]
    return Switch(name, lambda: getattr(owner, attribute), lambda value: setattr(owner, attribute, value), wanted)


def _attention(*, strict: bool) -> tuple[Switch, ...]:
    """While torch only warns, it keeps the backward of its fused attention as it is, which sums in any order; strictly, it takes another.

    On the CPU all are deterministic, so they are left alone in a torch that knows no GPU.
    """
    if strict or not torch.backends.cuda.is_built():
        return ()
    cuda: Any = torch.backends.cuda
    return tuple(
        Switch(f"sdpa.{name}", getattr(cuda, f"{name}_sdp_enabled"), getattr(cuda, f"enable_{name}_sdp"), wanted)
        for name, wanted in _ATTENTION.items()
    )


def _variable(name: str, wanted: Callable[[Any], Any]) -> Switch:
    def write(value: str | None) -> None:
        os.environ.pop(name, None)
        os.environ.update({} if value is None else {name: value})

    return Switch(name, lambda: os.environ.get(name), write, wanted)


# Both must say the same: once only the new ones are changed, whoever reads an old one, as ``cudnn.flags()`` does, gets a RuntimeError.
# So the old ones are set first, where they can be read; the new ones then say what is left to say, from the whole to the part.
def _full(now: object) -> object:
    """The same, or what is as precise as float32 is."""
    return _LESS.get(now, now) if isinstance(now, (str, bool)) else now


def _old(name: str, read: Callable[[], Any], write: Callable[[Any], object]) -> Switch:
    """It reads as None where old and new ones are at odds: then the old ones are nothing that could be kept."""

    def readable() -> Any:
        try:
            return read()
        except RuntimeError:  # "mix of the legacy and new APIs"
            return None

    return Switch(name, readable, lambda value: None if value is None else write(value), _full)


_PRECISIONS = (
    _old("float32_matmul_precision", torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    _old("cudnn.allow_tf32", lambda: _BACKENDS.cudnn.allow_tf32, lambda value: setattr(_BACKENDS.cudnn, "allow_tf32", value)),
    _attribute("fp32_precision", _BACKENDS, _full),
    *(
        _attribute(f"{path}.fp32_precision", attrgetter(path)(_BACKENDS), _full)
        for path in ("cudnn", "mkldnn", "cuda.matmul", "cudnn.conv", "cudnn.rnn", "mkldnn.matmul", "mkldnn.conv", "mkldnn.rnn")
    ),
)
