"""*Does not require grad*: where the chain from the parameters to the loss was cut, and by what."""

from __future__ import annotations

import ast
import copy
import io
import re
import tokenize
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

from torchdebug_magics.instruments.autograd.errors.raised import Raised, named_members, statement_at
from torchdebug_magics.instruments.autograd.named import cell_files
from torchdebug_magics.instruments.autograd.report import AutogradFinding, Cut
from torchdebug_magics.instruments.autograd.source_readings import cuts_toward
from torchdebug_magics.instruments.autograd.tape import RecordedOp, Tape
from torchdebug_magics.probing.syntax import FUNCTIONS, WITHS, called, enclosing, expression, names_in, nodes, parsed, tree_of
from torchdebug_magics.probing.where import excerpt, location
from torchdebug_magics.report import Location

_SWITCHES = {"no_grad": "torch.no_grad()", "inference_mode": "torch.inference_mode()"}
_MAKERS = frozenset({"tensor", "as_tensor", "from_numpy", "FloatTensor", "Tensor"})
_READERS = frozenset({"item", "tolist", "detach", "cpu", "numpy"})
_LOSES = ("np.", "numpy", ".item()", ".tolist()", "detach")
_CONTEXTS = ("no_grad", "inference_mode", "set_grad_enabled")
_FRESH = frozenset({"lift_fresh", "lift_fresh_copy", "scalar_tensor", "from_file"})
_NUMBERS = frozenset({"_local_scalar_dense", "detach", "_to_copy"})
_READ_AND_WRAPPED = re.compile(r"\b(?:tensor|as_tensor|from_numpy|FloatTensor|Tensor)\(.*\.(?:tolist|item|numpy)\(")
_REWRAPS = re.compile(r"\b(tensor|as_tensor|from_numpy|FloatTensor|LongTensor|Tensor|array|asarray)\s*\(")


def cut_graph(raised: Raised) -> AutogradFinding:
    """Names the op nearest to the loss that cut the graph."""
    dropped = None
    passed: list[RecordedOp] = []
    for root in raised.roots:
        if not root.requires_grad:
            dropped, passed = dropped_on_the_way(raised.tape, id(root))
            break
    if dropped is None:
        return _without_cut(raised, passed)
    op = dropped.op
    line = op.line.location if op.line is not None else None
    headline, fix, where = cut_words(dropped)
    return AutogradFinding(
        kind="cut",
        raised=True,
        headline=headline,
        location=where,
        op=op.name,
        module=op.module,
        saved_at=line if where != line else None,
        fix=fix,
        explanation="backward() starts at a tensor without a graph: no parameter can get a gradient",
        excerpt=excerpt(where) if where is not None else (),
    )


def _without_cut(raised: Raised, passed: list[RecordedOp]) -> AutogradFinding:
    """Explains a loss whose graph no op cut: all parameters are frozen, or the loss does not depend on the model."""
    used = {use.memory for op in passed for use in op.reads}
    members = [(name, held) for name, held in named_members() if any(raised.memory_is(held, number) for number in used if number)]
    frozen = tuple(name for name, held in members if not held.requires_grad and (held.is_floating_point() or held.is_complex()))
    line = next((op.line.location for op in passed if op.line is not None), None)
    if frozen and not any(held.requires_grad for _, held in members):
        return _frozen(raised, frozen, line)
    cut = next(_cuts_in_text(raised), None) if not raised.tape.ops else None
    where = (cut.location if cut is not None else None) or line or raised.here
    if cut is not None:
        headline, fix = words_for_text(cut.op, where)
    elif raised.tape.ops and not members:
        headline, fix = "the loss was computed without any parameter", "compute the loss from the output of the model"
    else:
        headline, fix = (
            "the loss has no graph",
            "put `%%autograd` above the cell and run the cell again: the report names the line that cut the graph",
        )
    return AutogradFinding(
        kind="cut",
        raised=True,
        headline=headline,
        location=where,
        op=cut.op if cut is not None else passed[0].name if passed else None,
        module=cut.module if cut is not None else None,
        fix=fix,
        excerpt=excerpt(where) if where is not None else (),
    )


def _cuts_in_text(raised: Raised) -> Iterator[Cut]:
    """The cuts on the way to the loss, in the frame that called backward()."""
    names = names_in(statement_at(raised.here))
    if raised.here is None or not raised.frames:
        return
    frame = raised.frames[0]
    yield from cuts_toward(names, raised.here.file, raised.here.line, frame.f_code.co_name, dict(reversed(list(raised.variables()))))


def _frozen(raised: Raised, frozen: tuple[str, ...], line: Location | None) -> AutogradFinding:
    where = freezing_line(raised) or line or raised.here
    return AutogradFinding(
        kind="cut",
        raised=True,
        headline="all parameters that the loss uses are frozen",
        location=where,
        op="requires_grad_",
        parameters=frozen,
        fix=f"set `requires_grad = True` for the parameters to train, such as `{frozen[-1]}`",
        explanation="a graph is only built where an input requires a gradient",
        excerpt=excerpt(where) if where is not None else (),
    )


def freezing_line(raised: Raised) -> Location | None:
    """The first that sets ``requires_grad`` to False, in the code that ran or else in the latest cell that does."""
    files = [place.file for place in raised.places]
    for file in dict.fromkeys([*files, *reversed(cell_files())]):
        for node in nodes((ast.Assign, ast.Expr), tree_of(file)):
            if re.search(r"requires_grad(_\(False\)| = False)", ast.unparse(node)):
                return location(file, node.lineno, raised.places[0].function)
    return None


def cut_words(dropped: Dropped) -> tuple[str, str, Location | None]:
    """(headline, fix, the line to change)."""
    op, cause = dropped
    line = op.line.location if op.line is not None else None
    around = gradient_switch(op) if cause in {"no_grad", "inference_mode"} else None
    where, inside = around or (line, line)
    return *_words(cause, op, inside, where), where


def _without_comment(line: str) -> str:
    with suppress(tokenize.TokenError, SyntaxError):  # a part of a longer statement
        for token in tokenize.generate_tokens(io.StringIO(line).readline):
            if token.type == tokenize.COMMENT:
                return line[: token.start[1]].rstrip()
    return line


def _words(cause: str, op: RecordedOp, line: Location | None, where: Location | None) -> tuple[str, str]:
    source = _without_comment(line.source) if line is not None else ""
    match cause:
        case "no_grad" | "inference_mode" if where is not None and "checkpoint" in where.source:
            return "no input of the reentrant checkpoint requires a gradient", _not_reentrant(where.source)
        case "no_grad" | "inference_mode":
            switch = (
                _SWITCHES[cause] if where is line or where is None else _without_comment(where.source).removeprefix("with ").rstrip(":")
            )
            what = f"`{op.name}` ran under `{switch.removeprefix('@')}`: the loss has no graph"
            if switch.startswith("@") and where is not None:
                fix = f"remove `{switch}` from `{where.function}`"
            else:
                fix = f"move `{source}` out of `{switch}`" if where != line else f"remove `{switch}` around `{source}`"
            return what, fix
        case "detach":
            return "`detach` cut the graph between the parameters and the loss", _without(source, ".detach()")
        case "data":
            return "`.data` cut the graph between the parameters and the loss", _without(source, ".data")
        case "dtype":
            return f"`{op.name}` has no derivative: its output is an integer or a bool", _instead_of_op(op.name, source)
    headline = "values were copied into a new tensor, which has no graph"
    return headline, _not_rewrapped(source, of_list=cause == "list")


def words_for_text(op: str, where: Location | None) -> tuple[str, str]:
    """(headline, fix) of a cut that was read from the source, by its ATen op."""
    source = where.source if where is not None else ""
    match op:
        case "no_grad":
            return "the loss was computed with gradients off", f"compute the loss outside of `{source.rstrip(':')}`"
        case "detach":
            part = ".data" if ".data" in source else ".detach()"
            return f"`{part}` cut the graph between the parameters and the loss", _without(source, part)
        case "lift_fresh" | "_local_scalar_dense":
            return "values were copied into a new tensor, which has no graph", _not_rewrapped(source)
    return f"`{op}` has no derivative", _instead_of_op(op, source)


def _not_reentrant(source: str) -> str:
    changed = source.replace("use_reentrant=True", "use_reentrant=False")
    return f"`{changed}`" if changed != source else f"add `use_reentrant=False` to `{source}`"


def _without(source: str, part: str) -> str:
    return f"`{source.replace(part, '')}`" if part in source else f"remove the `{part}` from `{source}`"


def _instead_of_op(op: str, source: str) -> str:
    if op in {"argmax", "argmin", "max", "min"}:
        return f"compute the loss from the logits, not from `{source}`: `F.cross_entropy(logits, target)`"
    return f"compute the loss without `{source}`: a comparison, rounding or cast to integers has no derivative (use a sigmoid or softmax)"


def _not_rewrapped(source: str, *, of_list: bool = False) -> str:
    """The statement without the copy into a new tensor; advice where its text does not show how."""
    tree = parsed(source) or ast.Module([], [])
    code = ast.unparse(_Unwrap(of_list=of_list).visit(copy.deepcopy(tree)))
    if tree.body and code != ast.unparse(tree) and not any(part in code for part in _LOSES):
        return f"`{code}`"
    return f"stay with PyTorch ops in `{source}`: NumPy, `.item()` and `torch.tensor(...)` drop the graph"


class _Unwrap(ast.NodeTransformer):
    """``torch.tensor(x.item())`` -> ``x``; ``torch.tensor([a.item(), b])`` -> ``torch.stack([a, b])``."""

    def __init__(self, *, of_list: bool) -> None:
        self.of_list = of_list
        """Whether what is wrapped is a list of tensors."""

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        if called(node) not in _MAKERS or not node.args:
            return node
        value = node.args[0]
        if isinstance(value, (ast.List, ast.Tuple)):
            parts: ast.expr = ast.List([_stripped(one) for one in value.elts], ast.Load())
        elif isinstance(value, (ast.ListComp, ast.GeneratorExp)):
            parts = ast.ListComp(_stripped(value.elt), value.generators)
        elif self.of_list:
            parts = value
        else:
            return _stripped(value)
        return ast.Call(expression("torch.stack"), [parts], [])


def _stripped(value: ast.expr) -> ast.expr:
    while isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr in _READERS and not value.args:
        value = value.func.value
    return value


class Dropped(NamedTuple):
    """Where a gradient that could have flowed on ends."""

    op: RecordedOp
    cause: str
    """``"no_grad"``, ``"inference_mode"``, ``"detach"``, ``"dtype"``, ``"rewrapped"``, ``"list"`` (of tensors, rewrapped) or ``"data"``."""


def dropped_on_the_way(tape: Tape, root: int, before: int | None = None) -> tuple[Dropped | None, list[RecordedOp]]:
    """The cut nearest to the tensor with that id, and the ops that it was computed by, up to there."""
    found: list[RecordedOp] = []
    for op in ancestors(tape, root, before):
        found.append(op)
        if (dropped := _dropped(op)) is not None:
            return dropped, found
    return next((dropped for op in found if (dropped := rewrapped(tape, op)) is not None), None), found


def ancestors(tape: Tape, root: int, before: int | None = None) -> Iterator[RecordedOp]:
    """The ops that the tensor with that id was computed by, the nearest first; the id is another's after that many ops."""
    made = (op for op in tape.ops if before is None or op.index < before)
    todo = deque([op for op in made if any(one.tensor == root for one in op.makes)][-1:])
    seen: set[int] = set()
    while todo:
        op = todo.popleft()
        if op.index not in seen:
            seen.add(op.index)
            yield op
            todo += [one for one in op.parents if not one.in_optimizer and not one.in_backward]


def _dropped(op: RecordedOp) -> Dropped | None:
    if op.initializes:
        return None
    if any(one.requires_grad for one in op.reads):
        if op.inference or not op.grad_enabled:
            return Dropped(op, "inference_mode" if op.inference else "no_grad")
        if op.name == "detach":
            return Dropped(op, _how_detached(_source(op)))
        if op.makes and not any(one.can_have_grad for one in op.makes):
            return Dropped(op, "dtype")
    for use, maker in op.sources:
        if not use.can_have_grad and maker.grad_enabled and any(one.requires_grad for one in maker.reads):
            return Dropped(maker, "dtype")  # one of several outputs, as the indices of `max`
    return None


def _how_detached(source: str) -> str:
    if ".data" in source:
        return "data"
    return "rewrapped" if "detach" not in source and _REWRAPS.search(source) else "detach"  # `torch.tensor(loss)`


def rewrapped(tape: Tape, op: RecordedOp) -> Dropped | None:
    """Whether the op makes a tensor of numbers that were read from another one: ``torch.tensor(h.item())``, NumPy and back."""
    if op.note == "wraps a graph":
        return Dropped(op, "list")
    is_fresh = op.name in _FRESH
    if is_fresh and _READ_AND_WRAPPED.search(_source(op)):
        return Dropped(op, "rewrapped")
    if not (is_fresh or not op.reads or op.unknown):
        return None
    readers = [one for one in tape.ops if one.index <= op.index and one.name in _NUMBERS and any(use.requires_grad for use in one.reads)]
    if is_fresh or not op.reads:
        return Dropped(op, "rewrapped") if readers and (is_fresh or _REWRAPS.search(_source(op))) else None
    unread = [one for one in readers if not _is_read(tape, one)]
    return Dropped(unread[-1], "rewrapped") if unread else None


def _is_read(tape: Tape, reader: RecordedOp) -> bool:
    return any(parent is reader for op in tape.since(reader.index + 1) for parent in op.parents)


def _source(op: RecordedOp) -> str:
    return op.line.location.source if op.line is not None else ""


def gradient_switch(op: RecordedOp) -> tuple[Location, Location] | None:
    """(the ``with torch.no_grad():`` or the decorator, the line in it) of the innermost of the user's calls that has one."""
    for line in op.calls:
        for statement in reversed([*enclosing(tree_of(line.file), line.line)]):
            if isinstance(statement, WITHS):
                for item in statement.items:
                    if any(name in ast.unparse(item.context_expr) for name in _CONTEXTS):
                        return location(line.file, item.context_expr.lineno, line.function), line.location
            if isinstance(statement, FUNCTIONS):
                for decorator in statement.decorator_list:
                    if any(name in ast.unparse(decorator) for name in _CONTEXTS):
                        return location(line.file, decorator.lineno, line.function), line.location
    return _global_switch(op) or _reentrant(op)


def _reentrant(op: RecordedOp) -> tuple[Location, Location] | None:
    """A reentrant checkpoint runs its function without gradients; where no input requires one, so does its output."""
    found = next((line.location for line in op.calls if re.search(r"\bcheckpoint(?:_sequential)?\(", line.location.source)), None)
    return None if found is None else (found, found)


def _global_switch(op: RecordedOp) -> tuple[Location, Location] | None:
    """``torch.set_grad_enabled(False)`` as a statement of its own, before the op."""
    for line in op.calls:
        for node in nodes(ast.Expr, tree_of(line.file)):
            if "set_grad_enabled(False)" in ast.unparse(node) and node.lineno <= line.line:
                return location(line.file, node.lineno, line.function), line.location
    return None
