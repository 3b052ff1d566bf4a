"""What is known of a failure: the op, its operands and where each came from, the module, the user's line."""

from __future__ import annotations

import ast
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch

from torchdebug_magics.instruments.shapes.cell_error.program_slice import SourceLines
from torchdebug_magics.instruments.shapes.follow.seen import Failed, Forward, Made
from torchdebug_magics.instruments.shapes.repair.source import Caller, EditSite, site_of
from torchdebug_magics.probing.dry_runs.inputs import named_tensors, sizes
from torchdebug_magics.probing.safety import Guard
from torchdebug_magics.probing.source.user_code import owner

Sizes = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Operand:
    """A tensor that the failing op, or the failing module, was given."""

    tensor: torch.Tensor
    name: str
    """The path of the parameter, the user's own text for it, or the forward's name of an input; empty where none is known."""
    owned: bool
    """Whether it is a parameter or buffer of the model."""
    made: Made | None

    @property
    def sizes(self) -> Sizes:
        """The shape of the tensor."""
        return sizes(self.tensor)

    @property
    def is_input(self) -> bool:
        """Whether the model was called with this very tensor."""
        return self.made is not None and self.made.number == 0


@dataclass(frozen=True, eq=False)
class FailedCall:
    """A module call that was running, from its frame."""

    module: torch.nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    site: EditSite | None = None
    """The user's own call of it, where that was looked for."""


@dataclass(frozen=True, eq=False)
class FailureFacts:
    """All that the rules look at. A failure of Python code has no `op`; one outside any module has no `module`."""

    error: BaseException
    """With its traceback."""
    text: str = ""
    """What it says, in torch's words for real tensors; its first line."""
    op: str | None = None
    func: Any = None
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    operands: tuple[Operand, ...] = ()
    """The tensors that the op was given; without an op, those that the innermost module was."""
    path: str | None = None
    module: torch.nn.Module | None = None
    """The innermost one that was running, and its `path`."""
    given: tuple[Operand, ...] = ()
    """The tensors that this module was called with."""
    call: FailedCall | None = None
    outer: FailedCall | None = None
    """The user's own call, where the failing module stands inside of what was called."""
    modules: Mapping[str, torch.nn.Module] = field(default_factory=dict)
    """The modules that ran, by path."""
    inputs: tuple[tuple[str, torch.Tensor], ...] = ()
    """What the model was called with."""
    site: EditSite | None = None
    """The user's own expression; None where the innermost line is not the user's."""
    caller: Caller | None = None
    """The user's own call of the model, where that is known."""
    direct: bool = False
    """Whether that expression itself calls the failing op or the failing module, with nothing of the user's in between."""
    values: Callable[[torch.Tensor], torch.Tensor | None] = lambda _: None
    """The numbers in a tensor, where they are known."""
    guard: Guard = field(default_factory=Guard)
    """Records a rule that stumbles over these facts."""

    @property
    def who(self) -> str:
        """The failing module as the user knows it."""
        if self.path:
            return f"`{self.path}`"
        return f"`{type(self.module).__name__}`" if self.module is not None else f"`{self.op}`"

    @property
    def calls_module(self) -> bool:
        """Whether a part of torch's own failed, rather than an op in the user's code."""
        code = getattr(type(self.module).forward, "__code__", None) if self.module is not None else None
        return self.module is not None and owner("" if code is None else code.co_filename) == "torch"

    @property
    def written(self) -> str:
        """The user's expression, where that calls the op itself; else the op."""
        text = self.site.text if self.site is not None and self.direct else ""
        return f"`{text or (self.op or '').strip('_')}`"

    @property
    def written_call(self) -> ast.Call | None:
        """The user's own call of the op or the module."""
        node = self.site.expression if self.site is not None and self.direct else None
        return node if isinstance(node, ast.Call) else None

    def argument(self, at: int, name: str, default: Any = None) -> Any:
        """An argument of the op, by place or name."""
        if name in self.kwargs:
            return self.kwargs[name]
        return self.args[at] if at < len(self.args) else default

    def operand(self, tensor: object) -> Operand | None:
        """The operand that is this very tensor."""
        return next((operand for operand in (*self.operands, *self.given) if operand.tensor is tensor), None)


def facts_of(run: Forward, said: BaseException | None = None, guard: Guard | None = None) -> FailureFacts:
    """From a run that failed; `said` is its error for real tensors, where that is known."""
    assert run.error is not None
    failed = run.failed if run.failed is not None and run.failed.error is run.error else None
    frames = list(traceback.walk_tb(run.error.__traceback__))
    calls = module_calls([frame for frame, _ in frames])
    running = [entry for entry in run.calls.made if entry.outputs is None]
    site, after = site_of(run.error)
    below = module_calls([frame for frame, _ in frames[after:]]) if site is not None else calls
    last = running[-1] if running else None
    inner = next((entry for entry in reversed(running) if calls and entry.module is calls[-1].module), last)
    inner = None if inner is not None and isinstance(inner.module, SourceLines) else inner  # the user's own lines are in no module
    inputs = tuple(named_tensors(run.given.named_values())) if run.given.are_named else ()
    names = {id(tensor): name for name, tensor in inputs}
    call = calls[-1] if calls else None
    given = tuple(
        Operand(tensor, _named(tensor, at, site, names, direct=len(below) == 1), owned=False, made=run.made(tensor))
        for at, (_, tensor) in enumerate(named_tensors((call.args, call.kwargs) if call is not None else ()))
    )
    operands = _operands(failed, site, names, below) if failed is not None else given
    return FailureFacts(
        guard=guard or Guard(),
        error=run.error,
        text=_said(run, said or run.error),
        op=failed.op if failed is not None else None,
        func=failed.func if failed is not None else None,
        args=failed.args if failed is not None else (),
        kwargs=failed.kwargs if failed is not None else {},
        operands=operands,
        path=inner.path if inner is not None else None,
        module=inner.module if inner is not None else None,
        given=given,
        call=call,
        outer=below[0] if len(below) > 1 else None,
        modules={entry.path: entry.module for entry in run.calls.made},
        inputs=inputs,
        site=site,
        caller=run.given.caller,
        direct=site is not None and len(below) <= 1,
        values=run.fakes.value if run.fakes is not None else torch.Tensor.detach,
    )


def _said(run: Forward, error: BaseException) -> str:
    """What the error says, in one line; TorchScript quotes its own code, and not always what the op in it said."""
    if "TorchScript" in str(error) and run.failed is not None:
        error = run.failed.error
    return next(iter(str(error).strip().splitlines()), "") or type(error).__name__


def module_calls(frames: list[FrameType]) -> list[FailedCall]:
    """The module calls among these frames, the outermost first."""
    return [
        FailedCall(frame.f_locals["self"], tuple(frame.f_locals.get("args", ())), dict(frame.f_locals.get("kwargs", {})))
        for frame in frames
        if frame.f_code is _CALL and isinstance(frame.f_locals.get("self"), torch.nn.Module)
    ]


_CALL = torch.nn.Module._call_impl.__code__


def is_loss(module: torch.nn.Module | None) -> bool:
    """Whether it is a loss of torch's own: it hands its arguments on to the function in it."""
    return type(module).__module__ == torch.nn.modules.loss.__name__


def _operands(failed: Failed, site: EditSite | None, names: Mapping[int, str], below: list[FailedCall]) -> tuple[Operand, ...]:
    operands = []
    for at, ((place, tensor), made) in enumerate(zip(failed.operands, failed.made, strict=True)):
        one_each = not below or not at or is_loss(below[0].module)  # the arguments of the module are those of the op
        name = place if at in failed.owned else _named(tensor, at, site, names, direct=len(below) <= 1 and one_each)
        operands.append(Operand(tensor, name, at in failed.owned, made))
    return tuple(operands)


def _named(tensor: torch.Tensor, at: int, site: EditSite | None, names: Mapping[int, str], *, direct: bool) -> str:
    text = site.operand_text(at, tensor, direct=direct) if site is not None else ""
    return text or names.get(id(tensor), "")
