"""*Optimizer got an empty parameter list*: modules in a plain list, all parameters frozen, or an exhausted generator."""

from __future__ import annotations

from types import GeneratorType
from typing import TYPE_CHECKING

import torch

from torchdebug_magics.instruments.autograd.errors.cut import freezing_line
from torchdebug_magics.instruments.autograd.errors.line_finding import assigned_before, finding_at, values_read
from torchdebug_magics.instruments.autograd.named import attribute_line
from torchdebug_magics.instruments.autograd.silences.plain_containers import hidden_parameters

if TYPE_CHECKING:
    from torchdebug_magics.instruments.autograd.errors.raised import Raised
    from torchdebug_magics.instruments.autograd.report import Finding

__all__ = ["empty_optimizer"]


def empty_optimizer(raised: Raised) -> Finding:
    """Explains an empty parameter list from the names on the line that creates the optimizer."""
    read = [(name, value) for place, name, value in values_read(raised) if place == raised.here]
    for name, model in read:
        if not isinstance(model, torch.nn.Module):
            continue
        hidden = list(hidden_parameters(model))
        if hidden:
            kept = hidden[0].attribute
            return finding_at(
                raised,
                f"`{name}` has no parameters: its modules are in the container `{kept}`",
                f"keep the modules of `{kept}` in an `nn.ModuleList`",
                where=attribute_line(hidden[0].owner, kept),
                parameters=tuple(one.name for one in hidden),
                tensor=hidden[0].name,
                explanation="`parameters()` does not search plain lists and dicts",
            )
        members = [(path, one) for path, one in model.named_parameters() if not one.requires_grad]
        if members:
            return finding_at(
                raised,
                f"all parameters of `{name}` are frozen",
                f"set `requires_grad = True` for the parameters to train, such as `{members[-1][0]}`",
                where=freezing_line(raised),
                parameters=tuple(path for path, _ in members),
            )
    for name, value in read:
        if isinstance(value, GeneratorType) and value.gi_frame is None:
            made = assigned_before(raised, name)
            source = f" (`{made.source}`)" if made is not None else ""
            fix = f"pass the optimizer a new list, such as `list(model.parameters())`, not the generator `{name}`{source}"
            return finding_at(raised, f"`{name}` is a generator that is already exhausted", fix)
    return finding_at(raised, "the optimizer received no parameters", "pass the parameters of the model to train: `model.parameters()`")
