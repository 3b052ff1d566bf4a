"""A digest sees every bit and every order, and calls a NaN equal to itself."""

from __future__ import annotations

import pytest
import torch

from torchdebug_magics.probing.state.digest import of_plain, of_tensor

SIZES = [(3,), (7, 11), (5000,), (33, 1031), (200, 300)]


@pytest.mark.parametrize("shape", SIZES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.complex64], ids=str)
def test_it_sees_every_change_of_one_element_and_every_exchange(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    one = torch.randint(0, 100, shape).to(dtype)
    known = of_tensor(one)
    assert of_tensor(one.clone()) == known
    for place in (0, one.numel() // 2, one.numel() - 1):
        other = one.clone()
        other.view(-1)[place] += 1
        assert of_tensor(other) != known
    flat = torch.arange(one.numel()).to(dtype)
    if len(flat) > 2:
        moved = flat.clone()
        moved[1], moved[2] = flat[2], flat[1]
        assert of_tensor(moved) != of_tensor(flat)
        assert of_tensor(flat.flip(0)) != of_tensor(flat)


def test_rows_that_change_places_are_seen() -> None:
    one = torch.randn(64, 4096)
    assert of_tensor(one[torch.randperm(64)]) != of_tensor(one)
    assert of_tensor(one[:, torch.randperm(4096)]) != of_tensor(one)


def test_bits_count_and_not_values() -> None:
    nan = torch.tensor([float("nan"), 1.0])
    assert of_tensor(nan) == of_tensor(nan.clone())
    assert of_tensor(torch.tensor([0.0])) != of_tensor(torch.tensor([-0.0]))
    assert of_tensor(torch.tensor([-1.0, 1.0])) != of_tensor(torch.tensor([1.0, -1.0]))
    assert of_tensor(torch.zeros(4)) != of_tensor(torch.zeros(2, 2))
    assert of_tensor(torch.zeros(4)) != of_tensor(torch.zeros(4, dtype=torch.int32))


def test_the_layout_in_memory_does_not_count() -> None:
    one = torch.arange(12.0).view(3, 4)
    assert of_tensor(one.t().contiguous().t()) == of_tensor(one)
    assert of_tensor(torch.ones(1).expand(5)) == of_tensor(torch.ones(5))
    assert of_tensor(torch.tensor([1 + 2j]).conj()) == of_tensor(torch.tensor([1 - 2j]))


@pytest.mark.parametrize("tensor", [torch.empty(0), torch.empty(2, device="meta"), torch.eye(2).to_sparse(), torch.eye(2).to_sparse_csr()])
def test_odd_tensors_have_one_too(tensor: torch.Tensor) -> None:
    assert of_tensor(tensor) == of_tensor(tensor)


def test_plain_values() -> None:
    values = [1, 2, True, 0.5, -0.0, 0.0, "a", None, (1, 2), (2, 1), [1, [2]], 1j]
    assert len({of_plain(one) for one in values}) == len(values)
    assert of_plain(float("nan")) == of_plain(float("nan"))
