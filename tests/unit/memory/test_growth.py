"""Histories that grow are seen by the name of the variable, though they hold no tensor; to count them changes nothing."""

from __future__ import annotations

import gc
import weakref

import torch
from torch._C._autograd import _get_sequence_nr

from torchdebug_magics.memory.found import histories
from torchdebug_magics.probing.graphs import MOST_NODES


def counts(since: int = 0) -> dict[str, int]:
    """Nodes by name, of those that have a number from `since` on."""
    return {name: history.count for name, history in histories(lambda number: int(since <= number < 1 << 62)).items()}


def test_a_long_history_is_no_deep_recursion() -> None:
    total = torch.zeros(1, requires_grad=True)
    for _ in range(20_000):
        total = total + 1
    name = f"{test_a_long_history_is_no_deep_recursion.__name__}() local 'total'"
    assert counts()[name] == MOST_NODES


def test_to_count_keeps_nothing() -> None:
    loss = (torch.ones(3, requires_grad=True) * 2).exp()
    saved = weakref.ref(loss.grad_fn._raw_saved_result.data)
    counts()
    del loss
    gc.collect()
    assert saved() is None


def test_what_was_made_before_is_not_counted() -> None:
    before = (torch.ones(2, requires_grad=True) * 2).sum()
    since = _get_sequence_nr()
    after = before + (torch.ones(2, requires_grad=True) * 3).sum()
    named = {name: nodes for name, nodes in counts(since).items() if "made_before" in name}
    assert {name.split("'")[1]: nodes for name, nodes in named.items()} == {"before": 0, "after": 3}
    assert after.requires_grad


def test_what_a_backward_pass_has_let_go_is_told_from_what_it_may_yet_need() -> None:
    first = (torch.ones(3, requires_grad=True) * 2).exp().sum()
    first.backward()
    split = _get_sequence_nr()
    second = first + (torch.ones(3, requires_grad=True) * 2).exp().sum()
    name = "test_what_a_backward_pass_has_let_go_is_told_from_what_it_may_yet_need() local 'second'"
    found = histories(lambda number: 0 if number >= 1 << 62 else 1 + (number >= split))[name]
    assert (dict(found.steps), set(found.used_up)) == ({1: 3, 2: 4}, {1})
    assert second.requires_grad


def test_no_hook_is_run_to_ask_it() -> None:
    ran: list[str] = []

    def unpack(saved: torch.Tensor) -> torch.Tensor:
        ran.append("unpacked")
        return saved

    with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, unpack):
        loss = (torch.ones(3, requires_grad=True) * 2).exp().sum()
    assert counts()["test_no_hook_is_run_to_ask_it() local 'loss'"] == 3
    loss.backward()
    before = len(ran)
    assert histories(lambda number: int(number < 1 << 62))["test_no_hook_is_run_to_ask_it() local 'loss'"].used_up == {1}
    assert len(ran) == before
