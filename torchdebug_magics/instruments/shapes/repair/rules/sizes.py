"""What a call of torch's would have taken: sizes, dimensions and their order, each found by asking the call itself."""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Iterator

import torch
from torch import nn

from torchdebug_magics.format import shape
from torchdebug_magics.instruments.shapes.repair.edit import OpEdit, Repair, ValueChange, as_written
from torchdebug_magics.instruments.shapes.repair.failure_facts import FailureFacts, Operand, Sizes
from torchdebug_magics.instruments.shapes.repair.local_call import LocalCall, Mismatch, resized_to
from torchdebug_magics.instruments.shapes.repair.rebuild import arguments
from torchdebug_magics.instruments.shapes.repair.rules import candidates
from torchdebug_magics.instruments.shapes.repair.rules.earlier import earlier, squeezed, with_size
from torchdebug_magics.instruments.shapes.repair.rules.inputs_and_indices import samples_beside, shortened, too_long
from torchdebug_magics.instruments.shapes.repair.rules.rule_parts import (
    Diagnosis,
    argument_changed,
    gets,
    named,
    producer_edits,
    rewritten,
    told,
)
from torchdebug_magics.instruments.shapes.repair.size_history import JOINS, came_from, channels_first, is_flattened, of_inputs, product

_NOUNS = {
    **dict.fromkeys(("in_features", "normalized_shape"), "features"),
    **dict.fromkeys(("in1_features", "in2_features", "input_size", "embed_dim", "kdim", "vdim", "d_model"), "features ({})"),
    **dict.fromkeys(("in_channels", "num_features", "num_channels", "num_parameters"), "channels"),
}
"""What an argument of a module's counts."""
_LEFT = frozenset(["__getitem__", "__setitem__", "getitem", "setitem", "view", "reshape", "unflatten", "view_as", "reshape_as", "repeat"])
"""Ops that other rules know better: what fits is in their arguments."""
_ROLES = {"hx": "a hidden state"}


def sized(facts: FailureFacts) -> Diagnosis | None:
    """The op, or the module of torch's, takes another size, another number of dimensions, or another order of them."""
    if (not facts.operands and not facts.given) or facts.op in _LEFT:
        return None
    local = LocalCall(facts)
    cause = _asked(local) if local.operands else None
    return cause or (_asked(local) if local.operands and local.compute() else None)


def _asked(local: LocalCall) -> Diagnosis | None:
    if local.gives() is not None:
        return None
    mismatches = local.mismatches()
    # What has a size of one is to be repeated; nothing is to be cut down to one.
    mismatches.sort(key=lambda mismatch: (mismatch.got != 1, mismatch.wanted == 1 and not local.by_module))
    if not mismatches:
        return _laid_out(local)
    return _of_module(local, mismatches) if local.by_module else _of_op(local, mismatches)


def _of_module(local: LocalCall, mismatches: list[Mismatch]) -> Diagnosis:
    facts = local.facts
    made = arguments(facts.module) if facts.module is not None else None
    mismatch = mismatches[0]
    x = mismatch.operand
    kernel = getattr(facts.module, "kernel_size", None)
    if kernel is not None and mismatch.dim >= -(len(kernel) if isinstance(kernel, tuple) else len(x.sizes) - 2):
        spatial = x.sizes[-len(kernel) :] if isinstance(kernel, tuple) else x.sizes[2:]
        padding, window = getattr(facts.module, "padding", 0), kernel if isinstance(kernel, tuple) else (kernel,) * len(spatial)
        written = shape(padding) if isinstance(padding, tuple) else padding
        padded = f" (padding {written})" if padding not in {0, (0,) * len(spatial)} else ""
        sentence = f"{facts.who} has a kernel of {shape(window)}, larger than its input of {shape(spatial)}{padded}"
        return Diagnosis(sentence, tuple(candidates.remade(local, mismatch)), x, (min(spatial), max(window)))
    for misfit in mismatches:
        numbers = made[1] if made is not None else {name: getattr(facts.module, name, None) for name in _NOUNS}
        named_so = next((name for name, value in numbers.items() if name in _NOUNS and candidates.is_number(value, misfit.wanted)), None)
        if named_so is not None and _role(facts, misfit.at) not in _ROLES.values():
            return _counted(local, misfit, named_so)
    sentence = f"{facts.who} expects {_role(facts, mismatch.at)} of {shape(mismatch.sizes)}, gets {_from(x)}{_beside(local, mismatch)}"
    edits = [
        *candidates.relaid(local, mismatch.at),
        *(edit for further in mismatches for edit in candidates.remade(local, further)),
        *(edit for further in mismatches for edit in candidates.fitted(local, further)),
        *(candidates.other_way(facts, x) if mismatch.got == 2 * mismatch.wanted else ()),
        *_first_rows(local, mismatch),
        *producer_edits(facts, x, mismatch.got, mismatch.wanted, rank=22),
    ]
    return Diagnosis(sentence, tuple(edits), x)


def _from(x: Operand) -> str:
    source = came_from(x.made)
    return f"{shape(x.sizes)}{f' {source}' if source else ''}"


def _beside(local: LocalCall, mismatch: Mismatch) -> str:
    """The operand that has the wanted size."""
    others = [at for at in range(len(local.operands)) if at not in mismatch.places and mismatch.wanted in local.operands[at].sizes]
    return f", as {_role(local.facts, others[0])} is {shape(local.operands[others[0]].sizes)}" if others else ""


def _counted(local: LocalCall, mismatch: Mismatch, argument: str) -> Diagnosis:
    """So many features, or channels, were expected, as the module was made for."""
    facts, x = local.facts, mismatch.operand
    got, wanted, dim = mismatch.got, mismatch.wanted, mismatch.dim
    many = len(x.sizes)
    role = f" in its {_role(facts, mismatch.at)}" if len(local.operands) > 1 else ""
    whole = "" if product(x.made, got, dim) or many <= 2 or dim != -1 else f", the last dimension of {shape(x.sizes)}"
    like = samples_beside(facts, x) if wanted > 1 else ""
    whole = f": one number for each of the samples that `{like}` has" if like else whole
    sentence = f"{facts.who} expects {wanted} {_NOUNS[argument].format(argument)}{role}, gets {gets(x, got, dim)}{whole}"
    fit = (got, wanted) if dim == -1 and (product(x.made, got, dim) or is_flattened(x.made)) else None
    if before := earlier(local, mismatch):
        edits = with_size(facts, before, wanted, argument) if dim == -1 else before.edits
        edits = edits or tuple(candidates.for_size(local, mismatch) if before.size else ())
        return Diagnosis(sentence + before.words, edits, x, fit if before.fits else None)
    if dim < -1 and not channels_first(x.made) and x.sizes[-1] == wanted:
        sentence += f": its channels are last in {shape(x.sizes)}"
    elif dim == -many < -1:
        sentence += f": {shape(x.sizes)} is read without a batch"
    return Diagnosis(sentence, tuple(candidates.for_size(local, mismatch)), x, fit)


def _of_op(local: LocalCall, mismatches: list[Mismatch]) -> Diagnosis:
    """Tensors that do not go together in one op."""
    facts = local.facts
    mismatch = mismatches[0]
    x = mismatch.operand
    many = len(x.sizes)
    place = "the last dimension" if mismatch.dim == -1 and many > 1 else f"dimension {many + mismatch.dim}"
    is_wrong = f"{place} of {named(x, 'the tensor')} is {mismatch.got}, and {mismatch.wanted} would fit"
    sentence = f"{facts.written} cannot take {_listed(local)}: {is_wrong}"
    if lost := squeezed(facts, x):
        return Diagnosis(sentence + lost.words, lost.edits, x)
    if facts.site is None and (long := too_long(facts, mismatch.wanted, mismatch.got)):
        return Diagnosis(long, tuple(shortened(facts, mismatch.wanted, mismatch.got)), x)
    edits: list[Repair] = [*_swapped(local), *_other_calls(local)]
    for later, at in enumerate(reversed(range(len(local.operands)))):
        edits += candidates.relaid(local, at, later=later)
    for misfit in mismatches:
        edits += candidates.fitted(local, misfit)
        odd = len(local.operands) > 2 and len({operand.sizes for operand in local.operands if operand is not misfit.operand}) == 1
        edits += producer_edits(facts, misfit.operand, misfit.got, misfit.wanted, rank=4 if odd else 40)
    computed = all(of_inputs(operand.made) for operand in local.operands)
    return Diagnosis(sentence, tuple(edits), x, None if computed else (mismatch.got, mismatch.wanted), rounded=computed)


def _listed(local: LocalCall) -> str:
    return ", ".join(dict.fromkeys(map(told, local.operands[:4])))


def _laid_out(local: LocalCall) -> Diagnosis | None:
    """No other size would do: the dimensions are too few, too many, or in another order."""
    facts = local.facts
    lost = squeezed(facts, local.operands[0])
    edits = [*(lost.edits if lost else ()), *_other_calls(local), *candidates.remade(local, None)]
    said: tuple[int, list[Sizes]] | None = None
    for at in reversed(range(len(local.operands))):
        x = local.operands[at]
        changes = [change for change, _, __ in candidates.layouts(x.sizes)]
        empty = torch.empty(x.sizes, device="meta")
        shapes = [tuple(change.apply(empty).shape) for change in changes if local.gives({at: change.apply}) is not None]
        relaid = candidates.relaid(local, at, later=int(said is not None))
        own = [*relaid, *candidates.lifted(local, at), *candidates.other_kind(local, at)]
        edits += own
        said = (at, shapes) if said is None and (shapes or own) else said
    if said is None and not edits:
        return None
    at, shapes = said if said is not None else (0, [])
    return Diagnosis(_other_layout(local, at, shapes) + (lost.words if lost else ""), tuple(edits), local.operands[at])


def _other_layout(local: LocalCall, at: int, shapes: list[Sizes]) -> str:
    facts, x = local.facts, local.operands[at]
    fit = (*shapes, *((1, *sizes) for sizes in shapes), *(sizes[1:] for sizes in shapes))
    dims = sorted({len(sizes) for sizes in fit if local.gives({at: functools.partial(resized_to, sizes)}) is not None})
    if local.by_module and not at and len(x.sizes) not in dims:
        kind = f" is a {type(facts.module).__name__}, which" if facts.path else ""
        counts = " or ".join(map(str, dims)) or "more"
        name = f"`{x.name}` is " if x.name else ""
        return f"{facts.who}{kind} expects {counts} dimensions, gets {len(x.sizes)}: {name}{shape(x.sizes)}"
    if local.by_module and shapes:
        return f"{facts.who} expects {_role(facts, at)} of {shape(shapes[0])}, gets {_from(x)}"
    fits = f": {shape(shapes[0])} would fit" if shapes else ""
    return f"{facts.who if local.by_module else facts.written} cannot take {_listed(local)}{fits}"


def _role(facts: FailureFacts, at: int) -> str:
    """What the module calls this argument."""
    tensor = facts.operands[at].tensor
    try:
        assert facts.call is not None
        bound = inspect.signature(facts.call.module.forward).bind(*facts.call.args, **facts.call.kwargs)
    except (TypeError, ValueError):
        return "its input"
    values = {name: value if isinstance(value, (tuple, list)) else (value,) for name, value in bound.arguments.items()}
    name = next((name for name, given in values.items() if any(part is tensor for part in given)), "its input")
    return _ROLES.get(name, name)


_KEYWORDS = {"scaled_dot_product_attention": ("enable_gqa", "fewer heads of keys and values than of queries")}
"""What lets an op take other sizes."""


def _swapped(local: LocalCall) -> list[Repair]:
    """``b @ a`` for ``a @ b``; not where the samples of the batch would be summed up."""
    facts = local.facts
    site = facts.site
    written = site.expression if site is not None and facts.direct else None
    if site is None or facts.op is None or not isinstance(written, ast.BinOp) or not isinstance(written.op, ast.MatMult):
        return []
    a, b = local.operands[:2]
    if local.gives({0: lambda tensor: tensor.new_empty(b.sizes), 1: lambda tensor: tensor.new_empty(a.sizes)}) is None:
        return []
    square = len(b.sizes) == 2 and b.sizes[0] == b.sizes[1]
    batches = {tensor.shape[0] for _, tensor in facts.inputs if tensor.dim() > 1}
    if not square and of_inputs(a.made) and of_inputs(b.made) and b.sizes[-1] in batches:
        return []
    code = ast.unparse(ast.BinOp(written.right, ast.MatMult(), written.left))
    run = OpEdit(site, facts.op, lambda func, args, _: func(args[1], args[0]))
    return [Repair(code, "with the operands swapped", 1 if square else 8, ops=(run,))]


def _other_calls(local: LocalCall) -> Iterator[Repair]:
    """The same call by another name, with a keyword, or along another dimension."""
    facts = local.facts
    names = [operand.name for operand in facts.operands[:2]]
    if facts.op in {"bmm", "mm"} and all(names) and len({len(operand.sizes) for operand in facts.operands}) == 1:
        code = " @ ".join(names)
        yield from rewritten(facts, lambda _: code, lambda _, args, __: torch.matmul(*args), rank=3, why="takes any number of dimensions")
    if facts.op in JOINS | {"stack"} and facts.operands:
        yield from _along(local)
    if facts.op in _KEYWORDS:
        name, why = _KEYWORDS[facts.op]

        def write(call: ast.Call) -> ast.expr:
            return ast.Call(call.func, call.args, [*call.keywords, ast.keyword(name, ast.Constant(value=True))])

        yield from rewritten(facts, write, lambda func, args, kwargs: func(*args, **{**kwargs, name: True}), rank=5, why=why)


def _along(local: LocalCall) -> Iterator[Repair]:
    """The same tensors joined along another dimension."""
    facts, many = local.facts, len(local.operands[0].sizes)
    for dim in reversed(range(many)):
        place = -1 if dim == many - 1 and facts.op != "stack" else dim
        run = functools.partial(lambda dim, _, args, __: torch.cat(args[0], dim=dim), place)
        if local.gives(module=lambda *args, run=run, **_: run(None, args, {})) is None:
            continue
        call = facts.written_call
        func = ast.unparse(call.func).replace("stack", "cat") if call is not None else ""
        code = f"{func}({ast.unparse(call.args[0])}, dim={place})" if call is not None and call.args else ""
        why = "joined along the dimension in which they differ" if facts.op == "stack" else ""
        yield from rewritten(facts, lambda _, code=code: code, run, rank=8 if facts.op == "stack" else 3, why=why)  # type: ignore[misc]


def scalars(facts: FailureFacts) -> Diagnosis | None:
    """Numbers that are to be joined, which have no dimension to join them along."""
    if facts.op not in JOINS or not facts.operands or any(operand.sizes for operand in facts.operands):
        return None
    edits = rewritten(facts, lambda call: f"torch.stack({ast.unparse(call.args[0])})", lambda _, args, __: torch.stack(args[0]), rank=2)
    return Diagnosis(f"`{facts.op}` joins along a dimension, and gets {len(facts.operands)} numbers without any", tuple(edits))


def pair(facts: FailureFacts) -> Diagnosis | None:
    """An LSTM that is given one tensor for its two states."""
    given = facts.call.args[1:2] if facts.call is not None else ()
    if not isinstance(facts.module, (nn.LSTM, nn.LSTMCell)) or not given or not isinstance(given[0], torch.Tensor):
        return None

    sentence = f"{facts.who} expects its state as two tensors (h, c), gets one tensor of {shape(tuple(given[0].shape))}"
    both = as_written("({0}, torch.zeros_like({0}))")
    edits = argument_changed(facts, 1, both, rank=3, why="a cell state of zeros beside it")
    return Diagnosis(sentence, tuple(edits))


def _first_rows(local: LocalCall, mismatch: Mismatch) -> list[Repair]:
    """A state of a larger batch, as that of all batches but the last one is, cut to the rows of this one."""
    facts, rows = local.facts, mismatch.wanted
    if not isinstance(facts.module, nn.RNNBase) or not mismatch.at or mismatch.dims != (-2,) or mismatch.got <= rows:
        return []
    size = f"{local.operands[0].name or 'x'}.size({0 if facts.module.batch_first else 1})"
    many = len(local.operands) > 2

    form = "tuple(h[:, :{1}].contiguous() for h in {0})" if many else "{0}[:, :{1}].contiguous()"
    cut = ValueChange(lambda h: form.format(h, size), as_written(form.format("{0}", rows)).apply)
    why = f"a batch of {rows} after those of {mismatch.got}, as the last one of a loader is: or `drop_last=True` in the `DataLoader`"
    return argument_changed(facts, 1, cut, rank=2, why=why)
