"""Edits with which a failed call succeeds, found by asking the call: other layouts, sizes, arguments and modules.

The rank of an edit says how natural it is: up to 9 for what an operand lacks in its layout, 10 to 19 for another length, 20 to 29 for
another module or parameter at the failing place, 40 for the module that made the operand.
"""

from __future__ import annotations

import ast
import functools
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from torchdebug_magics.format import shape
from torchdebug_magics.instruments.shapes.repair.edit import (
    Repair,
    ValueChange,
    as_typed,
    as_written,
    method,
    on_operand,
    parameter_edit,
    then,
    together,
)
from torchdebug_magics.instruments.shapes.repair.failure_facts import FailureFacts, Operand, Sizes
from torchdebug_magics.instruments.shapes.repair.local_call import LocalCall, Mismatch
from torchdebug_magics.instruments.shapes.repair.rebuild import arguments, made_on_meta, rebuilt_module
from torchdebug_magics.instruments.shapes.repair.rules.inputs_and_indices import created, samples_beside
from torchdebug_magics.instruments.shapes.repair.rules.inputs_and_indices import fitted as tabled
from torchdebug_magics.instruments.shapes.repair.rules.rule_parts import orders, producer_edits, reorder, reordered, there_and_back
from torchdebug_magics.instruments.shapes.repair.size_history import (
    JOINS,
    TURNS,
    channels_first,
    comes_from,
    features_last,
    maker,
    of_inputs,
    steps,
)
from torchdebug_magics.probing.source.edited_source import calls
from torchdebug_magics.probing.source.user_code import owner

_DIMENSIONS = {2: "1d", 3: "1d", 4: "2d", 5: "3d"}
_LISTS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_IMAGES = 4
_MATRIX = 2
_RGB, _RGBA = 3, 4
_MERGES_THE_BATCH = 20
"""What it adds to the rank that the batch does not come out as it went in."""


def layouts(sizes: Sizes, *, moves: bool = True) -> Iterator[tuple[ValueChange, int, str]]:
    """(how a tensor may be laid out otherwise, rank, why)."""
    many = len(sizes)
    for dim in range(1, many + 1):
        yield method("unsqueeze", -1 if dim == many else dim), 3, "a dimension of one"
    for dim, size in enumerate(sizes):
        if size == 1:
            yield method("squeeze", -1 if 0 < dim == many - 1 else dim), 2, "without the dimension of size 1"
    if many > 2:
        yield method("flatten", 1), 3, f"{shape(sizes[1:])} in one dimension"
        yield method("flatten", 2), 6, "one dimension of features"
    if many == 3:
        yield then(method("transpose", 0, 1), method("flatten", 1)), 7, f"{sizes[0]} of {sizes[2]} side by side"
    kept = slice(None)
    for index, rank in (((*(kept,) * many, None, None), 7), ((kept, None, None, kept), 3), ((kept, None, kept, None), 3)):
        if many in {1, 2} and index.count(kept) == many:
            yield placed(index, 2), rank, "the same for every place"
    yield method("unsqueeze", 0), 8, "a batch of 1"
    yield from _moves(many) if moves else ()


def laid_out_as(x: Operand, wanted: Sizes) -> Iterator[tuple[ValueChange, int]]:
    """(what makes it so, rank) for each layout of an operand that has this shape."""
    empty = torch.empty(x.sizes, device="meta")
    return ((change, rank) for change, rank, _ in layouts(x.sizes) if tuple(change.apply(empty).shape) == wanted)


def _moves(many: int) -> Iterator[tuple[ValueChange, int, str]]:
    """The dimensions in another order, or the first two as one."""
    if many > 3:
        yield method("flatten", 0, 1), 8, "all in one batch"
    for dims in ((0, 3, 1, 2), (0, 2, 1, 3), (3, 0, 1, 2), (2, 0, 1, 3)) if many == _IMAGES else ():
        yield as_written(f"{{0}}.permute{dims}.flatten(2)"), 9, f"a step for each {'column' if 3 in dims[:2] else 'row'}"
    for order in orders(many) if many < 5 else ():
        if order != tuple(range(many)):
            yield method("t") if many == 2 else reorder(order), 5 + 8 * (order[0] != 0), ""


def subscript(text: str, index: tuple[slice | None, ...]) -> ValueChange:
    """``x[:, None]``."""
    return ValueChange(lambda x: f"{x}[{text}]", lambda tensor: tensor[index])


def placed(index: tuple[slice | None, ...], lacking: int) -> ValueChange:
    """Dimensions of one where the index has None: ``x.unsqueeze(1)`` where it lacks that alone, or ``x[:, None, None]``."""
    if lacking == 1:
        at = index.index(None)
        return method("unsqueeze", -1 if at == len(index) - 1 else at)
    return subscript(", ".join(":" if part is not None else "None" for part in index), index)


def relaid(local: LocalCall, at: int, *, moves: bool = True, later: int = 0) -> Iterator[Repair]:
    """The operand laid out otherwise, as the call takes it."""
    x = local.operands[at]
    if x.owned and len(x.sizes) != _MATRIX:  # what the user made a weight is meant as it stands
        return
    moves = moves and (local.by_module or len(local.operands) > 1)
    for change, plain, why in layouts(x.sizes, moves=moves):
        gives = local.gives({at: change.apply}) if fits_others(local, at, change) else None
        if gives is None:
            continue
        was_turned = x.made is not None and x.made.op in TURNS  # it is turned back first of all; as it stands, it was meant
        rank = plain if not was_turned else 1 if len(change.text(x.name)) < len(x.name) else plain + 8
        worse = 0 if keeps_batch(local, gives) else _MERGES_THE_BATCH
        is_batch = change.text("x") == "x.unsqueeze(0)" and x.is_input
        yield from on_operand(local.facts, at, change, rank=rank + later + worse, why=why, first=is_batch, owned=True)


def fits_others(local: LocalCall, at: int, change: ValueChange) -> bool:
    """Whether it has as many dimensions then as another operand of the op: with more, all would meet all."""
    x = local.operands[at]
    others = {len(operand.sizes) for place, operand in enumerate(local.operands) if place != at}
    try:
        new = change.apply(torch.empty(x.sizes, device="meta"))
    except (IndexError, RuntimeError):
        return False
    if not others and not local.by_module:
        return new.dim() <= len(x.sizes) or "expand" in (local.facts.op or "") or (x.is_input and change.text("x") == "x.unsqueeze(0)")
    return local.by_module or new.dim() in {len(x.sizes), *others}


def keeps_batch(local: LocalCall, gives: list[Sizes]) -> bool:
    """Whether the batch that goes in first comes out first."""
    batches = {tensor.shape[0] for _, tensor in local.facts.inputs if tensor.dim() > 1}
    batches &= {operand.sizes[0] for operand in local.operands if operand.sizes and of_inputs(operand.made)}
    return len(batches) != 1 or not gives or not gives[0] or gives[0][0] in batches


def lifted(local: LocalCall, at: int) -> Iterator[Repair]:
    """The operand with a dimension that it lacks, the same in each of its places: ``x.unsqueeze(1).expand(-1, n, -1)``."""
    x = local.operands[at]
    if x.owned and len(x.sizes) != _MATRIX:
        return
    for dim in range(int(of_inputs(x.made)), len(x.sizes) + 1):
        for like in (operand for operand in local.operands if operand is not x):
            for size in dict.fromkeys(like.sizes):
                change = then(method("unsqueeze", dim), expanded(like, dim, size, len(x.sizes) + 1))
                if size > 1 and fits_others(local, at, change) and local.gives({at: change.apply}) is not None:
                    yield from on_operand(local.facts, at, change, rank=6, why="the same for each", owned=True)


def expanded(like: Operand, dim: int, size: int, many: int) -> ValueChange:
    """A dimension of one, as long as that of another tensor."""
    named = like.name.isidentifier() and size in like.sizes
    length = f"{like.name}.size({like.sizes.index(size)})" if named else str(size)
    text = ", ".join(length if place == dim else "-1" for place in range(many))
    return ValueChange(lambda x: f"{x}.expand({text})", lambda x: x.expand([size if place == dim else -1 for place in range(many)]))


def for_size(local: LocalCall, mismatch: Mismatch) -> Iterator[Repair]:
    """The operand of another layout, the failing module for another size, or what made the operand."""
    facts, x, at = local.facts, mismatch.operand, mismatch.at
    got, wanted, dim = mismatch.got, mismatch.wanted, mismatch.dim
    many = len(x.sizes)
    is_channel = dim < -1
    square = is_channel and many > 3 and len(set(x.sizes[dim + 1 :])) == 1
    moved: list[Repair] = []
    if not (is_channel and channels_first(x.made)):
        moved = reordered(facts, at, dim, wanted, rank=25 if square and x.sizes[0] != wanted else 5, batched=is_channel and wanted == 1)
        yield from moved
        if _keeps_sizes(local, mismatch):
            yield from there_and_back(facts, at, dim, wanted, rank=3 if is_channel and features_last(x.made) else 9)
    yield from relaid(local, at, moves=False)
    if many > 3 and dim == -1 and isinstance(facts.module, nn.Linear):  # a picture
        flat = on_operand(facts, at, method("flatten", 1), rank=12, why=f"{shape(x.sizes[1:])} in one dimension")
        yield from (together(flat[0], new) for new in rebuilt_module(facts.module, facts.path, in_features=math.prod(x.sizes[1:])) if flat)
    if len(x.sizes) == _IMAGES and dim == -1 and x.sizes[1] * x.sizes[3] == wanted and not channels_first(x.made):
        heads = then(method("transpose", 1, 2), method("flatten", 2))
        yield from on_operand(facts, at, heads, rank=2, why=f"the {x.sizes[1]} heads of {x.sizes[3]} side by side")
    last = is_channel and x.sizes[-1] == wanted and features_last(x.made)
    if last and isinstance(facts.module, nn.modules.batchnorm._BatchNorm):
        norm = made_on_meta(nn.LayerNorm, {"normalized_shape": wanted, "eps": facts.module.eps})
        why = "normalizes each row over its features"
        yield from rebuilt_module(norm, facts.path, rank=30, why=f"{why}; a {type(facts.module).__name__} expects channels in dimension 1")
    elif is_picture(x) and dim == -1 and isinstance(facts.module, nn.Linear):  # the last dimension alone is seldom what is meant
        yield from (replace(edit, rank=45) for edit in remade(local, mismatch))
    elif not (moved and ((is_channel and not square) or channels_first(x.made))):  # made for its height, it would only come through
        # A module made for as many features as there are samples would only come through, too.
        yield from () if samples_beside(facts, x) else remade(local, mismatch)
    if got == 1 and is_channel:
        sizes = [wanted if place == many + dim else -1 for place in range(many)]
        yield from on_operand(facts, at, method("expand", *sizes), rank=25, why=f"the one channel {wanted} times")
    yield from _without_alpha(facts, at) if (got, wanted, dim) == (_RGBA, _RGB, 1 - many) and x.is_input else ()
    yield from fitted(local, mismatch)
    is_inside = _is_inside(facts)
    yield from _projected(facts, mismatch) if is_inside and mismatch.at else ()
    yield from producer_edits(facts, x, got, wanted, rank=15 if is_inside else 40)


def _without_alpha(facts: FailureFacts, at: int) -> Iterator[Repair]:
    """A picture without its fourth channel, from where the user's code reads it."""
    change = subscript(f":, :{_RGB}", (slice(None), slice(_RGB)))
    site = facts.caller.site if facts.caller is not None else facts.site
    made = [call for _, call in calls(site.code.co_filename if site is not None else "") if ast.unparse(call.func) == "Image.open"]
    for edit in on_operand(facts, at, change, rank=2, why="the fourth channel is alpha", first=True):
        yield edit
        if edit.inputs and len(made) == 1:
            why = "a file with transparency is read with a fourth channel, alpha"
            yield replace(edit, code=f"{ast.unparse(made[0])}.convert('RGB')", why=why, rank=1)


def _projected(facts: FailureFacts, mismatch: Mismatch) -> Iterator[Repair]:
    """What a decoder attends to, made as wide as the decoder, in the user's call of it."""
    name = f"{mismatch.operand.name if mismatch.operand.name.isidentifier() else 'memory'}_projection"
    change = ValueChange(lambda x: f"self.{name}({x})", lambda tensor: tensor.new_zeros((*tensor.shape[:-1], mismatch.wanted)))
    for edit in on_operand(facts, mismatch.at, change, rank=22, why="as wide as the decoder"):
        for call in edit.calls:
            made = as_typed(".".join((*call.path.split(".")[:-1], name)))
            yield replace(edit, code=f"{made} = nn.Linear({mismatch.got}, {mismatch.wanted})\n{edit.code}", many=2)


def is_picture(x: Operand) -> bool:
    """Whether its last dimension may be a width: not where the features were put there, or joined there."""
    if len(x.sizes) < _IMAGES:
        return False
    step = maker(x.made)
    of_input = step is not None and step.number == 0 and not any(step.op in TURNS for step in steps(x.made))
    return channels_first(x.made) or of_input


def _is_inside(facts: FailureFacts) -> bool:
    """Whether another module of torch's holds the failing one, and passes on what the user gave it."""
    outer = [module for path, module in facts.modules.items() if (facts.path or "").startswith(f"{path}.") or (not path and facts.path)]
    codes = [getattr(type(module).forward, "__code__", _is_inside.__code__) for module in outer if not isinstance(module, _LISTS)]
    return any(owner(code.co_filename) == "torch" for code in codes)


def _keeps_sizes(local: LocalCall, mismatch: Mismatch) -> bool:
    """Whether the module changes none but the last dimension: what goes in turned comes out turned."""
    gives = local.gives({at: lambda tensor: tensor.new_empty(mismatch.sizes) for at in mismatch.places})
    is_convolution = isinstance(local.facts.module, nn.modules.conv._ConvNd)
    return gives is not None and [sizes[:-1] for sizes in gives[:1]] == [mismatch.sizes[:-1]] and not is_convolution


def remade(local: LocalCall, mismatch: Mismatch | None) -> list[Repair]:
    """The failing module, made with other arguments, as it takes its operands then."""
    facts, module = local.facts, local.facts.module
    made = arguments(module) if module is not None else None
    if module is None or (made is None and mismatch is None):
        return []
    ranks: list[tuple[int, dict[str, Any], str]] = []
    if made is None:
        assert mismatch is not None
        names = [name for name in ("in_features", "in_channels", "num_features") if getattr(module, name, None) == mismatch.wanted]
        return [edit for name in names for edit in rebuilt_module(module, facts.path, **dict[str, Any]({name: mismatch.got}))]
    numbers = made[1]
    if not _is_inside(facts) and "batch_first" in numbers:
        first = numbers["batch_first"]
        ranks.append((2, {"batch_first": not first}, f"the batch is {'second' if first else 'first'} here"))
    if "bidirectional" in numbers:
        ranks.append((21, {"bidirectional": not numbers["bidirectional"]}, "both directions, as the state has"))
    if mismatch is not None:
        ranks += _other_numbers(numbers, mismatch.got, mismatch.wanted)
        if "kernel_size" in numbers:
            kernel = numbers["kernel_size"]
            half = kernel // 2 if isinstance(kernel, int) else tuple(number // 2 for number in kernel or ())
            ranks.append((20, {"padding": half}, "padded to keep the size"))
    weights = [parameter for part in facts.modules.values() for parameter in part._parameters.values() if parameter is not None]
    tied = sum(parameter is getattr(module, "weight", None) for parameter in weights) > 1
    ranks = [(44 if tied else rank, changes, why) for rank, changes, why in ranks]  # a new one would not have the weights of the other part
    rebuilt = [edit for rank, changes, why in ranks for edit in rebuilt_module(module, facts.path, rank=rank, why=why, **changes)]
    return [edit for edit in rebuilt if local.takes(edit)]


def _other_numbers(numbers: dict[str, Any], got: int, wanted: int) -> Iterator[tuple[int, dict[str, Any], str]]:
    alike = {name: got for name, value in numbers.items() if is_number(value, wanted)}
    tied = alike if len(alike) > 1 else {}
    yield from ((20 + (name == "kernel_size"), {name: got}, "") for name in alike)
    if tied:
        yield 20, tied, ""
    if "num_layers" in numbers and not numbers["num_layers"] * got % wanted:
        yield 20, {"num_layers": numbers["num_layers"] * got // wanted}, ""
    if "num_groups" in numbers:
        yield 22, {"num_channels": got, "num_groups": math.gcd(got, numbers["num_groups"])}, ""


def is_number(value: Any, number: int) -> bool:
    """Whether an argument is this number, alone or in a list."""
    return (type(value) is int and value == number) or (isinstance(value, (tuple, list)) and set(value) == {number})


def fitted(local: LocalCall, mismatch: Mismatch) -> Iterator[Repair]:
    """An operand made, padded, cut or repeated to the size; the user's own parameter with it."""
    facts, x, at = local.facts, mismatch.operand, mismatch.at
    if x.owned:
        yield from parameter_edit(x, mismatch.sizes, rank=12 if facts.op in JOINS else 30)
    each = [created(facts, local.operands[place], mismatch.sizes, rank=21 if mismatch.dim == -1 else 6) for place in mismatch.places]
    if all(each):
        whole = functools.reduce(together, (edits[0] for edits in each))
        yield replace(whole, many=1)  # the same size forgotten in all of them is one mistake
    if mismatch.got == 1:
        for like in (operand for operand in local.operands if operand is not x and mismatch.wanted in operand.sizes):
            change = expanded(like, len(x.sizes) + mismatch.dim, mismatch.wanted, len(x.sizes))
            yield from on_operand(facts, at, change, rank=4, why="the same for every sample", owned=True)
    if not local.by_module:
        yield from _pictures(local, mismatch)
        dim = len(x.sizes) + mismatch.dim
        if len(x.sizes) == _IMAGES and dim == 1 and mismatch.got > 1 and not mismatch.wanted % mismatch.got:
            times = mismatch.wanted // mismatch.got
            why = f"each of the {mismatch.got} heads for {times} of the {mismatch.wanted}"
            yield from on_operand(facts, at, method("repeat_interleave", times, 1), rank=3, why=why)
    if not of_inputs(x.made):
        yield from tabled(facts, x, mismatch.got, mismatch.wanted, rank=8)
    if at and local.by_module and len(x.sizes) == _MATRIX:
        yield from _lengthened(local, mismatch)


def _lengthened(local: LocalCall, mismatch: Mismatch) -> Iterator[Repair]:
    """A mask padded or cut; rows of a batch are not made up."""
    facts, x, at = local.facts, mismatch.operand, mismatch.at
    lacks = [wanted - have for have, wanted in zip(x.sizes, mismatch.sizes, strict=True)]
    if lacks[0] and len(set(x.sizes)) > 1:
        return
    joins = [step.inputs[0][0] for step in steps(local.operands[0].made) if step.op in JOINS and len(step.inputs) > 1]
    prefixed = any(max(lacks) in sizes[:-1] for sizes in joins)  # such as by a class token
    for front in (True, False) if min(lacks) >= 0 else ():
        pads = [pad for lack in reversed(lacks) for pad in ((lack, 0) if front else (0, lack))]
        while pads[-2:] == [0, 0]:
            pads = pads[:-2]
        change = as_written(f"F.pad({{0}}, {tuple(pads)})")
        why = f"no mask in the {'first' if front else 'last'} {max(lacks)}"
        yield from on_operand(facts, at, change, rank=12 if front is prefixed else 14, why=why)
    if max(lacks) <= 0:
        change = as_written(f"{{0}}[{', '.join(f':{size}' for size in mismatch.sizes)}]")
        yield from on_operand(facts, at, change, rank=10, why="only the length needed")


def _pictures(local: LocalCall, mismatch: Mismatch) -> Iterator[Repair]:
    """Pictures of two sizes: by the convolutions that made them, or else by interpolation."""
    facts, x = local.facts, mismatch.operand
    alike = (operand for operand in local.operands if operand is not x and len(operand.sizes) == len(x.sizes))
    others = [operand for operand in alike if operand.sizes[2:] != x.sizes[2:]]
    if len(x.sizes) not in {4, 5} or not others:
        return
    like = next((operand for operand in others if operand.sizes[mismatch.dim] == mismatch.wanted), others[0])
    yield from as_large(facts, x, like, rank=12)
    # What was made later is fitted to what it is joined with: a picture on its way up to one on the way down.
    later = like.made is None or comes_from(x.made, like.made) or local.operands.index(x) == 0
    change = interpolated(like.name, like.sizes)
    why = f"{shape(x.sizes[2:])} becomes {shape(like.sizes[2:])}"
    yield from on_operand(facts, mismatch.at, change, rank=6 if later else 7, why=why) if len(local.operands) == _MATRIX else ()


def other_kind(local: LocalCall, at: int) -> list[Repair]:
    """The same norm for another number of dimensions: ``BatchNorm1d`` in the place of ``BatchNorm2d``."""
    facts, module, x = local.facts, local.facts.module, local.operands[at]
    kind = getattr(nn, f"{type(module).__name__[:-2]}{_DIMENSIONS.get(len(x.sizes), '')}", None)
    if not isinstance(module, nn.modules.batchnorm._NormBase) or kind is None or kind is type(module):
        return []
    made = arguments(module)
    like = made_on_meta(kind, {**made[1], "num_features": x.sizes[1]}) if made is not None else None
    return [] if like is None else [edit for edit in rebuilt_module(like, facts.path, rank=12) if local.takes(edit)]


def other_way(facts: FailureFacts, x: Operand) -> list[Repair]:
    """The recurrent layer that made a state, in both directions instead of one, or in one instead of both."""
    step = maker(x.made)
    module = facts.modules.get(step.module) if step is not None else None
    if step is None or not isinstance(module, nn.RNNBase) or step.shape != x.sizes:
        return []
    why = "a state for one direction" if module.bidirectional else "a state for each direction"
    return rebuilt_module(module, step.module, bidirectional=not module.bidirectional, rank=6, why=why)


def as_large(facts: FailureFacts, x: Operand, y: Operand, *, rank: int = 4) -> list[Repair]:
    """The transposed convolutions that made a picture, whose strides leave several sizes to choose from, so that it is as large as `y`."""
    lacking = {there - here for here, there in zip(x.sizes[2:], y.sizes[2:], strict=False)}
    short = lacking.pop() if len(lacking) == 1 and len(x.sizes) == len(y.sizes) else 0  # the same in each dimension
    edits: list[Repair] = []
    for step in steps(x.made):
        module = facts.modules.get(step.module)
        if short <= 0 or not isinstance(module, nn.modules.conv._ConvTransposeNd) or not step.op.startswith("conv_transpose"):
            continue
        stride, padding = module.stride[0], module.output_padding[0]
        if {*module.stride, *module.dilation} - {stride, 1} or {*module.output_padding} != {padding}:
            return []
        more = short % stride
        short //= stride  # what is lacking behind it, and not made by it, lacked before it
        why = f"leaves {shape(y.sizes[2:])}"
        edits += rebuilt_module(module, step.module, output_padding=int(padding) + more, rank=rank, why=why) if more else []
    return [functools.reduce(together, edits)] if edits and not short else []


def interpolated(name: str, sizes: tuple[int, ...]) -> ValueChange:
    """A change to the height and width of another tensor, which the code calls `name`."""
    return ValueChange(
        lambda x: f"F.interpolate({x}, size={f'{name}.shape[2:]' if name else sizes[2:]})",
        lambda tensor: nn.functional.interpolate(tensor, size=sizes[2:]),
    )
