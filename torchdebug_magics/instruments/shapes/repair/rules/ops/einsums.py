"""``torch.einsum``: letters that stand for two sizes, or match no dimension."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

from torchdebug_magics.format import shape
from torchdebug_magics.instruments.shapes.repair.around import rewritten
from torchdebug_magics.instruments.shapes.repair.edit import Edit, parameter_edit
from torchdebug_magics.instruments.shapes.repair.rules.rule_parts import Diagnosis, named, orders, producer_edits, turned
from torchdebug_magics.instruments.shapes.repair.size_history import came_from

if TYPE_CHECKING:
    from torchdebug_magics.instruments.shapes.repair.failure_facts import Facts, Operand

__all__ = ["einsum"]


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
