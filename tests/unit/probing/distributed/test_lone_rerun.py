"""What DDP wraps is called without it, its reducer hears of nothing, and all is as it was afterwards."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from torchdebug_magics.probing.distributed.unsent_collectives import LoneRerun, OthersNeeded


def wrapped(**options: Any) -> DistributedDataParallel:
    torch.manual_seed(0)
    return DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)), **options)


def test_outside_a_job_nothing_is_done() -> None:
    alone = LoneRerun()
    alone.refuse([torch.nn.Linear(1, 1)])
    alone.start()
    with ExitStack() as stack:
        alone.attach(stack)
        assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()
    alone.put_back()


@pytest.mark.parametrize("options", [{}, {"static_graph": True}, {"find_unused_parameters": True}, {"gradient_as_bucket_view": True}])
def test_the_gradients_are_those_of_what_is_wrapped(rank: int, options: dict[str, Any]) -> None:
    model, x = wrapped(**options), torch.randn(5, 2)
    own = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    own.load_state_dict(model.module.state_dict())
    own(x).square().sum().backward()
    before, flags = set(vars(model)), model.require_forward_param_sync
    alone = LoneRerun()
    alone.start()
    with ExitStack() as stack:
        alone.attach(stack)
        for _ in range(2):
            loss = model(x).square().sum()
            loss.backward()
    alone.put_back()
    alone.put_back()
    assert set(vars(model)) == before
    assert model.require_forward_param_sync is flags
    for one, other in zip(own.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(other.grad, 2 * one.grad)
    assert alone.collectives.exchanges == []


def test_none_in_the_middle_of_a_backward_pass(rank: int) -> None:
    model, reasons = wrapped(), []

    def hook(_gradient: torch.Tensor) -> None:
        with pytest.raises(OthersNeeded, match="the backward pass that is running") as error:
            LoneRerun().refuse([model])
        reasons.append(error)

    doubled = torch.ones(2, requires_grad=True) * 2
    doubled.register_hook(hook)
    doubled.sum().backward()
    assert len(reasons) == 1


def test_a_method_that_the_user_has_put_on_the_model_is_put_back(rank: int) -> None:
    model = wrapped()
    model._pre_forward = mine = lambda *inputs, **kwargs: (inputs, kwargs)
    alone = LoneRerun()
    alone.start()
    alone.put_back()
    assert model._pre_forward is mine
    assert "_post_forward" not in vars(model)


def test_a_model_in_shards_is_refused(rank: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_module

    model = distribute_module(torch.nn.Linear(2, 2), init_device_mesh("cpu", (2,)))
    with pytest.raises(OthersNeeded, match="spread over ranks"):
        LoneRerun().refuse([model])
