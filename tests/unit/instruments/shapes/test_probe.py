"""``%%shapes``: every module that a cell calls, and the cell as it would have been."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from torchdebug_magics.instruments.shapes.view import page

if TYPE_CHECKING:
    from typing import Self

SETUP = """import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 2))
"""


def test_the_rows_of_a_call(observe: Any) -> None:
    seen = observe("shapes", f"{SETUP}model(torch.randn(4, 10))")
    assert seen.error is None
    assert [(row.path, row.output_shapes, row.own_params, row.flops) for row in seen.report.rows] == [
        ("", ((4, 2),), 0, 1920),
        ("0", ((4, 20),), 220, 1600),
        ("1", ((4, 20),), 0, 0),
        ("2", ((4, 2),), 42, 320),
    ]
    assert (seen.report.total_params, seen.report.total_flops, seen.report.mode) == (262, 1920, "real")


def test_a_loop_is_followed_once_for_each_shape(observe: Any) -> None:
    seen = observe("shapes", f"{SETUP}for size in (4, 4, 4, 3):\n    model(torch.randn(size, 10))")
    assert [row.output_shapes for row in seen.report.rows if not row.path] == [((4, 2),), ((3, 2),)]
    assert any("called 4 times" in note for note in seen.report.notes)


TRAINING = f"""{SETUP}
optimizer = torch.optim.Adam(model.parameters())
torch.manual_seed(1)
for _ in range(3):
    optimizer.zero_grad()
    loss = model(nn.functional.dropout(torch.randn(8, 10))).square().mean()
    loss.backward()
    optimizer.step()
left = torch.rand(3)
"""


def test_training_gives_the_same_numbers(observe: Any) -> None:
    plain: dict[str, Any] = {}
    exec(TRAINING, plain)
    seen = observe("shapes", TRAINING)
    assert torch.equal(plain["left"], seen.namespace["left"])
    assert torch.equal(plain["loss"], seen.namespace["loss"])
    for one, other in zip(plain["model"].parameters(), seen.namespace["model"].parameters(), strict=True):
        assert torch.equal(one, other)


def test_an_error_of_shapes_is_explained_and_raised(observe: Any) -> None:
    seen = observe("shapes", f"{SETUP}model(torch.randn(4, 10))\nmodel(torch.randn(4, 11))")
    assert isinstance(seen.error, RuntimeError)
    assert (seen.report.failure.module, seen.report.failure.op) == ("0", "linear")


def test_an_error_of_another_kind_is_only_raised(observe: Any) -> None:
    seen = observe("shapes", f"{SETUP}model(torch.randn(4, 10))\n1 / 0")
    assert isinstance(seen.error, ZeroDivisionError)
    assert seen.report.failure is None
    assert len(seen.report.rows) == 4


@pytest.mark.parametrize("body", ["", "1", "def f():\n    pass"])
def test_an_empty_cell(observe: Any, body: str) -> None:
    verdict = observe("shapes", body).report.verdict
    assert verdict.startswith("no module was called")
    assert "right after a cell that failed" in verdict  # who asks twice hears of the cell between


@pytest.mark.parametrize(
    "body",
    [
        "def hook(*_):\n    raise LookupError('hook')\nmodel[0].register_forward_hook(hook)\nmodel(torch.randn(4, 10))",
        "def hook(*_):\n    raise KeyboardInterrupt\nmodel[1].register_forward_pre_hook(hook)\nmodel(torch.randn(4, 10))",
        "with torch.no_grad():\n    model(torch.randn(4, 10))\nmodel(torch.randn(4, 9))",
    ],
    ids=["hook", "interrupt", "shape"],
)
def test_an_error_in_the_middle_leaves_nothing(observe: Any, body: str) -> None:
    from torch.nn.modules import module
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    seen = observe("shapes", SETUP + body)
    assert seen.error is not None
    assert not _get_current_dispatch_mode_stack()
    assert not module._global_forward_hooks
    assert not module._global_forward_pre_hooks


def test_nested_in_itself() -> None:
    import torchdebug_magics

    model = nn.Linear(3, 3)
    with torchdebug_magics.shapes() as outer:
        with torchdebug_magics.shapes() as inner:
            model(torch.ones(2, 3))
        model(torch.ones(5, 3))
    assert [row.output_shapes for row in inner.report.rows] == [((2, 3),)]
    assert [row.output_shapes for row in outer.report.rows] == [((2, 3),), ((5, 3),)]


class Sized(torch.Tensor):
    """A subclass that is asked for its sizes, as those of libraries for quantized and ragged data are."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Self:
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, dispatch_sizes_strides_policy="sizes")
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func in {torch.ops.aten.size.default, torch.ops.aten.sym_size.default}:
            return args[0].inner.shape
        return func(*(one.inner if isinstance(one, Sized) else one for one in args), **(kwargs or {}))


def test_a_tensor_that_is_asked_for_its_sizes() -> None:
    import torchdebug_magics

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x + 1)

    with torchdebug_magics.shapes() as session:
        assert Net()(Sized(torch.ones(2, 4))).shape == (2, 3)
    assert [row.output_shapes for row in session.report.rows] == [((2, 3),), ((2, 3),)]
    assert not session.report.problems


def test_in_a_nanhunt() -> None:
    import torchdebug_magics

    model = nn.Linear(3, 3)
    with torchdebug_magics.nanhunt() as hunt, torchdebug_magics.shapes() as session:
        model(torch.ones(2, 3)).sum().backward()
    assert session.report.total_flops == 2 * 2 * 9
    assert not hunt.report.found


def test_modules_of_two_models() -> None:
    import torchdebug_magics

    first, second = nn.Sequential(nn.Linear(3, 4)), nn.Sequential(nn.Linear(4, 5))
    with torchdebug_magics.shapes() as session:
        second(first(torch.ones(2, 3)))
    assert [(row.path, row.output_shapes) for row in session.report.rows] == [
        ("", ((2, 4),)),
        ("0", ((2, 4),)),
        ("", ((2, 5),)),
        ("0", ((2, 5),)),
    ]
    assert session.report.total_params == 16 + 25


REGRESSION = """import torch
from torch import nn
import torch.nn.functional as F
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
x, y = torch.randn(8, 4), torch.randn(8)
"""


@pytest.mark.parametrize(
    ("loss", "fix"),
    [
        ("F.mse_loss(model(x), y)", "F.mse_loss(model(x).squeeze(-1), y)"),
        ("nn.MSELoss()(model(x), y)", "nn.MSELoss()(model(x).squeeze(-1), y)"),
        ("F.smooth_l1_loss(model(x), y)", "F.smooth_l1_loss(model(x).squeeze(-1), y)"),
        ("nn.HuberLoss()(model(x), y)", "nn.HuberLoss()(model(x).squeeze(-1), y)"),
        ("nn.L1Loss()(model(x), y)", "nn.L1Loss()(model(x).squeeze(-1), y)"),
        ("((model(x) - y) ** 2).mean()", "model(x).squeeze(-1) - y"),
        ("(y - model(x).detach() + model(x)[:, 0]).mean()", "y - model(x).detach().squeeze(-1)"),
        ("(y - model(x)).abs().mean() + 1e-3 * sum(p.square().sum() for p in model.parameters())", "y - model(x).squeeze(-1)"),
        ("F.mse_loss(model(x).squeeze(-1), y.unsqueeze(1))", "F.mse_loss(model(x).squeeze(-1), y.unsqueeze(1).squeeze(-1))"),
        ("torch.clamp(1 - model(x) * y, min=0).mean()", "model(x).squeeze(-1) * y"),
        ("(model(x).round() == y).float().mean() + model(x).mean()", "model(x).round().squeeze(-1) == y"),
    ],
)
@pytest.mark.parametrize("after", ["loss.backward()", "print(loss.item())"])
@pytest.mark.filterwarnings("ignore:Using a target size")  # torch's own, which it says of some losses
def test_an_accidental_broadcast_is_told_of_first(loss: str, fix: str, after: str, observe: Any) -> None:
    seen = observe("shapes", f"{REGRESSION}loss = {loss}\n{after}")
    assert seen.error is None
    assert "to 8 x 8: each of 8 samples with all 8" in seen.report.verdict
    assert seen.report.suspect.fixes[0].code == fix
    assert seen.report.suspect.location.source.startswith("loss = ")
    assert page(seen.report).status == "warn"
    _nothing_stands()


def _nothing_stands() -> None:
    from torch.overrides import _get_current_function_mode_stack

    assert not _get_current_function_mode_stack()


@pytest.mark.parametrize(
    "loss",
    [
        "F.mse_loss(model(x).squeeze(1), y)",
        "F.mse_loss(model(x), y[:, None])",
        "F.mse_loss(model(x), torch.tensor(0.5))",
        "F.mse_loss(model(x), torch.zeros(1))",
        "F.mse_loss(model(x).expand(-1, 8), torch.randn(8, 8))",
        "F.mse_loss(model(x).repeat(1, 8), torch.randn(8, 8))",
        "(model(x)[:, 0][:, None] - model(x)[:, 0]).square().mean()",
        "(model(x).squeeze(1).unsqueeze(1) - y).square().mean()",
        "(model(x).view(-1, 1) - y).abs().mean()",
        "(model(x) - model(x).t()).square().mean()",
        "(model(x) - torch.randn(8, 3)).square().mean()",
        "(model(x[:1]) - y[:1]).square().mean()",
        "F.cross_entropy(torch.cat([model(x), -model(x)], 1), torch.zeros(8, dtype=torch.long))",
        "torch.cdist(model(x), model(x)).mean()",
        "(model(x).pow(2).sum(1, keepdim=True) + model(x).pow(2).sum(1)).mean()",
        "(model(x).norm(dim=1, keepdim=True) * model(x).norm(dim=1)).mean()",
        "(model(x) * torch.arange(8)).mean()",
        "F.margin_ranking_loss(model(x), model(x) + 1, torch.ones(8, 1))",
    ],
)
@pytest.mark.filterwarnings("ignore:Using a target size")
def test_a_broadcast_that_is_meant_is_no_warning(loss: str, observe: Any) -> None:
    seen = observe("shapes", f"{REGRESSION}loss = {loss}\nloss.backward()")
    assert seen.error is None
    assert seen.report.warning == ""
    assert seen.report.verdict.startswith("Sequential")


MINE = """class Mine(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))
"""
AROUND = {
    "a mode of the user's": f"{MINE}with Mine():\n    loss = F.mse_loss(model(x), y)",
    "a mode of the user's behind a call": f"{MINE}out = model(x)\nwith Mine():\n    loss = F.mse_loss(out, y)\n    model(x[:3])",
}


@pytest.mark.parametrize("cell", AROUND.values(), ids=AROUND)
@pytest.mark.filterwarnings("ignore:Using a target size")
def test_modes_of_others_end_as_they_began(cell: str, observe: Any) -> None:
    seen = observe("shapes", f"{REGRESSION}{cell}\nout = torch.zeros(2) + 1")
    assert seen.error is None
    _nothing_stands()


def test_a_compiled_function_behind_a_call_is_compiled_as_without_us(observe: Any) -> None:
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    steps = "called = torch.compile(lambda out: out.relu(), backend='aot_eager', fullgraph=True)\nfor _ in range(3):\n    called(model(x))"
    seen = observe("shapes", f"{REGRESSION}{steps}")
    assert seen.error is None
    assert counters["stats"]["unique_graphs"] == 1
    _nothing_stands()


def test_no_module_is_held_when_it_ends() -> None:
    import gc
    import weakref

    import torchdebug_magics

    gc.collect()
    gc.disable()
    try:
        model = nn.Sequential(nn.Linear(3, 3))
        gone = weakref.ref(model)
        with torchdebug_magics.shapes() as session:
            model(torch.ones(2, 3)).sum().backward()
        del model
        assert gone() is None
        assert session.report.rows
    finally:
        gc.enable()


WHOLE = "backend='aot_eager', fullgraph=True"
LOOP = "for _ in range(3):\n    called(torch.ones(4, 10))"


@pytest.mark.parametrize("compiled", ["called = torch.compile(model, {})", "model[2] = torch.compile(model[2], {})\ncalled = model"])
def test_a_compiled_model_is_compiled_as_without_us_and_named(observe: Any, compiled: str) -> None:
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    seen = observe("shapes", f"{SETUP}{compiled.format(WHOLE)}\n{LOOP}")
    assert seen.error is None
    assert counters["stats"]["unique_graphs"] == 1
    assert {row.type for row in seen.report.rows} <= {"Linear", "ReLU"}  # the parts that are called without the compiler
    assert "Sequential is compiled, or a part of it" in seen.report.problems[0]
