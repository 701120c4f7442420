"""A model that does not fit is refused before it is built."""

from pathlib import Path
from typing import Any

import pytest

from mimo import device
from mimo.check import verify
from mimo.checkpoint.hf.recipes import load_recipe
from mimo.checkpoint.hf.shrink import build
from mimo.config.schema import Recipe
from mimo.device import Memory
from mimo.engines.fsdp.halves import language_parameters
from mimo.errors import InputError, RecipeError
from mimo.families.registry import language_settings
from mimo.model import recipe_checks
from mimo.model.memory import (
    RoleMemory,
    memory_by_role,
    parameters_by_role,
)
from mimo.model.recipe_checks import RANK_BYTES, check_data, check_memory
from mimo.parallel.build import build_layout
from mimo.parallel.grids import Layout
from mimo.train import main as job
from tests.conftest import RunRanks
from tests.mimo import tiny
from tests.mimo.model.tiny_classes import tiny_config
from tests.mimo.model.tiny_classes import write_recipe as write_any_recipe

TOWER = "num_layers: 3, hidden_size: 16, ffn_hidden_size: 24, num_attention_heads: 2"
DECODER = (
    "num_layers: 3, hidden_size: 32, ffn_hidden_size: 48, num_attention_heads: 4, "
    "num_query_groups: 2, head_size: 8, vocab_size: 100"
)
MODELS = {
    "qwen3 and qwen3_vl": (
        f"language={{family: qwen3, model: {{{DECODER}, mrope_section: [2, 1, 1], "
        "tie_word_embeddings: true}}",
        f"encoders.vision={{family: qwen3_vl, model: {{{TOWER}, num_grid_per_side: 5, "
        "deepstack_visual_indexes: [0, 2]}}",
    ),
    "qwen2_5 and qwen_vl": (
        f"language={{family: qwen2_5, model: {{{DECODER}, mrope_section: [2, 1, 1]}}}}",
        f"encoders.vision={{family: qwen_vl, model: {{{TOWER}, window_size: 56}}}}",
    ),
    "gemma3": (
        f"language={{family: gemma3, model: {{{DECODER}, sliding_window_pattern: 2}}}}",
        f"encoders.vision={{family: gemma3, model: {{{TOWER}, image_size: 56, "
        "mm_tokens_per_image: 4}}",
    ),
}

# About 26 M parameters.
WIDE = (
    "language.model={num_layers: 4, hidden_size: 512, ffn_hidden_size: 1536, "
    "num_attention_heads: 8, num_query_groups: 4, head_size: 64, vocab_size: 8000, "
    "mrope_section: [16, 8, 8]}",
    "encoders.vision.model={num_layers: 4, hidden_size: 256, ffn_hidden_size: 768, "
    "num_attention_heads: 4}",
)
STAGES = "language.grid={tp: 2, sp: true, pp: 2}"
SPARSE = (
    f"language={{family: qwen3_moe, model: {{{DECODER}, mrope_section: [2, 1, 1], "
    "num_experts: 6, experts_per_token: 2}}",
    f"encoders.vision={{family: qwen_vl, model: {{{TOWER}}}}}",
)
ROLES = {
    "26 M parameters in fp32": (*WIDE, "train.precision=fp32", STAGES),
    "qwen3 with tied weights": (
        *MODELS["qwen3 and qwen3_vl"],
        STAGES,
        "encoders.vision.grid={tp: 2}",
        "language.model.num_layers=4",
        "train.precision=bf16",
    ),
    "qwen2_5, three stages": (
        *MODELS["qwen2_5 and qwen_vl"],
        "language.grid={pp: 3}",
        "encoders.vision.grid={pp: 3}",
        "train.precision=fp32",
        "train.optimizer=sgd",
    ),
    "qwen3_5, two stages": (
        f"language={{family: qwen3_5, model: {{{DECODER}, mrope_section: [1, 0, 1], "
        "full_attention_interval: 2, linear_num_key_heads: 2, linear_num_value_heads: 6, "
        "linear_key_size: 8, linear_value_size: 12}}",
        f"encoders.vision={{family: qwen3_vl, model: {{{TOWER}, num_grid_per_side: 5}}}}",
        STAGES,
        "language.model.num_layers=8",
        "train.precision=bf16",
        "language.lora={}",
        "encoders.vision.freeze=true",
    ),
    "qwen3_5_moe, two stages": (
        f"language={{family: qwen3_5_moe, model: {{{DECODER}, mrope_section: [1, 0, 1], "
        "full_attention_interval: 2, linear_num_key_heads: 2, linear_num_value_heads: 6, "
        "linear_key_size: 8, linear_value_size: 12, num_experts: 4, experts_per_token: 2, "
        "shared_expert_size: 20}}",
        f"encoders.vision={{family: qwen3_vl, model: {{{TOWER}, num_grid_per_side: 5}}}}",
        "language.grid={tp: 2, sp: true, pp: 2, dp: 2, ep: 2}",
        "train.global_batch_size=16",
        "language.model.num_layers=8",
        "train.precision=bf16",
    ),
    "gemma3 with a tower that is frozen": (
        *MODELS["gemma3"],
        "language.grid={tp: 2}",
        "encoders.vision.grid={tp: 2}",
        "encoders.vision.freeze=tower",
        "train.precision=fp64",
    ),
    "adapters": (
        *MODELS["qwen3 and qwen3_vl"],
        "language.grid={tp: 2}",
        "language.lora={targets: [qkv, proj, fc1, fc2]}",
        "encoders.vision.freeze=true",
        "train.precision=bf16",
    ),
    "experts that are shared out and split": (
        *SPARSE,
        "language.grid={tp: 2, ep: 2, etp: 2, dp: 4, pp: 3}",
        "encoders.vision.grid={dp: 1}",
        "train.global_batch_size=96",
        "train.precision=bf16",
        "train.distributed_optimizer=true",
    ),
    "experts with adapters": (
        *SPARSE,
        "language.grid={tp: 2, ep: 2}",
        "language.lora={targets: [qkv, proj, fc1, fc2], rank: 4}",
        "train.precision=bf16",
    ),
    "a distributed optimizer": (
        *MODELS["qwen2_5 and qwen_vl"],
        "language.grid={dp: 2}",
        "encoders.vision.grid={dp: 2}",
        "train.global_batch_size=16",
        "train.precision=bf16",
        "train.distributed_optimizer=true",
    ),
}


def held_by_roles(rank: int, recipe: Recipe, layout: Layout) -> list[tuple[str, tuple[int, ...]]]:
    """Bytes of weights, gradients and optimizer that this rank holds, by role."""
    from mimo.model.build import build_model
    from mimo.parallel.groups import build_topology

    found = []
    modules: Any = build_model(recipe, build_topology(layout), 100).modules
    for name, module in modules.items():
        params = [p for chunk in module.raw for p in chunk.parameters()]
        grads, state = 0, 0
        for optimizer in module.optimizers:
            base = optimizer.optimizer
            assert base is not None
            optimizer.init_state_fn(base, optimizer.config)
            learnt: list[Any] = [p for p in params if p.requires_grad]
            grads = sum(p.main_grad.nbytes for p in learnt)
            state += sum(
                tensor.nbytes
                for one in base.state.values()
                for kind, tensor in one.items()
                if kind != "step"
            )
            # Master copies of 16-bit weights; in fp32 the optimizer has the weights themselves.
            if recipe.train.precision == "bf16":
                state += sum(p.nbytes for group in base.param_groups for p in group["params"])
        stage, stages = module.groups.pp.rank(), module.groups.pp.size()
        role = name
        if stages > 1:
            place = "first" if stage == 0 else "last" if stage == stages - 1 else "middle"
            role = f"{name}, {place} stage"
        found.append((role, (sum(p.nbytes for p in params), grads, state)))
    return found


@pytest.mark.parametrize("overrides", ROLES.values(), ids=ROLES)
def test_each_role_holds_what_the_formula_says_to_the_byte(
    tmp_path: Path, run_ranks: RunRanks, overrides: tuple[str, ...]
) -> None:
    recipe = load_recipe(tiny.write_recipe(tmp_path), ["train.optimizer=adam", *overrides])
    layout = build_layout(recipe)
    by_role: dict[str, list[tuple[int, ...]]] = {}
    for own in run_ranks(held_by_roles, layout.world_size, recipe, layout):
        for role, held in own:
            by_role.setdefault(role, []).append(held)
    roles = memory_by_role(recipe, layout)
    assert {one.role for one in roles} == by_role.keys()
    for one in roles:
        measured = by_role[one.role]
        for number, expected in enumerate((one.weights, one.gradients, one.optimizer)):
            # What a distributed optimizer's ranks hold differs, but not what all of them do.
            assert sum(held[number] for held in measured) == expected * len(measured), one.role
        own = layout.grids[one.module]
        assert len(one.ranks) == len(measured)
        assert set(one.ranks) <= set(own.ranks), one.role


def test_roles_of_transformers_models_count_every_parameter_once(tmp_path: Path) -> None:
    config = tiny_config("qwen3_5")
    path = write_any_recipe(config, tmp_path, "fp32", ["image"])
    recipe = load_recipe(path)
    whole = build(config)
    of_language = language_parameters(whole)
    sizes = {name: 4 * weight.numel() for name, weight in whole.named_parameters()}
    assert language_settings(recipe).num_layers > 1
    # Gradients stay whole, because a step has several microbatches.
    gradients = {
        one.module: one.gradients for one in parameters_by_role(recipe, build_layout(recipe))
    }
    assert gradients == {
        "language": sum(size for name, size in sizes.items() if name in of_language),
        "vision": sum(size for name, size in sizes.items() if name not in of_language),
    }


def one_role(path: Path, role: str, *overrides: str) -> RoleMemory:
    model = MODELS["qwen2_5 and qwen_vl"]
    recipe = load_recipe(path, ["train.precision=bf16", *model, *overrides])
    roles = memory_by_role(recipe, build_layout(recipe))
    return next(one for one in roles if one.role == role)


def test_activations_and_logits_follow_the_tokens_of_a_rank(tmp_path: Path) -> None:
    path = tiny.write_recipe(tmp_path)
    tokens, layers, hidden = 128 * 4, 3, 32
    # Queries, keys and values 8·(4 + 2·2), rotated queries and keys 8·(4 + 2), the projection's
    # input 8·4, gate and up 2·48, their product 48; and cosines and sines of 8 channels.
    inside, angles = 64 + 48 + 32 + 96 + 48, 2 * 8
    layer = 4 * hidden + inside + angles
    # The last norm's input, the head's, and the rows of the encoder.
    ends = 3 * hidden
    weight = 128 * hidden
    whole = one_role(path, "language")
    assert whole.activations == 2 * tokens * (layers * layer + ends)
    assert whole.logits == tokens * (128 + hidden) * (2 + 4) + 2 * weight
    cut = one_role(path, "language", "language.grid={tp: 2, sp: true}")
    cut_layer = 2 * hidden + inside / 2 + angles
    assert cut.activations == 2 * tokens * (layers * cut_layer + 2 * hidden)
    assert cut.logits == tokens * (128 / 2 * (2 + 4) + hidden * (2 + 2 + 4)) + weight
    without_sp = one_role(path, "language", "language.grid={tp: 2}")
    cut_layer = 4 * hidden + inside / 2 + angles
    assert without_sp.activations == 2 * tokens * (layers * cut_layer + ends)
    recomputed = one_role(path, "language", "language.recompute=full")
    assert recomputed.activations == 2 * tokens * (layers * hidden + ends)
    # The first of three stages has three microbatches under way, each with a third of the layers.
    first = one_role(path, "language, first stage", "language.grid={pp: 3}")
    assert first.activations == 2 * tokens * 3 * (layer + hidden)
    assert first.logits == 0
    middle = one_role(path, "language, middle stage", "language.grid={pp: 3}")
    assert middle.activations == 2 * tokens * 2 * layer
    last = one_role(path, "language, last stage", "language.grid={pp: 3}")
    assert last.activations == 2 * tokens * (layer + 2 * hidden)
    assert last.logits == whole.logits
    frozen = one_role(path, "language", "language.freeze=true")
    assert frozen.activations == 2 * tokens * (layers * (layer - 2 * hidden - 48) + ends)


def test_ranks_are_refused_once_their_modules_need_more_than_they_share(tmp_path: Path) -> None:
    recipe = load_recipe(
        tiny.write_recipe(tmp_path), [*MODELS["gemma3"], "language.grid={tp: 2, pp: 3}"]
    )
    layout = build_layout(recipe)
    vision, first, middle, last = parameters_by_role(recipe, layout)
    # Rank 0 is the encoder's, ranks 1 to 6 the language model's, two for each stage.
    ends = [(role.ranks.start, role.ranks.stop) for role in (vision, first, middle, last)]
    assert ends == [(0, 1), (1, 3), (3, 5), (5, 7)]
    for ranks, needed in (
        (range(4), vision.total + 2 * first.total + middle.total),
        (range(2, 7), first.total + 2 * (middle.total + last.total)),
    ):
        for is_of_processes, more in ((False, 0), (True, len(ranks) * RANK_BYTES)):
            enough = int(needed + more)
            check_memory(recipe, layout, ranks, Memory("it", enough, is_of_processes))
            with pytest.raises(RecipeError, match=r"language, first stage: .* but it has .* bf16"):
                check_memory(recipe, layout, ranks, Memory("it", enough - 1, is_of_processes))


@pytest.fixture
def small_machine(monkeypatch: pytest.MonkeyPatch) -> Memory:
    memory = Memory("this machine", 2**30, is_of_processes=True)
    for module in (recipe_checks, verify, device):
        monkeypatch.setattr(module, "machine_memory", lambda: memory)
    return memory


HUGE = ["language.model.num_layers=1000", "language.model.hidden_size=131072"]
MANY_RANKS = ["language.grid.dp=2048", "train.global_batch_size=8192"]
MANY_REFUSED = r"language.grid: 2049 ranks .* use fewer"


def test_a_run_or_verification_that_cannot_fit_is_refused_before_its_data_is_read(
    tmp_path: Path, small_machine: Memory
) -> None:
    path = tiny.write_recipe(tmp_path)
    with pytest.raises(RecipeError, match=r"language.model: weights, .* this machine has 1.0 GiB"):
        job.main(path, HUGE)
    with pytest.raises(RecipeError, match=MANY_REFUSED):
        job.main(path, MANY_RANKS)
    assert not (tmp_path / "runs" / "tiny").exists()
    with pytest.raises(RecipeError, match=MANY_REFUSED):
        verify.main(path, MANY_RANKS, 8, True, False, "fp32", None)


def test_a_microbatch_has_at_most_as_many_samples_as_the_data(path: Path) -> None:
    recipe = load_recipe(path, ["train.micro_batch_size=24", "train.global_batch_size=24"])
    with pytest.raises(RecipeError, match=r"train.micro_batch_size: got 24, .* 12 samples"):
        check_data(recipe)


@pytest.mark.parametrize("run_dir", ["a_file", "a_file/below", "x" * 300, "/proc/none"])
def test_a_run_dir_that_cannot_be_made_is_refused(tmp_path: Path, run_dir: str) -> None:
    (tmp_path / "a_file").write_text("")
    tiny.write_samples(tmp_path)
    path = tiny.write_recipe(tmp_path)
    with pytest.raises(InputError, match=r"cannot write there: .*give another train.run_dir"):
        job.main(path, [f"train.run_dir={tmp_path / run_dir}"])
