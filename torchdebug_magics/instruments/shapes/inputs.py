"""What the model is called with: values as they are, sizes such as ``(1, 3, 224, 224)`` as tensors of the model's kind."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from torchdebug_magics.instruments.shapes.leaves import named_tensors, rebuilt, sizes

__all__ = ["Inputs", "Spec", "readings"]

_WHOLE_NUMBERED = ("ids", "idx", "index", "indices", "tokens", "labels", "target", "targets")
_SIZES = ("size", "shape", "sizes")


@dataclass(frozen=True)
class Spec:
    """A tensor that the user described by its sizes alone."""

    sizes: tuple[int, ...]
    whole_numbers: bool = False

    def made(self, model: torch.nn.Module, zeros: Callable[..., torch.Tensor]) -> torch.Tensor:
        """``zeros(sizes, dtype, device)``, a valid index too, in the model's dtype and where it lives."""
        first = next((one for one in model.parameters() if one.is_floating_point()), None)
        device = first.device if first is not None else torch.device("cpu")
        dtype = torch.int64 if self.whole_numbers else first.dtype if first is not None else torch.get_default_dtype()
        return zeros(self.sizes, dtype, device)


@dataclass(frozen=True)
class Inputs:
    """Arguments of the call."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    names: tuple[str, ...] = ()
    """Of the parameters that `args` go to."""
    note: str = ""

    def made(self, model: torch.nn.Module, stand_in: Callable[[torch.Tensor], torch.Tensor], zeros: Callable[..., torch.Tensor]) -> Inputs:
        """The same arguments, each tensor replaced by its stand-in and each description by a tensor."""

        def one(value: Any) -> Any:
            return value.made(model, zeros) if isinstance(value, Spec) else rebuilt(value, stand_in)

        return replace(self, args=tuple(map(one, self.args)), kwargs={name: one(value) for name, value in self.kwargs.items()})

    def named_values(self) -> dict[str, Any]:
        """By the names that the forward has for them."""
        return {**dict(zip(self.names, self.args, strict=False)), **self.kwargs}

    def __str__(self) -> str:
        tensors = list(named_tensors(self.named_values()))
        shown = [f"{name} {' x '.join(map(str, sizes(one))) or 'scalar'} {str(one.dtype).removeprefix('torch.')}" for name, one in tensors]
        return ", ".join(shown[:3]) + (f" and {len(shown) - 3} more" if len(shown) > 3 else "")  # noqa: PLR2004


def readings(model: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Inputs]:
    """Ways to understand the arguments, the likeliest first."""
    signature = _signature(model)
    args, kwargs, note = _spread(signature, args, dict(kwargs))
    names = _names(signature, len(args))
    described = [_spec(signature, name, value) for name, value in zip(names, args, strict=True)]
    described_kwargs = {name: _spec(signature, name, value) for name, value in kwargs.items()}
    specs = [one for one in (*described, *described_kwargs.values()) if one is not None]
    if not specs:
        yield Inputs(args, kwargs, names, note)
        return
    embeds = _begins_with_embedding(model)
    for flipped in (False, True):
        chosen = [_chosen(spec, name, embeds=embeds, flipped=flipped) for spec, name in zip(described, names, strict=True)]
        chosen_kwargs = {name: _chosen(spec, name, embeds=embeds, flipped=flipped) for name, spec in described_kwargs.items()}
        yield Inputs(
            tuple(value if spec is None else spec for spec, value in zip(chosen, args, strict=True)),
            {name: kwargs[name] if spec is None else spec for name, spec in chosen_kwargs.items()},
            names,
            note,
        )
    yield Inputs(args, kwargs, names, note)  # the tuples were meant as tuples


def _signature(model: torch.nn.Module) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(model.forward).parameters
    except (TypeError, ValueError):
        return {}


def _names(signature: Mapping[str, inspect.Parameter], many: int) -> tuple[str, ...]:
    positional = [name for name, one in signature.items() if one.kind in {one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD}]
    rest = next((name for name, one in signature.items() if one.kind is one.VAR_POSITIONAL), "input")
    return tuple(positional[at] if at < len(positional) else f"{rest}[{at - len(positional)}]" for at in range(many))


def _spread(
    signature: Mapping[str, inspect.Parameter], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any], str]:
    """One mapping alone whose keys are names of the forward's parameters stands for keyword arguments, as a tokenizer's batch does."""
    if len(args) == 1 and not kwargs and isinstance(args[0], Mapping) and args[0] and all(isinstance(key, str) for key in args[0]):
        open_ended = any(one.kind is one.VAR_KEYWORD for one in signature.values())
        first = next(iter(signature.values()), None)
        wants_mapping = first is not None and any(word in str(first.annotation).lower() for word in ("dict", "mapping"))
        if not wants_mapping and (set(args[0]) <= set(signature) or (open_ended and set(args[0]) & set(signature))):
            return (), dict(args[0]), "the mapping was passed as keyword arguments"
    return args, kwargs, ""


def _spec(signature: Mapping[str, inspect.Parameter], name: str, value: object) -> Spec | None:
    is_sizes = isinstance(value, (tuple, torch.Size)) and all(type(one) is int and one >= 0 for one in value)
    if not is_sizes:
        return None
    parameter = signature.get(name)
    if parameter is not None:
        wants_tuple = isinstance(parameter.default, (tuple, int)) and not isinstance(parameter.default, bool)
        annotated = any(word in str(parameter.annotation).lower() for word in ("tuple", "size", "sequence[int", "list[int"))
        if wants_tuple or annotated or any(name.endswith(word) for word in _SIZES):
            return None
    return Spec(tuple(value))  # type: ignore[arg-type]


def _chosen(spec: Spec | None, name: str, *, embeds: bool, flipped: bool) -> Spec | None:
    if spec is None:
        return None
    return replace(spec, whole_numbers=(embeds or name.rpartition("_")[2] in _WHOLE_NUMBERED) != flipped)


def _begins_with_embedding(model: torch.nn.Module) -> bool:
    leaf = next((module for module in model.modules() if next(iter(module._parameters.values()), None) is not None), None)
    return isinstance(leaf, (torch.nn.Embedding, torch.nn.EmbeddingBag))
