"""*Does not require grad*: where the chain from the parameters to the loss was cut, and by what."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Container, Iterable, Iterator
from typing import NamedTuple

from torchdebug_magics.instruments.autograd.errors.raised import Raised
from torchdebug_magics.instruments.autograd.errors.softened import softened
from torchdebug_magics.instruments.autograd.report import COMPARISONS, AutogradFinding, Cause, cutter
from torchdebug_magics.instruments.autograd.source_readings import (
    cell_files,
    code_at,
    cuts_toward,
    gradient_switch,
    named_members,
    statement_at,
)
from torchdebug_magics.instruments.autograd.tape import RecordedOp, Tape
from torchdebug_magics.probing.source.edited_source import Source, exchanging, same
from torchdebug_magics.probing.source.lines import Line
from torchdebug_magics.probing.source.syntax import (
    FUNCTIONS,
    bound_names,
    called,
    copied,
    covers,
    expression,
    names_in,
    nodes,
    parsed,
    targets_of,
    tree_of,
)
from torchdebug_magics.probing.source.user_code import location
from torchdebug_magics.report import Edit, Location

_MAKERS = frozenset({"tensor", "as_tensor", "from_numpy", "FloatTensor", "Tensor", "Variable"})
_READERS = frozenset({"item", "tolist", "detach", "cpu", "numpy"})
_LOSES = ("np.", "numpy", ".item()", ".tolist()", "detach")
_CONTEXTS = ("no_grad", "inference_mode", "set_grad_enabled")
_FRESH = frozenset({"lift_fresh", "lift_fresh_copy", "scalar_tensor", "from_file"})
_NUMBERS = frozenset({"_local_scalar_dense", "detach", "_to_copy"})
_READ_AND_WRAPPED = re.compile(r"\b(?:tensor|as_tensor|from_numpy|FloatTensor|Tensor)\(.*\.(?:tolist|item|numpy)\(")
_REWRAPS = re.compile(r"\b(tensor|as_tensor|from_numpy|FloatTensor|LongTensor|Tensor|Variable|array|asarray)\s*\(")
_DETACHES = re.compile(r"detach|\bdata\b|np\.|numpy")
CHECKPOINT = re.compile(r"\bcheckpoint(?:_sequential)?\(")


class Dropped(NamedTuple):
    """Where a gradient that could have flowed on ends."""

    op: RecordedOp
    cause: Cause

    @property
    def switch(self) -> tuple[Location, Location] | None:
        """(what turned gradients off, the line inside it), for an op that ran without them."""
        if self.cause not in {"no_grad", "inference_mode"}:
            return None
        for line in self.op.calls:  # the innermost call first
            if (where := gradient_switch(line.file, line.line, line.function, _CONTEXTS)) is not None:
                return where, line.location
        for line in self.op.calls:
            for node in nodes(ast.Expr, tree_of(line.file)):
                if "set_grad_enabled(False)" in ast.unparse(node) and node.lineno <= line.line:
                    return location(line.file, node.lineno, line.function), line.location
        # A reentrant checkpoint runs its function without gradients; where no input requires one, so does its output.
        calls = (line.location for line in self.op.calls if CHECKPOINT.search(line.location.source))
        return next(((call, call) for call in calls), None)

    def words(self) -> tuple[str, str, Location | None]:
        """(headline, fix, the line to change)."""
        where, inside = self.switch or (self.op.where, self.op.where)
        return *cut_words(self.cause, self.op.name, inside, where), where


def cut_graph(raised: Raised) -> AutogradFinding:
    """Names the op nearest to the loss that cut the graph."""
    root = next((root for root in raised.roots if not root.requires_grad), None)
    dropped, passed = dropped_on_the_way(raised.tape, id(root))
    if dropped is None:
        return _without_cut(raised, passed)
    headline, fix, where = dropped.words()
    return raised.finding(
        headline,
        fix,
        where,
        op=dropped.op,
        saved_at=dropped.op.where if where != dropped.op.where else None,
        edits=softened(raised.tape.ancestors(id(root)), dropped.op) if dropped.cause == "dtype" else unwrapped([dropped]),
        explanation="backward() starts at a tensor without a graph: no parameter can get a gradient",
    )


def _without_cut(raised: Raised, passed: list[RecordedOp]) -> AutogradFinding:
    """Explains a loss whose graph no op cut: all parameters are frozen, or the loss does not depend on the model."""
    used = {use.memory for op in passed for use in op.reads} - {0}
    members = [(name, one) for name, one in named_members() if raised.tape.numbers.of(one) in used]
    frozen = tuple(name for name, one in members if not one.requires_grad and (one.is_floating_point() or one.is_complex()))
    line = next((op.where for op in passed if op.line is not None), None)
    if frozen and not any(one.requires_grad for _, one in members):
        return raised.finding(
            "all parameters that the loss uses are frozen",
            f"set `requires_grad = True` for the parameters to train, such as `{frozen[-1]}`",
            freezing_line(raised) or line,
            op="requires_grad_",
            parameters=frozen,
            explanation="a graph is only built where an input requires a gradient",
        )
    cut, where = None, line
    headline = "the loss has no graph"
    fix = "put `%%torchdebug` above the cell and run the cell again: the report names the line that cut the graph"
    if (unused := _unused(raised, passed)) is not None:
        return unused
    if raised.tape.ops and not members:
        headline, fix = "the loss was computed without any parameter", "compute the loss from the output of the model"
    elif not raised.tape.ops and raised.frames:
        frame, here = raised.frames[0]
        names = names_in(statement_at(here))
        cut = next(cuts_toward(names, here.file, here.line, frame.f_code.co_name, raised.values()), None)
        if cut is not None:
            where = cut.location
            headline, fix = cut_words(cut.cause, cut.op, None, where)
    op = cut.op if cut is not None else passed[0].name if passed else None
    return raised.finding(headline, fix, where, op=op, module=cut.module if cut is not None else None)


def _unused(raised: Raised, passed: list[RecordedOp]) -> AutogradFinding | None:
    """What was computed with a graph and goes into nothing that has one, in the function whose other result the loss is computed from."""
    ops = raised.tape.ops
    ended = {index for event in raised.course.backwards for index in event.ops}
    read = {maker.index: use.requires_grad for op in ops for use, maker in op.sources if maker.name != "detach"}

    def has_graph(op: RecordedOp) -> bool:
        """As its readers saw it; of what nothing reads, by what it was computed from."""
        return read.get(op.index, op.is_forward and op.name != "detach" and op.grad_enabled and any(use.requires_grad for use in op.reads))

    used = {parent.index for op in ops if has_graph(op) for parent in op.parents} | ended
    places = {(other.line.file, other.line.function) for other in passed if other.line is not None}
    for op in reversed([op for op in ops if op.index not in used and has_graph(op)]):
        unused = Unused.of(op)
        if unused is None or op.line is None or (op.line.file, op.line.function) not in places:
            continue
        around, here = unused.function, raised.here  # it returns before the loss is computed
        where = None if here is not None and around is not None and covers(around, here.line) else unused.returned_at
        return raised.finding(
            unused.words if where is not None else f"`{unused.name}` is computed and never used",
            f"`return {unused.name}`" if where is not None else f"compute the loss from `{unused.name}`",
            where or next((other.where for other in passed if other.line is not None), None),
            op=op,
            tensor=unused.name,
            saved_at=op.where,
            explanation="the loss is computed from a tensor without a graph: no parameter can get a gradient",
        )
    return None


class Unused(NamedTuple):
    """A result that has a name, and that nothing uses."""

    name: str
    op: RecordedOp
    line: Line
    """The line that gives it the name."""
    function: ast.stmt | None
    """The innermost around it."""

    @classmethod
    def of(cls, op: RecordedOp) -> Unused | None:
        """What an op computes in a line that gives it a name, or that functions return to such a line."""
        line = next((line for line in op.calls if not isinstance(statement_at(line.location), ast.Return)), None)
        name = None if line is None else next(map(ast.unparse, targets_of(statement_at(line.location))), None)
        if name is None or line is None:
            return None
        functions = [node for node in nodes(FUNCTIONS, tree_of(line.file)) if covers(node, line.line)]
        return cls(name, op, line, functions[-1] if functions else None)

    @property
    def returned(self) -> ast.Return | None:
        """The last statement with which the function returns a value."""
        return next((node for node in reversed([*nodes(ast.Return, self.function)]) if node.value is not None), None)

    @property
    def returned_at(self) -> Location | None:
        """The line of that."""
        node = self.returned
        return None if node is None else location(self.line.file, node.lineno, self.line.function)

    @property
    def words(self) -> str:
        """What happens to it."""
        returned = self.returned
        rest = "" if returned is None or returned.value is None else f": `{self.line.function}` returns `{ast.unparse(returned.value)}`"
        return f"`{self.name}` is computed and never used{rest}"


def freezing_line(raised: Raised) -> Location | None:
    """The first that sets ``requires_grad`` to False, in the code that ran or else in the latest cell that does."""
    files = [place.file for _, place in raised.frames]
    for file in dict.fromkeys([*files, *reversed(cell_files())]):
        for node in nodes((ast.Assign, ast.Expr), tree_of(file)):
            if re.search(r"requires_grad(_\(False\)| = False)", ast.unparse(node)):
                return location(file, node.lineno, raised.frames[0][1].function)
    return None


def cut_words(cause: Cause, op: str, line: Location | None, where: Location | None) -> tuple[str, str]:
    """(headline, fix) for the line that was run, and the line to change; of a cut that was read from the source, `line` is not known."""
    source = code_at(line or where, "." + op, op, *_MAKERS)
    headline = f"{cutter(cause, op)} cut the graph between the parameters and the loss"
    match cause:
        case "no_grad" | "inference_mode":
            if where is not None and "checkpoint" in where.source:
                changed = where.source.replace("use_reentrant=True", "use_reentrant=False")
                fix = f"`{changed}`" if changed != where.source else f"add `use_reentrant=False` to `{where.source}`"
                return "no input of the reentrant checkpoint requires a gradient", fix
            is_known = where is not None and where != line
            switch = code_at(where).removeprefix("with ").rstrip(":") if is_known else f"torch.{cause}()"
            ran = f"`{op}` ran" if line is not None else "the loss was computed"
            fix = f"move `{source}` out of `{switch}`" if is_known else f"remove `{switch}` around `{source}`"
            fix = f"compute the loss outside of `{switch}`" if line is None else fix
            fix = f"remove `{switch}` from `{where.function}`" if switch.startswith("@") and where is not None else fix
            return f"{ran} under `{switch.removeprefix('@')}`: the loss has no graph", fix
        case "detach" | "data":
            part = ".data" if cause == "data" else ".detach()"
            if ".numpy()" in source:  # which refuses what has a graph
                return headline, _not_rewrapped(source, of_list=False)
            return headline, f"`{source.replace(part, '')}`" if part in source else f"remove the `{part}` from `{source}`"
        case "dtype":
            why = "a comparison, rounding or cast to integers has no derivative (use a sigmoid or softmax)"
            fix = f"compute the loss without `{source}`: {why}"
            if op in {"argmax", "argmin", "max", "min"}:
                fix = f"compute the loss from the logits, not from `{source}`: `F.cross_entropy(logits, target)`"
            subject = "a comparison" if op in COMPARISONS else f"`{op}`"
            return f"{subject} has no derivative: its output is an integer or a bool", fix
    return headline, _not_rewrapped(source, of_list=cause == "list")


def _not_rewrapped(source: str, *, of_list: bool) -> str:
    """The statement without the copy into a new tensor, which may be one of a list of tensors; advice where its text does not show how."""
    tree = parsed(source) or ast.Module([], [])
    code = ast.unparse(_Unwrap(of_list=of_list).visit(copied(tree)))
    if tree.body and code != ast.unparse(tree) and not any(part in code for part in _LOSES):
        return f"`{code}`"
    return f"stay with PyTorch ops in `{source}`: NumPy, `.item()` and `torch.tensor(...)` drop the graph"


def unwrapped(cuts: Iterable[Dropped]) -> tuple[Edit, ...]:
    """The edits of lines that copy the numbers of lists into new tensors: they put the tensors together; none where a line has none."""
    edits: dict[Location | None, tuple[Edit, ...]] = {}
    for cut in cuts:
        tensors = (node for node in nodes(ast.Call, statement_at(cut.op.where)) if called(node) in _MAKERS)
        copies = [node for node in tensors if node.args and isinstance(node.args[0], ast.List)]
        joined = _Unwrap(of_list=True).visit(copied(copies[0])) if len(copies) == 1 else None
        if isinstance(joined, ast.Call) and called(joined) == "stack":  # where each has a single element, as that of shape (1,)
            dtypes = [option.value for option in copies[0].keywords if option.arg == "dtype"]
            joined = expression(f"{ast.unparse(joined)}.flatten()" + "".join(f".to({ast.unparse(dtype)})" for dtype in dtypes))
        edits[cut.op.where] = exchanging(cut.op.where, copies[0], joined) if joined is not None and not same(joined, copies[0]) else ()
    return tuple(edit for of_line in edits.values() for edit in of_line) if all(edits.values()) else ()


def without_leaf(backward: Location | None) -> tuple[Edit, ...]:
    """The edits that no longer make a leaf of the loss that a line calls backward() on: ``Variable(loss, requires_grad=True)``."""
    tree = None if backward is None else tree_of(backward.file)
    if backward is None or tree is None:
        return ()
    source = Source(backward, tree)
    calls = [node.func for node in nodes(ast.Call, source.statement) if called(node) == "backward"]
    name = next((part.value.id for part in calls if isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name)), "")
    for statement in source.block_of(source.statement) if name else []:
        where = location(backward.file, statement.lineno - source.offset, backward.function)
        if ast.unparse(statement) in {f"{name}.requires_grad = True", f"{name}.requires_grad_()", f"{name}.requires_grad_(True)"}:
            return (source.replacing(statement, ""),)
        value = statement.value if isinstance(statement, ast.Assign) and name in bound_names(statement) else None
        match value:
            case ast.Call(_, [inner], [ast.keyword("requires_grad", ast.Constant(True))]) if called(value) in _MAKERS:
                pass
            case ast.Call(ast.Attribute(inner, "requires_grad_"), _):
                pass
            case _:
                continue
        return (source.replacing(statement, ""),) if ast.unparse(inner) == name else exchanging(where, value, inner)
    return ()


class _Unwrap(ast.NodeTransformer):
    """``torch.tensor(x.item())`` -> ``x``; ``torch.tensor([a.item(), b])`` -> ``torch.stack([a, b])``, and likewise of nested lists."""

    def __init__(self, *, of_list: bool) -> None:
        self.of_list = of_list

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        if called(node) not in _MAKERS or not node.args:
            return node
        parts = node.args[0]
        if isinstance(parts, (ast.List, ast.Tuple)) and any(isinstance(elt, (ast.List, ast.Constant)) for elt in parts.elts):
            sizes, values = _laid_out(parts)
            options = "".join(f", {ast.unparse(option)}" for option in node.keywords if option.arg in {"dtype", "device"})
            each = ", ".join(ast.unparse(_stripped(value)) for value in values)
            joined = f"torch.cat([torch.as_tensor(value{options}).reshape(1) for value in ({each})])"
            is_even = math.prod(sizes) == len(values)
            return expression(f"{joined}.reshape({', '.join(map(str, sizes))})") if is_even else node
        if isinstance(parts, (ast.List, ast.Tuple)):
            parts = ast.List([_stripped(elt) for elt in parts.elts], ast.Load())
        elif isinstance(parts, (ast.ListComp, ast.GeneratorExp)):
            parts = ast.ListComp(_stripped(parts.elt), parts.generators)
        elif not self.of_list:
            return _stripped(parts)
        return ast.Call(expression("torch.stack"), [parts], [])


def _stripped(value: ast.expr) -> ast.expr:
    while isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr in _READERS and not value.args:
        value = value.func.value
    return value


def _laid_out(parts: ast.expr) -> tuple[list[int], list[ast.expr]]:
    """(shape, elements) of a nested list that is written there."""
    if not isinstance(parts, (ast.List, ast.Tuple)) or not parts.elts:
        return [], [parts]
    inner = [_laid_out(part) for part in parts.elts]
    return [len(inner), *inner[0][0]], [value for _, values in inner for value in values]


def dropped_on_the_way(tape: Tape, root: int, before: int | None = None) -> tuple[Dropped | None, list[RecordedOp]]:
    """The cut nearest to the tensor with that id, and the ops that it was computed by, up to there."""
    passed: list[RecordedOp] = []
    for op in tape.ancestors(root, before):
        passed.append(op)
        if (dropped := dropped_by(op)) is not None:
            return dropped, passed
    consumers = tape.consumers()
    ends = (op for op in tape.ops if op.is_forward and op.index not in consumers and any(use.requires_grad for use in op.reads))
    return rewrapped_in(tape, passed) or next(listed_in(passed, ends), None), passed


def dropped_by(op: RecordedOp, on_the_way: Container[int] | None = None) -> Dropped | None:
    """Whether a gradient ends at this op, or at an integer output of an op, of those on the way, that it reads."""
    if op.initializes:
        return None
    if any(use.requires_grad for use in op.reads):
        if op.inference or not op.grad_enabled:
            return Dropped(op, "inference_mode" if op.inference else "no_grad")
        if op.name == "detach":
            is_copied = "detach" not in op.source and _REWRAPS.search(op.source)  # `torch.tensor(loss)`
            return Dropped(op, "data" if ".data" in op.source else "rewrapped" if is_copied else "detach")
        if op.makes and not any(use.can_have_grad for use in op.makes):
            return Dropped(op, "dtype")
    for use, maker in op.sources:  # an output of several, as the indices of `max`
        is_passed = on_the_way is None or maker.index in on_the_way
        if is_passed and not use.can_have_grad and maker.grad_enabled and any(one.requires_grad for one in maker.reads):
            return Dropped(maker, "dtype")
    return None


def rewrapped_in(tape: Tape, ops: Iterable[RecordedOp], readers: Iterable[RecordedOp] | None = None) -> Dropped | None:
    """The first of the ops that makes a tensor of numbers read from another one: ``torch.tensor(h.item())``, NumPy and back.

    Only a line of the user's that makes a tensor does that, and with `readers`, only of numbers that one of these ops has read.
    """
    return next(_rewrapped(tape, ops, tape.ops if readers is None else readers), None)


def listed_in(ops: Iterable[RecordedOp], ends: Iterable[RecordedOp]) -> Iterator[Dropped]:
    """The ops that make a tensor of a list in which results stand that nothing else reads: their numbers are read without an op."""
    ends = [end for end in ends if end.line is not None]
    for op in ops:
        statement = statement_at(op.where)
        if op.name in _FRESH and statement is not None and op.line is not None and _REWRAPS.search(ast.unparse(statement)):
            inside = (end.line for end in ends if end.index < op.index and end.line is not None)
            if any(line.file == op.line.file and covers(statement, line.line) for line in inside):
                yield Dropped(op, "list")


def _rewrapped(tape: Tape, ops: Iterable[RecordedOp], readers: Iterable[RecordedOp]) -> Iterator[Dropped]:
    # An op that saves its own output detaches it: only a line that asks for it reads numbers.
    readers = [op for op in readers if op.name in _NUMBERS and (op.name != "detach" or _DETACHES.search(code_at(op.where)))]
    readers = [op for op in readers if any(use.requires_grad for use in op.reads)]
    read = {id(parent) for later in tape.ops for parent in later.parents}
    for op in ops:
        before = [reader for reader in readers if reader.index <= op.index]
        if op.note == "wraps a graph":
            yield Dropped(op, "list")
        elif op.name in _FRESH or not op.reads:
            can_carry = any(use.can_have_grad for use in op.makes)
            if can_carry and _REWRAPS.search(op.source) and (before or _READ_AND_WRAPPED.search(op.source)):
                yield Dropped(op, "rewrapped")
        elif op.unknown:
            yield from (Dropped(one, "rewrapped") for one in reversed(before) if id(one) not in read)
