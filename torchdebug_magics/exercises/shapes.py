"""Repair the shapes: those that raise an error, and those that do not."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from torchdebug_magics.exercises.checking import Exercise, expect, expect_kind

check = Exercise("All tasks are solved: you repaired the shapes that raise an error, and those that only make the model worse.")


@check.task
def convolutions(net: nn.Module) -> None:
    """Ten scores for each picture, and a gradient for each parameter."""
    for count in (1, 4):
        scores = net(torch.randn(count, 3, 32, 32))
        expect(
            tuple(scores.shape) == (count, 10),
            f"for {count} pictures the network should give scores of shape ({count}, 10), and gives {tuple(scores.shape)}.",
        )
    net(torch.randn(2, 3, 32, 32)).sum().backward()
    idle = [name for name, parameter in net.named_parameters() if parameter.grad is None]
    net.zero_grad()
    expect(not idle, f"no gradient reaches `{(idle or [''])[0]}`; every layer should take part.")


class _Alone(nn.Module):
    def forward(self, rows: Tensor) -> Tensor:
        return rows.sin().sum(-1)


class _Mixed(nn.Module):
    """What sample 0 gives depends on sample 1, and on nothing but its neighbour."""

    def forward(self, rows: Tensor) -> Tensor:
        return rows.sin().sum(-1) + rows.roll(1, 0)[..., 0]


class _MeanMixed(nn.Module):
    def forward(self, rows: Tensor) -> Tensor:
        return rows.sum(-1) - rows.mean()


@check.task
def tested(is_independent: Callable[[nn.Module, Tensor], object]) -> None:
    """The learner's own test tells models that mix samples from one that does not."""
    batch = torch.randn(5, 3)
    answer = is_independent(_Alone(), batch)
    expect(answer is not None, "`is_independent` gives nothing back yet; let it return True or False.")
    expect(answer, "`is_independent` says False for a model that looks at each sample alone.")
    for model in (_Mixed(), _MeanMixed()):
        expect(not is_independent(model, batch), "`is_independent` says True for a model in which one sample changes another's answer.")


@check.task
def read(reader: nn.Module) -> None:
    """A sentence is read from its first word to its last, whatever is beside it in the batch."""
    tokens = torch.randint(1, 50, (5, 12))
    with torch.no_grad():
        together = reader(tokens)
        expect(together.shape[0] == len(tokens), f"{len(tokens)} sentences should give {len(tokens)} answers, and not {together.shape[0]}.")
        alone = reader(tokens[-1:])
        expect(
            torch.allclose(together[-1:], alone, atol=1e-5),
            "the last sentence is read differently when others stand beside it; which of its dimensions does the LSTM take for time?",
        )
        changed = tokens.clone()
        changed[:, 0] = 51
        expect(not torch.allclose(reader(changed), together, atol=1e-6), "the first word of a sentence makes no difference; read them all.")


@check.task
def split(split_heads: Callable[[Tensor, int], Tensor], join_heads: Callable[[Tensor], Tensor]) -> None:
    """Each head gets its own columns of each word, and joining is the way back."""
    batch, length, heads, size = 2, 5, 3, 4
    x = torch.arange(float(batch * length * heads * size)).reshape(batch, length, heads * size)
    parts = split_heads(x, heads)
    expect_kind(parts, Tensor, "`split_heads` should give a tensor")
    expect(
        tuple(parts.shape) == (batch, heads, length, size),
        f"`split_heads` should give (batch, heads, length, size), here {(batch, heads, length, size)}, and gives {tuple(parts.shape)}.",
    )
    expect(
        all(torch.equal(parts[:, head], x[..., head * size : (head + 1) * size]) for head in range(heads)),
        "the shape is right, and the numbers are not where they belong: head 0 should hold the first columns of every word.",
    )
    joined = join_heads(parts)
    expect_kind(joined, Tensor, "`join_heads` should give a tensor")
    expect(torch.equal(joined, x), "`join_heads` does not give back what was split.")


@check.task
def compared(loss_of: Callable[[Tensor, Tensor], Tensor]) -> None:
    """One prediction is compared with one target."""
    for count in (8, 1):
        predictions, targets = torch.randn(count, 1, requires_grad=True), torch.randn(count)
        expected = sum((float(predictions[row, 0]) - float(targets[row])) ** 2 for row in range(count)) / count
        loss = loss_of(predictions, targets)
        expect_kind(loss, Tensor, "`loss_of` should give a tensor, from which `backward()` can start")
        expect(loss.numel() == 1, f"a loss is one number, and this one is of shape {tuple(loss.shape)}; the mean is still missing.")
        expect(loss.requires_grad, "no gradient reaches the predictions, so that nothing would learn from this loss.")
        expect(
            abs(float(loss) - expected) < 1e-4,  # noqa: PLR2004 - rounding
            f"for {count} predictions the loss should be {expected:.4f}, and is {float(loss):.4f}; what shape has the difference?",
        )
