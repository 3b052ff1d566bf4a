"""A healthy training of a transformer that returns its own loss."""

from __future__ import annotations

from tests.plants.overfit.training import MODEL_WITH_LOSS, healthy

PLANTS = (
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
)
