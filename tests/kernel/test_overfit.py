"""`%overfit` as a person meets it in a kernel: the verdict, errors, Stop, and a state that is as before."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.kernel.kernels import on_both_stacks

if TYPE_CHECKING:
    from tests.kernel.kernels import Kernel

TRAINING = """
import itertools
import signal
import torch
from torch import nn
from torch.nn import functional as F
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(10, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 4)).eval()
x, y = torch.randn(16, 10), torch.arange(16) % 4
loss_function, optimizer = nn.CrossEntropyLoss(), torch.optim.AdamW(model.parameters(), lr=1e-2)
def step():
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return loss
calls = itertools.count()
def interrupted_step():
    if next(calls) == 250:  # in the first trial: the training has made 200 steps, and one more to look at
        signal.raise_signal(signal.SIGINT)
    return step()
step()  # so that there are gradients, and moments in the optimizer
def state():
    names = [*model.state_dict(), *(name for name, _ in model.named_parameters())]
    tensors = [*model.state_dict().values(), *(one.grad for one in model.parameters())]
    moments = [(one["step"].item(), one["exp_avg"].tolist(), one["exp_avg_sq"].tolist()) for one in optimizer.state.values()]
    groups = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    hooks = [len(one._forward_hooks) + len(one._forward_pre_hooks) for one in model.modules()]
    modes = [(one.training, getattr(one, "p", None)) for one in model.modules()]
    return repr((names, [one.tolist() for one in tensors], moments, groups, hooks, modes, torch.get_rng_state().tolist()))
before = state()
"""
SLOW = "optimizer.param_groups[0]['lr'] = 1e-6\nbefore = state()"


@pytest.fixture
def ready(kernel: Kernel) -> Kernel:
    """A kernel with a training that has made a step."""
    ran = kernel.run(TRAINING)
    assert ran.status == "ok", ran.traceback
    return kernel


def _is_as_before(kernel: Kernel) -> bool:
    return kernel.value("state() == before") == "True"


@pytest.mark.parametrize(
    "line", ["model (x, y) loss_function optimizer", "model batch=(x, y) loss_function=F.cross_entropy optimizer=optimizer", "step"]
)
def test_a_training_that_learns(ready: Kernel, line: str) -> None:
    ran = ready.run(f"%overfit {line} -o o")
    assert ran.status == "ok", ran.traceback
    assert "overfits" in ran.text
    assert ready.value("(o.passed, o.cause, o.trials, o.last_loss < o.first_loss)") == "(True, None, (), True)"
    assert _is_as_before(ready)


@on_both_stacks
def test_a_stalled_training_is_shown_with_the_fix(ready: Kernel) -> None:
    assert ready.run(SLOW).status == "ok"
    ran = ready.run("%overfit model (x, y) loss_function optimizer -o o")
    assert ran.status == "ok", ran.traceback
    assert "learning rate" in ran.text
    assert "a training with this change learns the samples" in ran.text
    assert (ready.value("o.fix") or "?").strip("'\"") in ran.text
    assert ready.value("(o.passed, o.cause, o.verified, o.factor > 1, o.trials[-1].learns)") == "(False, 'learning_rate', True, True, True)"
    assert _is_as_before(ready)


@pytest.mark.parametrize(
    ("values", "error"),
    [
        ("model (x, torch.full((16,), 7)) loss_function optimizer", "IndexError"),
        ("model (x[:1], y[:1]) loss_function optimizer", "ValueError"),
    ],
    ids=["labels out of range", "BatchNorm with one sample"],
)
def test_the_report_of_a_step_that_raises_is_kept(ready: Kernel, values: str, error: str) -> None:
    ran = ready.run(f"%overfit {values} -o o")
    assert ran.outputs, ran.traceback
    assert ready.value("(o.passed, len(o.losses))") == "(False, 0)"
    assert error in (ready.value("o.error") or "") or ready.value("o.cause") == "'batchnorm_of_one'"
    assert _is_as_before(ready)


def test_stop_in_a_trial_restores_everything(ready: Kernel) -> None:
    assert ready.run(SLOW).status == "ok"
    ran = ready.run("%overfit interrupted_step")
    assert ran.ename == "KeyboardInterrupt", ran.text
    assert ready.value("next(calls)") == "251"
    assert _is_as_before(ready)
    assert ready.run("%overfit model (x, y) loss_function optimizer -o o").status == "ok"
    assert ready.value("o.cause") == "'learning_rate'"


@pytest.mark.parametrize(
    ("line", "says"), [("unknown (x, y)", "unknown"), ("step --steps 0", "--steps must be at least 1"), ("step --unknown", "--unknown")]
)
def test_wrong_use_is_said_in_a_line(ready: Kernel, line: str, says: str) -> None:
    ran = ready.run(f"%overfit {line}")
    assert ran.ename == "UsageError", ran.traceback or ran.text
    assert says in ran.evalue
    assert "\n" not in ran.evalue.strip()
    assert _is_as_before(ready)


@on_both_stacks
def test_help(ready: Kernel) -> None:
    assert "overfit [--steps N] [--samples N]" in ready.run("%overfit --help").text
    (page,) = ready.run("%overfit?").payload
    assert "A stalled training is repeated from the same start" in page["data"]["text/plain"]
