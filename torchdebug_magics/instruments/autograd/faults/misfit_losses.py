"""What a loss expects of its input, and what it is given: logits, log-probabilities, numbers near the targets, tensors of one shape."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Iterator

from torchdebug_magics.format import number
from torchdebug_magics.instruments.autograd.faults.watched import TrainingFacts
from torchdebug_magics.instruments.autograd.report import AutogradFinding
from torchdebug_magics.instruments.autograd.source_readings import calls_of, finding, sequential_at, statement_at
from torchdebug_magics.instruments.autograd.tape import DISTANCES, RecordedOp, walk
from torchdebug_magics.probing.source.edited_source import exchanging
from torchdebug_magics.probing.source.syntax import as_atom, called, dotted, expression, last_name, nodes
from torchdebug_magics.probing.tensors import RANGES
from torchdebug_magics.report import Edit

_OF_LOGITS = {
    "_log_softmax": ("cross_entropy", "_softmax"),
    "binary_cross_entropy_with_logits": ("binary_cross_entropy_with_logits", "sigmoid"),
}
"""(the loss, what it applies itself) by the first op of losses that expect logits."""
_PASSES_ON = frozenset([
    "view", "_unsafe_view", "transpose", "permute", "t", "squeeze", "unsqueeze", "reshape", "clone", "slice", "select", "index",
    "index_select", "masked_select", "alias", "_to_copy",
])  # fmt: skip
_NOISE = 0.25
"""Share of the targets' span by which some may lie outside."""
_LIBRARIES = frozenset({"torch", "F", "functional", "nn"})
_WITH_LOGARITHM = {"softmax": "log_softmax", "Softmax": "LogSoftmax"}
_OF_LOGITS_TOO = {"nll_loss": "cross_entropy", "NLLLoss": "CrossEntropyLoss"}
_UNEQUAL = {
    "binary_cross_entropy": ("binary_cross_entropy", "BCELoss"),
    "binary_cross_entropy_with_logits": ("binary_cross_entropy_with_logits", "BCEWithLogitsLoss"),
    "_log_softmax": ("cross_entropy", "CrossEntropyLoss"),
}
"""(function, module), by the first op, of losses whose two arguments mean different things."""
_MOST_VIEWS = 32
"""One behind the other; a tensor that is written in a loop is a view of itself as often as it is written."""
_DIVERGENCE = "kl_div", "KLDivLoss"
_BYTE = 255
_FAR = 2
"""Targets up to here are probabilities with noise; below 0, they mostly stand for what is left out."""
_RECURRENT = frozenset({"LSTM", "GRU", "RNN"})
_OF_PROBABILITIES = frozenset({"binary_cross_entropy", "binary_cross_entropy_with_logits"})


def misfit_losses(facts: TrainingFacts) -> Iterator[AutogradFinding]:
    """The first loss that is given what it does not expect."""
    for op in facts.tape.ops:
        if not op.is_forward or not op.makes:
            continue
        span = op.target_span
        far = span if span is not None and span[0] >= 0 and span[1] >= _FAR else None
        is_reduced = not op.makes[0].shape  # else what becomes of each value is not known
        is_loss = op.name != "_log_softmax" or any(later.name.startswith("nll_loss") for later in facts.consumers.get(op.index, ()))
        may_limit = op.name in _OF_LOGITS or op.name.startswith("nll_loss") or (span is not None and op.name in DISTANCES)
        maker = _limiting(op) if may_limit else None
        if (names := _UNEQUAL.get(op.name)) is not None and _is_called(op, names) and _has_learned_target(facts, op):
            yield _swapped(op, names)
        elif op.name == "xlogy" and _is_called(op, _DIVERGENCE) and (softmax := _softmax_beside(facts, op)) is not None:
            yield _of_logarithms(op, softmax, "kl_div")
        elif op.name in _OF_LOGITS and maker is not None and (is_loss or maker.name == "_softmax"):
            yield _of_logits(op, maker)
        elif is_reduced and op.name.startswith("nll_loss") and op.note in {"takes probabilities", "takes logits"}:
            yield _of_logarithms(op, maker if op.note == "takes probabilities" else None, "nll_loss")
        elif is_reduced and far is not None and op.name in _OF_PROBABILITIES and len(op.reads) == 2:  # noqa: PLR2004 - no weight
            yield _of_other_targets(op, far)
        elif is_reduced and span is not None and maker is not None and not _reaches(maker, span):
            yield _of_distance(op, maker, span)
        else:
            continue
        return


def unaligned_targets(facts: TrainingFacts) -> Iterator[AutogradFinding]:
    """Targets of more letters than the model returns frames."""
    losses = [op for op in facts.tape.ops if op.name == "_ctc_loss" and op.is_forward]
    op = next((op for op in losses if op.note), None)
    if op is not None and 2 * len([op for op in losses if op.note]) > len(losses):
        yield finding(
            "loss_input",
            "`ctc_loss` gets fewer frames than the targets have letters: they have no alignment",
            op.where,
            "let the model return a frame for each letter at least, and one between equal letters: by smaller strides, or longer inputs",
            op="ctc_loss",
            explanation="the loss of such a sample is infinite; with `zero_infinity=True` it is 0, and nothing is learned from it",
        )


def _limiting(op: RecordedOp) -> RecordedOp | None:
    """The activation whose output a loss receives; of an input whose rows sum to one, the nearest softmax upstream."""
    maker = _before_views(next(iter(op.parents), None))
    if op.note == "takes probabilities" and (maker is None or maker.name != "_softmax"):
        maker = next((each for each in walk(op.parents, lambda later: later.parents) if each.name == "_softmax"), None)
    is_limited = maker is not None and (_limits(maker) is not None if op.name in DISTANCES else maker.name.removeprefix("_") in RANGES)
    return maker if is_limited and maker is not None and any(use.requires_grad for use in maker.reads) else None


def _limits(maker: RecordedOp) -> tuple[float, float] | None:
    """Between what an activation keeps its results, or a recurrent layer its state, a product of a sigmoid and a tanh."""
    return (-1.0, 1.0) if maker.module_type in _RECURRENT else RANGES.get(maker.name.removeprefix("_"))


def _reaches(maker: RecordedOp, span: tuple[float, float]) -> bool:
    (low, high), rest = _limits(maker) or span, _NOISE * (span[1] - span[0])
    return low - rest <= span[0] and span[1] <= high + rest


def _before_views(maker: RecordedOp | None, *others: str) -> RecordedOp | None:
    """The op whose numbers are passed on, seen through views and `others`."""
    for _ in range(_MOST_VIEWS):
        if maker is None or maker.name not in {*_PASSES_ON, *others}:
            break
        maker = next(iter(maker.parents), None)
    return maker


def _of_logits(op: RecordedOp, maker: RecordedOp) -> AutogradFinding:
    loss, applied = _OF_LOGITS[op.name]
    name, is_twice = maker.name.strip("_"), maker.name == applied
    is_mixed = is_twice and op.note == "takes probabilities" and not all(one is maker or one.name in _PASSES_ON for one in op.parents)
    logarithm = "replace `F.cross_entropy(probabilities, target)` with `F.nll_loss(probabilities.log(), target)`"
    reason = f"the second {name} makes all gradients small: the model learns slowly, and the loss cannot reach 0"
    return finding(
        "double_softmax" if is_twice else "loss_input",
        f"`{name}` is applied before `{loss}`, which {'applies it itself' if is_twice else 'expects logits of any size'}",
        maker.where,
        logarithm if is_mixed else f"remove {_described(maker)} and pass the logits to the loss",
        edits=() if is_mixed else _changed(maker, lambda _: None),
        op=name,
        saved_at=op.where,
        module=maker.module,
        explanation=reason if is_twice else f"{_limited(maker)}: with such logits, the loss cannot come near 0",
    )


def _of_logarithms(op: RecordedOp, softmax: RecordedOp | None, loss: str) -> AutogradFinding:
    """A loss of log-probabilities that is given the result of a softmax; of other numbers, where that is None."""
    where = op.where
    if softmax is not None:
        edits, where = _changed(softmax, lambda call: _renamed(call, _WITH_LOGARITHM)), softmax.where
    else:
        made = calls_of(op, _OF_LOGITS_TOO)
        edits = exchanging(made[0][0], made[0][1], _renamed(made[0][1], _OF_LOGITS_TOO)) if len(made) == 1 else ()
    to = "-1" if loss == "nll_loss" else "below 0"
    return finding(
        "loss_input",
        f"`{loss}` expects log-probabilities, and is given {'probabilities' if softmax is not None else 'logits'}",
        where,
        "use `log_softmax` in place of `softmax`" if softmax is not None else "use `cross_entropy`, which takes logits",
        edits=edits,
        op=loss,
        saved_at=op.where if where is not op.where else None,
        module=softmax.module if softmax is not None else None,
        explanation="it takes the number of the right class as it is: the loss "
        + (f"goes down to {to}, and its gradients are small" if softmax is not None else "falls below 0, and has no least value"),
    )


def _is_called(op: RecordedOp, names: tuple[str, str]) -> bool:
    """Whether an op runs in this function, or module, of PyTorch's."""
    return op.module_type == names[1] or any(called(call) == names[0] for call in nodes(ast.Call, statement_at(op.where)))


def _has_learned_target(facts: TrainingFacts, op: RecordedOp) -> bool:
    """Whether it is the target of a loss that is computed from parameters, and not the input."""
    is_computed = any(use is op.reads[0] and maker.root for use, maker in op.sources) if op.reads else False
    if not op.reads or op.reads[0].requires_grad or is_computed:  # what another model gives may be meant
        return False
    if op.name != "_log_softmax":
        return len(op.reads) > 1 and op.reads[1].requires_grad
    products = [later for later in facts.consumers.get(op.index, ()) if later.name == "mul"]
    return any(use.requires_grad for later in products for use in later.reads)


def _swapped(op: RecordedOp, names: tuple[str, str]) -> AutogradFinding:
    calls_here = [call for call in nodes(ast.Call, statement_at(op.where)) if len(call.args) > 1]
    named = [call for call in calls_here if called(call) == names[0]] or calls_here
    call = named[0] if len(named) == 1 else None
    turned = None if call is None else ast.Call(call.func, [call.args[1], call.args[0], *call.args[2:]], call.keywords)
    return finding(
        "loss_input",
        f"`{names[0]}` is given the target first, and the output of the model second",
        op.where,
        f"write `{ast.unparse(turned)}`" if turned is not None else "exchange its two arguments",
        edits=() if call is None or turned is None else exchanging(op.where, call, turned),
        op=names[0],
        explanation="what is given first is taken for the scores: such a loss has no least value at the right answer",
    )


def _softmax_beside(facts: TrainingFacts, op: RecordedOp) -> RecordedOp | None:
    """The softmax whose result is subtracted from an entropy, in the place of its logarithm."""
    subtracting = next((later for later in facts.consumers.get(op.index, ()) if later.name == "sub"), None)
    targets = {use.memory for use in op.reads}
    for product in subtracting.parents if subtracting is not None else ():
        for use, parent in product.sources if product.name == "mul" else ():
            if use.memory in targets:
                continue
            maker = _before_views(parent)
            if maker is not None and maker.name == "_softmax" and any(read.requires_grad for read in maker.reads):
                return maker
    return None


def _of_distance(op: RecordedOp, maker: RecordedOp, span: tuple[float, float]) -> AutogradFinding:
    is_cell, kind = maker.module_type in _RECURRENT, maker.module_type
    return finding(
        "loss_input",
        f"the targets go from {number(span[0])} to {number(span[1])}, and `{maker.module if is_cell else maker.name.strip('_')}` "
        + _limited(maker),
        maker.where,
        f"put a linear layer between the {kind} and the loss"
        if is_cell
        else f"remove {_described(maker)} before `{op.name}`, or scale the targets",
        edits=_changed(maker, lambda _: None),
        op=maker.name.strip("_"),
        saved_at=op.where,
        module=maker.module,
        explanation="the model cannot reach targets that lie outside",
    )


def _of_other_targets(op: RecordedOp, span: tuple[float, float]) -> AutogradFinding:
    """Targets of a binary cross entropy that are no probabilities: masks as pictures store them, or -1 and 1."""
    names, (low, high) = _UNEQUAL[op.name], span
    value = getattr(statement_at(op.where), "value", None)
    target = value.args[1] if isinstance(value, ast.Call) and len(value.args) > 1 else None
    form = "{} / 255" if high == _BYTE else "({} > 0).float()"
    return finding(
        "loss_input",
        f"`{names[0]}` takes targets from 0 to 1, and gets them from {number(low)} to {number(high)}",
        op.where,
        "scale the targets to 0 and 1: divide a mask by 255, or compare it with 0",
        edits=() if target is None else exchanging(op.where, target, expression(form.format(as_atom(target)))),
        op=op,
        explanation="beyond these, the loss has no least value: it falls below 0, and goes on falling",
    )


def _limited(maker: RecordedOp) -> str:
    low, high = _limits(maker) or (-math.inf, math.inf)
    return f"gives no number below {low:g}" if high == math.inf else f"gives numbers from {low:g} to {high:g}"


def _described(maker: RecordedOp) -> str:
    return f"module `{maker.module}` ({maker.module_type})" if _is_module(maker) else f"the {maker.name.strip('_')}"


def _is_module(maker: RecordedOp) -> bool:
    return maker.module_type.lower().removesuffix("2d") == maker.name.strip("_")


def _changed(maker: RecordedOp, change: Callable[[ast.Call], ast.expr | None]) -> tuple[Edit, ...]:
    """The activation exchanged where it is called, or where it is made, in an ``nn.Sequential`` or as an attribute; None removes it."""
    leaf = (maker.module or "").rpartition(".")[2] if _is_module(maker) else ""
    names = {maker.name.strip("_"), maker.name, leaf} - {""}
    here = [call for call in nodes(ast.Call, statement_at(maker.where)) if called(call) in names]
    if leaf.isdigit():
        for where, layers in sequential_at("" if maker.line is None else maker.line.file, int(leaf), maker.module_type):
            new = change(layers.args[int(leaf)])  # type: ignore[arg-type]  # a call of that class
            args = [*layers.args[: int(leaf)], *([] if new is None else [new]), *layers.args[int(leaf) + 1 :]]
            return exchanging(where, layers, ast.Call(layers.func, args, layers.keywords))
    elif len(here) == 1:
        return exchanging(maker.where, here[0], change(here[0]) or _argument(here[0]))
    return ()


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
