"""An error with all that can still be read of it: the user's frames, the tensors that backward() began with, the tape."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

import torch

from torchdebug_magics.instruments.autograd.errors.messages import kind_of_error
from torchdebug_magics.instruments.autograd.errors.writes import writes_to
from torchdebug_magics.instruments.autograd.recording.tape import Tape
from torchdebug_magics.probing.modules import live_modules, parts_of, unwrapped
from torchdebug_magics.probing.source.call_sites import enclosing, tree_of, value_of
from torchdebug_magics.probing.tensors import tensors_in
from torchdebug_magics.probing.where import is_user_code, local_values, location, span

if TYPE_CHECKING:
    from torchdebug_magics.instruments.autograd.report import Kind
    from torchdebug_magics.instruments.autograd.training_course import Course
    from torchdebug_magics.report import Location

__all__ = ["Raised", "missing_gradient_of", "named_members", "parts_of_value", "statement_at"]


@dataclass
class Raised:
    """Lives only while the error is explained, so that no frame is held."""

    kind: Kind
    message: str
    here: Location | None
    """The innermost line of the user's code."""
    frames: tuple[FrameType, ...]
    """The user's, the innermost first."""
    places: tuple[Location, ...]
    """The lines of these, at which it passed them."""
    roots: tuple[torch.Tensor, ...]
    """What backward() or grad() was called on."""
    inputs: tuple[torch.Tensor, ...] = ()
    """What grad() was asked for."""
    innermost: Location | None = None
    """The line that raised, be it in PyTorch."""
    statement: ast.stmt | None = None
    """The user's, of those that may share the line."""
    written: torch.Tensor | None = None
    """What the line that raised writes in place, be it in PyTorch."""
    modules: tuple[torch.nn.Module, ...] = ()
    """Those in whose forward it was raised, the innermost first."""
    tape: Tape = field(default_factory=Tape)
    course: Course | None = None

    @classmethod
    def of(cls, error: BaseException, tape: Tape | None = None, course: Course | None = None) -> Raised | None:
        """None for an error that autograd did not raise."""
        steps = list(_steps(error.__traceback__))
        kind = kind_of_error(error) or ("other" if _raised_by_engine(error, steps) or _reads_missing_gradient(error, steps) else None)
        if kind is None:
            return None
        of_user = [step for step in steps if is_user_code(step.tb_frame.f_code)]
        places = tuple(map(_place, reversed(of_user)))
        roots = next((found for step in reversed(steps) if (found := _given(step.tb_frame, "tensors", "outputs"))), ())
        inputs = next((found for step in reversed(steps) if (found := _given(step.tb_frame, "inputs_tuple"))), ())
        frames = tuple(step.tb_frame for step in reversed(of_user))
        innermost = _place(steps[-1]) if steps else None
        statement = _statement(of_user[-1]) if of_user else None
        written = _written(steps[-1].tb_frame, innermost) if steps else None
        modules = tuple(one for step in reversed(steps) if (one := _forward_of(step.tb_frame)) is not None)
        return cls(
            kind,
            str(error),
            next(iter(places), None),
            frames,
            places,
            roots,
            inputs,
            innermost,
            statement,
            written,
            modules,
            tape or Tape(),
            course,
        )

    @property
    def code(self) -> str:
        """The statement as it stands on its line."""
        source = self.here.source if self.here is not None else ""
        return ast.unparse(self.statement) if ";" in source and self.statement is not None else source

    @property
    def module(self) -> str | None:
        """The path of the innermost module in whose forward it was raised."""
        paths = (path for root in self.modules[-1:] for path, one in root.named_modules() if one is self.modules[0])
        return next(paths, None) or None

    def variables(self) -> Iterator[tuple[str, Any]]:
        """The names that the user's frames see, the innermost first."""
        for frame in self.frames:
            yield from local_values(frame).items()
            yield from ((name, value) for name, value in list(frame.f_globals.items()) if not name.startswith("_"))

    def memory_is(self, tensor: torch.Tensor, number: int) -> bool:
        """Whether the tensor's storage is the one with that number on the tape."""
        return self.tape.numbers.of(tensor) == number != 0

    def name_of(self, tensor: torch.Tensor) -> str | None:
        """The parameter, buffer or variable that has this memory; a variable that is the tensor itself first."""
        memory = {self.tape.numbers.of(tensor)} - {0}
        return next(
            (name for name, value in self.variables() if value is tensor),
            None,
        ) or self.name_of_memory(memory)

    def name_of_memory(self, memory: set[int]) -> str | None:
        """The same for the numbers of storages."""
        for name, held in named_members():
            if self.tape.numbers.of(held) in memory:
                return name
        found = (name for name, value in self.variables() if any(self.tape.numbers.of(part) in memory for part in parts_of_value(value)))
        return next(found, None)


def named_members() -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers of all models that are alive, by their names in `state_dict`."""
    modules = list(live_modules())
    inner = parts_of(modules)
    for root in modules:
        if id(root) not in inner and unwrapped(root) is root:
            yield from root.named_parameters()
            yield from root.named_buffers()


def statement_at(where: Location | None, column: int | None = None) -> ast.stmt | None:
    """The innermost statement around a line, and around a column of it."""
    tree = None if where is None else tree_of(where.file)
    found = [] if tree is None or where is None else list(enclosing(tree, where.line))
    of_line = [one for one in found if column is not None and where is not None and one.lineno == where.line == one.end_lineno]
    at = [one for one in of_line if column is not None and one.col_offset <= column < (one.end_col_offset or 0)]
    return at[-1] if at else found[-1] if found else None


def parts_of_value(value: object) -> Iterator[torch.Tensor]:
    """The tensors in a variable, which may hold any object."""
    if issubclass(type(value), (torch.Tensor, tuple, list, dict)):
        yield from tensors_in(value)


def _steps(trace: TracebackType | None) -> Iterator[TracebackType]:
    while trace is not None:
        yield trace
        trace = trace.tb_next


def _given(frame: FrameType, *names: str) -> tuple[torch.Tensor, ...]:
    """An argument of ``torch.autograd.backward`` or ``grad``, in a frame of theirs."""
    if frame.f_globals.get("__name__") != "torch.autograd" or frame.f_code.co_name not in {"backward", "grad"}:
        return ()
    held: Mapping[str, Any] = local_values(frame)
    return tuple(tensors_in([held.get(name) for name in names]))


def _statement(step: TracebackType) -> ast.stmt | None:
    at = span(step.tb_frame.f_code, step.tb_lasti)
    return statement_at(_place(step), None if at is None else at[1])


def _written(frame: FrameType, where: Location | None) -> torch.Tensor | None:
    names = set(writes_to(statement)) if (statement := statement_at(where)) is not None else set[str]()
    nodes = [node for node in ast.walk(statement or ast.Pass()) if isinstance(node, ast.expr) and ast.unparse(node) in names]
    values = (value_of(node, frame) for node in nodes)
    return next((value for value in values if isinstance(value, torch.Tensor)), None)


def _place(step: TracebackType) -> Location:
    code = step.tb_frame.f_code
    return location(code.co_filename, step.tb_lineno, code.co_name)


def _forward_of(frame: FrameType) -> torch.nn.Module | None:
    owner = local_values(frame).get("self") if frame.f_code.co_name == "forward" else None
    return owner if issubclass(type(owner), torch.nn.Module) else None


def _raised_by_engine(error: BaseException, steps: list[TracebackType]) -> bool:
    """Whether an op of a backward pass raised it, and no code of the user's that ran in it."""
    codes = [step.tb_frame.f_code for step in steps]
    engine = max((place for place, code in enumerate(codes) if code.co_name == "_engine_run_backward"), default=None)
    return isinstance(error, RuntimeError) and engine is not None and not any(map(is_user_code, codes[engine:]))


def _reads_missing_gradient(error: BaseException, steps: list[TracebackType]) -> bool:
    """Whether the line uses a `.grad` that is None."""
    if not isinstance(error, (AttributeError, TypeError)) or "NoneType" not in str(error):
        return False
    step = next((one for one in reversed(steps) if is_user_code(one.tb_frame.f_code)), None)
    where = location(step.tb_frame.f_code.co_filename, step.tb_lineno, "") if step is not None else None
    return missing_gradient_of(statement_at(where), step.tb_frame if step is not None else None) is not None


def missing_gradient_of(statement: ast.stmt | None, frame: FrameType | None) -> tuple[str, torch.Tensor] | None:
    """(name, tensor) of the ``h.grad`` in a statement that is None."""
    if statement is None or frame is None:
        return None
    for node in ast.walk(statement):
        if isinstance(node, ast.Attribute) and node.attr == "grad":
            value = value_of(node.value, frame)
            if isinstance(value, torch.Tensor) and (not value.is_leaf or value.grad is None):
                return ast.unparse(node.value), value
    return None
