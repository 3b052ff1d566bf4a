"""Step zero is kept, restored to the last bit, dropped, written and read; it holds nothing alive, and changes nothing."""

from __future__ import annotations

import gc
import random
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import nn

import torchdebug_magics
from torchdebug_magics.errors import TorchDebugError
from torchdebug_magics.instruments.stepzero import examine

if TYPE_CHECKING:
    from tests.torch_forks import TorchForks

X, Y = torch.randn(16, 4), torch.randint(0, 2, (16,))
FILES = ["zero.pt", "zero.safetensors"]


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 5) -> list[float]:
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(X + 0.1 * float(np.random.rand()) + random.random()), Y)  # noqa: NPY002 - global state
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    return losses


@pytest.fixture(autouse=True)
def forgotten() -> Any:
    yield
    if examine._kept:
        torchdebug_magics.stepzero(drop=True)


@pytest.mark.parametrize("where", ["memory", *FILES])
def test_restored_it_trains_as_it_did_to_the_last_bit(where: str, tmp_path: Path) -> None:
    model, optimizer = made()
    trained(model, optimizer, 2)  # the optimizer has a state at step zero, too
    options = {} if where == "memory" else {"file": str(tmp_path / where)}
    assert torchdebug_magics.stepzero(model, optimizer, **options).action == "kept"
    parameters = list(model.parameters())
    losses = trained(model, optimizer)
    state = {name: one.clone() for name, one in model.state_dict().items()}
    again = torchdebug_magics.stepzero(*((model, optimizer) if options else ()), restore=True, **options)
    assert again.action == "restored"
    assert again.problems == ()
    assert all(one is other for one, other in zip(model.parameters(), parameters, strict=True))
    assert trained(model, optimizer) == losses
    assert all(torch.equal(one, state[name]) for name, one in model.state_dict().items())


def test_to_keep_changes_nothing() -> None:
    model, optimizer = made()
    twin, other = made()
    twin.load_state_dict(model.state_dict())
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()  # noqa: NPY002 - global state
    losses = trained(twin, other)
    torch.set_rng_state(states[0]), random.setstate(states[1]), np.random.set_state(states[2])  # noqa: NPY002 - as above
    versions = [one._version for one in model.parameters()]
    torchdebug_magics.stepzero(model, optimizer, X)
    torchdebug_magics.stepzero()
    assert [one._version for one in model.parameters()] == versions
    assert trained(model, optimizer) == losses


def test_memory_is_shared_until_a_step_writes_to_it() -> None:
    model, optimizer = made()
    model[0].weight.requires_grad_(requires_grad=False)
    kept = torchdebug_magics.stepzero(model, optimizer)
    sizes = {name: one.numel() * one.element_size() for name, one in model.state_dict().items()}
    assert (kept.held_bytes, kept.shared_bytes) == (0, sum(sizes.values()))
    trained(model, optimizer)
    now = torchdebug_magics.stepzero()
    assert (now.held_bytes, now.shared_bytes) == (sum(sizes.values()) - sizes["0.weight"], sizes["0.weight"])


def test_a_view_of_numpy_still_sees_the_model() -> None:
    model, optimizer = made()
    seen = model[0].weight.detach().numpy()
    torchdebug_magics.stepzero(model, optimizer)
    trained(model, optimizer)
    assert np.array_equal(seen, model[0].weight.detach().numpy())
    assert torchdebug_magics.stepzero().moved
    seen[0] = 7
    assert float(model[0].weight[0, 0]) == 7


def test_nothing_is_kept_alive() -> None:
    model, optimizer = made()
    x = X.clone()
    torchdebug_magics.stepzero(model, optimizer, x)
    gone = [weakref.ref(one) for one in (model, optimizer, x)]
    del model, optimizer, x
    gc.collect()
    assert [one() for one in gone] == [None] * 3
    with pytest.raises(TorchDebugError, match="is gone"):
        torchdebug_magics.stepzero()


ACROSS_KERNELS = """
import os, sys
import torch, torchdebug_magics
from torch import nn

def kernel(path):
    torch.manual_seed(3)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    report = torchdebug_magics.stepzero(model, optimizer, torch.ones(3), file=path)
    print(report.action, len(report.moved), [row.changed for row in report.data])
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    report = torchdebug_magics.stepzero(model, optimizer, torch.zeros(3), file=path)
    print(report.action, len(report.moved), [row.changed for row in report.data])
    torchdebug_magics.stepzero(model, optimizer, file=path, restore=True)
    print(torchdebug_magics.stepzero(model, optimizer, file=path).verdict, flush=True)

torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1).step()  # imports for seconds what each fork would
for path in PATHS * 2:
    print(path, flush=True)
    if not os.fork():
        kernel(path)
        os._exit(0)
    os.wait()
"""


def test_a_file_is_compared_with_across_kernels(torch_forks: TorchForks, tmp_path: Path) -> None:
    paths = [str(tmp_path / file) for file in FILES]
    code, out, err = torch_forks.run(f"PATHS = {paths!r}\n{ACROSS_KERNELS}")
    assert (code, err) == (0, "")
    ended = "No parameter has moved since step zero"
    assert out.splitlines() == [
        line for action in ("kept 0 [None]", "compared 0 [False]") for path in paths for line in (path, action, "compared 2 [True]", ended)
    ]


def test_a_file_runs_no_code_and_another_file_is_refused(tmp_path: Path) -> None:
    model, optimizer = made()

    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.write_text, (tmp_path / "ran", "it did")

    torch.save({"stepzero": Evil(), "tensors": {}}, tmp_path / "zero.pt")
    (tmp_path / "zero.safetensors").write_text("no tensors", encoding="utf-8")
    for name in FILES:
        with pytest.raises(TorchDebugError, match="holds no step zero"):
            torchdebug_magics.stepzero(model, optimizer, file=str(tmp_path / name))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("values", "options", "says"),
    [
        ((), {}, "no step zero was kept"),
        ((), {"drop": True}, "nothing to drop"),
        ((), {"restore": True}, "no step zero was kept"),
        ((X,), {}, "name a model"),
        ((nn.Linear(2, 2),), {"file": "no.pt", "restore": True}, "there is no file"),
    ],
)
def test_wrong_use(values: tuple[Any, ...], options: dict[str, Any], says: str) -> None:
    with pytest.raises(TorchDebugError, match=says):
        torchdebug_magics.stepzero(*values, **options)


def test_dropped_it_is_forgotten() -> None:
    torchdebug_magics.stepzero(*made()[:1])
    gc.collect()
    assert torchdebug_magics.stepzero(drop=True).verdict == "Step zero is dropped"
    with pytest.raises(TorchDebugError, match="no step zero was kept"):
        torchdebug_magics.stepzero()
