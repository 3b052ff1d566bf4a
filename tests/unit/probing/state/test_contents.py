"""What a tensor held is kept before it is written, put back, and exchanged for what it holds then."""

from __future__ import annotations

import pytest
import torch

from torchdebug_magics.probing.state.contents import Contents


def test_what_was_written_is_put_back_with_its_version() -> None:
    one, contents = torch.arange(3.0), Contents()
    contents.keep(one)
    one.mul_(2)
    contents.keep(one)  # the first copy holds
    one.add_(1)
    contents.put_back()
    assert one.tolist() == [0, 1, 2]
    assert one._version == 0


@pytest.mark.parametrize("overlapping", [False, True])
def test_an_exchange_gives_back_both_ways(overlapping: bool) -> None:
    one, two, contents = torch.arange(3.0), torch.ones(2), Contents()
    contents.keep(one)
    if overlapping:
        one[:2].add_(5)
        contents.keep(one[1:])
    contents.keep(two)
    one.add_(10)
    two.zero_()
    end = one.tolist(), two.tolist(), one._version
    later = Contents()
    contents.exchange(later)
    assert (one.tolist(), two.tolist()) == ([0, 1, 2], [1, 1])
    one.fill_(7)
    later.put_back()
    assert (one.tolist(), two.tolist(), one._version) == end


def test_each_tensor_without_memory_of_its_own_is_kept() -> None:
    contents, pair = Contents(), [torch.eye(2).to_sparse(), 2 * torch.eye(2).to_sparse()]
    for tensor in pair:
        contents.keep(tensor)
    for tensor in pair:
        tensor.mul_(5)
    contents.put_back()
    assert [tensor.to_dense().tolist() for tensor in pair] == [[[1, 0], [0, 1]], [[2, 0], [0, 2]]]


def test_what_was_not_written_is_left_alone() -> None:
    contents = Contents()
    sparse = torch.eye(2).to_sparse()
    contents.keep(sparse)
    contents.put_back()
    assert sparse.to_dense().tolist() == [[1, 0], [0, 1]]
