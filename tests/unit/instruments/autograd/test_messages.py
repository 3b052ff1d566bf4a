"""Each error of autograd's, raised by PyTorch itself, is known by its message; others are not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from torchdebug_magics.instruments.autograd.errors.raised import kind_of_error


def leaf() -> torch.Tensor:
    return torch.ones(3, requires_grad=True)


class Wrong(torch.autograd.Function):
    """Returns two gradients for one input."""

    @staticmethod
    def forward(ctx, value):  # type: ignore[no-untyped-def]
        return value * 2

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def, override]
        return gradient, gradient


class WrongShape(Wrong):
    """Returns a gradient of another shape."""

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def, override]
        return gradient[:2]


def inplace() -> None:
    h = leaf().exp()
    h += 1
    h.sum().backward()


def twice() -> None:
    loss = leaf().exp().sum()
    loss.backward()
    loss.backward()


def freed() -> None:
    node = leaf().exp().sum()
    node.backward()
    torch.autograd.grad(node, [leaf()])


def in_place_on_leaf() -> None:
    value = leaf()
    value += 1


def in_place_on_view_of_leaf() -> None:
    value = leaf()
    value[0] = 1


def in_place_on_chunk() -> None:
    first, _ = (leaf() * 2)[:2].chunk(2)
    first += 1


def view_of_no_grad() -> None:
    value = (leaf() * 2).clone()
    with torch.no_grad():
        view = value[:2]
    view += 1


def inference() -> None:
    with torch.inference_mode():
        value = torch.ones(3)
    (leaf() * value).sum().backward()


def inference_in_place() -> None:
    with torch.inference_mode():
        value = torch.ones(3)
    value += 1


def integers() -> None:
    torch.tensor([1, 2], requires_grad=True)


def integers_later() -> None:
    torch.tensor([1, 2]).requires_grad_()


def recomputed() -> None:
    calls: list[int] = []

    def part(value: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return value.exp().exp() if len(calls) == 1 else value.exp()

    checkpoint(part, leaf(), use_reentrant=False).sum().backward()


def once() -> None:
    class Once(torch.autograd.Function):
        @staticmethod
        def forward(ctx, value):  # type: ignore[no-untyped-def]
            return value * 2

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx, gradient):  # type: ignore[no-untyped-def]
            return gradient * 2

    value = leaf()
    (gradient,) = torch.autograd.grad(Once.apply(value).exp().sum(), value, create_graph=True)
    gradient.sum().backward()


def wrong_hook() -> None:
    value = leaf()
    value.register_hook(lambda gradient: gradient[:2])
    value.exp().sum().backward()


def not_leaf() -> None:
    torch.optim.SGD([leaf() * 2], lr=0.1)


def numpy() -> None:
    leaf().numpy()


def assigned() -> None:
    value = leaf()
    value.grad = torch.ones(2)


RAISED: dict[str, tuple[Callable[[], object], str]] = {
    "inplace": (inplace, "inplace"),
    "twice": (twice, "second_backward"),
    "cut": (lambda: torch.ones(3).sum().backward(), "cut"),
    "cut in grad": (lambda: torch.autograd.grad(torch.ones(3).sum(), leaf()), "cut"),
    "unused": (lambda: torch.autograd.grad(leaf().sum(), leaf()), "unused_input"),
    "leaf": (in_place_on_leaf, "leaf_inplace"),
    "view of a leaf": (in_place_on_view_of_leaf, "view_inplace"),
    "chunk": (in_place_on_chunk, "view_inplace"),
    "view made in no_grad": (view_of_no_grad, "view_inplace"),
    "non-scalar": (lambda: leaf().exp().backward(), "non_scalar"),
    "inference": (inference, "inference_tensor"),
    "inference in place": (inference_in_place, "inference_tensor"),
    "integers": (integers, "integer_grad"),
    "integers later": (integers_later, "integer_grad"),
    "number of gradients": (lambda: Wrong.apply(leaf()).sum().backward(), "custom_function"),
    "shape of a gradient": (lambda: WrongShape.apply(leaf()).sum().backward(), "custom_function"),
    "recomputed": (recomputed, "checkpoint_mismatch"),
    "once": (once, "no_double_backward"),
    "hook": (wrong_hook, "other"),
    "not a leaf": (not_leaf, "other"),
    "numpy": (numpy, "other"),
    "assigned": (assigned, "other"),
}


@pytest.mark.parametrize("name", RAISED)
def test_an_error_of_autograds_is_known(name: str) -> None:
    raises, kind = RAISED[name]
    with pytest.raises((RuntimeError, ValueError)) as raised:
        raises()
    assert kind_of_error(raised.value) == kind, str(raised.value)


@pytest.mark.parametrize(
    "raises",
    [
        lambda: torch.ones(2, 3) @ torch.ones(2, 3),
        lambda: torch.ones(2).view(3),
        lambda: torch.ones(2) + torch.ones(3),
        lambda: torch.nn.Linear(2, 3)(torch.ones(1, 3)),
        lambda: torch.nn.functional.cross_entropy(torch.ones(2, 3), torch.tensor([5, 0])),
    ],
)
def test_other_errors_are_not(raises: Callable[[], object]) -> None:
    with pytest.raises((RuntimeError, IndexError)) as raised:
        raises()
    assert kind_of_error(raised.value) is None
