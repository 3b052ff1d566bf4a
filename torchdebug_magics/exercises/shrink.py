"""Shrink a large model before debugging it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from torchdebug_magics.exercises.checking import Exercise, expect

__all__ = ["check"]

_GIB = 2**30
_LARGEST = 1_000_000
_TOKENS = 16

check = Exercise("All tasks are solved: your next bug in a giant is found in a dwarf.")


@check.task
def weighed(gibibytes: float, giant: nn.Module) -> None:
    """Parameters times their bytes."""
    size = sum(parameter.numel() * parameter.element_size() for parameter in giant.parameters()) / _GIB
    expect(
        abs(float(gibibytes) - size) < 0.02 * size,
        f"the weights do not take {gibibytes} GiB; a GiB is 2**30 bytes, and a float32 takes four.",
    )


def _kinds(model: nn.Module) -> set[str]:
    return {type(part).__name__ for part in model.modules()}


@check.task
def shrunk(
    small: Any,
    Model: Callable[[Any], nn.Module],  # noqa: N803 - a class of the notebook's
    giant: nn.Module,
    normalised: Callable[[Tensor], Tensor],
) -> None:
    """Small, of the same parts, and as broken as the large one."""
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in Model(small).parameters())
    expect(
        size <= _LARGEST,
        f"{size:,} parameters are still too many to play with; there are more sizes in the configuration than the number of layers.",
    )
    model = Model(small)
    lost = _kinds(giant) - _kinds(model)
    expect(not lost, f"`{(sorted(lost) or [''])[0]}` is in the giant, and not in your small model; keep one of every kind.")
    scores = model(torch.randint(0, small.vocabulary, (1, _TOKENS)))
    cured = normalised(torch.zeros(1, 2)).isfinite().all()  # by task 3, when all tasks are judged at the end
    expect(cured or not scores.isfinite().all(), "your small model is healthy, and the giant is not; what got lost is what you look for.")


@check.task
def repaired(normalised: Callable[[Tensor], Tensor]) -> None:
    """Shares add up to one, and where there is nothing to share it stays finite."""
    weights = torch.tensor([[1.0, 3.0], [0.0, 0.0], [2.0, 0.0]])
    shares = normalised(weights)
    expect(shares.isfinite().all(), "a row of zeros still gives NaN; what is it divided by?")
    expect(
        torch.allclose(shares[[0, 2]], torch.tensor([[0.25, 0.75], [1.0, 0.0]]), atol=1e-3),
        "rows that were all right should stay as they were: 1 and 3 are shares of 0.25 and 0.75.",
    )


class _Counting(nn.Module):
    """A model of five blocks that notes which of them ran."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Identity() for _ in range(5))
        self.ran: list[int] = []
        for number, block in enumerate(self.blocks):
            block.register_forward_hook(lambda *_, number=number: self.ran.append(number))

    def forward(self, x: Tensor) -> Tensor:
        self.ran.clear()
        for block in self.blocks:
            x = block(x)
        return x


@check.task
def shallowed(shallow: Callable[[nn.Module, int], AbstractContextManager[object]]) -> None:
    """Two blocks run inside, all of them after it, whatever happened inside."""
    model = _Counting()
    before = list(model.blocks)
    block = shallow(model, 2)
    expect(hasattr(block, "__enter__"), "`shallow` should be usable in a `with`; did you keep `@contextmanager`, and does it `yield`?")
    with block:
        model(torch.ones(1))
        expect(model.ran == [0, 1], f"inside `with shallow(model, 2)` {len(model.ran)} blocks ran, and the first two should.")
    expect(list(model.blocks) == before, "after the `with` not all blocks are back.")
    try:
        with shallow(model, 1):
            raise KeyError  # noqa: TRY301 - what happens inside is the learner's, and may fail
    except KeyError:
        pass
    expect(list(model.blocks) == before, "when an error ends the `with`, the blocks do not come back; `try` and `finally` see to that.")


@check.task
def stood_in(stand_in: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
    """Right shape, in the graph, and no word looks at another one."""
    parts = [torch.randn(2, 3, 7, 4, requires_grad=True) for _ in range(3)]
    out = stand_in(*parts)
    expect(isinstance(out, Tensor), "`stand_in` gives nothing back yet.")
    expect(out.shape == parts[0].shape, f"it should give the shape of the query, {tuple(parts[0].shape)}, and gives {tuple(out.shape)}.")
    expect(out.requires_grad, "what it gives is not connected to the graph, so that nothing before it is trained.")
    out[:, :, 0].square().sum().backward()
    slopes = {name: part.grad for name, part in zip(("query", "key", "value"), parts, strict=True)}
    idle = [name for name, slope in slopes.items() if slope is None]
    expect(not idle, f"no gradient reaches the {' and the '.join(idle)}; then their layers take no memory for it, and the optimizer none.")
    alone = all(slope is not None and not slope[:, :, 1:].any() for slope in slopes.values())
    expect(alone, "each word still looks at other words, and that is the dear part; leave it out.")
