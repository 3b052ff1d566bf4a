"""Matrix products: the inner dimensions, and the batches around them."""

from __future__ import annotations

import ast
import re
from dataclasses import replace

import torch

from torchdebug_magics.format import shape
from torchdebug_magics.instruments.shapes.repair.edit import Edit, OpEdit, as_typed, method, on_operand, parameter_edit
from torchdebug_magics.instruments.shapes.repair.failure_facts import Facts, Operand, Sizes
from torchdebug_magics.instruments.shapes.repair.rules.rule_parts import Diagnosis, named, orders, producer_edits, rewritten, shown, turned
from torchdebug_magics.instruments.shapes.repair.size_history import TURNS, came_from, of_inputs

_PRODUCTS = frozenset(["_sparse_mm", "matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "mv", "dot", "baddbmm", "inner"])
_ADDED_PRODUCTS = {"addmm": (2, 2), "addmv": (2, 1), "baddbmm": (3, 3)}
"""Dimensions of the two factors."""


def matmul(facts: Facts) -> Diagnosis | None:
    """``q @ k`` whose inner dimensions differ."""
    if facts.op not in _PRODUCTS or len(facts.operands) < 2:
        return None
    first = 1 if facts.op == "baddbmm" else 0
    a, b = facts.operands[first], facts.operands[first + 1]
    if facts.op == "__rmatmul__":
        a, b = b, a
    text = facts.written
    if not a.sizes or not b.sizes:
        return None
    inner_a, inner_b = a.sizes[-1], b.sizes[-2] if len(b.sizes) > 1 else b.sizes[0]
    if inner_a != inner_b:
        sizes = f"{inner_a} and {inner_b} elements" if len(a.sizes) == len(b.sizes) == 1 else f"{inner_a} columns, {inner_b} rows"
        sentence = f"{text} cannot multiply {shown(a)} by {shown(b)}: {sizes}"
        return Diagnosis(sentence, tuple(_inner(facts, a, b, inner_a, inner_b)), a if a.made is not None else b)
    if facts.op in {"bmm", "mm", "mv", "dot", "baddbmm"} and not _right_dimensions(facts.op, a, b):
        edits = _vectors(facts, a, b) or (_as_matmul(facts) if facts.op in {"bmm", "mm"} else [])
        many = {"bmm": 3, "baddbmm": 3, "mm": 2, "mv": 2, "dot": 1}[facts.op]
        return Diagnosis(f"{text} multiplies tensors of {many} dimensions, gets {shown(a)} and {shown(b)}", tuple(edits), a)
    if a.sizes[:-2] != b.sizes[:-2]:
        sentence = f"{text} cannot multiply {shown(a)} by {shown(b)}: batch sizes {shape(a.sizes[:-2])} and {shape(b.sizes[:-2])}"
        return Diagnosis(sentence, tuple(_batches(facts, a, b)), a)
    return None


def _inner(facts: Facts, a: Operand, b: Operand, inner_a: int, inner_b: int) -> list[Edit]:
    at_a, at_b = facts.operands.index(a), facts.operands.index(b)
    edits = _vectors(facts, a, b)
    if edits:
        return edits
    if len(a.sizes) == len(b.sizes) == 2 and b.sizes[0] == b.sizes[1] == a.sizes[0] and (swapped := _swapped(facts, b)):
        return swapped  # an adjacency: to turn the other one would mix its rows
    if len(b.sizes) > 1 and b.sizes[-1] == inner_a:
        edits += on_operand(facts, at_b, method("transpose", -2, -1), rank=2) or _owned_turned(facts, at_b)
    if len(a.sizes) > 1 and a.sizes[-2] == inner_b and (a.sizes != b.sizes or a.owned):  # else the rows of b would do as well
        edits += on_operand(facts, at_a, method("transpose", -2, -1), rank=5) or _owned_turned(facts, at_a)
    if len(a.sizes) > 1 and len(b.sizes) > 1 and b.sizes[-1] == a.sizes[-2]:
        edits += _swapped(facts, b)
    if b.owned and len(b.sizes) > 1:
        edits += parameter_edit(b, (*b.sizes[:-2], inner_a, b.sizes[-1]))
    if a.owned and len(a.sizes) > 1:
        edits += parameter_edit(a, (*a.sizes[:-1], inner_b))
    edits += _turned_parameter(facts, b, inner_a)
    if b.owned or len(b.sizes) > 2 or inner_b not in {one.shape[0] for _, one in facts.inputs}:  # a layer is not to know of the batch
        edits += producer_edits(facts, a, inner_a, inner_b)
    return edits + producer_edits(facts, b, inner_b, inner_a)


def _vectors(facts: Facts, a: Operand, b: Operand) -> list[Edit]:
    """One vector a sample beside one matrix a sample: without a dimension of one, each would meet every sample's."""
    if {len(a.sizes), len(b.sizes)} != {2, 3} or a.sizes[0] != b.sizes[0] or a.owned or b.owned:
        return []
    if len(a.sizes) == 2:
        return on_operand(facts, facts.operands.index(a), method("unsqueeze", 1), rank=1) if a.sizes[1] == b.sizes[1] else []
    return on_operand(facts, facts.operands.index(b), method("unsqueeze", -1), rank=1) if b.sizes[1] == a.sizes[2] else []


def _turned_parameter(facts: Facts, b: Operand, inner: int) -> list[Edit]:
    """The user's own parameter, used as ``self.w.T``, with as many columns as meet it."""
    step, module = b.made, facts.modules.get(facts.path or "")
    if step is None or module is None or step.op not in TURNS or len(step.shape) != 2 or not step.inputs or step.inputs[0][1] is not None:
        return []
    whole = step.inputs[0][0]
    named = [name for name, one in module._parameters.items() if one is not None and tuple(one.shape) == whole and f".{name}." in b.name]
    if len(named) != 1 or whole[::-1] != step.shape:
        return []
    path = f"{facts.path}.{named[0]}".lstrip(".")
    code = f"{as_typed(path)} = nn.Parameter(torch.zeros({whole[0]}, {inner}))"
    return [Edit(code, "a parameter of the matching size", 30, parameters={path: (whole[0], inner)})]


def _owned_turned(facts: Facts, at: int) -> list[Edit]:
    """A parameter, turned in the expression that uses it."""
    operand = facts.operands[at]
    free = replace(operand, owned=False, made=None)
    operands = tuple(free if one is operand else one for one in facts.operands)
    change = method("t") if len(operand.sizes) == 2 else method("transpose", -2, -1)
    return on_operand(replace(facts, operands=operands), at, change, rank=4)


def _swapped(facts: Facts, b: Operand) -> list[Edit]:
    site = facts.site
    written = site.expression if site is not None else None
    if site is None or facts.op is None or not isinstance(written, ast.BinOp) or not facts.direct:
        return []
    square = len(b.sizes) == 2 and b.sizes[0] == b.sizes[1]
    computed = all(of_inputs(one.made) for one in facts.operands[:2])
    if not square and computed and b.sizes[-1] in {one.shape[0] for _, one in facts.inputs if one.dim() > 1}:
        return []  # the samples of the batch would be summed up
    code = ast.unparse(ast.BinOp(written.right, ast.MatMult(), written.left))
    return [
        Edit(
            code,
            "with the operands swapped",
            1 if square else 8,
            ops=(OpEdit(site, facts.op, lambda func, args, _: func(args[1], args[0])),),
        )
    ]


def _right_dimensions(op: str, a: Operand, b: Operand) -> bool:
    many = {"bmm": (3, 3), "baddbmm": (3, 3), "mm": (2, 2), "mv": (2, 1), "dot": (1, 1)}[op]
    return (len(a.sizes), len(b.sizes)) == many


def _as_matmul(facts: Facts) -> list[Edit]:
    names = [one.name for one in facts.operands[:2]]
    code = " @ ".join(names) if all(names) else ""
    return rewritten(
        facts, lambda _: code, lambda _, args, __: torch.matmul(args[0], args[1]), rank=3, why="takes any number of dimensions"
    )


def _batches(facts: Facts, a: Operand, b: Operand) -> list[Edit]:
    edits: list[Edit] = []
    for one, other in ((a, b), (b, a)):
        at = facts.operands.index(one)
        if len(one.sizes) < len(other.sizes):
            edits += [edit for dim in range(1, len(other.sizes) - 2) for edit in on_operand(facts, at, method("unsqueeze", dim), rank=6)]
        if len(one.sizes) == len(other.sizes) == 4 and one.sizes[0] == other.sizes[0] and not other.sizes[1] % one.sizes[1]:
            times = other.sizes[1] // one.sizes[1]
            why = f"each of the {one.sizes[1]} heads for {times} of the {other.sizes[1]}"
            edits += on_operand(facts, at, method("repeat_interleave", times, 1), rank=3, why=why) if one.sizes[1] > 1 else []
        if len(one.sizes) == len(other.sizes) > 2:
            for order in orders(len(one.sizes)):
                if tuple(one.sizes[dim] for dim in order[:-2]) == other.sizes[:-2] and order != tuple(range(len(order))):
                    edits += turned(facts, at, order, rank=7)
    return edits


def added(facts: Facts) -> Diagnosis | None:
    """The product itself fits, and what is added to it does not."""
    if facts.op in _ADDED_PRODUCTS and len(facts.operands) > 2:
        return _to_product(facts)
    if len(facts.operands) < 3 or not (facts.op == "linear" or (facts.op or "").startswith("conv")):
        return None
    weight, bias = facts.operands[1], facts.operands[2]
    if len(weight.sizes) < 2:
        return None
    gives = weight.sizes[1] if "transpose" in (facts.op or "") else weight.sizes[0]
    if bias.sizes == (gives,) or ("transpose" in (facts.op or "") and facts.argument(6, "groups", 1) != 1):
        return None
    sentence = f"{_text(facts)} returns {gives} features (weight {shape(weight.sizes)}), and adds {shown(bias)}"
    return Diagnosis(sentence, tuple(parameter_edit(bias, (gives,))), bias)


def _to_product(facts: Facts) -> Diagnosis | None:
    term, a, b = facts.operands[:3]
    if (len(a.sizes), len(b.sizes)) != _ADDED_PRODUCTS[facts.op or ""] or not _multiply(a, b):
        return None
    gives = (*a.sizes[:-1], *b.sizes[-1:]) if len(b.sizes) > 1 else a.sizes[:-1]
    if len(term.sizes) <= len(gives) and all(one in {1, there} for one, there in zip(term.sizes[::-1], gives[::-1], strict=False)):
        return None
    sentence = f"{_text(facts)} adds {shown(term)} to a product of {shape(gives)}"
    return Diagnosis(sentence, tuple(parameter_edit(term, _as_wide(term.sizes, gives))), term)


def _multiply(a: Operand, b: Operand) -> bool:
    return a.sizes[-1] == (b.sizes[-2] if len(b.sizes) > 1 else b.sizes[0]) and a.sizes[:-2] == b.sizes[:-2]


def _as_wide(sizes: Sizes, gives: Sizes) -> Sizes:
    """What broadcasts, goes on doing so."""
    return tuple(one if one == 1 else there for one, there in zip(sizes, gives[-len(sizes) :], strict=True))


def _text(facts: Facts) -> str:
    return f"`{facts.site.text}`" if facts.site is not None and facts.direct and facts.site.text else facts.who


def einsum(facts: Facts) -> Diagnosis | None:
    """A letter that stands for two sizes, or letters that do not match the dimensions."""
    if facts.op != "einsum" or not facts.args or not isinstance(facts.args[0], str):
        return None
    equation = facts.args[0].replace(" ", "")
    terms = equation.split("->")[0].split(",")
    told = ", ".join(f"{term} of {_whole(one)}" for term, one in zip(terms, facts.operands, strict=False))
    if len(terms) != len(facts.operands):
        return Diagnosis(f'`einsum("{equation}")` takes {len(terms)} tensors, gets {len(facts.operands)}')
    for at, (term, one) in enumerate(zip(terms, facts.operands, strict=True)):
        letters = re.sub(r"\.\.\.", "", term)
        if "..." not in term and len(letters) != len(one.sizes):
            name = named(one, f"operand {at}")
            sentence = f'`einsum("{equation}")` reads {name} as `{term}`, and it has {len(one.sizes)} dimensions: {shape(one.sizes)}'
            return Diagnosis(sentence, (), one)
    clash = _clash(terms, facts)
    if new := _new_letters(equation, clash[0] if clash is not None else ""):
        sentence = f'`einsum("{equation}")` has `{new[0]}` in its output, which no operand has: {told}'
        return Diagnosis(sentence, tuple(_other_equation(facts, new[1])), facts.operands[-1])
    if clash is None:
        return None
    letter, first, second = clash
    return Diagnosis(
        f'`einsum("{equation}")` has {first} and {second} for `{letter}`: {told}',
        (*_turned(facts, terms), *_with_sizes(facts, terms, clash)),
        facts.operands[0],
    )


def _new_letters(equation: str, clash: str) -> tuple[str, str] | None:
    """A letter of the output that no tensor has, and the equation in which the last tensor has it.

    It takes the place there of the letter that cannot be the same in two tensors, or of the one behind which it stands in the output.
    """
    given, arrow, output = equation.partition("->")
    first, _, last = given.rpartition(",")
    new = [letter for letter in output if letter.isalpha() and letter not in given]
    if not arrow or len(new) != 1 or not first:
        return None
    at = output.index(new[0])
    old = clash or (output[at - 1] if at > 1 else "")  # the first one is the batch
    return (new[0], f"{first},{last.replace(old, new[0])}->{output}") if old and last.count(old) == 1 else (new[0], "")


def _other_equation(facts: Facts, equation: str) -> list[Edit]:
    def write(call: ast.Call) -> ast.expr | str:
        return (
            ast.Call(call.func, [ast.Constant(equation), *call.args[1:]], call.keywords) if isinstance(call.args[0], ast.Constant) else ""
        )

    edits = rewritten(facts, write, lambda func, args, kwargs: func(equation, *args[1:], **kwargs), rank=5)
    return edits if equation else []


def _whole(one: Operand) -> str:
    source = came_from(one.made)
    return f"{shape(one.sizes)}{f' {source}' if source else ''}"


def _sizes_of(terms: list[str], facts: Facts) -> list[list[tuple[str, int]]]:
    return [_letters(term, one.sizes) for term, one in zip(terms, facts.operands, strict=True)]


def _letters(term: str, sizes: tuple[int, ...]) -> list[tuple[str, int]]:
    """Each letter with its size; those behind an ellipsis are counted from the end."""
    first, dots, last = term.partition("...")
    behind = list(zip(last, sizes[len(sizes) - len(last) :], strict=False)) if dots else []
    return [*zip(first, sizes, strict=False), *behind]


def _clash(terms: list[str], facts: Facts) -> tuple[str, int, int] | None:
    known: dict[str, int] = {}
    for pairs in _sizes_of(terms, facts):
        for letter, size in pairs:
            if known.setdefault(letter, size) != size and 1 not in {size, known[letter]}:
                return letter, known[letter], size
    return None


def _with_sizes(facts: Facts, terms: list[str], clash: tuple[str, int, int]) -> list[Edit]:
    """The user's own parameter, or the module that made an operand, with the other size."""
    letter, first, second = clash
    edits: list[Edit] = []
    for term, one in zip(terms, facts.operands, strict=True):
        at = term.find(letter)
        if "." in term or at < 0:
            continue
        other = second if one.sizes[at] == first else first
        edits += parameter_edit(one, (*one.sizes[:at], other, *one.sizes[at + 1 :]), rank=20)
        edits += producer_edits(facts, one, one.sizes[at], other) if at == len(term) - 1 else []
    return edits


def _turned(facts: Facts, terms: list[str]) -> list[Edit]:
    edits: list[Edit] = []
    for at, one in reversed(list(enumerate(facts.operands))):
        if "." in terms[at]:
            continue
        others = {letter: size for place, pairs in enumerate(_sizes_of(terms, facts)) if place != at for letter, size in pairs}
        for order in orders(len(one.sizes)):
            sizes = [one.sizes[dim] for dim in order]
            if order != tuple(range(len(order))) and all(
                others.get(letter, size) == size for letter, size in zip(terms[at], sizes, strict=False)
            ):
                edits += turned(facts, at, order)
                break
    return edits
