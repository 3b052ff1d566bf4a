"""A module of torch's own made again with other sizes, and the code that makes it."""

from __future__ import annotations

import functools
import inspect
import itertools
import warnings
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from io import StringIO
from typing import Any

import torch
from torch import nn

from torchdebug_magics.instruments.shapes.repair.edit import Edit, as_typed
from torchdebug_magics.probing.rng import RandomState
from torchdebug_magics.probing.source.code_owner import is_user_code

_CONV = (("in_channels", "out_channels", "kernel_size"), {"stride": 1, "padding": 0, "dilation": 1, "groups": 1, "bias": True})
_TRANSPOSED = (("in_channels", "out_channels", "kernel_size"), {"stride": 1, "padding": 0, "output_padding": 0, "groups": 1, "bias": True})
_NORM = (("num_features",), {"eps": 1e-5, "momentum": 0.1, "affine": True, "track_running_stats": True})
_INSTANCE = (("num_features",), {"eps": 1e-5, "momentum": 0.1, "affine": False, "track_running_stats": False})
_RNN = (
    ("input_size", "hidden_size"),
    {"num_layers": 1, "nonlinearity": "tanh", "bias": True, "batch_first": False, "dropout": 0.0, "bidirectional": False, "proj_size": 0},
)
_CELL = (("input_size", "hidden_size"), {"bias": True, "nonlinearity": "tanh"})
_ATTENTION = (("embed_dim", "num_heads"), {"dropout": 0.0, "bias": True, "kdim": None, "vdim": None, "batch_first": False})

# (arguments by place, keyword arguments with their defaults) of each; an attribute of the same name holds the value.
_KINDS: dict[type[nn.Module], tuple[tuple[str, ...], dict[str, Any]]] = {
    nn.Linear: (("in_features", "out_features"), {"bias": True}),
    nn.Bilinear: (("in1_features", "in2_features", "out_features"), {"bias": True}),
    **dict.fromkeys((nn.Conv1d, nn.Conv2d, nn.Conv3d), (_CONV[0], {**_CONV[1], "padding_mode": "zeros"})),
    **dict.fromkeys((nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d), (_TRANSPOSED[0], {**_TRANSPOSED[1], "dilation": 1})),
    **dict.fromkeys((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm), _NORM),
    **dict.fromkeys((nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d), _INSTANCE),
    nn.LayerNorm: (("normalized_shape",), {"eps": 1e-5, "elementwise_affine": True, "bias": True}),
    nn.RMSNorm: (("normalized_shape",), {"eps": None, "elementwise_affine": True}),
    nn.GroupNorm: (("num_groups", "num_channels"), {"eps": 1e-5, "affine": True}),
    nn.Embedding: (
        ("num_embeddings", "embedding_dim"),
        {"padding_idx": None, "max_norm": None, "norm_type": 2.0, "scale_grad_by_freq": False, "sparse": False},
    ),
    nn.EmbeddingBag: (("num_embeddings", "embedding_dim"), {"max_norm": None, "mode": "mean", "sparse": False, "padding_idx": None}),
    **dict.fromkeys((nn.RNN, nn.LSTM, nn.GRU), _RNN),
    **dict.fromkeys((nn.RNNCell, nn.LSTMCell, nn.GRUCell), _CELL),
    nn.MultiheadAttention: _ATTENTION,
    nn.Transformer: (
        ("d_model", "nhead"),
        {"num_encoder_layers": 6, "num_decoder_layers": 6, "dim_feedforward": 2048, "dropout": 0.1, "batch_first": False},
    ),
    nn.PReLU: (("num_parameters",), {}),
    nn.Flatten: ((), {"start_dim": 1, "end_dim": -1}),
}
_MANY = ("kernel_size", "stride", "padding", "dilation", "output_padding", "normalized_shape")
_FROZEN = 25
"""What it adds to the rank that weights are not trained: whoever froze them does not want new ones."""
_MOST_WAYS = 64
"""How often a class of the user's own is made to find out which argument is which."""
_WITHOUT = {
    nn.LSTM: {"nonlinearity"},
    nn.GRU: {"nonlinearity", "proj_size"},
    nn.LSTMCell: {"nonlinearity"},
    nn.GRUCell: {"nonlinearity"},
    nn.RNN: {"proj_size"},
}


def arguments(module: nn.Module) -> tuple[type[nn.Module], dict[str, Any]] | None:
    """The class and its arguments that make a module like this one; None where it is not torch's own."""
    own: Any = type(module)
    if hasattr(module, "parametrizations"):  # torch makes a class for what it parametrizes
        own = own.__mro__[1]
    kind = next((kind for kind in _KINDS if own.__init__ is kind.__init__ and issubclass(own, kind)), None)
    kind = own if own in _KINDS else kind
    if kind is None or _wrapper(module) is None:
        return None
    places, keywords = _KINDS[kind]
    names = [*places, *(name for name in keywords if name not in _WITHOUT.get(kind, ()))]
    return own, {name: _value(module, name) for name in names}


_PARAMETRIZED = {
    "_WeightNorm": "weight_norm",
    "_SpectralNorm": "spectral_norm",
    "WeightNorm": "weight_norm",
    "SpectralNorm": "spectral_norm",
}


def _wrapper(module: nn.Module) -> str | None:
    """The function of torch's that has normed its weight, ``weight_norm``; empty for none, None for one that is not known."""
    hooks = (one for one in module._forward_pre_hooks.values() if type(one).__name__ in _PARAMETRIZED)
    held = getattr(module, "parametrizations", {})
    norms = [*hooks, *(one for name in held for one in held[name])]
    names = {_PARAMETRIZED.get(type(one).__name__) for one in norms}
    return names.pop() if len(names) == 1 else None if names else ""


def _value(module: Any, name: str) -> Any:
    if name in {"bias", "affine", "elementwise_affine"}:
        if isinstance(getattr(module, name, None), bool):
            return getattr(module, name)
        held = module.in_proj_bias if isinstance(module, nn.MultiheadAttention) else getattr(module, "bias", None)
        return held is not None
    if name in {"kdim", "vdim"}:
        return None if getattr(module, name) == module.embed_dim else getattr(module, name)
    if isinstance(module, nn.Transformer):
        layer: Any = module.encoder.layers[0]
        of_layers = {"dim_feedforward": layer.linear1.out_features, "dropout": layer.dropout.p}
        many = {"num_encoder_layers": len(module.encoder.layers), "num_decoder_layers": len(module.decoder.layers)}
        return {**of_layers, **many}.get(name, getattr(module, name, None))
    if name == "num_parameters":
        return module.weight.numel()
    value = getattr(module, name)
    if name in _MANY and isinstance(value, tuple) and len(set(value)) == 1 and (name != "normalized_shape" or len(value) == 1):
        return value[0]
    return value


def rebuilt_module(module: nn.Module | None, path: str | None, *, rank: int = 20, why: str = "", **changes: Any) -> list[Edit]:
    """The edit that makes this part anew with some arguments changed; none where it is unknown how it was made."""
    found = arguments(module) if module is not None else None
    if module is not None and found is None and (own := _own_class(module, changes)) is not None:
        return [Edit(f"{as_typed(path or '')} = {own[0]}", why, rank, modules={path or "": own[1]})]
    if found is None or module is None:
        return []
    kind, made_with = found
    rank += _FROZEN if module._parameters and not any(one.requires_grad for one in module.parameters()) else 0
    if any(name not in made_with for name in changes):
        return []
    new = {**made_with, **changes}
    if made_on_meta(kind, new) is None:
        return []
    wrapper, made = _wrapper(module), _code(kind, new)
    code = f"{as_typed(path or '')} = {f'{wrapper}({made})' if wrapper else made}"
    return [Edit(code, why, rank, modules={path or "": _maker(kind, new)})]


def _own_class(module: nn.Module, changes: dict[str, Any]) -> tuple[str, Callable[[nn.Module], nn.Module]] | None:
    """(what to type, what makes it) for a class of the user's own that is one of torch's with another ``__init__``.

    Which of its arguments is which is found by making it: one that gives the very same settings was made so.
    """
    kind: Any = type(module)
    base = next((one for one in kind.__mro__ if one in _KINDS), None)
    if base is None or kind is base or hasattr(module, "parametrizations") or not is_user_code(kind.__init__.__code__):
        return None
    names = [name for name in (*_KINDS[base][0], *_KINDS[base][1]) if type(getattr(module, name, None)) is int]
    asked = [one for one in list(inspect.signature(kind.__init__).parameters.values())[1:] if one.default is one.empty]
    if any(one.kind in {one.VAR_POSITIONAL, one.VAR_KEYWORD} for one in asked) or not set(changes) <= set(names):
        return None
    now = {name: getattr(module, name) for name in names}
    ways = itertools.product(*(sorted(names, key=lambda name, one=one: name != one.name) for one in asked))  # type: ignore[misc]
    for way in itertools.islice(ways, _MOST_WAYS):
        if _settings(kind, [now[name] for name in way], names) == now:
            then = [{**now, **changes}[name] for name in way]
            if _settings(kind, then, names) == {**now, **changes}:
                return f"{kind.__name__}({', '.join(map(repr, then))})", functools.partial(_trained, kind, then)
    return None


def quietly(make: Callable[[], nn.Module]) -> nn.Module | None:
    """A module made so that nobody notices; None where its constructor, torch's or the user's, refuses what it was not meant for."""
    try:
        with RandomState.kept(), warnings.catch_warnings(), redirect_stdout(StringIO()), torch.no_grad():
            warnings.simplefilter("ignore")
            return make()
    except Exception:  # noqa: BLE001 - any: a constructor says in its own way that such a module cannot be
        return None


def _settings(kind: Any, given: list[int], names: list[str]) -> dict[str, Any]:
    made = quietly(lambda: _on_meta(kind, *given))
    return {} if made is None else {name: getattr(made, name, None) for name in names}


def _trained(kind: Any, given: list[int], old: nn.Module) -> nn.Module:
    return _on_meta(kind, *given).train(old.training)


def _on_meta(kind: Any, *args: Any, **kwargs: Any) -> nn.Module:
    with torch.device("meta"):
        made: nn.Module = kind(*args, **kwargs)
    return made


def made_on_meta(kind: type[nn.Module], arguments: Mapping[str, Any]) -> nn.Module | None:
    """The module on ``meta``; None where it cannot be."""
    return quietly(lambda: _on_meta(kind, **arguments))


def _maker(kind: type[nn.Module], new: dict[str, Any]) -> Callable[[nn.Module], nn.Module]:
    def made(old: nn.Module) -> nn.Module:
        like = next(old.parameters(), None)
        module = _on_meta(kind, **new)
        if like is not None and like.is_floating_point():
            module = module.to(like.dtype)
        return module.train(old.training)

    return made


def _code(kind: type[nn.Module], new: dict[str, Any]) -> str:
    base = next(one for one in kind.__mro__ if one in _KINDS)
    places, defaults = _KINDS[base]
    shown = [repr(_short(new[name])) for name in places]
    shown += [f"{name}={_short(new[name])!r}" for name, default in defaults.items() if name in new and new[name] != default]
    prefix = "nn." if kind.__module__.startswith("torch.nn") else ""
    return f"{prefix}{kind.__name__}({', '.join(shown)})"


def _short(value: Any) -> Any:
    return tuple(value) if isinstance(value, (tuple, torch.Size)) else value
