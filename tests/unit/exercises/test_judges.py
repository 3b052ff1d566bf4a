"""What learners try first, and what the checks answer: none of it passes, and each answer says what is wrong with that very attempt."""

from __future__ import annotations

import importlib

import pytest
import torch

TORCH = "import torch\nfrom torch import nn\nfrom torch.nn import functional as F\nfrom contextlib import contextmanager\n"

CAUSES = "causes = 'frozen weights  some do not learn\\nsoftmax twice    one in the loss'\n"
SECOND = """
step = 0

class SecondLayer(nn.Module):
    def forward(self, x):
        {plant}
        return x

def make_network():
    return nn.Sequential(nn.Linear(8, 16), SecondLayer(), nn.Linear(16, 1)), None
"""
REPORT = """
from torchdebug_magics import nanhunt

hunt = nanhunt(torch.zeros(2, requires_grad=True).log().sum())
"""
DIVERGENT = """
import numpy as np
from torchdebug_magics import verify

report = verify(lambda: torch.from_numpy(np.random.default_rng().random(3)) + 1)
"""
PLOT = """
from matplotlib.figure import Figure

curve = [1.4 - number / 14 for number in range(20)]
axes = Figure().subplots()
axes.set(xlabel="step", ylabel="loss")
"""
POOL = """
class Pool(nn.Module):
    def forward(self, rows):
        weights = (rows @ torch.linspace(-1, 1, 8)).softmax(1)
        return (rows.mT @ weights.unsqueeze(2)).squeeze({dim})

pool = Pool()
"""
IDLE_LAYER = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(3, 10), nn.Linear(1, 1)

    def forward(self, images):
        return self.one(images.mean((2, 3)))

net = Net()
"""
LAST_WORD = """
class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(64, 4)

    def forward(self, tokens):
        return self.embedding(tokens)[:, -1]

reader = Reader()
"""
NET = """
class Net(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.backbone, self.head = nn.Linear(2, 4), nn.Linear(4, classes)

    def forward(self, points):
        return {forward}

def prepare():
    model = Net(2)
    optimizer = torch.optim.SGD(model.{held}, lr=0.1)
    model.head = nn.Linear(4, {outputs})
    {again}
    return model, optimizer

part = "`.detach()`"
"""
RINGS = """
points, rings = torch.randn(64, 2), torch.randint(0, 3, (64,))

def train(model, optimizer, steps):
    losses = []
    for _ in range(steps):
        loss = F.cross_entropy(model(points), rings)
        {}
        losses.append(loss.item())
    return losses
"""
REMADE = "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)"
UNSAFE = """
@contextmanager
def shallow(model, layers):
    every = model.blocks
    model.blocks = every[:layers]
    yield
    model.blocks = every
"""

REPORTS = """
from torchdebug_magics.instruments.overfit.report import OverfitReport

causes = ["frozen", "reduction", "clipping", "capacity", "cut_graph", None, "bad_init", "bad_init"]
reports = {name: OverfitReport(passed=cause is None, cause=cause) for name, cause in zip("abcdefgh", causes)}
"""
ATTEMPTS = {
    "a hook that returns": ("nan", 2, "def assert_finite(m, a, o):\n    assert o.isfinite().all()\n    return o", "return nothing"),
    "a hook that sees NaN alone": ("nan", 2, "def assert_finite(m, a, o):\n    assert not o.isnan().any()", "with inf pass"),
    "a hook that wants all to be bad": ("nan", 2, "def assert_finite(m, a, o):\n    assert o.isfinite().any()", "with nan pass"),
    "no report": ("nan", 4, "hunt = 'log'\nop = 'log'", "`hunt` is not a report"),
    "the tiny bound of the textbook": ("nan", 5, "safe_log = lambda x: torch.log(x + 1e-9)", "slope near 0 is 1e+09"),
    "a result without its infinity": ("nan", 5, "safe_log = lambda x: torch.log(x).nan_to_num(neginf=-5)", "its gradient is not"),
    "a bound that is too large": ("nan", 5, "safe_log = lambda x: torch.log(x.clamp(min=0.9))", "far from 0"),
    "every loss": ("overfit", 1, "overfit = lambda step: [step() for _ in range(200)]", "each 10th step"),
    "too few steps": ("overfit", 1, "overfit = lambda step: [step() for _ in range(20)]", "called `step` 20 times"),
    "the tenth and not the first": (
        "overfit",
        1,
        "overfit = lambda step: [step() for _ in range(200)][9::10]",
        "beginning with the very first",
    ),
    "half of the diagnoses": ("overfit", 3, CAUSES + "diagnosis = {'a': 'softmax twice'}", "wiring b, c, d, e, f, g, h yet"),
    "one cause for all": ("overfit", 3, CAUSES + "diagnosis = dict.fromkeys('abcdefgh', 'frozen weights')", "1 of 8 are right"),
    "a report of one wiring": ("overfit", 4, REPORTS + "reports = {'a': reports['a']}\npassed = []", "no report of wiring b, c, d"),
    "verdicts in place of reports": ("overfit", 4, "reports = dict.fromkeys('abcdefgh', 'frozen')\npassed = []", "a value of type str"),
    "one report for all": ("overfit", 4, REPORTS + "reports = dict.fromkeys('abcdefgh', reports['f'])\npassed = 'f'", "much alike"),
    "none that passes": ("overfit", 4, REPORTS + "passed = []", "whose `report.passed` is True"),
    "a number, and the wrong one": ("leak", 2, "activity = []\ndef look(m, a, o):\n    activity.append(o.sum().item())", "not the mean"),
    "a hook that keeps nothing": ("leak", 2, "activity = []\ndef look(m, a, o):\n    pass", "append one number"),
    "no cache": ("leak", 3, "cache = {}\ndef prepared(n):\n    torch.manual_seed(n % 4)\n    return torch.rand(3)", "not used any more"),
    "the same batch for ever": (
        "leak",
        3,
        "cache = {}\ndef prepared(n):\n    return cache.setdefault(0, torch.rand(3))",
        "the same batch for every step",
    ),
    "a cache that is emptied": (
        "leak",
        3,
        "cache = {}\ndef prepared(n):\n    cache.clear()\n    return cache.setdefault(n, torch.rand(3))",
        "step 4 should see the very batch of step 0",
    ),
    "a model that is frozen": (
        "leak",
        4,
        "model = nn.Linear(2, 2).requires_grad_(False)\nvalidate = lambda n: [model(torch.rand(2)) for _ in range(n)]",
        "cannot be trained any more",
    ),
    "scores that are gone": ("leak", 4, "model = nn.Linear(2, 2)\nvalidate = lambda n: None", "a list of three"),
    "a layer that takes no part": ("shapes", 1, IDLE_LAYER, "no gradient reaches `two.weight`"),
    "a test that says yes": ("shapes", 2, "is_independent = lambda model, batch: True", "says True"),
    "a test that says no": ("shapes", 2, "is_independent = lambda model, batch: False", "says False"),
    "a reader of last words": ("shapes", 3, LAST_WORD, "the first word"),
    "heads by view": (
        "shapes",
        4,
        "split_heads = lambda x, h: x.view(len(x), h, x.shape[1], -1)\njoin_heads = lambda p: p.reshape(len(p), p.shape[2], -1)",
        "not where they belong",
    ),
    "squeeze without a dimension": (
        "shapes",
        5,
        "loss_of = lambda p, t: (p.squeeze() - t.unsqueeze(0)).square().sum()",
        "for 8 predictions",
    ),
    "blocks that are lost in an error": ("shrink", 4, UNSAFE, "`try` and `finally`"),
    "blocks that do not come back": (
        "shrink",
        4,
        "@contextmanager\ndef shallow(m, n):\n    m.blocks = m.blocks[:n]\n    yield",
        "not all blocks",
    ),
    "attention all the same": ("shrink", 5, "stand_in = F.scaled_dot_product_attention", "looks at other words"),
    "the query alone": ("shrink", 5, "stand_in = lambda q, k, v: q * 1", "no gradient reaches the key and the value"),
    "a constant": ("shrink", 5, "stand_in = lambda q, k, v: torch.zeros_like(q)", "not connected"),
    "a row of zeros for all": ("shrink", 3, "normalised = lambda w: torch.zeros_like(w)", "should stay as they were"),
    "a mean": (
        "clinic",
        1,
        "class Pool(nn.Module):\n    def forward(s, rows): return rows.mean(1)\npool = Pool()",
        "all rows weigh the same",
    ),
    "a distance without its gradient": ("clinic", 2, "distance = lambda a, b: (a - b).detach().norm(dim=1) + 0 * a.sum(1)", "is gone"),
    "nan_to_num on the value": ("clinic", 2, "distance = lambda a, b: (a - b).square().sum(1).sqrt().nan_to_num()", "is still NaN"),
    "a meter of sums": (
        "clinic",
        3,
        "class Meter:\n    t = 0\n    def update(s, loss): s.t += loss.item()\n    def mean(s): return s.t",
        "and not 9.0000",
    ),
    "a gate without the graph": ("clinic", 4, "gate = lambda x: x.sigmoid().detach() * 2 - 1 + 0 * x", "gradient is not that"),
    "an evaluation that leaves eval": (
        "clinic",
        5,
        "@torch.no_grad()\ndef evaluate(model, rows):\n    return model.eval()(rows)",
        "being trained before, and is not after",
    ),
    "an evaluation that always trains on": (
        "clinic",
        5,
        "@torch.no_grad()\ndef evaluate(model, rows):\n    out = model.eval()(rows)\n    model.train()\n    return out",
        "not being trained before",
    ),
    "an order that never changes": ("clinic", 6, "batches = lambda seed: list(torch.arange(32).split(8))", "another seed"),
    "a seed for all": (
        "clinic",
        6,
        "def batches(seed):\n    torch.manual_seed(seed)\n    return list(torch.randperm(32).split(8))",
        "what torch draws",
    ),
    "no report of a comparison": ("reproduce", 1, "report = 'numpy_random'\ncause = report", "`report` is not a report"),
    "weights that nobody seeded": ("reproduce", 2, "train = lambda seed: torch.rand(3).tolist()", "two different runs"),
    "one seed for all": ("reproduce", 2, "train = lambda seed: [1.0, 2.0]", "another seed"),
    "the order of a set": (
        "reproduce",
        3,
        "vocabulary = lambda words: {word: number for number, word in enumerate({*words})}",
        "other numbers",
    ),
    "numbers with gaps": (
        "reproduce",
        3,
        "vocabulary = lambda words: {word: number for number, word in enumerate(words)}",
        "each different word",
    ),
    "a NaN and no logarithm": ("nan", 1, SECOND.format(plant="x = x * float('nan') if step > 50 else x"), "the logarithm of 0"),
    "a counter of its own": ("nan", 1, SECOND.format(plant="self.n = 51"), "when the global `step` is 51"),
    "a hook that raises another error": (
        "nan",
        2,
        "def assert_finite(m, a, o):\n    if not o.isfinite().all(): raise ValueError",
        "let an `assert` stop it",
    ),
    "a hook that always stops": ("nan", 2, "def assert_finite(m, a, o):\n    raise AssertionError", "also stops where every"),
    "a hook that adds up first": ("nan", 2, "def assert_finite(m, a, o):\n    assert o.sum().isfinite()", "also stops where every"),
    "the operation before": ("nan", 4, REPORT + "op = 'sum'", "'sum' is not the operation"),
    "a logarithm as a plain number": ("nan", 5, "safe_log = lambda x: 1.0", "a tensor, and gives a value of type float"),
    "a logarithm without its graph": ("nan", 5, "safe_log = lambda x: x.detach().clamp(min=0.01).log()", "no gradient comes through"),
    "a bound that is too small to help": ("nan", 5, "safe_log = lambda x: x.clamp(min=1e-9).log()", "its slope near 0 is 1e+0"),
    "losses that come one by one": (
        "overfit",
        1,
        "def overfit(step):\n    yield from (step() for _ in range(200))",
        "a list of losses, and gives a value of type generator",
    ),
    "a loop that does not end": ("overfit", 1, "def overfit(step):\n    while step() > 0:\n        pass", "does not stop calling `step`"),
    "no return": ("overfit", 1, "def overfit(step):\n    [step() for _ in range(200)]", "nothing yet; does it end in a `return`?"),
    "a figure": ("overfit", 2, PLOT + "axes = axes.figure", "`axes` is not a picture"),
    "another curve": ("overfit", 2, PLOT + "axes.plot(curve[::-1])", "does not show the numbers"),
    "a cause of their own": (
        "overfit",
        3,
        CAUSES + "diagnosis = dict.fromkeys('abcdefgh', 'double softmax')",
        "'double softmax' is none of the causes",
    ),
    "a list of causes": ("overfit", 3, CAUSES + "diagnosis = ['softmax twice'] * 8", "should be a dictionary"),
    "the variable itself": ("leak", 1, "largest = [torch.zeros(9, 9)] * 9", "give the name of the variable"),
    "a hook that keeps a word": ("leak", 2, "activity = []\ndef look(m, a, o):\n    activity.append('mean')", "keeps 'mean'"),
    "a hook that begins anew": ("leak", 2, "activity = [1, 2, 3]\ndef look(m, a, o):\n    activity[:] = [0.5]", "leave the others there"),
    "scores as numbers": ("leak", 4, "model = nn.Linear(2, 2)\nvalidate = lambda n: [0.5] * n", "a tensor for each batch"),
    "heads that are not returned": (
        "shapes",
        4,
        "def split_heads(x, heads): x.view(1)\ndef join_heads(parts): parts.view(1)",
        "your code was tried",
    ),
    "nothing split": ("shapes", 4, "split_heads = lambda x, h: ...\njoin_heads = lambda p: p", "a tensor, and gives nothing yet"),
    "a loss for each prediction": ("shapes", 5, "loss_of = lambda p, t: (p[:, 0] - t) ** 2", "of shape (8,)"),
    "a loss as a plain number": ("shapes", 5, "loss_of = lambda p, t: F.mse_loss(p[:, 0], t).item()", "`backward()` can start"),
    "a loss without a graph": ("shapes", 5, "loss_of = lambda p, t: F.mse_loss(p[:, 0], t).detach()", "nothing would learn"),
    "no size at all": ("shrink", 1, "giant = nn.Linear(9, 9)\ngibibytes = 'many'", "'many' is not a number"),
    "a model in place of its configuration": (
        "shrink",
        2,
        "giant = Model = normalised = nn.Linear\nsmall = nn.Linear(1, 1)",
        "should be a configuration",
    ),
    "shares whose gradient is NaN": (
        "shrink",
        3,
        "normalised = lambda w: (w / w.sum(-1, keepdim=True)).nan_to_num()",
        "its gradient is NaN",
    ),
    "shares that are only bounded": ("shrink", 3, "normalised = lambda w: w / w.sum(-1, keepdim=True).clamp(min=1)", "so are 0.1 and 0.3"),
    "a context without its yield": ("shrink", 4, "@contextmanager\ndef shallow(model, layers):\n    pass", "does it `yield`?"),
    "two blocks, whatever is asked for": ("shrink", 4, UNSAFE.replace("[:layers]", "[:2]"), "the blocks [0, 1] ran, and [0, 1, 2] should"),
    "an error that is swallowed": (
        "shrink",
        4,
        UNSAFE.replace("    yield\n", "    try:\n        yield\n    except KeyError:\n        pass\n"),
        "is swallowed",
    ),
    "a set of one that is squeezed away": ("clinic", 1, POOL.format(dim=""), "should give (1, 8), and gives (8,)"),
    "a gate that is cut off": ("clinic", 4, "gate = lambda x: x.detach().sigmoid() * 2 - 1", "no gradient comes through"),
    "an evaluation that says something else": (
        "clinic",
        5,
        (
            "@torch.no_grad()\ndef evaluate(model, rows):\n    was = model.training\n"
            "    out = model.eval()(rows).argmax(1)\n    model.train(was)\n    return out"
        ),
        "what the model itself says",
    ),
    "an evaluation of nothing": ("clinic", 5, "def evaluate(model, rows):\n    model(rows)", "does it end in a `return`?"),
    "a seed of NumPy's for all": (
        "clinic",
        6,
        "import numpy as np\ndef batches(seed):\n    np.random.seed(seed)\n    return np.random.permutation(32).reshape(4, 8)",
        "what NumPy draws",
    ),
    "the whole of a divergence": ("reproduce", 1, DIVERGENT + "cause = report.divergence", "look for what follows `cause=`"),
    "one loss": ("reproduce", 2, "train = lambda seed: 0.5", "the list of its losses, and gives a value of type float"),
    "words in their order": ("reproduce", 3, "vocabulary = lambda words: sorted(set(words))", "a dictionary, with a number for each word"),
    "no report of a training": ("learn", 1, "first = kind = 'stale_optimizer'", "`first` is not a report"),
    "the head as it was left": (
        "learn",
        2,
        NET.format(forward="...", held="parameters()", outputs=3, again=""),
        "does not hold `head.weight`",
    ),
    "a group for the new head": (
        "learn",
        2,
        NET.format(forward="...", held="parameters()", outputs=3, again="optimizer.add_param_group({'params': model.head.parameters()})"),
        "still holds tensors that do not belong",
    ),
    "the old head": ("learn", 2, NET.format(forward="...", held="parameters()", outputs=2, again=REMADE), "should have 3 outputs"),
    "a cut that was moved": (
        "learn",
        3,
        NET.format(forward="self.head(self.backbone(points.detach()).detach())", held="parameters()", outputs=3, again=""),
        "no gradient reaches `backbone.weight` yet",
    ),
    "a backbone left out": (
        "learn",
        3,
        NET.format(forward="self.head(points.repeat(1, 2))", held="parameters()", outputs=3, again=""),
        "no gradient reaches",
    ),
    "an update without its gradient": (
        "learn",
        4,
        RINGS.format("loss.backward(); optimizer.zero_grad(); optimizer.step()"),
        "no step changes the weights",
    ),
    "gradients that pile up": ("learn", 4, RINGS.format("loss.backward(); optimizer.step()"), "begin with gradients of zero"),
    "a step before its gradient": (
        "learn",
        4,
        RINGS.format("optimizer.step(); optimizer.zero_grad(); loss.backward()"),
        "end with its own update",
    ),
}

OTHER_WAYS = {
    "zero in between": ("learn", 4, RINGS.format("optimizer.zero_grad(); loss.backward(); optimizer.step()")),
    "the cut in other words": (
        "learn",
        3,
        NET.format(forward="self.head(self.backbone(points))", held="parameters()", outputs=3, again=""),
    ),
    "the whole name": ("nan", 4, REPORT + "op = 'torch.log'"),
    "a logarithm in place": ("nan", 5, "safe_log = lambda x: torch.log(x.clamp_(min=0.01))"),
    "points": ("overfit", 2, PLOT + "axes.scatter(range(20), curve)"),
    "a line beside the curve": ("overfit", 2, PLOT + "axes.axhline(1.386)\naxes.plot(curve)"),
    "a letter alone": ("overfit", 4, REPORTS + "passed = 'f'"),
    "the path of the report": ("leak", 1, "largest = 'activity[0]'"),
    "a mean that is rounded": ("leak", 2, "activity = []\ndef look(m, a, o):\n    activity.append(round(o.mean().item(), 4))"),
    "a cache of Python's": (
        "leak",
        3,
        "from functools import lru_cache\ncache = {}\nmade = lru_cache(lambda key: torch.randn(3))\nprepared = lambda n: made(n % 4)",
    ),
    "the cause as it is shown": ("reproduce", 1, DIVERGENT + "cause = 'numpy random'"),
    "a size with its unit": ("shrink", 1, "giant = nn.Linear(1024, 1024, bias=False)\ngibibytes = '0.0039 GiB'"),
    "a dimension of one alone": ("clinic", 1, POOL.format(dim="2")),
    "rows as a table": (
        "clinic",
        6,
        "def batches(seed):\n    return torch.randperm(32, generator=torch.Generator().manual_seed(seed)).view(4, 8)",
    ),
    "rows as lists": (
        "clinic",
        6,
        (
            "import random\ndef batches(seed):\n    order = random.Random(seed).sample(range(32), 32)\n"
            "    return [order[begin : begin + 8] for begin in range(0, 32, 8)]"
        ),
    ),
}


def judged(stem: str, task: int, code: str) -> str:
    """What the exercise says to the code of an answer."""
    names = {"check": importlib.import_module(f"torchdebug_magics.exercises.{stem}").check, "__name__": "notebook"}
    with torch.random.fork_rng():
        exec(TORCH + code, names)
    exec(f"verdict = check({task})", names)
    return repr(names["verdict"])


@pytest.mark.keeps_rng
@pytest.mark.parametrize("way", OTHER_WAYS)
def test_what_is_right_in_another_way_is_right(way: str) -> None:
    stem, task, code = OTHER_WAYS[way]
    assert judged(stem, task, code) == f"✓ Task {task} is solved."


@pytest.mark.keeps_rng
@pytest.mark.parametrize("attempt", ATTEMPTS)
def test_an_attempt_is_told_what_is_wrong_with_it(attempt: str) -> None:
    stem, task, code, answer = ATTEMPTS[attempt]
    sentence = judged(stem, task, code)
    assert sentence.startswith(f"○ Task {task}: ")
    assert answer in sentence
    assert len(sentence) < 240
