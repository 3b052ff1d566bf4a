"""An error with all that can still be read of it: the user's frames, the tensors that backward() began with, the tape."""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import FrameType, TracebackType
from typing import Any

import torch

from torchdebug_magics.instruments.autograd.report import Kind
from torchdebug_magics.instruments.autograd.tape import Tape
from torchdebug_magics.instruments.autograd.training_course import Course
from torchdebug_magics.probing.modules import live_modules, parts_of, unwrapped
from torchdebug_magics.probing.source.call_sites import value_of
from torchdebug_magics.probing.source.code_owner import is_user_code, local_values
from torchdebug_magics.probing.syntax import dotted, enclosing, exchanged, expression, method, names_in, nodes, tree_of
from torchdebug_magics.probing.tensors import tensors_in
from torchdebug_magics.probing.where import location, span
from torchdebug_magics.report import Location

_KINDS: tuple[tuple[str, Kind], ...] = (
    (r"modified by an inplace operation", "inplace"),
    (r"backward through the graph a second time|saved (?:tensors|intermediate values).*already been freed", "second_backward"),
    (
        r"a view of a leaf Variable that requires grad|is a view and (?:is being|its base)|view was created in|is a view of a leaf",
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
        r"derivative for .* is not implemented|differentiate twice|not implemented for .*double|does not support double backward",
        "no_double_backward",
    ),
    (
        r"returned an incorrect number of gradients|gradient different than None|save_for_backward can only|expected Variable or None",
        "custom_function",
    ),
    (r"returned an invalid gradient", "custom_function"),
)
_OTHERS = (
    r"assigned grad has data|attempting to assign a gradient|has changed the \w+ of value",
    r"optimizer got an empty parameter list",
    r"can't optimize a non-leaf|Can't call numpy\(\) on Tensor that requires grad|graph leaves|requires_grad flags of leaf",
    r"can't retain_grad|register a hook on a tensor",
)
_MODULES = frozenset({"torch", "nn", "F", "functional", "init"})
_KEPT = frozenset({"requires_grad_", "retain_grad_", "_"})
_SIMPLE = (ast.Name, ast.Attribute, ast.Subscript, ast.Call, ast.Constant)
_AUGMENTED = {ast.Add: "add_", ast.Sub: "sub_", ast.Mult: "mul_", ast.Div: "div_", ast.Pow: "pow_"}
_OVERWRITING = frozenset({"copy_", "fill_", "zero_", "normal_", "uniform_", "random_", "bernoulli_", "clamp_min_", "index_copy_"})


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
        """The statement as it stands on its line, alone."""
        source = self.here.source if self.here is not None else ""
        return ast.unparse(self.statement) if {";", "#"} & set(source) and self.statement is not None else source

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
    found = [] if where is None else list(enclosing(tree_of(where.file), where.line))
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
    values = (value_of(node, frame) for node in nodes(ast.expr, statement) if ast.unparse(node) in names)
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
    for node in nodes(ast.Attribute, statement) if frame is not None else ():
        if node.attr == "grad" and frame is not None:
            value = value_of(node.value, frame)
            if isinstance(value, torch.Tensor) and (not value.is_leaf or value.grad is None):
                return ast.unparse(node.value), value
    return None


def kind_of_error(error: BaseException) -> Kind | None:
    """None for an error that autograd did not raise."""
    message = str(error)
    if type(error).__name__ == "CheckpointError":
        return "checkpoint_mismatch"
    if not isinstance(error, (RuntimeError, ValueError, NotImplementedError)):
        return None
    kind = next((kind for pattern, kind in _KINDS if re.search(pattern, message)), None)
    if kind == "custom_function" and "invalid gradient" in message and not _is_of_user(message):
        return "other"
    return kind or ("other" if any(re.search(pattern, message) for pattern in _OTHERS) else None)


def _is_of_user(message: str) -> bool:
    """Whether the function that returned the gradient is not one of PyTorch's, whose names end in a number: ``MulBackward0``."""
    name = re.search(r"Function (\w+)", message)
    return name is not None and re.search(r"Backward\d+$", name[1]) is None


def writes_to(statement: ast.stmt) -> Iterator[str]:
    """The names whose tensors a statement writes in place, as far as its text tells."""
    targets = [statement.target] if isinstance(statement, ast.AugAssign) else []
    if isinstance(statement, ast.Assign):
        targets = [one for one in statement.targets if isinstance(one, ast.Subscript)]
    yield from (ast.unparse(_base(one)) for one in targets)
    for node in nodes(ast.Call, statement):
        if (written := _written_argument(node)) is not None:
            yield ast.unparse(_base(written))


def out_of_place(statement: ast.stmt) -> str:
    """Code that can be pasted over the statement; empty where its text does not show how."""
    if isinstance(statement, ast.AugAssign):
        if isinstance(statement.target, ast.Subscript):
            return _after_clone(statement.target, statement)
        value = ast.unparse(statement.value)
        value = value if isinstance(statement.value, _SIMPLE) else f"({value})"
        target, operator = ast.unparse(statement.target), ast.unparse(ast.BinOp(ast.Name("a"), statement.op, ast.Name("b")))[2:-2]
        return f"{target} = {target} {operator.strip()} {value}"
    if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Subscript):
        return _after_clone(statement.targets[0], statement)
    return _calls_out_of_place(statement)


def writer_op(statement: ast.stmt | None) -> str | None:
    """The op of its first write, in the order in which Python evaluates."""
    for node in _evaluated(statement) if statement is not None else ():
        if isinstance(node, ast.Call) and (_is_in_place(node) or _asks_in_place(node)):
            return f"{method(node).removesuffix('_')}_"
    if isinstance(statement, ast.AugAssign):
        return _AUGMENTED.get(type(statement.op))
    return "copy_" if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Subscript) else None


def _evaluated(node: ast.AST) -> Iterator[ast.AST]:
    """What a node holds, before the node itself."""
    for child in ast.iter_child_nodes(node):
        yield from _evaluated(child)
    yield node


def through_the_base(statement: ast.stmt, loop: ast.stmt | None) -> str:
    """The loop and the statement, where that writes to the variable of a loop over a tensor: the same through the tensor, by index."""
    name = next(writes_to(statement), None)
    if name is None or not isinstance(loop, ast.For):
        return ""
    targets = list(loop.target.elts) if isinstance(loop.target, ast.Tuple) else [loop.target]
    place = next((number for number, one in enumerate(targets) if isinstance(one, ast.Name) and one.id == name), None)
    sources = loop.iter.args if isinstance(loop.iter, ast.Call) and dotted(loop.iter.func) == "zip" else [loop.iter]
    if place is None or len(sources) != len(targets) or isinstance(sources[place], ast.Starred):
        return ""
    index = "index" if "i" in names_in(loop) else "i"
    part = expression(f"{ast.unparse(sources[place])}[{index}]")
    code = ast.unparse(exchanged(statement, lambda node: part if dotted(node) == name else None))
    return f"for {index}, {_in_brackets(loop.target)} in enumerate({ast.unparse(loop.iter)}): {code}"


def _in_brackets(target: ast.expr) -> str:
    code = ast.unparse(target)
    return f"({code})" if isinstance(target, ast.Tuple) and not code.startswith("(") else code


def _after_clone(target: ast.expr, statement: ast.stmt) -> str:
    base = ast.unparse(_base(target))
    return f"{base} = {base}.clone(); {ast.unparse(statement)}"


def _calls_out_of_place(statement: ast.stmt) -> str:
    changed = copy.deepcopy(statement)
    written: list[ast.expr] = []
    for node in nodes(ast.Call, changed):
        if _is_in_place(node) and isinstance(node.func, ast.Attribute):
            if node.func.attr in _OVERWRITING or ".data" in ast.unparse(node.func.value):
                return ""
            written += [one for one in [_written_argument(node)] if one is not None]
            node.func.attr = node.func.attr[:-1]
        elif _asks_in_place(node):
            written += node.args[:1]
            node.keywords = [one for one in node.keywords if one.arg != "inplace"]
    if not written:
        return ""
    if not isinstance(statement, ast.Expr):
        return ast.unparse(changed)
    receiver = written[-1]  # of a chain of calls, the innermost
    if isinstance(receiver, ast.Subscript):
        return _after_clone(receiver, statement)
    return f"{ast.unparse(receiver)} = {ast.unparse(changed)}" if isinstance(receiver, (ast.Name, ast.Attribute)) else ""


def _written_argument(node: ast.Call) -> ast.expr | None:
    """What a call writes: ``x`` of ``x.mul_(2)``, of ``torch.relu_(x)`` and of ``F.relu(x, inplace=True)``."""
    if not (_is_in_place(node) or _asks_in_place(node)) or not isinstance(node.func, ast.Attribute):
        return None
    of_module = ast.unparse(node.func.value).partition(".")[0] in _MODULES
    return next(iter(node.args), None) if of_module else node.func.value if _is_in_place(node) else None


def _is_in_place(node: ast.Call) -> bool:
    name = method(node)
    return name.endswith("_") and not name.startswith("_") and name not in _KEPT


def _asks_in_place(node: ast.Call) -> bool:
    return any(one.arg == "inplace" and isinstance(one.value, ast.Constant) and one.value.value is True for one in node.keywords)


def _base(node: ast.expr) -> ast.expr:
    """``h`` of ``h[0][:, 1]``, of ``h.data`` and of ``h.mul_(2)``; ``self.h`` stays."""
    while True:
        match node:
            case ast.Subscript(inner) | ast.Attribute(inner, "data" | "T"):
                node = inner
            case ast.Call(ast.Attribute(inner)) if _is_in_place(node):
                node = inner
            case _:
                return node
