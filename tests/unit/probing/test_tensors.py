"""Cheap questions about numbers, asked of every kind of tensor there is."""

from __future__ import annotations

import dataclasses
import math
from collections import OrderedDict, namedtuple
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from torchdebug_magics.probing.tensors import INF, NAN, are_ordinary, bad_mask, dense, kind_of, largest, tensors_in

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
nan, inf = math.nan, math.inf


class Sub(torch.Tensor):
    """A subclass that only carries a name."""


def fake(*values: float) -> torch.Tensor:
    with FakeTensorMode() as mode:
        return mode.from_tensor(torch.tensor(values))


def quantised(*values: float) -> torch.Tensor:
    return torch.quantize_per_tensor(torch.tensor(values), 0.1, 0, torch.qint8)


def brute(tensors: list[torch.Tensor]) -> float:
    """One number at a time."""
    values = [part for one in tensors for value in one.detach().reshape(-1).tolist() for part in _parts(value)]
    return nan if any(math.isnan(value) for value in values) else max(map(abs, values), default=0.0)


def _parts(value: Any) -> tuple[float, ...]:
    return (value.real, value.imag) if isinstance(value, complex) else (value,)


def same(one: float, other: float) -> bool:
    return one == other or (math.isnan(one) and math.isnan(other))


@pytest.mark.parametrize("special", [None, nan, inf, -inf, "huge", "-huge", 0.0, -0.0])
@pytest.mark.parametrize("dtype", [*FLOATS, torch.complex64, torch.complex128])
@pytest.mark.parametrize("sizes", [(3,), (1, 5, 40000), (33000, 7), (2, 3, 4, 5, 6)])
def test_largest_is_that_of_a_brute_force_search(special: Any, dtype: torch.dtype, sizes: tuple[int, ...]) -> None:
    made = torch.Generator().manual_seed(sum(sizes))
    tensors = [torch.randn(size, generator=made).to(dtype) for size in sizes]
    if special is not None:
        value = math.copysign(torch.finfo(dtype).max, -1 if special == "-huge" else 1) if isinstance(special, str) else special
        at = len(tensors) // 2
        tensors[at][tensors[at].numel() // 2] = value
    assert same(largest(tensors), brute(tensors))


def test_largest_joins_kinds_of_numbers_and_leaves_integers_aside() -> None:
    mixed = [torch.tensor([1.0]), torch.tensor([-7.0], dtype=torch.float64), torch.tensor([100]), torch.tensor([True])]
    assert largest(mixed) == 7.0
    assert largest([*mixed, torch.tensor([9.5], dtype=torch.float16)]) == 9.5
    assert math.isnan(largest([*mixed, torch.tensor([nan], dtype=torch.bfloat16), torch.tensor([inf])]))


@pytest.mark.parametrize("tensors", [[], [torch.empty(0)], [torch.tensor([3])], [torch.empty(0, 4), torch.empty(0, dtype=torch.float16)]])
def test_largest_of_nothing_is_zero(tensors: list[torch.Tensor]) -> None:
    assert largest(tensors) == 0.0


def test_ordinary_tensors_are_told_from_all_others() -> None:
    plain = [torch.ones(2), torch.nn.Parameter(torch.ones(3)), torch.ones(1, dtype=torch.bfloat16)]
    odd = [torch.ones(2).to_sparse(), torch.ones(2, dtype=torch.int64), torch.ones(2, device="meta"), torch._efficientzerotensor(2)]
    assert are_ordinary(plain)
    assert not any(are_ordinary([*plain, one]) for one in odd)
    assert not are_ordinary([torch.nn.UninitializedParameter()])


def test_largest_does_not_overflow_where_a_norm_would() -> None:
    assert largest([torch.full((1000,), 3e38)]) == pytest.approx(3e38)
    assert largest([torch.full((1000,), 6e4, dtype=torch.float16)]) == pytest.approx(6e4, rel=1e-2)


WEIRD: dict[str, Any] = {
    "sparse_coo": lambda: (torch.tensor([[0.0, nan], [inf, 0.0]]).to_sparse(), NAN | INF),
    "sparse_coo_not_coalesced": lambda: (torch.sparse_coo_tensor([[0, 0]], [1.0, inf], (3,)), INF),
    "sparse_csr": lambda: (torch.tensor([[0.0, -inf], [1.0, 0.0]]).to_sparse_csr(), INF),
    "sparse_csc": lambda: (torch.tensor([[0.0, nan], [1.0, 0.0]]).to_sparse_csc(), NAN),
    "float8": lambda: (torch.tensor([1.0, nan]).to(torch.float8_e4m3fn), NAN),
    "float8_inf": lambda: (torch.tensor([1.0, inf]).to(torch.float8_e5m2), INF),
    "complex": lambda: (torch.tensor([complex(1, nan)]), NAN),
    "complex_conjugate": lambda: (torch.tensor([complex(1, -inf)]).conj(), INF),
    "negative_view": lambda: (torch.tensor([complex(1, inf)]).conj().imag, INF),
    "transposed": lambda: (torch.tensor([[1.0, nan], [1.0, 1.0]]).t(), NAN),
    "expanded": lambda: (torch.tensor([inf]).expand(4, 5), INF),
    "zero_dimensional": lambda: (torch.tensor(nan), NAN),
    "subclass": lambda: (torch.tensor([nan]).as_subclass(Sub), NAN),
    "parameter": lambda: (torch.nn.Parameter(torch.tensor([inf])), INF),
    "with_a_graph": lambda: (torch.tensor([inf], requires_grad=True) * 2, INF),
    "nested_jagged": lambda: (torch.nested.nested_tensor([torch.tensor([1.0, nan]), torch.ones(3)], layout=torch.jagged), NAN),
    "nested_strided": lambda: (torch.nested.nested_tensor([torch.tensor([1.0, inf]), torch.ones(3)]), INF),
    "quantised": lambda: (quantised(1.0, 2.0), 0),
    "meta": lambda: (torch.empty(3, device="meta"), 0),
    "zero_tensor": lambda: (torch._efficientzerotensor((2, 2)), 0),
    "fake": lambda: (fake(1.0, nan), 0),
    "integers": lambda: (torch.tensor([1, 2]), 0),
    "booleans": lambda: (torch.tensor([True]), 0),
    "empty": lambda: (torch.empty(0, 3), 0),
    "uninitialised_parameter": lambda: (torch.nn.LazyLinear(2).weight, 0),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", WEIRD)
def test_every_weird_kind_is_answered_and_none_is_touched(name: str) -> None:
    tensor, kind = WEIRD[name]()
    got = largest([tensor, torch.tensor([1.0])])
    assert kind_of(tensor) == kind
    assert math.isnan(got) if kind & NAN else math.isinf(got) if kind else got == 1.0
    mask = bad_mask(tensor)
    if mask is not None:
        assert mask.shape == tensor.shape
        assert bool(mask.any()) is bool(kind)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name", ["sparse_coo", "sparse_csr", "nested_jagged", "nested_strided", "quantised", "meta", "zero_tensor", "fake"]
)
def test_there_is_no_mask_where_indices_are_not_those_of_the_numbers(name: str) -> None:
    assert bad_mask(WEIRD[name]()[0]) is None


def test_looking_happens_outside_the_graph() -> None:
    tensor = torch.ones(3, requires_grad=True) * 2
    numbers = dense(tensor)
    assert numbers is not None
    assert not numbers.requires_grad
    assert tensor.grad_fn is not None


@pytest.mark.parametrize("transform", [torch.vmap, torch.func.grad])
def test_a_wrapped_tensor_is_left_alone(transform: Any) -> None:
    kinds = []

    def ask(x: torch.Tensor) -> torch.Tensor:
        kinds.append((kind_of(x), largest([x]), bad_mask(x)))
        return (x * x).sum()

    transform(ask)(torch.tensor([nan, 1.0]))
    assert kinds == [(0, 0.0, None)]


@pytest.mark.parametrize(
    ("values", "kind"), [([1.0], 0), ([nan], NAN), ([inf, 1.0], INF), ([-inf], INF), ([nan, inf], NAN | INF), ([3e38], 0)]
)
def test_kind_of(values: list[float], kind: int) -> None:
    assert kind_of(torch.tensor(values)) == kind


@pytest.mark.parametrize(
    ("kinds", "wanted"), [(NAN, [True, False, False, False]), (INF, [False, True, True, False]), (NAN | INF, [True, True, True, False])]
)
def test_bad_mask_of_one_kind(kinds: int, wanted: list[bool]) -> None:
    mask = bad_mask(torch.tensor([nan, inf, -inf, 1.0]), kinds)
    assert mask is not None
    assert mask.tolist() == wanted


@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    hidden: tuple[torch.Tensor, ...] = ()
    note: str = "text"


class ModelOutput(OrderedDict):  # type: ignore[type-arg]
    """As transformers has it: a dict whose items are attributes too."""

    @property
    def loss(self) -> Any:
        return self["loss"]


Pair = namedtuple("Pair", "left right")  # noqa: PYI024 - as users write it

A, B, C = torch.tensor(1.0), torch.tensor(2.0), torch.tensor(3.0)


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        (A, [A]),
        (None, []),
        ("text", []),
        (3.0, []),
        ([A, [B, (C,)]], [A, B, C]),
        ({"a": A, "b": {"c": B}}, [A, B]),
        (Output(A, (B, C)), [A, B, C]),
        ([Output(A), {"deep": Output(B, (C,))}], [A, B, C]),
        (ModelOutput(loss=A, past=((B, C),)), [A, B, C]),
        (Pair(A, [B]), [A, B]),
        ({A}, [A]),
        (Output, []),
        (torch.nn.Linear(1, 1), []),
        ([[[[A]]]], [A]),
    ],
)
def test_tensors_in(value: Any, wanted: list[torch.Tensor]) -> None:
    assert [id(one) for one in tensors_in(value)] == [id(one) for one in wanted]


def test_a_structure_that_holds_itself_ends() -> None:
    loop: list[Any] = [A]
    loop.append(loop)
    assert A in list(tensors_in(loop))


def test_the_hidden_states_of_a_deep_cache_are_found() -> None:
    # Dict of list of dict of tuple: four levels, as a cache inside a model output has them.
    assert [id(one) for one in tensors_in({"cache": [{"layers": (A, B)}]})] == [id(A), id(B)]
