"""MultiheadAttention, and the Transformer layers around it."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from torchdebug_magics.format import shape
from torchdebug_magics.instruments.shapes.follow.seen import Made
from torchdebug_magics.instruments.shapes.repair.edit import Change, Edit, as_typed, method, on_operand
from torchdebug_magics.instruments.shapes.repair.failure_facts import Facts, Operand
from torchdebug_magics.instruments.shapes.repair.rebuild import rebuilt_module
from torchdebug_magics.instruments.shapes.repair.rules.earlier import taken_apart
from torchdebug_magics.instruments.shapes.repair.rules.rule_parts import (
    Diagnosis,
    gets,
    in_outer_call,
    producer_edits,
    reordered,
    rewritten,
    turned,
)
from torchdebug_magics.instruments.shapes.repair.size_history import JOINS, TURNS, came_from, steps

_LAYERS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
_WHOLE = (nn.TransformerEncoder, nn.TransformerDecoder)
ROLES = ("query", "key", "value")
_AROUND = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer, nn.TransformerEncoder, nn.TransformerDecoder, nn.Transformer)


def attention(facts: Facts) -> Diagnosis | None:
    """A module of attention's."""
    facts = replace(facts, operands=facts.given)  # the op sees them turned
    module: Any = facts.module
    if isinstance(module, (nn.Transformer, *_WHOLE, *_LAYERS)):
        return _transformer(facts)
    if not isinstance(module, nn.MultiheadAttention) or len(facts.given) < 3:
        return None
    at_each = places(facts)
    query, key, value = (facts.given[at] for at in at_each)
    for role, (at, name) in enumerate(zip(at_each, ("embed_dim", "kdim", "vdim"), strict=True)):
        wanted, operand = getattr(module, name), facts.given[at]
        if operand.sizes and operand.sizes[-1] != wanted:
            return _features(facts, role, at, "embed_dim" if wanted == module.embed_dim else name, wanted)
    if len(query.sizes) not in {2, 3}:
        return Diagnosis(
            f"{facts.who} expects a query of 2 or 3 dimensions, gets {len(query.sizes)}: {shape(query.sizes)}",
            (),
            query,
        )
    return masked(facts, query, key) or _lengths(facts, query, key, value)


def _features(facts: Facts, role: int, at: int, name: str, wanted: int) -> Diagnosis:
    operand = facts.given[at]
    got = operand.sizes[-1]
    who, edits = _outer(facts, got)
    sentence = f"{who} expects {wanted} features ({name}) in its {ROLES[role]}, gets {gets(operand, got)}"
    if (apart := taken_apart(operand, wanted)) and apart[1]:
        return Diagnosis(sentence + apart[0], apart[1], operand)
    if role and who != facts.who:
        edits += _projected(facts, operand, got, wanted)
    if not edits:
        edits = reordered(facts, at, -1, wanted)
        same = all(one.sizes[-1:] == (got,) for one in facts.given[:3])
        if name != "embed_dim" or same:
            edits += rebuilt_module(facts.module, facts.path, **dict[str, Any]({name: got}))
        elif role:
            edits += rebuilt_module(facts.module, facts.path, **dict[str, Any]({("kdim", "vdim")[role - 1]: got}))
    edits += producer_edits(facts, operand, got, wanted, rank=15 if who != facts.who else 40)
    return Diagnosis(sentence, tuple(edits), operand)


def _projected(facts: Facts, operand: Operand, got: int, wanted: int) -> list[Edit]:
    """What a decoder attends to, made as wide as the decoder, in the user's call of it."""
    typed: list[str] = []

    def text(x: str) -> str:
        typed.append(f"{x if x.isidentifier() else 'memory'}_projection")
        return f"self.{typed[-1]}({x})"

    change = Change(text, lambda tensor: tensor.new_zeros((*tensor.shape[:-1], wanted)))
    edits = in_outer_call(facts, operand, change, rank=22, why="as wide as the decoder")
    place = facts.outer_path.rpartition(".")[0]
    return [
        replace(edit, code=f"{as_typed(f'{place}.{name}'.lstrip('.'))} = nn.Linear({got}, {wanted})\n{edit.code}", many=2)
        for edit, name in zip(edits, typed, strict=False)
    ]


def _outer(facts: Facts, got: int) -> tuple[str, list[Edit]]:
    """The Transformer module around a failing part of it, made for so many features."""
    path, found = facts.path or "", ""
    module: Any = None
    while True:
        path, dot, _ = path.rpartition(".")
        one = facts.modules.get(path)
        if isinstance(one, (*_LAYERS, *_WHOLE, nn.Transformer)):
            module, found = one, path
        if not dot:
            break
    if module is None:
        return facts.who, []
    layer = next((one for one in module.modules() if isinstance(one, _LAYERS)), None)
    if layer is None or isinstance(module, nn.Transformer) or got % layer.self_attn.num_heads:
        return f"`{found or type(module).__name__}`", []
    code = f"nn.{type(layer).__name__}({got}, {layer.self_attn.num_heads}{_layer_options(layer)})"
    if isinstance(module, _WHOLE):
        code = f"nn.{type(module).__name__}({code}, {len(module.layers)})"
    edit = Edit(f"{as_typed(found)} = {code}", "d_model of the input", 20, modules={found: _new(layer, module, got)})
    return f"`{found or type(module).__name__}`", [edit]


def _layer_options(layer: Any) -> str:
    options = {"dim_feedforward": (layer.linear1.out_features, 2048), "dropout": (layer.dropout.p, 0.1)}
    options |= {"batch_first": (layer.self_attn.batch_first, False), "norm_first": (layer.norm_first, False)}
    return "".join(f", {name}={value}" for name, (value, default) in options.items() if value != default)


def _new(layer: Any, module: Any, got: int) -> Callable[[nn.Module], nn.Module]:
    def made(old: nn.Module) -> nn.Module:
        options = {"batch_first": layer.self_attn.batch_first, "norm_first": layer.norm_first, "dropout": layer.dropout.p}
        with torch.device("meta"):
            one = type(layer)(got, layer.self_attn.num_heads, layer.linear1.out_features, **options)
            new = type(module)(one, len(module.layers)) if isinstance(module, _WHOLE) else one
        return new.train(old.training)

    return made


def _lengths(facts: Facts, query: Operand, key: Operand, value: Operand) -> Diagnosis | None:
    module: Any = facts.module
    if key.sizes[:-1] != value.sizes[:-1]:
        return Diagnosis(f"{facts.who} expects key and value of one length, gets {shape(key.sizes)} and {shape(value.sizes)}", (), value)
    batch = 0 if module.batch_first else 1
    if len(query.sizes) == len(key.sizes) == 3 and query.sizes[batch] != key.sizes[batch]:
        sentence = f"{facts.who} expects query and key of one batch, gets {query.sizes[batch]} and {key.sizes[batch]} in dimension {batch}"
        edits: list[Edit] = []
        if query.sizes[1 - batch] == key.sizes[1 - batch]:
            sentence += f" of {shape(query.sizes)} and {shape(key.sizes)}: its batch is {'first' if module.batch_first else 'second'}"
            edits += rebuilt_module(module, facts.path, batch_first=not module.batch_first, rank=5, why="the batch is the other dimension")
        return Diagnosis(sentence, (*edits, *_for_the_batch(facts, query, key, batch)), query if query.sizes[batch] == 1 else key)
    return None


def _for_the_batch(facts: Facts, query: Operand, key: Operand, batch: int) -> list[Edit]:
    """The same queries for every sample, where they are one parameter; of two dimensions, or with a batch of one."""
    one, other = (query, key) if query.sizes[: batch + 1][-1:] == (1,) or len(query.sizes) < len(key.sizes) else (key, query)
    at, many = facts.given.index(one), other.sizes[batch]
    if len(one.sizes) == len(other.sizes) and one.sizes[batch] != 1:
        return []
    size = f"{other.name}.size({batch})" if other.name.isidentifier() else str(many)
    sizes = [-1] * len(other.sizes)
    sizes[batch] = many
    told = ", ".join(size if dim == batch else "-1" for dim in range(len(sizes)))
    lift = f".unsqueeze({batch})" if len(one.sizes) < len(other.sizes) else ""

    def expanded(tensor: torch.Tensor) -> torch.Tensor:
        return (tensor.unsqueeze(batch) if lift else tensor).expand(sizes)

    free = replace(one, owned=False)
    given = tuple(free if each is one else each for each in facts.given)
    change = Change(lambda x: f"{x}{lift}.expand({told})", expanded)
    return on_operand(replace(facts, operands=given, given=given), at, change, rank=4, why="the same for every sample")


def _transformer(facts: Facts) -> Diagnosis | None:
    module: Any = facts.module
    layer = next((one for one in module.modules() if isinstance(one, _LAYERS)), None)
    if layer is None or not facts.given:
        return None
    wanted = layer.self_attn.embed_dim
    for at, one in enumerate(facts.given[:2]):
        if one.sizes and one.sizes[-1] != wanted and "feature number" in facts.text:
            edits = [*reordered(facts, at, -1, wanted), *producer_edits(facts, one, one.sizes[-1], wanted, rank=15)]
            return Diagnosis(f"{facts.who} expects {wanted} features (d_model), gets {gets(one, one.sizes[-1])}", tuple(edits), one)
    if len(facts.given) > 1 and len(facts.given[0].sizes) == 3 and len(facts.given[1].sizes) == 2:
        first, second = facts.given[:2]
        batch = 0 if layer.self_attn.batch_first else 1
        src = f"src of {shape(first.sizes)}, with a batch of {first.sizes[batch]}"
        sentence = f"{facts.who} gets {src}, and tgt of {shape(second.sizes)} without one"
        return Diagnosis(sentence, tuple(_for_the_batch(facts, second, first, batch)), second)
    if "batch number" in facts.text:
        first, second = facts.given[0], facts.given[1]
        batch = 0 if layer.self_attn.batch_first else 1
        sentence = f"{facts.who} reads dimension {batch} as the batch, and src is {shape(first.sizes)}, tgt {shape(second.sizes)}"
        edits = _batch_first(facts, module, layer) if first.sizes[1 - batch] == second.sizes[1 - batch] else []
        edits += turned(facts, 0, (1, 0, 2), rank=25)
        return Diagnosis(sentence, tuple(edits), second)
    return None


def _batch_first(facts: Facts, module: Any, layer: Any) -> list[Edit]:
    if not isinstance(module, nn.Transformer):
        return []
    now = layer.self_attn.batch_first
    many = (len(module.encoder.layers), len(module.decoder.layers))
    wide = layer.linear1.out_features
    options = f", num_encoder_layers={many[0]}, num_decoder_layers={many[1]}, dim_feedforward={wide}, batch_first={not now}"

    def made(old: nn.Module) -> nn.Module:
        with torch.device("meta"):
            new = nn.Transformer(module.d_model, module.nhead, *many, wide, batch_first=not now)
        return new.train(old.training)

    code = f"{as_typed(facts.path or '')} = nn.Transformer({module.d_model}, {module.nhead}{options})"
    return [Edit(code, "the batch comes first here" if not now else "the batch comes second here", 5, modules={facts.path or "": made})]


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


def scaled(facts: Facts) -> Diagnosis | None:
    """Width, length, mask, batch and heads, in this order."""
    if facts.op != "scaled_dot_product_attention" or len(facts.operands) < 3:
        return None
    query, key, value = facts.operands[:3]
    mask = facts.argument(3, "attn_mask")
    if query.sizes[-1:] != key.sizes[-1:]:
        edits = (
            turned(facts, 1, (*range(len(key.sizes) - 2), len(key.sizes) - 1, len(key.sizes) - 2))
            if query.sizes[-1] == key.sizes[-2]
            else []
        )
        sentence = f"attention expects query and key of one width, gets {shape(query.sizes)} and {shape(key.sizes)}"
        return Diagnosis(sentence, tuple(edits), key)
    if key.sizes[-2:-1] != value.sizes[-2:-1]:
        return Diagnosis(f"attention expects key and value of one length, gets {shape(key.sizes)} and {shape(value.sizes)}", (), value)
    if isinstance(mask, torch.Tensor):
        return _scaled_mask(facts, mask, query, key)
    if query.sizes[:-2] != key.sizes[:-2]:
        return Diagnosis(
            f"attention expects query and key of the same batch and heads, gets {shape(query.sizes)} and {shape(key.sizes)}",
            tuple(_grouped(facts, query, key)),
            key,
        )
    return None


def _grouped(facts: Facts, query: Operand, key: Operand) -> list[Edit]:
    """Fewer heads of keys than of queries, each for a group of them."""
    if len(query.sizes) != 4 or len(key.sizes) != 4 or query.sizes[0] != key.sizes[0]:
        return []
    if query.sizes[1] <= key.sizes[1] or query.sizes[1] % key.sizes[1]:
        return []

    def write(call: ast.Call) -> ast.expr:
        return ast.Call(call.func, call.args, [*call.keywords, ast.keyword("enable_gqa", ast.Constant(value=True))])

    why = f"{query.sizes[1] // key.sizes[1]} heads of queries to one of keys and values"
    return rewritten(facts, write, lambda func, args, kwargs: func(*args, **{**kwargs, "enable_gqa": True}), rank=5, why=why)


def _scaled_mask(facts: Facts, mask: torch.Tensor, query: Operand, key: Operand) -> Diagnosis | None:
    wanted = (*query.sizes[:-1], key.sizes[-2])
    sizes = tuple(mask.shape)
    at = next((at for at, one in enumerate(facts.operands) if one.tensor is mask), 3)
    edits: list[Edit] = []
    if len(sizes) == 2 and len(wanted) == 4 and sizes == (wanted[0], wanted[-1]):
        edits += on_operand(
            facts,
            at,
            Change(lambda x: f"{x}[:, None, None, :]", lambda one: one[:, None, None, :]),
            rank=3,
            why="the same for every head and query",
        )
    if len(sizes) == 3 and len(wanted) == 4:
        edits += on_operand(facts, at, method("unsqueeze", 1), rank=3, why="the same for every head")
    sentence = f"attention expects a mask that fits {shape(wanted)} (batch, heads, target, source), gets {shape(sizes)}"
    return Diagnosis(sentence, tuple(edits), facts.operands[at]) if not _broadcasts(sizes, wanted) else None


def _broadcasts(sizes: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    return len(sizes) <= len(wanted) and all(one in {1, other} for one, other in zip(sizes[::-1], wanted[::-1], strict=False))
