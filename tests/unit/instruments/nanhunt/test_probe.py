"""The promises of the probe: the five cases of every probe, its options, its live side, an interrupt in the middle of a replay."""

# ruff: noqa: PT012 - what raises is a whole step, watched

from __future__ import annotations

import contextlib
import gc
import itertools
import math
import random
import signal
import sys
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.flop_counter import FlopCounterMode

from torchdebug_magics import NonFiniteError, SessionError, nanhunt
from torchdebug_magics.instruments.nanhunt.view import first_rows
from torchdebug_magics.probing.hooks import Hooks

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.doors import Observe


SETUP = """\
import torch, torchdebug_magics
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
opt = torch.optim.SGD(model.parameters(), lr=0.01)
"""
LOOP = """\
for i in range(6):
    out = model(torch.ones(2, 3))
    loss = (out * 0 if i in {0} else out).abs().log().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
"""


def body(*bad: int) -> str:
    return SETUP + LOOP.format(set(bad) or "()")


def clean(namespace: dict[str, Any]) -> bool:
    """Whether the model carries no hook."""
    return not any(module._forward_hooks or module._forward_pre_hooks for module in namespace["model"].modules())


# ------------------------------------------------------------------------------------------------ the five cases


def test_an_empty_body(observe: Observe) -> None:
    seen = observe("nanhunt", "pass\n")
    assert seen.error is None
    assert not seen.report.found
    assert seen.report.verdict.startswith("Nothing to check")
    assert seen.report.problems == ()


def test_an_error_inside(observe: Observe) -> None:
    seen = observe("nanhunt", body() + "raise LookupError('mine')\n")
    assert type(seen.error) is LookupError
    assert (seen.report.found, seen.report.steps_count, seen.report.backward_count) == (False, 6, 6)
    assert seen.report.raised == "LookupError"
    assert "6 backward passes and 6 optimizer steps until LookupError" in seen.report.verdict
    assert clean(seen.namespace)


def test_an_error_inside_a_forward_of_the_users(observe: Observe) -> None:
    seen = observe("nanhunt", body() + "model(torch.ones(2, 7))\n")
    assert type(seen.error) is RuntimeError
    assert clean(seen.namespace)
    assert seen.report.problems == ()


def test_after_a_caught_error_of_a_forward_the_next_steps_are_watched(observe: Observe) -> None:
    caught = "try:\n    model(torch.ones(2, 7))\nexcept RuntimeError:\n    pass\n"
    seen = observe("nanhunt", SETUP + caught + LOOP.format({2}))
    assert (seen.report.finding.op, seen.report.finding.step) == ("log", 2)
    assert seen.report.reproduced is True
    assert seen.report.raised == ""


@pytest.mark.parametrize("method", ["own_calls", "autograd_calls", "module_birth", "optimizer_steps"])
def test_a_failure_while_attaching_unwinds(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    model = nn.Linear(1, 1)
    monkeypatch.setattr(Hooks, method, lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError), nanhunt():
        pytest.fail("the body ran")
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


def test_a_failure_while_attaching_is_seen_by_the_user_of_the_magic(shell: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Hooks, "optimizer_steps", lambda *_: 1 / 0)
    result = shell.run_cell("%%nanhunt\nbefore = 1\n")
    assert isinstance(result.error_in_exec, ZeroDivisionError)


def test_nested_in_itself(observe: Observe) -> None:
    inner = "with torchdebug_magics.nanhunt(keep_going=True) as inner:\n    " + LOOP.format({3}).replace("\n", "\n    ") + "\n"
    seen = observe("nanhunt", SETUP + inner, keep_going=True)
    assert seen.error is None
    both = [seen.report, seen.namespace["inner"].report]
    assert [(one.finding.op, one.finding.step, one.steps_count, one.reproduced) for one in both] == [("log", 3, 6, True)] * 2
    assert clean(seen.namespace)


def test_nested_in_itself_where_the_inner_one_stops(observe: Observe) -> None:
    inner = "with torchdebug_magics.nanhunt() as inner:\n    " + LOOP.format({3}).replace("\n", "\n    ") + "\n"
    seen = observe("nanhunt", SETUP + inner)
    assert type(seen.error) is NonFiniteError
    assert seen.report.finding.step == 3
    assert clean(seen.namespace)


def test_sessions_that_end_in_the_wrong_order() -> None:
    model, one, two = nn.Linear(2, 1), nanhunt(keep_going=True), nanhunt(keep_going=True)
    one.__enter__()
    two.__enter__()
    one.__exit__(None, None, None)
    (model(torch.ones(1, 2)) * 0).log().sum().backward()
    two.__exit__(None, None, None)
    assert not one.report.found
    assert two.report.finding.op == "log"
    assert not model._forward_hooks


def test_a_session_inside_the_step_of_another(observe: Observe) -> None:
    # The replay of the outer session opens and closes the inner one once more.
    text = SETUP + (
        "for i in range(3):\n"
        "    out = model(torch.ones(2, 3))\n"
        "    with torchdebug_magics.nanhunt(keep_going=True) as inner:\n"
        "        extra = model(torch.zeros(2, 3))\n"
        "    loss = ((out + extra) * float(i != 1)).abs().log().mean()\n"
        "    opt.zero_grad()\n"
        "    loss.backward()\n"
        "    opt.step()\n"
    )
    seen = observe("nanhunt", text, keep_going=True)
    assert seen.error is None
    assert (seen.report.finding.op, seen.report.finding.step) == ("log", 1)
    assert clean(seen.namespace)


@pytest.mark.parametrize(
    "other",
    [
        "torch.autograd.detect_anomaly(check_nan=False)",
        "torch.utils.flop_counter.FlopCounterMode(display=False)",
        "torch.autograd.profiler.profile()",
    ],
)
def test_nested_in_another(observe: Observe, other: str) -> None:
    text = SETUP + f"import torch.utils.flop_counter\nwith {other}:\n    " + LOOP.format({3}).replace("\n", "\n    ") + "\n"
    seen = observe("nanhunt", text)
    assert type(seen.error) is NonFiniteError
    assert (seen.report.finding.op, seen.report.finding.step) == ("log", 3)


def test_a_counter_of_the_users_counts_what_it_counts_without_us() -> None:
    def run() -> int:
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        with FlopCounterMode(display=False) as counter:
            for i in range(3):
                loss = (model(torch.ones(2, 3)) * float(i != 1)).abs().log().mean()
                model.zero_grad()
                loss.backward()
        return counter.get_total_flops()

    plain = run()
    with nanhunt(keep_going=True) as session:
        watched = run()
    assert session.report.found
    assert watched == plain


@pytest.mark.parametrize("hook", ["register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"])
def test_a_user_hook_that_raises(observe: Observe, hook: str) -> None:
    text = SETUP + f"def fail(*_):\n    raise LookupError('mine')\nmodel[1].{hook}(fail)\n" + LOOP.format("()")
    seen = observe("nanhunt", text)
    assert type(seen.error) is LookupError
    assert not seen.report.found
    hooks = [
        one
        for module in seen.namespace["model"].modules()
        for one in (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    ]
    assert all(getattr(one, "__name__", "") == "fail" or hook == "register_full_backward_hook" for one in hooks)


def test_a_user_hook_that_raises_only_in_the_replay(observe: Observe) -> None:
    text = SETUP + (
        "calls = iter(range(100))\n"
        "def fail(*_):\n    if next(calls) == 1:\n        raise LookupError('mine')\n"
        "model[0].register_forward_hook(fail)\n"
        "loss = (model(torch.ones(2, 3)) * 0).log().sum()\n"
        "loss.backward()\n"
    )
    seen = observe("nanhunt", text)
    assert type(seen.error) is NonFiniteError
    assert any("LookupError" in problem for problem in seen.report.problems)


# ------------------------------------------------------------------------------------------------ options


def test_the_default_stops_at_the_first(observe: Observe) -> None:
    seen = observe("nanhunt", body(2, 4))
    assert type(seen.error) is NonFiniteError
    assert str(seen.error) == seen.report.verdict
    assert seen.namespace["i"] == 2
    assert (seen.report.steps_count, len(seen.report.findings)) == (2, 1)


def test_keep_going_only_records(observe: Observe) -> None:
    seen = observe("nanhunt", body(2, 4), keep_going=True)
    assert seen.error is None
    assert seen.namespace["i"] == 5
    assert (seen.report.steps_count, seen.report.backward_count, len(seen.report.history)) == (6, 6, 6)
    assert seen.report.findings[0].step == 2


SAME = """\
for i in range(6):
    x = torch.ones(2, 3)
    if i in {2, 3, 5}:
        x[1] = 0
    loss = model(x).mean() + x.sum(1).log().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
"""


def test_keep_going_lists_the_same_finding_once_and_its_later_steps(observe: Observe) -> None:
    seen = observe("nanhunt", SETUP + SAME, keep_going=True)
    [finding] = seen.report.findings
    assert (finding.op, finding.step, finding.again) == ("log", 2, (3, 5))
    assert ("again", "in steps 3, 5") in first_rows(finding)
    assert "more finding" not in seen.report.verdict


def test_keep_going_calls_no_weights_untouched_that_were_updated_since(observe: Observe) -> None:
    seen = observe("nanhunt", SETUP + SAME, keep_going=True)
    assert seen.report.finding.weights == "weights updated since"
    assert all(one.isfinite().all() for one in seen.namespace["model"].parameters())
    spoilt = observe("nanhunt", body(2), keep_going=True)
    assert spoilt.report.finding.weights == "weights poisoned"
    assert not any(one.isfinite().all() for one in spoilt.namespace["model"].parameters())
    last = observe(
        "nanhunt", (SETUP + SAME).replace("{2, 3, 5}", "{5}").replace("    opt.step()", "    if i < 5: opt.step()"), keep_going=True
    )
    assert last.report.finding.weights == "weights untouched"


BIRTHS = """\
w = torch.ones(3, requires_grad=True)
z = torch.zeros(3)
for i in range(4):
    a = w.sum() if i != 0 else (w * z).log().sum()
    b = w.sum() if i != 1 else (w / z).sum()
    c = w.sum() if i != 2 else (w - 2).sqrt().sum()
    (a + b + c).backward()
    w.grad = None
"""


@pytest.mark.parametrize(("most", "ops"), [(1, ["log"]), (2, ["log", "div"]), (10, ["log", "div", "sqrt"])])
def test_max_findings(observe: Observe, most: int, ops: list[str]) -> None:
    seen = observe("nanhunt", "import torch\n" + BIRTHS, keep_going=True, max_findings=most)
    assert seen.error is None
    assert [one.op for one in seen.report.findings] == ops
    assert [one.step for one in seen.report.findings] == [0] * len(ops)
    assert [one.backward for one in seen.report.findings] == list(range(len(ops)))


def test_max_findings_without_keep_going_still_stops_at_the_first(observe: Observe) -> None:
    seen = observe("nanhunt", body(2), max_findings=5)
    assert type(seen.error) is NonFiniteError
    assert len(seen.report.findings) == 1


def test_layers_of_a_healthy_run(observe: Observe) -> None:
    seen = observe("nanhunt", body(), layers=True)
    rows = seen.report.layers
    assert seen.error is None
    assert not seen.report.found
    assert [row.module for row in rows] == ["0", "1", ""]
    assert all((row.nan_count, row.posinf_count, row.neginf_count) == (0, 0, 0) for row in rows)
    assert all(row.grad_max_abs is not None for row in rows)
    assert seen.report.layers_step == 3  # the last of 0, 1, 3, 7, ...


def test_layers_of_the_bad_step_come_by_themselves(observe: Observe) -> None:
    seen = observe("nanhunt", body(2))
    assert [row.module for row in seen.report.layers] == ["0", "1", ""]
    assert seen.report.layers_step == 2


@pytest.mark.parametrize("option", [{"keep": True}, {"max_finding": 1}])
def test_an_unknown_option_says_the_known_ones(option: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match="keep_going"):
        nanhunt(**option)


# ------------------------------------------------------------------------------------------------ live, report, kept


def test_live_while_running() -> None:
    model, session, seen = nn.Linear(2, 1), nanhunt(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    assert session.live() is None
    with session:
        assert session.live().loss is None
        for _ in range(3):
            loss = model(torch.ones(1, 2)).square().sum()
            loss.backward()
            optimizer.step()
            seen.append((session.live(), loss.item()))
    assert session.live() is None
    assert [(one.steps_count, one.backward_count, one.loss, len(one.history), one.phase) for one, _ in seen] == [
        (step + 1, step + 1, loss, step + 1, "watching") for step, (_, loss) in enumerate(seen)
    ]
    assert seen[-1][0].steps_per_s > 0


def test_live_says_that_a_step_is_replayed() -> None:
    model, phases = nn.Linear(2, 1), SimpleQueue()  # no list: what a hook puts into one in a replay is taken out again
    with nanhunt(keep_going=True) as session:
        model.register_forward_hook(lambda *_: phases.put(session.live().phase))
        (model(torch.ones(1, 2)) * 0).log().sum().backward()
    first, *replays = [phases.get_nowait() for _ in range(phases.qsize())]
    assert first == "watching"
    assert set(replays) == {"replaying step 0"}  # once to trace it, once with the fix


def test_the_report_before_the_end_is_a_clear_error() -> None:
    session = nanhunt()
    with pytest.raises(SessionError, match="after the `with` block"):
        _ = session.report
    with session, pytest.raises(SessionError):
        _ = session.report
    assert session.report.verdict


def test_a_session_runs_once() -> None:
    session = nanhunt()
    with session:
        pass
    with pytest.raises(SessionError, match="once"), session:
        pass


def test_bad_holds_the_tensors_at_the_birth() -> None:
    x = torch.tensor([1.0, 0.0, 4.0], requires_grad=True)
    with pytest.raises(NonFiniteError) as caught, nanhunt() as session:
        (x * 1).log().sum().backward()
    bad = session.bad
    assert bad is session.kept["bad"]
    assert set(bad) == {"input 0", "output"}
    assert all(not one.requires_grad and one.grad_fn is None for one in bad.values())
    assert bad["input 0"].tolist() == [1.0, 0.0, 4.0]
    assert torch.equal(bad["output"], torch.tensor([1.0, 0.0, 4.0]).log())
    assert caught.value.bad == bad
    assert caught.value.finding is session.report.finding


def test_bad_shows_what_an_op_in_place_was_given() -> None:
    x = torch.tensor([1.0, 0.0], requires_grad=True)
    with pytest.raises(NonFiniteError), nanhunt() as session:
        h = x * 1
        h.log_()
        h.sum().backward()
    assert session.bad["input 0"].tolist() == [1.0, 0.0]
    assert session.bad["output"].tolist() == [0.0, -math.inf]


def test_bad_is_empty_where_nothing_was_found() -> None:
    with nanhunt() as session:
        torch.ones(1, requires_grad=True).sum().backward()
    assert session.bad == {}


# ------------------------------------------------------------------------------------------------ an interrupt in a replay


class Counted(nn.Module):
    """Dropout, batch norm, NumPy-free randomness of Python's, and a counter: all that a replay has to put back."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.norm, self.drop, self.calls = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.drop(self.norm(self.lin(x))) * (1 + random.random())


def world() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    random.seed(3)
    model = Counted()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    model(torch.randn(6, 4)).sum().backward()
    optimizer.step()
    return model, optimizer


def bad_step(model: nn.Module) -> None:
    out = model(torch.randn(6, 4))
    loss = (out * 0).log().sum() + out.sum()
    loss.backward()


def everything(model: nn.Module) -> list[Any]:
    tensors = [*model.state_dict().values(), *(one.grad for one in model.parameters())]
    return [*(one.clone() for one in tensors), torch.get_rng_state(), random.getstate(), model.calls]


def equal(one: list[Any], other: list[Any]) -> list[int]:
    """The places that differ."""
    return [
        place
        for place, (left, right) in enumerate(zip(one, other, strict=True))
        if not (torch.allclose(left.double(), right.double(), 0, 0, equal_nan=True) if isinstance(left, torch.Tensor) else left == right)
    ]


def after_a_plain_bad_step() -> list[Any]:
    model, _ = world()
    bad_step(model)
    return everything(model)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Interrupts are signals that raise, as in a kernel."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def alarms(handler: Any) -> Iterator[None]:
    before = signal.signal(signal.SIGALRM, handler)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("part", ["", "lin", "drop"])
@pytest.mark.parametrize("hook", ["register_forward_hook", "register_forward_pre_hook"])
def test_an_interrupt_in_a_replay_puts_the_state_back(part: str, hook: str) -> None:
    wanted = after_a_plain_bad_step()
    model, _ = world()
    calls: list[int] = []

    def interrupt(*_: Any) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt

    session = nanhunt()
    getattr(model.get_submodule(part), hook)(interrupt)
    with pytest.raises(KeyboardInterrupt), session:
        bad_step(model)
    assert equal(everything(model), wanted) == []
    assert session._probe._inner._recorder.replaying is None
    assert not session._probe._inner._rerun.active
    assert not _get_current_dispatch_mode_stack()
    assert any("interrupted" in problem for problem in session.report.problems)
    assert session.report.finding is None or session.report.finding.op is None


def test_after_an_interrupted_replay_the_session_goes_on() -> None:
    model, _ = world()
    calls = itertools.count(1)  # counts replays, too: a list would be put back after each

    def interrupt(*_: Any) -> None:
        if next(calls) == 2:
            raise KeyboardInterrupt

    model.register_forward_hook(interrupt)
    with nanhunt(keep_going=True) as session:
        with contextlib.suppress(KeyboardInterrupt):
            bad_step(model)
        model.zero_grad()
        bad_step(model)
    assert session.report.findings[-1].op == "log", session.report.problems


@pytest.mark.parametrize("delay_s", [0.0002, 0.0005, 0.001, 0.002, 0.003, 0.004, 0.006, 0.008, 0.012, 0.02])
@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_at_any_moment_of_a_replay(delay_s: float) -> None:
    wanted = after_a_plain_bad_step()
    model, _ = world()

    def stop(*_: Any) -> None:
        signal.raise_signal(signal.SIGINT)

    calls: list[int] = []

    def arm(*_: Any) -> None:
        calls.append(1)
        if len(calls) == 2:
            signal.setitimer(signal.ITIMER_REAL, delay_s)

    session = nanhunt(keep_going=True)
    handle = model.register_forward_pre_hook(arm)
    with alarms(stop), contextlib.suppress(KeyboardInterrupt), session:
        bad_step(model)
    handle.remove()
    assert equal(everything(model), wanted) == []
    assert session._probe._inner._recorder.replaying is None
    assert not session._probe._inner._rerun.active
    assert not _get_current_dispatch_mode_stack()
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("method", ["__enter__", "__exit__"])
def test_an_interrupt_as_a_context_manager_begins_or_ends(method: str) -> None:
    """One that an interrupt keeps from ending would end when the traceback goes, which is after the sweep."""
    code = getattr(contextlib._GeneratorContextManager, method).__code__
    wanted = after_a_plain_bad_step()
    for place in itertools.count(1, 5):
        model, _ = world()
        session = nanhunt(keep_going=True)
        passed = itertools.count(1)

        def trace(frame: Any, event: str, _: Any) -> Any:
            outer = "" if frame.f_back is None else frame.f_back.f_code.co_filename
            if frame.f_code is not code or "torchdebug_magics" not in outer or session._probe._inner._rerun._attempt is None:  # noqa: B023
                return None
            if event == ("call" if method == "__exit__" else "return") and next(passed) == place:  # noqa: B023 - called in this round only
                signal.raise_signal(signal.SIGINT)
            return trace

        is_interrupted = True
        with contextlib.suppress(KeyboardInterrupt), session:
            sys.settrace(trace)
            try:
                bad_step(model)
                is_interrupted = False
            finally:
                sys.settrace(None)
        gc.collect()
        assert not _get_current_dispatch_mode_stack(), place
        assert equal(everything(model), wanted) == [], place
        assert torch.is_grad_enabled(), place
        if next(passed) <= place:
            break
        assert is_interrupted, place
    assert place > 50


# ------------------------------------------------------------------------------------------------ an error that is swallowed

SWALLOWED = """\
caught = []
for i in range(6):
    try:
        x = torch.ones(2, 3)
        loss = model(x).square().mean()
        if i in {bad}:
            loss = loss + (loss * 0).log()
        opt.zero_grad()
        loss.backward()
        opt.step()
    except Exception as error:
        caught.append(error)
"""


@pytest.mark.parametrize("bad", ["{2}", "{2, 4}", "{5}"])
def test_an_error_that_is_swallowed_is_reported_once_and_raised_once(observe: Observe, bad: str) -> None:
    seen = observe("nanhunt", SETUP + SWALLOWED.replace("{bad}", bad))
    assert seen.error is None
    assert [type(one) for one in seen.namespace["caught"]] == [NonFiniteError]
    first = int(bad[1])
    assert (len(seen.report.findings), seen.report.finding.op, seen.report.finding.step) == (1, "log", first)
    assert (seen.report.backward_count, seen.report.steps_count) == (6, 5)
    said = [problem for problem in seen.report.problems if "the cell continued" in problem]
    assert len(said) == (first < 5)
    assert clean(seen.namespace)


def test_a_run_that_swallows_the_error_skips_that_step_and_no_other(observe: Observe) -> None:
    watched = observe("nanhunt", SETUP + SWALLOWED.replace("{bad}", "{2}"))
    plain: dict[str, Any] = {}
    exec(SETUP + SWALLOWED.replace("{bad}", "{2}").replace("loss = loss + (loss * 0).log()", "continue"), plain)
    assert all(map(torch.equal, watched.namespace["model"].parameters(), plain["model"].parameters()))
