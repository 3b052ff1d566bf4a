"""Dtypes and devices that do not go together."""

from __future__ import annotations

import ast
import re

import torch

from torchdebug_magics.instruments.shapes.follow.forward import real_error
from torchdebug_magics.instruments.shapes.follow.seen import Failed
from torchdebug_magics.instruments.shapes.repair.edit import OpEdit, Repair, as_written, at_tensor, method, on_operand
from torchdebug_magics.instruments.shapes.repair.failure_facts import FailureFacts
from torchdebug_magics.instruments.shapes.repair.rules.rule_parts import Diagnosis, named, short_dtype, told
from torchdebug_magics.instruments.shapes.repair.size_history import steps
from torchdebug_magics.probing.safety import quiet

_CASTS = {getattr(torch, name): name for name in ("float", "half", "double", "bfloat16", "long", "bool", "int")}
_WORDS_FOR = {torch.int64: "an integer", torch.float32: "floating point", torch.bool: "a mask of bool"}
_MINUS = frozenset(["sub", "__sub__", "rsub", "__rsub__", "subtract"])
_WORDS = re.compile(
    r"dtype|scalar type|data type|Input type|same type|Expected .*Tensor|should be the same|not implemented for|Half|BFloat16|"
    r"must be .*(Long|Int|Bool|Float)|bool|LongTensor"
)


def dtype(facts: FailureFacts) -> Diagnosis | None:
    """The op says that a dtype is wrong."""
    if facts.op is None or not facts.operands or not _WORDS.search(facts.text):
        return None
    if facts.op in _MINUS and "bool" in facts.text:
        return _inverted(facts)
    is_mask = "bool" in facts.text  # as numbers a mask would be added to the scores, and mask nothing
    if is_mask and (cause := _alone(facts, torch.bool)) is not None:
        return cause
    return _unlike(facts) if len({operand.tensor.dtype for operand in facts.operands}) > 1 else _alone(facts)


def _unlike(facts: FailureFacts) -> Diagnosis | None:
    """Operands of several dtypes."""
    assert facts.op is not None
    owned = next((operand for operand in facts.operands if operand.owned), None)
    odd = [(at, x) for at, x in enumerate(facts.operands) if not x.owned and (owned is None or x.tensor.dtype != owned.tensor.dtype)]
    if owned is not None and odd:
        at, given = odd[0]
        sentence = f"{facts.who} has {short_dtype(owned)} weights, gets {named(given, 'an input')} in {short_dtype(given)}"
        edits = [edit for at, _ in odd[:1] for edit in cast(facts, at, owned.tensor.dtype, rank=2)]
        if given.tensor.is_complex() and owned.tensor.is_floating_point() and any(step.op == "stft" for step in steps(given.made)):
            edits += on_operand(facts, at, method("abs"), rank=4, why="the magnitude, without the phase")
        return Diagnosis(sentence, tuple(edits), given)
    floats = [operand for operand in facts.operands if operand.tensor.is_floating_point()]
    meant = floats if len({x.tensor.dtype for x in floats}) > 1 else facts.operands  # the others are indices
    kinds = {x.tensor.dtype for x in meant}
    dtypes = ", ".join(f"{named(x, 'an operand')} in {short_dtype(x)}" for x in meant)
    edits = []
    for at, unlike in enumerate(facts.operands):
        for kind in sorted(kinds - {unlike.tensor.dtype} if unlike in meant else (), key=lambda kind: -kind.itemsize):
            edits += cast(facts, at, kind, rank=4 if kind.is_floating_point else 9)
    return Diagnosis(f"`{facts.op.strip('_')}` expects one dtype, gets {dtypes}", tuple(edits), facts.operands[0])


def _inverted(facts: FailureFacts) -> Diagnosis | None:
    """``1 - mask`` of a mask of bool."""
    site = facts.site
    written = site.expression if site is not None and facts.direct else None
    mask = facts.operands[0]
    if site is None or not isinstance(written, ast.BinOp) or mask.tensor.dtype is not torch.bool or facts.op is None:
        return None
    text = f"`{site.text}` subtracts from a mask of bool"
    if len(facts.operands) > 1 or ast.unparse(written.left) not in {"1", "1.0", "True"}:
        return Diagnosis(text, tuple(cast(facts, 0, torch.float32, rank=5)), mask)
    inner = ast.unparse(ast.UnaryOp(ast.Invert(), written.right))
    run = OpEdit(site, facts.op, lambda _, args, __: ~next(argument for argument in args if isinstance(argument, torch.Tensor)))
    edits = [Repair(inner, "the inverse of the mask", 2, ops=(run,)), *cast(facts, 0, torch.float32, rank=8)]
    return Diagnosis(f"{text}: `~` inverts it", tuple(edits), mask)


def _alone(facts: FailureFacts, meant: torch.dtype | None = None) -> Diagnosis | None:
    """The operand with whose cast the op runs."""
    if (facts.op or "").strip("_") in {"getitem", "setitem"}:
        return None  # see `subscripts`
    for at, operand in reversed([*enumerate(facts.operands)]):  # what is written to, or looked up in, is the first
        to = meant or (torch.int64 if operand.tensor.is_floating_point() else torch.float32)
        if not operand.owned and _runs(facts, at, to):
            op = (facts.op or "").strip("_")
            sentence = f"`{op}` expects {_WORDS_FOR[to]}, gets {named(operand, 'its input')} in {short_dtype(operand)}"
            return Diagnosis(sentence, tuple(cast(facts, at, to, rank=2)), operand)
    return None


def _runs(facts: FailureFacts, at: int, to: torch.dtype) -> bool:
    """Whether the op takes its operands with this one cast; asked of zeros: fakes take what it has no kernel for."""
    args, kwargs = at_tensor(at, lambda tensor: tensor.to(to), facts.args, facts.kwargs)
    failed = Failed(facts.func, facts.op or "", None, 0, args, dict(kwargs), (), (), facts.error)
    with quiet():
        return real_error(failed) == (True, None)


def stored(facts: FailureFacts) -> Diagnosis | None:
    """The result of an op in place does not fit into what it is written to; out of place, it has a dtype of its own."""
    site = facts.site
    node = site.expression if site is not None and facts.direct else None
    if site is None or facts.op is None or not facts.op.endswith("_") or "be cast to" not in facts.text:
        return None
    if isinstance(node, ast.AugAssign):
        target, value = ast.unparse(node.target), ast.unparse(ast.BinOp(node.target, node.op, node.value))
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and isinstance(site.statement, ast.Expr):
        outer = ast.Attribute(node.func.value, node.func.attr.removesuffix("_"), ast.Load())
        target, value = ast.unparse(node.func.value), ast.unparse(ast.Call(outer, node.args, node.keywords))
    else:
        return None
    x, name = facts.operands[0], facts.op.strip("_")
    run = OpEdit(site, facts.op, lambda _, args, kwargs: getattr(torch.Tensor, name)(*args, **kwargs))
    sentence = f"{facts.written} computes floating point, and {named(x, 'its target')} is {short_dtype(x)}"
    edits = [Repair(f"{target} = {value}", "a new tensor, in floating point", 2, ops=(run,))]
    return Diagnosis(sentence, tuple(edits), x)


def cast(facts: FailureFacts, at: int, to: torch.dtype, *, rank: int) -> list[Repair]:
    """The operand in that dtype, where it is taken."""
    if to not in _CASTS or facts.operands[at].tensor.is_complex():  # it would throw the imaginary part away
        return []
    return on_operand(facts, at, method(_CASTS[to]), rank=rank)


def device(facts: FailureFacts) -> Diagnosis | None:
    """Operands on several devices."""
    if facts.op is None or "device" not in facts.text:
        return None
    places = {operand.tensor.device for operand in facts.operands if operand.sizes}
    if len(places) < 2:
        return None
    owned = next((operand for operand in facts.operands if operand.owned), None)
    if (nowhere := next((operand for operand in facts.operands if operand.tensor.device.type == "meta"), None)) is not None:
        others = " and ".join(sorted(str(place) for place in places if place.type != "meta"))
        room = f"; `to_empty(device={others!r})` allocates them" if nowhere.owned else ""
        op = facts.op.strip("_")
        sentence = f"`{op}` gets {named(nowhere, 'a tensor')} on meta, without data, and others on {others}{room}"
        return Diagnosis(sentence, (), nowhere)
    home = owned.tensor.device if owned is not None else next((place for place in sorted(places, key=str) if place.type != "cpu"), None)
    at, odd = next((at, operand) for at, operand in enumerate(facts.operands) if operand.tensor.device != home and operand.sizes)
    where = f"its weights on {home}" if owned is not None else f"a tensor on {home}"
    sentence = f"{facts.who} has {where}, and {named(odd, 'its input')} is on {odd.tensor.device}"
    change = as_written(f"{{0}}.to({str(home)!r})")
    return Diagnosis(sentence, tuple(on_operand(facts, at, change, rank=2)), odd)


def written(facts: FailureFacts) -> Diagnosis | None:
    """An op in place writes into what `expand` has left."""
    if "more than one element of the written-to tensor" not in facts.text or not facts.operands:
        return None
    x = facts.operands[0]
    sentence = f"{facts.written} writes into {told(x)}, an expanded tensor whose rows share memory: call `.clone()` first"
    is_named = facts.site is not None and isinstance(facts.site.expression, ast.AugAssign)  # it stands for the copy then
    edits = on_operand(facts, 0, method("clone"), rank=2, why="separate rows") if is_named else []
    return Diagnosis(sentence, tuple(edits), x)
