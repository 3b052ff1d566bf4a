"""What the plants of overfit share: set-ups with small models and batches, and the expectations of a faulty and of a healthy training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from tests.plants.plant import FILLED, HERE, Plant, any_of, between, each, has, same_set

if TYPE_CHECKING:
    from collections.abc import Callable

MODEL: Final = ("model", "batch", "loss_function", "optimizer")
MODEL_WITH_LOSS: Final = ("model", "batch", "optimizer=optimizer")
"""A model that returns its loss."""
STEP: Final = ("step",)
"""A function that does one training step and returns the loss."""

MODELS: Final = '''\
import copy
from itertools import pairwise
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune
import transformers as hf

def mlp(*widths, activation=nn.ReLU):
    layers = [layer for i, o in pairwise(widths) for layer in (nn.Linear(i, o), activation())]
    return nn.Sequential(*layers[:-1])

def cnn(outputs=4, channels=8):
    return nn.Sequential(
        nn.Conv2d(1, channels, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(channels, channels, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(channels * 16, outputs),
    )

class Recurrent(nn.Module):
    """Tokens to one output for each sequence."""

    def __init__(self, kind=nn.LSTM, outputs=4, width=16):
        super().__init__()
        self.embedding = nn.Embedding(20, width)
        self.rnn = kind(width, width, batch_first=True)
        self.head = nn.Linear(width, outputs)

    def forward(self, ids):
        return self.head(self.rnn(self.embedding(ids))[0][:, -1])

def classes(count=4, width=10, samples=8):
    return torch.randn(samples, width), torch.arange(samples) % count

def pictures(count=4, size=8):
    return torch.randn(8, 1, size, size), torch.arange(8) % count

def words(count=4, length=6):
    return torch.randint(0, 20, (8, length)), torch.arange(8) % count

def regression(width=6):
    return torch.randn(8, width), torch.randn(8)

def adam(model, lr=1e-2, **settings):
    return torch.optim.Adam(model.parameters(), lr=lr, **settings)

def sentences(length=8, vocabulary=32):
    """A batch for a causal language model; the first tokens differ, so that a loss of zero is possible."""
    ids = torch.randint(0, vocabulary, (8, length))
    ids[:, 0] = torch.arange(8)
    return {"input_ids": ids, "labels": ids.clone()}

def gpt2(**settings):
    sizes = dict(vocab_size=32, n_embd=32, n_head=2, n_layer=2, n_positions=16, bos_token_id=0, eos_token_id=0)
    without_dropout = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    return hf.GPT2LMHeadModel(hf.GPT2Config(**sizes | without_dropout | settings))

torch.manual_seed(0)
'''
"""Small models and batches of eight, which 200 steps can overfit."""


def planted(
    name: str,
    cause: str | tuple[str, ...],
    *,
    repair: tuple[tuple[str, str], ...],
    subjects: tuple[str, ...] = MODEL,
    raises: bool = False,
    **expected: tuple[Any, ...],
) -> Callable[[str], Plant]:
    """Make a plant of a cell whose training stalls, or fails at once if it `raises`, and learns once it is repaired.

    There are several causes where each change alone makes it learn, or where two names fit one fault. `expected` may hold `factor`, bounds
    of what the learning rate is to be multiplied by, or the loss as a multiple of a mean over the batch; `parameters`, those that are
    frozen, dead, unknown to the optimizer or badly initialized; and `rows`.
    """
    expect: dict[str, Any] = {"cause": cause if isinstance(cause, str) else any_of(*cause), "passed": False, "fix": FILLED}
    expect["problems"] = each(has("optimizer"))
    expect |= {field: between(*values) if field == "factor" else same_set(*values) for field, values in expected.items()}
    fails = "raised(losses)" if raises else "stalled(losses, repaired_losses)"

    def plant(cell: str) -> Plant:
        located = {"location": HERE} if "# <- here" in cell else {}
        return _training(name, cell, subjects, expect | located, repair=repair, fails=fails, works="learned(losses)")

    return plant


def healthy(name: str, *, subjects: tuple[str, ...] = MODEL, floor: float = 0.0, passes: bool = True) -> Callable[[str], Plant]:
    """Make a plant of a cell whose training gets to `floor`, the least possible loss, unless it does not pass: no cause is named."""
    works = f"learned(losses, floor={floor!r})"
    expect = {"cause": None, "passed": True} if passes else {"cause": None}
    return lambda cell: _training(name, cell, subjects, expect, works=works if passes else f"not {works}")


def _training(name: str, cell: str, subjects: tuple[str, ...], expect: dict[str, Any], **fields: Any) -> Plant:
    return Plant(name=name, instrument="overfit", setup=MODELS, cell=cell, subjects=subjects, expect=expect, **fields)
