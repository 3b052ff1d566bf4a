"""The part of a DTensor that is in this process; nothing here communicates. Real ranks: see `test_sharded_models`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

from torchdebug_magics.probing.state.contents import Contents
from torchdebug_magics.probing.storages import bytes_of, held_of, is_freed, is_shard, local_of, ranks_of, sharding_of, shards_note
from torchdebug_magics.probing.tensors import bad_mask, kind_of, largest
from torchdebug_magics.report import Sharding

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.torch_forks import TorchForks


@pytest.fixture
def shard(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Half of an 8 x 4 tensor, on rank 1 of 2; the other rank is made up, and a collective gives nonsense."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # which a process group replaces
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    try:
        yield DTensor.from_local(torch.arange(16.0).reshape(4, 4), init_device_mesh("cpu", (2,)), [Shard(0)])
    finally:
        dist.destroy_process_group()


def test_a_plain_tensor_is_no_shard():
    plain = torch.nn.Parameter(torch.ones(3))
    assert not is_shard(plain)
    assert local_of(plain) is plain
    assert held_of(plain) is plain
    assert sharding_of(plain) is None
    assert ranks_of([plain]) == 1
    assert shards_note([plain], "norms are") == ""


def test_a_shard_says_what_it_is_of(shard: Any):
    assert is_shard(shard)
    assert is_shard(torch.nn.Parameter(shard))
    assert sharding_of(shard) == Sharding(shape=(8, 4), local_shape=(4, 4), placements=("Shard(0)",))
    assert str(sharding_of(shard)) == "8 x 4 as Shard(0): 4 x 4 here"
    assert ranks_of([torch.ones(2), shard]) == 2
    assert shards_note([shard, torch.ones(2)], "norms are") == "1 of 2 parameters are sharded: norms are of the shards in this process"


def test_numbers_and_memory_are_those_in_this_process(shard: Any):
    local = shard.to_local()
    assert local_of(shard).data_ptr() == held_of(shard).data_ptr() == local.data_ptr()
    assert largest([shard]) == 15.0
    assert bytes_of([shard]) == 4 * 16
    local[2, 1] = float("nan")
    assert kind_of(shard) == 1
    assert bad_mask(shard) is None  # its places are not those of the whole


def test_what_is_still_on_its_way_is_waited_for_by_who_reads_it_alone():
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    result = torch.ones(2)
    coming = AsyncCollectiveTensor(result)
    assert held_of(coming) is result
    assert not coming.completed
    assert local_of(coming) is coming  # which waits by itself, at its first op


def test_contents_of_shards_are_kept_and_put_back(shard: Any):
    other = torch.distributed.tensor.DTensor.from_local(torch.zeros(4, 4), shard.device_mesh, shard.placements)
    contents = Contents()
    contents.keep(shard)
    contents.keep(other)  # of the same shape
    before = shard.to_local().clone()
    with torch.no_grad():
        shard.to_local().add_(1)
        other.to_local().sub_(1)
    contents.put_back()
    assert torch.equal(shard.to_local(), before)
    assert not other.to_local().any()


def test_memory_that_was_freed_under_a_tensor_is_neither_read_nor_written():
    tensor = torch.ones(4)
    contents = Contents()
    contents.keep(tensor)
    tensor.untyped_storage().resize_(0)
    assert is_freed(tensor)
    contents.put_back()
    Contents().keep(tensor)
    assert kind_of(tensor) == 0


def test_nothing_is_imported_to_ask(torch_forks: TorchForks):
    code = """
import sys, torch
from torchdebug_magics.probing import storages
class Kind(torch.Tensor): pass
print(storages.is_shard(torch.ones(2).as_subclass(Kind)), "torch.distributed.tensor" in sys.modules)
"""
    assert torch_forks.check(code).strip() == "False False"
