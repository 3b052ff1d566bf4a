# ruff: noqa: PT012 - what raises is a whole step, watched

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from torchdebug_magics.probing.dispatch import OpListener


def listening(stack: ExitStack) -> list[str]:
    names: list[str] = []

    def listen(func: Any, args: Any, kwargs: Any, run: Any) -> Any:
        names.append(func._schema.name)
        return run()

    stack.enter_context(OpListener(listen))
    return names


def test_ops_are_shown_and_numbers_are_unchanged() -> None:
    x = torch.randn(3, 3)
    wanted = x.log_softmax(1).exp().sum()
    with ExitStack() as stack:
        names = listening(stack)
        got = x.log_softmax(1).exp().sum()
    assert torch.equal(got, wanted)
    assert names == ["aten::_log_softmax", "aten::exp", "aten::sum"]


def test_a_backward_is_shown_too() -> None:
    x = torch.ones(3, requires_grad=True)
    with ExitStack() as stack:
        names = listening(stack)
        x.exp().sum().backward()
    assert "aten::mul" in names
    assert torch.equal(x.grad, x.exp().detach())


def test_keyword_arguments_and_in_place_results_arrive() -> None:
    x, out = torch.ones(2), torch.zeros(2)
    with ExitStack() as stack:
        listening(stack)
        assert x.add_(1, alpha=3) is x
        assert torch.add(x, x, out=out) is out
    assert out.tolist() == [8.0, 8.0]


def test_foreach_ops_still_bump_versions() -> None:
    held = [torch.ones(2), torch.ones(3)]
    before = [one._version for one in held]
    with ExitStack() as stack:
        listening(stack)
        torch._foreach_add_(held, 1.0)
    assert all(one._version > version for one, version in zip(held, before, strict=True))


def test_fake_tensors_pass_unseen() -> None:
    with ExitStack() as stack:
        names = listening(stack)
        with FakeTensorMode() as mode:
            x = mode.from_tensor(torch.ones(3))
            names.clear()
            assert (x + x).shape == (3,)
    assert names == []


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "work",
    [
        lambda: torch.eye(2).to_sparse() @ torch.ones(2, 2),
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged) * 2,
        lambda: torch.empty(2, device="meta") + 1,
        lambda: torch._efficientzerotensor((2,)) * torch.ones(2),
        lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8).dequantize(),
        lambda: torch.tensor([1.0]).to(torch.float8_e4m3fn).float(),
        lambda: torch.vmap(lambda x: x * 2)(torch.ones(2, 2)),
        lambda: torch.func.grad(lambda x: (x**2).sum())(torch.ones(2)),
        lambda: torch.func.jvp(lambda x: x**2, (torch.ones(2),), (torch.ones(2),)),
    ],
    ids=["sparse", "nested", "meta", "zero", "quantised", "float8", "vmap", "grad", "jvp"],
)
def test_no_kind_of_tensor_is_an_error(work: Any) -> None:
    with ExitStack() as stack:
        listening(stack)
        assert work() is not None


def test_a_users_mode_above_and_below_sees_its_ops() -> None:
    class Mine(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            Mine.count += 1
            return func(*args, **(kwargs or {}))

    with Mine(), ExitStack() as stack:
        names = listening(stack)
        with Mine():
            torch.ones(2).exp()
    assert "aten::exp" in names
    assert Mine.count == 4


def test_the_mode_is_gone_after_an_error_inside() -> None:
    with pytest.raises(RuntimeError, match="shape"), ExitStack() as stack:
        listening(stack)
        torch.ones(2, 3).reshape(4)
    assert not _get_current_dispatch_mode_stack()


def test_the_compiler_may_run_under_it() -> None:
    step = torch.compile(lambda x: (x * 2).log(), backend="eager")
    try:
        wanted = step(torch.ones(2))
        with ExitStack() as stack:
            names = listening(stack)
            assert torch.equal(step(torch.ones(2)), wanted)
        assert "aten::log" in names
    finally:
        torch._dynamo.reset()
