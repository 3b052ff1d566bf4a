"""Shrink a large model before debugging it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from torchdebug_magics.exercises.checking import Exercise, expect, expect_kind, shown

_GIB = 2**30
_LARGEST = 1_000_000
_TOKENS = 4, 16
check = Exercise("All tasks are solved: your next bug in a giant is found in a dwarf.")


@check.task
def weighed(gibibytes: float, giant: nn.Module) -> None:
    """Parameters times their bytes."""
    size = sum(parameter.numel() * parameter.element_size() for parameter in giant.parameters()) / _GIB
    said = re.search(r"\d+\.?\d*(e[-+]?\d+)?", str(gibibytes))  # "67 GiB" is a number, too
    named = float(said[0]) if said else 0.0
    expect(said, f"{shown(gibibytes)} is not a number of GiB.")
    expect(abs(named - size) < 0.02 * size, f"the weights do not take {named:.12g} GiB; a GiB is 2**30 bytes, and a float32 takes four.")


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
    expect(
        hasattr(small, "vocabulary") and hasattr(small, "layers"),
        f"`small` should be a configuration, as `replace(config, layers=2)` makes one, and is a {type(small).__name__}.",
    )
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in Model(small).parameters())
    expect(
        size <= _LARGEST,
        f"{size:,} parameters are still too many to play with; there are more sizes in the configuration than the number of layers.",
    )
    torch.manual_seed(0)  # as in the notebook, so that both see the same
    model = Model(small)
    lost = _kinds(giant) - _kinds(model)
    expect(not lost, f"`{(sorted(lost) or [''])[0]}` is in the giant, and not in your small model; keep one of every kind.")
    scores = model(torch.randint(0, small.vocabulary, _TOKENS))
    cured = normalised(torch.zeros(1, 2)).isfinite().all()  # by task 3, when all tasks are judged at the end
    expect(cured or not scores.isfinite().all(), "your small model is healthy, and the giant is not; what got lost is what you look for.")


@check.task
def repaired(normalised: Callable[[Tensor], Tensor]) -> None:
    """Shares add up to one, and where there is nothing to share it stays finite."""
    weights = torch.tensor([[1.0, 3.0], [0.0, 0.0], [2.0, 0.0], [0.1, 0.3]], requires_grad=True)
    shares = normalised(weights)
    expect_kind(shares, Tensor, "`normalised` should give a tensor")
    expect(shares.isfinite().all(), "a row of zeros still gives NaN; what is it divided by?")
    expect(
        torch.allclose(shares[[0, 2, 3]], torch.tensor([[0.25, 0.75], [1.0, 0.0], [0.25, 0.75]]), atol=5e-3),
        "rows that were all right should stay as they were: 1 and 3 are shares of 0.25 and 0.75, and so are 0.1 and 0.3.",
    )
    shares.square().sum().backward()
    slope = weights.grad
    expect(
        slope is not None and slope.isfinite().all(),
        "a row of zeros gives finite shares now, and its gradient is NaN; bound what you divide by, and not the result.",
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
    written = getattr(shallow, "__wrapped__", None)  # what stands under `@contextmanager`
    usable = hasattr(shallow(model, 2), "__enter__") and (written is None or inspect.isgeneratorfunction(written))
    expect(usable, "`shallow` should be usable in a `with`; did you keep `@contextmanager`, and does it `yield`?")
    for count in (2, 3):
        with shallow(model, count):
            model(torch.ones(1))
            first = list(range(count))
            expect(model.ran == first, f"inside `with shallow(model, {count})` the blocks {model.ran} ran, and {first} should.")
        expect(list(model.blocks) == before, "after the `with` not all blocks are back.")
    passed_on = False
    try:
        with shallow(model, 1):
            raise KeyError  # noqa: TRY301 - what happens inside is the learner's, and may fail
    except KeyError:
        passed_on = True
    expect(passed_on, "an error inside the `with` is swallowed; put the blocks back, and let it pass.")
    expect(list(model.blocks) == before, "when an error ends the `with`, the blocks do not come back; `try` and `finally` see to that.")


@check.task
def stood_in(stand_in: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
    """Right shape, in the graph, and no word looks at another one."""
    parts = [torch.randn(2, 3, 7, 4, requires_grad=True) for _ in range(3)]
    out = stand_in(*parts)
    expect_kind(out, Tensor, "`stand_in` should give a tensor")
    expect(out.shape == parts[0].shape, f"it should give the shape of the query, {tuple(parts[0].shape)}, and gives {tuple(out.shape)}.")
    expect(out.requires_grad, "what it gives is not connected to the graph, so that nothing before it is trained.")
    out[:, :, 0].square().sum().backward()
    slopes = {name: part.grad for name, part in zip(("query", "key", "value"), parts, strict=True)}
    idle = [name for name, slope in slopes.items() if slope is None]
    expect(not idle, f"no gradient reaches the {' and the '.join(idle)}; then their layers take no memory for it, and the optimizer none.")
    alone = all(slope is not None and not slope[:, :, 1:].any() for slope in slopes.values())
    expect(alone, "each word still looks at other words, and that is the expensive part; leave it out.")
