"""Healthy trainings of language models, and of transformers that return their own loss.

All are made from configurations, with and without dropout.
"""

from __future__ import annotations

import math

from tests.plants.overfit.training import MODEL_WITH_LOSS, healthy

PLANTS = (
    healthy("gpt2-with-labels-in-the-batch", subjects=MODEL_WITH_LOSS)("""
        model = gpt2()
        batch, optimizer = sentences(), torch.optim.AdamW(model.parameters(), lr=5e-3)
    """),
    healthy("gpt2-with-its-dropout", subjects=MODEL_WITH_LOSS)("""
        model = gpt2(resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1)
        batch, optimizer = sentences(), torch.optim.AdamW(model.parameters(), lr=5e-3)
    """),
    healthy("bert-of-a-batch-encoding", subjects=MODEL_WITH_LOSS)("""
        model = bert()
        batch = hf.BatchEncoding(
            {
                "input_ids": torch.randint(0, 32, (8, 8)),
                "attention_mask": torch.ones(8, 8, dtype=torch.long),
                "labels": torch.arange(8) % 4,
            }
        )
        optimizer = adam(model, 1e-3)
    """),
    healthy("t5-from-words-to-words", subjects=MODEL_WITH_LOSS)("""
        config = hf.T5Config(
            vocab_size=32,
            d_model=32,
            d_ff=32,
            d_kv=16,
            num_heads=2,
            num_layers=2,
            dropout_rate=0.0,
            decoder_start_token_id=0,
            pad_token_id=0,
        )
        model = hf.T5ForConditionalGeneration(config)
        batch = {"input_ids": torch.randint(1, 32, (8, 6)), "labels": torch.randint(1, 32, (8, 4))}
        optimizer = adam(model, 1e-2)
    """),
    healthy("vision-transformer", subjects=MODEL_WITH_LOSS)("""
        config = hf.ViTConfig(
            image_size=8, patch_size=4, num_channels=1, hidden_size=32, num_attention_heads=2, num_hidden_layers=2
        )
        config.intermediate_size, config.num_labels = 32, 4
        model = hf.ViTForImageClassification(config)
        x, y = pictures()
        batch, optimizer = {"pixel_values": x, "labels": y}, adam(model, 2e-3)
    """),
    # Nothing tells which of the eight second words follows it.
    healthy("gpt2-whose-first-word-is-a-mark", subjects=MODEL_WITH_LOSS, floor=math.log(8) / 7)("""
        model, batch = gpt2(), sentences()
        batch["input_ids"] = torch.cat((torch.full((8, 1), 31), batch["input_ids"][:, :7]), 1)
        batch, optimizer = {**batch, "labels": batch["input_ids"]}, adam(model, 3e-3)
    """),
    healthy("tied-embeddings")("""
        class Tied(nn.Module):
            def __init__(self):
                super().__init__()
                self.embedding, self.rnn, self.head = nn.Embedding(20, 32), nn.GRU(32, 32, batch_first=True), nn.Linear(32, 20)
                self.head.weight = self.embedding.weight
            def forward(self, ids):
                return self.head(self.rnn(self.embedding(ids))[0]).transpose(1, 2)
        model = Tied()
        ids = torch.randint(0, 20, (8, 6))
        ids[:, 0] = torch.arange(8)
        batch, loss_function, optimizer = (ids[:, :-1], ids[:, 1:]), nn.CrossEntropyLoss(), adam(model)
    """),
    healthy("words-and-their-neighbours")("""
        model = nn.Sequential(nn.Embedding(12, 16), nn.Linear(16, 12, bias=False))
        batch, loss_function = (torch.arange(8), (torch.arange(8) * 5 + 3) % 12), nn.CrossEntropyLoss()
        optimizer = adam(model, 3e-2)
    """),
)
