"""The tensors inside what a module takes or gives, with the place of each."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from torchdebug_magics.probing.shards import held_of

__all__ = ["is_lazy", "memory_of", "named_tensors", "rebuilt", "sizes"]

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


def is_lazy(tensor: torch.Tensor) -> bool:
    """Whether it has no shape yet."""
    return isinstance(tensor, (torch.nn.UninitializedParameter, torch.nn.UninitializedBuffer))


def sizes(tensor: torch.Tensor) -> tuple[int, ...]:
    """Its shape; of sizes that differ from row to row, as in a nested tensor, the first is there, and -1 for one that is."""
    if is_lazy(tensor):
        return ()
    if tensor.is_nested and tensor.layout == torch.strided:
        return (tensor.size(0),)
    return tuple(map(_whole, tensor.shape))


def _whole(size: Any) -> int:
    if isinstance(size, int):
        return size
    return -1 if size.node.is_nested_int() else int(size.node.hint)


def memory_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """Where its numbers are, if it is of the plain kind; of a DTensor, those in this process."""
    tensor = held_of(tensor)
    if tensor.is_nested or tensor.layout != torch.strided or is_lazy(tensor) or tensor._is_zerotensor():
        return None
    try:
        return tensor.untyped_storage()
    except (RuntimeError, NotImplementedError):  # a wrapper that has none of its own
        return None


def rebuilt(value: Any, change: Any, kinds: tuple[type, ...] = (torch.Tensor,), depth: int = 0) -> Any:
    """`value` with each tensor replaced by ``change(tensor)``; what cannot be rebuilt (a packed sequence) is left as it is."""
    if isinstance(value, kinds):
        return change(value)
    if depth >= _DEEP or isinstance(value, PackedSequence):
        return value
    if isinstance(value, (tuple, list, Mapping)):
        return _container(value, change, kinds, depth + 1)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {
            field.name: rebuilt(getattr(value, field.name), change, kinds, depth + 1) for field in dataclasses.fields(value) if field.init
        }
        return value if all(fields[name] is getattr(value, name) for name in fields) else dataclasses.replace(value, **fields)
    return value


def _container(value: Any, change: Any, kinds: tuple[type, ...], depth: int) -> Any:
    before = list(value.values() if isinstance(value, Mapping) else value)
    items = [rebuilt(item, change, kinds, depth) for item in before]
    if all(new is old for new, old in zip(items, before, strict=True)):
        return value
    if isinstance(value, Mapping):
        return _mapping(value, dict(zip(value, items, strict=True)))
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)


def _mapping(value: Any, new: dict[Any, Any]) -> Any:
    """Of the same type where it can be made from a dict, as a user's forward may ask for attributes (`batch.input_ids`)."""
    if type(value) is dict:
        return new
    try:
        made = type(value)(new)
    except Exception:  # noqa: BLE001 - any constructor of the user's
        return new
    return made if len(made) == len(new) else new
