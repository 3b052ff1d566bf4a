"""Collectives are answered in this process; what only another rank has is refused, and nothing is ever sent."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from torchdebug_magics.probing.dispatch import ResultListener
from torchdebug_magics.probing.distributed.unsent_collectives import OthersNeeded, UnsentCollectives
from torchdebug_magics.probing.state.contents import memory_of

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def sent() -> list[str]:
    """What went past the answers."""
    return []


@pytest.fixture
def alone(rank: int, sent: list[str]) -> Iterator[UnsentCollectives]:
    collectives = UnsentCollectives()

    def seen(func: Any, _args: object, _result: object) -> None:
        if "c10d" in func.namespace and "wait_tensor" not in str(func) and "_wrap_tensor" not in str(func):
            sent.append(str(func))

    with ResultListener(seen, lambda _func, _error: None), collectives.listener():
        yield collectives
    assert sent == []


def own(rank: int) -> torch.Tensor:
    return torch.tensor([1.0, 2.0]) + 10 * rank


def test_a_reduction_gives_this_ranks_own_part(alone: UnsentCollectives, rank: int) -> None:
    tensor = own(rank)
    dist.all_reduce(tensor)
    dist.reduce(tensor, 0)
    work = dist.all_reduce(tensor, async_op=True)
    assert work.wait()
    assert work.is_completed()
    assert torch.equal(work.get_future().value()[0], own(rank))
    assert torch.equal(tensor, own(rank))
    assert [one.op for one in alone.exchanges] == ["allreduce", "reduce", "allreduce"]


def test_a_gather_gives_it_in_every_place(alone: UnsentCollectives, rank: int) -> None:
    places = [torch.zeros(2), torch.zeros(2)]
    dist.all_gather(places, own(rank))
    assert all(torch.equal(place, own(rank)) for place in places)
    together = torch.zeros(4)
    dist.all_gather_into_tensor(together, own(rank))
    assert torch.equal(together, own(rank).repeat(2))
    held = [torch.zeros(2), torch.zeros(2)]
    dist.gather(own(rank), held if rank == 0 else None)
    assert all(torch.equal(place, own(rank)) for place in held) is (rank == 0)
    named: list[Any] = [None, None]
    dist.all_gather_object(named, {"rank": rank})
    assert named == [{"rank": rank}] * 2


def test_functional_collectives(alone: UnsentCollectives, rank: int) -> None:
    tensor = own(rank)
    summed = functional.all_reduce(tensor, "sum", dist.group.WORLD)
    assert torch.equal(summed + 0, tensor)
    gathered = functional.all_gather_tensor(tensor, 0, dist.group.WORLD)
    assert torch.equal(gathered + 0, tensor.repeat(2))
    functional.all_reduce(tensor, "sum", dist.group.WORLD).add_(1)
    assert torch.equal(tensor, own(rank))


def test_barriers_and_sends_are_over_at_once_and_bring_nothing(alone: UnsentCollectives, rank: int) -> None:
    dist.barrier()
    dist.isend(own(rank), 1 - rank).wait()
    assert alone.exchanges == []


def test_a_broadcast_is_its_roots_own(alone: UnsentCollectives, rank: int) -> None:
    tensor = own(rank)
    dist.broadcast(tensor, rank)
    assert torch.equal(tensor, own(rank))
    with pytest.raises(OthersNeeded, match="it needs what other ranks send"):
        dist.broadcast(tensor, 1 - rank)


@pytest.mark.parametrize(
    "asks",
    [
        lambda rank: dist.recv(torch.zeros(2), 1 - rank),
        lambda _rank: dist.all_to_all_single(torch.zeros(2), torch.zeros(2)),
        lambda _rank: dist.reduce_scatter_tensor(torch.zeros(1), torch.zeros(2)),
    ],
)
def test_what_only_others_have_is_refused_and_known_even_where_the_error_was_caught(alone: UnsentCollectives, rank: int, asks: Any) -> None:
    with contextlib.suppress(Exception):
        asks(rank)
    assert "it needs what other ranks send" in alone.refused


def test_what_was_to_be_sent(alone: UnsentCollectives, rank: int) -> None:
    tensor = torch.tensor([3.0, -70_000.0])
    dist.all_reduce(tensor)
    (exchange,) = alone.exchanges
    assert (exchange.dtype, exchange.peak, exchange.element_count) == (torch.float32, 70_000.0, 2)
    assert exchange.memory == {memory_of(tensor)}
    assert exchange.location is not None
    assert exchange.location.source == "dist.all_reduce(tensor)"


def test_modes_below_see_what_an_answer_copies(rank: int) -> None:
    seen: list[str] = []
    with ResultListener(lambda func, _args, _result: seen.append(str(func)), lambda _func, _error: None), UnsentCollectives().listener():
        dist.all_gather([torch.zeros(2), torch.zeros(2)], torch.ones(2))
    assert [name for name in seen if "copy_" in name or "c10d" in name] == ["aten.copy_.default"] * 2
