"""Watched, a cell computes what it computes without us: every bit, every draw, every version of a tensor; and nothing is left behind."""

from __future__ import annotations

import _thread
import copy
import gc
import random
import threading
import warnings
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as everybody has it
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import torchdebug_magics

if TYPE_CHECKING:
    from collections.abc import Callable

    from IPython.core.interactiveshell import InteractiveShell

pytestmark = pytest.mark.filterwarnings("ignore")

PARTS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(6, 6),
    "norm": lambda: nn.BatchNorm1d(6),
    "dropout": lambda: nn.Dropout(0.3),
    "relu": lambda: nn.ReLU(inplace=True),
    "noise": nn.RReLU,
    "lstm": lambda: Only(nn.LSTM(6, 6)),
    "attention": lambda: Only(nn.MultiheadAttention(6, 2)),
}
OPTIMIZERS: list[Callable[[Any], torch.optim.Optimizer]] = [
    lambda ps: torch.optim.SGD(ps, lr=0.05, momentum=0.9),
    lambda ps: torch.optim.AdamW(ps, lr=0.01, foreach=True),
    lambda ps: torch.optim.Adam(ps, lr=0.01, fused=True),
]


class Only(nn.Module):
    """Of a module that returns several things, the first."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given = (x, x, x) if isinstance(self.inner, nn.MultiheadAttention) else (x,)
        return self.inner(*given)[0]


def train(seed: int) -> dict[str, Any]:
    """One random model and loop, all from a seed; what it leaves."""
    plan = random.Random(seed)
    torch.manual_seed(seed)
    parts = [PARTS[plan.choice(list(PARTS))]() for _ in range(plan.randint(2, 5))]
    model = nn.Sequential(nn.Linear(6, 6), *parts, nn.Linear(6, 2))
    optimizer = plan.choice(OPTIMIZERS)(model.parameters())
    checkpointed, autocast, every, to_none = (plan.random() < 0.4 for _ in range(4))
    losses = []
    for step in range(9):
        x, y = torch.randn(8, 6, requires_grad=checkpointed), torch.randint(0, 2, (8,))
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out = checkpoint(model, x, use_reentrant=plan.random() < 0.5) if checkpointed else model(x)
            loss = F.cross_entropy(out, y)
        losses.append(loss.detach())
        loss.backward()
        if step % 2 or every:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=to_none)
    return {
        "losses": torch.stack(losses),
        "model": model.state_dict(),
        "gradients": [one.grad for one in model.parameters()],
        "state": optimizer.state_dict()["state"],
        "versions": [one._version for one in (*model.parameters(), *model.buffers())],
        "generator": torch.get_rng_state(),
    }


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@pytest.mark.parametrize("options", [{}, {"light": True}, {"every_step": True}], ids=["", "light", "every step"])
@pytest.mark.parametrize("seed", range(8))
def test_every_bit_is_that_of_a_plain_run(seed: int, options: dict[str, Any]) -> None:
    plain = train(seed)
    with torchdebug_magics.memtrace(**options) as session:
        watched = train(seed)
    assert [name for name in plain if not same(plain[name], watched[name])] == []
    assert session.report.problems == ()


def test_the_measure_sees_a_difference() -> None:
    assert not same(train(0), train(1))


@pytest.mark.keeps_rng
def test_the_watch_itself_draws_nothing() -> None:
    state = torch.get_rng_state()
    with torchdebug_magics.memtrace():
        pass
    assert torch.equal(torch.get_rng_state(), state)


class Doubles(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Counts(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += 1
        return func(*args, **(kwargs or {}))


def test_modes_of_the_user_around_and_inside() -> None:
    model, x = nn.Linear(4, 4), torch.ones(2, 4)
    with Counts() as plain:
        model(x).sum().backward()
    with Counts() as outer, Doubles(), torchdebug_magics.memtrace() as session:
        model(x).sum().backward()
        with Counts() as inner, Doubles():
            model(x).sum().backward()
    assert inner.seen == plain.seen
    assert outer.seen >= 2 * plain.seen
    assert session.report.problems == ()
    assert session.report.net_bytes == 0


def test_a_mode_that_is_entered_in_the_cell_and_left_after_it() -> None:
    model, mode = nn.Linear(4, 4), Counts()
    try:
        with torchdebug_magics.memtrace():
            mode.__enter__()
            model(torch.ones(2, 4)).sum().backward()
        seen = mode.seen
        torch.ones(2)
        assert mode.seen > seen
    finally:
        mode.__exit__(None, None, None)


def test_modes_that_are_entered_and_left_in_later_steps() -> None:
    # By then a step is only counted: our own mode comes and goes, and the user's must not go with it.
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    model, x = nn.Linear(4, 4), torch.ones(2, 4)
    with Counts() as plain:
        model(x).sum().backward()
    with torchdebug_magics.memtrace() as session:
        for _ in range(9):
            with Counts() as outer, Counts() as inner:
                model(x).sum().backward()
            assert (outer.seen, inner.seen) == (plain.seen, plain.seen)
            assert len(_get_current_dispatch_mode_stack()) == 1
    assert session.report.steps_count == 9
    assert session.report.problems == ()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_what_is_compiled_under_the_watch_is_compiled_and_stays_so(backend: str) -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend(backend)

    @torch.compile(fullgraph=True, backend=counter)
    def f(x: torch.Tensor) -> torch.Tensor:
        return (x.sin() + 1).relu()

    x = torch.ones(8)
    with torchdebug_magics.memtrace() as session:
        watched = f(x)
    assert counter.frame_count == 1
    assert torch.equal(watched, f(x))
    assert counter.frame_count == 1
    assert session.report.problems == ()
    torch._dynamo.reset()


def test_a_compiled_model_trains_as_without_us() -> None:
    def run() -> Any:
        torch.manual_seed(0)
        torch._dynamo.reset()
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        fast = torch.compile(model, backend="aot_eager", fullgraph=True)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(6):
            fast(torch.randn(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model.state_dict()

    plain = run()
    with warnings.catch_warnings(), torchdebug_magics.memtrace() as session:
        warnings.simplefilter("error")  # as of hooks on all modules
        watched = run()
    assert same(dict(plain), dict(watched))
    assert session.report.steps_count == 6
    torch._dynamo.reset()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_function_that_calls_a_model_is_compiled_once(backend: str) -> None:
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    @torch.compile(backend=backend)
    def loss_of(x: torch.Tensor) -> torch.Tensor:
        return model(x).square().sum()

    def run() -> None:
        for _ in range(8):  # in the later ones a step is only counted
            optimizer.zero_grad()
            loss_of(torch.ones(2, 4)).backward()
            optimizer.step()

    with torchdebug_magics.memtrace() as session:
        run()
    run()
    assert counters["stats"]["unique_graphs"] == 1
    assert session.report.steps_count == 8
    assert session.report.problems == ()
    torch._dynamo.reset()


def test_a_copy_of_a_watched_model_works() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    with torchdebug_magics.memtrace():
        model(torch.ones(1, 2))
        other = copy.deepcopy(model)
    assert not other._forward_pre_hooks
    other(torch.ones(1, 2))


@pytest.mark.parametrize("options", ["", "--light"])
def test_what_is_deleted_after_the_cell_is_gone_at_once(shell: InteractiveShell, options: str) -> None:
    shell.run_cell("import torch, weakref\nnet = torch.nn.Linear(8, 8)")
    gc.collect()
    gc.disable()  # a cycle of ours would hold it until a collection
    try:
        shell.run_cell(f"%%memtrace -q {options}\nkept = []\nfor _ in range(9):\n    kept.append(net(torch.ones(4, 8)))")
        gone = [weakref.ref(one) for one in shell.user_ns["kept"]]
        shell.run_cell("del kept")
        assert [one() for one in gone] == [None] * 9
    finally:
        gc.enable()


def test_an_interrupt_leaves_the_filters_of_warnings_as_they_were() -> None:
    before = list(warnings.filters)
    net = nn.Linear(64, 64)
    for number in range(12):
        timer = threading.Timer(0.002 + 0.02 * number, _thread.interrupt_main)
        try:
            timer.start()
            with torchdebug_magics.memtrace():
                while True:
                    net(torch.randn(8, 64)).sum().backward()
        except KeyboardInterrupt:
            timer.join()
    assert list(warnings.filters) == before
