"""An error with all that can still be read of it: the user's frames, the tensors that backward() began with, the tape."""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any, NamedTuple

import torch

from torchdebug_magics.instruments.autograd.report import AutogradFinding, Kind
from torchdebug_magics.instruments.autograd.source_readings import (
    assigned_at,
    code_at,
    finding,
    named_members,
    statement_at,
    writes,
    written_names,
)
from torchdebug_magics.instruments.autograd.tape import EventCourse, Tape
from torchdebug_magics.probing.modules import live_modules
from torchdebug_magics.probing.source.call_sites import MISSING, value_of
from torchdebug_magics.probing.source.syntax import expression, nodes
from torchdebug_magics.probing.source.user_code import is_user_code, local_values, location, span
from torchdebug_magics.probing.tensors import tensors_in
from torchdebug_magics.report import Location

_KINDS: tuple[tuple[str, Kind], ...] = (
    (r"modified by an inplace operation", "inplace"),
    (r"backward through the graph a second time|saved (?:tensors|intermediate values).*already been freed", "second_backward"),
    (
        r"view of a leaf Variable that requires grad|is a view and (?:is being|its base)|view was created in|is a view of a leaf",
        "view_inplace",
    ),
    (r"leaf [Vv]ariable.*(?:in-place|inplace)|leaf variable has been moved", "leaf_inplace"),
    (r"does not require grad and does not have a grad_fn|does not require grad$|doesn't require grad", "cut"),
    (r"grad can be implicitly created only for|grad_output\[\d+\] has a shape|Mismatch in shape: grad", "non_scalar"),
    (r"[Ii]nference tensors?\b", "inference_tensor"),
    (r"not have been used in the graph", "unused_input"),
    (r"[Oo]nly Tensors of floating point|only support calling .* floating|can only be created for (?:real|float)", "integer_grad"),
    (r"torch\.utils\.checkpoint|during the original forward and recomputation|[Rr]ecomputed values", "checkpoint_mismatch"),
    (
        r"derivative for .* is not implemented|differentiate twice|not implemented for .*double|not support double backward",
        "no_double_backward",
    ),
    (
        r"returned an incorrect number of gradients|gradient different than None|save_for_backward can only|expected Variable or None",
        "custom_function",
    ),
    (r"Function (?!\w+Backward\d+\b)\w+ returned an invalid gradient", "custom_function"),
    (r"returned an invalid gradient", "other"),  # of PyTorch's own nodes, whose names end in a number: ``MulBackward0``
    (r"assigned grad has data|attempting to assign a gradient|has changed the \w+ of value|optimizer got an empty parameter list", "other"),
    (r"can't convert (?!meta)\S+ device type tensor to numpy", "other"),
    (r"can't optimize a non-leaf|Can't call numpy\(\) on Tensor that requires grad|graph leaves|requires_grad flags of leaf", "other"),
    (r"can't retain_grad|register a hook on a tensor", "other"),
)


class Read(NamedTuple):
    """A variable or attribute that one of the user's lines reads."""

    place: Location
    name: str
    value: object


@dataclass
class Raised:
    """Lives only while the error is explained, so that no frame is held."""

    kind: Kind
    message: str
    here: Location | None
    """The innermost line of the user's code."""
    frames: tuple[tuple[FrameType, Location], ...]
    """The user's, the innermost first, with the lines at which the error passed them."""
    roots: tuple[torch.Tensor, ...]
    """What backward() or grad() was called on."""
    inputs: tuple[torch.Tensor, ...]
    """What grad() was asked for."""
    innermost: tuple[FrameType, Location] | None
    """Where it was raised, be it in PyTorch."""
    statement: ast.stmt | None
    """The user's, of those that may share the line."""
    modules: tuple[torch.nn.Module, ...]
    """Those in whose forward it was raised, the innermost first."""
    tape: Tape
    course: EventCourse

    @classmethod
    def of(cls, error: BaseException, tape: Tape, course: EventCourse) -> Raised | None:
        """None for an error that autograd did not raise."""
        trace: list[TracebackType] = []
        step = error.__traceback__
        while step is not None:
            trace.insert(0, step)
            step = step.tb_next
        kind = kind_of_error(error)
        frames = [step.tb_frame for step in trace]
        engine = next((place for place, frame in enumerate(frames) if frame.f_code.co_name == "_engine_run_backward"), None)
        if engine is not None and isinstance(error, RuntimeError) and not any(is_user_code(frame.f_code) for frame in frames[: engine + 1]):
            kind = kind or "other"  # an op of a backward pass raised it, and no code of the user's that ran in it
        # What a custom Function saved is freed, too: the call of backward() is at fault, not the Function.
        outside = trace[engine or 0 :] if kind == "second_backward" else trace
        of_user = [step for step in outside if is_user_code(step.tb_frame.f_code)]
        statement, here = None, None
        if of_user:
            here = _place(of_user[0])
            at = span(of_user[0].tb_frame.f_code, of_user[0].tb_lasti)
            statement = statement_at(here, None if at is None else at[1])
            is_missing = isinstance(error, (AttributeError, TypeError)) and "NoneType" in str(error)
            if kind is None and is_missing and missing_gradient_of(statement_at(here), of_user[0].tb_frame) is not None:
                kind = "other"
        if kind is None:
            return None
        in_forward: Iterator[Any] = (local_values(frame).get("self") for frame in frames if frame.f_code.co_name == "forward")
        return cls(
            kind,
            str(error),
            here,
            tuple((step.tb_frame, _place(step)) for step in of_user),
            next(filter(None, (_given(frame, "tensors", "outputs") for frame in frames)), ()),
            next(filter(None, (_given(frame, "inputs_tuple") for frame in frames)), ()),
            (frames[0], _place(trace[0])) if trace else None,
            statement,
            tuple(one for one in in_forward if issubclass(type(one), torch.nn.Module)),
            tape,
            course,
        )

    def finding(self, headline: str, advice: str, where: Location | None = None, **more: Any) -> AutogradFinding:
        """At `where`, else at the line that raised."""
        return finding(self.kind, headline, where or self.here, advice, raised=True, **more)

    @property
    def code(self) -> str:
        """The statement as it stands on its line, alone."""
        return code_at(self.here, statement=self.statement)

    @property
    def module(self) -> str | None:
        """The path of the innermost module in whose forward it was raised."""
        paths = (path for root in self.modules[-1:] for path, one in root.named_modules() if one is self.modules[0])
        return next(paths, None) or None

    @property
    def root_name(self) -> str | None:
        """What backward() was called on."""
        return self.name_of(self.roots[0]) if self.roots else None

    def writes(self) -> tuple[str | None, str | None]:
        """(name of what the line that raised writes in place, op), be that line in PyTorch."""
        frame, place = self.innermost if self.innermost is not None else (None, None)
        inner, name = statement_at(place), next(iter(written_names(self.statement)), None)
        if name is None and frame is not None:
            names = written_names(inner)
            values = (value_of(node, frame) for node in nodes(ast.expr, inner) if ast.unparse(node) in names)
            tensor = next((value for value in values if isinstance(value, torch.Tensor)), None)
            name = None if tensor is None else self.name_of(tensor)
        ops = (op for statement in (self.statement, inner) for _, op in writes(statement)[:1])
        return name, next(filter(None, ops), None)

    def variables(self) -> Iterator[tuple[str, Any]]:
        """The names that the user's frames see, the innermost first."""
        for frame, _ in self.frames:
            yield from local_values(frame).items()
            yield from ((name, value) for name, value in list(frame.f_globals.items()) if not name.startswith("_"))

    def values(self) -> dict[str, Any]:
        """The same, each name as the innermost frame sees it."""
        return dict(reversed(list(self.variables())))

    def assigned_at(self, name: str | None) -> Location | None:
        """The last assignment to a variable before the error, by the text; else the last of an earlier cell."""
        return assigned_at(name, [self.here.file] if self.here is not None else [], self.here)

    def value(self, name: str) -> Any:
        """What a variable, or an attribute of one or of a module that is alive, holds in the innermost frame that has it."""
        seen = (value_of(expression(name), frame, local_values(frame)) for frame, _ in self.frames)
        owner, _, attribute = name.partition(".")
        of_modules = (vars(module).get(attribute, MISSING) for module in live_modules()) if owner == "self" else ()
        return next((value for value in (*seen, *of_modules) if value is not MISSING), None)

    def reads(self) -> list[Read]:
        """The variables and attributes that each of the user's lines reads, the innermost line first."""
        return [
            Read(place, ast.unparse(node), value_of(node, frame))
            for frame, place in self.frames
            for node in nodes((ast.Name, ast.Attribute), statement_at(place))
            if isinstance(node.ctx, ast.Load)
        ]

    def name_of(self, tensor: torch.Tensor) -> str | None:
        """The parameter, buffer or variable that has this memory; a variable that is the tensor itself first."""
        same = (name for name, value in self.variables() if value is tensor)
        return next(same, None) or self.name_of_memory(self.tape.numbers.of(tensor))

    def name_of_memory(self, memory: int) -> str | None:
        """The parameter, buffer or variable with that storage, by its number on the tape."""
        variables = ((name, part) for name, value in self.variables() for part in parts_of_value(value))
        named = (name for named in (named_members(), variables) for name, one in named if self.tape.numbers.of(one) == memory != 0)
        return next(named, None)


def parts_of_value(value: object) -> Iterator[torch.Tensor]:
    """The tensors in a variable, which may hold any object."""
    if issubclass(type(value), (torch.Tensor, tuple, list, dict)) or (dataclasses.is_dataclass(value) and not isinstance(value, type)):
        yield from tensors_in(value)


def _given(frame: FrameType, *names: str) -> tuple[torch.Tensor, ...]:
    """An argument of ``torch.autograd.backward`` or ``grad``, in a frame of theirs."""
    if frame.f_globals.get("__name__") != "torch.autograd" or frame.f_code.co_name not in {"backward", "grad"}:
        return ()
    return tuple(tensors_in([local_values(frame).get(name) for name in names]))


def _place(step: TracebackType) -> Location:
    code = step.tb_frame.f_code
    return location(code.co_filename, step.tb_lineno, code.co_name)


def missing_gradient_of(statement: ast.stmt | None, frame: FrameType) -> tuple[str, torch.Tensor] | None:
    """(name, tensor) of the ``h.grad`` in a statement that is None."""
    for node in nodes(ast.Attribute, statement):
        value = value_of(node.value, frame) if node.attr == "grad" else None
        if isinstance(value, torch.Tensor) and (not value.is_leaf or value.grad is None):
            return ast.unparse(node.value), value
    return None


def kind_of_error(error: BaseException) -> Kind | None:
    """None for an error that autograd did not raise."""
    if type(error).__name__ == "CheckpointError":
        return "checkpoint_mismatch"
    if not isinstance(error, (RuntimeError, ValueError, TypeError, NotImplementedError)):
        return None
    return next((kind for pattern, kind in _KINDS if re.search(pattern, str(error))), None)
