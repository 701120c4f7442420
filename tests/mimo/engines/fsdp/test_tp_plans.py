"""Language models of transformers on two ranks by their class's own plan: losses, gradients.

In fp64, except for experts, so that little but the norms rounds to fp32.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from mimo.engines.fsdp import tp_plans
from mimo.engines.fsdp.context import DP_REPLICATE, DP_SHARD, TP
from mimo.engines.fsdp.sharding import local_rectangle
from mimo.engines.fsdp.tp_plans import apply_plan, plan_problems
from tests.conftest import RunRanks

EXACT = 1e-5
WRONG = 0.1
TEXT: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "pad_token_id": 50,  # a row of the second rank
    "bos_token_id": 1,
    "eos_token_id": 2,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
VISION: dict[str, Any] = {
    "depth": 1,
    "num_hidden_layers": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "global_head_dim": 8,
    "out_hidden_size": 32,
    "image_size": 28,
    "patch_size": 14,
}
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
GLM_ROPE = MROPE | {"mrope_section": [1, 1, 2]}
GATED = {"layer_types": ["linear_attention", "full_attention"]}
GEMMA4 = {
    "layer_types": ["sliding_attention", "full_attention"],
    "global_head_dim": 16,
    "num_global_key_value_heads": 2,
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
    "sliding_window": 6,
}
PER_LAYER = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 96}
CASES: dict[str, tuple[str, dict[str, Any], str | None]] = {
    "qwen3_5": ("qwen3_5", GATED, None),
    "qwen3_5_moe": ("qwen3_5_moe", GATED, None),
    "gemma4": ("gemma4", GEMMA4, None),
    "gemma4 with per-layer inputs": ("gemma4", GEMMA4 | PER_LAYER, None),
    "internvl": ("internvl", {"model_type": "qwen2"}, None),
    "mistral3": ("mistral3", {"model_type": "mistral"}, "pixtral"),
    "llava": ("llava", {"model_type": "llama"}, "clip_vision_model"),
    "glm4v": ("glm4v", {"head_dim": 8, "rope_parameters": GLM_ROPE}, None),
    "qwen3_vl": ("qwen3_vl", {"rope_parameters": MROPE}, None),
    "qwen3_vl_moe": ("qwen3_vl_moe", {"rope_parameters": MROPE}, None),
    "qwen3": ("qwen3", {"tie_word_embeddings": True}, None),
    "phi3": ("phi3", {}, None),
}
"""By case: model_type, changes of the text part, model_type of the tower if there is a choice."""


def config_of(case: str, **changes: Any) -> Any:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    name, text, tower = CASES[case]
    text = TEXT | text | changes
    kind: Any = CONFIG_MAPPING[name]
    if not kind.sub_configs:
        return kind(**text)
    vision = VISION | ({"model_type": tower} if tower else {})
    tied = text.get("tie_word_embeddings", name == "gemma4")
    return kind(text_config=text, vision_config=vision, tie_word_embeddings=tied)


def build(config: Any) -> Any:
    """The module of transformers with drawn weights, the same on every rank."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    text_only = config.get_text_config() is config
    kind = AutoModelForCausalLM if text_only else AutoModelForImageTextToText
    # Kernels of experts take no fp64.
    dtype = torch.float32 if config.model_type.endswith("moe") else torch.float64
    torch.manual_seed(0)  # some vectors keep what they are initialized with
    model = kind.from_config(config, dtype=dtype, attn_implementation="eager").eval()
    drawn = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for _, weight in sorted(model.named_parameters()):
            noise = 0.1 * torch.randn(weight.shape, generator=drawn)
            weight.copy_(weight + noise if weight.dim() == 1 else noise)
    return model


def outcome(model: Any) -> dict[str, Tensor]:
    """Loss, gradients by name, and the gradient of the embeddings, of ids (2, 12)."""
    drawn = torch.Generator().manual_seed(7)
    ids = torch.randint(3, 60, (2, 12), generator=drawn)
    ids[0, 3], ids[0, 4] = 50, 2  # the padding row, and the other rank's row in the same place
    labels = torch.randint(0, 96, (24,), generator=drawn)
    gradients = {}

    def keep(_module: nn.Module, _args: object, output: Tensor) -> None:
        output.register_hook(lambda gradient: gradients.update({"embeddings": gradient}))

    is_typed = "gemma4" in model.config.model_type
    options = {"mm_token_type_ids": torch.zeros_like(ids)} if is_typed else {}
    with model.get_input_embeddings().register_forward_hook(keep):
        logits = model(input_ids=ids, use_cache=False, **options).logits
    assert type(logits) is Tensor
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels)
    loss.backward()
    gradients["loss"] = loss.detach()
    for name, weight in model.named_parameters():
        # An expert without a token, on one rank or on all, has none.
        gradient = torch.zeros_like(weight) if weight.grad is None else weight.grad
        gradients[name] = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
    return gradients


def wrong(model: Any, want: dict[str, Tensor]) -> dict[str, float]:
    """The errors of what is not exact."""
    ours = outcome(model)
    assert ours.keys() == want.keys()
    norm = sum(float(value.square().sum()) for value in want.values()) ** 0.5
    errors = {
        name: float((ours[name] - value).abs().max() / max(value.abs().max(), 1e-6 * norm))
        for name, value in want.items()
    }
    return {name: error for name, error in errors.items() if not error <= EXACT}


def exact_on_two_ranks(rank: int) -> None:
    mesh = init_device_mesh("cpu", (1, 1, 2), mesh_dim_names=(DP_REPLICATE, DP_SHARD, TP))
    for case in CASES:
        config = config_of(case)
        assert list(plan_problems(config, 2)) == [], case
        want = outcome(build(config))
        for with_fsdp2 in (False, True):
            model = build(config)
            apply_plan(model, mesh[TP])
            if with_fsdp2:
                for layer in model.get_decoder().layers:
                    fully_shard(layer, mesh=mesh[DP_SHARD,])
                fully_shard(model, mesh=mesh[DP_SHARD,])
                parts = [local_rectangle(weight, mesh) for weight in model.parameters()]
                assert {part.copies for part in parts} == {1, 2}, case
            errors = wrong(model, want)
            assert not errors, (case, with_fsdp2, errors)
    faults(mesh)


def faults(mesh: Any) -> None:
    """Each is seen by the comparison that is exact without it."""
    config = config_of("qwen3_vl_moe")
    want = outcome(build(config))
    model = build(config)
    plan = tp_plans._planned(model)
    plan = {name: style for name, style in plan.items() if not name.endswith("q_norm")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tp_plans, "_planned", lambda _: plan)
        apply_plan(model, mesh[TP])
    errors = wrong(model, want)
    assert len(errors) == 2
    assert all("q_norm" in name and error > WRONG for name, error in errors.items()), errors


@pytest.mark.slow
def test_two_ranks_give_the_plain_losses_and_gradients(run_ranks: RunRanks) -> None:
    run_ranks(exact_on_two_ranks, 2)


def test_problems_name_the_module_or_the_size() -> None:
    assert list(plan_problems(config_of("internvl"), 1)) == []
    (problem,) = plan_problems(config_of("internvl"), 4)
    assert problem == "got 4, but num_key_value_heads is 2; change tp"
    rows, features = plan_problems(config_of("internvl", vocab_size=97), 2)
    assert "embed_tokens" in rows
    assert "97 rows" in rows
    assert "lm_head ('colwise_gather_output' in transformers' plan) has out_features" in features
    (problem,) = plan_problems(config_of("qwen3_5_moe", num_experts=3), 2)
    assert "layers.*.mlp.experts" in problem
    assert "3 experts" in problem


def test_a_class_without_a_plan_and_an_unknown_style_are_refused() -> None:
    from transformers import GPT2Config, Llama4Config

    (problem,) = plan_problems(GPT2Config(n_layer=1, n_embd=8, n_head=2), 2)
    assert "transformers has no plan for 'gpt2'" in problem
    text = TEXT | {"num_local_experts": 4, "intermediate_size_mlp": 48}
    problems = list(plan_problems(Llama4Config(text_config=text, vision_config=VISION), 2))
    assert any("experts of an unknown form, Llama4TextExperts" in problem for problem in problems)


def test_a_plan_leaves_out_norms_of_heads_and_they_are_replicated() -> None:
    planned = tp_plans._planned(tp_plans.on_meta(config_of("qwen3_vl_moe"), "eager", torch.float32))
    assert planned["model.language_model.layers.0.self_attn.q_norm"] == tp_plans._SHARED_NORM
