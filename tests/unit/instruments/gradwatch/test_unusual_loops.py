"""Loops of other kinds than the usual one: what is measured of them, and that nothing fails."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.unit.instruments.gradwatch.training_case import HEAD

if TYPE_CHECKING:
    from tests.doors import Observe

_LOOPS = {
    "a new optimizer for each step": (
        """
net = nn.Linear(16, 4)
for x, y in batches(90):
    opt = torch.optim.SGD(net.parameters(), lr=1e-2)
    opt.zero_grad()
    F.cross_entropy(net(x), y).backward()
    opt.step()
""",
        90,
        ("",),
    ),
    "parameters that are added later": (
        """
first, second = nn.Linear(16, 8), nn.Linear(8, 4)
opt = torch.optim.SGD(first.parameters(), lr=1e-2)
for number, (x, y) in enumerate(batches(20)):
    if number == 10:
        opt.add_param_group({"params": second.parameters()})
    opt.zero_grad()
    F.cross_entropy(second(first(x)), y).backward()
    opt.step()
""",
        20,
        ("first", "second"),
    ),
    "a fused optimizer under a scaler, and a learning rate that is a tensor": (
        """
net = mlp(16, 8, 4)
opt = torch.optim.Adam(net.parameters(), lr=torch.tensor(1e-3), fused=True)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**100)
for x, y in batches(20):
    opt.zero_grad()
    scaler.scale(F.cross_entropy(net(x), y)).backward()
    scaler.step(opt)
    scaler.update()
""",
        20,
        ("0", "2"),
    ),
    "a step that raises in between": (
        """
net = nn.Linear(16, 4)
opt = torch.optim.SGD(net.parameters(), lr=1e-2)
for number, (x, y) in enumerate(batches(6)):
    opt.zero_grad()
    F.cross_entropy(net(x), y).backward()
    opt.param_groups[0]["lr"] = "0.1" if number == 3 else 0.1
    try:
        opt.step()
    except TypeError:
        pass
""",
        5,
        ("",),
    ),
    "a GPT-2 of transformers": (
        """
from transformers import GPT2Config, GPT2LMHeadModel, logging
logging.set_verbosity_error()
net = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=50, n_positions=16, bos_token_id=0, eos_token_id=0))
opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
for step in range(12):
    x = torch.randint(0, 50, (4, 16)).sort(1).values
    opt.zero_grad()
    net(x, labels=x).loss.backward()
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    opt.step()
""",
        12,
        None,
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", _LOOPS)
def test_it_is_measured(name: str, observe: Observe) -> None:
    text, steps_count, modules = _LOOPS[name]
    observed = observe("gradwatch", HEAD + text)
    assert observed.error is None
    report = observed.report
    assert (report.problems, report.findings) == ((), ())
    assert report.steps_count == steps_count
    if modules is None:
        assert "transformer.h.1.attn.c_attn" in report.modules
        assert "lm_head" not in report.modules  # whose weight is that of the embedding
    else:
        assert report.modules == modules


def test_a_new_model_for_each_step_takes_no_more_room_than_some() -> None:
    import torch
    from torch import nn

    import torchdebug_magics
    from torchdebug_magics.instruments.gradwatch import record

    with pytest.MonkeyPatch.context() as patch, torchdebug_magics.gradwatch() as session:
        patch.setattr(record, "_MOST_MODULES", 10)
        for _ in range(70):
            net = nn.Linear(2, 1)
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            net(torch.ones(1, 2)).sum().backward()
            optimizer.step()
    assert (session.report.steps_count, len(session.report.modules)) == (70, 11)
    assert "all other modules" in session.report.modules
