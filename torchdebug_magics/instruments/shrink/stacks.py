"""Stacks of repeated layers: where they are, which of their layers stand for all, and how a model is changed so that it can be restored.

With ``--skip-attention``, every layer of a stack but the last has a tensor of attention's shape, connected to the graph, in its place.
"""

from __future__ import annotations

import copy
import functools
import re
import sys
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - its usual name
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from torchdebug_magics.instruments.shrink.report import Costs, StackRow
from torchdebug_magics.probing.modules import unwrapped

_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
_NUMBERS = {"layer", "layers", "block", "blocks", "depth"}
"""What the last word of a name is that says how many layers there are: ``n_layer``, ``num_hidden_layers``, ``depth``."""
_LISTS = {"layer", "layers", "block", "blocks", "type", "types", "pattern", "indices", "idxs"}
_SIDES = {"encoder", "decoder"}
_CONFIGS = {"config", "cfg", "conf", "hparams", "args"}
_FIELDS = ("_parameters", "_buffers", "_modules")
_ABSENT = object()
_SKIPPED = "torchdebug_skipped"
"""Under which the functions of transformers know the stand-in."""


class Edits:
    """What was changed, in order."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], object]] = []
        self.stacks: tuple[StackRow, ...] = ()
        """What was cut, for whoever asks to have it back."""

    def __len__(self) -> int:
        return len(self._undo)

    def put(self, table: MutableMapping[str, Any], name: str, value: object) -> None:
        """``table[name] = value``: an entry of a dict, or an attribute, as ``vars()`` holds it."""
        before = table.get(name, _ABSENT)

        def undo() -> None:
            if before is _ABSENT:
                table.pop(name, None)
            else:
                table[name] = before

        self._undo.append(undo)
        table[name] = value

    def undo(self, down_to: int = 0) -> None:
        """Take all back, or those after the first few."""
        while len(self._undo) > down_to:
            self._undo[-1]()
            self._undo.pop()


_OF_MODELS: WeakKeyDictionary[torch.nn.Module, Edits] = WeakKeyDictionary()


def edits_of(model: torch.nn.Module) -> Edits:
    """Those of a model, which end with it; a copy of it has none."""
    return _OF_MODELS.setdefault(unwrapped(model), Edits())


@dataclass(eq=False)
class Stack:
    """A container of layers that follow each other."""

    path: str
    container: nn.Module
    owners: tuple[nn.Module, ...]
    """The modules that it is in, the outermost first."""
    layers: tuple[nn.Module, ...]
    kinds: tuple[object, ...]
    """What is equal for layers that can stand for each other."""

    @property
    def is_of_blocks(self) -> bool:
        """Whether its layers are more than one plain layer of torch's."""
        return all(map(_is_block, self.layers))

    def choices(self, amount: int) -> list[tuple[int, ...]]:
        """Which layers to keep, the fewest first: one of each kind; or all up to the last new kind, where numbers matter to the model."""
        firsts = sorted({kind: place for place, kind in reversed(list(enumerate(self.kinds)))}.values())
        others = [place for place in range(len(self.layers)) if place not in firsts]
        chosen = tuple(sorted(firsts + others[: max(0, amount - len(firsts))]))
        prefix = tuple(range(max(amount, firsts[-1] + 1)))
        return [fromkey for fromkey in dict.fromkeys((chosen, prefix)) if len(fromkey) < len(self.layers)]


def stacks_in(model: nn.Module, amount: int | None, not_stacks: AbstractSet[int]) -> list[Stack]:
    """The outermost containers with layers to spare, or all where `amount` is None; what has one of these ids is none.

    Plain layers, as in a projection of equal ones, count only where there are no blocks.
    """
    of_blocks = any(stack.is_of_blocks for stack in _outermost("", model, (), None, not_stacks))
    stacks = [stack for stack in _outermost("", model, (), amount, not_stacks) if stack.is_of_blocks == of_blocks]
    groups: dict[tuple[int, int], list[Stack]] = defaultdict(list)
    for stack in stacks:
        groups[id(stack.owners[-1]) if stack.owners else 0, len(stack.layers)].append(stack)
    for group in groups.values():  # lists of one module that are gone through side by side are cut alike
        together = tuple(zip(*(stack.kinds for stack in group), strict=True))
        for stack in group:
            stack.kinds = together
    return stacks


def _outermost(
    path: str, module: nn.Module, owners: tuple[nn.Module, ...], amount: int | None, not_stacks: AbstractSet[int]
) -> Iterator[Stack]:
    if isinstance(module, torch.jit.ScriptModule):
        return
    stack = _stack(path, module, owners) if id(module) not in not_stacks else None
    if stack is not None and (amount is None or stack.choices(amount)):
        yield stack
        return
    seen: set[int] = set()
    for name, child in module.named_children():
        if id(child) not in seen:
            seen.add(id(child))
            yield from _outermost(f"{path}.{name}".lstrip("."), child, (*owners, module), amount, not_stacks)


def _stack(path: str, module: nn.Module, owners: tuple[nn.Module, ...]) -> Stack | None:
    layers = tuple(child for child in module._modules.values() if child is not None)
    if not isinstance(module, _CONTAINERS) or len(layers) < 2 or len(layers) < len(module._modules):  # noqa: PLR2004 - one repeats nothing
        return None
    if any(next(layer.parameters(), None) is None for layer in layers):
        return None
    if len({type(layer) for layer in layers}) > 1 and not all(map(_is_block, layers)):
        return None
    types = per_layer_kinds(settings_of(owners), len(layers), path)
    # What its parts are, the shapes of their parameters, and the words and switches that they are set to.
    signatures = [tuple((path, type(part), *_features(part)) for path, part in layer.named_modules()) for layer in layers]
    kinds = tuple(zip(types, signatures, strict=True))
    return Stack(path, module, owners, layers, kinds)


def _is_block(layer: nn.Module) -> bool:
    """Whether it is more than one plain layer of torch's."""
    return bool(layer._modules) or not type(layer).__module__.startswith("torch.nn")


def _features(part: nn.Module) -> Iterator[Any]:
    for name, tensor in {**part._parameters, **part._buffers}.items():
        yield name, None if tensor is None or is_lazy(tensor) else (tensor.shape, tensor.dtype)
    for name, value in vars(part).items():
        if name != "training" and type(value) in {str, bool}:
            yield name, re.sub(r"\d+", "", value) if type(value) is str else value  # a layer may know its own name


Settings: TypeAlias = tuple[MutableMapping[str, Any], bool]
"""One place where settings stand, the attributes of a module, or a configuration; and whether it is one."""


def settings_of(owners: Sequence[nn.Module]) -> list[Settings]:
    """Of modules around a stack: their attributes, their configurations, and what is in those and is not another module's."""
    parts = owners[0].modules() if owners else ()
    others = {id(part.config) for part in parts if "config" in vars(part)} - {id(vars(owner).get("config")) for owner in owners}
    found: dict[int, Settings] = {}
    for owner in owners:
        found[id(vars(owner))] = vars(owner), False
        for config in _configs(vars(owner), others):
            found.setdefault(id(config), (config, True))
    return list(found.values())


def _configs(table: Mapping[str, Any], others: set[int], depth: int = 0) -> Iterator[MutableMapping[str, Any]]:
    """Configurations by the name that they have: ``config``, ``cfg``, ``hparams``, ``text_config``."""
    for name, value in list(table.items()):
        if set(_words(name)) & _CONFIGS and id(value) not in others and not isinstance(value, nn.Module):
            entries = value if isinstance(value, dict) else getattr(value, "__dict__", None)
            if isinstance(entries, dict) and depth < 3:  # noqa: PLR2004 - of a model, of its part, of a part of that
                yield entries
                yield from _configs(entries, others, depth + 1)


def _words(name: str) -> list[str]:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower().strip("_").replace(".", "_").split("_")


def _concerns(name: str, path: str) -> bool:
    """Whether a setting may be one of the stack at `path`: what is said of a decoder is not said of an encoder."""
    side, where = _SIDES & set(_words(name)), _SIDES & set(_words(path))
    return not side or not where or bool(side & where)


def per_layer_kinds(settings: Iterable[Settings], amount: int, path: str) -> list[tuple[Any, ...]]:
    """What the settings say of each layer: ``("full_attention",)``."""
    said = [
        value
        for table, _ in settings
        for name, value in table.items()
        if isinstance(value, (list, tuple, str)) and len(value) == amount and _LISTS & set(_words(name)) and _concerns(name, path)
        if all(isinstance(one, str) for one in value) or set(map(repr, value)) <= {"0", "1", "True", "False"}
    ]
    return list(zip(*said, strict=True)) if said else [()] * amount


def follow_cut(stack: Stack, kept: tuple[int, ...], edits: Edits) -> None:
    """Let numbers, lists and caches say what is left of the stack."""
    amount = len(stack.layers)
    for table, is_config in settings_of(stack.owners):
        for name, value in list(table.items()):
            if name not in _FIELDS and _concerns(name, stack.path):
                changed = _followed(_words(name), value, amount, kept, is_config=is_config)
                if changed is not value:
                    edits.put(table, name, changed)


def _followed(words: list[str], value: Any, amount: int, kept: tuple[int, ...], *, is_config: bool) -> Any:
    if type(value) is int:
        return len(kept) if value == amount and words[-1] in _NUMBERS else value
    is_named = bool(_LISTS & set(words))
    if isinstance(value, str):
        return "".join(value[place] for place in kept) if len(value) == amount and is_named else value
    if type(value) in {list, tuple}:
        # An entry of a list may be what a layer left, as in a cache; names of classes are not.
        of_layers = not is_config and all(one is None or isinstance(one, (Tensor, nn.Module, tuple)) for one in value)
        if len(value) == amount and (is_named or of_layers):
            return type(value)(value[place] for place in kept)
        are_places = all(type(one) is int and 0 <= one < amount for one in value) and list(value) == sorted(set(value))
        is_some = is_named and are_places and 0 < len(value) < amount
        return type(value)(kept.index(place) for place in value if place in kept) if is_some else value
    layers = getattr(value, "__dict__", {}).get("layers") if not is_config else None
    if type(layers) is list and len(layers) == amount:  # a cache with an entry a layer
        value = copy.copy(value)
        value.layers = [layers[place] for place in kept]
    return value


def renumber(stack: Stack, kept: tuple[int, ...], edits: Edits) -> None:
    """Give each kept layer the numbers of its new place: attributes that count up from layer to layer, as ``layer_idx`` does."""
    parts = [dict(layer.named_modules()) for layer in stack.layers]
    layers_of = Counter(part for layer in parts for part in {id(part) for part in layer.values()})
    numbered: dict[tuple[str, str], dict[int, int]] = {}
    for place, by_path in enumerate(parts):
        for path, part in by_path.items():
            for name, value in vars(part).items():
                if type(value) is int:
                    numbered.setdefault((path, name), {})[place] = value
    for (path, name), values in numbered.items():
        first = next(iter(values)), next(iter(values.values()))
        offset = first[1] - first[0]
        counts = all(value == place + offset for place, value in values.items())
        if not counts or (len(values) == 1 and not (offset == 0 and {"idx", "index", "layer"} & set(_words(name)))):
            continue
        for new, place in enumerate(kept):
            if place in values and new != place and layers_of[id(parts[place][path])] == 1:
                edits.put(parts[place][path].__dict__, name, new + offset)


def costs_of(model: nn.Module) -> Costs:
    """Of parameters and buffers; those that have no shape yet count nothing."""
    parameters = [parameter for parameter in model.parameters() if not is_lazy(parameter)]
    buffers = [buffer for buffer in model.buffers() if not is_lazy(buffer)]
    return Costs(
        parameters=sum(parameter.numel() for parameter in parameters),
        bytes=sum(parameter.numel() * parameter.element_size() for parameter in (*parameters, *buffers)),
    )


def rows_of(kept: Mapping[Stack, tuple[int, ...]]) -> tuple[StackRow, ...]:
    """As the report has them."""
    return tuple(
        StackRow(
            path=stack.path or "the model",
            type=type(stack.layers[0]).__name__,
            layers_before=len(stack.layers),
            kept=left,
            kinds=len(set(stack.kinds)),
        )
        for stack, left in kept.items()
    )


class SkippedAttention:
    """The layers whose attention is replaced, and whether the stand-in was ever called."""

    def __init__(self) -> None:
        self.layers = 0
        self.has_run = False

    def stand_in(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Of the shape ``(..., heads, length, width of value)``; all three get a gradient, and nothing grows with length squared."""
        self.has_run = True
        mean = value.mean(-2, keepdim=True)
        if mean.dim() > 3 and mean.shape[-3] != query.shape[-3]:  # noqa: PLR2004 - batch, heads, length, width
            mean = mean.repeat_interleave(query.shape[-3] // mean.shape[-3], dim=-3)
        return mean + 0 * (query.mean(-1, keepdim=True) + key.mean())


def skip_attention(stacks: Sequence[Stack], edits: Edits) -> SkippedAttention:
    """Replace it in all layers but the last of each stack, until `edits` are undone."""
    skipped = SkippedAttention()
    for layer in dict.fromkeys(layer for stack in stacks for layer in stack.layers[:-1]):
        skipped.layers += 1
        forward = layer.forward
        forward = forward.forward if isinstance(forward, _WithoutAttention) else forward  # skipped before
        edits.put(vars(layer), "forward", _WithoutAttention(forward, skipped))
        for part in layer.modules():
            _switch(part, skipped, edits)
    return skipped


class _WithoutAttention:
    """A layer's forward in which torch's attention is replaced. An attribute of the layer, so that a copy of it has a copy of this."""

    def __init__(self, forward: Callable[..., Any], skipped: SkippedAttention) -> None:
        functools.update_wrapper(self, forward)
        self.forward = forward
        self._skipped = skipped

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with _Replacing(self._skipped):
            return self.forward(*args, **kwargs)


class _Replacing(TorchFunctionMode):
    """Replaces torch's own attention functions."""

    def __init__(self, skipped: SkippedAttention) -> None:
        super().__init__()
        self._skipped = skipped

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            names = dict(zip(("query", "key", "value"), args, strict=False))
            return self._skipped.stand_in(**{**names, **{name: kwargs[name] for name in ("query", "key", "value") if name in kwargs}})
        if func is F.multi_head_attention_forward:
            return self._multi_head(*args, **kwargs)
        return func(*args, **kwargs)

    def _multi_head(self, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """The projections as they are, lengths first."""
        _, heads, weight, bias, bias_k, bias_v, _, _, out_weight, out_bias, *_ = rest
        weights = [kwargs.get(f"{name}_proj_weight") for name in "qkv"] if weight is None else weight.chunk(3)
        biases = (None,) * 3 if bias is None else bias.chunk(3)
        given = zip((query, key, value), weights, biases, strict=True)
        parts = [F.linear(one, by, plus).transpose(0, -2) for one, by, plus in given]
        mixed = self._skipped.stand_in(*parts).transpose(0, -2)
        mixed = mixed + sum(0 * one.sum() for one in (bias_k, bias_v) if one is not None)
        out = F.linear(mixed, out_weight, out_bias)
        if not kwargs.get("need_weights", True):
            return out, None
        batch = query.shape[1:2] if query.dim() > 2 else ()  # noqa: PLR2004 - length, batch, width
        per_head = () if kwargs.get("average_attn_weights", True) else (heads,)
        share = query.new_full((), 1 / max(1, key.shape[0]))
        return out, share.expand(*batch, *per_head, query.shape[0], key.shape[0])


def _switch(part: nn.Module, skipped: SkippedAttention, edits: Edits) -> None:
    """The attention of transformers is chosen by the configuration that its module holds: that gets one of its own."""
    library: Any = sys.modules.get("transformers")
    config = vars(part).get("config")
    if library is None or "_attn_implementation_internal" not in getattr(config, "__dict__", {}):
        return
    own = copy.copy(config)
    vars(own).update({"_attn_implementation_internal": _SKIPPED, _SKIPPED: skipped})
    edits.put(vars(part), "config", own)
    if skipped not in _USED:
        _USED.add(skipped)
        library.AttentionInterface.register(_SKIPPED, _as_in_transformers)
        weakref.finalize(skipped, _release, library.AttentionInterface._global_mapping).atexit = False


_USED: weakref.WeakSet[SkippedAttention] = weakref.WeakSet()
"""The stand-in is known to transformers as long as a configuration names one."""


def _release(known: dict[str, Any]) -> None:
    if not list(_USED):  # its length counts those that are going
        known.pop(_SKIPPED, None)


def _as_in_transformers(module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    skipped: SkippedAttention = vars(module.config)[_SKIPPED]
    return skipped.stand_in(query, key, value).transpose(1, 2).contiguous(), None
