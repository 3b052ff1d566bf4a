"""``double_softmax``, and models that train in evaluation mode or are evaluated in training mode."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from torchdebug_magics.format import listed
from torchdebug_magics.instruments.autograd.faults.watched import Facts
from torchdebug_magics.instruments.autograd.report import AutogradFinding
from torchdebug_magics.instruments.autograd.source import finding
from torchdebug_magics.instruments.autograd.tape import Backward, RecordedOp, Step, Tape
from torchdebug_magics.report import Location

_PASSES_ON = frozenset(
    "view _unsafe_view transpose permute t squeeze unsqueeze reshape clone slice select alias _to_copy".split()  # noqa: SIM905
)
_MOST_OPS = 5_000


def double_softmax(facts: Facts) -> Iterator[AutogradFinding]:
    """Probabilities passed to a loss that applies softmax or sigmoid itself."""
    losses = (op for op in facts.tape.ops if op.name in {"_log_softmax", "binary_cross_entropy_with_logits"} and not op.in_backward)
    for op, maker in ((op, _maker(op)) for op in losses):
        if maker is None:
            continue
        first, loss = ("softmax", "cross_entropy") if op.name == "_log_softmax" else ("sigmoid", "binary_cross_entropy_with_logits")
        is_module = maker.module_type in {"Softmax", "Softmax2d", "Sigmoid"}
        fix = f"remove {f'module `{maker.module}` ({maker.module_type})' if is_module else f'the {first}'} and pass the logits to the loss"
        if op.note == "takes probabilities" and not all(one is maker or one.name in _PASSES_ON for one in op.parents):
            fix = "replace `F.cross_entropy(probabilities, target)` with `F.nll_loss(probabilities.log(), target)`"
        yield finding(
            "double_softmax",
            f"`{first}` is applied before `{loss}`, which applies it itself",
            maker.where,
            fix,
            op=first,
            saved_at=op.where,
            module=maker.module,
            explanation=f"the second {first} makes all gradients small: the model learns slowly, and the loss cannot reach 0",
        )
        return


def _maker(op: RecordedOp) -> RecordedOp | None:
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


def evaluated_in_training_mode(facts: Facts) -> Iterator[AutogradFinding]:
    """A model that is trained, called without gradients and with BatchNorm or Dropout in training mode."""
    for (_, with_gradients, training), seen in facts.watched.recorder.root_calls.items():
        is_suspect = not with_gradients and training and seen.modes and seen.parameters & facts.updated
        if is_suspect and not _feeds_a_loss(facts.tape, seen.op):
            where = _call_line(seen.op)
            yield finding(
                "eval_in_train_mode",
                f"`{seen.name}` is evaluated in training mode",
                where,
                f"call `{seen.name}.eval()` before `{where.source if where is not None else 'the call'}`",
                explanation="Dropout is on, and BatchNorm uses the batch's statistics and updates its running ones: " + listed(seen.modes),
                is_hint=True,
            )


def trained_in_eval_mode(facts: Facts) -> Iterator[AutogradFinding]:
    """A model whose last backward pass before an update came from a forward in evaluation mode."""
    ops = {op.index: op for op in facts.tape.ops}
    calls = [(root, seen) for (root, _, training), seen in facts.watched.recorder.root_calls.items() if not training and seen.modes]
    for place, step in enumerate(facts.course.events):
        if not isinstance(step, Step) or not step.nonzero_count:
            continue
        passed = [one for one in facts.course.events[:place] if isinstance(one, Backward) and one.leaves & step.parameters]
        for root, seen in calls if passed else ():
            of_root = [ops[index] for index in sorted(passed[-1].ops) if index in ops and ops[index].root == root]
            if seen.parameters & step.parameters and of_root and not any(op.training for op in of_root):
                yield finding(
                    "train_in_eval_mode",
                    f"`{seen.name}` is trained in evaluation mode",
                    _call_line(of_root[0]),
                    f"call `{seen.name}.train()` before the loop",
                    explanation="Dropout is off and BatchNorm uses its running statistics: " + listed(seen.modes),
                    is_hint=True,
                )
                return


def _call_line(op: RecordedOp) -> Location | None:
    """The user's line outside the model: the outermost call that is not a `forward`."""
    return next((line.location for line in op.calls if line.function != "forward"), op.where)


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
