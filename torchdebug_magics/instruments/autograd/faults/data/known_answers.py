"""``known_answer``: a model of sequences sees the tokens that it is to predict."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from functools import partial

from torchdebug_magics.instruments.autograd.report import AutogradFinding
from torchdebug_magics.instruments.autograd.source_readings import edited, finding, statement_at, with_option
from torchdebug_magics.instruments.autograd.tape import RecordedOp
from torchdebug_magics.instruments.autograd.token_twins import Answer
from torchdebug_magics.probing.source.edited_source import Source, exchanging
from torchdebug_magics.probing.source.syntax import called, copied, exchanged, expression, nodes, root_of, tree_of
from torchdebug_magics.report import Edit

_MASKED = "{0} = {0}.masked_fill(torch.ones_like({0}, dtype=torch.bool).triu(1), float('-inf'))"
_HIDDEN = "a causal mask"


def known_answer(answer: Answer, passed: Iterable[RecordedOp]) -> AutogradFinding:
    """Of a target that is the next token: what lets each step see it; of one that is the token of the step itself: the loss."""
    if not answer.is_ahead:
        headline, edits = "the target of each step is the token that the model reads there", _shifted(answer.loss)
        fix = "compare the scores of each step with the next token: `scores[:, :-1]` with `targets[:, 1:]`"
        why = "the model learns to copy its input: to generate, each step must predict the token after it"
        return finding("known_answer", headline, answer.loss.where, fix, edits=edits, explanation=why)
    op = next((op for op in passed if _attends(op, answer.steps)), None)
    edits = () if op is None else _masked(op)
    fix = "mask the later steps before the softmax, as with `torch.nn.Transformer.generate_square_subsequent_mask(steps)`"
    headline = "each step sees the next token, which is its target"
    headline += f": `{op.module}` attends without {_HIDDEN}" if op is not None and op.module else ""
    why = "the loss falls, as the answer is in the input; in generation there is none"
    words = f"run `{edits[0].new}` before this line" if edits and not edits[0].old else ""
    return finding("known_answer", headline, (op or answer.loss).where, fix, fix=words, edits=edits, op=op, explanation=why)


def _attends(op: RecordedOp, steps: tuple[int, ...]) -> bool:
    """Whether it is the softmax of attention over steps, or an op that does it all."""
    shape = op.makes[0].shape if op.makes else ()
    is_softmax = op.name == "_softmax" and len(shape) > 1 and shape[-1] == shape[-2] and shape[-1] in steps
    return is_softmax or op.name.startswith("_scaled_dot_product")


def _masked(op: RecordedOp) -> tuple[Edit, ...]:
    """The statement of the attention, with what hides later steps."""
    statement = statement_at(op.where)
    for call in nodes(ast.Call, statement):
        if called(call) == "scaled_dot_product_attention" and not any(option.arg == "is_causal" for option in call.keywords):
            return exchanging(op.where, call, with_option(call, "is_causal", value=True))
        scores = call.args[0] if call.args else call.func.value if isinstance(call.func, ast.Attribute) else None
        if called(call) == "softmax" and isinstance(scores, ast.Name):
            return edited(op.where, _MASKED.format(scores.id), "before")
    return ()


def _shifted(op: RecordedOp) -> tuple[Edit, ...]:
    """The loss of all scores but the last, and of all targets but the first."""
    tree = None if op.where is None else tree_of(op.where.file)
    statement = None if op.where is None or tree is None else Source(op.where, tree).statement
    for call in nodes(ast.Call, statement):
        scores, targets, *_ = [*call.args, None, None]
        names = [root_of(part) if part is not None else "" for part in (scores, targets)]
        invoked = {inner.func.id for inner in nodes(ast.Call, scores, targets) if isinstance(inner.func, ast.Name)}
        if scores is None or targets is None or not all(names) or invoked & {*names}:
            continue
        cuts = dict(zip(names, ("[:, :-1]", "[:, 1:]"), strict=True))
        parts = [exchanged(copied(part), partial(_cut, cuts)) for part in (scores, targets)]
        return exchanging(op.where, call, ast.Call(call.func, [*parts, *call.args[2:]], call.keywords))
    return ()


def _cut(cuts: dict[str, str], node: ast.AST) -> ast.expr | None:
    return expression(f"{node.id}{cuts[node.id]}") if isinstance(node, ast.Name) and node.id in cuts else None
