"""A module of torch's that cannot be built: heads that do not divide the features, groups that do not divide the channels."""

from __future__ import annotations

import re
import traceback
from typing import TYPE_CHECKING

import torch

from torchdebug_magics.instruments.shapes.explain import place, underlined
from torchdebug_magics.instruments.shapes.report import Failure
from torchdebug_magics.probing.where import owner

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["refused_module"]

_DIVISIBLE = re.compile(r"(?P<whole>\w+)(?: \(\d+\))? must be divisible by (?P<part>\w+)")


def refused_module(error: BaseException) -> Failure | None:
    """Where the error came from a module's ``__init__`` and names arguments of it; None elsewhere."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    made = next((frame for frame in frames if frame.f_code.co_name == "__init__" and owner(frame.f_code.co_filename) == "torch"), None)
    if made is None or not isinstance(made.f_locals.get("self"), torch.nn.Module) or place(error) is None:
        return None
    text = str(error).strip()
    known = {name: value for name, value in frames[-1].f_locals.items() if type(value) is int and re.search(rf"\b{name}\b", text)}
    if not known:
        return None
    told = ", ".join(f"{name} is {value}" for name, value in known.items() if f"{name} ({value})" not in text)
    whole = f"{text}{', and ' if told else ''}{told}{_divisors(text, known)}"
    sentence = f"`nn.{type(made.f_locals['self']).__name__}` cannot be built: {whole}"
    return Failure(
        module=None,
        op=None,
        location=place(error),
        underlined=underlined(error),
        operand_shapes=(),
        explanation=sentence,
        error=f"{type(error).__name__}: {error}",
    )


def _divisors(text: str, known: Mapping[str, int]) -> str:
    found = _DIVISIBLE.search(text)
    whole, part = (known.get(found["whole"], 0), known.get(found["part"], 0)) if found is not None else (0, 0)
    if whole < 1 or part < 1:
        return ""
    fits = [max(one for one in range(1, whole + 1) if not whole % one and one <= part)]
    fits += [one for one in range(part + 1, whole + 1) if not whole % one][:1]
    return f"; {' and '.join(map(str, fits))} divide{'' if len(fits) > 1 else 's'} {whole}"
