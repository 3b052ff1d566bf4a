"""Cells that differ from run to run, each for one reason, and cells that only look so."""

from __future__ import annotations

from dataclasses import dataclass

IMPORTS = """import itertools, os, queue, random, secrets, sys, threading, time, uuid
from datetime import datetime
import numpy as np, torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset
"""


@dataclass(frozen=True)
class Planted:
    """One cell."""

    name: str
    body: str
    cause: str
    op: str
    line: int
    """In the body, 1-based."""
    setup: str = ""


PLANTED = (
    Planted(
        "torch.seed",
        """\
x = torch.ones(3)
torch.seed()
y = torch.rand(3) * x
""",
        "unseeded_generator",
        "aten.rand.default",
        3,
    ),
    Planted(
        "numpy in a dataset",
        """\
class D(Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, i):
        return np.random.default_rng().random(3)
for x in DataLoader(D(), batch_size=4):
    y = x * 2
""",
        "numpy_random",
        "aten.lift_fresh.default",
        6,
    ),
    Planted(
        "early stop by the clock",
        """\
x = torch.ones(3)
end = time.perf_counter() + 0.02
while time.perf_counter() < end:
    x = x + 1
""",
        "control_flow",
        "aten.add.Tensor",
        4,
    ),
    Planted(
        "half written",
        """\
z = torch.empty(20)
z[:10] = torch.ones(10)
q = z.mean()
""",
        "uninitialized_memory",
        "aten.empty.memory_format",
        1,
    ),
    Planted(
        "memory like another's",
        """\
x = torch.ones(10)
m = torch.empty_like(x)
m.masked_fill_(x > 2, 1.0)
y = (x * m).sum()
""",
        "uninitialized_memory",
        "aten.empty_like.default",
        2,
    ),
    Planted(
        "memory that is added",
        """\
x = torch.ones(4)
x.resize_(40)
y = x.sum()
""",
        "uninitialized_memory",
        "aten.resize_.default",
        2,
    ),
    Planted(
        "what the system gives, in inference mode",
        """\
with torch.inference_mode():
    x = torch.tensor(list(os.urandom(2)), dtype=torch.float32)
    y = net(x)
""",
        "os_entropy",
        "aten.lift_fresh.default",
        2,
        setup="net = nn.Linear(2, 2)",
    ),
    Planted(
        "a running loader",
        """\
x, = next(batches)
y = x * 2
""",
        "state_leak",
        "aten.select.int",
        1,
        setup="batches = iter(DataLoader(TensorDataset(torch.arange(16.)), batch_size=4))",
    ),
    Planted(
        "an own op",
        """\
x = torch.ones(3)
y = torch.ops.torchdebug_planted.noisy(x)
z = y + 1
""",
        "nondeterministic_op",
        "torchdebug_planted.noisy.default",
        2,
        setup="""\
if not hasattr(torch.ops.torchdebug_planted, "noisy"):
    @torch.library.custom_op("torchdebug_planted::noisy", mutates_args=())
    def noisy(x: torch.Tensor) -> torch.Tensor:
        return x + time.perf_counter() % 1
""",
    ),
    Planted(
        "a worker's own seed",
        """\
class D(Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, i):
        return np.random.default_rng().random(2)
for x in DataLoader(D(), batch_size=2, num_workers=1):
    y = x * 2
""",
        "worker_seed",
        "aten.mul.Tensor",
        7,
    ),
    Planted(
        "the order of threads",
        """\
found = queue.Queue()
def work(i):
    time.sleep(0.002 * (os.urandom(1)[0] % 8))
    found.put(torch.ones(2) * i)
threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
[one.start() for one in threads]
[one.join() for one in threads]
x = torch.stack([found.get() for _ in threads])
""",
        "outside_data",
        "aten.stack.default",
        8,
    ),
    Planted(
        "who is ready first",
        """\
from concurrent.futures import ThreadPoolExecutor, as_completed
def work(i):
    time.sleep(0.002 * (os.urandom(1)[0] % 8))
    return float(i)
with ThreadPoolExecutor(8) as pool:
    found = [one.result() for one in as_completed([pool.submit(work, i) for i in range(8)], timeout=9)]
x = torch.tensor(found)
""",
        "outside_data",
        "aten.lift_fresh.default",
        7,
    ),
    Planted(
        "a generator that stands in its loop",
        """\
found = [next(values) for _ in range(3)]
x = torch.tensor(found)
""",
        "state_leak",
        "aten.lift_fresh.default",
        2,
        setup="def gen():\n    i = 0.0\n    while True:\n        yield i\n        i += 1\nvalues = gen()\nnext(values)",
    ),
    Planted(
        "taken apart by a match",
        """\
match [1, random.SystemRandom().random()]:
    case [a, b]:
        x = torch.ones(2) * b
""",
        "os_entropy",
        "aten.mul.Tensor",
        3,
    ),
    Planted(
        "beside a log",
        """\
with open(log, "a") as out:
    out.write("one more")
x = torch.ones(2) * np.random.default_rng().random()
""",
        "numpy_random",
        "aten.mul.Tensor",
        3,
        setup="import tempfile\nfolder = tempfile.TemporaryDirectory()\nlog = folder.name + '/log'\nopen(log, 'w').close()",
    ),
)

HEALTHY = {
    "compiled": (
        """\
net = torch.compile(nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Linear(16, 3)), backend="aot_eager")
opt = torch.optim.Adam(net.parameters())
X = torch.randn(8, 6)
""",
        """\
for _ in range(2):
    opt.zero_grad()
    net(X).pow(2).sum().backward()
    opt.step()
""",
    ),
    "training": (
        """\
net = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3))
opt = torch.optim.AdamW(net.parameters(), lr=1e-2)
sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 10)
X, Y, hist = torch.randn(64, 6), torch.randint(0, 3, (64,)), []
loader = DataLoader(TensorDataset(X, Y), batch_size=16, shuffle=True)
""",
        """\
for epoch in range(2):
    for x, y in loader:
        opt.zero_grad()
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        opt.step()
    sched.step()
    hist.append(loss.item())
""",
    ),
    "fused adam": (
        """\
net = nn.Linear(6, 3)
opt = torch.optim.Adam(net.parameters(), fused=True)
X = torch.randn(8, 6)
""",
        """\
for _ in range(3):
    opt.zero_grad(set_to_none=False)
    net(X).pow(2).sum().backward()
    opt.step()
""",
    ),
    "sparse gradients": (
        """\
table = nn.Embedding(10, 4, sparse=True)
opt = torch.optim.SparseAdam(table.parameters())
""",
        """\
table(torch.tensor([1, 2, 2])).sum().backward()
opt.step()
""",
    ),
    "workers": (
        "data = TensorDataset(torch.randn(8, 4))",
        """\
total = 0
for (x,) in DataLoader(data, batch_size=4, shuffle=True, num_workers=1):
    total = total + x.sum()
""",
    ),
    "generators from before": (
        """\
g = torch.Generator()
r, p, old = np.random.default_rng(3), random.Random(3), np.random.RandomState(3)
""",
        """\
x = torch.randn(3, generator=g) + torch.from_numpy(r.random(3)) * p.random() + torch.tensor(old.rand(3))
""",
    ),
    "containers and attributes": (
        """\
hist, d, seen = [], {'a': [1]}, set()
class A:
    n = 0
a = A()
""",
        """\
hist.append(torch.randn(2))
d['a'].append(3)
d['b'] = 4
seen.add(1)
A.n += 1
a.k = 5
new = torch.ones(2)
del d['a']
""",
    ),
    "frozen and replaced": (
        "net = nn.Linear(3, 3)",
        """\
net.weight.requires_grad_(False)
net.bias = nn.Parameter(torch.ones(3))
net(torch.ones(2, 3)).sum().backward()
""",
    ),
    "a clock that does not matter": (
        "",
        """\
t0 = time.time()
x = torch.randn(3) * 2
name = str(uuid.uuid4())
print(time.time() - t0)
""",
    ),
    "transforms": (
        "",
        """\
y = torch.vmap(lambda v: v * torch.ones(4))(torch.randn(3, 4))
g = torch.func.grad(lambda v: (v**2).sum())(torch.ones(3))
""",
    ),
    "convolutions": (
        """\
net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.MaxPool2d(2)).to(memory_format=torch.channels_last)
x = torch.randn(2, 3, 8, 8)
""",
        "net(x).mean().backward()",
    ),
    "other shapes and other memory": (
        "a, b, c, d = torch.ones(4), torch.ones(4), torch.arange(6.0).view(1, 2, 3), torch.ones(4)",
        """\
a.resize_(8)[4:] = 2
b.set_(torch.arange(6.0))
c.squeeze_().t_()
d.data = d.data[:3] * 2
y = a.sum() + b.sum() + c.sum() + d.sum()
""",
    ),
    "layers that are not initialised": (
        "net = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d())",
        "net(torch.randn(2, 3)).sum().backward()",
    ),
    "the environment": (
        "",
        """\
os.environ["TORCHDEBUG_PLANTED"] = os.environ.get("TORCHDEBUG_PLANTED", "") + "a"
x = torch.ones(len(os.environ["TORCHDEBUG_PLANTED"])) * 2
del os.environ["TORCHDEBUG_PLANTED"]
""",
    ),
    "arrays of any kind": (
        "from array import array\nobjects, numbers = np.array([{1: 2}, [3]], dtype=object), array('f', [1, 2])",
        """\
objects[0][5] = 6
objects[1].append(4)
objects[1] = objects[1] + [1]
numbers.append(3)
x = torch.tensor(objects[1]).sum() + sum(numbers)
""",
    ),
    "running sums, in inference mode": (
        "net = nn.Sequential(nn.BatchNorm1d(3), nn.InstanceNorm1d(3, track_running_stats=True))",
        """\
with torch.inference_mode():
    y = net(torch.randn(4, 3, 5))
""",
    ),
    "a cache that is filled row by row": (
        "",
        """\
k, v, m = torch.empty(2, 4, 3), torch.empty(2, 4, 3), torch.empty(4)
for i in range(4):
    k.index_copy_(1, torch.tensor([i]), torch.randn(2, 1, 3))
    v[:, i : i + 1] = torch.randn(2, 1, 3)
    m.masked_fill_(torch.arange(4) == i, i)
y = F.scaled_dot_product_attention(torch.randn(2, 1, 3), k, v).sum() + m.sum()
""",
    ),
    "a module that is imported first": (
        """\
import tempfile
from pathlib import Path
folder = tempfile.TemporaryDirectory()
Path(folder.name, "torchdebug_planted.py").write_text(
    "import torch\\nweight = torch.randn(3)\\ncount = 0\\ndef up():\\n    global count\\n    count += 1\\n    return count\\n"
)
""",
        """\
sys.modules.pop("torchdebug_planted", None)
sys.path.insert(0, folder.name)
import torchdebug_planted
sys.path.remove(folder.name)
x = torchdebug_planted.weight * torchdebug_planted.up()
count = torchdebug_planted.count
del torchdebug_planted
""",
    ),
    "a cache": (
        """\
import functools
@functools.cache
def noise(n):
    return torch.randn(n)
""",
        """\
x = noise(3)
y = torch.randn(2)
is_kept = noise(3) is x
""",
    ),
    "iterators that are on their way": (
        """\
numbered, count, turns, both = enumerate([5.0, 6.0, 7.0]), itertools.count(3), itertools.cycle([1.0, 2.0]), itertools.chain([1.0], [2.0])
part, pairs, sums = itertools.islice([1.0, 2.0, 3.0], 2), itertools.product([1.0, 2.0], [3.0]), itertools.accumulate([1.0, 2.0, 3.0])
again, here, whole = itertools.repeat(2.0, 5), itertools.tee(iter([1.0, 2.0]))[0], iter([1.0, 2.0])
held, named = {"rows": zip(itertools.count(), [5.0, 6.0])}, iter({"a": 1.0, "b": 2.0}.items())
for one in (numbered, count, turns, both, part, pairs, sums, again, here):
    next(one)
""",
        """\
x = torch.tensor([*next(numbered), next(count), next(turns), next(turns), next(both), next(part), *next(pairs), next(sums), next(again)])
y = torch.tensor([next(here), *whole, *next(held["rows"]), next(named)[1], next(count)])
""",
    ),
    "an object that holds an iterator": (
        """\
class Stream:
    def __init__(self):
        self.turns, self.count = itertools.cycle([1.0, 2.0]), itertools.count(1)
    def __next__(self):
        return next(self.turns) * next(self.count)
stream = Stream()
""",
        "x = torch.tensor([next(stream) for _ in range(3)])",
    ),
    "caches with a size": (
        """\
import functools
calls = []
@functools.lru_cache(maxsize=2)
def kept(n, *, scale=1.0):
    calls.append(n)
    return torch.rand(1) * n * scale
@functools.lru_cache(maxsize=8, typed=True)
def typed(*given, **named):
    return (len(calls), given, tuple(named))
class Tokens:
    misses = 0
    @functools.lru_cache
    def number(self, word):
        self.misses += 1
        return len(word)
tokens = Tokens()
kept(1), kept(2, scale=0.5), typed(1), typed(1.0, a=2), tokens.number("one")
""",
        """\
x = torch.stack([kept(1), kept(3), kept(2, scale=0.5), kept(1)])
y = torch.ones(2) * len(calls) * typed(1)[0] * typed(1.0, a=2)[0] * typed(True)[0]
z = torch.tensor([tokens.number(word) for word in ("one", "three", "three")]) * tokens.misses
""",
    ),
    "arrays that know more": (
        """\
masked, table = np.ma.array([1.0, 2.0, 3.0], mask=[0, 1, 0]), np.rec.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")])
alone = np.array({"a": 1}, dtype=object)
""",
        """\
masked[0] += 1
masked.mask[2] = True
table.a[0] += 1
alone.item()["a"] += 1
x = torch.ones(2) * float(masked.sum()) * int(table.a[0]) * alone.item()["a"]
""",
    ),
    "what is logged and warned of is counted": (
        """\
import logging, warnings
class Count(logging.Handler):
    n = 0
    def emit(self, record):
        self.n += 1
class Seen(logging.Filter):
    n = 0
    def filter(self, record):
        Seen.n += 1
        return True
count, log = Count(), logging.Logger("torchdebug_planted", logging.DEBUG)
log.addHandler(count)
log.addFilter(Seen())
""",
        """\
x = torch.ones(2)
for i in range(3):
    if log.isEnabledFor(logging.DEBUG):
        log.debug("norm %s", x.norm())
with warnings.catch_warnings(record=True) as warned:
    warnings.simplefilter("always")
    warnings.warn("twice")
    warnings.warn("twice")
y = x * count.n * Seen.n * len(warned)
""",
    ),
}
"""Setup and body; all are the same each time."""
