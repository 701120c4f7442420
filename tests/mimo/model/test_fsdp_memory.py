"""What `mimo check` says of a rank's memory under FSDP2, next to a count by hand and by torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mimo.checkpoint.hf.recipes import load_recipe
from mimo.model.memory import RoleMemory, memory_by_role
from mimo.parallel.build import build_layout
from tests.conftest import RunRanks
from tests.published import CONFIGS, PROCESSORS

NAME, LANES, LAYERS, TOKENS = "Qwen3-VL-8B-Instruct", 8, 4, 8192
RECIPE = Path(__file__).parents[3] / "recipes" / "qwen3_vl_8b_fsdp.yaml"

HIDDEN, FFN, QUERIES, GROUPS, VOCABULARY = 4096, 12288, 32 * 128, 2 * 8 * 128, 151936
QKV = QUERIES + GROUPS
LAYER = HIDDEN * (QKV + QUERIES + 3 * FFN) + 2 * HIDDEN + 2 * 128
EMBEDDING = HEAD = VOCABULARY * HIDDEN  # and the last norm, in the root


def language_memory(folder: Path, reduce: str) -> RoleMemory:
    """Of the recipe's language model with fewer layers."""
    config = json.loads(json.dumps(CONFIGS[NAME]))
    config["text_config"]["num_hidden_layers"] = LAYERS
    (folder / "config.json").write_text(json.dumps(config))
    processor = json.dumps(PROCESSORS[config["model_type"]])
    (folder / "preprocessor_config.json").write_text(processor)
    overrides = [f"init_from={folder}", f"language.reduce_gradients={reduce}"]
    recipe = load_recipe(RECIPE, overrides)
    assert recipe.longest_microbatch == TOKENS
    return memory_by_role(recipe, build_layout(recipe, LANES))[-1]


def test_shares_whole_gradients_and_buffers_are_those_counted_by_hand(tmp_path: Path) -> None:
    elements = EMBEDDING + LAYERS * LAYER + HIDDEN + HEAD
    unit = TOKENS * 2
    # A layer keeps of a token, in numbers of 2 bytes: of both norms the input in fp32, normalized,
    # and the output; of queries and keys the first two, and their rotation; values; the
    # projection's input; gate, up, the activated gate and the product.
    keys = GROUPS // 2
    inside = unit * (2 * 4 * HIDDEN + 3 * (QUERIES + keys) + QKV + QUERIES + 4 * FFN)
    # Inputs of layers; rows of items, and three levels twice; tensors of the last norm.
    kept = unit * HIDDEN * (LAYERS + 7 + 4)

    one = language_memory(tmp_path, "microbatch")
    assert one.weights == 4 * elements / LANES + 2 * (LAYER + HIDDEN + HEAD)
    assert one.gradients == 4 * elements / LANES
    assert one.optimizer == 2 * one.gradients
    assert one.activations == kept
    # The most is needed in a layer: gradients of gate, up and the output, and of the second
    # linear; the next layer; the message of the head's gradient, whose weight is free again.
    of_layer = inside + unit * (2 * FFN + HIDDEN) + 2 * HIDDEN * FFN - unit * 4 * HIDDEN
    message = 4 * (HEAD + HIDDEN) - 2 * (HEAD + HIDDEN)
    assert one.logits + one.buffers == of_layer + 2 * LAYER + message

    one = language_memory(tmp_path, "step")
    assert one.weights == 4 * elements / LANES + 2 * (LAYERS * LAYER + HIDDEN + HEAD)
    assert one.gradients == 4 * elements
    # The most is needed where the next forward begins: the embedding as received and as used;
    # the layers' inputs and the tensors of the last norm are free.
    assert one.logits + one.buffers == 4 * EMBEDDING - unit * HIDDEN * (LAYERS + 4)


def peak_of_a_step(_: int, reduce: Any) -> int:
    """Bytes that a rank of 8 has at most in two microbatches, without what an optimizer keeps."""
    import torch
    import torch.distributed as dist
    import transformers
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from mimo.engines.fsdp.context import DP_REPLICATE, DP_SHARD, TP, FsdpContext
    from mimo.engines.fsdp.language import LanguageModel
    from mimo.engines.fsdp.sharding import materialise, reduce_gradients, shard
    from mimo.ops.segments import PackedSegments

    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=LANES)
    mesh = init_device_mesh("cpu", (1, LANES, 1), mesh_dim_names=(DP_REPLICATE, DP_SHARD, TP))
    ctx = FsdpContext(mesh, torch.bfloat16, recompute="full", reduce_gradients=reduce)
    config = transformers.Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=FFN,
        num_hidden_layers=LAYERS,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=False,
    )
    model = LanguageModel(config, ctx)
    shard(model, ctx)
    segments = PackedSegments.from_lengths((TOKENS,), torch.device("cpu"))
    segments.prepare(model.attention_forms())
    tracker = MemTracker()
    with FakeTensorMode(allow_non_fake_inputs=True):
        materialise(model, torch.device("cpu"))
        zeros = torch.zeros(4, 1, TOKENS, dtype=torch.long)
        tracker.track_external(model)
        with tracker:
            for is_last in (False, True):
                reduce_gradients(model, now=is_last or reduce == "microbatch")
                losses = model(
                    zeros[0],
                    zeros[1:],
                    labels=zeros[0, 0],
                    loss_at=zeros[0, 0],
                    packed_seq_params=segments,
                )
                losses.sum().backward()
                tracker.reset_mod_stats()  # it tracks one pass of each module
    (peak,) = tracker.get_tracker_snapshot("peak").values()
    return peak["Total"]


@pytest.mark.slow
@pytest.mark.parametrize("reduce", ["microbatch", "step"])
def test_the_estimate_is_the_peak_that_torch_tracks(
    run_ranks: RunRanks, tmp_path: Path, reduce: str
) -> None:
    (peak,) = run_ranks(peak_of_a_step, 1, reduce)
    one = language_memory(tmp_path, reduce)
    estimate = one.total - one.optimizer
    assert estimate == pytest.approx(peak, rel=0.05)
