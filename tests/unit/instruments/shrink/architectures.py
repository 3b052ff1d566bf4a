"""Tiny models of twenty architectures, made from their configurations, each with many layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers as hf

__all__ = ["ARCHITECTURES", "Architecture"]

_WIDTH: dict[str, Any] = {"vocab_size": 64, "hidden_size": 16, "num_attention_heads": 2}
_DECODER: dict[str, Any] = {**_WIDTH, "intermediate_size": 16, "num_key_value_heads": 1, "head_dim": 8}
_EXPERTS: dict[str, Any] = {**_DECODER, "moe_intermediate_size": 8, "num_experts": 4, "num_experts_per_tok": 2}
_ENCODER: dict[str, Any] = {**_WIDTH, "intermediate_size": 16}
_ENDS: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}


@dataclass(frozen=True)
class Architecture:
    """One of them: how it is made, what is left of each stack, and what it is called with."""

    model: str
    config: str
    settings: dict[str, Any]
    kept: dict[str, tuple[int, ...]]
    inputs: Callable[[], dict[str, torch.Tensor]]
    generates: bool = True

    def made(self) -> Any:
        """The model, in inference mode."""
        torch.manual_seed(0)
        return getattr(hf, self.model)(getattr(hf, self.config)(**self.settings)).eval()


def _words() -> dict[str, torch.Tensor]:
    return {"input_ids": torch.randint(2, 60, (2, 5))}


def _pictures() -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(2, 3, 16, 16)}


def _both() -> dict[str, torch.Tensor]:
    return {**_words(), **_pictures()}


def _pairs() -> dict[str, torch.Tensor]:
    return {**_words(), "decoder_input_ids": torch.randint(2, 60, (2, 4))}


def _sounds() -> dict[str, torch.Tensor]:
    return {"input_features": torch.randn(2, 8, 32), "decoder_input_ids": torch.randint(2, 60, (2, 4))}


def _waves() -> dict[str, torch.Tensor]:
    return {"input_values": torch.randn(2, 400)}


_TWO = (0, 1)
_LAYERS = {"model.layers": _TWO}
_DEEP: dict[str, Any] = {**_ENDS, "num_hidden_layers": 12}
_PICTURE: dict[str, Any] = {"image_size": 16, "patch_size": 8, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16}

ARCHITECTURES = {
    "gpt2": Architecture(
        "GPT2LMHeadModel",
        "GPT2Config",
        {"vocab_size": 64, "n_embd": 16, "n_head": 2, "n_layer": 12, **_ENDS},
        {"transformer.h": _TWO},
        _words,
    ),
    "llama": Architecture("LlamaForCausalLM", "LlamaConfig", {**_DECODER, **_DEEP}, _LAYERS, _words),
    "gpt_neo": Architecture(
        "GPTNeoForCausalLM",
        "GPTNeoConfig",
        {"vocab_size": 64, "hidden_size": 16, "num_layers": 12, "num_heads": 2, "attention_types": [[["global", "local"], 6]], **_ENDS},
        {"transformer.h": _TWO},
        _words,
    ),
    "gemma3": Architecture("Gemma3ForCausalLM", "Gemma3TextConfig", {**_DECODER, **_DEEP}, {"model.layers": (0, 5)}, _words),
    "qwen3_moe": Architecture("Qwen3MoeForCausalLM", "Qwen3MoeConfig", {**_EXPERTS, **_DEEP}, _LAYERS, _words),
    "jamba": Architecture(
        "JambaForCausalLM",
        "JambaConfig",
        {
            **_DECODER,
            **_ENDS,
            "num_hidden_layers": 12,
            "attn_layer_period": 4,
            "attn_layer_offset": 2,
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "use_mamba_kernels": False,
            "mamba_d_state": 4,
            "mamba_dt_rank": 4,
        },
        {"model.layers": (0, 1, 2)},
        _words,
    ),
    "bert": Architecture(
        "BertForMaskedLM", "BertConfig", {**_ENCODER, "num_hidden_layers": 12}, {"bert.encoder.layer": _TWO}, _words, generates=False
    ),
    "vit": Architecture(
        "ViTForImageClassification", "ViTConfig", {**_PICTURE, "num_hidden_layers": 12}, {"vit.layers": _TWO}, _pictures, generates=False
    ),
    "clip": Architecture(
        "CLIPModel",
        "CLIPConfig",
        {
            "text_config": {**_ENCODER, "num_hidden_layers": 8},
            "vision_config": {**_PICTURE, "num_hidden_layers": 12},
            "projection_dim": 8,
        },
        {"text_model.encoder.layers": _TWO, "vision_model.encoder.layers": _TWO},
        _both,
        generates=False,
    ),
    "wav2vec2": Architecture(
        "Wav2Vec2ForCTC",
        "Wav2Vec2Config",
        {
            **_ENCODER,
            "num_hidden_layers": 12,
            "conv_dim": (8, 8),
            "conv_stride": (5, 2),
            "conv_kernel": (10, 3),
            "num_conv_pos_embeddings": 4,
            "num_conv_pos_embedding_groups": 2,
            "num_feat_extract_layers": 2,
        },
        {"wav2vec2.encoder.layers": _TWO},
        _waves,
        generates=False,
    ),
    "t5": Architecture(
        "T5ForConditionalGeneration",
        "T5Config",
        {
            "vocab_size": 64,
            "d_model": 16,
            "d_kv": 8,
            "d_ff": 16,
            "num_heads": 2,
            "num_layers": 8,
            "num_decoder_layers": 6,
            "decoder_start_token_id": 0,
            **_ENDS,
        },
        {"encoder.block": _TWO, "decoder.block": _TWO},
        _pairs,
    ),
    "whisper": Architecture(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {
            "vocab_size": 64,
            "d_model": 16,
            "encoder_layers": 6,
            "decoder_layers": 5,
            "encoder_attention_heads": 2,
            "decoder_attention_heads": 2,
            "encoder_ffn_dim": 16,
            "decoder_ffn_dim": 16,
            "num_mel_bins": 8,
            "max_source_positions": 16,
            "max_target_positions": 32,
            "decoder_start_token_id": 1,
            **_ENDS,
        },
        {"model.encoder.layers": _TWO, "model.decoder.layers": _TWO},
        _sounds,
    ),
    "bart": Architecture(
        "BartForConditionalGeneration",
        "BartConfig",
        {
            "vocab_size": 64,
            "d_model": 16,
            "encoder_layers": 6,
            "decoder_layers": 6,
            "encoder_attention_heads": 2,
            "decoder_attention_heads": 2,
            "encoder_ffn_dim": 16,
            "decoder_ffn_dim": 16,
            "decoder_start_token_id": 1,
            "forced_eos_token_id": None,
            **_ENDS,
        },
        {"model.encoder.layers": _TWO, "model.decoder.layers": _TWO},
        _pairs,
    ),
}
