"""What two runs of one process cannot show, and another process does: it is told with its line, and only where it matters."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.unit.instruments.deterministic.planted import IMPORTS

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from torchdebug_magics.instruments.deterministic.report import DeterministicReport

TOLD = {
    "set": (
        "words = ['b', 'a', 'c']",
        "places = {w: i for i, w in enumerate(set(words))}  # <-\nx = torch.tensor([places[w] for w in words]) * 2",
    ),
    "hash": ("name = 'first'", "torch.manual_seed(hash(name) % 2**31)  # <-\nx = torch.rand(2)"),
}
HEALTHY = {
    "sorted": (
        "labels = ['cat', 'dog']",
        """\
kinds = list(set(labels))
kinds.sort()
n = len(list(set(labels)))
all_kinds = sorted([one for one in set(labels)])
x = torch.ones(n) * 2
""",
    ),
    "numbers": ("labels = [1, 2, 3]", "x = torch.tensor(list(set(labels))) * 2\nis_there = 'a' in {'a', 'b'}\nn = hash((1, 2))"),
}


def verified(shell: InteractiveShell, setup: str, body: str) -> DeterministicReport:
    shell.run_cell(IMPORTS + setup).raise_error()
    shell.run_cell(f"%%deterministic --verify -q -o d\n{body}", store_history=True).raise_error()
    return shell.user_ns["d"]


@pytest.fixture(autouse=True)
def salted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchdebug_magics.instruments.deterministic.twice.elsewhen.began_with", lambda _name: None)


@pytest.mark.parametrize("op", TOLD)
def test_it_is_told_with_its_line(shell: InteractiveShell, op: str) -> None:
    found = verified(shell, *TOLD[op])
    assert (found.verified, found.problems) == (True, ())
    (told,) = found.potential
    assert (told.op, told.repetitions_count) == (op, 0)
    assert told.location is not None
    assert told.location.source.endswith("# <-")
    assert told.fix
    order = next(one for one in found.depends_on if one.on == "order")
    assert (order.location, order.fix) == (told.location, told.fix)


@pytest.mark.parametrize("name", HEALTHY)
def test_it_is_not_told_where_it_does_not_matter(shell: InteractiveShell, name: str) -> None:
    found = verified(shell, *HEALTHY[name])
    assert (found.verified, found.potential, found.problems) == (True, (), ())


def test_a_fixed_salt_is_the_same_in_each_process(shell: InteractiveShell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchdebug_magics.instruments.deterministic.twice.elsewhen.began_with", lambda _name: "0")
    assert verified(shell, *TOLD["set"]).potential == ()
