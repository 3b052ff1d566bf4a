"""What only takes long: it may be called slow, and never stuck."""

from __future__ import annotations

from tests.hang_cases.marks import WARM, planted

__all__ = ["CASES"]

STOPPED = "KeyboardInterrupt"

CASES = (
    planted(
        name="hidden_state_never_detached",
        source="https://discuss.pytorch.org/t/training-gets-slow-down-by-each-batch-slowly/",
        setup=WARM,
        cell="""
import time

import torch

cell = torch.nn.GRUCell(32, 32)
h = torch.zeros(8, 32)
begin = time.monotonic()
for step in range(10_000):
    for _ in range(2400):
        h = cell(torch.randn(8, 32), h)
    loss = h.pow(2).mean()
    loss.backward(retain_graph=True) #!
    if time.monotonic() - begin > 11:
        break
""",
        ends="itself",
        state=("slow",),
        cause=("growing_graph",),
        after_s=1.0,
        says=("detach",),
    ),
    planted(
        name="server_that_answers_late",
        cell="""
import http.server
import threading
import time
import urllib.request


class Late(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        time.sleep(6) #!
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"weights")

    def log_message(self, *args):
        pass


server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Late)
threading.Thread(target=server.serve_forever, name="hub", daemon=True).start()
with urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/model.bin") as answer: #!
    print(answer.read())
server.shutdown()
server.server_close()
""",
        ends="itself",
        state=("slow",),
        cause=("network",),
    ),
    planted(
        name="loop_that_never_updates_what_it_tests",
        setup=WARM,
        cell="""
import torch


def fit(model, x, tolerance):
    loss = model(x).pow(2).mean().item() + 1.0
    while loss > tolerance: #!
        out = model(x).pow(2).mean() #!
        out.backward() #!


fit(torch.nn.Linear(4, 1), torch.randn(8, 4), 0.01)
""",
        ends="interrupt",
        interrupt_s=6.0,
        state=("stuck", "slow"),
        cause=("infinite_loop",),
        raises=STOPPED,
    ),
    planted(
        name="item_that_a_user_has_not_seen",
        cell="""
import random


def sample(seen, count):
    while True: #!
        item = random.randint(0, count - 1)
        if item not in seen:
            return item


items = [sample({user, 1, 2}, 3) for user in range(2)]
""",
        ends="interrupt",
        interrupt_s=6.0,
        state=("slow",),
        cause=("infinite_loop",),
        root="main",
        says=("ends only where `item not in seen`",),
        raises=STOPPED,
    ),
    planted(
        name="counter_that_is_never_raised",
        setup=WARM,
        cell="""
import torch

model = torch.nn.Linear(8, 1)
i, losses = 0, []
while i < 10: #!
    x = torch.randn(64, 8)
    losses.append(model(x).pow(2).mean().item())
""",
        ends="interrupt",
        interrupt_s=6.0,
        state=("slow",),
        cause=("infinite_loop",),
        root="main",
        says=("ends only where `i < 10` is false",),
        raises=STOPPED,
    ),
)
