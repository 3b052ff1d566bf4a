"""What a library's own checks say of the model's inputs: a picture of another size than it takes, and an input that was not given."""

from __future__ import annotations

import inspect
import re
from typing import TYPE_CHECKING

from torch.nn import functional

from torchdebug_magics.format import shape
from torchdebug_magics.instruments.shapes.repair.edit import Change, Edit
from torchdebug_magics.instruments.shapes.repair.rules.rule_parts import Diagnosis

if TYPE_CHECKING:
    import torch

    from torchdebug_magics.instruments.shapes.repair.failure_facts import Facts

__all__ = ["absent", "picture"]

_IMAGE = 4
_SIZE = re.compile(r"(\d+) ?[*x,] ?(\d+)")


def picture(facts: Facts) -> Diagnosis | None:
    """``Input image size (48*48) doesn't match model (32*32)``: two sizes, of which one is the input's."""
    if facts.op is not None or facts.site is not None:
        return None
    told = {(int(high), int(wide)) for high, wide in _SIZE.findall(facts.text)}
    for name, one in facts.inputs:
        wanted = told - {tuple(one.shape[2:])}
        if one.dim() == _IMAGE and len(told) == 2 and len(wanted) == 1:
            size = wanted.pop()
            sentence = f"{facts.who} expects images of {shape(size)}, and `{name}` is {shape(tuple(one.shape))}"
            return Diagnosis(sentence, (_resized(name, one, size),))
    return None


def _resized(name: str, one: torch.Tensor, size: tuple[int, int]) -> Edit:
    change = Change(f"F.interpolate({{}}, size={size})".format, lambda tensor: functional.interpolate(tensor, size=size))
    why = f"{shape(tuple(one.shape[2:]))} becomes {shape(size)}"
    return Edit(f"{name} = {change.text(name)}", why, 10, inputs={name: change})


def absent(facts: Facts) -> Diagnosis | None:
    """``You must specify exactly one of input_ids or inputs_embeds``, from the decoder of a model that was given ``input_ids``."""
    root = facts.modules.get("")
    if facts.op is not None or facts.site is not None or root is None or "input_ids" not in facts.text:
        return None
    wanted = inspect.signature(root.forward).parameters
    given = {name for name, _ in facts.inputs}
    for part in reversed((facts.path or "").split(".")):
        if (name := f"{part}_input_ids") in wanted and name not in given:
            other = ", or `labels`, from which the model computes it" if "labels" in wanted else ""
            return Diagnosis(f"`{facts.path}` received no input: pass `{name}` to the model{other}")
    return None
