"""What a loss expects of its input, and what the op that made it can give: logits, log-probabilities, numbers near the targets."""

from __future__ import annotations

import ast
import math
from collections import deque
from collections.abc import Callable, Iterator

from torchdebug_magics.format import number
from torchdebug_magics.instruments.autograd.faults.watched import TrainingFacts
from torchdebug_magics.instruments.autograd.report import AutogradFinding
from torchdebug_magics.instruments.autograd.source_readings import finding, sequential_at, statement_at
from torchdebug_magics.instruments.autograd.tape import RecordedOp
from torchdebug_magics.probing.source.edited_source import calls, exchanging
from torchdebug_magics.probing.source.syntax import called, dotted, last_name, nodes
from torchdebug_magics.probing.tensors import RANGES
from torchdebug_magics.report import Edit, Location

_OF_LOGITS = {
    "_log_softmax": ("cross_entropy", "_softmax"),
    "binary_cross_entropy_with_logits": ("binary_cross_entropy_with_logits", "sigmoid"),
}
"""(the loss, what it applies itself) by the first op of losses that expect logits."""
_PASSES_ON = frozenset(
    "view _unsafe_view transpose permute t squeeze unsqueeze reshape clone slice select alias _to_copy".split()  # noqa: SIM905
)
_NOISE = 0.25
"""Share of the targets' span by which some may lie outside."""
_LIBRARIES = frozenset({"torch", "F", "functional", "nn"})
_WITH_LOGARITHM = {"softmax": "log_softmax", "Softmax": "LogSoftmax"}
_OF_LOGITS_TOO = {"nll_loss": "cross_entropy", "NLLLoss": "CrossEntropyLoss"}


def misfit_losses(facts: TrainingFacts) -> Iterator[AutogradFinding]:
    """The first loss that is given what it does not expect."""
    consumers = facts.tape.consumers()
    for op in facts.tape.ops:
        if not op.is_forward or not op.makes:
            continue
        is_reduced = not op.makes[0].shape  # else what becomes of each value is not known
        is_loss = op.name != "_log_softmax" or any(later.name.startswith("nll_loss") for later in consumers.get(op.index, ()))
        maker = _limiting(op)
        if op.name in _OF_LOGITS and maker is not None and (is_loss or maker.name == "_softmax"):
            yield _of_logits(op, maker)
        elif is_reduced and op.name.startswith("nll_loss") and op.note in {"takes probabilities", "takes logits"}:
            yield _of_logarithms(op, maker)
        elif is_reduced and maker is not None and op.target_span is not None and not _is_within(op.target_span, maker):
            yield _of_distance(op, maker, op.target_span)
        else:
            continue
        return


def _limiting(op: RecordedOp) -> RecordedOp | None:
    """The activation whose output a loss receives; of an input whose rows sum to one, the nearest softmax upstream."""
    maker = next(iter(op.parents), None)
    while maker is not None and maker.name in _PASSES_ON:
        maker = next(iter(maker.parents), None)
    todo, seen = deque(op.parents if op.note == "takes probabilities" else ()), set[int]()
    while todo and (maker is None or maker.name != "_softmax"):
        maker = todo.popleft()
        todo.extend(parent for parent in maker.parents if parent.index not in seen)
        seen.add(maker.index)
    return maker if maker is not None and maker.name.removeprefix("_") in RANGES and any(use.requires_grad for use in maker.reads) else None


def _of_logits(op: RecordedOp, maker: RecordedOp) -> AutogradFinding:
    loss, applied = _OF_LOGITS[op.name]
    name, is_twice = maker.name.strip("_"), maker.name == applied
    edits: tuple[Edit, ...] = ()
    if is_twice and op.note == "takes probabilities" and not all(parent is maker or parent.name in _PASSES_ON for parent in op.parents):
        fix = "replace `F.cross_entropy(probabilities, target)` with `F.nll_loss(probabilities.log(), target)`"
    else:
        fix, edits = _without(maker)
        fix = f"{fix} and pass the logits to the loss" if not edits else fix
    reason = f"the second {name} makes all gradients small: the model learns slowly, and the loss cannot reach 0"
    return finding(
        "double_softmax" if is_twice else "loss_input",
        f"`{name}` is applied before `{loss}`, which {'applies it itself' if is_twice else 'expects logits of any size'}",
        maker.where,
        fix,
        edits=edits,
        fix_state="compiles" if edits else "advice",
        op=name,
        saved_at=op.where,
        module=maker.module,
        explanation=reason if is_twice else f"{_range(maker)}: with such logits, the loss cannot come near 0",
    )


def _of_logarithms(op: RecordedOp, maker: RecordedOp | None) -> AutogradFinding:
    is_softmax, where = maker is not None and op.note == "takes probabilities", op.where
    if maker is not None and is_softmax:
        fix, edits = _changed(maker, lambda call: _renamed(call, _WITH_LOGARITHM))
        fix, where = fix or "use `log_softmax` in place of `softmax`", maker.where
    else:
        changes = (exchanging(where, call, _renamed(call, _OF_LOGITS_TOO)) for where, call in _loss_calls(op))
        edits = tuple(next(filter(None, changes), ()))
        fix = f"`{edits[0].new}`" if edits else "use `cross_entropy`, which takes logits"
    return finding(
        "loss_input",
        f"`nll_loss` expects log-probabilities, and is given {'probabilities' if is_softmax else 'logits'}",
        where,
        fix,
        edits=edits,
        fix_state="compiles" if edits else "advice",
        op="nll_loss",
        saved_at=op.where if where is not op.where else None,
        module=maker.module if maker is not None and is_softmax else None,
        explanation="it takes the number of the right class as it is: the loss "
        + ("goes down to -1, and its gradients are small" if is_softmax else "falls below 0, and has no least value"),
    )


def _of_distance(op: RecordedOp, maker: RecordedOp, span: tuple[float, float]) -> AutogradFinding:
    fix, edits = _without(maker)
    return finding(
        "loss_input",
        f"the targets go from {number(span[0])} to {number(span[1])}, and `{maker.name.strip('_')}` {_range(maker)}",
        maker.where,
        fix if edits else f"{fix} before `{op.name}`, or scale the targets",
        edits=edits,
        fix_state="compiles" if edits else "advice",
        op=maker.name.strip("_"),
        saved_at=op.where,
        module=maker.module,
        explanation="the model cannot reach targets that lie outside",
    )


def _is_within(span: tuple[float, float], maker: RecordedOp) -> bool:
    (low, high), rest = RANGES[maker.name.removeprefix("_")], _NOISE * (span[1] - span[0])
    return low - rest <= span[0] and span[1] <= high + rest


def _range(maker: RecordedOp) -> str:
    low, high = RANGES[maker.name.removeprefix("_")]
    return f"gives no number below {low:g}" if high == math.inf else f"gives numbers from {low:g} to {high:g}"


def _without(maker: RecordedOp) -> tuple[str, tuple[Edit, ...]]:
    """The statement without an activation; words where its text does not show it."""
    fix, edits = _changed(maker, lambda _: None)
    name = f"module `{maker.module}` ({maker.module_type})" if _is_module(maker) else f"the {maker.name.strip('_')}"
    return fix or f"remove {name}", edits


def _is_module(maker: RecordedOp) -> bool:
    return maker.module_type.lower().removesuffix("2d") == maker.name.strip("_")


def _changed(maker: RecordedOp, change: Callable[[ast.Call], ast.expr | None]) -> tuple[str, tuple[Edit, ...]]:
    """The activation exchanged where it is called, or where it is made, in an ``nn.Sequential`` or as an attribute; None removes it."""
    leaf = (maker.module or "").rpartition(".")[2] if _is_module(maker) else ""
    names = {maker.name.strip("_"), maker.name, leaf} - {""}
    here = [call for call in nodes(ast.Call, statement_at(maker.where)) if called(call) in names]
    edits: tuple[Edit, ...] = ()
    if leaf.isdigit():
        for where, layers in sequential_at("" if maker.line is None else maker.line.file, int(leaf), maker.module_type):
            new = change(layers.args[int(leaf)])  # type: ignore[arg-type]  # a call of that class
            args = [*layers.args[: int(leaf)], *([] if new is None else [new]), *layers.args[int(leaf) + 1 :]]
            edits = exchanging(where, layers, ast.Call(layers.func, args, layers.keywords))
            break
    elif len(here) == 1:
        new = change(here[0]) if called(here[0]) in _WITH_LOGARITHM else _argument(here[0]) if change(here[0]) is None else None
        edits = exchanging(maker.where, here[0], new) if new is not None else ()
    return f"`{edits[0].new}`" if edits else "", edits


def _argument(call: ast.Call) -> ast.expr | None:
    """What an activation is applied to: of a method of a tensor, the tensor."""
    is_method = isinstance(call.func, ast.Attribute) and last_name(call.func.value) not in _LIBRARIES and dotted(call.func.value) != "self"
    if is_method and isinstance(call.func, ast.Attribute):
        return call.func.value
    return call.args[0] if call.args else None


def _renamed(call: ast.Call, names: dict[str, str]) -> ast.Call | None:
    new = names.get(called(call))
    if new is None:
        return None
    function = ast.Attribute(call.func.value, new, ast.Load()) if isinstance(call.func, ast.Attribute) else ast.Name(new, ast.Load())
    return ast.Call(function, call.args, call.keywords)


def _loss_calls(op: RecordedOp) -> Iterator[tuple[Location, ast.Call]]:
    """The calls that compute a loss, or make its module."""
    if op.where is not None:
        here = [(op.where, call) for call in nodes(ast.Call, statement_at(op.where))]
        for name, made in (("nll_loss", here), ("NLLLoss", calls(op.where.file))):
            named = [(where, call) for where, call in made if called(call) == name]
            yield from named if len(named) == 1 else ()
