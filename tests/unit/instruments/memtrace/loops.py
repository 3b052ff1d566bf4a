"""Loops that leak, and loops that only look so: each with what a person would answer who has read it."""

from __future__ import annotations

from dataclasses import dataclass

HERE = "# <-"
SETUP = """import torch
from torch import nn
import torch.nn.functional as F
from collections import deque, defaultdict
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 10))
opt = torch.optim.Adam(net.parameters())
x, y = torch.randn(32, 64), torch.randint(10, (32,))

def batches(count=12, size=32):
    for _ in range(count):
        yield torch.randn(size, 64), torch.randint(10, (size,))

def learn(a, b):
    opt.zero_grad()
    loss = F.cross_entropy(net(a), b)
    loss.backward()
    opt.step()
    return loss
"""
STEP = """    opt.zero_grad()
    loss = F.cross_entropy(net(a), b)
    loss.backward()
    opt.step()
"""


@dataclass(frozen=True)
class Leak:
    """What is to be said of a loop that leaks."""

    holder: str
    """How the holder's path begins; ``*`` for one that has no name."""
    least: int
    """Bytes an iteration."""
    most: int
    fix: str = ""
    """A part of the fix."""


@dataclass(frozen=True)
class Graph:
    """Of a loop in which only the graph grows."""

    holder: str
    fix: str = ""


Loop = tuple[str, Leak | Graph | None]
"""(code, what is wrong with it). The line that makes what is kept ends with `HERE`, where there is one."""

CLEAN: dict[str, str] = {
    "training": "for a, b in batches():\n" + STEP,
    "a number is kept": "losses = []\nfor a, b in batches():\n" + STEP + "    losses.append(loss.item())",
    "a detached scalar is kept": "losses = []\nfor a, b in batches():\n" + STEP + "    losses.append(loss.detach())",
    "a running total of numbers": "total = 0.0\nfor a, b in batches():\n" + STEP + "    total += loss.item()",
    "a detached running total": "total = torch.zeros(())\nfor a, b in batches():\n" + STEP + "    total += loss.detach()",
    "accumulated gradients": """for i, (a, b) in enumerate(batches(16)):
    loss = F.cross_entropy(net(a), b) / 4
    loss.backward()
    if i % 4 == 3:
        opt.step()
        opt.zero_grad()
""",
    "gradients set to zero": "for a, b in batches():\n" + STEP.replace("zero_grad()", "zero_grad(set_to_none=False)"),
    "evaluation without gradients": """net.eval()
right = 0
with torch.no_grad():
    for a, b in batches():
        right += (net(a).argmax(1) == b).sum()
""",
    "evaluation, inference mode": """net.eval()
right = 0
with torch.inference_mode():
    for a, b in batches():
        right += (net(a).argmax(1) == b).sum()
""",
    "training, then evaluation": "for a, b in batches():\n"
    + STEP
    + """
    with torch.no_grad():
        seen = net(a).argmax(1)
best = None
with torch.no_grad():
    for a, b in batches():
        best = net(a)
""",
    "two epochs with evaluation": """for epoch in range(3):
    for a, b in batches(6):
        learn(a, b)
    with torch.no_grad():
        for a, b in batches(4):
            right = (net(a).argmax(1) == b).float().mean()
""",
    "a bounded deque": "last = deque(maxlen=3)\nfor a, b in batches(20):\n" + STEP + "    last.append(net(a).detach())",
    "a replay buffer with a limit": """replay = deque(maxlen=4)
for a, b in batches(20):
    replay.append((a, b))
    for c, d in list(replay)[-2:]:
        learn(c, d)
""",
    "the best model": """best, best_state = float("inf"), None
for a, b in batches():
    loss = learn(a, b).item()
    if loss < best:
        best, best_state = loss, {name: one.clone() for name, one in net.state_dict().items()}
""",
    "a moving average of weights": """import copy
average = copy.deepcopy(net)
for a, b in batches():
    learn(a, b)
    with torch.no_grad():
        for one, other in zip(average.parameters(), net.parameters()):
            one.lerp_(other, 0.1)
""",
    "a scheduler": """scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 12)
for a, b in batches():
    learn(a, b)
    scheduler.step()
""",
    "lengths that vary": """for size in (5, 40, 17, 33, 8, 60, 21, 2, 49, 12, 30, 7):
    learn(torch.randn(size, 64), torch.randint(10, (size,)))
""",
    "batches that grow": "for size in range(4, 64, 4):\n    learn(torch.randn(size, 64), torch.randint(10, (size,)))",
    "batches that grow, by hand": """for size in range(4, 64, 4):
    a, b = torch.randn(size, 64), torch.randint(10, (size,))
"""
    + STEP,
    "lengths that grow, without gradients": """with torch.no_grad():
    for size in range(4, 64, 4):
        out = net(torch.randn(size, 64))
""",
    "an early end": "for i, (a, b) in enumerate(batches()):\n" + STEP + "    if i == 6:\n        break",
    "a warm-up": "for a, b in batches(3):\n    net(a)\nfor a, b in batches():\n" + STEP,
    "an exception that is caught": """for i, (a, b) in enumerate(batches()):
    try:
        learn(a[:, :60] if i % 4 == 1 else a, b)
    except RuntimeError:
        continue
""",
    "adversaries": """fake, judge = nn.Linear(8, 64), nn.Linear(64, 1)
first, second = torch.optim.Adam(fake.parameters()), torch.optim.Adam(judge.parameters())
for a, b in batches():
    made = fake(torch.randn(32, 8))
    loss_d = F.softplus(-judge(a)).mean() + F.softplus(judge(made.detach())).mean()
    second.zero_grad(); loss_d.backward(); second.step()
    loss_g = F.softplus(-judge(made)).mean()
    first.zero_grad(); loss_g.backward(); first.step()
""",
    "hidden state, detached": """cell = nn.GRUCell(64, 32)
h = torch.zeros(32, 32)
for a, b in batches():
    h = cell(a, h.detach())
    loss = h.square().mean()
    loss.backward()
""",
    "truncated backpropagation": """cell = nn.GRUCell(64, 32)
h, loss = torch.zeros(32, 32), 0
for i, (a, b) in enumerate(batches(24)):
    h = cell(a, h)
    loss = loss + h.square().mean()
    if i % 4 == 3:
        loss.backward()
        h, loss = h.detach(), 0
""",
    "a key-value cache within each sequence": """head = nn.Linear(64, 64)
with torch.no_grad():
    for sequence in range(4):
        keys = torch.zeros(1, 0, 64)
        for t in range(6):
            keys = torch.cat([keys, head(torch.randn(1, 1, 64))], 1)
""",
    "a bounded cache": """cache = {}
def cached(key):
    if key not in cache:
        cache[key] = torch.randn(32, 64)
    return cache[key]
for i in range(16):
    learn(cached(i % 3), y)
""",
    "second derivatives": """for a, b in batches():
    a = a.requires_grad_()
    out = net(a).sum()
    slope, = torch.autograd.grad(out, a, create_graph=True)
    opt.zero_grad()
    slope.square().mean().backward()
    opt.step()
""",
    "a graph kept for one step": """for a, b in batches():
    opt.zero_grad()
    loss = F.cross_entropy(net(a), b)
    loss.backward(retain_graph=True)
    loss.backward()
    opt.step()
""",
    "lbfgs": """few = torch.optim.LBFGS(net.parameters(), max_iter=4, history_size=3)
def closure():
    few.zero_grad()
    loss = F.cross_entropy(net(x), y)
    loss.backward()
    return loss
for _ in range(6):
    few.step(closure)
""",
    "a hook that is removed": """for a, b in batches():
    kept = []
    handle = net[1].register_forward_hook(lambda m, i, o: kept.append(o.detach()))
    learn(a, b)
    handle.remove()
""",
    "a hook that keeps the last": """latest = {}
net[1].register_forward_hook(lambda m, i, o: latest.update(hidden=o))
for a, b in batches():
    learn(a, b)
""",
    "a loader": """data = torch.utils.data.TensorDataset(torch.randn(300, 64), torch.randint(10, (300,)))
for epoch in range(2):
    for a, b in torch.utils.data.DataLoader(data, 32, shuffle=True):
        learn(a, b)
""",
    "a list of all batches beforehand": """made = list(batches(12))
for a, b in made:
    learn(a, b)
""",
    "models made one after another": """for width in (8, 16, 32, 64, 16, 8):
    model = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))
    update = torch.optim.Adam(model.parameters())
    for a, b in batches(4):
        update.zero_grad()
        F.cross_entropy(model(a), b).backward()
        update.step()
""",
    "an optimizer that is lazy in its state": """late = nn.Linear(64, 64)
update = torch.optim.Adam([*net.parameters(), *late.parameters()])
for i, (a, b) in enumerate(batches()):
    update.zero_grad()
    F.cross_entropy(net(late(a) if i > 5 else a), b).backward()
    update.step()
""",
    "results joined at the end, in numbers": """rows = []
with torch.no_grad():
    for a, b in batches():
        rows += net(a).argmax(1).tolist()
""",
    "a preallocated history": """history = torch.zeros(12, 32, 10)
with torch.no_grad():
    for i, (a, b) in enumerate(batches()):
        history[i] = net(a)
""",
    "checkpoints in a function": """from torch.utils.checkpoint import checkpoint
def forward(a):
    return net[2](checkpoint(lambda z: net[1](net[0](z)), a, use_reentrant=False))
for a, b in batches():
    opt.zero_grad()
    F.cross_entropy(forward(a), b).backward()
    opt.step()
""",
    "autocast": """for a, b in batches():
    opt.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        loss = F.cross_entropy(net(a), b)
    loss.backward()
    opt.step()
""",
    "the last ten of thirty": """last = deque(maxlen=10)
for a, b in batches(30):
    opt.zero_grad()
    loss = F.cross_entropy(net(a), b)
    loss.backward()
    opt.step()
    last.append(net(a).detach())
""",
    "the last six outputs": """last = deque(maxlen=6)
for a, b in batches(40):
    out = net(a)
    F.cross_entropy(out, b).backward()
    opt.step(); opt.zero_grad()
    last.append(out.detach())
""",
    "outputs of each epoch": """for epoch in range(4):
    outs = []
    with torch.no_grad():
        for a, b in batches(8):
            outs.append(net(a))
    score = torch.cat(outs).mean()
""",
    "predictions": """preds = []
with torch.no_grad():
    for a, b in batches(20):
        preds.append(net(a).argmax(1))
""",
    "batches that grow, stacked": """for size in range(2, 40, 2):
    a = torch.stack([torch.randn(64) for _ in range(size)])
    net(a).sum().backward()
""",
    "joined with itself": """for a, b in batches(12):
    c = torch.cat([a, a])
    net(c).sum().backward()
""",
}

CLEAN |= {
    "a cache that is full after a third of the loop": """cache = {}
for i, (a, b) in enumerate(batches(15)):
    learn(a, b)
    if i % 5 not in cache:
        cache[i % 5] = torch.randn(64, 64)
""",
    "a cache whose keys come in any order": """cache, keys = {}, [0, 3, 1, 0, 4, 2, 3, 1, 0, 5, 2, 4, 1, 0, 3, 5, 2, 1, 4, 0, 3, 2, 5, 1]
for key in keys:
    learn(x, y)
    if key not in cache:
        cache[key] = torch.randn(64, 64)
""",
    "a data set that is read once": """class Read(torch.utils.data.Dataset):
    def __init__(self):
        self.rows = {}
    def __len__(self):
        return 64
    def __getitem__(self, at):
        if at not in self.rows:
            self.rows[at] = (torch.randn(64), at % 10)
        return self.rows[at]
loader = torch.utils.data.DataLoader(Read(), 8)
for epoch in range(4):
    for a, b in loader:
        learn(a, b)
""",
    "a cache inside the model, by length": """class Placed(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.places = nn.Linear(64, 10), {}
    def forward(self, a):
        if len(a) not in self.places:
            self.places[len(a)] = torch.randn(len(a), 64)
        return self.inner(a + self.places[len(a)])
model = Placed()
for size in (8, 16, 24, 32, 40, 48) * 5:
    F.cross_entropy(model(torch.randn(size, 64)), torch.randint(10, (size,))).backward()
""",
    "a cache of a function": """import functools
@functools.lru_cache(maxsize=None)
def table(size):
    return torch.arange(size * 1000.0)
for i in range(30):
    learn(x, y)
    table(i % 6 + 1).sum()
""",
    "the last six states": """import copy
last = deque(maxlen=6)
for a, b in batches():
    learn(a, b)
    last.append(copy.deepcopy(net.state_dict()))
""",
    "texts that are written one after another": """head = nn.Linear(512, 512)
def write():
    text = torch.zeros(1, 512)
    with torch.no_grad():
        for _ in range(9):
            text = torch.cat([text, head(text[-1:])])
    return text.mean()
for _ in range(3):
    write()
""",
    "a text that is written in a function": """head = nn.Linear(512, 512)
def write():
    text = torch.zeros(1, 512)
    with torch.no_grad():
        for _ in range(24):
            text = torch.cat([text, head(text[-1:])])
    return text.mean()
write()
""",
    "predictions in a function": """wide = nn.Linear(64, 512)
def predict():
    found = []
    with torch.no_grad():
        for a, b in batches(20):
            found.append(wide(a))
    return torch.cat(found).argmax(1)
predict()
""",
}

CLEAN |= {
    "weights that are adapted to each task": """for task in range(6):
    fast = dict(net.named_parameters())
    for _ in range(3):
        loss = F.cross_entropy(torch.func.functional_call(net, fast, (x,)), y)
        slopes = torch.autograd.grad(loss, list(fast.values()), create_graph=True)
        fast = {name: one - 0.1 * slope for (name, one), slope in zip(fast.items(), slopes)}
    outer = F.cross_entropy(torch.func.functional_call(net, fast, (x,)), y)
    opt.zero_grad(); outer.backward(); opt.step()
""",
    "a model of each run": """models = []
for fold in range(6):
    model = nn.Linear(64, 10)
    update = torch.optim.Adam(model.parameters())
    for a, b in batches(4):
        update.zero_grad(); F.cross_entropy(model(a), b).backward(); update.step()
    models.append(model)
""",
    "scores of an evaluation": """scores = []
with torch.no_grad():
    for a, b in batches(20):
        scores.append(net(a).repeat(1, 20))
scores = torch.cat(scores)
""",
    "features that are made before a training": """found = []
with torch.no_grad():
    for a, b in batches():
        found.append((net[0](a), b))
head = nn.Linear(128, 10)
for hidden, b in found:
    F.cross_entropy(head(hidden), b).backward()
""",
    "what a teacher says, asked once of each batch": """teacher, said, batch = nn.Linear(64, 10), {}, list(batches(8))
for epoch in range(5):
    for i, (a, b) in enumerate(batch):
        if i not in said:
            with torch.no_grad():
                said[i] = teacher(a).repeat(1, 8)
        opt.zero_grad(); F.mse_loss(net(a).repeat(1, 8), said[i]).backward(); opt.step()
""",
    "states at random from all that were": """kept, places = [], [0, 3, 5, 1, 9, 12, 2, 20, 4, 30, 0, 17, 25, 3, 33, 11]
for i, (a, b) in enumerate(batches(40)):
    learn(a, b)
    if len(kept) < 6:
        kept.append(net[0](a).detach())
    elif places[i % 16] < 6:
        kept[places[i % 16]] = net[0](a).detach()
""",
    "every fifth output, the last three": """kept = []
for i, (a, b) in enumerate(batches(60)):
    out = net(a.repeat(4, 1))
    opt.zero_grad(); out.sum().backward(); opt.step()
    if i % 5 == 0:
        kept = [*kept, out.detach()][-3:]
""",
    "the log-probabilities of an episode, for one update": """policy = nn.Linear(8, 2)
update, chosen = torch.optim.Adam(policy.parameters()), []
for t in range(30):
    odds = torch.distributions.Categorical(logits=policy(torch.randn(16, 8)))
    chosen.append(odds.log_prob(odds.sample()))
update.zero_grad(); (-torch.stack(chosen).sum()).backward(); update.step()
""",
    "embeddings of all batches, for one loss": """encoder, found = nn.Linear(64, 32), []
for a, b in batches():
    found.append(encoder(a))
whole = torch.cat(found)
(whole @ whole.T).mean().backward()
""",
    "losses that are summed up for each update": """for step in range(4):
    total = 0
    for a, b in batches(6):
        total = total + F.cross_entropy(net(a), b)
    opt.zero_grad(); total.backward(); opt.step()
""",
    "a model that grows in stages": """class Grows(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(64, 64)])
    def forward(self, a):
        for block in self.blocks:
            a = F.relu(block(a))
        return a
model = Grows()
for stage in range(5):
    update = torch.optim.Adam(model.parameters())
    for a, b in batches(4):
        update.zero_grad(); model(a).sum().backward(); update.step()
    model.blocks.append(nn.Linear(64, 64))
""",
    "a model that grows, and its optimizer with it": """model = nn.Sequential(nn.Linear(64, 64))
update = torch.optim.Adam(model.parameters())
for stage in range(5):
    for a, b in batches(4):
        update.zero_grad(); model(a).sum().backward(); update.step()
    model.append(nn.Linear(64, 64))
    update.add_param_group({"params": model[-1].parameters()})
""",
    "a deque with a limit that is far away": """replay = deque(maxlen=1000)
for a, b in batches(20):
    replay.append((a, b))
    learn(*replay[0])
""",
    "a function's cache with a limit that is far away": """import functools
@functools.lru_cache(maxsize=128)
def table(at):
    return torch.randn(64, 64)
for i, (a, b) in enumerate(batches(20)):
    learn(a, b)
    table(i)
""",
    "weak references": """import weakref
seen = []
for a, b in batches(14):
    out = net(a)
    seen.append(weakref.ref(out))
    opt.zero_grad(); F.cross_entropy(out, b).backward(); opt.step()
""",
    "the last graphs, without a model": """w = torch.randn(64, 256, requires_grad=True)
last = deque(maxlen=5)
for i in range(30):
    last.append((torch.randn(32, 64) @ w).tanh().sum())
""",
}

KEPT = 32 * 128 * 4
"""One activation of the hidden layer."""
OUT = 32 * 10 * 4
ALL = KEPT * 8

LEAKING: dict[str, Loop] = {
    "only at times": (
        f"""kept = []
for i, (a, b) in enumerate(batches(32)):
    learn(a, b)
    if i % 4 == 0:
        kept.append(torch.ones(64, 64))  {HERE}
""",
        Leak("kept[0]", 64 * 64, 64 * 64 * 2, "kept"),
    ),
    "the larger of two at one line": (
        f"few, many = [], []\nfor a, b in batches():\n    learn(a, b)\n    few.append(a[0] * 2); many.append(a * 2)  {HERE}",
        Leak("many[0]", 32 * 64 * 4, 33 * 64 * 4, "many"),
    ),
    "callbacks of a trainer that has returned": (
        f"""class Callback:
    def __init__(self):
        self.outs = {{}}
class Trainer:
    def __init__(self):
        self.callbacks = [Callback()]
    def fit(self):
        for i, (a, b) in enumerate(batches()):
            learn(a, b)
            out = net(a).detach()  {HERE}
            for callback in self.callbacks:
                callback.outs[i] = out
trainer = Trainer()
trainer.fit()
""",
        Leak("trainer.callbacks[0].outs", OUT, OUT),
    ),
    "a cache of a function without a limit": (
        f"""import functools
@functools.lru_cache(maxsize=None)
def table(at):
    return torch.ones(64, 64)  {HERE}
for i in range(12):
    learn(x, y)
    table(i)
""",
        Leak("table.<cache>", 64 * 64 * 4, 64 * 64 * 4, "`table.cache_clear()`"),
    ),
    "objects that hold each other": (
        f"""class Row:
    def __init__(self, value, before):
        self.value, self.before = value, before
row = None
for a, b in batches():
    learn(a, b)
    row = Row(a * 2, row)  {HERE}
""",
        Leak("row.before", 32 * 64 * 4, 32 * 64 * 4, "keep in `row` only"),
    ),
    "a list of losses, evaluation": (
        f"losses = []\nfor a, b in batches():\n    loss = F.cross_entropy(net(a), b)  {HERE}\n    losses.append(loss)",
        Leak("losses[0]", KEPT, ALL, "no_grad"),
    ),
    "a list of outputs": (
        f"""outs = []
for a, b in batches():
    opt.zero_grad()
    out = net(a)  {HERE}
    F.cross_entropy(out, b).backward()
    opt.step()
    outs.append(out)
""",
        Leak("outs[0]", OUT, ALL, "outs"),
    ),
    "a dict by step": (
        f"seen = {{}}\nfor i, (a, b) in enumerate(batches()):\n    learn(a, b)\n    seen[i] = net(a)  {HERE}",
        Leak("seen[0]", KEPT, ALL, "detach"),
    ),
    "a deque without a limit": (
        f"last = deque()\nfor a, b in batches():\n    learn(a, b)\n    with torch.no_grad():\n        last.append(net(a))  {HERE}",
        Leak("last[0]", OUT, OUT),
    ),
    "a dict of lists": (
        f"log = defaultdict(list)\nfor a, b in batches():\n    learn(a, b)\n    log['features'].append(net[0](a))  {HERE}",
        Leak("log['features'][0]", KEPT, ALL, "detach"),
    ),
    "an attribute of a trainer": (
        f"""class Trainer:
    def __init__(self):
        self.history = []
    def step(self, a, b):
        opt.zero_grad()
        out = net(a)
        loss = F.cross_entropy(out, b)
        loss.backward()
        opt.step()
        self.history.append(out.softmax(1))  {HERE}
trainer = Trainer()
for a, b in batches():
    trainer.step(a, b)
""",
        Leak("trainer.history[0]", OUT, ALL, "trainer.history"),
    ),
    "an attribute of a class": (
        f"""class Seen:
    kept = []
for a, b in batches():
    learn(a, b)
    Seen.kept.append(net(a).detach())  {HERE}
""",
        Leak("Seen.kept[0]", OUT, OUT),
    ),
    "a model that keeps its outputs": (
        f"""class Keeps(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.kept = nn.Linear(64, 10), []
    def forward(self, a):
        out = self.inner(a)  {HERE}
        self.kept.append(out)
        return out
model = Keeps()
update = torch.optim.SGD(model.parameters(), 0.1)
for a, b in batches():
    update.zero_grad()
    F.cross_entropy(model(a), b).backward()
    update.step()
""",
        Leak("model.kept[0]", OUT, ALL, "model.kept"),
    ),
    "a closure": (
        f"""def recorder():
    kept = []
    def record(value):
        kept.append(value)
    return record
record = recorder()
for a, b in batches():
    learn(a, b)
    record(net(a).detach())  {HERE}
""",
        Leak("record.<closure kept>[0]", OUT, OUT),
    ),
    "a default argument": (
        f"""def note(value, kept=[]):
    kept.append(value)
for a, b in batches():
    learn(a, b)
    note(net(a).detach())  {HERE}
""",
        Leak("note.", OUT, OUT, "kept"),
    ),
    "a generator that remembers": (
        f"""def remembering():
    kept = []
    while True:
        a = torch.randn(32, 64)  {HERE}
        kept.append(a)
        yield a
source = remembering()
for _ in range(12):
    learn(next(source), y)
""",
        Leak("source", 32 * 64 * 4, 32 * 64 * 4),
    ),
    "lru_cache": (
        f"""from functools import lru_cache
@lru_cache(maxsize=None)
def features(step):
    return torch.randn(32, 64)  {HERE}
for step in range(12):
    learn(features(step), y)
""",
        Leak("*", 32 * 64 * 4, 32 * 64 * 4),
    ),
    "a cache of a module of its own": (
        f"""import sys, types
lib = types.ModuleType("lib")
sys.modules["lib"] = lib
lib._CACHE = {{}}
for i, (a, b) in enumerate(batches()):
    learn(a, b)
    lib._CACHE[i] = net(a).detach()  {HERE}
""",
        Leak("lib._CACHE[0]", OUT, OUT, "cache"),
    ),
    "a forward hook": (
        f"""kept = []
net[1].register_forward_hook(lambda m, i, o: kept.append(o))
for a, b in batches():
    opt.zero_grad()
    loss = F.cross_entropy(net(a), b)  {HERE}
    loss.backward()
    opt.step()
""",
        Leak("kept[0]", KEPT, ALL, "kept"),
    ),
    "a hook whose list has no name": (
        f"""def spy(module):
    store = []
    module.register_forward_hook(lambda m, i, o: store.append(o.detach().clone()))  {HERE}
spy(net[1])
for a, b in batches():
    learn(a, b)
""",
        Leak("net", KEPT, KEPT, "handle"),
    ),
    "hooks added at each step": (
        f"""for a, b in batches():
    big = torch.randn(32, 64)  {HERE}
    net[1].register_forward_hook(lambda m, i, o, big=big: None)
    learn(a, b)
""",
        Leak("net", 32 * 64 * 4, 32 * 64 * 4, "remove()"),
    ),
    "hooks on a weight": (
        f"""for a, b in batches():
    mask = (torch.rand(128, 64) > 0.5).float()  {HERE}
    net[0].weight.register_hook(lambda grad, mask=mask: grad * mask)
    learn(a, b)
""",
        Leak("net", 128 * 64 * 4, 128 * 64 * 4, "remove()"),
    ),
    "hidden state with its history": (
        f"""cell = nn.GRUCell(64, 32)
h = torch.zeros(32, 32)
for a, b in batches():
    h = cell(a, h)  {HERE}
""",
        Leak("h.grad_fn", 32 * 32 * 4, 1 << 20, "no_grad"),
    ),
    "a running loss before backward": (
        f"""total = 0
for a, b in batches():
    total = total + F.cross_entropy(net(a), b)  {HERE}
""",
        Leak("total.grad_fn", KEPT, ALL, "no_grad"),
    ),
    "retain_graph and a list": (
        f"""losses = []
for a, b in batches():
    opt.zero_grad()
    loss = F.cross_entropy(net(a), b)  {HERE}
    loss.backward(retain_graph=True)
    opt.step()
    losses.append(loss)
""",
        Leak("losses[0].grad_fn", KEPT, ALL, ".item()"),
    ),
    "a metric that keeps the graph": (
        f"""class Mean:
    def __init__(self):
        self.total, self.count = 0, 0
    def update(self, value):
        self.total = self.total + value
        self.count += 1
metric = Mean()
for a, b in batches():
    learn(a, b)
    metric.update(net(a).std())  {HERE}
""",
        Leak("metric.total.grad_fn", KEPT, ALL, "metric.total"),
    ),
    "a tensor that swells": (
        f"""hist = torch.zeros(0, 10)
with torch.no_grad():
    for a, b in batches():
        hist = torch.cat([hist, net(a)])  {HERE}
""",
        Leak("hist", OUT, OUT, "hist"),
    ),
    "a tensor that swells in training": (
        f"""hist = torch.zeros(0, 64)
for a, b in batches():
    learn(a, b)
    hist = torch.cat([hist, a])  {HERE}
""",
        Leak("hist", 32 * 64 * 4, 32 * 64 * 4, "hist"),
    ),
    "a swelling attribute": (
        f"""class Memory:
    bank = torch.zeros(0, 128)
memory = Memory()
for a, b in batches():
    learn(a, b)
    memory.bank = torch.vstack((memory.bank, net[0](a).detach()))  {HERE}
""",
        Leak("memory.bank", KEPT, KEPT, "memory.bank"),
    ),
    "a key-value cache without an end": (
        f"""head = nn.Linear(64, 64)
keys = torch.zeros(8, 0, 64)
with torch.no_grad():
    for t in range(16):
        keys = torch.cat([keys, head(torch.randn(8, 1, 64))], 1)  {HERE}
""",
        Leak("keys", 8 * 64 * 4, 8 * 64 * 4, "keys"),
    ),
    "in the evaluation after training": (
        f"""for a, b in batches():
    learn(a, b)
outs = []
for a, b in batches():
    outs.append(net(a))  {HERE}
""",
        Leak("outs[0]", KEPT, ALL, "no_grad"),
    ),
    "every third step": (
        f"""kept = []
for i, (a, b) in enumerate(batches(30)):
    learn(a, b)
    if i % 3 == 0:
        kept.append(net(a).detach().repeat(1, 20))  {HERE}
""",
        Leak("kept[0]", OUT * 5, OUT * 21),
    ),
    "every fifth step": (
        f"""kept = []
for i, (a, b) in enumerate(batches(50)):
    learn(a, b)
    if i % 5 == 4:
        kept.append(torch.randn(64, 512))  {HERE}
""",
        Leak("kept[0]", 64 * 512 * 4 // 6, 64 * 512 * 4),
    ),
    "from the middle on": (
        f"""kept = []
for i, (a, b) in enumerate(batches(60)):
    learn(a, b)
    if i >= 30:
        kept.append(net(a).repeat(1, 20))  {HERE}
""",
        Leak("kept[0]", OUT * 10, ALL * 4),
    ),
    "two at once": (
        f"""outs, features = [], []
for a, b in batches():
    learn(a, b)
    outs.append(net(a).detach())
    features.append(net[0](a).detach())  {HERE}
""",
        Leak("features[0]", KEPT, KEPT + OUT, "features"),
    ),
    "inside a function": (
        f"""def train():
    outs = []
    for a, b in batches():
        learn(a, b)
        outs.append(net(a))  {HERE}
    return len(outs)
train()
""",
        Leak("train() local 'outs'[0]", KEPT, ALL, "outs"),
    ),
    "nested functions": (
        f"""def run(epochs):
    kept = []
    def epoch():
        for a, b in batches(4):
            learn(a, b)
            kept.append(net(a).detach())  {HERE}
    for _ in range(epochs):
        epoch()
run(4)
""",
        Leak("run() local 'kept'[0]", OUT, OUT, "kept"),
    ),
    "optimizer state that grows": (
        f"""class Remembers(torch.optim.SGD):
    def step(self, closure=None):
        for group in self.param_groups:
            for one in group["params"]:
                self.state[one].setdefault("all", []).append(one.grad.clone())  {HERE}
        return super().step(closure)
update = Remembers(net.parameters(), 0.1)
for a, b in batches():
    update.zero_grad()
    F.cross_entropy(net(a), b).backward()
    update.step()
""",
        Leak("update.state", 9000 * 4, 10000 * 4, "update.state"),
    ),
    "adversaries": (
        f"""fake, judge = nn.Linear(8, 64), nn.Linear(64, 1)
first, second = torch.optim.Adam(fake.parameters()), torch.optim.Adam(judge.parameters())
made = []
for a, b in batches():
    made.append(fake(torch.randn(32, 8)))  {HERE}
    loss_d = F.softplus(-judge(a)).mean() + F.softplus(judge(made[-1].detach())).mean()
    second.zero_grad(); loss_d.backward(); second.step()
    loss_g = F.softplus(-judge(made[-1])).mean()
    first.zero_grad(); loss_g.backward(); first.step()
""",
        Leak("made[0]", 32 * 64 * 4, 32 * 80 * 4, "made"),
    ),
    "models that are kept": (
        f"""import copy
models = []
for a, b in batches():
    learn(a, b)
    models.append(copy.deepcopy(net))  {HERE}
""",
        Leak("models[0]", 9000 * 4, 10000 * 4, "models"),
    ),
    "state dicts that are kept": (
        f"""saved = []
for a, b in batches():
    learn(a, b)
    saved.append({{name: one.clone() for name, one in net.state_dict().items()}})  {HERE}
""",
        Leak("saved[0]", 9000 * 4, 10000 * 4, "saved"),
    ),
    "batches that are kept": (
        f"""kept = []
for _ in range(12):
    a, b = torch.randn(32, 64), torch.randint(10, (32,))  {HERE}
    kept.append(a)
    learn(a, b)
""",
        Leak("kept[0]", 32 * 64 * 4, 32 * 64 * 4),
    ),
    "a view of a large tensor": (
        f"""firsts = []
for a, b in batches():
    learn(a, b)
    with torch.no_grad():
        hidden = net[0](a)  {HERE}
    firsts.append(hidden[0])
""",
        Leak("firsts[0]", KEPT, KEPT, "firsts"),
    ),
    "a leak before an error": (
        f"""kept = []
for i, (a, b) in enumerate(batches()):
    learn(a, b)
    kept.append(net(a))  {HERE}
    if i == 8:
        raise ValueError("enough")
""",
        Leak("kept[0]", KEPT, ALL, "kept"),
    ),
    "gradients that are kept": (
        """slopes = []
for a, b in batches():
    opt.zero_grad(set_to_none=True)
    loss = F.cross_entropy(net(a), b)
    loss.backward()
    slopes.append([one.grad for one in net.parameters()])
    opt.step()
""",
        Leak("slopes[0]", 9000 * 4, 10000 * 4, "slopes"),
    ),
    "clones of gradients": (
        f"""slopes = []
for a, b in batches():
    learn(a, b)
    slopes.append([one.grad.clone() for one in net.parameters()])  {HERE}
""",
        Leak("slopes[0]", 9000 * 4, 10000 * 4, "slopes"),
    ),
    "late, in a function": (
        f"""def train():
    kept = []
    for i, (a, b) in enumerate(batches(60)):
        learn(a, b)
        if i >= 30:
            kept.append(net(a).detach())  {HERE}
train()
""",
        Leak("train() local 'kept'[", 1280, 1280),
    ),
    "late, in the forward": (
        f"""losses = []
for i, (a, b) in enumerate(batches(80)):
    opt.zero_grad()
    out = net(a.repeat(16, 1))  {HERE}
    out.sum().backward()
    opt.step()
    if i >= 40:
        losses.append(out)
""",
        Leak("losses[", 20480, 81920),
    ),
    "a bank inside the model": (
        f"""class Mem(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(64, 64)
        self.bank = torch.zeros(0, 64)
    def forward(self, a):
        h = self.l(a)
        self.bank = torch.cat([self.bank, h.detach()])  {HERE}
        return h
m = Mem()
for a, b in batches(20):
    m(a).sum().backward()
    m.zero_grad()
""",
        Leak("m.bank", 8192, 8192),
    ),
    "outputs of a training step": (
        f"""class Module(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(64, 10); self.outputs = []
    def training_step(self, batch):
        a, b = batch
        out = self.net(a)  {HERE}
        loss = F.cross_entropy(out, b)
        self.outputs.append({{'loss': loss, 'out': out}})
        return loss
mod = Module()
o = torch.optim.Adam(mod.parameters())
for batch in batches(15):
    o.zero_grad(); mod.training_step(batch).backward(); o.step()
""",
        Leak("mod.outputs[0]", 1280, 3840),
    ),
    "a growing data set": (
        f"""data = torch.zeros(0, 64)
for a, b in batches(10):
    data = torch.cat([data, a])  {HERE}
    learn(data, torch.randint(10, (len(data),)))
""",
        Leak("data", 8192, 8192),
    ),
}

LEAKING |= {
    "layers that are called one by one": (
        f"""layers = [nn.Linear(64, 64) for _ in range(3)]
update = torch.optim.SGD([one for layer in layers for one in layer.parameters()], 0.01)
kept = []
for a, b in batches():
    for layer in layers:
        a = torch.tanh(layer(a))
    update.zero_grad(); a.sum().backward(); update.step()
    kept.append(a.detach().repeat(1, 4))  {HERE}
""",
        Leak("kept[0]", 32 * 64 * 16, 32 * 64 * 16, "kept"),
    ),
    "the larger of two, with a small one beside it": (
        f"""first, second = [], []
for i in range(12):
    a, b = torch.randn(32, 64), torch.randn(4)
    learn(a, y)
    with torch.no_grad():
        out = net(a).softmax(1)  {HERE}
    first.append(out); second.append(b)
""",
        Leak("first[0]", OUT, OUT, "first"),
    ),
    "many small lines of one variable": (
        f"""class Outputs(list): pass
one, many = [], Outputs()
for a, b in batches():
    learn(a, b)
    one.append(torch.ones(40, 64))
    many.append(torch.ones(32, 64))  {HERE}
    many.append(torch.ones(31, 64))
""",
        Leak("many[0]", 63 * 64 * 4, 63 * 64 * 4, "many"),
    ),
    "lists of lists": (
        f"""outer = []
for epoch in range(6):
    inner = []
    for a, b in batches(4):
        learn(a, b)
        inner.append(net[0](a).detach())  {HERE}
    outer.append(inner)
""",
        Leak("outer[0][0]", KEPT, KEPT, "outer"),
    ),
    "parameters that are added to the optimizer": (
        f"""for a, b in batches():
    extra = nn.Parameter(torch.zeros(32, 64))  {HERE}
    opt.add_param_group({{"params": [extra]}})
    learn(a + extra, b)
""",
        Leak("opt.param_groups[1]['params'][0]", 32 * 64 * 4, 32 * 64 * 4, "opt.param_groups"),
    ),
    "slowly, in a long loop": (
        f"""kept = []
for i, (a, b) in enumerate(batches(150)):
    learn(a, b)
    if i % 2:
        kept.append(net[0](a).detach())  {HERE}
""",
        Leak("kept[0]", KEPT - 1000, KEPT, "kept"),
    ),
    "features with their graph, for a training that follows": (
        f"""found = []
for a, b in batches():
    found.append(net(a))  {HERE}
head = nn.Linear(10, 10)
for one in found:
    head(one.detach()).sum().backward()
""",
        Leak("found[0]", KEPT, ALL, "no_grad"),
    ),
    "without a model, among what goes": (
        f"""w = torch.randn(64, 256, requires_grad=True)
total = 0
for i in range(20):
    total = total + (torch.randn(32, 64) @ w).tanh().sum()  {HERE}
""",
        Leak("total.grad_fn", 32 * 256 * 4, 2 * 32 * 256 * 4, "no_grad"),
    ),
    "a compiled function": (
        f"""@torch.compile(backend="eager")
def score(a, w):
    return (a @ w).tanh().sum()
w = torch.randn(64, 256, requires_grad=True)
losses = []
for i in range(20):
    losses.append(score(torch.randn(32, 64), w))  {HERE}
""",
        Leak("losses[0].grad_fn", 32 * 256 * 4, 2 * 32 * 256 * 4, "no_grad"),
    ),
}

LEAKING |= {
    "a hidden state in a tuple": (
        f"""lstm, head = nn.LSTM(64, 32), nn.Linear(32, 10)
state = None
for _ in range(14):
    out, state = lstm(torch.randn(5, 8, 64), state)  {HERE}
    loss = head(out[-1]).sum()
""",
        Leak("state[", KEPT, 1 << 20, "`state` keeps the graph"),
    ),
    "a graph in each gradient": (
        f"""for a, b in batches():
    loss = F.cross_entropy(net(a), b)  {HERE}
    loss.backward(create_graph=True)
""",
        Leak("net.", KEPT, 2 * ALL, "zero_grad"),
    ),
    "functions that hold outputs": (
        f"""jobs = []
for a, b in batches():
    out = net(a)  {HERE}
    jobs.append(lambda out=out: out.sum())
""",
        Leak("jobs[0].<default out>", KEPT, ALL, "`jobs`"),
    ),
    "every fifth output of the forward of each step": (
        f"""kept = []
for i, (a, b) in enumerate(batches(60)):
    opt.zero_grad()
    out = net[0](a)  {HERE}
    net[2](net[1](out)).sum().backward()
    opt.step()
    if i % 5 == 4:
        kept.append(out.detach())
""",
        Leak("kept[", KEPT // 7, KEPT // 4, "kept"),
    ),
    "every seventh output with its graph": (
        f"""kept = []
def train():
    for i, (a, b) in enumerate(batches(60)):
        out = net(a)  {HERE}
        if i % 7 == 6:
            kept.append(out)
train()
""",
        Leak("kept[", 1000, ALL // 6, "no_grad"),
    ),
    "slices of a large tensor": (
        f"""last = []
for a, b in batches():
    learn(a, b)
    hidden = net[0](a)  {HERE}
    last.append(hidden[-1].detach())
""",
        Leak("last[0]", KEPT, KEPT, "`.clone()`"),
    ),
    "slices of an array on a tensor": (
        f"""rows = []
for a, b in batches():
    with torch.no_grad():
        hidden = net[0](a)  {HERE}
    rows.append(hidden.numpy()[0])
""",
        Leak("rows[0]", KEPT, KEPT, "`.copy()`"),
    ),
    "a buffer that is made anew, larger, and filled": (
        f"""seen = torch.zeros(0, 64)
for a, b in batches():
    learn(a, b)
    larger = torch.zeros(len(seen) + len(a), 64)  {HERE}
    larger[:len(seen)] = seen
    larger[len(seen):] = a
    seen = larger
""",
        Leak("seen", 32 * 64 * 4, 32 * 64 * 4, "append to a list"),
    ),
    "an attention's weights": (
        f"""attend = nn.MultiheadAttention(64, 4, batch_first=True)
maps = []
for _ in range(12):
    words = torch.randn(8, 16, 64)
    out, weights = attend(words, words, words)  {HERE}
    maps.append(weights.detach())
    out.sum().backward()
""",
        Leak("maps[0]", 8 * 16 * 16 * 4, 8 * 16 * 16 * 4, "maps"),
    ),
    "a penalty with the graph of its gradient": (
        f"""penalties = []
for a, b in batches():
    a = a.requires_grad_()
    out = net(a).sum()  {HERE}
    slope, = torch.autograd.grad(out, a, create_graph=True)
    opt.zero_grad(); slope.square().sum().backward(retain_graph=True); opt.step()
    penalties.append(slope.square().sum())
""",
        Leak("penalties[0].grad_fn", KEPT, 2 * ALL, ".item()"),
    ),
    "inputs with what the model made of them": (
        f"""memory = []
for _ in range(14):
    seen = torch.randn(32, 64)
    out = net(seen)  {HERE}
    memory.append((seen, out))
    opt.zero_grad(); out.square().sum().backward(retain_graph=True); opt.step()
""",
        Leak("memory[0][1]", KEPT, ALL, "detach"),
    ),
    "a compiled model whose outputs are kept": (
        f"""@torch.compile(backend="aot_eager")
def forward(a):
    return net(a)
outs = []
for a, b in batches(14):
    out = forward(a)  {HERE}
    outs.append(out)
""",
        Leak("outs[0].grad_fn", KEPT, ALL, "no_grad"),
    ),
}

GRAPHS: dict[str, tuple[str, Graph | None]] = {
    "total += loss": ("total = 0\nfor a, b in batches(40):\n    total += learn(a, b)", Graph("total", "item()")),
    "a list of losses": ("losses = []\nfor a, b in batches(40):\n    losses.append(learn(a, b))", Graph("losses", "item()")),
    "an attribute": (
        "class Log:\n    total = 0\nlog = Log()\nfor a, b in batches(40):\n    log.total = log.total + learn(a, b)",
        Graph("log.total", "`log.total = (log.total + learn(a, b)).detach()`"),
    ),
    "a moving average that keeps its graph": (
        """average = {name: one.detach().clone() for name, one in net.named_parameters()}
for a, b in batches(40):
    learn(a, b)
    for name, one in net.named_parameters():
        average[name] = 0.9 * average[name] + 0.1 * one
""",
        Graph("average", "`average[name] = (0.9 * average[name] + 0.1 * one).detach()`"),
    ),
    "a weight that is updated with its history": (
        """w = torch.randn(64, 10, requires_grad=True)
for a, b in batches(40):
    slope, = torch.autograd.grad(F.cross_entropy(a @ w, b), w)
    w = w - 0.1 * slope
""",
        Graph("w", "`w = (w - 0.1 * slope).detach().requires_grad_()`"),
    ),
}

WITHOUT_MODEL: dict[str, Loop] = {
    "functions and an optimizer": (
        f"""w = torch.randn(64, 10, requires_grad=True)
update = torch.optim.SGD([w], 0.1)
outs = []
for a, b in batches():
    out = a @ w  {HERE}
    loss = F.cross_entropy(out, b)
    update.zero_grad()
    loss.backward()
    update.step()
    outs.append(out.detach())
""",
        Leak("outs[", OUT, OUT, "outs"),
    ),
    "gradients by hand": (
        f"""w = torch.randn(64, 10, requires_grad=True)
log = []
for a, b in batches():
    loss = F.cross_entropy(a @ w, b)
    loss.backward()
    with torch.no_grad():
        w -= 0.1 * w.grad
        log.append(w.clone())  {HERE}
        w.grad = None
""",
        Leak("log[", 64 * 10 * 4, 64 * 10 * 4, "log"),
    ),
    "clean, by hand": (
        """w = torch.randn(64, 10, requires_grad=True)
for a, b in batches():
    loss = F.cross_entropy(a @ w, b)
    loss.backward()
    with torch.no_grad():
        w -= 0.1 * w.grad
        w.grad = None
""",
        None,
    ),
    "clean, a compiled function alone": (
        """@torch.compile(backend="eager")
def score(a):
    return (a * 2).tanh().sum()
for a, b in batches():
    found = score(a)
""",
        None,
    ),
    "clean, compiled in place": (
        """fast = nn.Sequential(nn.Linear(64, 10))
fast.compile(backend="eager")
for a, b in batches():
    F.cross_entropy(fast(a), b).backward()
    for one in fast.parameters():
        one.grad = None
""",
        None,
    ),
}
