"""Small models and batches of eight that 200 steps can overfit.

All are drawn from the seed of the build.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import transformers as hf
from torch import nn

__all__ = ["Recurrent", "Tagger", "adam", "bert", "classes", "cnn", "gpt2", "mlp", "pictures", "sentences", "words"]


def mlp(*widths: int, activation: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    layers = [layer for i, o in pairwise(widths) for layer in (nn.Linear(i, o), activation())]
    return nn.Sequential(*layers[:-1])


def cnn(outputs: int = 4, channels: int = 8) -> nn.Sequential:
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

    def __init__(self, kind: type[nn.RNNBase] = nn.LSTM, outputs: int = 4, width: int = 16):
        super().__init__()
        self.embedding = nn.Embedding(20, width)
        self.rnn = kind(width, width, batch_first=True)
        self.head = nn.Linear(width, outputs)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.rnn(self.embedding(ids))[0][:, -1])


class Tagger(nn.Module):
    """Tokens to a class for each token, classes in front as `cross_entropy` wants them."""

    def __init__(self, outputs: int = 5, width: int = 16):
        super().__init__()
        self.embedding = nn.Embedding(20, width)
        self.rnn = nn.GRU(width, width, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * width, outputs)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.rnn(self.embedding(ids))[0]).transpose(1, 2)


def classes(count: int = 4, width: int = 10, samples: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(samples, width), torch.arange(samples) % count


def pictures(count: int = 4, size: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(8, 1, size, size), torch.arange(8) % count


def words(count: int = 4, length: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(0, 20, (8, length)), torch.arange(8) % count


def sentences(length: int = 8, vocabulary: int = 32) -> dict[str, torch.Tensor]:
    """A batch for a causal language model; the first tokens differ, so that a loss of zero is possible."""
    ids = torch.randint(0, vocabulary, (8, length))
    ids[:, 0] = torch.arange(8)
    return {"input_ids": ids, "labels": ids.clone()}


def gpt2(**settings: Any) -> Any:
    """Without dropout, as `bert`."""
    settings = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0} | settings
    settings = {
        "vocab_size": 32,
        "n_embd": 32,
        "n_head": 2,
        "n_layer": 2,
        "n_positions": 16,
        "bos_token_id": 0,
        "eos_token_id": 0,
    } | settings
    return hf.GPT2LMHeadModel(hf.GPT2Config(**settings))


def bert(labels: int = 4, **settings: Any) -> Any:
    settings = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0} | settings
    settings = {"vocab_size": 32, "hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2, "intermediate_size": 32} | settings
    return hf.BertForSequenceClassification(hf.BertConfig(num_labels=labels, max_position_embeddings=16, **settings))


def adam(model: nn.Module, lr: float = 1e-2, **settings: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=lr, **settings)
