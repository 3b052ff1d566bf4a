"""Models that are hard to shrink: they are shrunk right, or left as they were with the reason."""

from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import torchdebug_magics
from tests.unit.instruments.shrink.small_models import (
    Backbone,
    Block,
    Experts,
    Heads,
    Indexed,
    Nested,
    Numbered,
    Plain,
    SideLists,
    Stages,
    Towers,
)  # fmt: skip
from torchdebug_magics.errors import TorchDebugError

if TYPE_CHECKING:
    from collections.abc import Callable

X = torch.randn(2, 3, 8)


def state(model: nn.Module) -> list[tuple[int, dict[str, Any]]]:
    """Every module, and what its attributes and tables hold, by identity."""
    tables = ("_modules", "_parameters", "_buffers")
    return [
        (id(part), {name: list(value.items()) if name in tables else value for name, value in vars(part).items()})
        for part in model.modules()
    ]


@pytest.mark.parametrize("given", [(X,), ((2, 3, 8),), ()], ids=["values", "sizes", "nothing"])
def test_a_stack_is_cut_and_given_back(given: tuple[Any, ...]) -> None:
    model = Plain()
    before, wanted = state(model), model(X)
    report = torchdebug_magics.shrink(model, *given)
    assert dict(report.kept) == {"blocks": (0, 1)}
    assert not report.undone
    assert len(model.blocks) == 2
    assert list(model.state_dict())[:2] == ["blocks.0.norm.weight", "blocks.0.norm.bias"]
    assert (report.parameters_before, report.parameters_after) == (12 * 88 + 216, 2 * 88 + 216)
    assert report.proof == "fake tensors"
    tokens = 2 * 3 if given else 2 * 8
    assert (report.before.flops, report.after.flops) == (15 * 128 * tokens, 5 * 128 * tokens)
    assert (report.before.seconds_s is not None) is bool(given and isinstance(given[0], torch.Tensor))
    again = torchdebug_magics.shrink(model, undo=True)
    assert again.undone
    assert again.restored
    assert state(model) == before
    assert torch.equal(model(X), wanted)


def test_what_is_left_computes_what_these_layers_compute() -> None:
    model = Plain()
    first, second = model.blocks[:2]
    torchdebug_magics.shrink(model, X)
    assert torch.equal(model(X), model.head(second(first(X))))


@pytest.mark.parametrize(
    ("model", "reason"), [(Indexed, "fails with 2 layers"), (Backbone, "selects layers by number"), (Stages, "change the shape")]
)
def test_a_forward_that_depends_on_the_layers_is_left_as_it_was(model: type[nn.Module], reason: str) -> None:
    made = model()
    before = state(made)
    report = torchdebug_magics.shrink(made)
    assert report.undone
    assert reason in report.reason
    assert dict(report.kept) == {}
    assert report.parameters_after == report.parameters_before
    assert state(made) == before
    with pytest.raises(TorchDebugError, match="nothing to undo"):
        torchdebug_magics.shrink(made, undo=True)


def test_the_error_and_the_line_of_the_model_are_said() -> None:
    report = torchdebug_magics.shrink(Indexed(), X)
    assert report.error.startswith("IndexError")
    assert "small_models.py" in report.location


def test_numbers_lists_and_caches_follow() -> None:
    model = Numbered()
    model(X)
    before = state(model)
    report = torchdebug_magics.shrink(model, X)
    assert dict(report.kept) == {"blocks": (0, 3)}, "one of each kind"
    assert (model.num_layers, model.layer_types, len(model.cache)) == (2, ["local", "full"], 2)
    assert len(model.labels) == 12, "it has as many classes as layers, by chance"
    assert [block.layer_number for block in model.blocks] == [1, 2]
    model(X)
    torchdebug_magics.shrink(model, undo=True)
    assert next(names for _, names in state(model))["layer_types"] is before[0][1]["layer_types"]
    assert [block.layer_number for block in model.blocks] == list(range(1, 13))


@pytest.mark.parametrize(
    ("model", "kept"),
    [
        (Heads, {"blocks": (0, 1)}),
        (Towers, {f"towers.{number}.blocks": (0, 1) for number in range(3)}),
        (Nested, {"stages.0": (0, 1), "stages.1": (0, 1)}),
        (SideLists, {"mixers": (0, 4), "norms": (0, 4)}),
        (lambda: nn.Sequential(*(Block() for _ in range(7))), {"the model": (0, 1)}),
        (lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 6, enable_nested_tensor=False), {"layers": (0, 1)}),
    ],
    ids=["heads", "towers", "nested", "side lists", "sequential", "transformer"],
)
@pytest.mark.parametrize("layers", [1, 2])
def test_stacks_are_told_from_what_stands_side_by_side(model: Callable[[], nn.Module], kept: dict[str, Any], layers: int) -> None:
    made = model()
    report = torchdebug_magics.shrink(made, X, layers=layers)
    wanted = kept if layers == 2 or "mixers" in kept else {path: places[:1] for path, places in kept.items()}
    assert dict(report.kept) == wanted, str(report)
    assert made(X).shape[:2] == X.shape[:2]


@pytest.mark.parametrize("layers", [1, 2])
def test_experts_are_never_touched(layers: int) -> None:
    model = Experts()
    report = torchdebug_magics.shrink(model, X, layers=layers)
    assert report.undone
    assert len(model.experts) == 4


def test_equal_layers_alone_are_a_stack_only_where_no_blocks_are() -> None:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(9)))
    assert dict(torchdebug_magics.shrink(model, X).kept) == {"the model": (0, 1)}
    plain = Plain()
    torchdebug_magics.shrink(plain, X)
    assert len(plain.head) == 3


def test_layers_that_share_weights() -> None:
    tied = Plain()
    for block in tied.blocks:
        block.inner.weight = tied.blocks[0].inner.weight
    report = torchdebug_magics.shrink(tied, X)
    assert (report.parameters_before, report.parameters_after) == (64 + 12 * 24 + 216, 64 + 2 * 24 + 216)
    one = Block()
    same = Plain()
    same.blocks = nn.ModuleList([one] * 12)
    assert dict(torchdebug_magics.shrink(same, X).kept) == {"blocks": (0, 1)}
    torchdebug_magics.shrink(same, undo=True)
    assert list(same.blocks) == [one] * 12


def test_hooks_on_layers_that_went_come_back() -> None:
    model, ran = Plain(), []
    for number in (0, 7):
        model.blocks[number].register_forward_hook(lambda *_, number=number: ran.append(number))
    report = torchdebug_magics.shrink(model, X)
    assert ran == [], "the proof is undone"
    assert report.problems == ("hooks on `blocks`[7] do not run while this layer is removed",)
    model(X)
    assert ran == [0]
    torchdebug_magics.shrink(model, undo=True)
    model(X)
    assert ran == [0, 0, 7]


def test_a_compiled_model_runs_small_and_large_again() -> None:
    model = Plain(4)
    compiled = torch.compile(model, backend="eager")
    wanted = compiled(X)
    assert dict(torchdebug_magics.shrink(compiled, X).kept) == {"blocks": (0, 1)}
    assert torch.equal(compiled(X), model(X))
    torchdebug_magics.shrink(compiled, undo=True)
    assert torch.equal(compiled(X), wanted)
    torch._dynamo.reset()


def test_wrappers_that_hold_every_parameter_refuse() -> None:
    class DistributedDataParallel(nn.Module):
        """By its name, as the real one wants processes."""

        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

    report = torchdebug_magics.shrink(DistributedDataParallel(Plain()), X)
    assert report.undone
    assert "shrink the model first, then wrap it" in report.reason
    assert dict(torchdebug_magics.shrink(nn.DataParallel(Plain()), X).kept) == {"module.blocks": (0, 1)}


def test_twice_is_undone_at_once() -> None:
    model = Plain()
    before = state(model)
    torchdebug_magics.shrink(model, X, layers=6)
    assert dict(torchdebug_magics.shrink(model, X, layers=2).kept) == {"blocks": (0, 1)}
    assert torchdebug_magics.shrink(model, undo=True).stacks[0].layers_before == 12
    assert state(model) == before


def test_inside_a_with_whatever_happens() -> None:
    model = Plain()
    before = state(model)
    with torchdebug_magics.shrunk(model, X, layers=3) as report:
        assert len(model.blocks) == 3
        assert report.parameters_after < report.parameters_before
    assert state(model) == before
    with pytest.raises(KeyError), torchdebug_magics.shrunk(model, layers=2):
        raise KeyError
    assert state(model) == before
    with pytest.raises(TorchDebugError, match="cannot be shrunk"), torchdebug_magics.shrunk(Indexed(), X):
        raise AssertionError
    torchdebug_magics.shrink(model, X, layers=6)
    with torchdebug_magics.shrunk(model, X):
        assert len(model.blocks) == 2
    assert len(model.blocks) == 6


def test_the_proof_leaves_no_trace() -> None:
    class Counting(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(8)
            self.drop, self.calls = nn.Dropout(0.5), 0
            self.register_buffer("total", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            self.total += 1
            return self.drop(super().forward(self.norm(x.transpose(1, 2)).transpose(1, 2)))

    model = Counting()
    random = torch.get_rng_state()
    for given in (X, X.requires_grad_()):
        torchdebug_magics.shrink(model, given)
        torchdebug_magics.shrink(model, undo=True)
    assert torch.equal(torch.get_rng_state(), random)
    assert (model.calls, float(model.total), int(model.norm.num_batches_tracked)) == (0, 0.0, 0)
    assert all(parameter.grad is None for parameter in model.parameters())
    X.requires_grad_(requires_grad=False)


def test_a_shrunk_model_is_not_kept_alive() -> None:
    model = Plain()
    torchdebug_magics.shrink(model, X)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize(
    ("asked", "reason"),
    [((Plain(2), X), "at most 2 layers"), ((nn.Linear(8, 8), X), "no stack of layers"), ((Plain(), X[..., :5]), "with all layers as well")],
)
def test_what_cannot_be_shrunk_says_why(asked: tuple[Any, ...], reason: str) -> None:
    report = torchdebug_magics.shrink(*asked)
    assert report.undone
    assert reason in report.verdict


def test_no_input_is_known() -> None:
    class Strange(Plain):
        def forward(self, batch: Any) -> torch.Tensor:
            return super().forward(batch["x"])

    model = Strange()
    assert "`%shrink model x`" in torchdebug_magics.shrink(model).reason
    assert dict(torchdebug_magics.shrink(model, {"x": X}).kept) == {"blocks": (0, 1)}


@pytest.mark.parametrize(("asked", "options", "says"), [(3, {}, "torch.nn.Module"), (Plain(), {"layers": 0}, "at least 1")])
def test_wrong_use(asked: Any, options: dict[str, Any], says: str) -> None:
    with pytest.raises(TorchDebugError, match=says):
        torchdebug_magics.shrink(asked, **options)


def test_an_interrupt_in_the_proof_puts_everything_back() -> None:
    class Interrupted(Plain):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if len(self.blocks) == 2:
                raise KeyboardInterrupt
            return super().forward(x)

    model = Interrupted()
    before = state(model)
    with pytest.raises(KeyboardInterrupt):
        torchdebug_magics.shrink(model, X)
    assert state(model) == before
