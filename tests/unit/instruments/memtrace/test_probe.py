"""``%%memtrace`` around cells of every kind, through both doors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import torchdebug_magics
from tests.plain_first import refusal
from tests.plants.memtrace.loops import SETUP, STEP

TRAINING = SETUP + "for a, b in batches(4):\n" + STEP


@pytest.mark.parametrize("body", ["", "1", "def f():\n    pass"])
def test_an_empty_cell(observe: Any, body: str) -> None:
    report = observe("memtrace", body).report
    assert (report.net_bytes, report.growth, report.holders, report.problems) == (0, None, (), ())


def test_a_training_cell(observe: Any) -> None:
    seen = observe("memtrace", TRAINING)
    report = seen.report
    assert seen.error is None
    assert (report.steps_count, report.growth, report.oom, report.problems) == (4, None, None, ())
    assert sum(report.peak.by_category.values()) == report.peak_bytes
    assert {"parameter", "gradient", "optimizer state"} <= {site.category for site in report.sites if site.live_bytes}


def test_what_a_step_both_makes_and_joins_is_no_growth_to_follow(observe: Any) -> None:
    # As the cache of a transformer, which begins empty in each call.
    body = """class Cached(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = net
    def forward(self, a):
        return self.inner(torch.cat([torch.zeros(0, a.shape[1]), a]))
model = Cached()
for a, b in batches(24):
    opt.zero_grad()
    nn.functional.cross_entropy(model(a), b).backward()
    opt.step()
"""
    report = observe("memtrace", SETUP + body).report
    assert (report.steps_count, report.growth, report.problems) == (24, None, ())
    assert report.followed_count < report.steps_count


def test_an_error_inside(observe: Any) -> None:
    seen = observe("memtrace", f"{SETUP}kept = torch.ones(100)\n1 / 0")
    assert isinstance(seen.error, ZeroDivisionError)
    assert seen.report.net_bytes >= 400
    assert seen.report.problems == ()


@pytest.mark.parametrize(
    "body",
    [
        "def hook(*_):\n    raise LookupError('hook')\nnet[0].register_forward_hook(hook)\nnet(x)",
        "def hook(*_):\n    raise KeyboardInterrupt\nnet[1].register_forward_pre_hook(hook)\nnet(x)",
        "def hook(*_):\n    raise LookupError('hook')\nnet[0].weight.register_hook(hook)\nnet(x).sum().backward()",
        "def hook(*_):\n    raise LookupError('hook')\nopt.register_step_pre_hook(hook)\nnet(x).sum().backward()\nopt.step()",
        "for i in range(9):\n    net(x if i < 7 else x[:, :3])",
    ],
    ids=["a hook", "an interrupt", "a tensor's hook", "an optimizer's hook", "a later step"],
)
def test_an_error_in_the_middle_leaves_nothing(observe: Any, body: str) -> None:
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    seen = observe("memtrace", SETUP + body)
    assert seen.error is not None
    assert not _get_current_dispatch_mode_stack()
    assert not seen.namespace["net"]._forward_pre_hooks
    assert seen.report.problems == ()


def test_a_failure_while_attaching(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.nn.modules import module

    def fails(*_: object) -> None:
        raise OSError("no")

    monkeypatch.setattr("torchdebug_magics.probing.hooks.Hooks.optimizer_steps", fails)
    before = dict(module._global_module_registration_hooks)
    with pytest.raises(OSError, match="no"), torchdebug_magics.memtrace():
        pass
    assert dict(module._global_module_registration_hooks) == before


def test_nested_in_itself() -> None:
    with torchdebug_magics.memtrace() as outer:
        first = torch.zeros(100)
        with torchdebug_magics.memtrace() as inner:
            second = torch.zeros(50)
        third = torch.zeros(10)
    assert inner.report.net_bytes == second.nbytes
    assert outer.report.net_bytes == first.nbytes + second.nbytes + third.nbytes
    assert inner.report.problems == outer.report.problems == ()


@pytest.mark.parametrize("other", ["nanhunt", "shapes"])
@pytest.mark.parametrize("is_outer", [True, False])
def test_nested_in_another(other: str, is_outer: bool) -> None:
    model = nn.Linear(3, 3)
    sessions = [torchdebug_magics.memtrace(), getattr(torchdebug_magics, other)()]
    if is_outer:
        sessions.reverse()
    with sessions[0], sessions[1]:
        for _ in range(3):
            model(torch.ones(2, 3)).sum().backward()
    trace = next(session for session in sessions if hasattr(session.report, "net_bytes"))
    assert trace.report.steps_count == 3
    assert trace.report.growth is None
    assert trace.report.problems == ()
    assert trace.report.net_bytes >= sum(one.grad.nbytes for one in model.parameters())  # what the other one keeps is torch's, too


ODD = {
    "fake": "from torch._subclasses import FakeTensorMode\nwith FakeTensorMode():\n    kept = torch.empty(10) + 1",
    "per-sample gradients": """from torch.func import functional_call, grad, vmap
state = dict(net.named_parameters())
def loss(state, a, b):
    return F.cross_entropy(functional_call(net, state, (a[None],)), b[None])
kept = vmap(grad(loss), in_dims=(None, 0, 0))(state, x, y)""",
    "mkldnn": "kept = torch.ones(3, 3).to_mkldnn()",
}
if refusal(lambda: torch.ones(3, 3).to_mkldnn()):
    del ODD["mkldnn"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ODD)
def test_odd_tensors(observe: Any, name: str) -> None:
    seen = observe("memtrace", SETUP + ODD[name])
    assert seen.error is None
    assert seen.report.problems == ()
    assert sum(seen.report.peak.by_category.values()) == seen.report.peak_bytes


def test_objects_that_fail_when_they_are_looked_at(observe: Any) -> None:
    body = f"""{SETUP}
class Hostile:
    def __getattr__(self, name): raise OSError(name)
    def __eq__(self, other): raise OSError
    def __hash__(self): raise OSError
    def __repr__(self): raise OSError
    def __len__(self): raise OSError
    @property
    def __class__(self): raise OSError
class Proxy(dict):
    def items(self): raise OSError
    def __iter__(self): raise OSError
hostile = Hostile()
hostile.kept = [torch.ones(100)]
proxy = Proxy(kept=torch.ones(50))
for a, b in batches():
    hostile.kept.append(net(a))
"""
    report = observe("memtrace", body).report
    assert report.problems == ()
    assert report.growth is not None


def test_a_thousand_modules(observe: Any) -> None:
    body = """import torch
from torch import nn
deep = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(333)))
for _ in range(6):
    deep(torch.ones(2, 4)).sum().backward()
"""
    report = observe("memtrace", body).report
    assert (report.steps_count, report.growth, report.problems) == (6, None, ())
    assert len([site for site in report.sites if site.category == "gradient"]) == 333


@pytest.mark.parametrize(("steps", "is_counted"), [(3, False), (12, True)])
def test_the_picture_says_where_steps_were_only_counted(observe: Any, steps: int, is_counted: bool) -> None:
    from torchdebug_magics.html.page import Areas
    from torchdebug_magics.instruments.memtrace.view import page

    report = observe("memtrace", f"{SETUP}kept = []\nfor _ in range({steps}):\n    kept.append(net(x).square())").report
    (picture,) = [block for block in page(report).blocks if isinstance(block, Areas)]
    named = [name for name, _ in picture.stretches]
    assert ("steps only counted" in named) == is_counted
    assert named.index("forward") < (named.index("steps only counted") if is_counted else len(named))


def test_the_log_of_many_ops_is_bounded() -> None:
    with torchdebug_magics.memtrace() as session:
        a = torch.zeros(8)
        for _ in range(50_000):
            a = a + 1
    report = session.report
    assert report.ops_count == 50_001
    assert report.net_bytes == 32
    assert report.peak_bytes - report.start_bytes == 64
    assert len(next(iter(report.timeline.categories.values()), ())) <= 500
    assert len(report.to_json()) < 100_000
