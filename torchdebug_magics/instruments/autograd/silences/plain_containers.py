"""Parameters that a model holds in lists, tuples and dicts, where `parameters()` does not find them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Hidden", "hidden_parameters"]

_CONTAINERS = (list, tuple, dict)
_DEEPEST = 3


class Hidden(NamedTuple):
    """A parameter that is not registered."""

    name: str
    parameter: torch.nn.Parameter
    owner: torch.nn.Module
    attribute: str


def hidden_parameters(root: torch.nn.Module) -> Iterator[Hidden]:
    """Of a model and of the modules in it."""
    for path, module in root.named_modules():
        for attribute, value in list(vars(module).items()):
            if not attribute.startswith("_") and type(value) in _CONTAINERS:
                held = _held_in(value, f"{path}.{attribute}".lstrip("."))
                yield from (Hidden(name, one, module, attribute) for name, one in held)


def _held_in(value: object, prefix: str, depth: int = 0) -> Iterator[tuple[str, torch.nn.Parameter]]:
    if isinstance(value, torch.nn.Parameter):
        yield prefix, value
    elif isinstance(value, torch.nn.Module):
        yield from ((f"{prefix}.{name}", one) for name, one in value.named_parameters())
    elif isinstance(value, _CONTAINERS) and depth < _DEEPEST:
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _held_in(part, f"{prefix}[{key!r}]", depth + 1)
