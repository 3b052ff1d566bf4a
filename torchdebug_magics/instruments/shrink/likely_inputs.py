"""A small input for a model that was given none: from what its configuration, its forward and its first layer say."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

__all__ = ["likely_inputs"]

_WORDS, _BATCH = 8, 2
_SOUND = 16_000
_SIDES = (32, 64, 224)


def likely_inputs(model: nn.Module) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """(positional, named) sizes of tensors, the likeliest first."""
    yield from _by_name(model)
    required = max(1, len(_required(model)))
    for shape in _by_first_layer(model):
        yield (shape,) * required, {}


def _required(model: nn.Module) -> list[str]:
    positional = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    return [name for name, one in _parameters(model).items() if one.default is one.empty and one.kind in positional]


def _parameters(model: nn.Module) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(model.forward).parameters
    except (TypeError, ValueError):
        return {}


def _by_name(model: nn.Module) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """As the models of transformers call what they take."""
    known = _known_sizes(getattr(model, "config", None))
    takes = [name for name in known if name in _parameters(model)]
    main = getattr(model, "main_input_name", "")
    decoder = ["decoder_input_ids"] if "decoder_input_ids" in takes else []
    for names in ([main], [main, *decoder], ["input_ids", "pixel_values"], takes):
        if names and all(name in takes for name in names):
            yield (), {name: known[name] for name in names}


def _known_sizes(config: Any) -> dict[str, tuple[int, ...]]:
    vision = _first(config, "vision_config") or config
    audio = _first(config, "audio_config") or config
    side = _first(vision, "image_size", 224)
    height, width = (side, side) if isinstance(side, int) else tuple(side)[:2]
    sound = (1, _first(audio, "num_mel_bins", 80), 2 * _first(audio, "max_source_positions", 1500))
    known = {"input_ids": (1, _WORDS), "pixel_values": (1, _first(vision, "num_channels", 3), height, width)}
    return {**known, "input_features": sound, "input_values": (1, _SOUND), "decoder_input_ids": (1, _WORDS)}


def _first(config: Any, name: str, default: Any = None) -> Any:
    found = getattr(config, name, None)
    return default if found is None else found


def _by_first_layer(model: nn.Module) -> Iterator[tuple[int, ...]]:
    first = next((part for part in model.modules() if any(one is not None for one in part._parameters.values())), None)
    if isinstance(first, (nn.Embedding, nn.EmbeddingBag)):
        yield _BATCH, _WORDS
        yield (_WORDS,)
    elif isinstance(first, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
        dims = len(first.kernel_size)
        yield from ((_BATCH, first.in_channels, *(side,) * dims) for side in _SIDES)
    elif (width := _width(first)) is not None:
        yield _BATCH, _WORDS, width
        yield _BATCH, width


def _width(first: nn.Module | None) -> int | None:
    for name in ("in_features", "embed_dim", "input_size", "normalized_shape", "num_features"):
        found = getattr(first, name, None)
        found = found[-1] if isinstance(found, (tuple, list)) and found else found
        if isinstance(found, int):
            return found
    return None
