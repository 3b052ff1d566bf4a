"""The tensors inside what a module takes or gives, with the place of each."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

__all__ = ["named_tensors", "rebuilt"]

_DEEP = 8


def named_tensors(value: object, name: str = "", depth: int = 0) -> Iterator[tuple[str, torch.Tensor]]:
    """``("logits", tensor)`` for each tensor in nested tuples, lists, mappings and dataclasses; an empty name for a bare one."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif depth < _DEEP:
        for key, item in _items(value):
            yield from named_tensors(item, f"{name}{key}" if key.startswith("[") else f"{name}.{key}".lstrip("."), depth + 1)


def _items(value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, PackedSequence):
        yield "data", value.data
        yield "batch_sizes", value.batch_sizes
    elif isinstance(value, Mapping):
        yield from ((str(key), item) for key, item in value.items())
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        yield from zip(value._fields, value, strict=True)
    elif isinstance(value, (tuple, list)):
        yield from ((f"[{index}]", item) for index, item in enumerate(value))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from ((field.name, getattr(value, field.name, None)) for field in dataclasses.fields(value))


def rebuilt(value: Any, change: Any, depth: int = 0) -> Any:
    """`value` with each tensor replaced by ``change(tensor)``; what cannot be rebuilt (a packed sequence) is left as it is."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if depth >= _DEEP or isinstance(value, PackedSequence):
        return value
    if isinstance(value, (tuple, list)):
        items = [rebuilt(item, change, depth + 1) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, Mapping):
        new = {key: rebuilt(item, change, depth + 1) for key, item in value.items()}
        if all(new[key] is item for key, item in value.items()):
            return value
        return _mapping(value, new)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: rebuilt(getattr(value, field.name), change, depth + 1) for field in dataclasses.fields(value) if field.init}
        return value if all(fields[name] is getattr(value, name) for name in fields) else dataclasses.replace(value, **fields)
    return value


def _mapping(value: Any, new: dict[Any, Any]) -> Any:
    """Of the same type where it can be made from a dict, as a user's forward may ask for attributes (`batch.input_ids`)."""
    if type(value) is dict:
        return new
    try:
        made = type(value)(new)
    except Exception:  # noqa: BLE001 - any constructor of the user's
        return new
    return made if len(made) == len(new) else new
