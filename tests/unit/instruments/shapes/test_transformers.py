"""Models of transformers, made from small configurations."""

from __future__ import annotations

from dataclasses import astuple
from typing import Any

import pytest
import torch

from torchdebug_magics.instruments.shapes.forward_table import examine_model

transformers = pytest.importorskip("transformers")

SIZES: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
LLAMA: dict[str, Any] = {**SIZES, "num_key_value_heads": 2}
IDS = torch.randint(3, 60, (2, 8))
MASK = torch.ones(2, 8, dtype=torch.long)
GPT2: dict[str, Any] = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32, "bos_token_id": 0, "eos_token_id": 0}
DEBERTA: dict[str, Any] = {**SIZES, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8}

MODELS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "bert": ("BertModel", "BertConfig", SIZES, {"input_ids": IDS, "attention_mask": MASK}),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", GPT2, {"input_ids": IDS, "labels": IDS}),
    "deberta": ("DebertaV2Model", "DebertaV2Config", DEBERTA, {"input_ids": IDS}),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", {**LLAMA, "num_local_experts": 4}, {"input_ids": IDS}),
}
TOTALS = ("total_params", "total_flops", "activation_bytes", "buffer_count", "unused", "uncounted_ops")


def make(name):
    torch.manual_seed(0)
    model, config, options, batch = MODELS[name]
    return getattr(transformers, model)(getattr(transformers, config)(**options)), batch


@pytest.mark.parametrize("name", MODELS)
def test_fake_equals_real(name):
    model, batch = make(name)
    fake, real = examine_model(model, batch).report, examine_model(model, batch, real=True).report
    assert fake.failure is None, fake.failure
    assert fake.mode == "fake" or name == "mixtral", fake.problems  # whose experts run on fakes in newer releases of torch
    assert list(map(astuple, fake.rows)) == list(map(astuple, real.rows))
    assert {name: getattr(fake, name) for name in TOTALS} == {name: getattr(real, name) for name in TOTALS}
    assert fake.total_params == model.num_parameters() == sum(row.own_params for row in fake.rows)


@pytest.mark.parametrize("name", MODELS)
def test_its_mask_is_asked_for_as_ever_afterwards(name):
    from transformers.utils import import_utils

    asked = import_utils.is_fake_tensor
    model, batch = make(name)
    examine_model(model, batch)
    assert import_utils.is_fake_tensor is asked


def test_gpt2_takes_no_more_tokens_than_it_has_positions():
    model, _ = make("gpt2")
    assert examine_model(model, torch.zeros(1, 32, dtype=torch.long)).report.failure is None
    failure = examine_model(model, torch.zeros(1, 33, dtype=torch.long)).report.failure
    assert failure.error == "IndexError: index out of range in self"
    assert failure.module == "transformer.wpe"
    failure = examine_model(model, torch.full((1, 3), 64)).report.failure
    assert (failure.error, failure.module) == ("IndexError: index out of range in self", "transformer.wte")


def test_llama_by_hand_and_on_meta():
    options = {**LLAMA, "hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "vocab_size": 1000}
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**options))
    tokens, hidden, layers = 256, 512, 2
    linear = sum(one.numel() for name, one in model.named_parameters() if one.dim() > 1 and "embed" not in name)
    report = examine_model(model, (1, tokens)).report
    assert (report.mode, report.failure) == ("meta", None)
    assert report.inputs == "input_ids 1 x 256 int64"
    # As is usual, a causal attention counts as a full one.
    assert report.total_flops == 2 * tokens * linear + 4 * tokens**2 * hidden * layers
    assert report.activation_bytes > 0
