"""``double_softmax``, and models that train in evaluation mode or are evaluated in training mode."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from torchdebug_magics.format import listed
from torchdebug_magics.instruments.autograd.report import Finding
from torchdebug_magics.probing.where import excerpt

if TYPE_CHECKING:
    from torchdebug_magics.instruments.autograd.course import Course
    from torchdebug_magics.instruments.autograd.recording.tape import RecordedOp, Tape
    from torchdebug_magics.instruments.autograd.silences.watched import Watched
    from torchdebug_magics.report import Location

__all__ = ["double_softmax", "wrong_modes"]

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


def double_softmax(_watched: Watched, tape: Tape, _course: Course) -> list[Finding]:
    """A softmax whose output goes into the loss that takes another one."""
    for op in tape.ops:
        if op.in_backward or op.name not in {"_log_softmax", "binary_cross_entropy_with_logits"} or not op.reads:
            continue
        maker = tape.maker(op.reads[0], op.index)
        while maker is not None and maker.name in _PASSES_ON and maker.reads:
            maker = tape.maker(maker.reads[0], maker.index)
        wanted = "_softmax" if op.name == "_log_softmax" else "sigmoid"
        if maker is None or maker.name != wanted or not any(use.requires_grad for use in maker.reads):
            continue
        where = maker.line.location if maker.line is not None else None
        first, loss = ("softmax", "cross_entropy") if wanted == "_softmax" else ("sigmoid", "binary_cross_entropy_with_logits")
        target = (
            f"module `{maker.module}` ({maker.module_type})" if maker.module_type in {"Softmax", "Softmax2d", "Sigmoid"} else f"the {first}"
        )
        return [
            Finding(
                kind="double_softmax",
                raised=False,
                headline=f"`{first}` is applied before `{loss}`, which applies it itself",
                location=where,
                op=first,
                saved_at=op.line.location if op.line is not None else None,
                module=maker.module,
                fix=f"remove {target} and give the loss the logits",
                explanation="the gradient of the second one is small everywhere, so the model learns slowly and the loss has a floor",
                excerpt=excerpt(where) if where is not None else (),
            )
        ]
    return []


def wrong_modes(watched: Watched, tape: Tape, _course: Course) -> list[Finding]:
    """Hints: BatchNorm or Dropout in the other mode than the call is for."""
    updated = {
        id(one)
        for seen in watched.steps
        if (optimizer := seen.optimizer()) is not None
        for group in optimizer.param_groups
        for one in group["params"]
    }
    found: list[Finding] = []
    for (_, with_gradients, training), seen in watched.recorder.root_calls.items():
        root = seen.root()
        if root is None or not seen.modes or not any(id(one) in updated and one.requires_grad for one in root.parameters()):
            continue
        where = _call_line(seen.op)
        name = seen.name
        if (
            with_gradients
            and not training
            and not any(part.training for part in root.modules())
            and not _is_also_trained(watched, seen.root)
        ):
            found.append(
                _hint(
                    "train_in_eval_mode", f"`{name}` is trained in evaluation mode", where, f"`{name}.train()` before the loop", seen.modes
                )
            )
        if not with_gradients and training and not _feeds_a_loss(tape, seen.op, id(root)):
            found.append(
                _hint(
                    "eval_in_train_mode",
                    f"`{name}` is evaluated in training mode",
                    where,
                    f"`{name}.eval()` before `{_source(where)}`",
                    seen.modes,
                )
            )
    return found


def _is_also_trained(watched: Watched, root: object) -> bool:
    """Whether the same model is called in training mode with gradients, too."""
    return any(
        seen.root == root and with_gradients and training for (_, with_gradients, training), seen in watched.recorder.root_calls.items()
    )


def _hint(kind: str, headline: str, where: Location | None, fix: str, modes: tuple[str, ...]) -> Finding:
    return Finding(
        kind=kind,  # type: ignore[arg-type]
        raised=False,
        headline=f"{headline}: {listed(modes)}",
        location=where,
        fix=fix,
        explanation="Dropout is off and BatchNorm uses its running statistics"
        if kind == "train_in_eval_mode"
        else "Dropout is on and BatchNorm uses and changes its statistics",
        is_hint=True,
        excerpt=excerpt(where) if where is not None else (),
    )


def _call_line(op: RecordedOp) -> Location | None:
    """The user's line from outside the model: the outermost call that is no method of a module."""
    outside = [line for line in op.calls if line.function != "forward"]
    line = outside[0] if outside else op.line
    return line.location if line is not None else None


def _source(where: Location | None) -> str:
    return where.source if where is not None else "the call"


def _feeds_a_loss(tape: Tape, first: RecordedOp, _root: int) -> bool:
    """Whether what was computed from there goes into an op that has a graph: as the samples of a GAN's generator do."""
    todo, seen = deque([first]), {first.index}
    while todo and len(seen) < _MOST_OPS:
        op = todo.popleft()
        made = {use.tensor for use in op.makes}
        for later in tape.since(op.index + 1):
            if later.index not in seen and any(use.tensor in made for use in later.reads):
                if later.grad_enabled and any(use.requires_grad for use in later.reads):
                    return True
                seen.add(later.index)
                todo.append(later)
    return False
