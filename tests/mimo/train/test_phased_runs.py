"""Whole jobs with phases, on real ranks: what each phase trains, begins with and leaves."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor

from encoders.qwen_vl import PROJECTOR
from mimo.checkpoint.folder import find_checkpoint
from mimo.checkpoint.hf.recipes import load_phases
from mimo.checkpoint.resume import FromScratch, FromWeights
from mimo.families.keymap import is_adapter
from mimo.families.wire import DTYPES
from mimo.runtime.ranks import run_on_cpu
from mimo.train import main as job
from tests.cases import quick_values
from tests.conftest import RunRanks
from tests.mimo import tiny
from tests.mimo.model.test_fsdp_runs import read, save_at_the_start
from tests.mimo.runs import metrics, run_from

# Three ranks that train the projector, then four with other grids and data.
PHASES = """\
phases:
  - name: projector
    language: {{freeze: true, grid: {{tp: 2, sp: true}}}}
    encoders: {{vision: {{freeze: tower}}}}
    train: {{steps: 2, learning_rate: 0.01}}
  - name: everything
    language: {{grid: {{pp: 2}}, learning_rate: 0.002}}
    encoders: {{vision: {{grid: {{dp: 2}}}}}}
    data: {{sources: [{{path: "{directory}/other-*.tar"}}]}}
    train: {{steps: 3}}
"""
SETTINGS = [
    "train.optimizer=adam",
    "train.learning_rate=0.003",
    "train.clip_grad_norm=1.0",
    "train.save_every=1",
    "train.keep_checkpoints=9",
]
FIRST, SECOND = "phase_1_projector", "phase_2_everything"


def write_recipe(directory: Path) -> Path:
    tiny.write_samples(directory)
    tiny.write_samples(directory, tiny.IMAGES_PER_SAMPLE[::-1], name="other")
    path = tiny.write_recipe(directory)
    path.write_text(PHASES.format(directory=directory) + path.read_text())
    return path


@pytest.fixture(scope="module")
def whole(run_ranks: RunRanks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recipe of a job that has run through, in the folder `runs/whole` beside it."""
    path = write_recipe(tmp_path_factory.mktemp("whole"))
    assert job.main(path, [*SETTINGS, "name=whole"]) == 0
    return path


def weights(checkpoint: Path) -> dict[str, Tensor]:
    return {n: t for n, t in read(checkpoint).items() if n.startswith(("language.", "vision."))}


def checkpoint_of(path: Path, name: str, phase: str, step: int) -> Path:
    return path.parent / "runs" / name / phase / "checkpoints" / f"step_{step}"


def measured(path: Path, name: str, phase: str) -> list[dict[str, float]]:
    """What each step has measured, without times."""
    keys = ("step", "loss", "grad_norm", "lr", "tokens")
    return [{key: line[key] for key in keys} for line in metrics(path, f"{name}/{phase}")]


def assert_same(path: Path, name: str, other: str) -> None:
    """Both jobs measured the same in both phases, and ended with the same tensors."""
    for phase, steps in ((FIRST, 2), (SECOND, 3)):
        assert measured(path, name, phase) == measured(path, other, phase)
        assert [line["step"] for line in measured(path, name, phase)] == list(range(steps))
        tensors, expected = (read(checkpoint_of(path, n, phase, steps)) for n in (name, other))
        assert equal(tensors, expected)


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    assert one.keys() == other.keys()
    return all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.slow
def test_a_phase_of_the_projector_leaves_all_other_weights_as_they_were(
    run_ranks: RunRanks, whole: Path
) -> None:
    recipe = load_phases(whole, [*SETTINGS, "name=before"]).phases[0].recipe
    run_ranks(save_at_the_start, 3, recipe, FromScratch())
    before = weights(checkpoint_of(whole, "before", FIRST, 0))
    after = weights(checkpoint_of(whole, "whole", FIRST, 2))
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    projector = {n for n in before if n.removeprefix("vision.").startswith(PROJECTOR)}
    assert moved == projector
    # Every weight that may learn does so in the next phase.
    last = weights(checkpoint_of(whole, "whole", SECOND, 3))
    assert {name for name in after if not torch.equal(after[name], last[name])} == set(after)


# Precision of the first phase and of the second, and whether the optimizers are distributed.
PRECISIONS = {
    "fp32": ("fp32", "fp32", "false"),
    "bf16": ("bf16", "bf16", "false"),
    "bf16, distributed": ("bf16", "bf16", "true"),
    "fp32 to bf16, distributed": ("fp32", "bf16", "true"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", PRECISIONS.values(), ids=PRECISIONS)
def test_another_layout_begins_with_exactly_the_weights_and_a_fresh_optimizer(
    run_ranks: RunRanks, tmp_path: Path, case: tuple[str, str, str]
) -> None:
    before, after, distributed = case
    settings = [
        *SETTINGS,
        f"phases.0.train.precision={before}",
        f"phases.1.train.precision={after}",
        f"train.distributed_optimizer={distributed}",
    ]
    first, second = (one.recipe for one in load_phases(write_recipe(tmp_path), settings).phases)
    run_from(run_ranks, first, FromScratch())
    written = find_checkpoint(first.run_dir)
    run_ranks(save_at_the_start, 4, second, FromWeights(written))
    at_start = read(second.run_dir / "checkpoints" / "step_0")
    for name, value in weights(written).items():
        expected = value.to(DTYPES[after])
        assert at_start[name].dtype == expected.dtype
        assert torch.equal(at_start[name], expected), name
        for kind in ("exp_avg", "exp_avg_sq"):
            assert not at_start[f"optimizer.{kind}.{name}"].any(), "the optimizer is not fresh"
        if after == "bf16":
            master = at_start[f"optimizer.fp32_param.{name}"]
            assert torch.equal(master, expected.float()), name


def test_adapters_that_are_new_in_a_phase_add_nothing_to_the_weights_before_it(
    run_ranks: RunRanks, whole: Path
) -> None:
    lora = ["phases.1.language.lora={rank: 2}", "phases.1.encoders.vision.lora={rank: 2}"]
    recipe = load_phases(whole, [*SETTINGS, *lora, "name=adapted"]).phases[1].recipe
    written = checkpoint_of(whole, "whole", FIRST, 2)
    run_ranks(save_at_the_start, 4, recipe, FromWeights(written))
    at_start = weights(checkpoint_of(whole, "adapted", SECOND, 0))
    adapters = {name: at_start.pop(name) for name in [*at_start] if is_adapter(name)}
    assert equal(at_start, weights(written))
    assert {name.split(".")[0] for name in adapters} == {"language", "vision"}
    assert all(bool(value.any()) == name.endswith("lora_a") for name, value in adapters.items())


INTERRUPTED = {
    "inside the first": (FIRST, 1),
    "between the phases": (FIRST, 2),
    "inside the second": (SECOND, 2),
}


@pytest.mark.parametrize("last", quick_values(INTERRUPTED, "inside the second"))
def test_an_interrupted_job_continues_exactly(
    whole: Path, last: tuple[str, int], capsys: pytest.CaptureFixture[str]
) -> None:
    phase, step = last
    name = f"{phase}_{step}"
    run = interrupted(whole, name, phase, step)
    before = (run / FIRST / "metrics.jsonl").stat().st_mtime_ns
    assert job.main(whole, [*SETTINGS, f"name={name}"], resume=True) == 0
    printed = capsys.readouterr().out
    assert ("phase 1 of 2" in printed) == (last == (FIRST, 1))
    assert ((run / FIRST / "metrics.jsonl").stat().st_mtime_ns == before) == (last != (FIRST, 1))
    assert_same(whole, name, "whole")


def interrupted(whole: Path, name: str, phase: str, step: int) -> Path:
    """The run folder of a job that was ended after a checkpoint."""
    run = whole.parent / "runs" / name
    shutil.copytree(whole.parent / "runs" / "whole", run)
    if phase == FIRST:
        shutil.rmtree(run / SECOND)
    checkpoints = run / phase / "checkpoints"
    for later in checkpoints.glob("step_*"):
        if int(later.name.removeprefix("step_")) > step:
            shutil.rmtree(later)
    (checkpoints / "latest").write_text(f"step_{step}")
    return run


@pytest.mark.slow
def test_ranks_of_torchrun_or_srun_run_all_phases_in_their_one_world(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    path = write_recipe(tmp_path)
    settings = [*SETTINGS, "phases.1.encoders.vision.grid.dp=1"]
    run_on_cpu(train_as_rank, (path, [*settings, "name=in_place"]), 3, timeout_seconds=120)
    assert job.main(path, [*settings, "name=launched"]) == 0
    assert_same(path, "in_place", "launched")


def train_as_rank(path: Path, overrides: list[str]) -> None:
    """What a rank that torchrun or srun has started does."""
    assert job.main(path, overrides) == 0
    assert not torch.distributed.is_initialized()
