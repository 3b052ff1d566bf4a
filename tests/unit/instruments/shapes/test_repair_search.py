"""The fixes that are called verified hold for real, leave the model alone, and are looked for within bounds."""

from __future__ import annotations

import copy
import importlib.util
import inspect
import itertools
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from torchdebug_magics.instruments.shapes import explain
from torchdebug_magics.instruments.shapes.explain import diagnosed
from torchdebug_magics.instruments.shapes.forward_table import examine_model, see
from torchdebug_magics.instruments.shapes.repair import trial
from torchdebug_magics.instruments.shapes.repair.failure_facts import facts_of
from torchdebug_magics.instruments.shapes.repair.trial import Trials

if TYPE_CHECKING:
    from torchdebug_magics.instruments.shapes.report import Failure


def planted() -> list[Any]:
    """The cases of all files, each made once."""
    return [
        case
        for name in ("test_repair_planted", "test_repair_causes", "test_repair_everyday", "test_repair_meant")
        for case in _module(name).PLANTED.cases
    ]


def _module(stem: str) -> Any:
    name = f"shapes_{stem}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{stem}.py"))
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def typed(model: nn.Module, failure: Failure, code: str, arguments: dict[str, Any]) -> bool:
    """Do what the code says, for real; False where it edits the middle of the forward."""
    for line in code.splitlines():
        target, is_assignment, value = line.partition(" = ")
        known = {"torch": torch, "nn": nn, "F": nn.functional}
        if is_assignment and target in arguments:
            if len(failure.chain) > 1:
                return False
            arguments[target] = eval(value, known, arguments)
        elif is_assignment and value.startswith("nn.") and target.isidentifier():
            setattr(model, target, eval(value, known))
        elif (is_assignment and value.startswith("nn.")) or line.startswith("model."):
            exec(line, known, {"model": model, **dict(model.named_children())})
        else:
            return False
    return True


@pytest.mark.parametrize("one", [one for one in planted() if one.fix and one.fix.split(" ")[0] != "model"], ids=lambda one: one.name)
def test_a_verified_fix_holds_for_real(one: Any) -> None:
    torch.manual_seed(0)
    model, *inputs = one.build()
    failure = examine_model(model, *inputs).report.failure
    assert failure is not None
    for fix in failure.fixes:
        arguments = dict(inspect.signature(model.forward).bind(*inputs).arguments)
        repaired = copy.deepcopy(model)
        if fix.verified and typed(repaired, failure, fix.code, arguments):
            repaired(**arguments)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.fc = nn.Linear(6, 8)
        self.kept: list[torch.Tensor] = []

    def forward(self, x: Any) -> Any:
        self.kept.append(x)
        return self.fc(self.norm(x))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: Any) -> Any:
        for block in self.blocks:
            x = block(x)
        return x


def test_trials_leave_the_model_as_it_was() -> None:
    model, x = Net(), torch.randn(4, 8)
    before = {path: dict(one.__dict__) for path, one in model.named_modules()}
    tables = {path: (dict(one._modules), dict(one._parameters), dict(one._buffers)) for path, one in model.named_modules()}
    values = {name: (one.clone(), one._version) for name, one in model.state_dict(keep_vars=True).items()}
    state = torch.get_rng_state()
    failure = examine_model(model, x).report.failure
    assert failure is not None
    assert torch.equal(torch.get_rng_state(), state)
    assert [fix.code for fix in failure.fixes if fix.verified] == ["blocks[0].fc = nn.Linear(8, 8)\nblocks[1].fc = nn.Linear(8, 8)"]
    for path, one in model.named_modules():
        assert one.__dict__.keys() == before[path].keys()
        assert all(one.__dict__[name] is value for name, value in before[path].items())
        assert (dict(one._modules), dict(one._parameters), dict(one._buffers)) == tables[path]
        assert not getattr(one, "kept", [])
    for name, one in model.state_dict(keep_vars=True).items():
        assert torch.equal(one, values[name][0])
        assert one._version == values[name][1]


def test_facts_alone_give_the_same_words_and_fixes_that_are_not_tried() -> None:
    seen = see(Net(), (torch.randn(4, 8),), {})
    assert seen.error is not None
    failure = diagnosed(facts_of(seen.run, seen.error), seen.error)
    assert failure.explanation == "`blocks.0.fc` expects 6 features, gets 8 from the input `x`"
    assert [(fix.code, fix.verified) for fix in failure.fixes] == [("blocks[0].fc = nn.Linear(8, 8)", False)]


def test_no_more_trials_than_allowed() -> None:
    seen = see(Net(), (torch.randn(4, 8),), {})
    trials = Trials(seen.model, seen.inputs, most=1)
    assert trials.left
    trials.run([])
    assert not trials.left


def test_a_slow_model_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explain, "_TOO_SLOW_S", 0.2)

    class Slow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 2)

        def forward(self, x: Any) -> Any:
            began = time.thread_time()
            while time.thread_time() < began + 0.3:
                pass
            return self.fc(x)

    failure = examine_model(Slow(), torch.randn(3, 5)).report.failure
    assert failure is not None
    assert [(fix.code, fix.verified) for fix in failure.fixes] == [("fc = nn.Linear(5, 2)", False)]


def test_one_module_made_anew_twice_is_one_edit() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(7, 3)

        def forward(self, x: Any) -> Any:
            return self.fc(x) + x

    failure = examine_model(Net(), torch.randn(4, 8)).report.failure
    assert failure is not None
    assert [(fix.code, fix.edits, fix.verified) for fix in failure.fixes] == [("fc = nn.Linear(8, 8)", 1, True)]


def test_five_errors_in_a_row() -> None:
    model = nn.Sequential(*(nn.Linear(width, width + 3) for width in range(4, 16, 2)))
    failure = examine_model(model, torch.randn(3, 4)).report.failure
    assert failure is not None
    code = "\n".join(f"model[{at}] = nn.Linear({width - 2 + 3}, {width + 3})" for at, width in enumerate(range(4, 16, 2)) if at)
    assert [(fix.code, fix.edits, fix.verified) for fix in failure.fixes[:1]] == [(code, 5, True)]


def test_what_a_trial_prints_and_warns_is_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    class Loud(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 2)

        def forward(self, x: Any) -> Any:
            print("here")
            return self.fc(x)

    failure = examine_model(Loud(), torch.randn(3, 5)).report.failure
    assert failure is not None
    assert failure.fixes[0].verified
    assert capsys.readouterr().out.count("here") <= 2


def test_a_meta_model_gets_its_fix() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 8), nn.Linear(9, 2))
    failure = examine_model(model, (3, 4)).report.failure
    assert failure is not None
    assert (failure.fixes[0].code, failure.fixes[0].verified) == ("model[1] = nn.Linear(8, 2)", True)


def test_a_forward_that_needs_data_after_the_failure_is_tried_for_real() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 2)

        def forward(self, x: Any) -> Any:
            y = self.fc(x)
            return y if y.sum().item() > 0 else -y

    failure = examine_model(Net(), torch.randn(3, 5)).report.failure
    assert failure is not None
    assert (failure.fixes[0].code, failure.fixes[0].verified) == ("fc = nn.Linear(5, 2)", True)


@pytest.mark.parametrize(
    ("forward", "modules", "x", "right"),
    [
        (
            lambda self, x: self.b(torch.cat([self.a(x), x], 0)),
            {"a": nn.Linear(4, 4), "b": nn.Linear(8, 3)},
            torch.randn(2, 4),
            "torch.cat([self.a(x), x], -1)",
        ),
        (
            lambda self, x: self.b(self.a(x).flatten()),
            {"a": nn.Conv2d(3, 4, 3), "b": nn.Linear(144, 3)},
            torch.randn(2, 3, 8, 8),
            "self.a(x).flatten(1)",
        ),
    ],
    ids=["cat along the batch", "flatten with the batch"],
)
def test_a_layer_that_swallows_the_batch_is_no_verified_fix(
    forward: Any, modules: dict[str, nn.Module], x: torch.Tensor, right: str
) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name, module in modules.items():
                self.add_module(name, module)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return forward(self, x)

    fixes = examine_model(Model(), x).report.failure.fixes
    assert [fix.code for fix in fixes if fix.verified] == [right]
    assert "nn.Linear" not in right


@pytest.mark.parametrize(("computes_s", "through"), [(0.0, True), (9.0, False)])
def test_a_busy_machine_finds_the_same_fixes_and_only_what_is_computed_counts(
    computes_s: float, through: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, computed = itertools.count(step=2.0), itertools.count(step=computes_s)
    monkeypatch.setattr(trial, "time", SimpleNamespace(monotonic=lambda: next(clock), thread_time=lambda: next(computed)))
    failure = examine_model(Net(), torch.randn(4, 8)).report.failure
    assert failure is not None
    assert any(fix.verified for fix in failure.fixes) is through
