"""Samples that another sample's output depends on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from torchdebug_magics.probing.dry_runs.leaves import rebuilt
from torchdebug_magics.probing.rng import RandomState
from torchdebug_magics.probing.tensors import tensors_in

if TYPE_CHECKING:
    from torchdebug_magics.instruments.overfit.subject.subjects import ModelSteps

__all__ = ["leaks_of"]

_CLOSE = 1e-4


def leaks_of(steps: ModelSteps) -> tuple[int, ...]:
    """Samples whose inputs change the output for sample 0, in evaluation mode: 1, 2 of 8. To be undone by the caller."""
    inputs = steps.reading.args, dict(steps.reading.kwargs)
    samples = next((len(one) for one in tensors_in(inputs) if one.dim()), 0)
    if samples < 2:  # noqa: PLR2004 - nothing to leak from
        return ()
    steps.model.eval()
    random = RandomState.take()

    def output(given: Any) -> torch.Tensor | None:
        random.put_back()
        with torch.no_grad():
            made = next((one for one in tensors_in(steps.call(*given[0], **given[1])) if one.dim() and len(one) == samples), None)
        return None if made is None else made[0].float()

    plain = output(inputs)
    if plain is None or _same(plain, output(_exchanged(inputs, samples, range(1, samples)))):
        return ()
    return tuple(row for row in range(1, samples) if not _same(plain, output(_exchanged(inputs, samples, [row]))))


def _exchanged(inputs: Any, samples: int, rows: Any) -> Any:
    """The inputs with other values in these rows: those of sample 0, or of a neighbour where these are the same."""

    def change(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.dim() or len(tensor) != samples:
            return tensor
        other = tensor.clone()
        for row in rows:
            source = 0 if not torch.equal(tensor[0], tensor[row]) else (row + 1) % samples
            other[row] = tensor[source]
        return other

    return tuple(rebuilt(one, change, (torch.Tensor,)) for one in inputs[0]), {
        name: rebuilt(one, change, (torch.Tensor,)) for name, one in inputs[1].items()
    }


def _same(one: torch.Tensor, other: torch.Tensor | None) -> bool:
    return other is not None and bool(torch.allclose(one, other, rtol=_CLOSE, atol=_CLOSE, equal_nan=True))
