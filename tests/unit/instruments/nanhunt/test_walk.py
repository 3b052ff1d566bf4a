"""From a bad result back to its birth, on traces of a few ops."""

from __future__ import annotations

import math
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from torchdebug_magics.instruments.nanhunt.replay.op_trace import Trace
from torchdebug_magics.instruments.nanhunt.walk.birth_walk import Birth, walk
from torchdebug_magics.probing.modules import ModuleCalls
from torchdebug_magics.probing.tensors import INF, NAN

nan, inf = math.nan, math.inf


def t(*values: Any) -> torch.Tensor:
    return torch.tensor(values)


def births(work: Any, *inputs: torch.Tensor) -> list[Birth]:
    trace = Trace(ModuleCalls(()))
    with ExitStack() as stack:
        trace.attach(stack)
        out = work(*inputs)
    return walk(trace, list(out) if isinstance(out, tuple) else [out])


def first(work: Any, *inputs: torch.Tensor) -> tuple[str | None, int]:
    birth = births(work, *inputs)[0]
    return (None if birth.op is None else birth.op.name), birth.kind


def in_place(x: torch.Tensor) -> torch.Tensor:
    h = x * 1
    h[1:].log_()
    return h + 1


def overwritten(x: torch.Tensor) -> torch.Tensor:
    h = (x - x) / (x - x)
    h.fill_(2.0)
    return (h - 2).log()


def view_of_a_write(x: torch.Tensor) -> torch.Tensor:
    h = x.clone()
    h.view(2, 2)[1, 1] = (x[0] - 1).log()
    return h.t().flatten() if h.dim() > 1 else h * 2


def twice(x: torch.Tensor) -> torch.Tensor:
    h = x * 1
    h[0].log_()
    h[1].sub_(10).sqrt_()
    return h.sum()


CASES: dict[str, tuple[Any, tuple[torch.Tensor, ...], str | None, int]] = {
    "the op itself": (lambda x: x.log(), (t(1.0, 0.0),), "log", INF),
    "a few ops later": (lambda x: ((x - 1).sqrt() * 2).sum().exp(), (t(0.0, 2.0),), "sqrt", NAN),
    "NaN from an infinity": (lambda x: (h := x.exp()) - h, (t(1000.0),), "exp", INF),
    "NaN from 0 times infinity": (lambda x: x.reciprocal() * x, (t(0.0),), "reciprocal", INF),
    "NaN through a softmax": (lambda x: x.exp().softmax(0), (t(1000.0, 1.0),), "exp", INF),
    "data": (lambda x: (x * 2).sum(), (t(1.0, nan),), None, NAN),
    "infinite data made NaN": (lambda x: (x - x).sum(), (t(1.0, inf),), None, INF),
    "a mask is not the birth": (lambda x, m: (x.masked_fill(m, -inf).softmax(0) * x).log(), (t(1.0, 2.0), t(True, False)), "log", INF),
    "a fully masked row": (lambda x, m: x.masked_fill(m, -inf).softmax(0), (t(1.0, 2.0), t(True, True)), "_softmax", NAN),
    "two masks": (lambda x: torch.full_like(x, -inf) + torch.full_like(x, inf) + x, (t(1.0),), "add", NAN),
    "healed by where": (lambda x: torch.where(x > 0, x.log(), x) - 1 + (x - 5).sqrt(), (t(0.0, 6.0),), "sqrt", NAN),
    "healed by nan_to_num": (lambda x: x.log().nan_to_num(posinf=0, neginf=0).sub(9).sqrt(), (t(0.0, 1.0),), "sqrt", NAN),
    "healed by a clamp": (lambda x: x.log().clamp(min=-1).sub(9).sqrt(), (t(0.0, 1.0),), "sqrt", NAN),
    "what nobody used": (lambda x: (x.log(), (x - 9).sqrt())[1], (t(0.0),), "sqrt", NAN),
    "memory that nobody wrote": (lambda x: torch.empty(2).fill_(nan).copy_(x).log(), (t(0.0, 1.0),), "log", INF),
    "a matrix product": (lambda x: (x.log() @ torch.ones(2, 2)).sum(), (torch.tensor([[1.0, 0.0], [1.0, 1.0]]),), "log", INF),
    "a product that overflows": (lambda x: x @ x, (torch.full((2, 2), 3e30),), "mm", INF),
    "a sum that overflows": (lambda x: x.sum(), (torch.full((4,), 3e38),), "sum", INF),
    "a cast that overflows": (lambda x: x.half().float() * 2, (t(1e6),), "_to_copy", INF),
    "in place, through a view": (in_place, (t(1.0, 0.0, 1.0),), "log_", INF),
    "overwritten by something clean": (overwritten, (t(1.0),), "log", INF),
    "written into a view": (view_of_a_write, (t(1.0, 1.0, 1.0, 1.0),), "log", INF),
    "two writes, the one that made the NaN": (twice, (t(0.0, 1.0),), "sqrt_", NAN),
    "an index": (lambda x: x.log()[torch.tensor([1, 1])].exp(), (t(1.0, -1.0),), "log", NAN),
    "a concatenation": (lambda x: torch.cat([x, (x - 2).sqrt()])[1:], (t(1.0),), "sqrt", NAN),
    "a scatter": (lambda x: torch.zeros(3).scatter(0, torch.tensor([1]), x.log()), (t(0.0),), "log", INF),
    "an op with two results": (lambda x: torch.topk(x.log(), 1, largest=False)[0] * 2, (t(1.0, 0.0),), "log", INF),
    "variance of one": (lambda x: x.std(), (t(1.0),), "std", NAN),
    "complex": (lambda x: (x / 0).abs(), (torch.tensor([1 + 1j]),), "div", INF),
    "an exponent": (lambda x: x.pow(-1) * 2, (t(0.0),), "pow", INF),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore")
def test_the_birth(name: str) -> None:
    work, inputs, op, kind = CASES[name]
    found, found_kind = first(work, *inputs)
    assert found == op
    assert found_kind & kind


def test_two_births_the_earliest_first() -> None:
    found = births(lambda x: (x.log().sum(), (x - 1).sqrt().sum()), t(0.0))
    assert [birth.op.name for birth in found if birth.op] == ["log", "sqrt"]


def test_two_births_that_meet() -> None:
    found = births(lambda x: x.log() + (x - 1).sqrt(), t(0.0))
    assert {birth.op.name for birth in found if birth.op} == {"sqrt"}  # NaN is asked for: the -inf alone would have stayed -inf


def test_births_at_different_elements() -> None:
    found = births(lambda x: torch.cat([x.log(), (x - 1).sqrt()]), t(0.0))
    assert [birth.op.name for birth in found if birth.op] in (["sqrt"], ["log", "sqrt"])


@pytest.mark.parametrize(
    ("move", "index"),
    [
        (lambda h: h.t(), (1, 2)),
        (lambda h: h.reshape(3, 2), (1, 2)),
        (lambda h: h.flip(1), (1, 2)),
        (lambda h: h[1:], (1, 2)),
        (lambda h: h[:, [2, 0]], (1, 2)),
        (lambda h: h.roll(1, 0), (1, 2)),
        (lambda h: h.unsqueeze(0).expand(4, 2, 3), (1, 2)),
        (lambda h: torch.stack([h, h]), (1, 2)),
        (lambda h: h.chunk(3, 1)[2], (1, 2)),
        (lambda h: h.clone().contiguous().double(), (1, 2)),
        (lambda h: h.gather(1, torch.tensor([[2], [2]])), (1, 2)),
        (lambda h: torch.nn.functional.pad(h, (1, 1)), (1, 2)),
    ],
    ids=["t", "reshape", "flip", "slice", "index", "roll", "expand", "stack", "chunk", "cast", "gather", "pad"],
)
def test_the_index_is_tracked_through_moves(move: Any, index: tuple[int, ...]) -> None:
    x = torch.ones(2, 3)
    x[index] = 0.0
    (birth,) = births(lambda x: move(x.log()) * 3.0, x)
    assert birth.op.name == "log"
    assert birth.mask.nonzero().tolist() == [list(index)]


def test_only_the_elements_that_were_used_are_marked() -> None:
    (birth,) = births(lambda x: x.log()[1], t(0.0, 0.0, 1.0))
    assert birth.mask.tolist() == [False, True, False]


def test_the_way_from_the_birth_to_the_sink() -> None:
    (birth,) = births(lambda x: (x.log() * 2).sum(), t(0.0))
    assert [op.name for op in birth.via] == ["mul", "sum"]


def test_the_inputs_are_those_before_an_op_in_place() -> None:
    (birth,) = births(lambda x: x.clone().log_(), t(1.0, 0.0))
    assert birth.op.inputs()[0].tolist() == [1.0, 0.0]


@pytest.mark.parametrize("sinks", [[], [torch.ones(2)], [torch.empty(0)], [torch.tensor([1, 2])], [torch.empty(2, device="meta")]])
def test_nothing_bad_has_no_birth(sinks: list[torch.Tensor]) -> None:
    assert walk(Trace(ModuleCalls(())), sinks) == []


def test_a_sink_that_no_op_made_was_there_before() -> None:
    sink = t(nan)
    (birth,) = walk(Trace(ModuleCalls(())), [sink])
    assert birth.op is None
    assert birth.tensor is sink
    assert birth.index == -1


def test_only_a_mask_is_a_birth_on_purpose() -> None:
    (birth,) = births(lambda x: x.masked_fill(x > 0, -inf), t(1.0))
    assert birth.on_purpose


def test_asking_ops_again_draws_no_random_number() -> None:
    state = torch.get_rng_state()
    births(lambda x: torch.nn.functional.dropout(x.log(), 0.5), torch.zeros(50))
    torch.nn.functional.dropout(torch.zeros(50), 0.5)
    after = torch.get_rng_state()
    torch.set_rng_state(state)
    torch.nn.functional.dropout(torch.zeros(50), 0.5)
    torch.nn.functional.dropout(torch.zeros(50), 0.5)
    assert torch.equal(torch.get_rng_state(), after)


def test_the_walk_changes_no_tensor() -> None:
    x = t(1.0, 0.0, 4.0)
    births(lambda x: x.log().mul_(2).add_(x), x)
    assert x.tolist() == [1.0, 0.0, 4.0]


def test_a_long_chain_ends() -> None:
    def work(x: torch.Tensor) -> torch.Tensor:
        h = x.log()
        for _ in range(500):
            h = h * 1.0
        return h

    assert first(work, t(0.0))[0] == "log"
