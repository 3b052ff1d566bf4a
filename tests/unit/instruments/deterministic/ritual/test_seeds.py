"""Every source is seeded, the user's own generators too; seeds that wait for a GPU are left as they were."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

import torchdebug_magics
from tests import doors
from tests.unit.instruments.deterministic.everything import random_states
from torchdebug_magics.instruments.deterministic.ritual import ritual
from torchdebug_magics.instruments.deterministic.ritual.ritual import QueuedSeeds
from torchdebug_magics.instruments.deterministic.ritual.status import derived_seed

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from tests.doors import Observe

MADE = """
import random, numpy as np, torch
rng, legacy, own = np.random.default_rng(), np.random.RandomState(), random.Random()
generator = torch.Generator()
generator.seed()
class Data(torch.utils.data.Dataset):
    __slots__ = ("slot",)
    def __init__(self):
        self.noise = {"train": [np.random.default_rng()]}
        self.slot = torch.Generator()
    def __len__(self):
        return 6
    def __getitem__(self, index):
        return index + self.noise["train"][0].random()
loader = torch.utils.data.DataLoader(Data(), shuffle=True, generator=torch.Generator())
model = torch.nn.Sequential(torch.nn.Identity())
model[0].rng = np.random.default_rng()
def closed(inner=random.Random()):
    hidden = np.random.default_rng()
    return lambda: hidden.random()
draw = closed()
"""
USED = """
drawn = (
    rng.random(), legacy.rand(), own.random(), torch.rand(1, generator=generator).item(), [float(x) for x in loader], draw(),
    model[0].rng.random(),
)
"""
NAMES = {
    "rng", "legacy", "own", "generator", "loader.generator", "loader.dataset.slot", "loader.dataset.noise['train'][0]", "model.0.rng",
    "hidden of draw()", "a default of closed()",
}  # fmt: skip


def test_generators_that_names_lead_to_are_seeded_and_put_back(shell: InteractiveShell):
    shell.run_cell(MADE).raise_error()
    observe, names = doors.MagicDoor(shell), shell.user_ns
    own = names["rng"], names["generator"], names["own"], names["legacy"], names["loader"].generator
    before = random_states(*own)
    first = observe("deterministic", USED, seed=7)
    drawn = first.namespace["drawn"]
    assert observe("deterministic", USED, seed=7).namespace["drawn"] == drawn
    assert set(first.report.generators) == NAMES
    assert random_states(*own) == before
    assert observe("deterministic", USED, seed=8).namespace["drawn"] != drawn


def test_local_generators_of_the_users_calls_are_found():
    def train() -> float:
        rng = np.random.default_rng()
        with torchdebug_magics.deterministic(seed=3) as session:
            drawn = rng.random()
        assert "rng in train()" in session.report.generators
        return drawn

    assert train() == train()


def test_each_has_a_seed_of_its_own():
    first, second = np.random.default_rng(), np.random.default_rng()
    with torchdebug_magics.deterministic(seed=3):
        assert first.random() != second.random()
    assert derived_seed(3, "a") != derived_seed(3, "b")
    assert derived_seed(3, "a") != derived_seed(4, "a")
    assert all(0 <= derived_seed(2**32 - 1, name) < 2**32 for name in ("a", "loader.generator"))


def test_the_global_ones_are_not_taken_for_the_users_own():
    mine, numpys, torchs = random._inst, np.random.mtrand._rand, torch.default_generator
    with torchdebug_magics.deterministic(seed=3) as session:
        drawn = mine.random(), numpys.rand(), torch.rand(1, generator=torchs).item()
    assert session.report.generators == ()
    assert drawn == (random.Random(3).random(), np.random.RandomState(3).rand(), torch.rand(1, generator=_seeded(3)).item())


def test_workers_of_a_loader_draw_the_same_numbers(observe: Observe):
    body = """
import numpy as np, torch
loader = torch.utils.data.DataLoader(range(4), num_workers=1, collate_fn=lambda batch: torch.rand(1) + np.random.rand())
drawn = [x.tolist() for x in loader]
"""
    assert len({str(observe("deterministic", body).namespace["drawn"]) for _ in range(2)}) == 1


def test_a_generator_that_refuses_is_a_problem_and_not_the_cells_error():
    class Broken(np.random.PCG64):
        def __init__(self, seed: object = None) -> None:
            if seed is not None:
                raise ValueError("never again")
            super().__init__()

    rng = np.random.Generator(Broken())
    with torchdebug_magics.deterministic() as session:
        rng.random()
    assert [one.rpartition(" failed: ")[2] for one in session.report.problems] == ["ValueError: never again"]
    assert session.report.restored


# --- CUDA that starts in the cell ------------------------------------------------------------------------------------------------


class Device:
    """One of torch's device modules, on a machine without the device."""

    def __init__(self) -> None:
        self.started = False
        self.seeds: list[int] = []
        self._lazy_seed_tracker = type(torch.cuda._lazy_seed_tracker)()

    def is_initialized(self) -> bool:
        return self.started

    def manual_seed_all(self, seed: int) -> None:
        if self.started:
            self.seeds.append(seed)
        else:
            self._lazy_seed_tracker.queue_seed_all(lambda: self.seeds.append(seed), "")


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    fake = Device()
    monkeypatch.setattr(ritual.torch, "cuda", fake)
    return fake


def test_seeds_that_wait_for_a_gpu_wait_on(device: Device):
    device.manual_seed_all(5)
    ritual = QueuedSeeds()
    device.manual_seed_all(42)
    assert not ritual.are_back()
    ritual.put_back()
    assert ritual.are_back()
    for call in device._lazy_seed_tracker.get_calls():
        _ = call and call[0]()
    assert device.seeds == [5]


@pytest.mark.parametrize("waiting", [None, 5])
def test_a_gpu_that_starts_in_the_cell_goes_on_as_if_it_had_started_after_it(device: Device, waiting: int | None):
    if waiting is not None:
        device.manual_seed_all(waiting)
    ritual = QueuedSeeds()
    device.manual_seed_all(42)
    device.started = True
    ritual.put_back()
    assert device.seeds[-1] == (67280421310721 if waiting is None else 5)
    assert ritual.are_back()


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
