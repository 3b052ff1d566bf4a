"""MultiheadAttention, and the Transformer layers around it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from torchdebug_magics.format import shape
from torchdebug_magics.instruments.shapes.repair.around import in_outer_call
from torchdebug_magics.instruments.shapes.repair.edit import Change, Edit, as_typed, on_operand
from torchdebug_magics.instruments.shapes.repair.rebuild import rebuilt_module
from torchdebug_magics.instruments.shapes.repair.rules.layers.attention_masks import ROLES, masked, places
from torchdebug_magics.instruments.shapes.repair.rules.rule_parts import Diagnosis, gets, producer_edits, reordered, turned
from torchdebug_magics.instruments.shapes.repair.rules.steps.unturned import taken_apart

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchdebug_magics.instruments.shapes.repair.failure_facts import Facts, Operand

__all__ = ["attention"]

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
