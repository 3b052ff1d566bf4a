"""``double_softmax``, and models that train in evaluation mode or are evaluated in training mode."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from torchdebug_magics.format import listed
from torchdebug_magics.instruments.autograd.report import AutogradFinding, Kind
from torchdebug_magics.instruments.autograd.training_course import Backward, Step
from torchdebug_magics.probing.where import excerpt
from torchdebug_magics.report import Location

if TYPE_CHECKING:
    from torchdebug_magics.instruments.autograd.silences.watched import Alive, Watched
    from torchdebug_magics.instruments.autograd.tape import RecordedOp, Tape


_PASSES_ON = frozenset(
    {
        "view",
        "_unsafe_view",
        "transpose",
        "permute",
        "t",
        "squeeze",
        "unsqueeze",
        "reshape",
        "clone",
        "slice",
        "select",
        "alias",
        "_to_copy",
    }
)
_MOST_OPS = 5_000


def double_softmax(watched: Watched, _alive: Alive) -> list[AutogradFinding]:
    """Finds probabilities passed to a loss that applies softmax or sigmoid itself."""
    for op in watched.recorder.tape.ops:
        if op.in_backward or op.name not in {"_log_softmax", "binary_cross_entropy_with_logits"} or not op.reads:
            continue
        maker = _made_by(op)
        if maker is not None:
            return [_twice(op, maker)]
    return []


def _made_by(op: RecordedOp) -> RecordedOp | None:
    """The softmax or sigmoid whose output an op receives; for an input whose rows sum to one, the nearest softmax upstream."""
    wanted = "_softmax" if op.name == "_log_softmax" else "sigmoid"
    maker = next(iter(op.parents), None)
    while maker is not None and maker.name in _PASSES_ON:
        maker = next(iter(maker.parents), None)
    todo, seen = deque(op.parents if op.note == "takes probabilities" else ()), set[int]()
    while todo and (maker is None or maker.name != wanted):
        maker = todo.popleft()
        todo.extend(one for one in maker.parents if one.index not in seen)
        seen.add(maker.index)
    return maker if maker is not None and maker.name == wanted and any(use.requires_grad for use in maker.reads) else None


def _twice(op: RecordedOp, maker: RecordedOp) -> AutogradFinding:
    where = maker.line.location if maker.line is not None else None
    first, loss = ("softmax", "cross_entropy") if op.name == "_log_softmax" else ("sigmoid", "binary_cross_entropy_with_logits")
    target = (
        f"module `{maker.module}` ({maker.module_type})" if maker.module_type in {"Softmax", "Softmax2d", "Sigmoid"} else f"the {first}"
    )
    is_direct = op.note != "takes probabilities" or all(one is maker or one.name in _PASSES_ON for one in op.parents)
    return AutogradFinding(
        kind="double_softmax",
        raised=False,
        headline=f"`{first}` is applied before `{loss}`, which applies it itself",
        location=where,
        op=first,
        saved_at=op.line.location if op.line is not None else None,
        module=maker.module,
        fix=f"remove {target} and pass the logits to the loss"
        if is_direct
        else "replace `F.cross_entropy(probabilities, target)` with `F.nll_loss(probabilities.log(), target)`",
        explanation=f"the second {first} makes all gradients small: the model learns slowly, and the loss cannot reach 0",
        excerpt=excerpt(where) if where is not None else (),
    )


def wrong_modes(watched: Watched, _alive: Alive) -> list[AutogradFinding]:
    """Hints at BatchNorm or Dropout in training mode during evaluation, or the reverse."""
    tape, updated = watched.recorder.tape, watched.updated()
    found = [_trained_in_eval_mode(watched)]
    for (_, with_gradients, training), seen in watched.recorder.root_calls.items():
        if not with_gradients and training and seen.modes and seen.parameters & updated and not _feeds_a_loss(tape, seen.op):
            where = _call_line(seen.op)
            fix = f"call `{seen.name}.eval()` before `{_source(where)}`"
            found.append(_hint("eval_in_train_mode", f"`{seen.name}` is evaluated in training mode", where, fix, seen.modes))
    return [one for one in found if one is not None]


def _trained_in_eval_mode(watched: Watched) -> AutogradFinding | None:
    """A model whose last backward pass before an update came from a forward in evaluation mode."""
    ops = {op.index: op for op in watched.recorder.tape.ops}
    events = watched.course.events
    for place, step in enumerate(events):
        if not isinstance(step, Step) or not step.is_recorded or not step.nonzero_count:
            continue
        passed = [one for one in events[:place] if isinstance(one, Backward) and one.leaves & step.parameters]
        for (root, _, training), seen in watched.recorder.root_calls.items():
            if training or not seen.modes or not seen.parameters & step.parameters or not passed:
                continue
            of_root = [ops[index] for index in sorted(passed[-1].ops) if index in ops and ops[index].root == root]
            if of_root and not any(op.training for op in of_root):
                where = _call_line(of_root[0])
                return _hint(
                    "train_in_eval_mode",
                    f"`{seen.name}` is trained in evaluation mode",
                    where,
                    f"call `{seen.name}.train()` before the loop",
                    seen.modes,
                )
    return None


def _hint(kind: Kind, headline: str, where: Location | None, fix: str, modes: tuple[str, ...]) -> AutogradFinding:
    return AutogradFinding(
        kind=kind,
        raised=False,
        headline=headline,
        location=where,
        fix=fix,
        explanation=(
            "Dropout is off and BatchNorm uses its running statistics"
            if kind == "train_in_eval_mode"
            else "Dropout is on, and BatchNorm uses the batch's statistics and updates its running ones"
        )
        + f": {listed(modes)}",
        is_hint=True,
        excerpt=excerpt(where) if where is not None else (),
    )


def _call_line(op: RecordedOp) -> Location | None:
    """The user's line outside the model: the outermost call that is not a `forward`."""
    outside = [line for line in op.calls if line.function != "forward"]
    line = outside[0] if outside else op.line
    return line.location if line is not None else None


def _source(where: Location | None) -> str:
    return where.source if where is not None else "the call"


def _feeds_a_loss(tape: Tape, first: RecordedOp) -> bool:
    """Whether an op with a graph uses the result, as with the samples of a GAN's generator."""
    consumers, todo, seen = tape.consumers(), deque([first]), {first.index}
    while todo and len(seen) < _MOST_OPS:
        for later in consumers.get(todo.popleft().index, ()):
            if later.grad_enabled and any(use.requires_grad for use in later.reads):
                return True
            if later.index not in seen:
                seen.add(later.index)
                todo.append(later)
    return False
