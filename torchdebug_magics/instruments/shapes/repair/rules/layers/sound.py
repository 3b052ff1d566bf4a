"""Waves and their spectra: `stft`, `istft` and the CTC loss."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from torchdebug_magics.format import shape
from torchdebug_magics.instruments.shapes.repair.edit import method, on_operand
from torchdebug_magics.instruments.shapes.repair.rules.rule_parts import Diagnosis, named, told, turned
from torchdebug_magics.instruments.shapes.repair.rules.steps.tabled import fitted

if TYPE_CHECKING:
    from torchdebug_magics.instruments.shapes.repair.failure_facts import Facts

__all__ = ["ctc", "spectrum"]

_WAVES = 2
"""Dimensions of a batch of waves."""


def spectrum(facts: Facts) -> Diagnosis | None:
    """A window of another length, or waves with a dimension of channels."""
    if facts.op not in {"stft", "istft"} or not facts.operands:
        return None
    x = facts.operands[0]
    if facts.op == "stft" and len(x.sizes) > _WAVES:
        sentence = f"`stft` takes one wave or a batch of them (batch, samples), and {told(x)} has {len(x.sizes)} dimensions"
        edits = on_operand(facts, 0, method("squeeze", 1), rank=3, why="without the channel") if x.sizes[1] == 1 else []
        flat = on_operand(facts, 0, method("flatten", 0, -2), rank=6, why="all channels in one batch")
        return Diagnosis(sentence, (*edits, *flat), x)
    if facts.op == "istft" and not x.tensor.is_complex():
        return Diagnosis(f"`istft` expects complex input, as `stft` returns it, and {told(x)} is {str(x.tensor.dtype)[6:]}", (), x)
    window = facts.argument(4, "window")
    length = facts.argument(3, "win_length") or facts.argument(1, "n_fft")
    if not isinstance(window, torch.Tensor) or not isinstance(length, int) or tuple(window.shape) == (length,):
        return None
    one = facts.operand(window)
    if one is None:
        return None
    sentence = f"`{facts.op}` expects a window of {length} (win_length, or else n_fft), gets {named(one, 'one')} of {shape(one.sizes)}"
    return Diagnosis(sentence, tuple(fitted(facts, one, one.sizes[-1], length, rank=8)) if one.sizes else (), one)


def ctc(facts: Facts) -> Diagnosis | None:
    """Its scores begin with the steps, and not with the batch."""
    if facts.op != "ctc_loss" or "batch_size" not in facts.text or len(facts.operands[0].sizes) != 3:
        return None
    scores, lengths = facts.operands[0], facts.argument(2, "input_lengths")
    many = len(lengths) if isinstance(lengths, (tuple, list)) or (isinstance(lengths, torch.Tensor) and lengths.dim()) else 0
    if scores.sizes[0] != many or scores.sizes[1] == many:
        return None
    sentence = f"`ctc_loss` reads {told(scores)} as steps x batch x classes, and has lengths for {many} samples"
    return Diagnosis(sentence, tuple(turned(facts, 0, (1, 0, 2), rank=2, why="the steps first")), scores)
