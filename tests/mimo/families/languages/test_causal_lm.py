"""Settings of causal language models that transformers alone has."""

from __future__ import annotations

from pathlib import Path

from mimo.families.hf_config import read_config
from mimo.families.languages import causal_lm


def test_a_copy_with_fewer_layers_has_a_kind_for_each(tmp_path: Path) -> None:
    from transformers import SmolLM3Config

    SmolLM3Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
    ).save_pretrained(tmp_path)
    settings = causal_lm.Settings(**causal_lm.settings_from_hf(read_config(tmp_path)))
    assert len(settings.configuration()["layer_types"]) == 4
    fewer = settings.model_copy(update={"num_layers": 1})
    assert 0 < len(causal_lm.weights_in_hf(fewer)) < len(causal_lm.weights_in_hf(settings))
