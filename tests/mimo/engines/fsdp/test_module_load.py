"""From meta to memory: buffers, tied weights, and what a rank asks for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from mimo.engines.fsdp.context import FsdpContext
from mimo.engines.fsdp.models import restore_buffers
from mimo.engines.fsdp.sharding import load, materialise
from tests.fsdp_ranks import Asked
from tests.mimo.engines.fsdp.language_cases import config_of

CPU = torch.device("cpu")


def whole(name: str, tied: bool) -> Any:
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    config = config_of(name, **({} if name == "gemma3" else {"tie_word_embeddings": tied}))
    text_only = config.get_text_config() is config
    kind = AutoModelForCausalLM if text_only else AutoModelForImageTextToText
    return kind.from_config(config, dtype=torch.float32)


@pytest.mark.parametrize("name", ["llama", "qwen3_vl", "qwen2_5_vl", "gemma3"])
def test_buffers_are_those_of_a_model_that_was_never_on_meta(name: str) -> None:
    expected = whole(name, tied=True)
    with torch.device("meta"):
        model = whole(name, tied=True)
    assert any(buffer.is_meta for buffer in model.buffers())
    state = torch.get_rng_state()
    for part in reversed([one for one in model.modules() if isinstance(one, PreTrainedModel)]):
        restore_buffers(part)
    materialise(model, CPU)
    assert torch.equal(torch.get_rng_state(), state)  # no weight has been drawn
    for key, buffer in expected.named_buffers():
        assert torch.equal(model.get_buffer(key), buffer), key
    assert model.lm_head.weight is model.get_input_embeddings().weight
    model.hf_names = {key: key for key, _ in model.named_parameters()}
    weights = {key: one.detach() for key, one in expected.named_parameters()}
    load(model, FsdpContext(None, torch.float32), CPU, Asked(weights))
    for key, one in model.named_parameters():
        assert torch.equal(one, weights[key]), key


def test_a_buffer_that_nobody_computes_and_a_tensor_of_another_shape_are_refused() -> None:
    with torch.device("meta"):
        part: Any = nn.Linear(3, 2, bias=False)
        part.register_buffer("scale", torch.ones(1))
    with pytest.raises(AssertionError, match="scale has no values"):
        materialise(part, CPU)
    linear: Any = nn.Linear(3, 2, bias=False)
    linear.hf_names = {"weight": "w"}
    with pytest.raises(ValueError, match=r"w: \[1, 3\], not 2 rows"):
        load(linear, FsdpContext(None, torch.float32), CPU, Asked({"w": torch.ones(1, 3)}))
