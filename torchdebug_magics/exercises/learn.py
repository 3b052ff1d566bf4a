"""Make it learn: three faults that raise nothing, each hidden behind another one."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Sized

import torch
from torch import Tensor, nn
from torch.nn import functional

from torchdebug_magics.exercises.checking import Exercise, Sealed, expect, expect_kind, shown
from torchdebug_magics.instruments.autograd.report import AutogradReport

_KIND = Sealed("learn/kind", "36c244101a8d39a02bb6e6b7d157d941")
_PART = Sealed("learn/part", "00bb5ae9f41df6ab5aeadde7d7d7fb82")
_CLASSES = 3
_STEPS = 4
_LEARNED = 0.4
check = Exercise("All tasks are solved: when a loss does not move, you ask what is updated, what the gradient reaches, and in which order.")


@check.task
def found(first: AutogradReport, kind: str) -> None:
    """What %%autograd said first."""
    expect(
        isinstance(first, AutogradReport), "`first` is not a report; write `%%autograd -o first` as the first line of the training cell."
    )
    expect(first.finding is not None, "`first` found nothing; is it the training as it was given to you?")
    expect(_KIND.fits(kind), f"{shown(kind)} is not what the finding is called; print `first.finding.kind`.")


@check.task
def prepared(prepare: Callable[[], tuple[nn.Module, torch.optim.Optimizer]]) -> None:
    """The optimizer holds the parameters of the model, and no others."""
    made = prepare()
    expect_kind(made, tuple, "`prepare` should still give the model and its optimizer")
    model, optimizer = made
    expect(
        getattr(model.head, "out_features", 0) == _CLASSES, f"there are {_CLASSES} rings, so the new head should have {_CLASSES} outputs."
    )
    held = {id(one) for group in optimizer.param_groups for one in group["params"]}
    missing = [name for name, one in model.named_parameters() if id(one) not in held]
    expect(not missing, f"the optimizer does not hold `{(missing or [''])[0]}`; what must exist before the optimizer is made?")
    expect(
        len(held) == len(list(model.parameters())),
        "the optimizer still holds tensors that do not belong to the model; make it from the model as it is in the end.",
    )


@check.task
def connected(part: str, Net: Callable[..., nn.Module]) -> None:  # noqa: N803 - the name in the notebook
    """A gradient reaches every parameter."""
    called = str(part).strip(" ().'\"`").rpartition(".")[2]  # of `features.detach()`, the last part
    expect(_PART.fits(called), f"{shown(part)} is not the call that cuts; the first sentence of the report names it.")
    model = Net(classes=_CLASSES)
    scores = model(torch.randn(16, 2))
    expect_kind(scores, Tensor, "the model should give its scores")
    expect(
        scores.shape == (16, _CLASSES), f"for 16 points the scores should be of shape (16, {_CLASSES}), and are of {tuple(scores.shape)}."
    )
    scores.square().sum().backward()
    missing = [name for name, one in model.named_parameters() if one.grad is None or not one.grad.any()]
    expect(not missing, f"no gradient reaches `{(missing or [''])[0]}` yet; what stands between it and the loss?")


@check.task
def trained(train: Callable[..., Sequence[float]], points: Tensor, rings: Tensor) -> None:
    """Each step is an update with the gradient of its own loss."""
    model, mine = nn.Linear(2, _CLASSES), nn.Linear(2, _CLASSES)
    mine.load_state_dict(model.state_dict())
    losses = train(model, torch.optim.SGD(model.parameters(), lr=0.5), _STEPS)
    expect_kind(losses, Sized, "`train` should still give the list of its losses")
    expect(len(losses) == _STEPS, f"`train` should take as many steps as it is told: {_STEPS}, and took {len(losses)}.")
    wanted = _weights_by_step(mine, points, rings)
    expect(not torch.equal(model.weight, wanted[0]), "no step changes the weights; is there still a gradient when the optimizer steps?")
    expect(
        torch.allclose(model.weight, wanted[-1], atol=1e-4),
        "the weights change, and not as they should: does each step begin with gradients of zero, and end with its own update?",
    )


def _weights_by_step(model: nn.Linear, points: Tensor, rings: Tensor) -> list[Tensor]:
    """The weights of a linear model before the first step of plain gradient descent, and after each."""
    weights = [model.weight.detach().clone()]
    for _ in range(_STEPS):
        gradients = torch.autograd.grad(functional.cross_entropy(model(points), rings), list(model.parameters()))
        with torch.no_grad():
            for one, gradient in zip(model.parameters(), gradients, strict=True):
                one.sub_(gradient, alpha=0.5)
        weights.append(model.weight.detach().clone())
    return weights


@check.task
def learned(last: AutogradReport, losses: Sequence[float]) -> None:
    """Nothing is found any more, and the loss falls."""
    expect(isinstance(last, AutogradReport), "`last` is not a report; run the cell above, with its first line.")
    expect(not last.found, f"there is still a finding: {last.finding.headline if last.finding else ''}.")
    expect_kind(losses, Sized, "`losses` should be what `train` gives")
    expect(
        losses[-1] < _LEARNED,
        f"the loss ends at {losses[-1]:.2f}, and should fall below {_LEARNED}; run the cells from `prepare` on again.",
    )
