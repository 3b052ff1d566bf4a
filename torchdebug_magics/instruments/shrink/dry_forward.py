"""One forward of a model that leaves no trace, on tensors without data where it can: what comes out, what it costs, who feeds whom."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, redirect_stdout
from dataclasses import dataclass
from inspect import isgenerator
from io import StringIO
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from torchdebug_magics.instruments.shrink.report import Proof
from torchdebug_magics.instruments.shrink.stacks import Stack
from torchdebug_magics.probing.contents import Writes
from torchdebug_magics.probing.dry_runs.arithmetic import Arithmetic, Copies
from torchdebug_magics.probing.dry_runs.faking import Fakes
from torchdebug_magics.probing.dry_runs.flops import FlopFormulas, NoFormulas
from torchdebug_magics.probing.dry_runs.inputs import Inputs, named_tensors, sizes, zeros
from torchdebug_magics.probing.dry_runs.untouched import answers, untouched
from torchdebug_magics.probing.hooks import Hooks
from torchdebug_magics.probing.safety import Guard
from torchdebug_magics.probing.storages import storage_of

_WORDS, _BATCH = 8, 2
_SOUND = 16_000
_SIDES = (32, 64, 224)


@dataclass(frozen=True, kw_only=True, eq=False)
class DryForward:
    """What was seen; `error` where it did not come through."""

    proof: Proof
    input: str
    outputs: tuple[tuple[str, tuple[int, ...]], ...]
    """The tensors of the output by name, and their shapes."""
    flops: int | None
    """None where no op was looked at."""
    layer_flops: Mapping[int, int]
    """By the id of the layer."""
    error: Exception | None
    problems: tuple[str, ...]


def ways(model: nn.Module) -> Sequence[Proof]:
    """How to run it, the cheapest first. On ``meta`` nothing can be computed."""
    on_meta = any(one.is_meta for one in model.parameters())
    return ("meta tensors", "fake tensors") if on_meta else ("fake tensors", "real tensors")


def dry_forward(model: nn.Module, inputs: Inputs, proof: Proof, flow: LayerFlow | None = None) -> DryForward:
    """Call ``model(*inputs.args, **inputs.kwargs)`` in this way; all is put back.

    On ``meta`` no op is looked at unless there is a `flow` to follow: that takes four times as long.
    """
    fakes = Fakes() if proof == "fake tensors" else None
    writes, guard, formulas = Writes(), Guard(), FlopFormulas()
    stand_in, described = _stand_ins(proof, fakes, writes)
    looks = proof != "meta tensors" or flow is not None
    arithmetic = Arithmetic(flow, formulas, fakes, writes=writes, ran=flow.ran if flow is not None else None)
    given = inputs.made(model, stand_in, described)
    error: Exception | None = None
    outputs: tuple[tuple[str, tuple[int, ...]], ...] = ()
    with ExitStack() as stack:
        stack.enter_context(redirect_stdout(StringIO()))
        stack.enter_context(untouched(model, (inputs.args, inputs.kwargs), stand_in, writes, guard))
        if flow is not None:
            flow.attach(stack)
        if fakes is not None:
            stack.enter_context(fakes.mode)
            stack.enter_context(answers(fakes))
        stack.enter_context(torch.no_grad())
        if looks:
            stack.enter_context(arithmetic)
        try:
            output = model(*given.args, **given.kwargs)
            output = list(_first(output)) if isgenerator(output) else output
            outputs = tuple((name, sizes(tensor)) for name, tensor in named_tensors(output))
        except Exception as raised:  # noqa: BLE001 - whatever the user's forward raises is the answer
            error = raised
    return DryForward(
        proof=proof,
        input=str(given),
        outputs=outputs,
        flops=arithmetic.total if looks else None,
        layer_flops=flow.flops if flow is not None else {},
        error=error,
        problems=tuple(guard.problems),
    )


def timed(model: nn.Module, inputs: Inputs) -> float | None:
    """Seconds of a forward that computes, the better of two; None where it fails."""
    writes, guard = Writes(), Guard()
    stand_in, described = _stand_ins("real tensors", None, writes)
    took: list[float] = []
    for _ in range(2):
        given = inputs.made(model, stand_in, described)
        with ExitStack() as stack:
            stack.enter_context(redirect_stdout(StringIO()))
            stack.enter_context(untouched(model, (inputs.args, inputs.kwargs), stand_in, writes, guard))
            stack.enter_context(torch.no_grad())
            stack.enter_context(Arithmetic(None, NoFormulas(), None, writes=writes))  # which undoes what the forward writes
            began = time.perf_counter()
            try:
                model(*given.args, **given.kwargs)
                if torch.cuda.is_initialized():
                    torch.cuda.synchronize()
            except Exception:  # noqa: BLE001 - as above
                return None
            took.append(time.perf_counter() - began)
    return min(took)


def _first(output: Iterator[Any]) -> Iterator[Any]:
    """What a forward that yields has to give, were it to yield for ever."""
    for _, value in zip(range(8), output, strict=False):
        yield value


_StandIns: TypeAlias = tuple[Callable[[torch.Tensor], torch.Tensor], Callable[..., torch.Tensor]]


def _stand_ins(proof: Proof, fakes: Fakes | None, writes: Writes) -> _StandIns:
    """In place of the model's own tensors, and of those that are described by their sizes."""
    if fakes is not None:
        return fakes.of, fakes.zeros
    if proof == "meta tensors":
        return _on_meta, lambda shape, dtype, _: torch.zeros(shape, dtype=dtype, device="meta")
    copies = Copies()

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        copy = copies.of(tensor)
        writes.made(copy, tensor)
        return copy

    return copied, zeros


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_meta:
        return tensor
    moved = tensor.detach().to("meta")
    return nn.Parameter(moved, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else moved


@dataclass
class _Counter:
    flops: int = 0


class LayerFlow:
    """Follows, op by op, which layer's results reach which other layer: every memory knows the layer that made it last."""

    def __init__(self, stacks: Sequence[Stack]) -> None:
        self._stacks = stacks
        self._hooks = Hooks()
        self._place_of: dict[int, tuple[int, int]] = {}
        shared: set[int] = set()
        for number, stack in enumerate(stacks):
            for place, layer in enumerate(stack.layers):
                for part in layer.modules():
                    if self._place_of.setdefault(id(part), (number, place)) != (number, place):
                        shared.add(id(part))
        for part_id in shared:
            del self._place_of[part_id]
        self._running: list[tuple[int, int] | None] = []
        self._made_by: dict[int, tuple[StorageWeakRef, dict[int, int]]] = {}
        self._called: list[dict[int, _Counter]] = [{} for _ in stacks]
        self._fed: list[set[int]] = [set() for _ in stacks]

    def attach(self, stack: ExitStack) -> None:
        """Follow until the stack closes."""
        stack.callback(self._hooks.sweep)
        self._hooks.module_calls(stack, self._enter, self._leave)

    def ran(self, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """One op."""
        inputs: dict[int, int] = {}
        for tensor in _tensors((args, kwargs)):
            inputs.update(self._makers(tensor))
        here = self._running[-1] if self._running else None
        if here is not None:
            number, place = here
            if inputs.get(number, place) != place:
                self._fed[number].add(place)
            inputs[number] = place
        if inputs:
            for tensor in _tensors(out):
                self._note(tensor, inputs)

    @property
    def current(self) -> _Counter | None:
        """Of the layer that runs."""
        here = self._running[-1] if self._running else None
        return None if here is None else self._called[here[0]][here[1]]

    @property
    def flops(self) -> dict[int, int]:
        """By the id of the layer."""
        called = (
            (stack.layers[place], counter)
            for stack, by_place in zip(self._stacks, self._called, strict=True)
            for place, counter in by_place.items()
        )
        return {id(layer): counter.flops for layer, counter in called}

    def not_chained(self) -> list[Stack]:
        """Those in which some layer that ran got nothing of another one's."""
        return [
            stack
            for stack, called, fed in zip(self._stacks, self._called, self._fed, strict=True)
            if len({id(layer) for layer in stack.layers}) > 1 and (len(called) < 2 or not set(list(called)[1:]) <= fed)  # noqa: PLR2004 - a chain has two ends
        ]

    def _enter(self, module: nn.Module, _args: Any) -> None:
        place = self._place_of.get(id(module), self._running[-1] if self._running else None)
        if place is not None:
            self._called[place[0]].setdefault(place[1], _Counter())
        self._running.append(place)

    def _leave(self, _module: nn.Module, _args: Any, _output: Any) -> None:
        if self._running:
            self._running.pop()

    def _makers(self, tensor: torch.Tensor) -> dict[int, int]:
        memory = storage_of(tensor)
        return {} if memory is None else self._made_by.get(memory._cdata, (None, {}))[1]

    def _note(self, tensor: torch.Tensor, makers: dict[int, int]) -> None:
        if (memory := storage_of(tensor)) is not None:
            # Weak: nothing is held, and the address is not given to another memory meanwhile.
            self._made_by[memory._cdata] = StorageWeakRef(memory), makers


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    return (tensor for _, tensor in named_tensors(value))


def likely_inputs(model: nn.Module) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """(positional, named) sizes of tensors, the likeliest first."""
    yield from _by_name(model)
    required = max(1, len(_required(model)))
    for shape in _by_first_layer(model):
        yield (shape,) * required, {}


def _required(model: nn.Module) -> list[str]:
    positional = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    return [name for name, one in _parameters(model).items() if one.default is one.empty and one.kind in positional]


def _parameters(model: nn.Module) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(model.forward).parameters
    except (TypeError, ValueError):
        return {}


def _by_name(model: nn.Module) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """As the models of transformers call what they take."""
    known = _known_sizes(getattr(model, "config", None))
    takes = [name for name in known if name in _parameters(model)]
    main = getattr(model, "main_input_name", "")
    decoder = ["decoder_input_ids"] if "decoder_input_ids" in takes else []
    for names in ([main], [main, *decoder], ["input_ids", "pixel_values"], takes):
        if names and all(name in takes for name in names):
            yield (), {name: known[name] for name in names}


def _known_sizes(config: Any) -> dict[str, tuple[int, ...]]:
    vision = _setting(config, "vision_config") or config
    audio = _setting(config, "audio_config") or config
    side = _setting(vision, "image_size", 224)
    height, width = (side, side) if isinstance(side, int) else tuple(side)[:2]
    sound = (1, _setting(audio, "num_mel_bins", 80), 2 * _setting(audio, "max_source_positions", 1500))
    known = {"input_ids": (1, _WORDS), "pixel_values": (1, _setting(vision, "num_channels", 3), height, width)}
    return {**known, "input_features": sound, "input_values": (1, _SOUND), "decoder_input_ids": (1, _WORDS)}


def _setting(config: Any, name: str, default: Any = None) -> Any:
    found = getattr(config, name, None)
    return default if found is None else found


def _by_first_layer(model: nn.Module) -> Iterator[tuple[int, ...]]:
    first = next((part for part in model.modules() if any(one is not None for one in part._parameters.values())), None)
    if isinstance(first, (nn.Embedding, nn.EmbeddingBag)):
        yield _BATCH, _WORDS
        yield (_WORDS,)
    elif isinstance(first, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
        dims = len(first.kernel_size)
        yield from ((_BATCH, first.in_channels, *(side,) * dims) for side in _SIDES)
    elif (width := _width(first)) is not None:
        yield _BATCH, _WORDS, width
        yield _BATCH, width


def _width(first: nn.Module | None) -> int | None:
    for name in ("in_features", "embed_dim", "input_size", "normalized_shape", "num_features"):
        found = getattr(first, name, None)
        found = found[-1] if isinstance(found, (tuple, list)) and found else found
        if isinstance(found, int):
            return found
    return None
