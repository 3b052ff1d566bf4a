"""The masks of MultiheadAttention."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional

from torchdebug_magics.format import shape
from torchdebug_magics.instruments.shapes.repair.around import in_outer_call
from torchdebug_magics.instruments.shapes.repair.edit import Change, Edit, method, on_operand
from torchdebug_magics.instruments.shapes.repair.rebuild import rebuilt_module
from torchdebug_magics.instruments.shapes.repair.rules.rule_parts import Diagnosis
from torchdebug_magics.instruments.shapes.repair.size_history import JOINS, TURNS, came_from, steps

if TYPE_CHECKING:
    from torchdebug_magics.instruments.shapes.follow.origins import Made
    from torchdebug_magics.instruments.shapes.repair.failure_facts import Facts, Operand

__all__ = ["ROLES", "masked", "places"]

ROLES = ("query", "key", "value")
_AROUND = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer, nn.TransformerEncoder, nn.TransformerDecoder, nn.Transformer)


def places(facts: Facts) -> tuple[int, int, int]:
    """Where query, key and value stand among the tensors that were given, whatever the order of the names in the call."""
    if facts.call is None:
        return 0, 1, 2
    names = [name for name, one in zip(ROLES, facts.call.args, strict=False) if isinstance(one, torch.Tensor)]
    names += [name for name, one in facts.call.kwargs.items() if isinstance(one, torch.Tensor)]
    found = tuple(names.index(name) for name in ROLES if name in names)
    return (found[0], found[1], found[2]) if len(found) == len(ROLES) and max(found) < len(facts.given) else (0, 1, 2)


def masked(facts: Facts, query: Operand, key: Operand) -> Diagnosis | None:
    """A mask of another size than queries and keys make it."""
    module: Any = facts.module
    given: dict[str, Any] = {}
    if facts.call is not None:
        names = ("query", "key", "value", "key_padding_mask", "need_weights", "attn_mask")
        given = {**dict(zip(names, facts.call.args, strict=False)), **facts.call.kwargs}
    batch, target, source = _sizes(module, query, key)
    padding, mask = given.get("key_padding_mask"), given.get("attn_mask")
    wanted: tuple[int, ...]
    if isinstance(padding, torch.Tensor):
        wanted = (source,) if batch is None else (batch, source)
        if tuple(padding.shape) != wanted:
            return _wrong_mask(facts, "key_padding_mask", padding, wanted, "source" if batch is None else "batch x source")
    if isinstance(mask, torch.Tensor):
        wanted = (target, source) if mask.dim() == 2 or batch is None else (batch * module.num_heads, target, source)
        if tuple(mask.shape) != wanted:
            words = "target x source" if len(wanted) == 2 else "(batch * heads) x target x source"
            return _wrong_mask(facts, "attn_mask", mask, wanted, words)
    return None


def _sizes(module: Any, query: Operand, key: Operand) -> tuple[int | None, int, int]:
    if len(query.sizes) == 2:
        return None, query.sizes[0], key.sizes[0]
    batch = 0 if module.batch_first else 1
    return query.sizes[batch], query.sizes[1 - batch], key.sizes[1 - batch] if len(key.sizes) > 1 else 0


def _wrong_mask(facts: Facts, name: str, mask: torch.Tensor, wanted: tuple[int, ...], words: str) -> Diagnosis:
    module: Any = facts.module
    sizes = tuple(mask.shape)
    query, key = (facts.given[at] for at in places(facts)[:2])
    own = facts.operand(mask)
    source = came_from(own.made) if own is not None else ""
    parts = (
        f"query is {shape(query.sizes)} and its key {shape(key.sizes)}"
        if query.sizes != key.sizes
        else f"query and key are {shape(key.sizes)}"
    )
    sentence = f"{facts.who} expects {name} of {shape(wanted)} ({words}), gets {shape(sizes)}{f' {source}' if source else ''}"
    edits: list[Edit] = []
    if sizes == (_padding(module, query, key) if name == "key_padding_mask" else _flipped(module, query, key, len(sizes))):
        now, then = ("batch x steps", "second") if module.batch_first else ("steps x batch", "first")
        sentence += f": it reads {shape(query.sizes)} as {now} x features"
        if not _in_transformer(facts):
            edits += rebuilt_module(module, facts.path, batch_first=not module.batch_first, rank=2, why=f"the batch is {then} here")
    if not edits:
        sentence += f"; its {parts}"
    at = next((at for at, one in enumerate(facts.given) if one.tensor is mask), None)
    if at is not None:
        edits += _mask_edits(facts, at, sizes, wanted)
    return Diagnosis(sentence, tuple(edits), own)


def _mask_edits(facts: Facts, at: int, sizes: tuple[int, ...], wanted: tuple[int, ...]) -> list[Edit]:
    module: Any = facts.module
    heads = module.num_heads
    edits: list[Edit] = []
    if len(sizes) == 2 and sizes[::-1] == wanted:
        own = facts.given[at].made
        edits += on_operand(facts, at, method("t"), rank=1 if own is not None and own.op in TURNS else 4)
    if len(sizes) == 3 and len(wanted) == 3 and sizes[1:] == wanted[1:] and sizes[0] * heads == wanted[0]:
        edits += on_operand(facts, at, method("repeat_interleave", heads, 0), rank=4, why="one mask a head")
    if len(sizes) == 4 and sizes[0] * sizes[1] == wanted[0]:
        edits += on_operand(facts, at, method("flatten", 0, 1), rank=4)
    if len(sizes) == len(wanted) and all(have >= want for have, want in zip(sizes, wanted, strict=True)):
        cut = ", ".join(f":{want}" for want in wanted)
        ends = tuple(slice(want) for want in wanted)
        change = Change(lambda x: f"{x}[{cut}]", lambda one: one[ends])
        edits += on_operand(facts, at, change, rank=10, why="only the length needed")
        edits += in_outer_call(facts, facts.given[at], change, rank=10, why="only the length needed")
    if len(sizes) == len(wanted) and sizes != wanted and all(have <= want for have, want in zip(sizes, wanted, strict=True)):
        edits += _longer(facts, at, sizes, wanted)
    return edits


def _longer(facts: Facts, at: int, sizes: tuple[int, ...], wanted: tuple[int, ...]) -> list[Edit]:
    """A mask of fewer steps than the sequence has: nothing is masked in those that were put in front of it, or behind."""
    missing = [want - have for have, want in zip(sizes, wanted, strict=True)]
    if len(sizes) != 2 or (sizes[0] != wanted[0] and sizes[0] != sizes[1]):  # rows of a batch are not made up
        return []
    edits: list[Edit] = []
    steps_of = facts.given[places(facts)[1]]
    prefixed = any(_is_prefixed(step, missing[-1]) for step in steps(steps_of.made))
    for front in (True, False):
        pads = [pad for lack in reversed(missing) for pad in ((lack, 0) if front else (0, lack))]
        while pads[-2:] == [0, 0]:
            pads = pads[:-2]
        change = Change(f"F.pad({{}}, {tuple(pads)})".format, partial(functional.pad, pad=tuple(pads)))
        why = f"no mask in the {'first' if front else 'last'} {missing[-1]}"
        rank = 12 if front is prefixed else 14
        edits += on_operand(facts, at, change, rank=rank, why=why) or in_outer_call(facts, facts.given[at], change, rank=rank, why=why)
    return edits


def _is_prefixed(step: Made, many: int) -> bool:
    """Whether it put so many steps in front, such as a class token."""
    return step.op in JOINS and len(step.inputs) > 1 and many in step.inputs[0][0][:-1]


def _flipped(module: Any, query: Operand, key: Operand, many: int) -> tuple[int, ...] | None:
    if len(query.sizes) != 3 or len(key.sizes) != 3:
        return None
    step = 0 if module.batch_first else 1
    target, source, batch = query.sizes[step], key.sizes[step], query.sizes[1 - step]
    return (target, source) if many == 2 else (batch * module.num_heads, target, source)


def _padding(module: Any, query: Operand, key: Operand) -> tuple[int, ...] | None:
    if len(query.sizes) != 3 or len(key.sizes) != 3:
        return None
    step = 0 if module.batch_first else 1
    return query.sizes[1 - step], key.sizes[step]


def _in_transformer(facts: Facts) -> bool:
    """Whether a Transformer of torch's holds the module, and passes the batch on as it takes it."""
    path = facts.path or ""
    return any(isinstance(one, _AROUND) and (path.startswith(f"{outer}.") if outer else bool(path)) for outer, one in facts.modules.items())
