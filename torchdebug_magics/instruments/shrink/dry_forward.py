"""One forward of a model that leaves no trace, on tensors without data where it can: what comes out, what it costs, who feeds whom."""

from __future__ import annotations

import inspect
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from inspect import isgenerator
from itertools import islice
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parameter import is_lazy

from torchdebug_magics.instruments.shrink.report import Proof
from torchdebug_magics.instruments.shrink.stacks import Stack
from torchdebug_magics.probing.dry_runs.arithmetic import Arithmetic, Copies
from torchdebug_magics.probing.dry_runs.faking import Fakes
from torchdebug_magics.probing.dry_runs.flops import FlopFormulas, NoFormulas
from torchdebug_magics.probing.dry_runs.inputs import Inputs, named_tensors, sizes, zeros
from torchdebug_magics.probing.dry_runs.untouched import answers, untouched
from torchdebug_magics.probing.hooks import Hooks
from torchdebug_magics.probing.safety import Guard, quiet
from torchdebug_magics.probing.state.contents import Writes
from torchdebug_magics.probing.storages import storage_of

_WORDS, _BATCH = 8, 2
_SOUND = 16_000
_SIDES = (32, 64, 224)
Outputs: TypeAlias = Sequence[tuple[str, tuple[int, ...]]]
_MOST_YIELDED = 8
"""Of a forward that yields, were it to yield for ever."""


@dataclass(frozen=True, kw_only=True, eq=False)
class DryForward:
    """What was seen; `error` where it did not come through."""

    proof: Proof
    input: str
    outputs: Outputs
    """The tensors of the output by name, and their shapes."""
    flops: int | None
    """None where no op was looked at."""
    layer_flops: Mapping[int, int]
    """By the id of the layer."""
    error: Exception | None
    problems: tuple[str, ...]
    seconds_s: float


def dry_forward(model: nn.Module, inputs: Inputs, proof: Proof, flow: LayerFlow | None = None, *, counts: bool = True) -> DryForward:
    """Call ``model(*inputs.args, **inputs.kwargs)`` in this way; all is put back.

    On ``meta`` no op is looked at unless there is a `flow` to follow: that takes four times as long.
    """
    fakes = Fakes() if proof == "fake tensors" else None
    writes, guard = Writes(), Guard()
    stand_ins = fakes if fakes is not None else Copies(writes)
    stand_in, described = stand_ins.of, stand_ins.zeros
    if proof == "meta tensors":
        stand_in, described = _on_meta, lambda *description: _on_meta(zeros(*description))
    looks = proof != "meta tensors" or flow is not None
    formulas = FlopFormulas() if counts else NoFormulas()
    arithmetic = Arithmetic(flow, formulas, fakes, writes=writes, ran=flow.ran if flow is not None else None)
    given = inputs.made(model, stand_in, described)
    error: Exception | None = None
    outputs: Outputs = ()
    with ExitStack() as stack:
        stack.enter_context(quiet())
        stack.enter_context(untouched(model, (inputs.args, inputs.kwargs), stand_in, writes, guard))
        if flow is not None:
            flow.attach(stack)
        if fakes is not None:
            stack.enter_context(fakes.mode)
            stack.enter_context(answers(fakes))
        stack.enter_context(torch.no_grad())
        if looks:
            stack.enter_context(arithmetic)
        began_s = time.perf_counter()
        try:
            output = model(*given.args, **given.kwargs)
            output = list(islice(output, _MOST_YIELDED)) if isgenerator(output) else output
            outputs = tuple((name, sizes(tensor)) for name, tensor in named_tensors(output))
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
        except Exception as raised:  # noqa: BLE001 - whatever the user's forward raises is the answer
            error = raised
        took_s = time.perf_counter() - began_s
    return DryForward(
        proof=proof,
        input=str(given),
        outputs=outputs,
        flops=arithmetic.total if looks else None,
        layer_flops=flow.flops if flow is not None else {},
        error=error,
        problems=tuple(guard.problems),
        seconds_s=took_s,
    )


def timed(model: nn.Module, inputs: Inputs) -> float | None:
    """Seconds of a forward that computes, the better of two; None where it fails."""
    runs = [dry_forward(model, inputs, "real tensors", counts=False) for _ in range(2)]
    return None if any(run.error is not None for run in runs) else min(run.seconds_s for run in runs)


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_meta:
        return tensor
    moved = tensor.detach().to("meta")
    return nn.Parameter(moved, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else moved


@dataclass
class _Counter:
    flops: int = 0


Place: TypeAlias = tuple[int, int]
"""(number of a stack, number of a layer in it)"""


class SideBySideError(Exception):
    """Layers of these containers, by id, do not feed each other."""

    def __init__(self, containers: set[int]) -> None:
        super().__init__(containers)
        self.containers = containers


class LayerFlow:
    """Follows, op by op, which layer's results reach which other layer: every memory knows the layer that made it last."""

    def __init__(self, stacks: Sequence[Stack]) -> None:
        self._stacks = stacks
        self._hooks = Hooks()
        places: dict[int, set[Place]] = {}
        for number, stack in enumerate(stacks):
            for place, layer in enumerate(stack.layers):
                for part in layer.modules():
                    places.setdefault(id(part), set()).add((number, place))
        self._place_of = {part: next(iter(where)) for part, where in places.items() if len(where) == 1}
        """Of each part that is in one layer only."""
        self._running: list[Place | None] = []
        self._made_by: dict[int, tuple[StorageWeakRef, dict[int, int]]] = {}
        """Of each memory, the last layer of each stack that it comes from. Weak: the address is not given to another memory meanwhile."""
        self._called: dict[Place, _Counter] = {}
        self._fed: set[Place] = set()

    def attach(self, stack: ExitStack) -> None:
        """Follow until the stack closes."""
        stack.callback(self._hooks.sweep)
        self._hooks.module_calls(stack, self._enter, self._leave)

    def ran(self, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """One op."""
        inputs: dict[int, int] = {}
        for _, tensor in named_tensors((args, kwargs)):
            memory = storage_of(tensor)
            inputs.update({} if memory is None else self._made_by.get(memory._cdata, (None, {}))[1])
        here = self._running[-1] if self._running else None
        if here is not None:
            if inputs.get(here[0], here[1]) != here[1]:
                self._fed.add(here)
            inputs[here[0]] = here[1]
        for _, tensor in named_tensors(out) if inputs else ():
            if (memory := storage_of(tensor)) is not None:
                self._made_by[memory._cdata] = StorageWeakRef(memory), inputs

    @property
    def current(self) -> _Counter | None:
        """Of the layer that runs."""
        here = self._running[-1] if self._running else None
        return None if here is None else self._called[here]

    @property
    def flops(self) -> dict[int, int]:
        """By the id of the layer."""
        return {id(self._stacks[number].layers[place]): counter.flops for (number, place), counter in self._called.items()}

    def check_chained(self) -> None:
        """Raise where some layer that ran got nothing of another one's; a chain has two ends."""
        mistaken = set()
        for number, stack in enumerate(self._stacks):
            called = [place for place in self._called if place[0] == number]
            if len(set(map(id, stack.layers))) > 1 and (len(called) < 2 or not self._fed.issuperset(called[1:])):  # noqa: PLR2004
                mistaken.add(id(stack.container))
        if mistaken:
            raise SideBySideError(mistaken)

    def _enter(self, module: nn.Module, _args: Any) -> None:
        place = self._place_of.get(id(module), self._running[-1] if self._running else None)
        if place is not None:
            self._called.setdefault(place, _Counter())
        self._running.append(place)

    def _leave(self, _module: nn.Module, _args: Any, _output: Any) -> None:
        if self._running:
            self._running.pop()


def likely_inputs(model: nn.Module) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """(positional, named) sizes of tensors, the likeliest first: as transformers names them, then as the first layer takes them."""
    parameters: Mapping[str, inspect.Parameter] = {}
    with suppress(TypeError, ValueError):
        parameters = inspect.signature(model.forward).parameters
    known = _known_sizes(getattr(model, "config", None))
    takes, main = [name for name in known if name in parameters], getattr(model, "main_input_name", "")
    for names in ([main], [main, *({"decoder_input_ids"} & set(takes))], ["input_ids", "pixel_values"], takes):
        if names and set(names) <= set(takes):
            yield (), {name: known[name] for name in names}
    required = [
        parameter
        for parameter in parameters.values()
        if parameter.default is parameter.empty and parameter.kind <= parameter.POSITIONAL_OR_KEYWORD
    ]
    for shape in _by_first_layer(model):
        yield (shape,) * max(1, len(required)), {}


def _known_sizes(config: Any) -> dict[str, tuple[int, ...]]:
    def setting(part: str, name: str, default: Any) -> Any:
        found = getattr(getattr(config, part, None) or config, name, None)
        return default if found is None else found

    side = setting("vision_config", "image_size", 224)
    height, width = (side, side) if isinstance(side, int) else tuple(side)[:2]
    sound = (1, setting("audio_config", "num_mel_bins", 80), 2 * setting("audio_config", "max_source_positions", 1500))
    known = {"input_ids": (1, _WORDS), "pixel_values": (1, setting("vision_config", "num_channels", 3), height, width)}
    return {**known, "input_features": sound, "input_values": (1, _SOUND), "decoder_input_ids": (1, _WORDS)}


def _by_first_layer(model: nn.Module) -> Iterator[tuple[int, ...]]:
    first = next((part for part in model.modules() if any(parameter is not None for parameter in part._parameters.values())), None)
    weight = None if first is None else next(parameter for parameter in first._parameters.values() if parameter is not None)
    if isinstance(first, (nn.Embedding, nn.EmbeddingBag)):
        yield _BATCH, _WORDS
        yield (_WORDS,)
    elif isinstance(first, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
        yield from ((_BATCH, first.in_channels, *(side,) * len(first.kernel_size)) for side in _SIDES)
    elif weight is not None and not is_lazy(weight) and weight.dim():
        yield _BATCH, _WORDS, weight.shape[-1]
        yield _BATCH, weight.shape[-1]
