"""One forward of a model that leaves no trace, on tensors without data where it can: what comes out, what it costs, who feeds whom."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, redirect_stdout
from dataclasses import dataclass
from inspect import isgenerator
from io import StringIO
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import nn

from torchdebug_magics.probing.dry_runs.arithmetic import Arithmetic
from torchdebug_magics.probing.dry_runs.copies import Copies
from torchdebug_magics.probing.dry_runs.faking import Fakes
from torchdebug_magics.probing.dry_runs.flops import FlopFormulas, NoFormulas
from torchdebug_magics.probing.dry_runs.inputs import Inputs, zeros
from torchdebug_magics.probing.dry_runs.leaves import named_tensors, sizes
from torchdebug_magics.probing.dry_runs.library_questions import answers
from torchdebug_magics.probing.dry_runs.untouched import untouched
from torchdebug_magics.probing.dry_runs.written_tensors import Writes
from torchdebug_magics.probing.guard import Guard

if TYPE_CHECKING:
    from torchdebug_magics.instruments.shrink.layer_flow import LayerFlow
    from torchdebug_magics.instruments.shrink.report import Proof

__all__ = ["DryForward", "dry_forward", "timed", "ways"]


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
