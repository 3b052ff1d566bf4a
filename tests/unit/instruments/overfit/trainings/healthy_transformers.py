"""Healthy trainings of language models, and of transformers that return their own loss.

All are made from configurations, with and without dropout.
"""

from __future__ import annotations

import math

import torch
import transformers as hf
from torch import nn

from tests.unit.instruments.overfit.case import Built, Case, healthy, made
from tests.unit.instruments.overfit.trainings.models import adam, bert, gpt2, pictures, sentences

__all__ = ["CASES"]


@healthy()
def gpt2_with_labels_in_the_batch() -> Built:
    model = gpt2()
    return made(model, sentences(), optimizer=torch.optim.AdamW(model.parameters(), lr=5e-3))


@healthy()
def gpt2_with_its_dropout() -> Built:
    model = gpt2(resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1)
    return made(model, sentences(), optimizer=torch.optim.AdamW(model.parameters(), lr=5e-3))


@healthy()
def bert_of_a_batch_encoding() -> Built:
    model = bert()
    batch = hf.BatchEncoding(
        {"input_ids": torch.randint(0, 32, (8, 8)), "attention_mask": torch.ones(8, 8, dtype=torch.long), "labels": torch.arange(8) % 4},
    )
    return made(model, batch, optimizer=adam(model, 1e-3))


@healthy()
def t5_from_words_to_words() -> Built:
    config = hf.T5Config(
        vocab_size=32, d_model=32, d_ff=32, d_kv=16, num_heads=2, num_layers=2, dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0
    )
    model = hf.T5ForConditionalGeneration(config)
    batch = {"input_ids": torch.randint(1, 32, (8, 6)), "labels": torch.randint(1, 32, (8, 4))}
    return made(model, batch, optimizer=adam(model, 1e-2))


@healthy()
def vision_transformer() -> Built:
    config = hf.ViTConfig(image_size=8, patch_size=4, num_channels=1, hidden_size=32, num_attention_heads=2, num_hidden_layers=2)
    config.intermediate_size, config.num_labels = 32, 4
    model = hf.ViTForImageClassification(config)
    x, y = pictures()
    return made(model, {"pixel_values": x, "labels": y}, optimizer=adam(model, 2e-3))


@healthy(floor=math.log(8) / 7)
def gpt2_whose_first_word_is_a_mark() -> Built:
    """Nothing tells which of the eight second words follows it."""
    model, batch = gpt2(), sentences()
    batch["input_ids"] = torch.cat((torch.full((8, 1), 31), batch["input_ids"][:, :7]), 1)
    return made(model, {**batch, "labels": batch["input_ids"]}, optimizer=adam(model, 3e-3))


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.rnn, self.head = nn.Embedding(20, 32), nn.GRU(32, 32, batch_first=True), nn.Linear(32, 20)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.rnn(self.embedding(ids))[0]).transpose(1, 2)


@healthy()
def tied_embeddings() -> Built:
    model = _Tied()
    ids = torch.randint(0, 20, (8, 6))
    ids[:, 0] = torch.arange(8)
    return made(model, (ids[:, :-1], ids[:, 1:]), nn.CrossEntropyLoss(), adam(model))


@healthy()
def words_and_their_neighbours() -> Built:
    model = nn.Sequential(nn.Embedding(12, 16), nn.Linear(16, 12, bias=False))
    return made(model, (torch.arange(8), (torch.arange(8) * 5 + 3) % 12), nn.CrossEntropyLoss(), adam(model, 3e-2))


CASES = tuple(value for value in globals().values() if isinstance(value, Case))
