"""``nanhunt(loss)``: what a graph that already exists tells."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from torchdebug_magics import TorchDebugError, nanhunt
from torchdebug_magics.html.plain import render
from torchdebug_magics.instruments.nanhunt.view import page

nan, inf = math.nan, math.inf


def leaf(*values: float) -> torch.Tensor:
    return torch.tensor(values, requires_grad=True)


# ruff: noqa: PLW0108, E501 - a table
GRAPHS: dict[str, Any] = {
    "log": (lambda: (leaf(1.0, 0.0) * 1).log().sum(), "log", "inf"),
    "log of a negative": (lambda: (leaf(1.0, -1.0) * 1).log().sum(), "log", "nan"),
    "sqrt": (lambda: (leaf(1.0, -1.0) * 2).sqrt().mean(), "sqrt", "nan"),
    "div": (lambda: (leaf(1.0, 2.0) / (leaf(1.0, 1.0) - 1)).sum(), "div", "inf"),
    "0 / 0": (lambda: ((leaf(1.0, 2.0) - 1) / (leaf(1.0, 3.0) - 1)).sum(), "div", "nan"),
    "softmax": (lambda: (leaf(1.0, 2.0) * 1).masked_fill(torch.tensor([True, True]), -inf).softmax(0).square().sum(), "_softmax", "nan"),
    "exp": (lambda: (leaf(1.0, 1000.0) * 1).exp().square().sum(), "exp", "inf"),
    "log_softmax": (
        lambda: nn.functional.cross_entropy((leaf(1.0, 2.0) * 1).masked_fill(torch.tensor([True, True]), -inf)[None], torch.tensor([0])),
        "_log_softmax",
        "nan",
    ),
    "inf - inf": (lambda: ((h := (leaf(1000.0) * 1).exp()) - h).sum().exp(), "exp", "inf"),
    "a healed infinity is no cause": (lambda: (1 / (leaf(1000.0) * 1).exp() + (leaf(-1.0) * 1).log()).sum(), "log", "nan"),
    "a mask inside": (
        lambda: ((x := leaf(1.0, -1.0) * 1).masked_fill(torch.tensor([True, False]), -inf).softmax(0) * x.sqrt()).sum(), "sqrt", "nan",
    ),
    "a mask written by an index": (lambda: ((x := leaf(1.0, 2.0) * 1).index_put((torch.tensor([0, 1]),), torch.tensor(-inf))
                                            .softmax(0) * x).sum(), "_softmax", "nan"),
    "through views": (lambda: (leaf(0.0, 4.0) * 1).reshape(2, 1).t().log().squeeze(0)[:1].exp().add(1).reciprocal().log10().neg()
                      .add((leaf(0.0) * 1).rsqrt()).sum(), "rsqrt", "inf"),
    "one of two outputs": (lambda: torch.cat([(leaf(1.0, -1.0) * 1).split(1)[1].log(), leaf(1.0)]).sum(), "log", "nan"),
    "layer norm without eps": (lambda: nn.functional.layer_norm(leaf(1.0, 1.0) * 1, (2,), eps=0.0).square().sum(),
                               "native_layer_norm", "nan"),
}  # fmt: skip


@pytest.mark.parametrize("name", GRAPHS)
def test_the_first_op_of_the_graph_whose_result_is_bad(name: str) -> None:
    make, op, kind = GRAPHS[name]
    report = nanhunt(make())
    assert report.found
    assert (report.finding.op, report.finding.kind, report.finding.phase) == (op, kind, "forward")
    assert report.verdict.startswith(("NaN in this tensor", "Inf in this tensor"))
    assert len(report.problems) == 1
    assert report.reproduced is None


def test_rows_index_and_operands() -> None:
    finding = nanhunt((leaf(1.0, 0.0, 3.0) * 2).log().sum()).finding
    assert finding.rows == (1,)
    assert finding.index == (1,)
    assert finding.operands == (0.0,)


def test_looking_changes_nothing() -> None:
    x = leaf(1.0, 0.0)
    loss = x.log().sum()
    nanhunt(loss)
    assert x.grad is None
    loss.backward()
    assert x.grad.tolist() == [1.0, inf]


@pytest.mark.parametrize(
    ("make", "said"), [(lambda: leaf(1.0).log().sum(), "(0.0); its graph has 2 ops"), (lambda: torch.tensor([1, 2]), "its graph has 0 ops")]
)
def test_a_finite_tensor(make: Any, said: str) -> None:
    report = nanhunt(make())
    assert not report.found
    assert report.finding is None
    assert said in report.verdict
    assert report.problems == ()


def test_a_freed_graph_says_so() -> None:
    loss = (leaf(1.0, 0.0) * 1).log().sum()
    loss.backward()
    report = nanhunt(loss)
    assert report.found
    assert any("freed" in problem for problem in report.problems)
    assert report.finding.op is None


@pytest.mark.parametrize("value", [nan, inf, -inf])
def test_no_graph(value: float) -> None:
    report = nanhunt(torch.tensor([1.0, value]))
    assert report.found
    assert (report.finding.phase, report.finding.op, report.finding.rows) == ("data", None, (1,))
    assert report.finding.kind == ("nan" if math.isnan(value) else "inf")


def test_a_bad_parameter_is_a_parameter() -> None:
    weight = nn.Parameter(torch.tensor([1.0, nan]))
    report = nanhunt((weight * torch.ones(2)).exp().sum())
    assert (report.finding.phase, report.finding.op, report.finding.kind) == ("parameter", None, "nan")


def test_a_bad_weight_of_a_layer_is_a_parameter() -> None:
    model = nn.Linear(2, 2)
    with torch.no_grad():
        model.weight[0, 0] = inf
    x = torch.ones(1, 2, requires_grad=True)
    report = nanhunt(model(x).square().sum())
    assert (report.finding.phase, report.finding.kind) == ("parameter", "inf")


def test_bad_data_is_data() -> None:
    report = nanhunt((torch.tensor([1.0, nan]) * leaf(1.0, 1.0)).sum())
    assert (report.finding.phase, report.finding.op) == ("data", None)


@pytest.mark.parametrize("thing", [1.5, "loss", None, [torch.ones(1)], nn.Linear(1, 1), torch.ones])
def test_what_is_no_tensor_is_an_error_with_the_repair(thing: object) -> None:
    with pytest.raises(TorchDebugError, match="write `%nanhunt loss`"):
        nanhunt(thing)


def test_several_tensors_at_once() -> None:
    report = nanhunt(leaf(1.0).sum(), (leaf(0.0) * 1).log().sum())
    assert [one.op for one in report.findings] == ["log"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.empty(2, device="meta"),
        lambda: torch.eye(2).to_sparse(),
        lambda: torch.tensor([[nan, 0.0], [0.0, 1.0]]).to_sparse(),
        lambda: torch.tensor([complex(nan, 0)]),
        lambda: torch.tensor([1.0, nan]).to(torch.float8_e4m3fn),
        lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
        lambda: torch._efficientzerotensor((2,)),
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
        lambda: torch.nested.nested_tensor([torch.tensor([nan]), torch.ones(3)], layout=torch.jagged),
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        lambda: torch.empty(0),
        lambda: torch.tensor(True),
        lambda: torch.empty((), device="meta"),
        lambda: torch.eye(1).to_sparse().sum(),
        lambda: torch.tensor(1.0).to(torch.float8_e4m3fn),
    ],
    ids=["meta", "sparse", "bad sparse", "complex", "float8", "quantised", "zero", "nested", "bad nested", "strided nested", "empty", "bool",
         "meta scalar", "sparse sum", "float8 scalar"],
)  # fmt: skip
def test_no_kind_of_tensor_is_an_error(make: Any) -> None:
    tensor = make()
    report = nanhunt(tensor)
    assert report.verdict
    assert isinstance(report.to_json(), str)


def test_a_graph_that_was_only_in_part_freed() -> None:
    x = leaf(1.0, 0.0)
    h = (x * 1).exp()
    h.sum().backward(retain_graph=False)
    report = nanhunt((h - h).log().sum())
    assert report.found
    assert report.finding.kind in {"nan", "inf"}


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0] * 2


def test_what_a_function_of_the_users_saved_is_read() -> None:
    finding = nanhunt(Twice.apply(leaf(-1.0).add(0).sub(1).log()).sum()).finding
    assert (finding.op, finding.kind) == ("log", "nan")


def test_the_parameter_has_its_name() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    with torch.no_grad():
        model[1].bias[0] = nan
    report = nanhunt(model(torch.ones(1, 2)).square().sum())
    assert (report.finding.phase, report.finding.tensor) == ("parameter", "1.bias")
    assert "1.bias" in report.verdict


def test_where_nothing_bad_was_kept_no_op_is_accused() -> None:
    report = nanhunt((leaf(1e30) * 1e30).sum())
    assert (report.finding.op, report.finding.phase, report.finding.kind) == (None, "forward", "inf")
    assert "source op not identified" in report.verdict


SHOWN: dict[str, Any] = {
    "an op": lambda: (leaf(1.0, 0.0) * 1).log().sum(),
    "a parameter": lambda: (leaf(1.0, nan) * torch.ones(2)).exp().sum(),
    "data": lambda: (torch.tensor([1.0, nan]) * leaf(1.0, 1.0)).sum(),
    "no graph": lambda: torch.tensor([1.0, nan]),
    "nothing kept": lambda: (leaf(1e30) * 1e30).sum(),
}


@pytest.mark.parametrize("name", SHOWN)
def test_nothing_is_said_of_steps_modules_and_losses(name: str) -> None:
    text = render(page(nanhunt(SHOWN[name]())))
    for word in ("step", "the model", "module ", "in loss", "None", "this cell's", "weights"):
        assert word not in text.replace("neither modules nor lines", ""), text


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_graph_can_still_be_used(reentrant: bool) -> None:
    x = leaf(1.0, 0.0, 3.0)
    state = torch.get_rng_state()
    loss = checkpoint(lambda h: nn.functional.dropout(h * 1, 0.5).add(0).log().sum(), x, use_reentrant=reentrant)
    after = torch.get_rng_state()
    assert nanhunt(loss).found
    assert torch.equal(torch.get_rng_state(), after)
    loss.backward()
    torch.set_rng_state(state)
    y = leaf(1.0, 0.0, 3.0)
    nn.functional.dropout(y * 1, 0.5).add(0).log().sum().backward()
    assert torch.equal(x.grad.nan_to_num(), y.grad.nan_to_num())


def test_models_without_data_that_are_alive_are_passed_by() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = nn.Linear(2, 2)
    model = nn.Linear(2, 2)
    with torch.no_grad():
        model.weight[0, 0] = math.nan
    report = nanhunt(model(torch.ones(1, 2)).sum())
    assert (report.finding.phase, report.finding.tensor) == ("parameter", "weight")
    del fake


def test_a_lazy_module_that_is_alive_beside_it_is_passed_by():
    beside = torch.nn.LazyLinear(3)
    bad = torch.tensor([1.0, float("nan")])
    model = nn.Linear(2, 1)
    model.weight.data[0, 0] = math.nan
    assert nanhunt(bad).findings
    assert nanhunt(model.weight).findings
    assert beside.has_uninitialized_params()
