"""Whether a backward pass goes through the graphs of earlier steps, and who keeps them: asked in the middle of real passes."""

from __future__ import annotations

import threading
import time
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from torchdebug_magics.instruments.hangwatch.main_thread import progress as graph_growth
from torchdebug_magics.instruments.hangwatch.main_thread.progress import BackwardPasses, goes_through_earlier
from torchdebug_magics.probing.source.user_code import frames_above

if TYPE_CHECKING:
    from pathlib import Path

HOOK = """
def hook(gradient):
    questions.put("look")
    answers.get()
    return gradient
"""
LOOP = """
class Stateful(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.state = (torch.zeros(1, 4),)
    def forward(self, x):
        self.state = (self.linear(self.state[0]).tanh(),)
        return self.state[0] + x

net = torch.nn.Sequential(Stateful())
weight = torch.ones(4, requires_grad=True)
shared = model(torch.ones(1, 4))
hidden = torch.zeros(1, 4)
total = torch.zeros(())
for step in range(6):
    {}
    loss.register_hook(hook)
    loss.backward({})
"""
GROW = {
    "a state, and the input": ("hidden = model(torch.ones(1, 4) + hidden); loss = hidden.sum()", "write `hidden = hidden.detach()`"),
    "a sum": ("total = total + model(hidden).sum(); loss = total * 1", "write `total = total.detach()`"),
    "a sum in place": ("total += model(hidden).sum(); loss = total * 1", "write `total = total.detach()`"),
    "an attribute of a module": (
        "loss = net(hidden).sum()", "write `net.0.state = tuple(one.detach() for one in net.0.state)`",
    ),
}  # fmt: skip
KEEP = "retain_graph=True"
DO_NOT_GROW = {
    "a state that begins anew": ("hidden = torch.zeros(1, 4); hidden = model(hidden); loss = hidden.sum()", KEEP),
    "a part in front that all steps share": ("loss = model(shared).sum()", KEEP),
    "nothing that is kept": ("hidden = model(hidden.detach()); loss = hidden.sum()", ""),
    "gradients of gradients": ("hidden = model(hidden); loss = hidden.sum()", "create_graph=True"),
    "gradients of one input": ("hidden = model(hidden) * weight; loss = hidden.sum()", f"{KEEP}, inputs=[weight]"),
}


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_growth, "_LONG_S", 0.0)
    monkeypatch.setattr(graph_growth, "_EVERY_S", 0.0)


def looked_at(step: str, option: str, file: Path) -> BackwardPasses:
    """What is known after six passes, each looked at from another thread, once."""
    passes, questions, answers = BackwardPasses(), SimpleQueue[str](), SimpleQueue[str]()
    main = threading.get_ident()

    def look() -> None:
        import sys

        while questions.get() != "end":
            frame = next(one for one in frames_above(sys._current_frames()[main]) if one.f_code.co_name == "_engine_run_backward")
            passes.look(frame, time.monotonic())
            del frame
            answers.put("looked")
            passes.look(None, time.monotonic())

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    # A hook that is no line of the user's: his innermost line is the one that calls `backward`.
    hook: dict[str, Any] = {"questions": questions, "answers": answers}
    exec(compile(HOOK, nn.__file__, "exec"), hook)
    file.write_text(LOOP.format(step, option))
    exec(compile(file.read_text(), str(file), "exec"), {"torch": torch, "hook": hook["hook"], "model": nn.Linear(4, 4)})
    questions.put("end")
    thread.join()
    return passes


@pytest.mark.parametrize("case", GROW)
def test_a_graph_that_grows_has_its_variable_its_line_and_its_repair(case: str, tmp_path: Path) -> None:
    step, fix = GROW[case]
    passes = looked_at(step, KEEP, tmp_path / "loop.py")
    assert passes.carrier is not None
    assert passes.carrier[1] == fix
    assert (passes.carried_at and passes.carried_at.source) == "loss.backward(retain_graph=True)"


@pytest.mark.parametrize("case", DO_NOT_GROW)
@pytest.mark.filterwarnings("ignore:Using backward")
def test_a_graph_that_ends_with_its_step_does_not_grow(case: str, tmp_path: Path) -> None:
    assert looked_at(*DO_NOT_GROW[case], tmp_path / "loop.py").carrier is None


def chain(links: int, x: torch.Tensor) -> torch.Tensor:
    for _ in range(links):
        x = x * 1.0 + torch.ones(2) * x
    return x


def test_a_graph_is_followed_to_its_oldest_nodes_and_one_that_is_too_large_has_no_answer() -> None:
    x, ends = torch.ones(2, requires_grad=True), []
    for links in (100, 100, 100, 3_000):
        x = chain(links, x)
        ends.append(x.grad_fn._sequence_nr())  # type: ignore[union-attr]
    assert goes_through_earlier(x.grad_fn, ends[:-1]) is None
    short = chain(50, chain(50, x.detach().requires_grad_()))
    assert goes_through_earlier(short.grad_fn, ends) is False


@pytest.mark.parametrize(
    ("times_s", "numbers", "longer"),
    [
        ((1.0, 1.5, 2.5), (100, 200, 300), True),
        ((0.0, 1.75, 0.75, 2.5), (100, 200, 300, 500), True),  # looks have missed one
        ((1.0, 1.5), (100, 200), False),
        ((1.0, 1.0, 1.25), (100, 200, 300), False),
        ((1.0, 3.0, 2.0), (100, 200, 300), False),
        ((1.0, 1.5, 2.5), (100, 200, 350), False),  # the step itself is larger
        ((), (), False),
    ],
)
def test_passes_that_take_longer_and_longer_though_the_steps_are_as_large(
    times_s: tuple[float, ...], numbers: tuple[int, ...], longer: bool
) -> None:
    passes = [graph_growth._Pass(number, 0.0, took_s) for number, took_s in zip(numbers, times_s, strict=True)]
    assert graph_growth._take_longer(passes) is longer
