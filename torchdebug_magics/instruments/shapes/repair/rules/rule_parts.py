"""What every rule is made of: words for tensors, and the edits that several share."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from torchdebug_magics.format import shape
from torchdebug_magics.instruments.shapes.follow.seen import Made
from torchdebug_magics.instruments.shapes.repair.edit import CallEdit, OpEdit, Repair, ValueChange, at_tensor, method, on_operand
from torchdebug_magics.instruments.shapes.repair.failure_facts import FailureFacts, Operand
from torchdebug_magics.instruments.shapes.repair.rebuild import rebuilt_module
from torchdebug_magics.instruments.shapes.repair.size_history import came_from, maker, product, steps, through


@dataclass(frozen=True, eq=False)
class Diagnosis:
    """What one rule says of a failure."""

    sentence: str
    edits: tuple[Repair, ...] = ()
    culprit: Operand | None = None
    """The operand whose history is shown."""
    fit: tuple[int, int] | None = None
    """(what came, what was wanted) of a size that grows with the input's."""
    rounded: bool = False
    """Whether both sizes come from the input's, and differ as it does not divide."""


def shown(operand: Operand) -> str:
    """``x (2 x 3)`` with the name in code."""
    return f"`{operand.name}` of {shape(operand.sizes)}" if operand.name else shape(operand.sizes)


def named(operand: Operand, otherwise: str = "its input") -> str:
    """The name in code, or a word for it."""
    return f"`{operand.name}`" if operand.name else otherwise


def short_dtype(operand: Operand) -> str:
    """``float32``."""
    return str(operand.tensor.dtype).removeprefix("torch.")


def gets(operand: Operand, size: int, dim: int = -1) -> str:
    """``576 = 16 x 6 x 6 from `conv2` ``."""
    parts = product(operand.made, size, dim)
    source = came_from(operand.made)
    return f"{size}{f' = {parts}' if parts else ''}{f' {source}{through(operand.made)}' if source else ''}"


def reorder(order: tuple[int, ...]) -> ValueChange:
    """Dimensions in another order: exchanged where it is two of them that move."""
    moved = [dim for dim, old in enumerate(order) if dim != old]
    many = len(order)
    if len(moved) != 2:
        return method("permute", *order)
    a, b = moved
    return method("transpose", a - many, b - many) if a == many - 2 and many > 2 else method("transpose", a, b)


def reordered(facts: FailureFacts, at: int, dim: int, size: int, *, rank: int = 5, batched: bool = False) -> list[Repair]:
    """Each dimension that has the wanted size, moved to where it is wanted; the first of all not where that is sure to be the batch."""
    operand = facts.operands[at]
    many = len(operand.sizes)
    dim %= many
    edits: list[Repair] = []
    for now in _places(operand.sizes, size):
        if now == dim or (batched and now == 0):
            continue
        rest = [number for number in range(many) if number != now]
        rest.insert(dim, now)
        why = f"{shape(operand.sizes)} becomes {shape([operand.sizes[place] for place in rest])}"
        is_column = now == 0 and many == 2 and operand.sizes[1] == 1  # one number for each sample
        worse = _LIES_DOWN if is_column else 8 if now == 0 else 0
        edits += on_operand(facts, at, reorder(tuple(rest)), rank=rank + worse, why=why)
    return edits


def there_and_back(facts: FailureFacts, at: int, dim: int, size: int, *, rank: int = 9) -> list[Repair]:
    """A module that keeps the shape, called with two dimensions exchanged, and they are exchanged back behind it."""
    x = facts.operands[at]
    dim %= len(x.sizes)
    places = [now for now in _places(x.sizes, size) if now not in {0, dim}]
    if at or not places:
        return []
    why = f"dimension {places[0]} of {shape(x.sizes)} has {size}"
    if places == [1] and dim == len(x.sizes) - 1 > 2:
        rest = range(2, len(x.sizes))
        return wrapped(facts, method("permute", 0, *rest, 1), method("permute", 0, dim, *range(1, dim)), rank=rank, why=why)
    change = method("transpose", *sorted((places[0], dim)))
    return wrapped(facts, change, change, rank=rank, why=why)


def _places(sizes: tuple[int, ...], size: int) -> Iterator[int]:
    return (dim for dim, length in reversed(list(enumerate(sizes))) if length == size)


_SPLITS = frozenset(["chunk", "split", "tensor_split", "glu"])
_LIES_DOWN = 28
"""What it adds to the rank that a column of samples becomes one sample."""
_FORGOTTEN = 25
"""The rank of an edit that makes room for all parts of what is split afterwards."""
_OUT = {
    nn.Linear: "out_features",
    nn.Bilinear: "out_features",
    nn.modules.conv._ConvNd: "out_channels",
    nn.Embedding: "embedding_dim",
    nn.EmbeddingBag: "embedding_dim",
    nn.RNNBase: "hidden_size",
    nn.RNNCellBase: "hidden_size",
}


def producer_edits(facts: FailureFacts, operand: Operand, size: int, wanted: int, *, rank: int = 40) -> list[Repair]:
    """The module that decided this size, rebuilt to return the expected size."""
    step = maker(operand.made)
    if step is None or step.module not in facts.modules or step.number == 0:
        return []
    module = facts.modules[step.module]
    name = next((name for kind, name in _OUT.items() if isinstance(module, kind)), None)
    gives = getattr(module, name, None) if name is not None else None
    if name is None or not isinstance(gives, int):
        return []
    parts = _parts(operand.made, size, gives)
    if not parts:
        return []
    # It gives the wanted size as it is, and a part of that is taken afterwards: forgotten where it was made.
    rank = min(rank, _FORGOTTEN) if parts > 1 and gives == wanted else rank
    why = f"returns {wanted * parts} instead of {gives}{f', {parts} times {wanted}' if parts > 1 else ''}"
    return rebuilt_module(module, step.module, rank=rank, why=why, **{name: wanted * parts})


def _parts(made: Made | None, size: int, whole: int) -> int:
    """In how many parts of this size a whole was split on the way; 0 where it is another size for another reason."""
    if size == whole:
        return 1
    for step in steps(made):
        if step.op in _SPLITS and step.shape and step.inputs and whole == step.inputs[0][0][-1] and whole % size == 0:
            return whole // size if step.shape[-1] == size else 0
    return 0


def clashes(a: tuple[int, ...], b: tuple[int, ...]) -> list[int]:
    """Where two shapes do not broadcast, counted from the end: -1 is the last dimension."""
    pairs = zip(reversed(a), reversed(b), strict=False)
    return [-1 - at for at, (here, there) in enumerate(pairs) if here != there and 1 not in {here, there}]


def orders(many: int) -> Iterator[tuple[int, ...]]:
    """All orders of so many dimensions: first those that move a single one, which lay no picture on its side; then the others."""

    def moved(order: tuple[int, ...]) -> tuple[bool, int]:
        moves_one = any([*rest] == sorted(rest) for rest in itertools.combinations(order, many - 1))
        return not moves_one, sum(at != dim for at, dim in enumerate(order))

    return iter(sorted(itertools.permutations(range(many)), key=moved))


def told(x: Operand) -> str:
    """The tensor, its shape, and where that came from."""
    source = "" if x.is_input and "[" in x.name else came_from(x.made)  # ``batch["y"]`` says where it is from
    return f"{named(x, 'the tensor')} of {shape(x.sizes)}{f' {source}' if source and f'`{x.name}`' not in source else ''}"


def rewritten(
    facts: FailureFacts, write: Callable[[ast.Call], ast.expr | str], run: Callable[[Any, Any, Any], Any], *, rank: int, why: str = ""
) -> list[Repair]:
    """The user's own call of the failing op, written otherwise; none where the op is not called there, or nothing is written."""
    call = facts.written_call
    new = write(call) if call is not None else ""
    code = new if isinstance(new, str) else ast.unparse(new)
    if facts.site is None or facts.op is None or not code:
        return []
    return [Repair(code, why, rank, ops=(OpEdit(facts.site, facts.op, run),))]


def argument_changed(facts: FailureFacts, at: int, change: ValueChange, *, rank: int, why: str) -> list[Repair]:
    """The user's own call of the failing module with the argument at this place changed."""
    site = facts.site if facts.direct else None
    written = facts.caller.site if site is None and not facts.path and facts.caller is not None else site
    call = written.expression if written is not None else None
    if written is None or facts.path is None or not isinstance(call, ast.Call) or len(call.args) <= at:
        return []
    if any(isinstance(argument, ast.Starred) for argument in call.args[: at + 1]):
        return []

    def arguments(args: Any, kwargs: Any) -> tuple[Any, Any]:
        return (*args[:at], change.apply(args[at]), *args[at + 1 :]), kwargs

    return [Repair(written.changed(call.args[at], change.text), why, rank, calls=(CallEdit(facts.path, site, arguments),))]


def wrapped(facts: FailureFacts, change: ValueChange, back: ValueChange, *, rank: int = 10, why: str = "") -> list[Repair]:
    """The user's call of the failing module with its first tensor changed, and its output changed back."""
    site = facts.site
    if site is None or facts.path is None or not facts.direct or not facts.calls_module or not facts.given:
        return []
    node = site.operand_node(0, facts.given[0].tensor, direct=True)
    if node is None:
        return []
    call = CallEdit(facts.path, site, lambda args, kwargs: at_tensor(0, change.apply, args, kwargs), back.apply)
    return [Repair(back.text(site.changed(node, change.text)), why, rank, calls=(call,))]
