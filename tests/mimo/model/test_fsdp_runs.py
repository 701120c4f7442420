"""Whole runs with `engine: fsdp`, next to runs of the same recipe by Megatron."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from mimo.check.workload import Sample, write_shard
from mimo.checkpoint import reading
from mimo.checkpoint.folder import find_checkpoint
from mimo.checkpoint.hf.adapter import convert_adapter
from mimo.checkpoint.hf.export import convert_to_hf
from mimo.checkpoint.hf.recipes import load_recipe
from mimo.checkpoint.hf.tiny import TinyCheckpoint, write_tiny
from mimo.checkpoint.resume import FromScratch, FromWeights, Resume, Start
from mimo.config.schema import Recipe
from mimo.families.keymap import is_adapter
from mimo.train import main as job
from mimo.train.run_folder import make_run_dir
from tests.cases import quick
from tests.conftest import RunRanks
from tests.mimo import tiny
from tests.mimo.checkpoint.hf import folders
from tests.mimo.runs import run_from, save

RECIPE = """
name: run
init_from: {directory}/base
language: {{grid: {{tp: 1, dp: 2}}}}
encoders: {{vision: {{placement: colocated, grid: {{dp: 2}}}}}}
data:
  sources: [{{path: "{directory}/train-*.tar"}}]
  validation: [{{path: "{directory}/train-*.tar"}}]
  sequence_length: 256
  workers: 0
train:
  steps: 4
  global_batch_size: 4
  micro_batch_size: 1
  optimizer: adam
  adam_eps: 1.0e-4
  learning_rate: 0.003
  warmup_steps: 0
  save_every: 2
  keep_checkpoints: 9
  validate_every: 2
  run_dir: {directory}/runs
  threads_per_rank: 1
"""
FSDP = ["language.engine=fsdp", "encoders.vision.engine=fsdp"]
TP = ["language.grid={tp: 2, sp: true, dp: 1}"]
EXACT = 2e-5


def make(directory: Path, family: str) -> Path:
    """A recipe, its data, and the folder that it starts from."""
    write_tiny(TinyCheckpoint(family), directory / "base")
    tiny.write_samples(directory)
    path = directory / "recipe.yaml"
    path.write_text(RECIPE.format(directory=directory))
    return path


def trained(
    run_ranks: RunRanks, path: Path, name: str, *overrides: str, start: Start | None = None
) -> Path:
    """The folder of a run to its end."""
    recipe = load_recipe(path, [*overrides, f"name={name}"])
    run_from(run_ranks, recipe, start or FromScratch())
    return recipe.run_dir


def measured(run: Path) -> list[tuple[float, ...]]:
    """Step, loss and norm, or validation loss, of every line."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    keys = ("step", "loss", "grad_norm", "validation_loss")
    return [tuple(line[key] for key in keys if key in line) for line in lines]


def read(checkpoint: Path) -> dict[str, Tensor]:
    return reading.read(checkpoint)


def assert_alike(got: Path, expected: Path, resumed: bool = False) -> None:
    """Metrics of runs, and all that their last checkpoints hold. resumed: after step 2."""
    wanted = measured(expected)[3 if resumed else 0 :]
    for mine, line in zip(measured(got), wanted, strict=True):
        assert mine == pytest.approx(line, rel=EXACT)
    ours, theirs = read(find_checkpoint(got)), read(find_checkpoint(expected))
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        scale = max(float(tensor.abs().max()), 1e-5)
        assert float((ours[name] - tensor).abs().max()) / scale < 1e-3, name


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("qwen3_vl"), "qwen3_vl")


@pytest.fixture(scope="module")
def by_fsdp(run_ranks: RunRanks, recipe: Path) -> Path:
    return trained(run_ranks, recipe, "fsdp", *FSDP, *TP)


@pytest.fixture(scope="module")
def by_megatron(run_ranks: RunRanks, recipe: Path) -> Path:
    return trained(run_ranks, recipe, "megatron")


@pytest.mark.slow
def test_a_run_gives_what_megatron_gives_and_continues_on_any_mesh_of_either_engine(
    run_ranks: RunRanks, recipe: Path, by_fsdp: Path, by_megatron: Path
) -> None:
    assert_alike(by_fsdp, by_megatron)
    half = Resume(by_fsdp / "checkpoints" / "step_2")
    assert_alike(trained(run_ranks, recipe, "fsdp_dp2", *FSDP, start=half), by_fsdp, True)
    assert_alike(trained(run_ranks, recipe, "to_megatron", start=half), by_fsdp, True)
    half = Resume(by_megatron / "checkpoints" / "step_2")
    assert_alike(trained(run_ranks, recipe, "to_fsdp", *FSDP, *TP, start=half), by_fsdp, True)


def save_at_the_start(rank: int, recipe: Recipe, start: Start) -> None:
    """Write the checkpoint of a run before its first step."""
    from mimo.checkpoint.load import load_start, read_start_index
    from mimo.parallel.build import build_layout
    from mimo.parallel.groups import build_topology
    from mimo.train.loop import Trainer

    trainer = Trainer(recipe, build_topology(build_layout(recipe)), recipe.run_dir)
    trainer.progress = load_start(trainer.model.modules, start, read_start_index(start))
    save(trainer.saver, trainer.progress)


def start_with_weights(run_ranks: RunRanks, recipe: Recipe, run: Path) -> dict[str, Tensor]:
    """Start from the weights of a run; assert that a checkpoint before the first step has them."""
    written = find_checkpoint(run)
    run_ranks(save_at_the_start, 2, recipe, FromWeights(written))
    at_start, before = read(recipe.run_dir / "checkpoints" / "step_0"), read(written)
    assert at_start.keys() == before.keys()
    for name, tensor in at_start.items():
        assert name.startswith("optimizer.") or torch.equal(tensor, before[name]), name
    return at_start


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["megatron", "fsdp"])
def test_another_engine_begins_with_exactly_the_weights_and_a_fresh_optimizer(
    run_ranks: RunRanks, recipe: Path, by_fsdp: Path, by_megatron: Path, engine: str
) -> None:
    to_fsdp = engine == "fsdp"
    overrides = [*FSDP, *TP, "train.precision=bf16"] if to_fsdp else [*TP]
    started = load_recipe(recipe, [*overrides, f"name=start_{engine}"])
    at_start = start_with_weights(run_ranks, started, by_megatron if to_fsdp else by_fsdp)
    assert not any(t.any() for name, t in at_start.items() if name.startswith("optimizer."))


@pytest.mark.slow
def test_a_run_whose_folder_is_gone_answers_and_is_exported_as_megatrons(
    run_ranks: RunRanks, recipe: Path, by_fsdp: Path, by_megatron: Path
) -> None:
    base = recipe.parent / "base"
    base.rename(recipe.parent / "gone")
    try:
        ours, theirs = run_ranks(answers, 1, [by_fsdp, by_megatron])[0]
        convert_to_hf(by_fsdp, recipe.parent / "exported", 10**9)
    finally:
        (recipe.parent / "gone").rename(base)
    assert ours == theirs
    convert_to_hf(by_megatron, recipe.parent / "expected", 10**9)
    found, expected = (folders.tensors(recipe.parent / name) for name in ("exported", "expected"))
    assert found.keys() == expected.keys() == folders.tensors(base).keys()
    for key, tensor in expected.items():
        assert found[key].dtype == tensor.dtype
        assert float((found[key] - tensor).abs().max()) < 1e-5, key


def answers(rank: int, runs: list[Path]) -> list[tuple[list[str], str]]:
    """Return each run's answers with and without pictures, and what `mimo evaluate` prints."""
    from PIL import Image

    from mimo.generate.answer import Generator, Request
    from mimo.generate.evaluate import main

    picture = Image.linear_gradient("L").resize((56, 28)).convert("RGB")
    text = {"type": "text", "text": "what is this ?"}
    requests = [
        Request([{"role": "user", "content": [{"type": "image"}, text]}], [picture]),
        Request([{"role": "user", "content": [text]}], []),
    ]
    found = []
    for run in runs:
        given = Generator(run).answer(requests, 8)
        with redirect_stdout(io.StringIO()) as printed:
            assert main(run, "validation") == 0
        found.append((given, printed.getvalue().splitlines()[-1]))
    return found


LORA = [
    "language.lora={rank: 6, alpha: 12}",
    "encoders.vision.lora={rank: 2, alpha: 5}",
    "train.save_every=4",
]


@pytest.mark.slow
@pytest.mark.parametrize("family", quick(["qwen3_vl", "gemma3"], "qwen3_vl"))
def test_adapters_learn_as_megatrons_do_and_go_from_one_engine_to_the_other(
    run_ranks: RunRanks, tmp_path: Path, family: str
) -> None:
    path = make(tmp_path, family)
    theirs = trained(run_ranks, path, "megatron", *LORA)
    ours = trained(run_ranks, path, "fsdp", *LORA, *FSDP, *TP)
    assert_alike(ours, theirs)
    learnt = [name for name in read(find_checkpoint(ours)) if name.startswith("optimizer.exp_avg.")]
    assert any(is_adapter(name) for name in learnt)
    given = run_ranks(answers, 1, [ours, theirs])[0]
    assert given[0] == given[1]
    exported = []
    for run in (ours, theirs):
        convert_adapter(run, folder := tmp_path / f"{run.name}_adapter")
        assert (folder / "adapter_config.json").is_file()
        exported.append(folders.tensors(folder))
    assert exported[0].keys() == exported[1].keys()
    for key, tensor in exported[1].items():
        torch.testing.assert_close(exported[0][key], tensor, rtol=1e-3, atol=1e-5)
    for engine, written in ((FSDP, theirs), ([], ours)):
        started = load_recipe(path, [*LORA, *engine, f"name=start_{len(engine)}"])
        start_with_weights(run_ranks, started, written)


@pytest.mark.slow
def test_an_adapter_without_its_sum_over_tp_is_noticed(run_ranks: RunRanks, recipe: Path) -> None:
    settings = [*LORA, *FSDP, *TP, "train.steps=1", "train.validate_every=null"]
    summed = measured(trained(run_ranks, recipe, "summed", *settings))
    own = load_recipe(recipe, [*settings, "name=unsummed"])
    run_dir = make_run_dir(own, resumes=False)
    run_ranks(train_without_sums, 2, own, run_dir)
    found = measured(run_dir)
    assert found[0][1] == pytest.approx(summed[0][1], rel=EXACT)
    assert found[0][2] != pytest.approx(summed[0][2], rel=0.01)


def train_without_sums(rank: int, recipe: Recipe, run_dir: Path) -> None:
    from mimo.engines.fsdp import plans
    from mimo.parallel.build import build_layout
    from mimo.train.rank import train_in_world

    def unsummed(tensor: Any) -> Any:
        """As if the gradient of a parameter that each rank has whole were whole too."""
        if isinstance(tensor, DTensor) and isinstance(tensor, nn.Parameter):
            return DTensor.to_local(tensor)
        return real(tensor)

    real, plans.local_share = plans.local_share, unsummed
    try:
        train_in_world(recipe, build_layout(recipe), run_dir, FromScratch())
    finally:
        plans.local_share = real


@pytest.mark.slow
def test_parts_that_are_frozen_and_rows_that_arrive_whole_give_what_megatron_gives(
    run_ranks: RunRanks, recipe: Path
) -> None:
    frozen = ["encoders.vision.freeze=tower", "train.steps=2", "train.validate_every=null"]
    whole = ["bridge.delivery=replicated", "train.micro_batch_size=2"]
    theirs = trained(run_ranks, recipe, "frozen_megatron", *frozen)
    assert_alike(trained(run_ranks, recipe, "frozen", *frozen, *whole, *FSDP, *TP), theirs)
    # Its projector, towards a language model of the other engine on another rank.
    apart = [*frozen, "encoders.vision={placement: disjoint, engine: fsdp, grid: {dp: 1}}"]
    apart += ["language={freeze: true, grid: {dp: 1}}", "train.precision=bf16"]
    run = trained(run_ranks, recipe, "apart", *apart)
    found = [name for name in read(find_checkpoint(run)) if name.startswith("optimizer.exp_avg.")]
    assert found
    assert all(name.startswith("optimizer.exp_avg.vision.") for name in found)
    assert all(line[1] == pytest.approx(measured(theirs)[0][1], rel=0.2) for line in measured(run))


@pytest.mark.slow
def test_a_language_model_without_an_architecture_of_ours_trains_and_is_exported(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    write_tiny(TinyCheckpoint("llama"), tmp_path / "base")
    samples = [Sample((), f"what comes after {n} ?", str(n + 1)) for n in range(9)]
    write_shard(tmp_path / "train-00000.tar", samples)
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE.format(directory=tmp_path))
    text = ["encoders={}", "language.engine=fsdp", f"data.test=[{{path: {tmp_path}/train-*.tar}}]"]
    whole = trained(run_ranks, path, "dp2", *text, "train.micro_batch_size=2")
    assert_alike(trained(run_ranks, path, "tp2", *text, *TP, "train.micro_batch_size=4"), whole)
    convert_to_hf(whole, tmp_path / "exported", 10**6)
    before, after = folders.tensors(tmp_path / "base"), folders.tensors(tmp_path / "exported")
    assert before.keys() == after.keys()
    assert not any(torch.equal(before[key], after[key]) for key in before)
    assert run_ranks(score_of, 1, whole) == [score_by_transformers(tmp_path / "exported", samples)]


def score_of(rank: int, run: Path) -> list[str]:
    """Answers to all of the test split."""
    from mimo.generate.evaluate import answer_split

    return [one.answer for one in answer_split(run, "test", 4)]


def score_by_transformers(folder: Path, samples: list[Sample]) -> list[str]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    found = []
    for one in samples:
        asked = [{"role": "user", "content": one.question}]
        text = tokenizer.apply_chat_template(asked, add_generation_prompt=True, tokenize=False)
        ids = tokenizer(text, return_tensors="pt").input_ids
        given = model.generate(ids, max_new_tokens=4, do_sample=False)[0, ids.shape[1] :]
        found.append(tokenizer.decode(given, skip_special_tokens=True))
    return found


PHASES = """
phases:
  - {{name: first}}
  - {{name: second, language: {{engine: {other}}}, encoders: {{vision: {{engine: {other}}}}}}}
  - {{name: third}}
"""


@pytest.mark.slow
def test_phases_may_run_on_several_engines(
    run_ranks: RunRanks, recipe: Path, tmp_path: Path
) -> None:
    found = []
    for other in ("megatron", "fsdp"):
        path = tmp_path / f"{other}.yaml"
        path.write_text(recipe.read_text() + PHASES.format(other=other))
        assert job.main(path, [f"name={other}", f"train.run_dir={tmp_path}/runs"]) == 0
        found.append(tmp_path / "runs" / other)
    for phase in ("phase_1_first", "phase_2_second", "phase_3_third"):
        assert_alike(found[1] / phase, found[0] / phase)
