"""Nothing is wrong, whatever stands still beside it."""

from __future__ import annotations

from tests.hang_cases.marks import WARM, planted

__all__ = ["CASES"]

STOPPED = "KeyboardInterrupt"
FINE = {"ends": "itself", "state": ("finished",)}

CASES = (
    planted(
        name="training",
        setup=WARM,
        cell="""
import time

import torch

model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters())
begin = time.monotonic()
while time.monotonic() - begin < 5:
    loss = model(torch.randn(64, 32)).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
        **FINE,
    ),
    planted(
        name="stop_pressed_on_a_training",
        setup=WARM,
        cell="""
import time

import torch

weight = torch.zeros(3, requires_grad=True)
optimizer = torch.optim.SGD([weight], lr=0.1)
while True:
    optimizer.zero_grad()
    (weight - 1).pow(2).sum().backward()
    optimizer.step()
    time.sleep(0.05)
""",
        ends="interrupt",
        interrupt_s=4.0,
        state=("interrupted",),
        raises=STOPPED,
    ),
)
