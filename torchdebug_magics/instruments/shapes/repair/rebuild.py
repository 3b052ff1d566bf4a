"""A module of torch's own made again with other sizes, and the code that makes it."""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from torchdebug_magics.instruments.shapes.repair.edit import Repair, as_typed
from torchdebug_magics.probing.safety import quiet
from torchdebug_magics.probing.source.user_code import is_user_code, owner
from torchdebug_magics.probing.state.rng import RandomState

_FROZEN = 25
"""What it adds to the rank that weights are not trained: whoever froze them does not want new ones."""
_MOST_MADE = 64
"""How often a class of the user's own is made to find out what it was called with."""
_LONGEST_S = 0.5
"""How long that may compute."""
_LARGEST = 1 << 22
"""Elements of all its tensors."""
_WITHOUT_OWN = (nn.Flatten, nn.Transformer)
"""What holds no weights itself, and decides sizes all the same."""
_PLACES = frozenset(["self", "device", "dtype", "process_group"])
"""Arguments that say where a module is, and not what it is."""


def arguments(module: nn.Module) -> tuple[type[nn.Module], dict[str, Any]] | None:
    """The class and its arguments that make a module like this one, by its attributes; None where it is not torch's own."""
    kind: Any = type(module)
    if hasattr(module, "parametrizations"):  # torch makes a class for what it parametrizes
        kind = kind.__mro__[1]
    if not _is_torchs(kind) or _wrapper(module) is None or not (module._parameters or kind in _WITHOUT_OWN):
        return None
    values = {name: _value(module, name, parameter.default) for name, parameter in _parameters(kind).items()}
    unknown = any(value is inspect.Parameter.empty or isinstance(value, torch.Tensor) for value in values.values())
    return None if not values or unknown else (kind, values)


def _is_torchs(kind: Any) -> bool:
    """Whether it is made as a class of torch's is."""
    return owner(kind.__init__.__code__.co_filename) == "torch"


def _parameters(kind: type[nn.Module]) -> dict[str, inspect.Parameter]:
    """The arguments of a class; none where it is torch's and takes any number of them."""
    if is_user_code(kind.__init__.__code__):
        return dict(inspect.signature(kind).parameters)
    named = dict(inspect.signature(nn.RNNBase if issubclass(kind, nn.RNNBase) else kind).parameters)
    if issubclass(kind, nn.RNNBase):  # these hand on what they are given
        del named["mode"]
    if issubclass(kind, nn.RNN):
        named["nonlinearity"] = inspect.Parameter("nonlinearity", inspect.Parameter.KEYWORD_ONLY, default="tanh")
    if any(parameter.kind in {parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD} for parameter in named.values()):
        return {}
    return {name: parameter for name, parameter in named.items() if name not in _PLACES and not name.startswith("_")}


_PARAMETRIZED = {"WeightNorm": "weight_norm", "SpectralNorm": "spectral_norm"}


def _wrapper(module: nn.Module) -> str | None:
    """The function of torch's that has normed its weight, ``weight_norm``; empty for none, None for one that is not known."""
    hooks = (hook for hook in module._forward_pre_hooks.values() if type(hook).__name__.strip("_") in _PARAMETRIZED)
    parametrizations = getattr(module, "parametrizations", {})
    norms = [*hooks, *(norm for name in parametrizations for norm in parametrizations[name])]
    names = {_PARAMETRIZED.get(type(norm).__name__.strip("_")) for norm in norms}
    return names.pop() if len(names) == 1 else None if names else ""


def _value(module: Any, name: str, default: Any) -> Any:
    if isinstance(module, nn.Transformer):
        layer: Any = module.encoder.layers[0]
        of_layers = {"dim_feedforward": layer.linear1.out_features, "dropout": layer.dropout.p, "bias": layer.linear1.bias is not None}
        many = {"num_encoder_layers": len(module.encoder.layers), "num_decoder_layers": len(module.decoder.layers)}
        return {**of_layers, **many}.get(name, getattr(module, name, default))
    if name in {"bias", "affine", "elementwise_affine"}:
        if isinstance(getattr(module, name, None), bool):
            return getattr(module, name)
        bias = module.in_proj_bias if isinstance(module, nn.MultiheadAttention) else getattr(module, "bias", None)
        return bias is not None
    if name in {"kdim", "vdim"}:
        return None if getattr(module, name) == module.embed_dim else getattr(module, name)
    value = getattr(module, name, default)
    if isinstance(value, tuple) and len(set(value)) == 1 and (name != "normalized_shape" or len(value) == 1):
        return value[0]
    return value


def rebuilt_module(module: nn.Module | None, path: str | None, *, rank: int = 20, why: str = "", **changes: Any) -> list[Repair]:
    """The edit that makes this part anew with some arguments changed; none where it is unknown how it was made."""
    known = arguments(module) if module is not None else None
    if module is not None and known is None and (own := _own_class(module, changes)) is not None:
        return [Repair(f"{as_typed(path or '')} = {own[0]}", why, rank, modules={path or "": own[1]})]
    if known is None or module is None:
        return []
    kind, made_with = known
    rank += _FROZEN if module._parameters and not any(parameter.requires_grad for parameter in module.parameters()) else 0
    if any(name not in made_with for name in changes):
        return []
    new = {**made_with, **changes}
    if made_on_meta(kind, new) is None:
        return []
    wrapper, made = _wrapper(module), typed(kind, new)
    code = f"{as_typed(path or '')} = {f'{wrapper}({made})' if wrapper else made}"
    return [Repair(code, why, rank, modules={path or "": functools.partial(_made_anew, kind, new)})]


def _own_class(module: nn.Module, changes: dict[str, Any]) -> tuple[str, Callable[[nn.Module], nn.Module]] | None:
    """(what to type, what makes it) for a class of the user's own that is one of torch's with another ``__init__``."""
    kind = type(module)
    base: Any = next(parent for parent in kind.mro() if _is_torchs(parent))
    wanted = {**{name: getattr(module, name, None) for name in _parameters(base)}, **changes}
    numbers = called_with(module) if all(getattr(module, name, None) is not None for name in changes) else None
    for names in itertools.permutations(numbers or (), len(changes)):
        new = {**(numbers or {}), **dict(zip(names, changes.values(), strict=True))}
        made = made_on_meta(kind, new)
        if made is not None and all(_is_alike(getattr(made, name, None), value) for name, value in wanted.items()):
            return typed(kind, new), functools.partial(made_like, kind, new)
    return None


def _is_alike(value: Any, wanted: Any) -> bool:
    """Whether two settings are the same; of weights, that both are there."""
    return isinstance(value, torch.Tensor) if isinstance(wanted, torch.Tensor) else bool(value == wanted)


def called_with(module: nn.Module) -> dict[str, Any] | None:
    """The arguments with which a class of the user's makes the very same settings, shapes and tables; None where none is found.

    What a module was called with, it seldom keeps: the values that it may have been are tried.
    """
    kind = type(module)
    if hasattr(module, "parametrizations") or not is_user_code(kind.__init__.__code__):
        return None
    state = _state(module)
    tensors = [value for value in state.values() if isinstance(value, torch.Tensor)]
    choices = _choices(module, state)
    if not choices or any(tensor.is_meta for tensor in tensors) or sum(tensor.numel() for tensor in tensors) > _LARGEST:
        return None
    until = time.thread_time() + _LONGEST_S
    for values in itertools.islice(itertools.product(*choices.values()), _MOST_MADE):
        if time.thread_time() > until:
            return None
        numbers = dict(zip(choices, values, strict=True))
        new = quietly(functools.partial(made_like, kind, numbers, module))
        made = {} if new is None else _state(new)
        if made.keys() == state.keys() and all(_is_same(made[name], value) for name, value in state.items()):
            return numbers
    return None


def _state(module: nn.Module) -> dict[str, Any]:
    """The own numbers of a module, and all its tensors."""
    own = {name: value for name, value in vars(module).items() if type(value) in {int, float, bool, str} or isinstance(value, torch.Tensor)}
    return {**own, **dict(module.named_parameters()), **dict(module.named_buffers()), "training": True}


def _is_same(new: Any, old: Any) -> bool:
    if not isinstance(new, torch.Tensor) or not isinstance(old, torch.Tensor):
        return type(new) is type(old) and bool(new == old)
    if new.dtype != old.dtype or new.shape != old.shape:
        return False
    return new.is_meta or torch.equal(new.detach(), old.detach())


def _choices(module: nn.Module, state: Mapping[str, Any]) -> dict[str, list[Any]]:
    """The values that each argument may have had, the likeliest first; empty where one may be anything."""
    choices: dict[str, list[Any]] = {}
    numbers = [value for name, value in state.items() if type(value) is int and name != "training"]
    sizes = [size for item in state.values() if isinstance(item, torch.Tensor) for size in reversed(item.shape) if size > 1]  # width first
    for name, parameter in inspect.signature(type(module)).parameters.items():
        if parameter.kind in {parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD}:
            continue
        kept = vars(module).get(name)
        usual = [] if parameter.default is parameter.empty else [parameter.default]
        if type(kept) in {int, float, bool, str}:
            choices[name] = [kept]
        elif not usual or type(usual[0]) is int:
            choices[name] = list(dict.fromkeys([*usual, *numbers, *sizes, *(2 * size for size in sizes)]))
        else:
            choices[name] = usual
    return choices if all(choices.values()) else {}


def quietly(make: Callable[[], nn.Module]) -> nn.Module | None:
    """A module made so that nobody notices; None where its constructor, torch's or the user's, refuses what it was not meant for."""
    try:
        with RandomState.kept(), quiet(), torch.no_grad():
            return make()
    except Exception:  # noqa: BLE001 - any: a constructor says in its own way that such a module cannot be
        return None


def made_like(kind: type[nn.Module], given: Mapping[str, Any], old: nn.Module) -> nn.Module:
    """One in the place of another: its tables with their numbers, or all of it on ``meta`` where it has weights."""
    if next(old.parameters(), None) is not None:
        return _on_meta(kind, **given).train(old.training)
    place = next((buffer.device for buffer in old.buffers()), torch.device("cpu"))
    return kind(**given).to(place).train(old.training)


def _on_meta(kind: Any, **given: Any) -> nn.Module:
    with torch.device("meta"):
        made: nn.Module = kind(**given)
    return made


def made_on_meta(kind: type[nn.Module], arguments: Mapping[str, Any]) -> nn.Module | None:
    """The module on ``meta``; None where it cannot be."""
    return quietly(lambda: _on_meta(kind, **_needed(kind, arguments)))


def _needed(kind: type[nn.Module], given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that are not the default: some classes refuse what they cannot do, even by its usual value."""
    parameters = _parameters(kind).items()
    return {name: given[name] for name, parameter in parameters if name in given and given[name] != parameter.default}


def _made_anew(kind: type[nn.Module], new: Mapping[str, Any], old: nn.Module) -> nn.Module:
    module, like = _on_meta(kind, **_needed(kind, new)), next(old.parameters(), None)
    is_floating = like is not None and like.is_floating_point()
    return (module.to(like.dtype) if like is not None and is_floating else module).train(old.training)


def typed(kind: type[nn.Module], new: Mapping[str, Any]) -> str:
    """The call that makes it; what has a default is named, but for the first argument."""
    parameters = enumerate(_parameters(kind).items())
    unnamed = {name for at, (name, parameter) in parameters if not at or parameter.default is parameter.empty}
    shown = [f"{'' if name in unnamed else f'{name}='}{_short(value)!r}" for name, value in _needed(kind, new).items()]
    prefix = "nn." if kind.__module__.startswith("torch.nn") else ""
    return f"{prefix}{kind.__name__}({', '.join(shown)})"


def changed_call(old: ast.Call, new: ast.Call, module: nn.Module) -> ast.Call:
    """The user's call with the arguments alone changed by which the new one makes another module than the one that is there."""
    kind: Any = type(module)
    names = list(_parameters(kind))
    if any(isinstance(part, ast.Starred) for part in old.args) or any(option.arg is None for option in old.keywords):
        return new
    given = {**dict(zip(names, new.args, strict=False)), **{option.arg: option.value for option in new.keywords if option.arg}}
    changes = {name: node for name, node in given.items() if ast.unparse(node) != repr(_short(_value(module, name, None)))}
    positional = [changes.pop(name, node) for name, node in zip(names, old.args, strict=False)]
    options = [ast.keyword(option.arg, changes.pop(option.arg or "", option.value)) for option in old.keywords]
    return ast.Call(old.func, positional, [*options, *(ast.keyword(name, node) for name, node in changes.items())])


def _short(value: Any) -> Any:
    return tuple(value) if isinstance(value, (tuple, torch.Size)) else value
