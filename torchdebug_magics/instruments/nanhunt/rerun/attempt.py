"""What a replay is to reach, what it saw, and whether it reached the same."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any, NamedTuple, NoReturn, TypeAlias

import torch
from torch._C import _functorch as functorch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.nn.parallel import DistributedDataParallel

from torchdebug_magics.instruments.nanhunt.replay.op_trace import Trace
from torchdebug_magics.probing.distributed import this_rank
from torchdebug_magics.probing.distributed.unsent_collectives import Exchange
from torchdebug_magics.probing.source.syntax import Span, span_as_written
from torchdebug_magics.probing.source.user_code import is_of_module, is_user_code, local_values, owner
from torchdebug_magics.probing.tensors import is_bad

Place: TypeAlias = tuple[CodeType, int]
"""An instruction: unlike a frame it keeps no variables alive."""
_NOT_THE_USERS = frozenset({"own", "torch"})
_NOWHERE = nullcontext()
_UNTIL_TOLD_S = 5.0
"""What was found becomes an error, and that a report; then the signal comes again."""
Alike: TypeAlias = "Callable[[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]], bool]"


class CannotReplay(Exception):  # noqa: N818 - not an error: a reason
    """Why a step's statements cannot be run again, in words for the report."""


def refuse(reason: str) -> NoReturn:
    """The step is not run again."""
    raise CannotReplay(reason)


@dataclass
class Attempt:
    """What a replay is to reach: a sink call, known by its place in the step."""

    original: tuple[torch.Tensor, ...]
    """The loss (or what was differentiated) of the bad step."""
    number: int
    """Which backward call since the step began, 1-based."""
    leaves: dict[int, torch.Tensor]
    """Leaf tensors whose gradients are put aside."""
    until_update: bool = False
    """Whether to go on to the optimizer's step, for what happens to gradients after backward()."""


@dataclass
class Replayed:
    """What a replay reached."""

    observer: Trace
    """What looked at it."""
    losses: tuple[torch.Tensor, ...] = ()
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    """By the id of the leaf, written as text, or the place in a result of ``autograd.grad``."""
    reproduced: bool | None = None
    problem: str = ""
    """What it raised."""
    refused: str = ""
    """Why it was not run, or not to its end: see `CannotReplay`."""
    outputs: tuple[torch.Tensor, ...] = ()
    names: dict[str, Any] = field(default_factory=dict)
    """The variables of the replayed statements, to name tensors by."""
    made: dict[str, Any] = field(default_factory=dict)
    """What those that the statements bind held in the bad step."""
    finished: bool = False
    """Whether it came as far as it was to come."""
    exchanges: tuple[Exchange, ...] = ()
    """What the step exchanges with other ranks, and its replay did not."""
    averaging: tuple[DistributedDataParallel, ...] = ()
    """The models whose gradients a step averages over ranks, and its replay did not."""


def same_bits(left: tuple[torch.Tensor, ...], right: tuple[torch.Tensor, ...]) -> bool:
    """Bit for bit, one NaN being as good as another."""
    return _equal(left, right, _bits)


def same_kinds(left: tuple[torch.Tensor, ...], right: tuple[torch.Tensor, ...]) -> bool:
    """Whether the same elements are NaN, infinite and minus infinite."""
    return _equal(left, right, _kinds)


def badly_alike(left: tuple[torch.Tensor, ...], right: tuple[torch.Tensor, ...]) -> bool:
    """As `same_kinds`, and some of them are."""
    return same_kinds(left, right) and any(map(is_bad, left))


def no_less_bad(now: tuple[torch.Tensor, ...], then: tuple[torch.Tensor, ...]) -> bool:
    """Whether all that was bad then is bad now: with a mode on the stack some derivatives multiply by 0 where they select without one."""
    kinds = zip(now, then, strict=True)
    return all(one.shape == other.shape and not bool((_kinds(other).any(0) & ~_kinds(one).any(0)).any()) for one, other in kinds)


def agree(now: object, then: object, alike: Alike, *, unknown: bool) -> bool:
    """Whether two tensors are `alike`; `unknown` of kinds that cannot be compared, and of what is no tensor."""
    if not isinstance(now, torch.Tensor) or not isinstance(then, torch.Tensor):
        return unknown
    try:
        return now.device == then.device and alike((now,), (then,))
    except (RuntimeError, NotImplementedError, TypeError):
        return unknown


def _equal(left: tuple[torch.Tensor, ...], right: tuple[torch.Tensor, ...], seen: Callable[[torch.Tensor], torch.Tensor]) -> bool:
    return len(left) == len(right) and all(
        one.shape == other.shape and one.dtype is other.dtype and bool(torch.equal(seen(one), seen(other)))
        for one, other in zip(left, right, strict=True)
    )


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    plain = _real(tensor)
    return torch.cat([plain.nan_to_num(0.0, posinf=0.0, neginf=0.0)[None], _kinds(tensor).to(plain.dtype)])


def _kinds(tensor: torch.Tensor) -> torch.Tensor:
    plain = _real(tensor)
    return torch.stack([torch.isnan(plain), torch.isposinf(plain), torch.isneginf(plain)])


def _real(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.detach()
    return torch.view_as_real(plain) if plain.is_complex() else plain


class Position(NamedTuple):
    """A frame and the instruction it stood at."""

    frame: FrameType
    instruction: int

    @property
    def line(self) -> int:
        """The line of that instruction; counted only where it is asked for, as a step asks nothing of most frames."""
        return line_of((self.frame.f_code, self.instruction))


def names_seen(frame: FrameType | None) -> dict[str, Any]:
    """Its variables, and its globals."""
    return {} if frame is None else {**frame.f_globals, **local_values(frame)}


def caller(frame: FrameType | None) -> FrameType | None:
    """The innermost frame that is neither ours nor torch's. A frame that is kept keeps its variables: torch's hold the activations."""
    while frame is not None and owner(frame.f_code.co_filename) in _NOT_THE_USERS:
        frame = frame.f_back
    return frame


def frame_chain(frame: FrameType | None, last: CodeType | None = None) -> tuple[Position, ...]:
    """The frame and its callers with their present positions, innermost first, up to a frame of the code `last`.

    Without it, up to a cell or a script: what called that is nothing that a step could start in.
    """
    chain = []
    while frame is not None:
        chain.append(Position(frame, frame.f_lasti))
        if frame.f_code is last or (last is None and is_of_module(frame)):
            break
        frame = frame.f_back
    return tuple(chain)


def same_place(one: tuple[Position, ...], other: tuple[Position, ...]) -> bool:
    """Whether two calls come from one place: the loop went round."""
    return any(
        here.frame is there.frame and here.instruction == there.instruction and is_user_code(here.frame.f_code)
        for here, there in zip(one, other, strict=False)
    )


def places(frame: FrameType | None, last: CodeType | None = None) -> tuple[Place, ...]:
    """The same, which keeps no variables alive."""
    return tuple([(position.frame.f_code, position.instruction) for position in frame_chain(frame, last)])


def same_call(one: tuple[Place, ...], other: tuple[Place, ...]) -> bool:
    """Whether two calls come from the same expressions of the source, as far out as both are known; their code may be compiled anew."""
    return all(
        here == there or (here[0].co_filename == there[0].co_filename and span_at(here) == span_at(there))
        for here, there in zip(one, other, strict=False)
    )


def span_at(place: Place) -> Span:
    """Of the expression that the instruction evaluates; of its whole line where columns are not known, or are not as written."""
    line = line_of(place)
    return span_as_written(*place, line) or (line, -1, line, -1)


def line_of(place: Place) -> int:
    """The line of an instruction; 0 where it has none."""
    code, instruction = place
    lines = (line for start, end, line in code.co_lines() if start <= instruction < end and line is not None)
    return next(lines, 0)


def is_outermost_gradient() -> bool:
    """Whether the one ``grad`` that runs is the innermost transform, in nothing but ``vmap``: what it returns is a gradient to be used."""
    if functorch.peek_interpreter_stack() is None:
        return False
    kinds = [one.key() for one in functorch.get_interpreter_stack() or ()]
    around = {functorch.TransformType.Vmap}
    return bool(kinds) and kinds[-1] == functorch.TransformType.Grad and around.issuperset(kinds[:-1])


def base_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that all transforms have wrapped; any other one itself."""
    while functorch.is_functorch_wrapped_tensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    return tensor


def outside_transforms() -> AbstractContextManager[object]:
    """As if none ran; afterwards they go on."""
    return _NOWHERE if functorch.peek_interpreter_stack() is None else temporarily_clear_interpreter_stack()


@contextmanager
def end_deferred() -> Iterator[None]:
    """Only in a process that was launched, and only while nothing in it waits for another rank: native code would never hear of SIGTERM."""
    is_launched = multiprocessing.parent_process() is not None or this_rank.world_size() > 1
    if not is_launched or threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)
        if came:
            end = threading.Timer(_UNTIL_TOLD_S, os.kill, (os.getpid(), signal.SIGTERM))
            end.daemon = True
            end.start()
