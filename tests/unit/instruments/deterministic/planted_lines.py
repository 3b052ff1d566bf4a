"""Cells that differ from run to run, with the op that differs and, on another line, what makes it so."""

from __future__ import annotations

from typing import NamedTuple


class Cell(NamedTuple):
    """`# <- op` marks the line of the op, `# <- source` the one to change."""

    cause: str
    body: str
    setup: str = ""


PLANTED = {
    "an optimizer that draws its own rate": Cell(
        "numpy_random",
        """\
class Noisy(torch.optim.SGD):
    def step(self, closure=None):
        for group in self.param_groups:
            group["lr"] = float(np.random.default_rng().uniform(0.01, 0.1))  # <- source
        return super().step(closure)  # <- op
opt = Noisy(net.parameters(), lr=0.1)
net(torch.ones(1, 2)).sum().backward()
opt.step()
""",
        "net = nn.Linear(2, 2)",
    ),
    "a sampler's generator": Cell(
        "unseeded_generator",
        """\
g = torch.Generator()
g.seed()  # <- source
sampler = torch.utils.data.WeightedRandomSampler(torch.ones(20), 20, generator=g)
for (x,) in DataLoader(data, batch_size=5, sampler=sampler):  # <- op
    y = x.sum()
""",
        "data = TensorDataset(torch.arange(20.))",
    ),
    "a set that a function goes through": Cell(
        "hash_order",
        """\
class Token:
    def __init__(self, i): self.i = i
tokens = [Token(i) for i in range(40)]
left = set(tokens) - {tokens[0]}
order = list(map(lambda token: token.i, left))  # <- source
x = torch.arange(40.)[order]  # <- op
""",
    ),
    "how long a loop is": Cell(
        "control_flow",
        """\
x = torch.ones(3)
n = secrets.randbelow(10**6) % 500  # <- source
for _ in range(n):
    x = x * 1.01  # <- op
y = x.sum()
""",
    ),
    "how long a loop is, and what comes after": Cell(
        "control_flow",
        """\
x, n = torch.zeros(2), 0
begin = time.perf_counter()  # <- source
while time.perf_counter() - begin < 0.02:
    n += 1
    x = x + 0.5  # <- op
y = x * n  # <- op
""",
    ),
    "a mask that nobody wrote": Cell(
        "uninitialized_memory", "m = torch.empty(64, dtype=torch.bool)  # <- op\nx = torch.arange(64.)[m]  # <- source\n"
    ),
    "what the system gives through a number": Cell(
        "outside_data",
        """\
device = os.open("/dev/urandom", os.O_RDONLY)
found = os.read(device, 4)  # <- source
os.close(device)
x = torch.tensor(list(found))  # <- op
""",
    ),
    "through a file": Cell(
        "numpy_random",
        """\
settings = {"rate": float(np.random.default_rng().random())}  # <- source
kept.write_text(json.dumps(settings))
rate = json.loads(kept.read_text())["rate"]
x = torch.ones(2) * rate  # <- op
""",
        "import json, tempfile\nfrom pathlib import Path\nfolder = tempfile.TemporaryDirectory()\nkept = Path(folder.name, 'kept')",
    ),
}
