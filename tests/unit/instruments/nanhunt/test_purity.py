"""Small models and loops made at random: watched, recorded or looked at closely, every bit is that of a plain run."""

from __future__ import annotations

import contextlib
import io
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.nan_cases.door import same
from torchdebug_magics import nanhunt

pytestmark = pytest.mark.filterwarnings("ignore")
STEPS = 5


class Noise(nn.Module):
    """Draws from Python's, NumPy's and torch's generators."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = 1 + 0.1 * random.random() + 0.1 * float(np.random.rand())  # noqa: NPY002 - the global one is the one that users seed
        return x * scale + 0.01 * torch.randn_like(x)


class Counts(nn.Module):
    """Keeps a counter, a list, and a running mean that is no batch norm's."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.means = 0, []
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.means.append(round(float(x.detach().mean()), 4))
        self.mean.mul_(0.9).add_(0.1 * x.detach().mean())
        return x + self.mean


class Residual(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x)


PARTS: dict[str, Any] = {
    "linear": lambda: nn.Linear(6, 6),
    "norm": lambda: nn.BatchNorm1d(6),
    "layer norm": lambda: nn.LayerNorm(6),
    "dropout": lambda: nn.Dropout(0.3),
    "tanh": nn.Tanh,
    "relu": lambda: nn.ReLU(inplace=True),
    "noise": Noise,
    "counts": Counts,
    "residual": lambda: Residual(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.2))),
    "rrelu": nn.RReLU,
}
OPTIMIZERS: list[Any] = [
    lambda ps: torch.optim.SGD(ps, lr=0.05, momentum=0.9),
    lambda ps: torch.optim.Adam(ps, lr=0.01),
    lambda ps: torch.optim.AdamW(ps, lr=0.01, foreach=True),
    lambda ps: torch.optim.RMSprop(ps, lr=0.01),
]


def train(seed: int, plant: int | None) -> dict[str, Any]:
    """One random model, loop and plan, all from a seed; what it leaves."""
    plan = random.Random(seed)
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 - the global one is the one that users seed
    parts = [PARTS[plan.choice(list(PARTS))]() for _ in range(plan.randint(2, 5))]
    model = nn.Sequential(nn.Linear(6, 6), *parts, nn.Linear(6, 2))
    optimizer = plan.choice(OPTIMIZERS)(model.parameters())
    accumulate, clip, to_none = plan.choice([1, 2]), plan.random() < 0.5, plan.random() < 0.5
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9) if plan.random() < 0.5 else None
    losses, table, count = [], {"steps": 0}, 0
    for step in range(STEPS):
        x = torch.randn(8, 6)
        out = model(x)
        y = torch.randint(0, 2, (8,))
        loss = nn.functional.cross_entropy(out, y) * (1 + 0.1 * random.random())
        if step == plant:
            loss = loss + (loss * 0 - 1).sqrt()
        count += 1
        table["steps"] += 1
        losses.append(float(loss))
        print(f"step {step}: {float(loss):.6f}")
        loss.backward()
        if (step + 1) % accumulate == 0:
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=to_none)
        if scheduler is not None:
            scheduler.step()
    return {
        "losses": torch.tensor(losses),
        "count": count,
        "table": table,
        "model": model.state_dict(),
        "grads": [one.grad for one in model.parameters() if one.grad is not None],
        "python state": [(one.calls, one.means) for one in model if isinstance(one, Counts) and plant is None],
        "calls": [one.calls for one in model if isinstance(one, Counts)],
        "optimizer": optimizer.state_dict()["state"],
        "rng": (torch.get_rng_state(), random.getstate(), np.random.get_state()),  # noqa: NPY002
        "hooks": [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()] if plant == -1 else [],
    }


def printed(work: Any) -> tuple[Any, str]:
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        return work(), said.getvalue()


def differing(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    return [name for name in one if not same(one[name], other[name])]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("options", "plant"),
    [({}, None), ({"layers": True}, None), ({"keep_going": True}, 0), ({"keep_going": True}, 3), ({"keep_going": True, "layers": True}, 2)],
    ids=["watched", "layers", "bad at once", "bad later", "bad, layers"],
)
def test_every_bit_is_that_of_a_plain_run(seed: int, options: dict[str, Any], plant: int | None) -> None:
    plain, plain_said = printed(lambda: train(seed, plant))
    with nanhunt(**options) as session:
        watched, said = printed(lambda: train(seed, plant))
    assert differing(plain, watched) == []
    assert said == plain_said
    assert session.report.found is (plant is not None)
    if plant is None:
        assert session.report.problems == ()
    else:
        assert (session.report.finding.op, session.report.finding.backward) == ("sqrt", plant)
        assert session.report.reproduced is True


def test_the_measure_sees_a_difference() -> None:
    one, other = train(0, None), train(1, None)
    assert {"losses", "model", "rng"} <= set(differing(one, other))


@pytest.mark.parametrize("options", [{"keep_going": True}, {"keep_going": True, "layers": True}])
def test_hooks_of_the_user_are_called_as_often_as_without_us(options: dict[str, Any]) -> None:
    def run() -> list[str]:
        seen: list[str] = []
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        model[0].register_forward_hook(lambda *_: seen.append("forward"))
        model[1].register_full_backward_hook(lambda *_: seen.append("backward"))
        model[0].weight.register_hook(lambda _: seen.append("weight"))
        for step in range(3):
            loss = model(torch.ones(1, 2)).sum()
            if step == 1:
                loss = loss + (loss * 0 - 1).sqrt()
            loss.backward()
        return seen

    plain = run()
    with nanhunt(**options) as session:
        watched = run()
    assert session.report.found
    assert watched == plain


def test_activations_that_a_hook_collects_are_those_of_the_run() -> None:
    model, kept = nn.Linear(2, 1), []
    model.register_forward_hook(lambda _m, _a, out: kept.append(out.detach()))
    with nanhunt(keep_going=True):
        loss = (model(torch.ones(1, 2)) * 0 - 1).sqrt().sum()
        loss.backward()
    assert len(kept) == 1


class Halved(TorchDispatchMode):
    """Changes what a multiplication gives, and counts them."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is not torch.ops.aten.mul.Tensor:
            return result
        self.seen.append("mul")
        return result / 2


def test_what_hooks_and_modes_change_is_changed_in_the_replay_and_what_they_count_is_not() -> None:
    def run() -> tuple[list[str], list[str]]:
        model, calls, mode = nn.Linear(2, 1), [], Halved()

        def negative(_module: nn.Module, _args: Any, out: torch.Tensor) -> torch.Tensor:
            calls.append("hook")
            return -out.abs()

        model.register_forward_hook(negative)
        with mode:
            loss = (model(torch.ones(1, 2)) * 2).log().sum()  # NaN only for what the hook returns
            loss.backward()
        return calls, mode.seen

    plain = run()
    with nanhunt(keep_going=True) as session:
        watched = run()
    assert watched == plain
    assert (session.report.finding.op, session.report.reproduced) == ("log", True)


def test_post_accumulate_hooks_do_not_step_twice() -> None:
    # An optimizer inside the backward, as PyTorch's tutorial has it.
    def run() -> dict[str, Any]:
        torch.manual_seed(0)
        model = nn.Linear(2, 1)
        optimizers = {one: torch.optim.SGD([one], lr=0.1, momentum=0.9) for one in model.parameters()}

        def step(one: torch.Tensor) -> None:
            optimizers[one].step()
            optimizers[one].zero_grad()

        for one in model.parameters():
            one.register_post_accumulate_grad_hook(step)
        for _ in range(5):
            loss = model(torch.randn(4, 2)).square().mean()
            loss.backward()
        return model.state_dict()

    plain = run()
    for options in ({}, {"keep_going": True}, {"layers": True}):
        with nanhunt(**options):
            watched = run()
        assert same(watched, plain)


def test_in_place_writes_into_a_tensor_of_the_users() -> None:
    def run() -> torch.Tensor:
        torch.manual_seed(0)
        model, total = nn.Linear(2, 1), torch.zeros(())
        for _ in range(4):
            out = model(torch.ones(1, 2))
            loss = out.square().mean()
            total += loss.detach()
            loss.backward()
        return total

    plain = run()
    with nanhunt(layers=True):
        watched = run()
    assert torch.equal(watched, plain)


def test_a_numpy_generator_of_the_users() -> None:
    def run() -> list[float]:
        torch.manual_seed(0)
        rng, model, drawn = np.random.default_rng(0), nn.Linear(2, 1), []
        for _ in range(4):
            noise = float(rng.random())
            out = model(torch.ones(1, 2))
            loss = out.square().mean() * (1 + noise + float(rng.random()))
            drawn.append(noise)
            loss.backward()
        return drawn

    plain = run()
    with nanhunt(layers=True):
        watched = run()
    assert watched == plain


def test_a_stopped_cell_has_buffers_gradients_and_weights_of_before_the_bad_step() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), Counts())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wanted: dict[str, Any] = {}
    with contextlib.suppress(Exception), nanhunt():
        for step in range(4):
            wanted = {name: one.clone() for name, one in model.state_dict().items()}
            loss = model(torch.randn(4, 2)).square().mean()
            if step == 2:
                loss = loss + (loss * 0 - 1).sqrt()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert step == 2
    assert same(dict(model.state_dict()), wanted)
    assert all(one.grad is None or bool(torch.isfinite(one.grad).all()) for one in model.parameters())
