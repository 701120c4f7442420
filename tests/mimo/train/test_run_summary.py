"""What a start says of the run: the model's sizes, its data, and how long it goes on."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from mimo.checkpoint.folder import Progress
from mimo.checkpoint.hf.initial import initial_weights
from mimo.checkpoint.hf.recipes import load_recipe
from mimo.model.dataset import item_processors, open_dataset, open_tokenizer
from mimo.model.recipe_checks import check_recipe
from mimo.runtime.run_files import starts_of
from mimo.train.run_summary import num_parameters, precision_warnings, summary_of
from tests.conftest import RunRanks
from tests.mimo import tiny
from tests.mimo.model.test_fsdp_runs import make
from tests.mimo.runs import LAYOUT, run, shards

ADAPTERS = ["language.lora={rank: 2, targets: [qkv, fc2]}", "encoders.vision.freeze=tower"]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("summary")
    tiny.write_samples(directory)
    tiny.write_samples(directory, (1, 0), name="more")
    return tiny.write_recipe(directory)


def facts(path: Path, *overrides: str, progress: Progress | None = None) -> dict[str, str]:
    """The summary of a recipe whose run is at ``progress``; None for its beginning."""
    recipe = load_recipe(path, overrides)
    chat, processors = open_tokenizer(recipe), item_processors(recipe)
    splits = {
        split: open_dataset(recipe, split, chat, processors) for split in ("sources", "validation")
    }
    start = progress or Progress(step=0, samples=0)
    return summary_of(recipe, check_recipe(recipe, None), chat.vocab_size, start, splits)


def held(rank: int, path: Path, overrides: list[str]) -> dict[str, tuple[int, int]]:
    """Elements of each module on a rank that has all of it, and of those that train."""
    from mimo.parallel.groups import build_topology
    from mimo.train.loop import Trainer

    recipe = load_recipe(path, overrides)
    topology = build_topology(check_recipe(recipe, None))
    modules: Any = Trainer(recipe, topology, recipe.run_dir).model.modules
    counts = {}
    for name, module in modules.items():
        params = [param for chunk in module.raw for param in chunk.parameters()]
        trained = sum(param.numel() for param in params if param.requires_grad)
        counts[name] = sum(param.numel() for param in params), trained
    topology.close()
    return counts


@pytest.mark.parametrize("overrides", [[], ADAPTERS], ids=["all", "adapters and projector"])
def test_parameters_are_counted_as_modules_hold_them(
    run_ranks: RunRanks, recipe: Path, overrides: list[str]
) -> None:
    colocated = [*overrides, "encoders.vision.placement=colocated"]
    (counts,) = run_ranks(held, 1, recipe, colocated)
    read = load_recipe(recipe, colocated)
    size, hidden = open_tokenizer(read).vocab_size, read.language.model["hidden_size"]
    padding = (-size % 64) * hidden
    assert num_parameters(read, "vision", size) == counts["vision"]
    total, trained = num_parameters(read, "language", size)
    assert (total + padding, trained + padding * (not overrides)) == counts["language"]
    assert 0 < trained <= total
    assert (trained < total) == bool(overrides)


@pytest.mark.slow
def test_each_expert_counts_with_adapters_of_its_own(run_ranks: RunRanks, tmp_path: Path) -> None:
    path = make(tmp_path, "qwen3_vl_moe")
    settings = [ADAPTERS[0], "language.grid.dp=1", "encoders.vision.grid.dp=1"]
    (counts,) = run_ranks(held, 1, path, settings)
    read = load_recipe(path, settings)
    size = open_tokenizer(read).vocab_size
    assert num_parameters(read, "language", size)[1] == counts["language"][1] > 0


def test_a_summary_has_sizes_layout_data_tokens_epochs_and_precision(recipe: Path) -> None:
    more = shards(recipe, "more", split="validation")
    summary = facts(recipe, *LAYOUT, more, "train.steps=7")
    assert [*summary] == [
        *("model vision", "model language", "layout", "data.sources.0", "data.validation.0"),
        *("step", "run", "precision"),
    ]
    assert re.fullmatch(
        r"qwen3, [\d,]+ parameters, 100 % trained \([\d,]+\)", summary["model language"]
    )
    assert summary["layout"].startswith("3 ranks; vision: tp 1 · cp 1 · pp 1 · dp 1 = 1 rank; lang")
    size = (recipe.parent / "train-00000.tar").stat().st_size
    path = recipe.parent / "train-*.tar"
    data = f"{path}: 12 samples in 1 shard of {size:,} bytes, written as "
    assert summary["data.sources.0"].startswith(data)
    assert summary["data.validation.0"].startswith(f"{recipe.parent}/more-*.tar: 2 samples")
    assert re.fullmatch(r"12 samples, about \d{3} tokens", summary["step"])
    assert summary["run"] == "7 steps, about 7 epochs"
    assert summary["precision"] == "fp32"


def test_epochs_are_of_each_source_and_of_the_whole_run_also_where_it_is_resumed(
    recipe: Path,
) -> None:
    both = [shards(recipe, "train", "more"), "data.shuffle_block=1", "train.steps=2"]
    assert facts(recipe, *both)["run"] == "2 steps, about 1 to 6 epochs"
    half = Progress(step=1, samples=12)
    resumed = facts(recipe, *both, progress=half)
    assert resumed["run"] == "2 steps, about 1 to 6 epochs"
    packed = ["data.tokens_per_microbatch=256", "train.micro_batch_size=1"]
    summary = facts(recipe, *packed, "train.steps=7")
    assert summary["step"] == "12 packed sequences of up to 256 tokens"
    (epochs,) = re.findall(r"about ([\d.]+) epochs", summary["run"])
    assert float(epochs) > 7 * 256 / 128


def test_shards_that_were_written_anew_have_another_digest(tmp_path: Path) -> None:
    tiny.write_samples(tmp_path)
    path = tiny.write_recipe(tmp_path)
    shard = tmp_path / "train-00000.tar"
    before = facts(path)["data.sources.0"]
    assert facts(path)["data.sources.0"] == before
    shard.write_bytes(shard.read_bytes())
    after = facts(path)["data.sources.0"]
    assert after != before
    assert after.partition("written")[0] == before.partition("written")[0]


def test_fp32_by_default_is_warned_of_where_the_checkpoint_is_in_bf16(
    tmp_path: Path,
) -> None:
    path = make(tmp_path, "qwen3_vl")
    file = tmp_path / "base" / "model.safetensors"
    weights = load_file(file)

    def warnings(*overrides: str) -> list[str]:
        recipe = load_recipe(path, overrides)
        return [*precision_warnings(recipe, initial_weights(recipe))]

    assert warnings() == []
    save_file({name: one.bfloat16() for name, one in weights.items()}, file, {"format": "pt"})
    (line,) = warnings()
    assert line.startswith("warning: train.precision is fp32 by default")
    assert "set train.precision: bf16" in line
    assert warnings("train.precision=fp32") == warnings("train.precision=bf16") == []


def test_a_start_keeps_its_summary_and_logs_a_line_of_each_fact(
    run_ranks: RunRanks, recipe: Path
) -> None:
    run(run_ranks, recipe, *LAYOUT, "train.steps=1")
    folder = recipe.parent / "runs" / "tiny"
    (start,) = starts_of(folder)
    logs = [path.read_text() for path in folder.glob("log_rank_*.txt")]
    for name, text in facts(recipe, *LAYOUT, "train.steps=1").items():
        assert start["summary"][name] == text
        assert sum(f": summary {name}: {text}\n" in log for log in logs) == 1
