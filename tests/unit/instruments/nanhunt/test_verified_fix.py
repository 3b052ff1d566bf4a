"""A fix is code of the user's own, tried on the bad step; what made the bad numbers is found where it stands."""

from __future__ import annotations

import contextlib
import linecache
import math
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import torchdebug_magics
from torchdebug_magics import nanhunt
from torchdebug_magics.errors import NonFiniteError

if TYPE_CHECKING:
    from torchdebug_magics.report import Location

pytestmark = pytest.mark.filterwarnings("ignore")
X = torch.ones(4, 3)


def line_of(location: Location | None) -> str:
    return "" if location is None else location.source


def test_two_lines_of_a_module_are_changed_together_and_the_module_is_as_it_was() -> None:
    class Rooted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(3, 2)

        def spread(self, h: torch.Tensor) -> torch.Tensor:
            return torch.log(h.var(0).sum())

        def forward(self, x: torch.Tensor) -> Any:
            h = self.lin(x) * 0
            return h.sum().sqrt() + self.spread(h)

    model = Rooted()
    codes = Rooted.forward.__code__, Rooted.spread.__code__
    with nanhunt(keep_going=True) as session:
        model(X).backward()
    fix = session.report.finding.fix
    assert "`return torch.log(h.var(0).sum().clamp(min=1e-6))`" in fix
    assert "`return h.sum().clamp(min=1e-12).sqrt() + self.spread(h)`" in fix
    assert (Rooted.forward.__code__, Rooted.spread.__code__) == codes
    assert Rooted.forward.__code__ is codes[0]


def test_a_run_that_diverged_is_not_repaired_where_it_left_the_range() -> None:
    w = torch.ones(1, requires_grad=True)
    with nanhunt(keep_going=True) as session:
        for _ in range(40):
            loss = ((w * 30) ** 2).sum()
            loss.backward()
            w.data -= w.grad  # type: ignore[arg-type]
            w.grad.zero_()  # type: ignore[union-attr]
    finding = session.report.finding
    assert finding.diagnosis == "lr_too_high"
    assert "The run diverged" in session.report.verdict
    assert "write `" not in finding.fix
    assert "clip" not in finding.fix  # there is no step() to clip before


def test_a_parameter_that_nothing_fills_is_named_with_its_line() -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(3, 3)
            self.background = nn.Parameter(torch.empty(3))

        def forward(self, x: torch.Tensor) -> Any:
            return self.lin(x) + self.background

    model = Table()
    with torch.no_grad():
        model.background.fill_(math.nan)  # as memory may hold
    with pytest.raises(NonFiniteError) as caught, nanhunt():
        model(X).sum().backward()
    finding = caught.value.finding
    assert (finding.diagnosis, finding.tensor) == ("uninitialized_parameter", "background")
    assert line_of(finding.location) == "self.background = nn.Parameter(torch.empty(3))"
    assert "never initialized" in finding.sentence()


def test_a_parameter_that_is_filled_later_was_initialized() -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.background = nn.Parameter(torch.empty(3))
            nn.init.zeros_(self.background)

        def forward(self, x: torch.Tensor) -> Any:
            return x * self.background

    model = Table()
    with torch.no_grad():
        model.background.fill_(math.nan)
    with pytest.raises(NonFiniteError) as caught, nanhunt():
        model(X).sum().backward()
    assert caught.value.finding.diagnosis == "bad_parameter"


def test_a_batch_that_the_data_set_made_bad() -> None:
    class Standardized(Dataset[torch.Tensor]):
        def __init__(self) -> None:
            self.values = torch.rand(8, 4, 3) * torch.tensor([1.0, 1.0, 0.0])
            self.mean, self.std = self.values.mean((0, 1)), self.values.std((0, 1))
            self.reads: list[int] = []

        def __len__(self) -> int:
            return len(self.values)

        def __getitem__(self, index: int) -> torch.Tensor:
            self.reads.append(index)
            return (self.values[index] - self.mean) / self.std

    data, net = Standardized(), nn.Linear(3, 1)
    with nanhunt(keep_going=True, max_findings=1) as session:
        for batch in DataLoader(data, batch_size=4):
            net(batch).mean().backward()
            break
    finding = session.report.finding
    assert (finding.op, line_of(finding.location)) == ("div", "return (self.values[index] - self.mean) / self.std")
    assert "`return (self.values[index] - self.mean) / self.std.clamp(min=1e-8)`" in finding.fix
    assert data.reads == [0, 1, 2, 3]  # as if it had not been read again


def test_the_good_rows_of_data_of_any_rank() -> None:
    net, images = nn.Conv2d(1, 1, 1), torch.rand(3, 1, 2, 2)
    images[1, 0, 0, 0] = math.nan
    with pytest.raises(NonFiniteError) as caught, nanhunt():
        net(images).mean().backward()
    code = caught.value.finding.fix.partition("`")[2].partition("`")[0]
    assert eval(code, {"torch": torch, "images": images}).isfinite().all()


class Episode:
    """What ran before the update cannot be run again: its clock does not go back."""

    clock = 0

    @classmethod
    def length(cls) -> int:
        cls.clock += 3
        return 4 - cls.clock


def test_a_function_that_calls_backward_is_run_again_alone() -> None:
    net = nn.Linear(3, 1)

    def update(states: list[torch.Tensor]) -> None:
        values = net(torch.stack(states))
        advantage = values.detach() - values.detach().mean()
        loss = (values * (advantage / advantage.std())).mean()
        loss.backward()

    with nanhunt(keep_going=True) as session:
        states = []
        for _ in range(Episode.length()):
            states.append(X[0])
            net(X[0])
        update(states)
    finding = session.report.finding
    assert (finding.op, finding.diagnosis) == ("std", "zero_variance")
    assert "advantage.std(correction=0).clamp(min=1e-8)" in finding.fix


@pytest.mark.parametrize(
    ("body", "op"),
    [
        ("y = torch.log(x * 0) * 0", "log"),
        ("y = torch.log(x * 0) * 0\nprint(torch.isnan(y).sum())", None),
        ("y = torch.log(x * 0)", None),
        ("y = torch.full((3,), float('nan'))", None),
        ("y = torch.nan_to_num(torch.log(x * 0) * 0)", None),
        ("y = next(rows) / 0 * 0", None),
    ],
)
def test_a_cell_that_only_computes(body: str, op: str | None) -> None:
    file = f"<cell:computes {body}>"
    text = "with nanhunt() as session:\n" + "".join(f"    {line}\n" for line in body.splitlines())
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    names: dict[str, Any] = {"torch": torch, "nanhunt": nanhunt, "x": torch.ones(3), "rows": iter([torch.ones(3)] * 3)}
    exec(compile(text, file, "exec"), names)
    finding = names["session"].report.finding
    assert (finding.op if finding is not None else None) == op
    if op is not None:
        assert "rerun with it, the cell's result is finite" in finding.fix


def test_a_derivative_under_vmap_is_traced_to_its_line() -> None:
    class Forces(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> Any:
            def energy(v: torch.Tensor) -> torch.Tensor:
                return v.pow(2).sum().sqrt()

            return torch.vmap(torch.func.grad(energy))(self.lin(x) * 0)

    model = Forces()
    with pytest.raises(NonFiniteError) as caught, nanhunt():
        model(X).sum().backward()
    finding = caught.value.finding
    assert (finding.op, line_of(finding.location)) == ("sqrt", "return v.pow(2).sum().sqrt()")
    assert "v.pow(2).sum().clamp(min=1e-12).sqrt()" in finding.fix


class Stopped(nn.Module):
    """Interrupted in the middle of a replay."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.lin = nn.BatchNorm1d(3), nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> Any:
        h = self.norm(x)
        frame = sys._getframe()
        while frame.f_back is not None:
            frame = frame.f_back
            if frame.f_code.co_filename.endswith("rerun/step_rerun.py"):
                raise KeyboardInterrupt
        return self.lin(h)


def test_an_interrupt_in_a_replay_leaves_the_buffers_as_the_bad_step_did() -> None:
    model = Stopped()
    with contextlib.suppress(KeyboardInterrupt), nanhunt():
        loss = (model(torch.rand(4, 3)).sum() * 0).sqrt()
        after = {name: buffer.clone() for name, buffer in model.named_buffers()}
        loss.backward()
    assert all(torch.equal(buffer, after[name]) for name, buffer in model.named_buffers())


@pytest.mark.parametrize("grads", [True, False])
def test_tracing_inside_a_hunted_cell(grads: bool) -> None:
    class Doubles(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> Any:
            return self.lin(x.mul_(2))

    model = Doubles()
    plain = torch.jit.trace(model, X.clone())
    with nanhunt(), torch.set_grad_enabled(grads):
        model(X.clone())
        traced = torch.jit.trace(model, X.clone())
    kinds = [[node.kind() for node in one.inlined_graph.nodes()] for one in (plain, traced)]
    assert kinds[0] == kinds[1]


def test_infinities_are_called_infinities() -> None:
    assert torchdebug_magics.nanhunt(torch.full((4,), math.inf)).verdict.startswith("Inf in this tensor")
