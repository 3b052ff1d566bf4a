"""view, reshape and their like: as many elements as before."""

from __future__ import annotations

import ast
import math
from typing import Any

from torchdebug_magics.format import shape
from torchdebug_magics.instruments.shapes.cell_error.program_slice import value_named
from torchdebug_magics.instruments.shapes.repair.edit import Repair, as_typed
from torchdebug_magics.instruments.shapes.repair.failure_facts import FailureFacts, Operand
from torchdebug_magics.instruments.shapes.repair.rules.earlier import channels_last, tensor_of
from torchdebug_magics.instruments.shapes.repair.rules.inputs_and_indices import fitted
from torchdebug_magics.instruments.shapes.repair.rules.rule_parts import Diagnosis, producer_edits, rewritten, told
from torchdebug_magics.instruments.shapes.repair.size_history import TURNS, of_inputs, steps
from torchdebug_magics.instruments.shapes.repair.source import assignments
from torchdebug_magics.probing.source.syntax import as_atom, expression, names_in, nodes

_VIEWS = frozenset({"view", "reshape", "view_as", "reshape_as", "unflatten"})


def view(facts: FailureFacts) -> Diagnosis | None:
    """``x.view(-1, 400)`` of a tensor that has not so many elements."""
    if facts.op not in _VIEWS or not facts.operands:
        return None
    x = facts.operands[0]
    text = facts.written
    many = math.prod(x.sizes)
    if "stride" in facts.text or "contiguous" in facts.text:
        turners = (step.op.strip("_") for step in steps(x.made) if step.op in TURNS | {"__getitem__", "expand", "flip"})
        turner = next(turners, "an op before")
        sentence = f"{text} of {told(x)} is not a view: `{turner}` made it non-contiguous; use `.reshape()`"
        return Diagnosis(sentence, tuple(_reshaped(facts)), x)
    wanted = _wanted(facts)
    if wanted is None:
        return None
    if facts.op == "unflatten":
        dim = facts.argument(1, "dim", 0)
        size = x.sizes[dim] if isinstance(dim, int) and -len(x.sizes) <= dim < len(x.sizes) else many
        return Diagnosis(f"{text} splits a dimension of {size} into {shape(wanted)} = {math.prod(wanted):,}", (), x)
    known = math.prod(number for number in wanted if number != -1)
    whole = f"{told(x)} has {many:,} elements"
    if -1 in wanted:
        others = [number for number in wanted if number != -1]
        factors = f"{shape(others)} = {known:,}" if len(others) > 1 else f"{known:,}"
        sentence = f"{text} cannot reshape {shape(x.sizes)}: {whole}, not divisible by {factors}"
    else:
        sentence = f"{text} cannot reshape {shape(x.sizes)}: {whole}, not {known:,}"
    if left := _remainder(facts, x):
        return Diagnosis(f"{text} cannot split {shape(x.sizes)}: {left}", channels_last(x.made), x, rounded=x.is_input)
    if split := _split(x, wanted):
        size, into = split
        sentence = f"{text} cannot split {size} into {shape(into)} = {math.prod(into)}: {told(x)}"
        edits = [*other_heads(facts, size, into), *_sizes(facts, x, wanted), *producer_edits(facts, x, size, math.prod(into), rank=12)]
        return Diagnosis(sentence, tuple(edits), x)
    is_table = not of_inputs(x.made) and -1 not in wanted and x.sizes[-1] != wanted[-1]
    edits = [*(fitted(facts, x, x.sizes[-1], wanted[-1], rank=6) if is_table else ()), *_sizes(facts, x, wanted)]
    fit = None if x.is_input or is_table else (math.prod(x.sizes[1:]), math.prod(number for number in wanted[1:] if number != -1))
    return Diagnosis(sentence, tuple(edits), x, fit, rounded=x.is_input)


def _remainder(facts: FailureFacts, x: Operand) -> str:
    """``c // self.heads`` among the sizes, which leaves a remainder, in words: a layer that would then fit is not what was meant."""
    call, site = facts.written_call, facts.site
    if call is None or site is None:
        return ""
    before = [assignment.value for name in names_in(*call.args) for assignment in assignments(site, name)[:1]]
    for part in nodes(ast.BinOp, *call.args, *before):
        ends: list[Any] = [
            side.value if isinstance(side, ast.Constant) else value_named(side, site.names) for side in (part.left, part.right)
        ]
        if not isinstance(part.op, ast.FloorDiv) or not all(type(end) is int and end > 0 for end in ends):
            continue
        size, by = ends
        if not size % by or all(length % size for length in x.sizes):
            continue
        if size < by:
            return f"`{ast.unparse(part)}` is {size} // {by}, which is 0"
        divisors = [number for number in range(1, size + 1) if not size % number]
        nearest = max(number for number in divisors if number < by), min(number for number in divisors if number > by)
        return f"`{ast.unparse(part)}` is {size} // {by}, with a remainder of {size % by}; {nearest[0]} and {nearest[1]} divide {size}"
    return ""


def _split(x: Operand, wanted: tuple[int, ...]) -> tuple[int, tuple[int, ...]] | None:
    """The one dimension that is split, and into what, where all before and behind it stay."""
    before = next((at for at, (here, there) in enumerate(zip(x.sizes, wanted, strict=False)) if here != there), 0)
    behind = next((at for at, (here, there) in enumerate(zip(x.sizes[::-1], wanted[::-1], strict=False)) if here != there), 0)
    into = wanted[before : len(wanted) - behind]
    if not before or -1 in into or len(into) < 2 or before + behind != len(x.sizes) - 1:
        return None
    return x.sizes[before], into


def _wanted(facts: FailureFacts) -> tuple[int, ...] | None:
    given: Any = facts.args[1:] if facts.op != "unflatten" else facts.args[2:]
    given = given or tuple(facts.kwargs.get(name) for name in ("shape", "size", "sizes") if name in facts.kwargs)
    if facts.op in {"view_as", "reshape_as"} and len(facts.operands) > 1:
        return facts.operands[1].sizes
    if len(given) == 1 and isinstance(given[0], (tuple, list)):
        given = tuple(given[0])
    return tuple(int(size) for size in given) if given and all(isinstance(size, int) for size in given) else None


def _reshaped(facts: FailureFacts) -> list[Repair]:
    name = "reshape" if facts.op == "view" else "reshape_as"

    def write(call: ast.Call) -> ast.expr | str:
        return ast.Call(ast.Attribute(call.func.value, name), call.args, call.keywords) if isinstance(call.func, ast.Attribute) else ""

    def run(_: Any, args: Any, kwargs: Any) -> Any:
        return getattr(args[0], name)(*args[1:], **kwargs)

    return rewritten(facts, write, run, rank=2, why="copies where a view is not possible")


def _sizes(facts: FailureFacts, x: Operand, wanted: tuple[int, ...]) -> list[Repair]:
    """One of the sizes as it comes out; a batch that was written as a number, first of all."""
    many = math.prod(x.sizes)
    edits: list[Repair] = []
    if len(wanted) == 2 and x.sizes and len(x.sizes) > 2:
        flat = facts.written_call and tensor_of(facts.written_call, len(facts.args) - 1)
        text = f"{as_atom(flat)}.flatten(1)" if flat else ""
        edits += rewritten(facts, lambda _: text, lambda _, args, __: args[0].flatten(1), rank=3, why="each row in one dimension")
    edits += _made_to_fit(facts, x, wanted)
    free = wanted.index(-1) if -1 in wanted else None
    for at in range(len(wanted)):
        if at == free or (at and wanted[at] == 1):  # a dimension of one is there to be grown
            continue
        rest = math.prod(number for place, number in enumerate(wanted) if place not in {at, free})
        rows = x.sizes[0] if free == 0 and x.sizes else 1
        if rest and many % (rest * rows) == 0 and (free is None or (free == 0 and at != 0)):
            size = -1 if free is None else many // (rest * rows)
            new = tuple(size if place == at else number for place, number in enumerate(wanted))
            # A batch that was written as a number, first of all.
            of_batch = 2 if math.prod(x.sizes[1:]) == math.prod(wanted[1:]) else 6
            edits += _with_sizes(facts, new, rank=10 if free is not None else 8 + len(wanted) - at if at else of_batch)
    return edits


def _made_to_fit(facts: FailureFacts, x: Operand, wanted: tuple[int, ...]) -> list[Repair]:
    """Rows that are laid out as pictures: of another height and width, or made as long as it takes."""
    if len(x.sizes) != 2 or wanted[0] not in {-1, x.sizes[0]} or -1 in wanted[1:]:
        return []
    edits = producer_edits(facts, x, x.sizes[1], math.prod(wanted[1:]), rank=15)
    if len(wanted) == 4 and wanted[2] == wanted[3] and x.sizes[1] % wanted[1] == 0:
        side = math.isqrt(x.sizes[1] // wanted[1])
        if side**2 * wanted[1] == x.sizes[1]:
            edits += _with_sizes(facts, (*wanted[:2], side, side), rank=8)
    return edits


def _with_sizes(facts: FailureFacts, sizes: tuple[int, ...], *, rank: int) -> list[Repair]:
    many = len(facts.args) - 1
    return rewritten(facts, lambda call: _call_with(call, many, sizes), lambda _, args, __: args[0].reshape(sizes), rank=rank)


def _call_with(call: ast.Call, many: int, sizes: tuple[int, ...]) -> str:
    """The same call with other sizes; a name or a call, such as ``x.size(0)``, is kept where the new size is not -1."""
    first = [argument for argument in call.args if argument is tensor_of(call, many)]  # of ``torch.reshape(x, (2, -1))``
    old = call.args[len(first) :]
    is_listed = len(old) == 1 and isinstance(old[0], (ast.Tuple, ast.List))
    old = old[0].elts if is_listed and isinstance(old[0], (ast.Tuple, ast.List)) else old
    if len(old) != len(sizes):
        return ""
    is_number = [size == -1 or isinstance(was, (ast.Constant, ast.UnaryOp)) for was, size in zip(old, sizes, strict=True)]
    new = [expression(str(size)) if new else was for was, size, new in zip(old, sizes, is_number, strict=True)]
    return ast.unparse(ast.Call(call.func, [*first, *([ast.Tuple(new, ast.Load())] if is_listed else new)], []))


def other_heads(facts: FailureFacts, size: int, into: tuple[int, ...]) -> list[Repair]:
    """Both numbers belong to a module of the user's: so many heads that they divide the size, the nearest first."""
    call = facts.written_call
    if facts.site is None or call is None:
        return []
    path = next((path for path, module in facts.modules.items() if module is facts.site.names.get("self")), "")
    own: dict[str, Any] = vars(facts.modules[path]) if path in facts.modules else {}
    nodes = [node for argument in call.args for node in (argument.elts if isinstance(argument, (ast.Tuple, ast.List)) else [argument])]
    named = [node.attr for node in nodes if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self" and node.attr in own]
    numbers = [own[name] for name in named]
    if len(set(named)) != 2 or len(named) != 2 or not all(type(number) is int and number in into for number in numbers):
        return []
    heads, others = numbers[0], math.prod(into) // math.prod(numbers)  # such as the three of query, key and value
    if size % others:
        return []
    size //= others
    fits = sorted((many for many in range(2, size) if not size % many), key=lambda many: (abs(many - heads), -many))
    edits = []
    for rank, many in enumerate(fits[:2]):
        new = dict(zip(named, (many, size // many), strict=True))
        code = "\n".join(f"{as_typed(path)}.{name} = {number}" for name, number in new.items())
        edits.append(Repair(code, f"{many} divides {size}, and {heads} does not", 10 + rank, attributes={path: new}))
    return edits
