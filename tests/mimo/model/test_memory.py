"""A model that does not fit is refused before it is built."""

from pathlib import Path

import pytest

from mimo import device
from mimo.device import Memory
from mimo.errors import RecipeError
from mimo.hf.recipes import load_recipe
from mimo.layout.build import build_layout
from mimo.model import recipe_checks
from mimo.model.memory import (
    RANK_BYTES,
    bytes_per_parameter,
    check_memory,
    module_memory,
    parameters,
)
from mimo.model.recipe_checks import check_data
from mimo.train import main as job
from mimo.verify import main as verify
from tests.conftest import RunRanks
from tests.mimo import tiny

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


def built_parameters(rank: int, path: Path, models: dict[str, tuple[str, ...]]):
    from mimo.generate.one_rank import LocalModel

    found = {}
    for name, overrides in models.items():
        recipe = load_recipe(path, overrides)
        local = LocalModel(recipe, 100, freeze=True)
        found[name] = {
            module: sum(p.numel() for p in one.raw[0].parameters())
            for module, one in local.model.modules.items()
        }
    return found


def test_parameters_are_counted_as_they_are_built(tmp_path: Path, run_ranks: RunRanks) -> None:
    path = tiny.write_recipe(tmp_path)
    (built,) = run_ranks(built_parameters, 1, path, MODELS)
    assert len(built) == 3
    for name, overrides in MODELS.items():
        assert parameters(load_recipe(path, overrides)) == built[name]


@pytest.mark.parametrize(
    ("overrides", "learns", "expected"),
    [
        (["train.precision=fp32"], True, 4 + 4 + 8),
        (["train.precision=fp32", "train.optimizer=sgd"], True, 4 + 4),
        (["train.precision=bf16"], True, 2 + 4 + 4 + 8),
        (["train.precision=bf16", "train.distributed_optimizer=true"], True, 2 + 4 + 12 / 4),
        (["train.precision=fp64"], True, 8 + 8 + 16),
        (["train.precision=bf16"], False, 2),
    ],
)
def test_bytes_of_a_parameter_follow_precision_and_optimizer(
    tmp_path: Path, overrides: list[str], learns: bool, expected: float
) -> None:
    recipe = load_recipe(tiny.write_recipe(tmp_path), ["train.optimizer=adam", *overrides])
    assert bytes_per_parameter(recipe.train, learns, replicas=4) == expected


def test_ranks_are_refused_once_their_modules_need_more_than_they_share(tmp_path: Path) -> None:
    recipe = load_recipe(
        tiny.write_recipe(tmp_path),
        ["language.grid={tp: 2, pp: 2, dp: 2}", "train.global_batch_size=16"],
    )
    layout = build_layout(recipe)
    needs = module_memory(recipe, layout)
    language = needs["language"]
    assert language.bytes_per_rank == language.parameters * language.bytes_per_parameter / 4
    # Rank 0 is the encoder's, ranks 1 to 8 the language model's.
    needed = needs["vision"].bytes_per_rank + 3 * language.bytes_per_rank
    for is_of_processes, more in ((False, 0), (True, 4 * RANK_BYTES)):
        enough = int(needed + more) + 1
        check_memory(recipe, layout, range(4), Memory("it", enough, is_of_processes))
        with pytest.raises(RecipeError, match=r"vision.model: .* but it has .* bf16"):
            check_memory(recipe, layout, range(4), Memory("it", enough - 2, is_of_processes))


@pytest.fixture
def small_machine(monkeypatch: pytest.MonkeyPatch) -> Memory:
    memory = Memory("this machine", 2**30, is_of_processes=True)
    for module in (recipe_checks, verify, device):
        monkeypatch.setattr(module, "machine_memory", lambda: memory)
    return memory


HUGE = ["language.model.num_layers=1000", "language.model.hidden_size=131072"]


def test_a_run_that_cannot_fit_is_refused_before_its_data_is_looked_at(
    tmp_path: Path, small_machine: Memory
) -> None:
    path = tiny.write_recipe(tmp_path)
    with pytest.raises(RecipeError, match=r"language.model: weights, .* this machine has 1.0 GiB"):
        job.main(path, HUGE)
    with pytest.raises(RecipeError, match=r"language.grid: 2049 ranks .* use fewer"):
        job.main(path, ["language.grid.dp=2048", "train.global_batch_size=8192"])
    assert not (tmp_path / "runs" / "tiny").exists()


def test_verify_full_refuses_more_ranks_than_this_machine_can_hold(
    tmp_path: Path, small_machine: Memory
) -> None:
    path = tiny.write_recipe(tmp_path)
    overrides = ["language.grid.dp=2048", "train.global_batch_size=8192"]
    with pytest.raises(RecipeError, match=r"language.grid: 2049 ranks .* use fewer"):
        verify.main(path, overrides, None, 8, True, False, "fp32", None)


def test_a_microbatch_has_at_most_as_many_samples_as_the_data(tmp_path: Path) -> None:
    tiny.write_samples(tmp_path)
    recipe = load_recipe(
        tiny.write_recipe(tmp_path), ["train.micro_batch_size=24", "train.global_batch_size=24"]
    )
    with pytest.raises(RecipeError, match=r"train.micro_batch_size: got 24, .* 12 samples"):
        check_data(recipe)


@pytest.mark.parametrize("run_dir", ["a_file", "a_file/below", "x" * 300, "/proc/none"])
def test_a_run_dir_that_cannot_be_made_is_refused(tmp_path: Path, run_dir: str) -> None:
    (tmp_path / "a_file").write_text("")
    path = tiny.write_recipe(tmp_path)
    with pytest.raises(RecipeError, match=r"train.run_dir: no folder can be made in "):
        job.main(path, [f"train.run_dir={tmp_path / run_dir}"])
