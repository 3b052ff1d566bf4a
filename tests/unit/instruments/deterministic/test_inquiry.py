"""Options that ask more of a run than the ritual: --verify and what it refuses, --against, --save, --rtol, --cost, verify(function)."""

from __future__ import annotations

import functools
import json
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from IPython.core.error import UsageError

import torchdebug_magics
from torchdebug_magics.errors import DeterminismError, TorchDebugError
from torchdebug_magics.instruments.deterministic.fingerprint import Fingerprint

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

SETUP = (
    "import torch\nfrom torch import nn\nnet = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.3), nn.Linear(16, 3))\nX = torch.randn(8, 6)"
)
BODY = "y = net(X)\nz = y.sum()"


@pytest.fixture
def ready(shell: InteractiveShell) -> InteractiveShell:
    shell.run_cell(SETUP).raise_error()
    return shell


def report(shell: InteractiveShell, flags: str, body: str = BODY) -> Any:
    shell.user_ns.pop("d", None)
    shell.run_cell(f"%%deterministic -q -o d {flags}\n{body}", store_history=True)
    return shell.user_ns["d"]


def test_a_kept_report_is_a_reference(ready: InteractiveShell) -> None:
    ready.run_cell(f"%%deterministic -q -o ref\n{BODY}", store_history=True).raise_error()
    same = report(ready, "--against ref")
    assert (same.verified, same.against, same.ops_count) == (True, "ref", len(ready.user_ns["ref"].fingerprint))
    assert "ref" in same.verdict


def test_the_first_op_that_differs_from_a_reference(ready: InteractiveShell) -> None:
    ready.run_cell(f"%%deterministic -q -o ref\n{BODY}", store_history=True).raise_error()
    ready.run_cell("with torch.no_grad(): net[2].weight[1, 2] += 1e-6")
    found = report(ready, "--against ref").divergence
    # The weight is met for the first time where it is transposed.
    assert (found.op, found.module, found.cause, found.location.line) == ("aten.t.default", "2", "outside_data", 2)
    assert found.fix.startswith("create or load")
    ready.run_cell("with torch.no_grad(): net[2].weight[1, 2] -= 1e-6")


def test_another_seed_is_seen_where_numbers_are_drawn(ready: InteractiveShell) -> None:
    ready.run_cell(f"%%deterministic -q -o ref\n{BODY}", store_history=True).raise_error()
    found = report(ready, "--against ref --seed 3").divergence
    assert (found.op, found.module, found.cause) == ("aten.bernoulli_.float", "1", "unseeded_generator")


def test_another_way(ready: InteractiveShell) -> None:
    ready.run_cell(f"%%deterministic -q -o ref\n{BODY}", store_history=True).raise_error()
    found = report(ready, "--against ref", "y = net(X)\nz = y.mean()").divergence
    assert (found.cause, found.op, found.location.source, found.other.source) == (
        "control_flow",
        "aten.mean.default",
        "z = y.mean()",
        "z = y.sum()",
    )


def test_a_file_serves_another_process(ready: InteractiveShell, tmp_path: Path) -> None:
    file = tmp_path / "ref.json"
    saved = report(ready, f"--save {file}")
    held = Fingerprint.from_dict(json.loads(file.read_text(encoding="utf-8"))["fingerprint"])
    assert held == saved.fingerprint
    assert 0 < len(held.records) / len(held) < 100
    assert report(ready, f"--against {file}").verified is True


def test_a_tolerance_passes_by_what_is_small(ready: InteractiveShell) -> None:
    ready.run_cell(f"%%deterministic -q -o ref\n{BODY}", store_history=True).raise_error()
    ready.run_cell("with torch.no_grad(): net[2].weight.mul_(1 + 1e-6)")
    assert report(ready, "--against ref --rtol 1e-3").verified is True
    ready.run_cell("with torch.no_grad(): net[2].weight.mul_(1.1)")
    found = report(ready, "--against ref --rtol 1e-3").divergence
    assert (found.op, found.module, found.location.line) == ("aten.addmm.default", "2", 2)
    # Its weight is not what it was: nobody may say that its inputs were equal.
    assert (found.cause, "differs from the earlier run, first at `aten.t.default`" in found.explanation) == ("outside_data", True)
    assert found.fix.startswith("create or load")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--against nothing", "not the name of a report kept with"),
        ("--against X", "not the name of a report kept with"),
        ("--rtol 0.1", "--rtol requires --against"),
        ("--rtol -1 --against X", "--rtol must be a number >= 0"),
        ("--rtol nan --against X", "--rtol must be a number >= 0"),
        ("--seed -1", "a seed must be an integer"),
    ],
)
def test_what_was_asked_in_the_wrong_way_is_one_line(ready: InteractiveShell, flags: str, said: str) -> None:
    ran = ready.run_cell(f"%%deterministic {flags}\nran = 1", store_history=True)
    assert isinstance(ran.error_in_exec, UsageError)
    assert said in str(ran.error_in_exec)
    assert "ran" not in ready.user_ns


def test_two_questions_get_the_answer_that_matters(ready: InteractiveShell) -> None:
    ready.run_cell(f"%%deterministic -q -o ref\n{BODY}", store_history=True).raise_error()
    assert report(ready, "--against ref --verify").verified is True
    found = report(ready, "--against ref --verify --seed 3")
    assert (found.verified, found.against, found.divergence.op) == (False, "ref", "aten.bernoulli_.float")
    found = report(ready, "--against ref --verify", "y = torch.seed()\nz = torch.rand(2)")
    assert (found.verified, found.against, found.divergence.op) == (False, "", "aten.rand.default")


def test_other_magics_around_the_body(ready: InteractiveShell, capsys: pytest.CaptureFixture[str]) -> None:
    assert report(ready, "--verify", f"%%capture kept\n{BODY}\nprint('inside')").verified is True
    assert ready.user_ns["kept"].stdout == "inside\n"
    assert report(ready, "--verify", f"%%time\n{BODY}").verified is True
    assert "%%html" in report(ready, "--verify", "%%html\n<b>").not_verified
    ready.run_cell(f"%%time\n%%deterministic --verify -q -o d\n{BODY}", store_history=True).raise_error()
    assert "write `%%deterministic` first" in ready.user_ns["d"].verdict


def test_a_line_that_lasts_cannot_be_run_again(ready: InteractiveShell) -> None:
    ran = ready.run_cell("%deterministic --verify")
    assert isinstance(ran.error_in_exec, UsageError)
    assert "verify(function)" in str(ran.error_in_exec)
    assert not torch.are_deterministic_algorithms_enabled()


# --- what a second run cannot find ---------------------------------------------------------------------------------------------


def test_a_second_run_says_nothing(ready: InteractiveShell, capsys: pytest.CaptureFixture[str]) -> None:
    assert report(ready, "--verify", "print('once')\ny = net(X)\nprint(y.shape)").verified is True
    assert capsys.readouterr().out.count("once") == 1


def test_an_answer_is_typed_once(ready: InteractiveShell, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr("builtins.input", lambda prompt="": asked.append(prompt) or "3")
    found = report(ready, "--verify", "n = int(input('how many? '))\ny = torch.ones(n) * 2")
    assert asked == ["how many? "]
    assert found.verified is True
    assert found.unrestorable == ("the answer typed for `input()`",)


def test_a_file_is_written_once(ready: InteractiveShell, tmp_path: Path) -> None:
    log, new = tmp_path / "log.txt", tmp_path / "new.txt"
    log.write_text("before\n", encoding="utf-8")
    body = f"""\
with open({str(log)!r}, "a") as file:
    file.write("line\\n")
from pathlib import Path
Path({str(new)!r}).write_text("new")
y = net(X) * len(Path({str(log)!r}).read_text())
"""
    found = report(ready, "--verify", body)
    assert found.verified is True
    assert found.unrestorable == ()
    assert log.read_text(encoding="utf-8") == "before\nline\n"
    assert new.read_text(encoding="utf-8") == "new"


@pytest.mark.parametrize(
    ("write", "read"),
    [
        ("torch.save(net.state_dict(), 'made')", "torch.load('made')['0.weight']"),
        ("torch.save(net.state_dict(), 'made', _use_new_zipfile_serialization=False)", "torch.load('made')['0.weight']"),
        ("np.save('made.npy', net[0].weight.detach().numpy())", "torch.from_numpy(np.load('made.npy'))"),
        ("open('made', 'w').write(repr(net[0].weight.tolist()))", "torch.tensor(eval(open('made').read()))"),
    ],
    ids=["torch.save", "torch.save, the old form", "a library", "open"],
)
def test_a_file_is_that_of_the_first_run(ready: InteractiveShell, write: str, read: str) -> None:
    body = f"""\
import os, numpy as np
with torch.no_grad():
    net[0].weight.add_(int.from_bytes(os.urandom(6), 'little'))
{write}
again = {read}"""
    found = report(ready, "--verify", body)
    ready.run_cell(f"import numpy as np\nheld = {read}").raise_error()
    assert found.divergence.cause == "os_entropy"
    assert torch.equal(ready.user_ns["held"], ready.user_ns["again"])
    assert torch.equal(ready.user_ns["held"], ready.user_ns["net"][0].weight)
    for path in (Path("made"), Path("made.npy")):
        path.unlink(missing_ok=True)


def test_a_file_that_a_library_moves_is_the_librarys(ready: InteractiveShell) -> None:
    body = """\
import logging, os, tempfile
y = net(X)
from nbformat import write, v4
write(v4.new_notebook(), 'new.ipynb')
os.replace('new.ipynb', 'old.ipynb')"""
    assert report(ready, "--verify", body).verified is True
    assert Path("old.ipynb").exists()
    Path("old.ipynb").unlink()


def test_a_consumed_iterator_is_named(ready: InteractiveShell) -> None:
    ready.run_cell("batches = (torch.ones(2) * i for i in range(3))\nunused = (i for i in range(3))")
    found = report(ready, "--verify", "x = next(batches) + 1")
    assert (found.verified, found.unrestorable) == (False, ("the iterator `batches`",))
    assert found.divergence.cause == "state_leak"
    assert next(ready.user_ns["batches"]).tolist() != [1, 1]


def test_a_graph_of_the_first_run_is_still_good(ready: InteractiveShell) -> None:
    ready.run_cell("lazy = nn.LazyLinear(4)")
    assert report(ready, "--verify", "y = lazy(torch.randn(2, 3, requires_grad=True))").verified is True
    ready.run_cell("y.sum().backward()").raise_error()


def test_a_queue_that_cannot_be_filled_again_is_named(ready: InteractiveShell) -> None:
    ready.run_cell("from queue import SimpleQueue\nwork = SimpleQueue()\nfor i in range(9): work.put(i)")
    found = report(ready, "--verify", "x = torch.ones(2) * work.get()")
    assert (found.divergence.cause, found.unrestorable) == ("state_leak", ("the queue `work`",))


@pytest.mark.parametrize(
    "body", ["x = next(batches) + 1", "n = input()", "os.system('echo > there.txt')"], ids=["iterator", "input", "command"]
)
def test_strictly_it_is_refused(ready: InteractiveShell, body: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("builtins.input", lambda *_: "3")
    ready.run_cell("import os\nbatches = (torch.ones(2) * i for i in range(5))")
    Path("there.txt").write_text("", encoding="utf-8")
    ran = ready.run_cell(f"%%deterministic --verify --strict -q\n{body}", store_history=True)
    assert isinstance(ran.error_in_exec, (DeterminismError, UsageError))
    assert "--strict" in str(ran.error_in_exec)
    assert Path("there.txt").read_text(encoding="utf-8") == ""
    Path("there.txt").unlink()


@pytest.mark.parametrize("body", ["!echo 1", "files = !ls", "import asyncio\nawait asyncio.sleep(0)"])
def test_what_cannot_be_run_twice_is_run_once(ready: InteractiveShell, body: str) -> None:
    found = report(ready, "--verify", f"x = torch.ones(2) * 2\n{body}")
    assert found.verified is None
    assert found.not_verified
    assert found.not_verified in found.verdict


def test_a_cell_that_raises_is_not_run_again(ready: InteractiveShell) -> None:
    ready.run_cell("runs = []")
    ran = ready.run_cell("%%deterministic --verify -q -o d\nruns.append(1)\nraise KeyError('mine')", store_history=True)
    assert isinstance(ran.error_in_exec, KeyError)
    assert (ready.user_ns["d"].verified, ready.user_ns["runs"]) == (None, [1])


def test_only_the_second_run_raises(ready: InteractiveShell) -> None:
    ready.run_cell("loss = net(X).sum()")
    found = report(ready, "--verify", "loss.backward()")
    assert (found.verified, found.divergence.cause) == (False, "state_leak")
    assert "second time" in found.divergence.explanation


def test_an_interrupt_in_the_second_run_leaves_the_first(ready: InteractiveShell) -> None:
    body = "hits.append(1)\nnet.weight.data.add_(1)\nif hasattr(torch, 'been'): raise KeyboardInterrupt\ntorch.been = 1\nnew = 1"
    ready.run_cell("hits, net = [], nn.Linear(2, 2)\nbefore = net.weight.detach().clone()")
    ran = ready.run_cell(f"%%deterministic --verify -q -o d\n{body}", store_history=True)
    assert isinstance(ran.error_in_exec, KeyboardInterrupt)  # by which Run All ends
    assert (ready.user_ns["hits"], ready.user_ns["new"]) == ([1], 1)
    assert ready.user_ns["d"].interrupted
    assert torch.equal(ready.user_ns["net"].weight, ready.user_ns["before"] + 1)
    assert ready.user_ns["d"].verified is None
    assert not torch.are_deterministic_algorithms_enabled()
    del torch.been


def test_a_tensor_that_is_made_out_of_sight_is_compared_at_the_end(ready: InteractiveShell) -> None:
    body = """\
import os, threading
y = net(X)
made = []
thread = threading.Thread(target=lambda: made.append(torch.tensor([int.from_bytes(os.urandom(6), 'little')])))
thread.start()
thread.join()"""
    found = report(ready, "--verify", body)
    assert found.verified is False
    assert (found.divergence.cause, found.divergence.op, found.divergence.location.line) == ("outside_data", "", 4)
    assert "`made[0]` differs" in found.verdict


def test_what_a_function_gives_is_compared_though_it_was_made_out_of_sight() -> None:
    def step() -> dict[str, torch.Tensor]:
        made = {"a": torch.ones(2) * 2}
        thread = threading.Thread(target=lambda: made.update(b=torch.tensor([int.from_bytes(os.urandom(6), "little")])))
        thread.start()
        thread.join()
        return made

    found = torchdebug_magics.verify(step)
    assert found.verified is False
    assert "`the result['b']` differs" in found.verdict


def test_what_was_made_out_of_sight_and_is_the_same_raises_no_alarm(ready: InteractiveShell) -> None:
    body = """\
import threading
y = net(X)
made = []
thread = threading.Thread(target=lambda: made.append(torch.ones(3) * 2))
thread.start()
thread.join()
unwritten = torch.empty(5)"""
    assert report(ready, "--verify", body).verified is True


# --- beside other magics, and outside of notebooks -----------------------------------------------------------------------------


@pytest.mark.parametrize("order", [("deterministic --verify -q -o d", "nanhunt -q"), ("nanhunt -q", "deterministic --verify -q -o d")])
def test_beside_another_magic(ready: InteractiveShell, order: tuple[str, str]) -> None:
    ready.run_cell(f"%%{order[0]}\n%%{order[1]}\nloss = net(X).pow(2).sum()\nloss.backward()", store_history=True).raise_error()
    assert ready.user_ns["d"].verified is True


def test_a_function_is_verified() -> None:
    net, seen = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Dropout(0.5)), []

    def step() -> None:
        seen.append(net(torch.ones(2, 3)))

    found = torchdebug_magics.verify(step)
    assert found.verified is True
    assert len(seen) == 1


def test_a_function_of_torchs_own() -> None:
    found = torchdebug_magics.verify(functools.partial(torch.randn, 3))
    assert (found.verified, found.ops_count) == (True, 1)


def test_a_function_that_differs() -> None:
    def step() -> torch.Tensor:
        generator = torch.Generator()
        generator.seed()
        return torch.ones(3) * torch.rand(3, generator=generator)

    found = torchdebug_magics.verify(step).divergence
    assert (found.cause, found.op) == ("unseeded_generator", "aten.rand.generator")
    assert found.location.source == "return torch.ones(3) * torch.rand(3, generator=generator)"


def test_what_a_function_raises_is_raised() -> None:
    def step() -> None:
        raise KeyError

    with pytest.raises(KeyError):
        torchdebug_magics.verify(step)
    with pytest.raises(TypeError, match="takes a function"):
        torchdebug_magics.verify(3)


def test_a_with_block_runs_once() -> None:
    with pytest.raises(TorchDebugError, match="verify"), torchdebug_magics.deterministic(verify=True):
        pass
