"""permute, expand and all that name a dimension: those that are there, and as many as there are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torchdebug_magics.format import shape
from torchdebug_magics.instruments.shapes.repair.edit import Edit, method, on_operand
from torchdebug_magics.instruments.shapes.repair.rules.rule_parts import Diagnosis, producer_edits, told
from torchdebug_magics.instruments.shapes.repair.rules.steps.earlier import squeezed
from torchdebug_magics.instruments.shapes.repair.rules.steps.long_inputs import shortened, too_long

if TYPE_CHECKING:
    from torchdebug_magics.instruments.shapes.repair.failure_facts import Facts, Operand

__all__ = ["dimension", "expand"]

# fmt: off
_BY_DIMENSION = frozenset((
    "transpose", "permute", "swapaxes", "swapdims", "movedim", "unsqueeze", "squeeze", "flatten", "softmax",
    "log_softmax", "sum", "mean", "max", "min", "argmax", "argmin", "std", "var", "cumsum", "chunk", "split",
    "unbind", "select", "narrow", "size", "norm", "topk", "glu", "sort", "flip", "roll", "cat", "stack", "amax",
    "amin", "prod", "all", "any", "logsumexp", "mT", "t",
))
# fmt: on


def expand(facts: Facts) -> Diagnosis | None:
    """Only a dimension of one grows."""
    if facts.op not in {"expand", "expand_as", "broadcast_to", "repeat"} or not facts.operands:
        return None
    x = facts.operands[0]
    given: Any = (
        facts.operands[1].sizes if facts.op == "expand_as" and len(facts.operands) > 1 else facts.args[1:] or tuple(facts.kwargs.values())
    )
    wanted = tuple(given[0]) if len(given) == 1 and isinstance(given[0], (tuple, list)) else tuple(given)
    if not all(isinstance(one, int) for one in wanted):
        return None
    if facts.op == "repeat":
        return _repeated(facts, x, len(wanted)) if len(wanted) < len(x.sizes) else None
    if len(wanted) < len(x.sizes):
        return Diagnosis(f"`{facts.op}` to {shape(wanted)}: {told(x)} has {len(x.sizes)} dimensions already", (), x)
    text = facts.written
    pairs = [
        (here, there) for here, there in zip(reversed(x.sizes), reversed(wanted), strict=False) if there not in {-1, here} and here != 1
    ]
    if not pairs:
        return None
    sentence = f"{text} expands only dimensions of size 1, and {told(x)} has {pairs[0][0]} where {pairs[0][1]} is requested"
    edits = [
        edit
        for dim in range(len(x.sizes) + 1)
        if len(wanted) > len(x.sizes) and dim and _grows((*x.sizes[:dim], 1, *x.sizes[dim:]), wanted)
        for edit in on_operand(facts, 0, method("unsqueeze", -1 if dim == len(x.sizes) else dim), rank=5)
    ]
    cut = shortened(facts, pairs[0][1], pairs[0][0])
    long = too_long(facts, pairs[0][1], pairs[0][0]) if cut and facts.site is None else ""
    return Diagnosis(long or sentence, (*edits, *cut), x)


def _repeated(facts: Facts, x: Operand, many: int) -> Diagnosis:
    text = facts.written
    return Diagnosis(f"{text} repeats {many} dimensions, and {told(x)} has {len(x.sizes)}", (), x)


def _grows(sizes: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    return all(there in {-1, here} or here == 1 for here, there in zip(reversed(sizes), reversed(wanted), strict=False))


def dimension(facts: Facts) -> Diagnosis | None:
    """A dimension that the tensor does not have, or too many, or too few of them named."""
    if facts.op is None or not facts.operands:
        return None
    x = facts.operands[0]
    text = facts.written
    if facts.op == "permute":
        given = facts.args[1:]
        order = tuple(given[0]) if len(given) == 1 and isinstance(given[0], (tuple, list)) else given
        if len(order) != len(x.sizes):
            edits = _as_many(facts, len(order))
            return Diagnosis(f"{text} lists {len(order)} dimensions, and {told(x)} has {len(x.sizes)}", tuple(edits), x)
    if facts.op in _BY_DIMENSION and (parts := _parts(facts, text)) is not None:
        return parts
    if "Dimension out of range" in facts.text or ("no dimensions" in facts.text and facts.op in _BY_DIMENSION):
        last = len(x.sizes) - 1
        found = squeezed(facts, x)
        words, before = (found.words, found.edits) if found is not None else ("", ())
        return Diagnosis(
            f"{text} uses a dimension that {told(x)} does not have: dimensions are {-last - 1} to {last}{words}",
            (*before, *_as_many(facts, len(x.sizes) + 1)),
            x,
        )
    return None


def _parts(facts: Facts, text: str) -> Diagnosis | None:
    """More than a dimension has: parts to split it into, or its largest ones."""
    x = facts.operands[0]
    if facts.op == "glu":
        return _halved(facts, x)
    asked = facts.argument(1, "k" if facts.op == "topk" else "split_size")
    dim = facts.argument(2, "dim", -1 if facts.op == "topk" else 0)
    if not isinstance(dim, int) or not -len(x.sizes) <= dim < len(x.sizes):
        return None
    size, place = x.sizes[dim], dim % len(x.sizes)
    if facts.op == "topk" and isinstance(asked, int) and asked > size:
        sentence = f"{text} selects {asked} of dimension {place}, and {told(x)} has {size}"
        return Diagnosis(sentence, tuple(producer_edits(facts, x, size, asked)) if place == len(x.sizes) - 1 else (), x)
    if facts.op == "split" and isinstance(asked, (list, tuple)) and (whole := sum(asked)) != size:
        sentence = f"{text} takes {' + '.join(map(str, asked))} = {whole} of dimension {place}, and {told(x)} has {size}"
        return Diagnosis(sentence, tuple(producer_edits(facts, x, size, whole)) if place else (), x)
    return None


def _halved(facts: Facts, x: Operand) -> Diagnosis | None:
    dim = facts.argument(1, "dim", -1)
    if not isinstance(dim, int) or not -len(x.sizes) <= dim < len(x.sizes) or not x.sizes[dim] % 2:
        return None
    size, place = x.sizes[dim], dim % len(x.sizes)
    sentence = f"`glu` halves dimension {place}, and {told(x)} has {size}"
    return Diagnosis(sentence, tuple(producer_edits(facts, x, size, size + 1, rank=15)) if place else (), x)


def _as_many(facts: Facts, many: int) -> list[Edit]:
    """The input with the batch dimension that was forgotten."""
    x = facts.operands[0]
    lacks_batch = x.is_input and len(x.sizes) == many - 1
    return on_operand(facts, 0, method("unsqueeze", 0), rank=10, why="a batch of 1", first=True) if lacks_batch else []
