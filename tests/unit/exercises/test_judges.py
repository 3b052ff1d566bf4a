"""What learners try first, and what the checks answer: none of it passes, and each answer says what is wrong with that very attempt."""

from __future__ import annotations

import importlib

import pytest
import torch

TORCH = "import torch\nfrom torch import nn\nfrom torch.nn import functional as F\nfrom contextlib import contextmanager\n"

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
UNSAFE = """
@contextmanager
def shallow(model, layers):
    every = model.blocks
    model.blocks = every[:layers]
    yield
    model.blocks = every
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
    "half of the diagnoses": ("overfit", 3, "diagnosis = {'a': 'softmax twice'}", "wiring b, c, d, e, f, g, h yet"),
    "one cause for all": ("overfit", 3, "diagnosis = dict.fromkeys('abcdefgh', 'frozen weights')", "1 of 8 are right"),
    "a number, and the wrong one": ("leak", 2, "activity = []\ndef look(m, a, o):\n    activity.append(o.sum().item())", "not the mean"),
    "a hook that keeps nothing": ("leak", 2, "activity = []\ndef look(m, a, o):\n    pass", "one thing should be put"),
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
    "a layer that takes no part": (
        "shapes",
        1,
        IDLE_LAYER,
        "no gradient reaches `two.weight`",
    ),
    "a test that says yes": ("shapes", 2, "is_independent = lambda model, batch: True", "says True"),
    "a test that says no": ("shapes", 2, "is_independent = lambda model, batch: False", "says False"),
    "a reader of last words": (
        "shapes",
        3,
        LAST_WORD,
        "the first word",
    ),
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
    "blocks that are lost in an error": (
        "shrink",
        4,
        UNSAFE,
        "`try` and `finally`",
    ),
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
        "for all that follows",
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
}


@pytest.mark.keeps_rng
@pytest.mark.parametrize("attempt", ATTEMPTS)
def test_an_attempt_is_told_what_is_wrong_with_it(attempt: str) -> None:
    stem, task, code, answer = ATTEMPTS[attempt]
    names = {"check": importlib.import_module(f"torchdebug_magics.exercises.{stem}").check}
    with torch.random.fork_rng():
        exec(TORCH + code, names)
    exec(f"verdict = check({task})", names)
    sentence = repr(names["verdict"])
    assert sentence.startswith(f"○ Task {task}: ")
    assert answer in sentence
    assert len(sentence) < 240
