"""What the ritual sets while the cell runs, and that nothing of it is left, whatever the cell does."""

from __future__ import annotations

import contextlib
import os
import random
import sys
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

import torchdebug_magics
from tests.unit.instruments.deterministic.everything import flags, random_states
from torchdebug_magics.errors import TorchDebugError

if TYPE_CHECKING:
    from types import FrameType

    from tests.doors import Observe
    from tests.torch_forks import TorchForks

DRAW = "import random, numpy, torch\ndrawn = random.random(), numpy.random.rand(), torch.rand(3).tolist(), torch.randperm(5).tolist()\n"


def test_an_empty_body(observe: Observe):
    before = flags(), random_states()
    report = observe("deterministic", "", seed=7).report
    assert (flags(), random_states()) == before
    assert (report.seed, report.restored, report.problems, report.warnings, report.overruled) == (7, True, (), (), ())
    assert report.verdict.startswith("Seeded with 7; ")
    assert report.verdict.endswith("settings changed and restored")


COMPILER_LATER = """
import sys, torch, torchdebug_magics
with torchdebug_magics.deterministic() as outer:
    torch.rand(1)
    assert "torch._inductor.config" not in sys.modules, "that takes seconds"
    with torchdebug_magics.deterministic() as inner:
        import torch._inductor.config
        assert torch._inductor.config.deterministic is True
    assert torch._inductor.config.deterministic is True, "the outer one goes on"
assert torch._inductor.config.deterministic is False
assert (outer.report.restored, inner.report.restored) == (True, True)
assert outer.report.problems == outer.report.overruled == ()
"""


def test_the_compiler_is_not_imported_and_is_set_when_the_cell_imports_it(torch_forks: TorchForks) -> None:
    torch_forks.check(COMPILER_LATER)


def test_every_switch_is_set_inside(observe: Observe):
    body = """
import os, torch
seen = {
    "mode": (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
    "fill": torch.utils.deterministic.fill_uninitialized_memory,
    "cudnn": (torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark),
    "old": (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32, torch.get_float32_matmul_precision()),
    "new": [one.fp32_precision for one in (torch.backends.cuda.matmul, torch.backends.cudnn.conv, torch.backends.mkldnn.matmul)],
    "environment": (os.environ["PYTHONHASHSEED"], os.environ["CUBLAS_WORKSPACE_CONFIG"]),
}
"""
    torch.backends.cudnn.benchmark = True
    torch.set_float32_matmul_precision("medium")
    before = flags()
    observed = observe("deterministic", body, seed=3)
    assert flags() == before
    assert observed.namespace["seen"] == {
        "mode": (True, True),
        "fill": True,
        "cudnn": (True, False),
        "old": (False, False, "highest"),
        "new": ["ieee", "none", "ieee"],
        "environment": ("3", ":4096:8"),
    }
    assert observed.report.settings["cudnn.benchmark"] == (True, False)
    assert observed.report.settings["float32_matmul_precision"] == ("medium", "highest")
    assert "fill_uninitialized_memory" not in observed.report.settings  # as it stood so already


@pytest.mark.parametrize("whole", [False, True])
def test_tf32_is_off_where_only_the_new_words_were_used(whole: bool):
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    if whole:
        torch.backends.fp32_precision = "tf32"
    before = flags()
    assert "at odds with the new ones" in before["old words"]
    with torchdebug_magics.deterministic():
        inside = flags()
        assert not {value for name, value in inside.items() if name.endswith("fp32_precision")} & {"tf32", "bf16"}
    assert flags() == before


def test_torchs_old_words_can_be_read_and_used_in_the_cell(observe: Observe):
    observed = observe("deterministic", "import torch\nwith torch.backends.cudnn.flags(enabled=False):\n    pass\nx = torch.ones(2)")
    assert observed.error is None


@pytest.mark.keeps_rng
def test_the_same_numbers_twice_and_the_generators_as_before(observe: Observe):
    before = random_states()
    first, second = (observe("deterministic", DRAW, seed=5).namespace["drawn"] for _ in range(2))
    assert first == second
    assert observe("deterministic", DRAW, seed=6).namespace["drawn"] != first
    assert random_states() == before


def test_kept_generators_go_on_from_where_the_cell_left_them(observe: Observe):
    observed = observe("deterministic", DRAW, seed=5, keep_rng=True)
    torch.manual_seed(5)
    torch.rand(3)
    torch.randperm(5)
    expected = torch.rand(1).item()
    observe("deterministic", DRAW, seed=5, keep_rng=True)
    assert torch.rand(1).item() == expected
    assert observed.report.restored
    assert "RNG states kept" in observed.report.verdict


def test_an_error_inside_is_the_users(observe: Observe):
    before = flags(), random_states()
    observed = observe("deterministic", DRAW + "1 / 0")
    assert isinstance(observed.error, ZeroDivisionError)
    assert observed.report.restored
    assert (flags(), random_states()) == before


def test_strict_raises_torchs_own_error_at_the_users_line(observe: Observe):
    observed = observe("deterministic", "import torch\nx = torch.zeros(4)\nx.put_(torch.tensor([0]), torch.ones(1))", strict=True)
    assert isinstance(observed.error, RuntimeError)
    assert "put_ does not have a deterministic implementation" in str(observed.error)
    trace = observed.error.__traceback__
    while trace.tb_next is not None:
        trace = trace.tb_next
    assert trace.tb_lineno == 4
    assert not torch.are_deterministic_algorithms_enabled()


def test_who_has_torch_raise_goes_on_to_see_it_raise(observe: Observe):
    torch.use_deterministic_algorithms(True)
    observed = observe("deterministic", "import torch\ntorch.zeros(4).put_(torch.tensor([0]), torch.ones(1))")
    assert isinstance(observed.error, RuntimeError)
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.is_deterministic_algorithms_warn_only_enabled()


def test_what_the_cell_sets_itself_is_put_back_and_said(observe: Observe):
    body = "import torch\ntorch.use_deterministic_algorithms(False)\ntorch.backends.cudnn.benchmark = True\ntorch.set_num_threads(1)"
    before = flags()
    report = observe("deterministic", body).report
    assert flags() == before
    assert report.overruled == ("the cell changed cudnn.benchmark to True; restored to False",)


def test_failing_while_attaching_leaves_nothing(monkeypatch: pytest.MonkeyPatch):
    before = flags(), random_states()
    monkeypatch.setattr(torch, "manual_seed", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError), torchdebug_magics.deterministic():
        pass
    assert (flags(), random_states()) == before


def test_nested_in_itself_each_puts_back_what_it_found():
    before = flags(), random_states()
    with torchdebug_magics.deterministic(seed=1) as outer:
        first = torch.rand(2).tolist()
        between = flags(), random_states()
        with torchdebug_magics.deterministic(seed=1, strict=True) as inner:
            assert torch.rand(2).tolist() == first
            with pytest.raises(RuntimeError, match="put_"):
                torch.zeros(4).put_(torch.tensor([0]), torch.ones(1))
        assert (flags(), random_states()) == between
        torch.zeros(4).put_(torch.tensor([0]), torch.ones(1))
    assert (flags(), random_states()) == before
    assert inner.report.restored
    assert [one.op for one in outer.report.warnings] == ["put_"]


@pytest.mark.parametrize("other", ["nanhunt", "memtrace"])
def test_nested_with_another_in_either_order(other: str):
    before = flags(), random_states()
    drawn = []
    for names in ((other, "deterministic"), ("deterministic", other)):
        with getattr(torchdebug_magics, names[0])(), getattr(torchdebug_magics, names[1])():
            model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout())
            loss = model(torch.randn(2, 4)).square().mean()
            loss.backward()
            drawn.append(loss.item())
    assert drawn[0] == drawn[1]
    assert (flags(), random_states()) == before


# --- after any cell --------------------------------------------------------------------------------------------------------------

STATEMENTS = [
    "random.random()", "random.seed(1)", "np.random.rand()", "np.random.seed(9)", "torch.rand(2)", "torch.manual_seed(11)", "rng.random()",
    "generator.manual_seed(8)", "torch.rand(1, generator=generator)", "own.random()", "legacy.rand()",
    "torch.use_deterministic_algorithms(False)", "torch.use_deterministic_algorithms(True)", "torch.backends.cudnn.benchmark = True",
    "torch.backends.cudnn.deterministic = False", "torch.backends.cudnn.allow_tf32 = True", "torch.set_float32_matmul_precision('high')",
    "torch.backends.cuda.matmul.fp32_precision = 'tf32'", "torch.backends.fp32_precision = 'tf32'",
    "torch.backends.cudnn.conv.fp32_precision = 'ieee'", "torch.backends.mkldnn.matmul.fp32_precision = 'bf16'",
    "torch.utils.deterministic.fill_uninitialized_memory = False", "torch._inductor.config.deterministic = False",
    "os.environ.pop('PYTHONHASHSEED')", "os.environ['CUBLAS_WORKSPACE_CONFIG'] = ':16:8'",
    "torch.zeros(4).put_(torch.tensor([0]), torch.ones(1))", "torch.cuda.manual_seed_all(4)",
]  # fmt: skip
ENDS = ["", "1 / 0", "raise KeyboardInterrupt", "raise SystemExit(3)"]
OPTIONS: list[dict[str, Any]] = [{"seed": 0}, {"seed": 2**32 - 1}, {"strict": True}]


@pytest.mark.parametrize("round_", range(60))
def test_after_any_cell_all_is_as_before(round_: int):
    chosen = random.Random(round_)
    names = {
        "random": random, "np": np, "torch": torch, "os": os, "rng": np.random.default_rng(1), "generator": torch.Generator(),
        "own": random.Random(2), "legacy": np.random.RandomState(3),
    }  # fmt: skip
    for statement in chosen.sample(STATEMENTS[11:21], chosen.randrange(3)):
        exec(statement, names)
    if chosen.random() < 0.5:
        exec(chosen.choice(STATEMENTS[:11]), names)
    body = [*chosen.choices(STATEMENTS, k=chosen.randrange(1, 8)), chosen.choice(ENDS)]
    generators = names["rng"], names["generator"], names["own"], names["legacy"]
    before, states = flags(), random_states(*generators)
    session = torchdebug_magics.deterministic(**chosen.choice(OPTIONS))
    with contextlib.suppress(ZeroDivisionError, KeyboardInterrupt, SystemExit, RuntimeError, KeyError), session:
        exec("\n".join(body), names)
    assert flags() == before, body
    assert random_states(*generators) == states, body
    assert session.report.restored, body
    assert session.report.problems == ()
    torch.utils.deterministic.fill_uninitialized_memory = True


def interrupting(at: int) -> Any:
    """A trace function that raises at the n-th line of the ritual's own code."""
    left = [at]

    def trace(frame: FrameType, event: str, _: object) -> Any:
        if "/deterministic/" not in frame.f_code.co_filename or "torchdebug_magics" not in frame.f_code.co_filename:
            return None
        left[0] -= event == "line"
        if left[0] == 0:
            raise KeyboardInterrupt
        return trace

    return trace


@pytest.mark.parametrize("at", range(1, 1100, 8))
def test_an_interrupt_anywhere_in_it_leaves_nothing(at: int):
    rng = np.random.default_rng(1)
    torch.backends.cudnn.benchmark = True
    before, states = flags(), random_states(rng)
    sys.settrace(interrupting(at))
    try:
        with torchdebug_magics.deterministic():
            rng.random()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(None)
    assert flags() == before
    assert random_states(rng) == states


# --- wrong use -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [-1, 2**32, True, "7", 1.5, None])
def test_a_seed_out_of_range_is_refused_in_one_line(seed: object):
    with pytest.raises(TorchDebugError, match="a seed must be an integer from 0 to 4294967295"):
        torchdebug_magics.deterministic(seed=seed)


def test_a_numpy_integer_is_a_seed():
    with torchdebug_magics.deterministic(seed=np.int64(4)) as session:
        pass
    assert session.report.seed == 4
    assert type(session.report.seed) is int


def test_a_setting_that_refuses_is_a_problem_and_not_the_cells_error(monkeypatch: pytest.MonkeyPatch, observe: Observe):
    monkeypatch.setattr(torch, "set_deterministic_debug_mode", lambda *_, **__: 1 / 0)
    observed = observe("deterministic", "x = 1")
    assert observed.error is None
    assert observed.report.problems == ("setting deterministic_algorithms failed: ZeroDivisionError: division by zero",)


def test_attention_is_left_to_math_where_torch_knows_gpus_and_only_warns(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    before = flags()
    with torchdebug_magics.deterministic():
        assert flags()["sdpa"] == [True, False, False, False]
    assert flags() == before
    with torchdebug_magics.deterministic(strict=True):
        assert flags()["sdpa"] == before["sdpa"]


def test_the_users_own_filters_of_warnings_hold_on():
    filters = list(warnings.filters)
    with torchdebug_magics.deterministic():
        warnings.filterwarnings("ignore", "mine", UserWarning)
        torch.zeros(4).put_(torch.tensor([0]), torch.ones(1))
    assert [one for one in warnings.filters if one not in filters] == [warnings.filters[0]]
    warnings.filters.pop(0)
