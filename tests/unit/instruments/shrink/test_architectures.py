"""Twenty architectures, from their configurations: shrunk, each generates and trains, and is afterwards as it was."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchdebug_magics

transformers = pytest.importorskip("transformers")

from tests.unit.instruments.shrink.architectures import ARCHITECTURES, Architecture  # noqa: E402 - which needs transformers

FIRST = {"input_ids", "input_features"}
ON_META = ("llama", "gemma3", "jamba", "t5")


@pytest.fixture(autouse=True)
def quiet() -> None:
    transformers.utils.logging.set_verbosity_error()


def first_tensor(output: Any) -> Tensor:
    found: Tensor = next(value for value in output.values() if isinstance(value, Tensor))
    return found


def entries(cache: Any) -> list[Any]:
    """Of a cache, or of its two."""
    return [cache] if hasattr(cache, "layers") else [cache.self_attention_cache, cache.cross_attention_cache]


def shapes(layer: Any) -> list[tuple[int, ...]]:
    return [tuple(value.shape) for value in vars(layer).values() if isinstance(value, Tensor)]


def generated(model: Any, given: dict[str, Tensor]) -> Any:
    begin = {name: value for name, value in given.items() if name in FIRST}
    return model.generate(**begin, max_new_tokens=3, min_new_tokens=3, do_sample=False, return_dict_in_generate=True)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_it_is_shrunk_generates_trains_and_comes_back(name: str) -> None:
    architecture = ARCHITECTURES[name]
    model, given = architecture.made(), architecture.inputs()
    with torch.no_grad():
        wanted = first_tensor(model(**given))
    cache = generated(model, given).past_key_values if architecture.generates else None
    settings = {part: dict(vars(part.config)) for part in model.modules() if hasattr(part, "config")}
    parts = list(model.modules())

    report = torchdebug_magics.shrink(model)
    assert dict(report.kept) == architecture.kept, str(report)
    assert report.problems == ()
    assert report.parameters_after == sum(one.numel() for one in model.parameters()) < report.parameters_before
    if cache is not None:
        check_generation(architecture, model, given, cache)
    check_training(model, given)

    torchdebug_magics.shrink(model, undo=True)
    assert all(one is other for one, other in zip(model.modules(), parts, strict=True))
    for part, config in settings.items():
        assert dict(vars(part.config)) == config
    with torch.no_grad():
        assert torch.equal(first_tensor(model.eval()(**given)), wanted)


STAGES: dict[str, Any] = {"hidden_sizes": [4, 8, 8, 16], "depths": [1, 1, 2, 1]}
DETR: dict[str, Any] = {
    "use_timm_backbone": False,
    "use_pretrained_backbone": False,
    "d_model": 16,
    "encoder_layers": 6,
    "decoder_layers": 6,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 16,
    "decoder_ffn_dim": 16,
}
SWIN: dict[str, Any] = {
    "image_size": 32,
    "patch_size": 2,
    "embed_dim": 8,
    "depths": [2, 2, 6, 2],
    "num_heads": [1, 1, 2, 2],
    "window_size": 2,
}
DINO: dict[str, Any] = {"image_size": 16, "patch_size": 8, "hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 12}


def detr() -> Any:
    backbone = transformers.ResNetConfig(embedding_size=4, out_features=["stage4"], **STAGES)
    return transformers.DetrModel(transformers.DetrConfig(backbone_config=backbone, **DETR))


def test_stacks_in_stages_and_over_a_backbone() -> None:
    swin = transformers.SwinModel(transformers.SwinConfig(**SWIN))
    assert dict(torchdebug_magics.shrink(swin).kept) == {"encoder.layers.2.blocks": (0, 1)}
    report = torchdebug_magics.shrink(detr(), (1, 3, 64, 64))
    assert dict(report.kept) == {"encoder.layers": (0, 1), "decoder.layers": (0, 1)}


def test_a_backbone_that_gives_layers_by_number_is_left() -> None:
    dino = transformers.Dinov2Backbone(transformers.Dinov2Config(out_indices=[3, 6, 9, 12], **DINO))
    report = torchdebug_magics.shrink(dino)
    assert report.undone
    assert "feature_maps was 4 tensors and became 0" in report.reason


def check_generation(architecture: Architecture, model: Any, given: dict[str, Tensor], cache: Any) -> None:
    """The cache of the small model has the entries of the layers that were kept, each in its shape."""
    small = generated(model, given)
    assert small.sequences.shape[0] == 2
    kept = list(architecture.kept.values())[-1]
    for large_one, small_one in zip(entries(cache), entries(small.past_key_values), strict=True):
        assert [type(layer) for layer in small_one.layers] == [type(large_one.layers[place]) for place in kept]
        assert [shapes(layer) for layer in small_one.layers] == [shapes(large_one.layers[place]) for place in kept]


def check_training(model: Any, given: dict[str, Tensor]) -> None:
    model.train()
    before, model.config.layerdrop = getattr(model.config, "layerdrop", None), 0.0
    first_tensor(model(**given)).square().mean().backward()
    without = [name for name, one in model.named_parameters() if one.grad is None and one.requires_grad]
    assert [name for name in without if "layer" in name or "block" in name] == []
    model.zero_grad()
    if before is None:
        del model.config.layerdrop
    else:
        model.config.layerdrop = before


@pytest.mark.parametrize("name", ON_META)
def test_on_meta_it_is_shrunk_before_it_has_weights(name: str) -> None:
    architecture = ARCHITECTURES[name]
    with torch.device("meta"):
        model = architecture.made()
    report = torchdebug_magics.shrink(model, device="cpu")
    assert dict(report.kept) == architecture.kept, str(report)
    assert report.problems == ()
    fresh = architecture.made()
    torchdebug_magics.shrink(fresh)
    given = architecture.inputs()
    assert first_tensor(model(**given)).isfinite().all()
    buffers = dict(fresh.named_buffers())
    assert all(torch.equal(one, buffers[path]) for path, one in model.named_buffers()), "as a fresh one has them"
    assert [path for path, one in model.named_parameters() if not one.isfinite().all()] == []


def test_what_no_initialization_fills_is_named() -> None:
    with torch.device("meta"):
        model = ARCHITECTURES["clip"].made()
    report = torchdebug_magics.shrink(model, device="cpu")
    assert report.problems == ("nothing initializes `logit_scale`: set the values yourself",)


def test_a_live_cache_of_the_large_model_is_named() -> None:
    architecture = ARCHITECTURES["llama"]
    model, given = architecture.made(), architecture.inputs()
    cache = model(**given).past_key_values
    report = torchdebug_magics.shrink(model, **given, past_key_values=cache)
    assert not report.undone
    assert report.problems == ("`past_key_values` holds an entry for each layer of the large model: create a new one",)
    assert [layer.keys.shape[2] for layer in cache.layers] == [5] * 12, "the proof did not write to it"
    torchdebug_magics.shrink(model, undo=True)
    model.live = cache  # as a model does that keeps its own
    torchdebug_magics.shrink(model)
    assert [layer is cache.layers[place] for place, layer in enumerate(model.live.layers)] == [True, True]
    torchdebug_magics.shrink(model, undo=True)
    assert model.live is cache


def test_a_model_that_skips_attention_is_not_kept_alive() -> None:
    model = ARCHITECTURES["llama"].made()
    torchdebug_magics.shrink(model, skip_attention=True)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    assert "torchdebug_skipped" not in transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS


@pytest.mark.parametrize("name", ["llama", "bert", "t5"])
def test_while_it_trains_with_checkpoints(name: str) -> None:
    architecture = ARCHITECTURES[name]
    model, given = architecture.made().train(), architecture.inputs()
    model.gradient_checkpointing_enable()
    report = torchdebug_magics.shrink(model, **given, skip_attention=True)
    assert dict(report.kept) == architecture.kept, str(report)
    check_training(model, given)


def attended(model: nn.Module, given: dict[str, Tensor]) -> int:
    """How many times attention is computed in a forward."""
    from torch.overrides import TorchFunctionMode

    class Counting(TorchFunctionMode):
        count = 0

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.count += func is nn.functional.scaled_dot_product_attention
            return func(*args, **(kwargs or {}))

    with Counting() as counting:
        model(**given)
    return counting.count


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "gemma3", "vit", "bart", "whisper"])
def test_attention_runs_in_the_last_layer_only(name: str) -> None:
    architecture = ARCHITECTURES[name]
    model, given = architecture.made(), architecture.inputs()
    all_of_it = attended(model, given)
    report = torchdebug_magics.shrink(model, layers=4, skip_attention=True)
    assert not report.undone, str(report)
    assert report.skipped_attention == 3 * len(report.stacks) if name != "gemma3" else report.skipped_attention > 0
    left = attended(model, given)
    assert left == {"bart": 3, "whisper": 3}.get(name, 1) < all_of_it
    check_training(model, given)
    if architecture.generates:
        generated(model.eval(), given)
    torchdebug_magics.shrink(model, undo=True)
    assert attended(model, given) == all_of_it
    gc.collect()
    interface = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS
    assert "torchdebug_skipped" not in interface
