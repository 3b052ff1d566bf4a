"""``%stepzero``: keep, compare, restore or drop the state of models and optimizers at one moment."""

from __future__ import annotations

import copy
import importlib.util
import math
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Subset

from torchdebug_magics.errors import TorchDebugError, error_line
from torchdebug_magics.format import plural
from torchdebug_magics.instrument import CellContext
from torchdebug_magics.instruments.stepzero.report import FROZEN, Action, BufferRow, DataRow, ParameterRow, StepzeroReport
from torchdebug_magics.probing.modules import unwrapped
from torchdebug_magics.probing.state.digest import number_of, of_plain, of_tensor
from torchdebug_magics.probing.state.rng import RandomState
from torchdebug_magics.probing.steps import Link, ParameterFacts, facts_of, named_in
from torchdebug_magics.probing.storages import is_shard, local_of, shards_note
from torchdebug_magics.probing.tensors import tensors_in

_OTHERS = "$stepzero"
"""Under which a safetensors file holds what is no tensor of the model, as `torch.save` writes it."""
_kept: list[tuple[ZeroState, dict[str, Callable[[], Any]]]] = []
"""The latest step zero in this kernel, at most, and weak references to what was named, by name."""


def examine(context: CellContext, *values: Any, file: str = "", restore: bool = False, drop: bool = False) -> StepzeroReport:
    """Keep the state of the models and optimizers among `values`, the others being data; without values, compare with what was kept.

    With `file`, compare with the file where it exists, else write it. Raises `TorchDebugError` where there is nothing to compare with.
    """
    if drop:
        _refuse(not _kept, "no step zero was kept: there is nothing to drop")
        _kept.clear()
        return StepzeroReport(action="dropped")
    names = [*context.names, *(f"value {place}" for place in range(len(context.names), len(values)))]
    trained = Trained(dict(zip(names, values, strict=False))) if values else _latest()[1]
    _refuse(not trained.models, "name a model: `%stepzero model optimizer`")
    path = Path(file).expanduser() if file else None
    is_sharded = path is not None and any(map(is_shard, trained.parameters.values()))
    why = "--file writes what one process holds, and the model is sharded: leave it out, or save with `torch.distributed.checkpoint`"
    _refuse(is_sharded, why)
    if path is None and (restore or not values):
        zero = _latest()[0]
    elif path is not None and path.exists():
        zero = read(path)
    else:
        _refuse(restore, f"there is no file {path}: `%stepzero model optimizer --file {path}` writes it")
        return _kept_anew(trained, path)
    named = "" if path is None else str(path)
    return _report(trained, zero, "restored", file=named, problems=zero.put_back(trained)) if restore else _compared(trained, zero, named)


def _refuse(is_wrong: object, why: str) -> None:
    if is_wrong:
        raise TorchDebugError(why)


def _reference(value: Any) -> Callable[[], Any]:
    """Gives the value, with all its parts, as long as they are there; else None, as for what takes no reference."""
    kind = type(value)
    if kind in {list, tuple, dict}:
        names = list(value) if kind is dict else range(len(value))
        parts = [_reference(value[name]) for name in names]

        def whole() -> Any:
            alive = [part() for part in parts]
            return None if any(part is None for part in alive) else kind(zip(names, alive, strict=True) if kind is dict else alive)

        return whole
    try:
        return weakref.ref(value)
    except TypeError:
        return lambda: None


def _latest() -> tuple[ZeroState, Trained]:
    _refuse(not _kept, "no step zero was kept: run `%stepzero model optimizer` before the first step")
    zero, references = _kept[0]
    present = {name: value for name, reference in references.items() if (value := reference()) is not None}
    if references.keys() - present.keys() - zero.digests.keys():  # data may be gone, or take no reference
        _kept.clear()
        _refuse(True, "the model or the optimizer whose step zero was kept is gone: run `%stepzero model optimizer` for the new one")  # noqa: FBT003
    return zero, Trained(present)


def _report(trained: Trained, zero: ZeroState, action: Action, **fields: Any) -> StepzeroReport:
    parameters = trained.parameters.values()
    pairs = [(zero.tensors[name], local_of(tensor)) for name, tensor in trained.tensors.items() if name in zero.tensors]
    shared = sum(_bytes(copied) for copied, tensor in pairs if address(copied) == address(tensor) != 0)  # until a step writes to it
    of_optimizers = [value for state in zero.optimizers for entry in state["state"].values() for value in entry.values()]
    copies = [*zero.tensors.values(), *(value for value in of_optimizers if isinstance(value, torch.Tensor))]
    sizes = {
        "parameters_count": len(parameters),
        "elements_count": sum(parameter.numel() for parameter in parameters),
        "local_elements_count": sum(local_of(parameter).numel() for parameter in parameters),
        "held_bytes": sum(map(_bytes, copies)) - shared,
        "shared_bytes": shared,
    }
    return StepzeroReport(action=action, **{**sizes, **fields})


def _kept_anew(trained: Trained, path: Path | None) -> StepzeroReport:
    """Keep step zero, in this kernel or in a file."""
    zero = ZeroState.of(trained)
    if path is None:
        _kept[:] = [(zero, {name: _reference(value) for name, value in trained.values.items()})]
    else:
        write(zero, path)
    data = tuple(DataRow(data=name, digest=digest, changed=None) for name, digest in zero.digests.items())
    held = {} if path is None else {"held_bytes": 0, "shared_bytes": 0, "file": str(path)}
    return _report(trained, zero, "kept", data=data, steps=zero.steps, **held)


def _compared(trained: Trained, zero: ZeroState, file: str) -> StepzeroReport:
    """Parameters that moved, the furthest first, those that did not, buffers and data that changed, and what cannot be compared."""
    parameters, buffers = trained.parameters, trained.buffers
    problems = [f"`{name}` is no longer in the model" for name in zero.tensors if name not in parameters and name not in buffers]
    problems += filter(None, [shards_note(parameters.values(), "distances are")])
    distances = {name: _distance(name, tensor, zero, problems) for name, tensor in trained.tensors.items()}
    facts = facts_of(parameters, trained.optimizers)
    is_known = any(fact.state for fact in facts.values())
    has_stepped = is_known or any(distances[name] for name in parameters)
    rows: list[ParameterRow] = []
    for name, parameter in parameters.items():
        if (distance := distances[name]) is None:
            continue
        norm, rate, count = _norm(zero.tensors[name]), facts[name].rate, local_of(parameter).numel()
        if distance:
            why = "the optimizer updates it" if facts[name].state else "something other than the optimizer writes to it"
            why = "" if name not in zero.frozen else "it requires a gradient now" if parameter.requires_grad else why
        else:
            why = _why_not(facts[name], has_optimizers=bool(trained.optimizers), has_stepped=has_stepped, is_known=is_known)
        relative, rates = distance / norm if norm else None, distance / math.sqrt(count) / rate if rate and count else None
        rows.append(ParameterRow(parameter=name, distance=distance, relative=relative, learning_rates=rates, why=why))
    moved = [row for row in rows if row.distance]
    moved.sort(key=lambda row: -(row.relative if row.relative is not None and not math.isnan(row.relative) else math.inf))
    steps, now = steps_of(trained.optimizers), {name: digest_of(value) for name, value in trained.data.items()}
    return _report(
        trained,
        zero,
        "compared",
        steps=None if steps is None else steps - (zero.steps or 0),
        moved=tuple(moved),
        unmoved=tuple(row for row in rows if not row.distance),
        buffers=tuple(BufferRow(buffer=name, distance=distance) for name in buffers if (distance := distances[name])),
        data=tuple(
            DataRow(data=name, digest=now.get(name, ""), changed=now[name] != digest if name in now else None)
            for name, digest in zero.digests.items()
        ),
        file=file,
        problems=tuple(problems),
    )


def _why_not(facts: ParameterFacts, *, has_optimizers: bool, has_stepped: bool, is_known: bool) -> str:
    """The first reason that holds; `is_known`: whether any optimizer keeps a state of what it has updated."""
    kept = [] if facts.state is None else [value for value in facts.state.values() if isinstance(value, torch.Tensor) and value.dim() > 0]
    has_moments = any(bool(local_of(value).any()) for value in kept)  # a count of steps is no moment
    reasons = (
        (not facts.parameter.requires_grad, FROZEN),
        (has_optimizers and facts.group is None, "not in the optimizer"),
        (facts.rate == 0, Link.ZERO_RATE.words),
        (not has_stepped, "no step was taken"),
        (facts.gradient is False, Link.ZERO_GRADIENT.words),
        (facts.gradient and is_known and facts.state is None, "first gradient after the last step"),
        (facts.gradient or has_moments, Link.UNMOVED.words),
        (facts.state is not None, Link.ZERO_GRADIENT.words),
        (is_known, Link.WITHOUT_GRADIENT.words),
    )
    return next((reason for holds, reason in reasons if holds), "no gradient, or a zero gradient")


def _distance(name: str, tensor: torch.Tensor, zero: ZeroState, problems: list[str]) -> float | None:
    """None where there is nothing to compare with."""
    kept, tensor = zero.tensors.get(name), local_of(tensor)
    if kept is None or kept.shape != tensor.shape:
        problems.append(f"`{name}` {'is new' if kept is None else 'has another shape than at step zero'}: not compared")
        return None
    if tensor.is_meta or kept.is_meta:
        return None
    return 0.0 if address(kept) == address(tensor) != 0 else _norm(tensor.detach().cpu(), kept)


def _norm(tensor: torch.Tensor, start: torch.Tensor | None = None) -> float:
    """In double precision; of the difference to a start, where one is given."""
    plain = [part.detach() if part.layout is torch.strided else part.detach().to_dense() for part in (tensor, start) if part is not None]
    wide = [part.to(torch.complex128 if part.is_complex() else torch.float64) for part in plain]
    return float(torch.linalg.vector_norm(wide[0] - wide[1] if start is not None else wide[0]))


class Trained:
    """What is trained: models and optimizers, and the data that was named with them, by name."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        kinds = (torch.nn.Module, torch.optim.Optimizer)
        self.values = values
        self.models: dict[str, Any] = {name: value for name, value in values.items() if isinstance(value, torch.nn.Module)}
        self.optimizers = [value for value in values.values() if isinstance(value, torch.optim.Optimizer)]
        self.data = {name: value for name, value in values.items() if not isinstance(value, kinds)}
        inner: dict[str, Any] = {name: unwrapped(module) for name, module in self.models.items()}
        wrappers = (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel)  # without these, names are the model's own
        models = {name: module.module if isinstance(module, wrappers) else module for name, module in inner.items()}
        is_lazy = torch.nn.parameter.is_lazy
        self.parameters = {name: tensor for name, tensor in named_in(models, "named_parameters").items() if not is_lazy(tensor)}
        self.buffers = {name: tensor for name, tensor in named_in(models, "named_buffers").items() if not is_lazy(tensor)}
        self.tensors = {**self.parameters, **self.buffers}
        """Both by name, each once; of several models, after the name of its own."""


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
        with torch.no_grad():
            tensors = {name: _copied(tensor) for name, tensor in trained.tensors.items()}
        return cls(
            tensors=tensors,
            frozen=tuple(name for name, parameter in trained.parameters.items() if not parameter.requires_grad),
            optimizers=tuple(copy.deepcopy(optimizer.state_dict()) for optimizer in trained.optimizers),
            random=RandomState.take(),
            digests={name: digest_of(value) for name, value in trained.data.items()},
            steps=steps_of(trained.optimizers),
        )

    def put_back(self, trained: Trained) -> tuple[str, ...]:
        """Write into the same tensors; what has another shape now, or is not there, is left and noted."""
        problems, now = [], trained.tensors
        with torch.no_grad():
            for name, kept in self.tensors.items():
                if name not in now or local_of(now[name]).shape != kept.shape:
                    problems.append(f"`{name}` {'has another shape' if name in now else 'is no longer in the model'}: not restored")
                else:
                    local_of(now[name]).copy_(kept)
        if len(trained.optimizers) != len(self.optimizers):
            many = plural(len(self.optimizers), "optimizer")
            problems.append(f"step zero has {many}, you passed {len(trained.optimizers)}: none is restored")
        else:
            for optimizer, state in zip(trained.optimizers, self.optimizers, strict=True):
                optimizer.load_state_dict(copy.deepcopy(state))
        for parameter in trained.parameters.values():
            parameter.grad = None
        self.random.put_back()
        return tuple(problems)


def steps_of(optimizers: Sequence[torch.optim.Optimizer]) -> int | None:
    """The most steps that any has counted; None where none counts them."""
    states = [entry for optimizer in optimizers for entry in optimizer.state.values()]
    counts = [int(entry["step"]) for entry in states if isinstance(entry, dict) and "step" in entry]
    is_new = any(not optimizer.state and "betas" in optimizer.defaults for optimizer in optimizers)
    return max(counts) if counts else 0 if is_new else None


def address(tensor: torch.Tensor) -> int:
    """Where its numbers are, without making a shared memory its own; 0 where they are nowhere."""
    look = getattr(torch._C, "_data_address", None)
    return 0 if look is None or tensor.layout is not torch.strided or tensor.is_meta else int(look(tensor))


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in the memory of the system, or one that shares the model's until a step writes to it, where that memory is its own alone."""
    tensor = local_of(tensor)
    plain = tensor.detach()
    if plain.is_meta or plain.device.type != "cpu":
        return plain if plain.is_meta else plain.cpu()
    is_plain = type(tensor) in {torch.Tensor, torch.nn.Parameter} and tensor.layout is torch.strided and not tensor.is_shared()
    if not is_plain or not hasattr(torch, "_lazy_clone"):
        return plain.clone()
    # A view of NumPy's that is older would not see the model's later writes.
    memory, alone = tensor.untyped_storage(), 3  # the two tensors, and `memory` itself
    is_own = memory.nbytes() == _bytes(tensor) and memory.resizable() and torch._C._storage_Use_Count(memory._cdata) == alone
    return torch._lazy_clone(plain) if is_own else plain.clone()


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
    part = path.with_stem(f"{path.stem}.part")
    if path.suffix == ".safetensors":
        buffer = BytesIO()
        torch.save(others, buffer)
        _safetensors().save_file({**tensors, _OTHERS: torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8)}, part)
    else:
        torch.save({**others, "tensors": tensors}, part)
    try:
        _read(part)
    except Exception as error:  # noqa: BLE001 - what an optimizer keeps may be of any kind
        part.unlink()
        msg = f"the optimizer's state cannot be written to a file: {str(error).partition('. ')[0][:120]}"
        raise TorchDebugError(msg) from None
    part.replace(path)


def read(path: Path) -> ZeroState:
    """What `write` wrote; a `TorchDebugError` for any other file."""
    try:
        return _read(path)
    except TorchDebugError:
        raise
    except Exception as error:  # noqa: BLE001 - a file of any other kind may raise anything
        msg = f"{path} holds no step zero: {error_line(error, 120)}"
        raise TorchDebugError(msg) from None


def _read(path: Path) -> ZeroState:
    if path.suffix == ".safetensors":
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
    _refuse(importlib.util.find_spec("safetensors") is None, "safetensors is not installed: install it, or name the file *.pt")
    return importlib.import_module("safetensors.torch")
