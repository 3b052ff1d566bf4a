"""Every source of random numbers by its name, and nothing drawn from any."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

import torchdebug_magics
from tests.unit.instruments.deterministic.everything import flags, random_states
from torchdebug_magics.errors import TorchDebugError
from torchdebug_magics.html import plain
from torchdebug_magics.instruments.deterministic.view import page

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from torchdebug_magics.instruments.deterministic.report import Source, StatusReport


def named(report: StatusReport, name: str) -> Source:
    return next(one for one in report.sources if one.name.startswith(name))


@pytest.mark.keeps_rng
def test_each_source_with_what_is_known_of_its_seed():
    by_hand, from_entropy, torchs, spawned = (
        np.random.default_rng(5), np.random.default_rng(), torch.Generator(), np.random.default_rng(np.random.SeedSequence(6).spawn(1)[0]),
    )  # fmt: skip
    seeded, drawn = torch.Generator().manual_seed(9), torch.Generator()
    drawn.seed()
    own = random.Random(4)
    before = flags(), random_states(by_hand, from_entropy, torchs, spawned, seeded, drawn, own)
    report = torchdebug_magics.deterministic("status")
    assert (flags(), random_states(by_hand, from_entropy, torchs, spawned, seeded, drawn, own)) == before
    known = {name: (named(report, name).seed, named(report, name).seeded) for name in ("by_hand", "torchs", "spawned", "seeded", "own")}
    assert known == {
        "by_hand": (5, "hand"), "torchs": (67280421310721, "default"), "spawned": (None, "hand"), "seeded": (9, "hand"),
        "own": (None, "unknown"),
    }  # fmt: skip
    assert named(report, "from_entropy").seeded == named(report, "drawn").seeded == "entropy"
    assert {"random", "numpy.random", "torch"} <= {one.name for one in report.sources if one.is_global}
    assert "seeded from entropy, different in every run" in report.verdict
    assert report.settings["deterministic_algorithms"] == "off"
    assert (report.threads_count, report.problems) == (torch.get_num_threads(), ())


def test_the_letters_change_when_something_is_drawn():
    rng = np.random.default_rng(5)
    first, second = (named(torchdebug_magics.deterministic("status"), "rng").state for _ in range(2))
    rng.random()
    assert first == second != named(torchdebug_magics.deterministic("status"), "rng").state


def test_loaders_with_the_source_of_their_workers_seeds():
    generator = torch.Generator()
    plain_one = torch.utils.data.DataLoader(range(2), num_workers=2)
    own = torch.utils.data.DataLoader(range(2), generator=generator)
    loaders = {one.name.partition(" ")[0]: one for one in torchdebug_magics.deterministic("status").loaders}
    assert (loaders["plain_one"].workers_count, loaders["plain_one"].generator, loaders["plain_one"].workers_alive) == (2, "", False)
    assert loaders["own"].generator.startswith("generator in ")
    assert plain_one.generator is None
    assert own.generator is generator


def test_a_word_that_there_is_not_is_no_status():
    with pytest.raises(TorchDebugError, match=r"takes no value such as 'stats': `%deterministic status` alone"):
        torchdebug_magics.deterministic("stats")


def test_while_it_is_on_the_status_tells_the_seeds_that_it_gave(shell: InteractiveShell):
    cells = [
        "import numpy as np\nrng = np.random.default_rng()", "%deterministic --seed 7 -q", "later = np.random.default_rng()",
        "%deterministic status -o on -q", "%deterministic off -q", "%deterministic status -o off -q",
    ]  # fmt: skip
    for cell in cells:
        shell.run_cell(cell).raise_error()
    on, off = shell.user_ns["on"], shell.user_ns["off"]
    assert {(one.name, one.seeded) for one in on.sources} == {
        ("random", "ritual"), ("numpy.random", "ritual"), ("torch", "ritual"), ("rng", "ritual"), ("later", "entropy"),
    }  # fmt: skip
    assert named(on, "random").seed == 7
    assert on.settings["deterministic_algorithms"] == "warn only"
    assert named(off, "rng").seeded == "entropy"
    text = plain.render(page(on))
    assert "by %deterministic" in text
    assert "PYTHONHASHSEED" in text
