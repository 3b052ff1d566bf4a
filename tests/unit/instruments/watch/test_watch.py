"""``%%torchdebug``: of several findings the cause leads, nothing is said of a healthy training, and the run is left as it is."""

from __future__ import annotations

import contextlib
import gc
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch

import torchdebug_magics
from tests.unit.instruments.watch.cells import FAULTS, HEALTHY, SETUP, TWO
from torchdebug_magics.fixes import fixed_source
from torchdebug_magics.html.page import Facts
from torchdebug_magics.instrument import SCRIPT
from torchdebug_magics.instruments.watch import INSTRUMENT
from torchdebug_magics.instruments.watch.probe import WatchProbe

if TYPE_CHECKING:
    from collections.abc import Iterable

    from _pytest.mark.structures import ParameterSet
    from IPython.core.interactiveshell import InteractiveShell

    from tests.doors import Door

WATCHED = {"nanhunt", "autograd", "gradwatch", "memtrace", "hangwatch"}


def by_turns(names: Iterable[str]) -> list[ParameterSet]:
    """Each case through one of the doors, the next through the other: what they share is tested for all of them elsewhere."""
    return [pytest.param(name, ("function", "magic")[place % 2], id=name) for place, name in enumerate(names)]


def marked(body: str) -> int | None:
    return next((number for number, line in enumerate(body.splitlines(), 2) if "# here" in line), None)


REPAIRED = {
    "broadcast_loss": ("model(x), y", "model(x).squeeze(-1), y"),
    "broadcast_module": ("model(x), target", "model(x).squeeze(-1), target"),
    "broadcast_by_hand": ("- model(x)", "- model(x).squeeze(-1)"),
    "shared_line_detach": (".detach()", ""),
    "zeros_returned": ("torch.zeros(len(x), 1)", "out"),
    "zeros_like_returned": ("torch.zeros_like(out)", "out"),
    "schedule_to_zero": ("gamma=0", "gamma=0.9"),
    "noise_from_before_the_step": (
        "/ (scores.max() - scores.min())",
        "/ torch.where(scores.max() - scores.min() == 0, 1.0, scores.max() - scores.min())",
    ),
    "detached_term": ("made.detach()", "made"),
    "state_of_an_earlier_step": ("/ first", "/ first.clamp(min=1e-8)"),
    "best_state_without_a_copy": ("model.state_dict()", "{name: value.clone() for name, value in model.state_dict().items()}"),
    "compared_with_itself": ("weight.data", "weight.data.detach().clone()"),
    "history_of_one_memory": ("weight.data", "weight.data.detach().clone()"),
    "history_of_states": ("model.state_dict()", "{name: value.clone() for name, value in model.state_dict().items()}"),
    "history_of_one_list": ("self.episode)", "list(self.episode))"),
    "function_ignores_its_gradient": ("3 * x ** 2", "grad_output * (3 * x ** 2)"),
    "plain_tensor_in_a_module": ("torch.randn(16, 1, requires_grad=True)", "nn.Parameter(torch.randn(16, 1))"),
    "frozen_part_in_training_mode": ("model.train()", "model.train()\nmodel.body.eval()"),
}
"""What the fix changes in the statement at fault, and nothing else."""


def watched(shell: InteractiveShell, *cells: str) -> Any:
    """The report that the last of the cells leaves in `w`."""
    for cell in (SETUP, *cells):
        shell.run_cell(cell, store_history=True)
    return shell.user_ns["w"]


@pytest.mark.parametrize(("name", "observe"), by_turns([*FAULTS, *TWO]), indirect=["observe"])
def test_the_cause_leads_and_its_fix_changes_the_statement_at_fault(observe: Door, name: str) -> None:
    cell = {**FAULTS, **TWO}[name]
    observed = observe("watch", cell.body, namespace=observe.plain(SETUP))
    report = observed.report
    assert report.instrument == cell.instrument, report.verdict
    assert (observed.error is not None) == cell.raises
    if (line := marked(cell.body)) is not None:
        assert report.location.line == line
    for magic in cell.also:
        assert any(said.startswith(f"{magic}: ") for said in report.consequences), report.consequences
    assert report.found
    assert report.finding == report.reports[report.instrument].main_finding()
    assert (report.verdict, report.fix) == (report.reports[report.instrument].verdict, report.reports[report.instrument].fix)
    rows = [row for block in INSTRUMENT.page(report).blocks if isinstance(block, Facts) for row in block.rows]
    assert tuple(said for name, said in rows if name == "also") == report.consequences
    if name in REPAIRED:
        (edit,) = report.edits
        assert (edit.line, edit.new) == (line, edit.old.replace(*REPAIRED[name]))
        assert edit.old in cell.body


@pytest.mark.parametrize(("name", "observe"), by_turns(HEALTHY), indirect=["observe"])
def test_nothing_is_said_of_a_healthy_training_and_it_is_left_as_it_is(observe: Door, name: str) -> None:
    results = []
    for is_watched in (False, True):
        names = dict(observe.plain(SETUP))
        if is_watched:
            observed = observe("watch", HEALTHY[name], namespace=names)
            report, names = observed.report, observed.namespace
        else:
            exec(HEALTHY[name], names)
        results.append([*names["model"].state_dict().values(), torch.get_rng_state()])
    assert (report.found, report.status, report.consequences, report.problems) == (False, "good", (), ()), report.verdict
    assert set(report.watched) <= WATCHED
    assert {"nanhunt", "memtrace", "hangwatch"} <= set(report.watched)
    assert all(torch.equal(plain_value, value) for plain_value, value in zip(*results, strict=True))


def test_a_statement_moves_out_of_a_line_that_others_stay_in(shell: InteractiveShell) -> None:
    report = watched(shell, f"\n\n%%torchdebug -o w\n{FAULTS['shared_line_order'].body}")  # which begins below empty lines
    (new,) = fixed_source(report).values()
    assert "    optimizer.zero_grad()\n    loss.backward(); optimizer.step()" in new


KEEPS_STATE = """\
class Leaky(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("state", torch.zeros(1))
        self.lin = nn.Linear(8, 1)
    def forward(self, x):
        self.state = 0.9 * self.state + self.lin(x)
        return torch.tanh(self.state)
net = nn.Sequential()
net.add_module("leaky", Leaky())
for part in range(3):
    loss = F.mse_loss(net(x), y)
    loss.backward()
    net.leaky.state.mul_(0)
"""


def test_a_state_that_a_module_keeps_is_named_as_the_loop_knows_it(shell: InteractiveShell) -> None:
    report = watched(shell, f"%%torchdebug -o w\n{KEEPS_STATE}")
    assert "`net.leaky.state = net.leaky.state.detach()`" in report.fix
    assert shell.run_cell(next(iter(fixed_source(report).values()))).success


CARRIED = """\
class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a):
        ctx.save_for_backward(a)
        return a * a
    @staticmethod
    def backward(ctx, gradient):
        (a,) = ctx.saved_tensors
        return 2 * a * gradient
state = torch.zeros(32, 1)
for part in x.split(8, 1) * 3:
    out = Square.apply(state + model(x))
    out.sum().backward()
    state = out
"""


@pytest.mark.parametrize("cells", [(CARRIED, "%torchdebug -o w"), (f"%%torchdebug -o w\n{CARRIED}",)], ids=["bare", "watched"])
def test_a_state_that_is_carried_over_is_named_by_both_doors(cells: tuple[str, ...], shell: InteractiveShell) -> None:
    report = watched(shell, *cells)
    assert "`state` carries the graph of the previous step" in report.verdict
    assert "`state = state.detach()`" in report.finding.fix


RECURRENT = """\
rnn, head = nn.GRU(1, 8, batch_first=True), nn.Linear(8, 1)
trained = torch.optim.Adam([*rnn.parameters(), *head.parameters()])
state, losses = torch.zeros(1, 32, 8), []
for part in x.split(8, 1) * 3:
    output, state = rnn(part.unsqueeze(-1), state)
    loss = head(output).square().mean()
    trained.zero_grad()
    loss.backward(retain_graph=True)
    trained.step()
    losses.append(loss.item())
    if len(losses) % 2:
        print(losses[-1])
"""


def test_a_graph_that_is_retained_and_carried_over_is_cut_and_not_the_update_moved(shell: InteractiveShell) -> None:
    report = watched(shell, f"%%torchdebug -o w\n{RECURRENT}")
    assert "`state` carries the graph of the previous step" in report.verdict
    fixed = next(iter(fixed_source(report).values()))
    assert "\n    state = state.detach()" in fixed  # behind the `if`, and not in it
    assert shell.run_cell(fixed.replace("%%torchdebug -o w\n", "")).success


AGAIN = """\
model = nn.Linear(8, 1)
for step in range(20):
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_an_optimizer_of_an_earlier_cell_is_made_again_where_its_model_is(shell: InteractiveShell) -> None:
    made = "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)"
    report = watched(shell, made, f"%%torchdebug -o w\n{AGAIN}")
    assert report.finding.kind == "stale_optimizer", report.verdict
    assert f"model = nn.Linear(8, 1)\n{made}\nfor" in next(iter(fixed_source(report).values()))


EVALUATED = """\
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for epoch in range(4):
    model.train()
    for part in x.split(8):
        optimizer.zero_grad()
        model(part).square().mean().backward()
        optimizer.step()
    model.eval()
    mean = 0
    for part in x[:16]:
        mean += model(part).square().mean()
"""


def test_a_graph_that_each_evaluation_adds_up_anew_is_named(shell: InteractiveShell) -> None:
    report = watched(shell, f"%%torchdebug -o w\n{EVALUATED}")
    assert (report.instrument, "`mean` keeps each iteration's graph" in report.verdict) == ("memtrace", True), report.verdict
    assert "mean += model(part).square().mean().detach()" in report.fix


SALIENCY = """\
model.eval()
maps = []
for _ in range(6):
    total, inputs = 0, []
    for part in x[:16].split(1):
        inputs.append(part.clone().requires_grad_())
        total = total + model(inputs[-1]).relu().sum()
    maps.append([gradient.mean(0) for gradient in torch.autograd.grad(total, inputs)])
"""


def test_a_sum_in_evaluation_mode_that_is_differentiated_is_no_leak(shell: InteractiveShell) -> None:
    report = watched(shell, f"%%torchdebug -o w\n{SALIENCY}")
    assert report.instrument is None, report.verdict


TWO_TASKS = """\
first, second = nn.Linear(1, 1), nn.Linear(1, 1)
one_task = torch.optim.SGD([*model.parameters(), *first.parameters()], 0.1)
other_task = torch.optim.SGD([*model.parameters(), *second.parameters()], 0.1)
average = torch.zeros(())
for step in range(10):
    hidden = model(x).relu()
    loss, other_loss = first(hidden).square().mean(), (second(hidden) - 1).square().mean()
    average = 0.9 * average + 0.1 * loss
    one_task.zero_grad()
    loss.backward(retain_graph=True)
    one_task.step()
    other_task.zero_grad()
    (other_loss + loss).backward(retain_graph=True)
    other_task.step()
"""


def test_what_a_loop_logs_is_not_blamed_for_an_update_that_comes_too_early(shell: InteractiveShell) -> None:
    report = watched(shell, f"%%torchdebug -o w\n{TWO_TASKS}")
    assert report.fix.endswith("after `one_task.step()`"), report.verdict
    assert not report.edits  # moved below, that update would follow the other loss: both optimizers hold the model


def test_a_cell_that_computes_nothing_is_not_called_fine() -> None:
    with torchdebug_magics.watch() as session:
        pass
    assert session.report.status == "info"
    assert session.report.verdict.startswith("Nothing to watch")


def test_an_instrument_that_cannot_begin_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    probe = WatchProbe(SCRIPT, guard=None)

    def refuse(*_: object) -> None:
        msg = "no room"
        raise RuntimeError(msg)

    monkeypatch.setattr(type(probe._sessions["gradwatch"]._probe), "attach", refuse)
    with torchdebug_magics.watch() as session:
        torch.ones(2, requires_grad=True).sum().backward()
    assert session.report.problems == ("%%gradwatch could not begin: RuntimeError: no room",)
    assert "nanhunt" in session.report.watched


def test_the_guard_is_that_of_memtrace() -> None:
    with pytest.raises(torchdebug_magics.TorchDebugError, match="guard"):
        torchdebug_magics.watch(guard="nonsense")


@pytest.mark.parametrize("part", ["report", "_ended"])
@pytest.mark.parametrize("error", [None, KeyError("of the user")])
def test_an_instrument_that_fails_at_its_end_costs_its_own_report_alone(
    monkeypatch: pytest.MonkeyPatch, part: str, error: Exception | None
) -> None:
    def fail(*_: object) -> None:
        msg = "ours"
        raise RuntimeError(msg)

    monkeypatch.setattr(type(WatchProbe(SCRIPT, guard=None)._sessions["nanhunt"]._probe), part, fail)
    session = torchdebug_magics.watch()
    with pytest.raises(KeyError) if error is not None else contextlib.nullcontext(), session:
        torch.ones(2, requires_grad=True).sum().backward()
        if error is not None:
            raise error
    assert set(session.report.reports) >= WATCHED - {"nanhunt"}
    assert "RuntimeError: ours" in session.report.problems[0]


def test_the_error_of_the_cell_is_not_kept() -> None:
    class Large:
        pass

    def fails() -> weakref.ref[Large]:
        large = Large()
        raise KeyError(weakref.ref(large))

    session = torchdebug_magics.watch()
    try:
        with session:
            fails()
    except KeyError as error:
        kept = error.args[0]
        error.__traceback__ = None
    gc.collect()
    assert session.report.error.startswith("KeyError")
    assert kept() is None


def test_a_nan_whose_error_was_handled_does_not_explain_what_came_later(observe: Door) -> None:
    body = "try:\n    torch.log(model(x) - 10).mean().backward()\nexcept Exception:\n    pass\nmodel(torch.ones(4, 9))\n"
    report = observe("watch", body, namespace=observe.plain(SETUP)).report
    assert (report.instrument, report.location.line) == ("shapes", 6)
    assert report.consequences[0].startswith("%%nanhunt: NaN from log")
