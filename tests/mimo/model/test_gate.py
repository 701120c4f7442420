"""The gate: which classes of transformers may train in two halves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers

from mimo.checkpoint.hf.shrink import shrink
from mimo.engines.fsdp.halves import OutputForm
from mimo.model import gate
from mimo.model.gate import compare_halves, verdict_of
from tests.mimo.model.tiny_classes import tiny_config

_TWELVE = {
    "num_hidden_layers": 12,
    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 2,
}
# The kinds of published Gemma 4 models: heads of several sizes and values that reuse keys; keys and
# values that layers share, with inputs of each layer; experts.
GEMMAS: dict[str, dict[str, Any]] = {
    "31B": {
        **_TWELVE,
        **{"attention_k_eq_v": True, "num_global_key_value_heads": 4, "global_head_dim": 512},
        **{"hidden_size_per_layer_input": 0, "use_bidirectional_attention": "vision"},
    },
    "E4B": {
        "num_hidden_layers": 35,
        "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7,
        **{"num_kv_shared_layers": 20, "hidden_size_per_layer_input": 256},
    },
    "26B-A4B": {
        **_TWELVE,
        **{"enable_moe_block": True, "num_experts": 128, "top_k_experts": 8},
        **{"moe_intermediate_size": 704, "hidden_size_per_layer_input": 0},
        "use_bidirectional_attention": "vision",
    },
}


@pytest.mark.parametrize("name", GEMMAS)
def test_every_kind_of_gemma_4_splits_and_packs(name: str) -> None:
    config = transformers.Gemma4Config(text_config=GEMMAS[name], vision_config={})
    verdict = compare_halves(shrink(config))
    assert verdict.problem == ""
    assert verdict.packing == ("causal" if name == "E4B" else "items")
    assert {"image", "video"} <= {*verdict.outputs}


def test_a_verdict_is_kept_and_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_config("internvl")
    first = verdict_of(config, tmp_path)
    monkeypatch.setattr(gate, "compare_halves", None)
    assert verdict_of(config, tmp_path) == first
    assert first.packing == "causal"


def test_rows_in_another_order_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    in_order = OutputForm.rows
    monkeypatch.setattr(OutputForm, "rows", lambda form, output: in_order(form, output).flip(0))
    assert "differs" in compare_halves(tiny_config("internvl")).problem


def test_a_class_that_would_learn_another_thing_is_refused() -> None:
    assert "answer" in verdict_of(transformers.PaliGemmaConfig()).problem


@pytest.mark.parametrize(("name", "shares_calls"), [("minicpmv4_6", False), ("internvl", True)])
def test_items_share_a_call_where_the_results_agree(name: str, shares_calls: bool) -> None:
    verdict = compare_halves(tiny_config(name))
    assert (verdict.problem, verdict.shares_calls) == ("", shares_calls)
