from __future__ import annotations

from typing import Any

import pytest
import torch

from torchdebug_magics.instruments.nanhunt.rerun.attempt import base_of, is_outermost_gradient, outside_transforms

X = torch.ones(3)


def seen_at_the_derivative(monkeypatch: pytest.MonkeyPatch, work: Any) -> list[bool]:
    seen: list[bool] = []
    ordinary = torch.autograd.grad

    def grad(*args: Any, **kwargs: Any) -> Any:
        seen.append(is_outermost_gradient())
        return ordinary(*args, **kwargs)

    monkeypatch.setattr(torch.autograd, "grad", grad)
    work()
    return seen


def total(x: torch.Tensor) -> torch.Tensor:
    return (x * x).sum()


@pytest.mark.parametrize(
    ("work", "seen"),
    [
        (lambda: torch.func.grad(total)(X), [True]),
        (lambda: torch.func.grad_and_value(total)(X), [True]),
        (lambda: torch.vmap(torch.func.grad(total))(torch.ones(2, 3)), [True]),
        (lambda: torch.func.grad(lambda x: torch.func.grad(total)(x).sum())(X), [False, True]),
        (lambda: torch.func.jacrev(total)(X), [False]),
        (lambda: torch.func.hessian(total)(X), [False]),
    ],
)
def test_a_gradient_to_be_used_is_told_from_a_part_of_another(monkeypatch: pytest.MonkeyPatch, work: Any, seen: list[bool]) -> None:
    assert seen_at_the_derivative(monkeypatch, work) == seen
    assert not is_outermost_gradient()


def test_the_numbers_behind_what_is_wrapped() -> None:
    bases: list[torch.Tensor] = []
    torch.vmap(torch.func.grad(lambda x: bases.append(base_of(x)) or total(x)))(torch.arange(6.0).reshape(2, 3))
    assert torch.equal(bases[0], torch.arange(6.0).reshape(2, 3))
    assert base_of(X) is X


def test_a_way_out_and_back_again_also_after_an_error() -> None:
    def left(x: torch.Tensor) -> None:
        with outside_transforms():
            assert not torch._C._functorch.get_interpreter_stack()
            assert float(base_of(x).sum()) == 6.0
            raise ZeroDivisionError

    def inside(x: torch.Tensor) -> torch.Tensor:
        with pytest.raises(ZeroDivisionError):
            left(x)
        return total(x)

    assert torch.equal(torch.vmap(torch.func.grad(inside))(torch.ones(2, 3)), torch.full((2, 3), 2.0))
