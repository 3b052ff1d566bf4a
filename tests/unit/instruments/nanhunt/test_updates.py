"""A bad update is undone: parameters, buffers and optimizer state are as they were before the bad step, to the last bit."""

from __future__ import annotations

import contextlib
import copy
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from torchdebug_magics import NonFiniteError, nanhunt
from torchdebug_magics.instruments.nanhunt.watch import update_checks as undo
from torchdebug_magics.instruments.nanhunt.watch.update_checks import is_risky

# ruff: noqa: PT012 - whole loops are watched
X = torch.randn(8, 4)


def make() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1))


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    return copy.deepcopy([model.state_dict(), optimizer.state_dict()])


def flat(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [(key, flat(one)) for key, one in value.items()]
    if isinstance(value, (list, tuple)):
        return [flat(one) for one in value]
    return [value.tolist() if isinstance(value, torch.Tensor) else value]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, states: list[Any], steps_count: int = 4, bad: int = 2) -> None:
    for step in range(steps_count):
        states.append(state_of(model, optimizer))
        optimizer.zero_grad()
        model(X).square().mean().backward()
        if step == bad:
            for group in optimizer.param_groups:
                group["lr"] = float("inf")
        optimizer.step()


OPTIMIZERS: dict[str, Any] = {
    "adam": lambda ps: torch.optim.Adam(ps, lr=1e-3),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_update_by_an_infinite_rate_is_undone(name: str) -> None:
    model, states = make(), []
    optimizer = OPTIMIZERS[name](list(model.parameters()))
    ids = {id(one) for values in optimizer.state.values() for one in values.values()}
    with pytest.raises(NonFiniteError), nanhunt() as session:
        train(model, optimizer, states)
    finding = session.report.finding
    assert (finding.phase, finding.step, finding.weights) == ("optimizer", 2, "weights put back")
    for group in optimizer.param_groups:
        group["lr"] = states[2][1]["param_groups"][0]["lr"]
    assert flat(state_of(model, optimizer)) == flat(states[2])
    assert ids <= {id(one) for values in optimizer.state.values() for one in values.values()}


def test_adam_without_eps_leaves_no_state_behind() -> None:
    model = nn.Embedding(4, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, eps=0.0)
    before = state_of(model, optimizer)
    with pytest.raises(NonFiniteError) as caught, nanhunt():
        model(torch.tensor([0, 1, 3])).square().sum().backward()
        optimizer.step()
    assert (caught.value.finding.diagnosis, caught.value.finding.weights) == ("adam_eps_zero", "weights put back")
    assert flat(state_of(model, optimizer)) == flat(before)
    assert not optimizer.state
    assert model.weight.grad is not None  # the gradient was right: with another optimizer it can be applied


def test_half_parameters_have_no_eps_in_effect() -> None:
    model = nn.Embedding(4, 2).half()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    with pytest.raises(NonFiniteError) as caught, nanhunt():
        model(torch.tensor([0, 1, 3])).square().sum().backward()
        optimizer.step()
    finding = caught.value.finding
    assert (finding.diagnosis, finding.rows, finding.weights) == ("adam_eps_zero", (2,), "weights put back")
    assert "float16" in finding.explanation
    assert model.weight.isfinite().all()


def test_when_going_on_the_update_stands_and_the_report_says_so() -> None:
    model, states = make(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with nanhunt(keep_going=True) as session:
        train(model, optimizer, states)
    assert session.report.finding.weights == "weights poisoned"
    assert not next(model.parameters()).isfinite().all()


def test_what_is_too_large_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(undo, "_MOST_BYTES", 8)
    model, states = make(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(NonFiniteError), nanhunt() as session:
        train(model, optimizer, states)
    assert session.report.finding.weights == "weights poisoned"
    assert not next(model.parameters()).isfinite().all()


# ------------------------------------------------------------------------------------------------ closures


class Closure:
    """Goes wrong at one of its calls."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, bad: int) -> None:
        self.model, self.optimizer, self.bad, self.calls, self.starts = model, optimizer, bad, 0, []

    def __call__(self) -> torch.Tensor:
        self.calls += 1
        self.optimizer.zero_grad()
        loss = (self.model(X) - 1).square().mean()
        if self.calls == self.bad:
            loss = loss + (loss * 0 - 1).sqrt()
        loss.backward()
        return loss

    def run(self, steps_count: int = 5) -> None:
        for _ in range(steps_count):
            self.starts.append(state_of(self.model, self.optimizer))
            self.optimizer.step(self)


@pytest.mark.parametrize("bad", [1, 2, 6, 7])
@pytest.mark.parametrize("search", [None, "strong_wolfe"])
def test_lbfgs_is_put_back_to_before_the_step(bad: int, search: str | None) -> None:
    model = make()
    closure = Closure(model, torch.optim.LBFGS(model.parameters(), max_iter=4, line_search_fn=search), bad)
    with pytest.raises(NonFiniteError), nanhunt() as session:
        closure.run()
    assert session.report.finding.op == "sqrt"
    assert session.report.finding.weights in {"weights put back", "weights untouched"}
    assert flat(state_of(model, closure.optimizer)) == flat(closure.starts[-1])


def test_lbfgs_untouched_means_untouched() -> None:
    model = make()
    closure = Closure(model, torch.optim.LBFGS(model.parameters(), max_iter=4), 1)
    with pytest.raises(NonFiniteError), nanhunt() as session:
        closure.run()
    assert session.report.finding.weights == "weights untouched"


@pytest.mark.parametrize("keep_going", [False, True])
def test_lbfgs_that_cannot_be_put_back_says_what_was_changed(monkeypatch: pytest.MonkeyPatch, keep_going: bool) -> None:
    monkeypatch.setattr(undo, "_MOST_BYTES", 8)
    model = make()
    closure = Closure(model, torch.optim.LBFGS(model.parameters(), max_iter=4), 3)
    try:
        with nanhunt(keep_going=keep_going) as session:
            closure.run(1)
    except NonFiniteError:
        assert not keep_going
    assert session.report.finding.weights == "weights changed since the step began"


def test_lbfgs_that_spoils_its_parameters_is_the_optimizers_fault() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    closure = Closure(model, torch.optim.LBFGS(model.parameters(), lr=float("inf"), max_iter=4), 0)
    with pytest.raises(NonFiniteError), nanhunt() as session:
        closure.run()
    finding = session.report.finding
    assert (finding.phase, finding.tensor, finding.weights) == ("optimizer", "weight", "weights put back")
    assert flat(state_of(model, closure.optimizer)) == flat(closure.starts[-1])


def test_a_closure_of_another_optimizer_costs_no_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    copies = []
    monkeypatch.setattr(undo, "Undo", lambda *_, **__: copies.append(1))
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    closure = Closure(model, optimizer, 0)
    with nanhunt() as session:
        optimizer.step(closure)
        del copies[:]
        closure.run()
    assert not session.report.found
    assert copies == []


def test_a_step_that_raised_is_forgotten() -> None:
    model = make()
    lbfgs = torch.optim.LBFGS(model.parameters(), max_iter=4)
    closure, sgd = Closure(model, lbfgs, 0), torch.optim.SGD(model.parameters(), lr=0.1)

    def fails() -> torch.Tensor:
        if closure.calls == 6:
            raise LookupError
        return closure()

    with pytest.raises(NonFiniteError), nanhunt() as session:
        lbfgs.step(closure)
        with pytest.raises(LookupError):
            lbfgs.step(fails)
        sgd.zero_grad()
        model(X).square().mean().backward()
        sgd.step()
        now = state_of(model, sgd)
        sgd.zero_grad()
        (model(X).sum() * 0).log().backward()
    assert session.report.finding.weights == "weights untouched"
    assert flat(state_of(model, sgd)) == flat(now)


def test_nothing_is_kept_after_a_step() -> None:
    model = make()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)
    closure = Closure(model, optimizer, 0)
    with nanhunt() as session:
        closure.run()
        kept = weakref.ref(optimizer)
        del optimizer, closure
        assert kept() is None
    assert not session.report.found


class Nested(torch.optim.Optimizer):
    """Steps an optimizer of torch's, then spoils what that did."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.inner = torch.optim.SGD(parameters, lr=0.1)
        self.count = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.inner.step()
        self.count += 1
        for group in self.param_groups:
            for one in group["params"]:
                self.state[one]["seen"] = self.count
                one.div_(self.count - 3)


def test_an_optimizer_inside_another() -> None:
    model, states = make(), []
    optimizer = Nested(list(model.parameters()))
    with pytest.raises(NonFiniteError), nanhunt() as session:
        train(model, optimizer, states, bad=-1)
    assert session.report.finding.weights == "weights put back"
    assert flat(state_of(model, optimizer)) == flat(states[-1])


# ------------------------------------------------------------------------------------------------ risk

W = [nn.Parameter(torch.ones(2))]
HALF = [nn.Parameter(torch.ones(2).half())]


@pytest.mark.parametrize(
    ("optimizer", "peak", "risky"),
    [
        (torch.optim.Adam(W), 1.0, False),
        (torch.optim.Adam(W), 65536.0 * 3, False),  # scaled gradients
        (torch.optim.Adam(W), 1e20, True),
        (torch.optim.Adam(W), float("nan"), True),
        (torch.optim.Adam(W, eps=0.0), 1.0, True),
        (torch.optim.Adam(HALF), 1.0, True),
        (torch.optim.Adam(HALF, eps=1e-4), 1.0, False),
        (torch.optim.SGD(W, lr=0.1), 1e4, False),
        (torch.optim.SGD(W, lr=0.1), 1e6, True),
        (torch.optim.SGD(W, lr=1.0), 1.0, True),
        (torch.optim.SGD(W, lr=torch.tensor(0.1)), 1.0, False),
        (torch.optim.SGD(W, lr=float("nan")), 1.0, True),
        (torch.optim.RMSprop(W, centered=True), 1.0, True),
        (Nested(W), 1.0, True),
    ],
)
def test_which_updates_are_risky(optimizer: torch.optim.Optimizer, peak: float, risky: bool) -> None:
    assert is_risky(optimizer, peak) is risky


class Normed(torch.optim.Optimizer):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # as users write it
        del closure
        for group in self.param_groups:
            for one in group["params"]:
                one.sub_(one.grad / one.grad.norm())


@pytest.mark.parametrize("keep_going", [True, False])
def test_of_an_optimizer_of_the_users_own_its_step_is_to_be_checked(keep_going: bool) -> None:
    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.zeros(2)
    with contextlib.suppress(NonFiniteError), nanhunt(keep_going=keep_going) as session:
        Normed([weight]).step()
    finding = session.report.finding
    assert (finding.phase, finding.diagnosis, finding.kind) == ("optimizer", None, "nan")
    assert "`step()` of Normed makes weight non-finite" in finding.explanation


def test_an_update_that_a_hook_makes_inside_backward_is_stopped_before_it_is_applied() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(3, 2), nn.Identity()), torch.rand(4, 3)
    optimizers: dict[Any, Any] = {parameter: torch.optim.SGD([parameter], 0.1) for parameter in model.parameters()}

    def update(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    before = [parameter.clone() for parameter in model.parameters()]

    def distances(z: torch.Tensor) -> torch.Tensor:
        squares = (z[:, None] - z[None]).pow(2).sum(-1)
        return squares.sqrt()  # of a sample to itself

    with pytest.raises(NonFiniteError), nanhunt() as session:
        loss = distances(model(x)).mean()
        loss.backward()
    finding = session.report.finding
    assert finding is not None
    assert (finding.phase, finding.tensor, finding.kind) == ("optimizer", "0.bias", "nan")
    assert "the hook that applies it runs inside backward()" in finding.explanation
    assert finding.weights == "weights untouched"
    assert all(torch.equal(one, parameter) for one, parameter in zip(before, model.parameters(), strict=True))
