"""Tiny copies of transformers' classes keep every kind of layer and build."""

from typing import Any

import pytest
import transformers

from mimo.checkpoint.hf.examples import example_samples
from mimo.checkpoint.hf.shrink import VOCABULARY, build, shrink

CLASSES = ("Qwen3_5", "Gemma4", "InternVL", "Mistral3", "PaliGemma", "Qwen3VLMoe")
KINDS = ("layer_types", "mlp_layer_types")


def _parts(config):
    return [config, *(p for k in config.sub_configs if (p := getattr(config, k, None)) is not None)]


@pytest.mark.parametrize("name", CLASSES)
def test_a_tiny_copy_keeps_every_kind_of_layer(name: str) -> None:
    model_class = getattr(transformers, f"{name}ForConditionalGeneration")
    config = model_class.config_class()
    small = shrink(config)
    assert type(small) is type(config)
    assert len(_parts(small)) >= len(_parts(config))
    for part in _parts(config):
        tiny = next(p for p in _parts(small) if p.model_type == part.model_type)
        for key in KINDS:
            kinds = getattr(part, key, None)
            assert not kinds or set(getattr(tiny, key)) == set(kinds)

    whole = build(small)
    assert type(whole) is model_class
    assert sum(p.numel() for p in whole.parameters()) < 5e6
    for key, parameter in whole.named_parameters():
        assert (parameter.isfinite().all() and parameter.std() > 0) or parameter.numel() == 1, key

    samples = example_samples(whole)
    assert [len(s.items.get("image", ())) for s in samples] == [2, 0, 1]
    for sample in samples:
        assert int(sample.input_ids.max()) < VOCABULARY


def test_shared_keys_and_the_kinds_of_a_real_gemma_4_survive() -> None:
    text: dict[str, Any] = {"num_hidden_layers": 35, "num_kv_shared_layers": 20}
    text["hidden_size_per_layer_input"] = 256
    text["layer_types"] = (["sliding_attention"] * 4 + ["full_attention"]) * 7
    small = shrink(transformers.Gemma4Config(text_config=text, vision_config={}))
    assert small.text_config.num_kv_shared_layers == 2
    assert small.text_config.layer_types == ["sliding_attention", "full_attention"] * 2
    assert small.audio_config is None
    build(small)
