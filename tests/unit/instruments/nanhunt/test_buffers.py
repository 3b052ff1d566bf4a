from __future__ import annotations

import copy

import pytest
import torch

from torchdebug_magics.instruments.nanhunt.rerun.written_places import BufferKeeper, Held


class Masked(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(1000, 1000))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("absent", None)


def put_back(held: list[Held]) -> None:
    for one in held:
        one.put_back()


def state(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return copy.deepcopy(dict(module.named_buffers()))


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    "module", [torch.nn.BatchNorm1d(3), torch.nn.SyncBatchNorm(3).eval(), torch.nn.InstanceNorm1d(3, track_running_stats=True)]
)
def test_running_statistics_come_back_although_no_version_moves(module: torch.nn.Module) -> None:
    keeper, before = BufferKeeper(module.modules()), state(module)
    keeper.take()
    held = keeper.take()
    module(torch.randn(4, 3, 5))
    if module.training:
        assert not same(state(module), before)
    put_back(held)
    assert same(state(module), before)


def test_writes_in_place_rebound_names_and_data_come_back() -> None:
    module = Masked()
    keeper, before = BufferKeeper([module]), state(module)
    held, mask, count = keeper.take(), module.mask, module.count
    module.mask[0] = 5.0
    module.count = module.count + 1
    put_back(held)
    assert same(state(module), before)
    assert module.mask is mask
    assert module.count is count


def test_each_moment_keeps_its_own_values() -> None:
    module = Masked()
    keeper = BufferKeeper([module])
    first = keeper.take()
    module.count += 1
    second = keeper.take()
    module.count += 1
    put_back(first)
    assert module.count == 0
    put_back(second)
    assert module.count == 1


def test_a_large_constant_is_copied_once() -> None:
    module = Masked()
    keeper = BufferKeeper([module])
    copies = [{one.name: one.kept.copy for one in keeper.take()} for _ in range(3)]
    assert all(one["mask"] is copies[0]["mask"] for one in copies)
    module.mask[0] = 2.0
    assert {one.name: one.kept.copy for one in keeper.take()}["mask"] is not copies[0]["mask"]


def test_a_change_after_a_return_is_seen() -> None:
    module = Masked()
    keeper = BufferKeeper([module])
    held = keeper.take()
    module.count += 3
    put_back(held)
    module.count += 5
    again = keeper.take()
    module.count += 1
    put_back(again)
    assert module.count == 5


def test_writes_past_the_version_counter_come_back() -> None:
    module = Masked()
    keeper = BufferKeeper([module])
    keeper.take()
    module.count.data.fill_(7)  # no version bump is seen on `count`
    held = keeper.take()
    module.count.data.fill_(9)
    put_back(held)
    assert module.count == 7


def test_a_graph_does_not_grow_into_buffers() -> None:
    module = Masked()
    held = BufferKeeper([module]).take()
    put_back(held)
    assert not module.mask.requires_grad
    assert module.mask.grad_fn is None


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "made",
    [
        lambda: torch.empty(3, device="meta"),
        lambda: torch.eye(2).to_sparse(),
        lambda: torch.eye(2).to_sparse_csr(),
        lambda: torch.tensor([1.0]).to(torch.float8_e4m3fn),
        lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
        lambda: torch.tensor([True, False]),
        lambda: torch.tensor([1 + 2j]),
        lambda: torch.ones(1).expand(4),
        lambda: torch.ones(2, 1, 3).expand(2, 5, 3).transpose(0, 2),
        lambda: torch._efficientzerotensor((2, 2)),
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    ],
    ids=["meta", "sparse", "csr", "float8", "quantised", "bool", "complex", "expanded", "expanded inside", "zero", "nested"],
)
def test_no_kind_of_buffer_is_an_error(made: object) -> None:
    module = torch.nn.Module()
    module.register_buffer("odd", made())  # type: ignore[operator]
    keeper = BufferKeeper([module])
    put_back(keeper.take())
    put_back(keeper.take())


def test_an_expanded_buffer_comes_back() -> None:
    module = torch.nn.Module()
    module.register_buffer("wide", torch.tensor([[1.0], [2.0]]).expand(2, 5))
    held = BufferKeeper([module]).take()
    module.wide[:, 0] = 7.0
    put_back(held)
    assert module.wide[:, 3].tolist() == [1.0, 2.0]


def test_a_buffer_made_under_inference_mode_is_left_alone() -> None:
    module = torch.nn.Module()
    with torch.inference_mode():
        module.register_buffer("fixed", torch.ones(2))
    put_back(BufferKeeper([module]).take())
    assert module.fixed.tolist() == [1.0, 1.0]
