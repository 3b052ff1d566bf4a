"""MultiheadAttention, the Transformer layers around it, and scaled dot-product attention."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from torchdebug_magics.format import shape
from torchdebug_magics.instruments.shapes.repair.edit import Change, Edit, method, on_operand
from torchdebug_magics.instruments.shapes.repair.rebuild import rebuilt_module
from torchdebug_magics.instruments.shapes.repair.rules.parts import Diagnosis, gets, producer_edits, reordered, turned

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchdebug_magics.instruments.shapes.repair.facts import Facts, Operand

__all__ = ["attention", "scaled"]

_LAYERS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
_WHOLE = (nn.TransformerEncoder, nn.TransformerDecoder)


def attention(facts: Facts) -> Diagnosis | None:
    """A module of attention's."""
    facts = replace(facts, operands=facts.given)  # the op sees them turned
    module: Any = facts.module
    if isinstance(module, (nn.Transformer, *_WHOLE, *_LAYERS)):
        return _transformer(facts)
    if not isinstance(module, nn.MultiheadAttention) or len(facts.given) < 3:
        return None
    query, key, value = (one for one in facts.given[:3])
    for at, (operand, name) in enumerate(((query, "embed_dim"), (key, "kdim"), (value, "vdim"))):
        wanted = getattr(module, name)
        if operand.sizes and operand.sizes[-1] != wanted:
            return _features(facts, at, operand, "embed_dim" if wanted == module.embed_dim else name, wanted)
    if len(query.sizes) not in {2, 3}:
        return Diagnosis(
            f"{facts.who} expects a query of 2 or 3 dimensions, gets {len(query.sizes)}: {shape(query.sizes)}",
            (),
            query,
        )
    return _mask(facts, query, key) or _lengths(facts, query, key, value)


def _features(facts: Facts, at: int, operand: Operand, name: str, wanted: int) -> Diagnosis:
    got = operand.sizes[-1]
    role = ("query", "key", "value")[at]
    who, edits = _outer(facts, got)
    sentence = f"{who} expects {wanted} features ({name}) in its {role}, gets {gets(operand, got)}"
    if not edits:
        edits = reordered(facts, at, -1, wanted)
        same = all(one.sizes[-1:] == (got,) for one in facts.given[:3])
        if name != "embed_dim" or same:
            edits += rebuilt_module(facts.module, facts.path, **dict[str, Any]({name: got}))
        elif at:
            edits += rebuilt_module(facts.module, facts.path, **dict[str, Any]({("kdim", "vdim")[at - 1]: got}))
    edits += producer_edits(facts, operand, got, wanted, rank=15 if who != facts.who else 40)
    return Diagnosis(sentence, tuple(edits), operand)


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
    edit = Edit(f"{found or 'model'} = {code}", "d_model as the input has it", 20, modules={found: _new(layer, module, got)})
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


def _mask(facts: Facts, query: Operand, key: Operand) -> Diagnosis | None:
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
    query, key = facts.given[0], facts.given[1]
    sentence = f"{facts.who} expects {name} of {shape(wanted)} ({words}), gets {shape(sizes)}"
    edits: list[Edit] = []
    if sizes == (_padding(module, query, key) if name == "key_padding_mask" else _flipped(module, query, key, len(sizes))):
        now, then = ("batch x steps", "second") if module.batch_first else ("steps x batch", "first")
        sentence += f": it reads {shape(query.sizes)} as {now} x features"
        if _outer(facts, 0)[0] == facts.who:
            edits += rebuilt_module(module, facts.path, batch_first=not module.batch_first, rank=2, why=f"the batch is {then} here")
    at = next((at for at, one in enumerate(facts.given) if one.tensor is mask), None)
    if at is not None:
        edits += _mask_edits(facts, at, sizes, wanted)
    return Diagnosis(sentence, tuple(edits), facts.operand(mask))


def _mask_edits(facts: Facts, at: int, sizes: tuple[int, ...], wanted: tuple[int, ...]) -> list[Edit]:
    module: Any = facts.module
    heads = module.num_heads
    edits: list[Edit] = []
    if len(sizes) == 2 and sizes[::-1] == wanted:
        edits += on_operand(facts, at, method("t"), rank=4)
    if len(sizes) == 3 and len(wanted) == 3 and sizes[1:] == wanted[1:] and sizes[0] * heads == wanted[0]:
        edits += on_operand(facts, at, method("repeat_interleave", heads, 0), rank=4, why="one mask a head")
    if len(sizes) == 4 and sizes[0] * sizes[1] == wanted[0]:
        edits += on_operand(facts, at, method("flatten", 0, 1), rank=4)
    if len(sizes) == len(wanted) and all(have >= want for have, want in zip(sizes, wanted, strict=True)):
        cut = ", ".join(f":{want}" for want in wanted)
        ends = tuple(slice(want) for want in wanted)
        edits += on_operand(facts, at, Change(lambda x: f"{x}[{cut}]", lambda one: one[ends]), rank=10, why="as much as is needed")
    return edits


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


def _lengths(facts: Facts, query: Operand, key: Operand, value: Operand) -> Diagnosis | None:
    module: Any = facts.module
    if key.sizes[:-1] != value.sizes[:-1]:
        return Diagnosis(f"{facts.who} expects key and value of one length, gets {shape(key.sizes)} and {shape(value.sizes)}", (), value)
    batch = 0 if module.batch_first else 1
    if len(query.sizes) == len(key.sizes) == 3 and query.sizes[batch] != key.sizes[batch]:
        sentence = f"{facts.who} expects query and key of one batch, gets {query.sizes[batch]} and {key.sizes[batch]} in dimension {batch}"
        edits: list[Edit] = []
        if query.sizes[1 - batch] == key.sizes[1 - batch]:
            sentence += f" of {shape(query.sizes)} and {shape(key.sizes)}: its batch stands {'first' if module.batch_first else 'second'}"
            edits += rebuilt_module(module, facts.path, batch_first=not module.batch_first, rank=5, why="the batch is the other dimension")
        return Diagnosis(sentence, tuple(edits), key)
    return None


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

    code = f"{facts.path or 'model'} = nn.Transformer({module.d_model}, {module.nhead}{options})"
    return [Edit(code, "the batch comes first here" if not now else "the batch comes second here", 5, modules={facts.path or "": made})]


def scaled(facts: Facts) -> Diagnosis | None:
    """`F.scaled_dot_product_attention` itself."""
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
            f"attention expects query and key of the same batch and heads, gets {shape(query.sizes)} and {shape(key.sizes)}", (), key
        )
    return None


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
