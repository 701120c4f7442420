"""What `mimo check` says of a rank's memory under FSDP2, next to a count by hand."""

from __future__ import annotations

import json
from pathlib import Path

from mimo.checkpoint.hf.recipes import load_recipe
from mimo.model.memory import RoleMemory, memory_by_role
from mimo.parallel.build import build_layout
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
