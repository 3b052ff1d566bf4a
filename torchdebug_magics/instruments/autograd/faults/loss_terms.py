"""Terms of a loss: reduced to one number too early, reduced in two ways that do not go together, moving what they only weight."""

from __future__ import annotations

import ast
import itertools
import math
from collections.abc import Iterator, Sequence

from torchdebug_magics.format import shape
from torchdebug_magics.instruments.autograd.faults.watched import TrainingFacts
from torchdebug_magics.instruments.autograd.report import AutogradFinding
from torchdebug_magics.instruments.autograd.source_readings import calls_of, finding, statement_at, with_option
from torchdebug_magics.instruments.autograd.tape import DISTANCES, RecordedOp, Use, walk
from torchdebug_magics.probing.source.edited_source import calls, exchanging
from torchdebug_magics.probing.source.syntax import as_atom, called, expression, last_name, nodes, targets_of
from torchdebug_magics.report import Edit, Location

_REDUCTIONS = frozenset({"sum", "mean"})
_LINEAR = frozenset(
    {"add", "add_", "sub", "rsub", "neg", "mul", "div", "sum", "mean", "view", "select", "slice", "squeeze", "unsqueeze", "alias"}
)
"""What is done to the terms of a loss."""
_LOSSES = {
    "nll_loss_forward": ("cross_entropy", "CrossEntropyLoss", "nll_loss", "NLLLoss"),
    "nll_loss2d_forward": ("cross_entropy", "CrossEntropyLoss", "nll_loss", "NLLLoss"),
    "binary_cross_entropy": ("binary_cross_entropy", "BCELoss"),
    "mse_loss": ("mse_loss", "MSELoss"),
    "smooth_l1_loss": ("smooth_l1_loss", "SmoothL1Loss"),
    "huber_loss": ("huber_loss", "HuberLoss"),
    "binary_cross_entropy_with_logits": ("binary_cross_entropy_with_logits", "BCEWithLogitsLoss"),
}
"""The functions and modules that run the op, which take ``reduction``."""
_OF_PAIRS = {"log_sigmoid_forward": ("logsigmoid", "LogSigmoid")}
"""The op that says how likely it is that a number lies above 0, with the functions that run it."""
_OF_MEAN = (None, 1)
"""What stands for that among the arguments of the op: the default, which is left out."""
_OF_DIVERGENCE = frozenset({"sum", "add", "sub", "rsub", "mul", "neg", "pow", "exp", "div"})
"""What the divergence of two normal distributions is computed with, and what would have averaged it."""
_LEAST_WEIGHT, _LEAST_SUM = 0.1, 2
"""The factor of a sum beside a mean, and that by the samples: what is less is to bring both to one scale."""


def early_reductions(facts: TrainingFacts) -> Iterator[AutogradFinding]:
    """What is one number for the whole batch already when it meets the weights or the mask of the elements, or is ranked."""
    yield from _ranked_at_once(facts)
    for op in facts.tape.ops:
        if op.name != "mul" or not op.is_forward or len(op.reads) != 2:  # noqa: PLR2004 - a pair
            continue
        number, each = sorted(op.reads, key=lambda use: len(use.shape))
        sizes = _without_ones(each.shape)
        if number.shape or each.requires_grad or math.prod(sizes) < 2:  # noqa: PLR2004 - of several elements
            continue
        reduction = _reduction(op, sizes) if number.requires_grad and _goes_into_a_loss(facts, op) else None
        if reduction is None:
            continue
        if reduction.name == "sum" and _per_element(reduction) == sizes:
            continue  # the product of two sums, as of log-probabilities and returns
        fix, edits = _later_reduced(reduction, each.shape)
        what = _LOSSES.get(reduction.name, (reduction.name,))[0]
        yield finding(
            "early_reduction",
            f"`{what}` makes one number of {shape(reduction.reads[0].shape)} before the weights of {shape(each.shape)} multiply it",
            reduction.where,
            fix,
            edits=edits,
            op=what,
            saved_at=op.where if op.where != reduction.where else None,
            module=reduction.module,
            explanation="each weight multiplies the whole batch: the elements are not weighted, and the term counts once for each of them",
            is_hint=reduction.name in _REDUCTIONS,
        )
        return


def _ranked_at_once(facts: TrainingFacts) -> Iterator[AutogradFinding]:
    """The log-sigmoid of one sum over all samples and their features, which each sample was to have for itself."""
    for op in facts.tape.ops:
        total = next((maker for use, maker in op.sources if not use.shape), None) if op.name in _OF_PAIRS and op.is_forward else None
        if total is None or total.name != "sum" or total.makes[0].shape or not total.reads[0].requires_grad:
            continue
        sizes = total.reads[0].shape
        written = [call for call in nodes(ast.Call, statement_at(total.where)) if called(call) == "sum"]
        outer = [call for call in nodes(ast.Call, statement_at(op.where)) if called(call) in _OF_PAIRS[op.name]]
        if len(sizes) != 2 or min(sizes) < 2 or len(written) != 1 or len(outer) != 1 or op.where == total.where:  # noqa: PLR2004 - samples and features
            continue
        mean = ast.Call(ast.Attribute(outer[0], "mean", ast.Load()), [], [])
        each, all_of_them = exchanging(total.where, written[0], with_option(written[0], "dim", -1)), exchanging(op.where, outer[0], mean)
        yield finding(
            "early_reduction",
            f"`sum` makes one number of {shape(sizes)} before `{called(outer[0])}`",
            total.where,
            "sum over the features alone, `dim=-1`, and take the mean behind it",
            edits=(*each, *all_of_them) if each and all_of_them else (),
            op="sum",
            saved_at=op.where,
            explanation=f"the sum of all {sizes[0]} samples saturates it: no sample is ranked for itself",
            is_hint=True,  # the rows may be the words of a single sample
        )
        return


def unlike_reductions(facts: TrainingFacts) -> Iterator[AutogradFinding]:
    """A loss of two terms of which one is the mean over all elements, and the other one a sum over a batch, or over each sample."""
    for seen in facts.course.backwards:
        root = facts.tape.origin(seen.loss, seen.index) if seen.is_recorded else None
        terms = list(terms_of(root, in_graph=True)) if root is not None else []
        means = [op for op, _ in terms if (op.name == "mean" and len(op.reads[0].shape) > 1) or is_mean_loss(op)]
        sums = [(op, op) for op, factor in terms if op.name == "sum" and _is_whole(op, factor) and _is_divergence(op)]
        sums += [(op, each) for op, factor in terms if op.name == "mean" and abs(factor) >= _LEAST_WEIGHT and (each := _of_each(op))]
        for mean, (term, total) in itertools.product(means, sums):
            whole, added = mean.reads[0].shape, total.reads[0].shape
            if min(len(whole), len(added)) < 2 or whole[0] != added[0]:  # noqa: PLR2004 - samples of several numbers
                continue
            what = _LOSSES.get(mean.name, (mean.name,))[0]
            yield finding(
                "unlike_reductions",
                f"`{what}` is the mean over {shape(whole)}, beside a sum over {'each of ' if term is not total else ''}{shape(added)}",
                mean.where,
                "reduce both in the same way: sum the first one over each sample, too, or take a mean there",
                edits=_summed(mean, is_mean_of_samples=term is not total),
                op=what,
                saved_at=total.where if total.where != mean.where else None,
                module=mean.module,
                explanation=f"beside the sum, the mean hardly counts: each of its elements has 1/{math.prod(whole):,} of the weight",
                is_hint=True,
            )
            return


def _of_each(mean: RecordedOp) -> RecordedOp | None:
    """The sum over each sample of which a term is the mean, as of a divergence by its latent dimensions."""
    sizes, op = mean.reads[0].shape, mean
    while (
        len(sizes) == 1 and op.name in _LINEAR | {"mean"} and len(parts := [maker for use, maker in op.sources if use.requires_grad]) == 1
    ):
        (op,) = parts
        if op.name == "sum":
            return op if op.reads[0].shape[:1] == sizes and len(op.reads[0].shape) > 1 and _is_divergence(op) else None
    return None


def _summed(mean: RecordedOp, *, is_mean_of_samples: bool) -> tuple[Edit, ...]:
    """The mean as a sum; divided by the number of samples where the other term is."""
    plain = [(mean.where, call) for call in nodes(ast.Call, statement_at(mean.where)) if called(call) == "mean"]
    made = _calls_of(mean) if mean.name in _LOSSES else [pair for pair in plain if len(pair[1].args) + len(pair[1].keywords) <= 1]
    if len(made) != 1:
        return ()
    where, call = made[0]
    new: ast.expr = with_option(call, "reduction", "sum")
    if isinstance(call.func, ast.Attribute) and call.func.attr == "mean":
        new = ast.Call(ast.Attribute(call.func.value, "sum", ast.Load()), call.args, call.keywords)
    if is_mean_of_samples and (not call.args or not isinstance(call.args[0], ast.Name)):
        return ()  # a module, which is made elsewhere, or an expression
    return exchanging(where, call, expression(f"{ast.unparse(new)} / len({ast.unparse(call.args[0])})") if is_mean_of_samples else new)


def is_mean_loss(op: RecordedOp) -> bool:
    """Whether it is a loss of torch's that is the mean over a batch."""
    return op.name in _LOSSES and op.number in _OF_MEAN


def terms_of(root: RecordedOp, *, in_graph: bool = False) -> Iterator[tuple[RecordedOp, float]]:
    """The numbers that are added up to a loss, each with its factor, NaN where that is not known; `in_graph`: those with a gradient."""
    todo = [(root, 1.0)]
    while todo:
        op, factor = todo.pop()
        parts = [maker for use, maker in op.sources if use.requires_grad or not in_graph]
        is_number = bool(op.makes) and not op.makes[0].shape and bool(parts)
        if is_number and op.name in {"add", "sub", "neg", "rsub"}:
            todo += [(part, factor) for part in parts]
        elif is_number and op.name in {"mul", "div"} and len(parts) == 1 and not op.reads[0].shape:
            number = math.nan if op.number is None else op.number
            todo.append((parts[0], factor * number if op.name == "mul" else 0.0))  # divided, as by the number of samples
        else:
            yield op, factor


def _is_whole(total: RecordedOp, factor: float) -> bool:
    """Whether a sum over a batch is left as it is: nobody has divided it by the number of samples, or given it a small weight."""
    batch = total.reads[0].shape[0] if total.reads[0].shape else 0
    return not total.makes[0].shape and abs(factor) >= _LEAST_WEIGHT and abs(factor) * batch >= _LEAST_SUM


def _is_divergence(total: RecordedOp) -> bool:
    """Whether what is added up is that of two normal distributions, which has an exponential beside a square, and was not divided."""
    whole = total.reads[0].shape
    way = list(walk([total], lambda op: [maker for use, maker in op.sources if use.shape == whole and maker.name in _OF_DIVERGENCE]))
    names = {op.name for op in way}
    return "exp" in names and bool(names & {"pow", "mul"}) and "div" not in names


def _without_ones(sizes: tuple[int, ...]) -> tuple[int, ...]:
    while sizes[-1:] == (1,):
        sizes = sizes[:-1]
    return sizes


def _reduction(meeting: RecordedOp, sizes: tuple[int, ...]) -> RecordedOp | None:
    """The op that made the number that an op reads, of a tensor with dimensions of these sizes first."""
    numbers = [maker for use, maker in meeting.sources if not use.shape]
    for maker in walk(numbers, lambda op: [parent for use, parent in op.sources if not use.shape and not op.reads[0].shape]):
        read = maker.reads[0] if maker.reads else None
        if read is not None and read.shape and maker.name in _REDUCTIONS | _LOSSES.keys() and read.requires_grad:
            return maker if _per_element(maker)[: len(sizes)] == sizes else None
    return None


def _per_element(reduction: RecordedOp) -> tuple[int, ...]:
    """The shape of what it makes one number of: of a loss of classes, without these."""
    whole = reduction.reads[0].shape
    return (*whole[:1], *whole[2:]) if reduction.name.startswith("nll_loss") else whole


def _goes_into_a_loss(facts: TrainingFacts, product: RecordedOp) -> bool:
    """Whether its elements are added up, and nothing else is done with them."""
    later = walk(facts.consumers.get(product.index, ()), lambda op: () if _is_number(op) else facts.consumers.get(op.index, ()))
    terms = list(later)
    return any(map(_is_number, terms)) and all(op.name in _LINEAR for op in terms)


def _is_number(op: RecordedOp) -> bool:
    return bool(op.makes) and not op.makes[0].shape


def _later_reduced(reduction: RecordedOp, wanted: tuple[int, ...]) -> tuple[str, tuple[Edit, ...]]:
    """What to write so that the elements keep the shape of the weights, and the edit; none where a dimension would be left over."""
    where, elements = reduction.where, _per_element(reduction)
    fits = elements[: len(wanted)] == wanted
    if reduction.name in _LOSSES:
        return 'use `reduction="none"`', _with_option(_calls_of(reduction), "reduction", "none") if elements == wanted else ()
    dims = [-1 - place for place in reversed(range(len(elements) - len(_without_ones(wanted))))]
    written = [call for call in nodes(ast.Call, statement_at(where)) if last_name(call.func) == reduction.name and not call.keywords]
    if not dims:
        return f"leave out this `{reduction.name}`", _left_out(where, written) if fits else ()
    value = dims[0] if len(dims) == 1 else tuple(dims)
    fix = f"`{reduction.name}` over the last {'dimension' if len(dims) == 1 else f'{len(dims)} dimensions'} alone: `dim={value}`"
    return fix, _with_option([(where, call) for call in written], "dim", value) if fits else ()


def _calls_of(loss: RecordedOp) -> Sequence[tuple[Location | None, ast.Call]]:
    """Where a loss is called, or its module made, which takes ``reduction``."""
    made = calls_of(loss, _LOSSES[loss.name])
    called_as = set(map(last_name, targets_of(statement_at(made[0][0])))) if len(made) == 1 and made[0][0] != loss.where else set()
    uses = [call for _, call in calls(made[0][0].file) if last_name(call.func) in called_as] if called_as else []
    return made if len(uses) <= 1 else []  # a module that others call as well is to stay as it is


def _left_out(where: Location | None, written: list[ast.Call]) -> tuple[Edit, ...]:
    """What a reduction is called on, or with, in its place."""
    if len(written) != 1:
        return ()
    call = written[0]
    if call.args:
        return exchanging(where, call, call.args[0])
    return exchanging(where, call, call.func.value) if isinstance(call.func, ast.Attribute) else ()


def _with_option(made: Sequence[tuple[Location | None, ast.Call]], name: str, value: str | int | tuple[int, ...]) -> tuple[Edit, ...]:
    """The edit of the only call."""
    return exchanging(made[0][0], made[0][1], with_option(made[0][1], name, value)) if len(made) == 1 else ()


_DIFFERENCES = frozenset({"sub", "rsub"})
_SCALED = frozenset({"sub", "rsub", "neg", "div", "mul", "view", "reshape", "squeeze", "unsqueeze", "select", "stack", "cat", "clone"})
"""What an advantage goes through between the difference that it is, and the term that it weights."""
_LOGARITHMS = frozenset({"log", "_log_softmax", "logsumexp"})
_CHOICES = frozenset({"gather", "index", "nll_loss_forward"})
"""What takes the logarithm of the action that was drawn."""


def driven_values(facts: TrainingFacts) -> Iterator[AutogradFinding]:
    """An advantage that keeps its graph where it weights the logarithm of a probability, as in a policy gradient."""
    fitted = {use.memory for op in facts.tape.ops if op.name in DISTANCES and op.is_forward for use in op.reads if use.requires_grad}
    logarithms, chosen = set[int](), set[int]()
    for op in facts.tape.ops:
        parents = {maker.index for maker in op.parents}
        if op.name in _LOGARITHMS or parents & logarithms:
            logarithms.add(op.index)
        if op.name in _CHOICES or parents & chosen:
            chosen.add(op.index)
    for op in facts.tape.ops:
        if op.name != "mul" or not op.is_forward or len(op.sources) != 2 or not all(use.requires_grad for use in op.reads):  # noqa: PLR2004 - a pair
            continue
        for (use, factor), (_, weighted) in itertools.permutations(op.sources):
            difference = _difference(facts, factor, fitted) if weighted.index in logarithms & chosen else None
            if difference is None or difference in walk([weighted], lambda op: op.parents):
                continue
            name, edits = _detached(op, use)
            yield finding(
                "driven_value",
                f"`{name}` keeps its graph: the policy's term of the loss changes the value as well",
                op.where,
                f"`{name}.detach()`",
                edits=edits,
                op=op,
                tensor=name,
                saved_at=difference.where,
                explanation="it says how good an action was, and is a constant there: else the value is driven away from the returns",
            )
            return


def _difference(facts: TrainingFacts, factor: RecordedOp, fitted: set[int]) -> RecordedOp | None:
    """The difference of a target and a value that another term of the loss fits to it, of which a factor was made."""
    for op in walk([factor], _before):
        own = [use for use in op.reads if use.requires_grad]
        if op.name in _DIFFERENCES and len(own) == 1:
            is_squared = any(later.name == "pow" for later in facts.consumers.get(op.index, ()))
            if is_squared or own[0].memory in fitted:
                return op
    return None


def _before(op: RecordedOp) -> list[RecordedOp]:
    """What an advantage was before it was scaled; nothing where it met something else that is trained."""
    makers = [maker for use, maker in op.sources if use.requires_grad]
    return makers if op.name in _SCALED and op.name not in _DIFFERENCES and len(makers) == 1 else []


def _detached(product: RecordedOp, use: Use) -> tuple[str, tuple[Edit, ...]]:
    """What the user calls a factor, and the edit that takes its graph away."""
    products = [node for node in nodes(ast.BinOp, statement_at(product.where)) if isinstance(node.op, ast.Mult)]
    if len(products) != 1:
        return "the advantage", ()
    side = products[0].left if use is product.reads[0] else products[0].right
    return ast.unparse(side), exchanging(product.where, side, expression(f"{as_atom(side)}.detach()"))
