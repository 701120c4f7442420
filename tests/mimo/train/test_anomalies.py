"""Skipped steps, spikes of the loss and unreadable samples: what they change, record and limit."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from itertools import count, islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch._C._distributed_c10d import HashStore

from data.index.samples import SkippedSample
from mimo.checkpoint.folder import Progress, find_checkpoint, read_progress
from mimo.checkpoint.hf.recipes import load_recipe
from mimo.checkpoint.resume import FromScratch, Resume, Start
from mimo.config.schema import Recipe
from mimo.config.training import Data
from mimo.model.dataset import Dataset, open_dataset
from mimo.model.recipe_checks import check_recipe
from mimo.parallel.build import build_layout
from mimo.runtime.run_files import BAD_SAMPLES, incidents
from mimo.train import anomalies
from mimo.train.anomalies import BadSamples, LossSpikes, check_skipped, publish_bad_sample
from mimo.train.run_folder import make_run_dir
from mimo.train.step import StepObserver
from tests.cases import quick_values
from tests.conftest import RunRanks
from tests.mimo.model.test_fsdp_runs import FSDP, make, read
from tests.mimo.runs import ADAM, LAYOUT, metrics

# ------------------------------------------------------------------------------ spikes


def test_a_spike_is_found_among_noise_and_hides_no_other() -> None:
    rng = np.random.default_rng(0)
    spikes, steps = LossSpikes(64), []
    for step in range(400):
        loss = 2.0 - 0.002 * step + 0.02 * rng.standard_normal()
        if step in (200, 202, 300):
            loss += 0.5
        steps += [step] if spikes.score(loss) > 8 else []
    assert steps == [200, 202, 300]


def test_a_score_is_the_distance_from_the_median_in_robust_deviations() -> None:
    spikes = LossSpikes(8, [1.0, 2.0, 3.0, 4.0, 5.0])
    assert spikes.score(10.0) == pytest.approx(0.6745 * (10 - 3) / 1)
    # It has joined the others: 1 2 3 4 5 10.
    assert spikes.score(3.5) == pytest.approx(0.0)


def test_a_loss_is_compared_with_all_losses_of_the_window_and_no_older_ones() -> None:
    spikes = LossSpikes(8, map(float, range(20)))
    # Of 12 to 19 the median is 15.5, and the median distance from it 2.
    assert spikes.score(20.0) == pytest.approx(0.6745 * 4.5 / 2)


def test_too_few_losses_and_equal_ones_have_no_spikes() -> None:
    few = LossSpikes(8)
    assert [few.score(loss) for loss in (1.0, 1.0, 1.0, 99.0)] == [0.0] * 4
    equal = LossSpikes(8, [2.0] * 8)
    assert equal.score(2.001) < 1
    assert equal.score(2.1) > 8


# ------------------------------------------------- a step that is skipped, in either engine

CASES = {
    "megatron": [],
    "megatron, state shared out, bf16": [
        "train.distributed_optimizer=true",
        "train.precision=bf16",
        "train.overlap_grad_reduce=true",
        "train.overlap_param_gather=true",
    ],
    "fsdp": FSDP,
    "fsdp, bf16": [*FSDP, "train.precision=bf16"],
}


class Poison(StepObserver):
    """Makes the gradients of one module infinite on one rank, in one step."""

    def __init__(self, rank: int, step: int, module: str) -> None:
        self.rank, self.step, self.module = rank, step, module

    def gradients_complete(self, step: int, modules: Any) -> None:
        if step == self.step and self.module in modules:
            pieces = list(modules[self.module].gradients())  # every rank: it may gather them
            for piece in pieces if self.rank == 0 else ():
                piece.values.fill_(torch.inf)


def around_a_skipped_step(rank: int, path: Path, overrides: list[str]) -> dict[str, Any]:
    """Steps 0, 1 and 2, the second not finite; and steps 0 and 2 alone: lines and states of all."""
    from mimo.checkpoint.hf.initial import initial_weights
    from mimo.parallel.groups import build_topology
    from mimo.train.loop import Trainer

    recipe = load_recipe(path, overrides)
    topology = build_topology(build_layout(recipe))
    recipe.run_dir.mkdir(parents=True, exist_ok=True)
    poisoned, other = (
        Trainer(recipe, topology, recipe.run_dir, initial_weights(recipe)) for _ in range(2)
    )
    dataset = open_dataset(recipe, "sources", poisoned.chat, poisoned.processors)
    assert dataset is not None

    def state(trainer: Trainer) -> dict[str, torch.Tensor]:
        tensors = {}
        modules: Any = trainer.model.modules.values()
        for module in modules:
            module.wait_param_gather()
            for piece in module.pieces("save", with_optimizer=True):
                tensors[f"{piece.key}[{piece.row},{piece.column}]"] = piece.values.clone()
            optimizer: Any = getattr(module, "_optimizer", None) or module.optimizers[0].optimizer
            for number, entry in enumerate(optimizer.state.values()):
                tensors[f"{module.name} updates {number}"] = entry["step"].clone()
        return tensors

    def train(trainer: Trainer, num_steps: int, bad_step: int) -> None:
        poison = Poison(rank, bad_step, "language")
        with closing(trainer.train(dataset, None, poison)) as steps:
            for line in islice(steps, num_steps):
                lines.append(line)
                states.append(state(trainer))

    lines: list[dict[str, Any]] = []
    states: list[dict[str, torch.Tensor]] = []
    train(poisoned, 3, bad_step=1)
    train(other, 1, bad_step=-1)
    other.progress = Progress(2, 2 * recipe.train.global_batch_size)
    train(other, 1, bad_step=-1)
    return {"lines": lines, "states": states, "progress": poisoned.progress}


@pytest.fixture(scope="module")
def from_a_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("skipped"), "qwen3_vl")


@pytest.mark.parametrize("case", quick_values(CASES, "megatron"))
def test_a_step_without_numbers_leaves_all_modules_as_if_it_had_not_been(
    run_ranks: RunRanks, from_a_checkpoint: Path, case: list[str]
) -> None:
    overrides = [*case, "train.ema_decay=0.75", "train.validate_every=null"]
    for rank in run_ranks(around_a_skipped_step, 2, from_a_checkpoint, overrides):
        before, skipped, after, _, without = rank["states"]
        assert any(key.startswith("ema.") for key in before)
        assert before.keys() == skipped.keys()
        for key, tensor in before.items():
            assert torch.equal(skipped[key], tensor), key
        for key, tensor in without.items():
            assert torch.equal(after[key], tensor), key
        first, second, third, _, alone = rank["lines"]
        assert [line["skipped_steps"] for line in (first, second, third)] == [0, 1, 1]
        assert np.isinf(second["grad_norm"])
        assert np.isfinite(second["grad_norm_vision"])
        assert second["lr"] < first["lr"], "the schedule goes on"
        for key in ("loss", "grad_norm", "lr"):
            assert third[key] == alone[key]
        assert rank["progress"].step - rank["progress"].skipped_steps == 2


# ------------------------------------------------------------------- in whole runs


def steps_from(start: Start) -> Iterator[int]:
    return count(read_progress(start.checkpoint).step if isinstance(start, Resume) else 0)


def train_poisoned(rank: int, path: Path, overrides: list[str], bad: set[int], start: Start) -> str:
    """A run in some of whose steps the encoder's gradients are no numbers; its error."""
    from mimo.engines.megatron.module import MegatronModule
    from mimo.train.rank import train_in_world

    recipe, steps = load_recipe(path, overrides), steps_from(start)
    finish = MegatronModule.finish_gradients

    def poison(self: Any, num_loss_tokens: int) -> None:
        finish(self, num_loss_tokens)
        if self.name == "vision" and next(steps) in bad:
            for piece in self.gradients():
                piece.values.fill_(torch.nan)

    MegatronModule.finish_gradients = poison
    try:
        train_in_world(recipe, check_recipe(recipe, None), recipe.run_dir, start)
    except FloatingPointError as error:
        return str(error)
    return ""


def run_poisoned(
    run_ranks: RunRanks, path: Path, overrides: list[str], bad: set[int], start: Start | None = None
) -> list[str]:
    recipe = load_recipe(path, overrides)
    make_run_dir(recipe, resumes=start is not None)
    size = check_recipe(recipe, None).world_size
    return run_ranks(train_poisoned, size, path, overrides, bad, start or FromScratch())


def check_kept_batches(run: Path, recorded: list[dict[str, Any]]) -> None:
    for incident in recorded:
        samples = json.loads((run / incident["batch"]).read_text())["samples"]
        assert [sample["key"] for sample in samples] == incident["samples"]
        assert len(samples) == incident["num_samples"] == 12
        assert {sample["lane"] for sample in samples} == {0, 1}


def test_skipped_steps_are_counted_told_and_kept_and_end_the_run_when_too_many_follow(
    run_ranks: RunRanks, recipe: Path
) -> None:
    settings = [*LAYOUT, *ADAM, "train.steps=8", "train.max_skipped_steps=1"]
    bad = {1, 3, 5, 6}
    errors = run_poisoned(run_ranks, recipe, settings, bad)
    assert all("none of 2 steps since step 5 was finite" in error for error in errors)
    assert all("train.max_skipped_steps 1" in error for error in errors)
    lines = metrics(recipe)
    assert [line["skipped_steps"] for line in lines] == [0, 1, 1, 2, 2, 3]
    assert [line["grad_norm"] is None for line in lines] == [n in bad for n in range(6)]
    assert all(line["grad_norm_language"] > 0 for line in lines), "the one that is sound"
    run = recipe.parent / "runs" / "tiny"
    recorded = incidents(run)
    *skipped, last, crash = [(incident["kind"], incident["step"]) for incident in recorded]
    assert skipped == [("skipped step", n) for n in sorted(bad)]
    assert (last, crash) == (("not finite", 6), ("crash", 6))
    check_kept_batches(run, recorded[:-2])


@pytest.mark.slow
def test_a_run_with_skipped_steps_goes_on_from_a_checkpoint_to_the_last_bit(
    run_ranks: RunRanks, recipe: Path
) -> None:
    settings = [*LAYOUT, *ADAM, "train.steps=5", "train.save_every=3", "train.ema_decay=0.5"]
    assert run_poisoned(run_ranks, recipe, settings, {1}) == [""] * 3
    before = metrics(recipe)
    checkpoint = recipe.parent / "runs" / "tiny" / "checkpoints" / "step_3"
    assert read_progress(checkpoint).skipped_steps == 1, "Adam counts two steps of three"
    last = recipe.parent / "runs" / "tiny"
    expected = read(find_checkpoint(last))
    assert run_poisoned(run_ranks, recipe, settings, set(), Resume(checkpoint)) == [""] * 3
    for line, then in zip(metrics(recipe), before, strict=True):
        for key in ("loss", "grad_norm", "lr", "skipped_steps"):
            assert line[key] == then[key], (line["step"], key)
    got = read(find_checkpoint(last))
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(got[name], tensor), name


def train_spiking(rank: int, recipe: Recipe) -> None:
    """A run whose loss is fifty times as high in step 5."""
    from mimo.train import loop
    from mimo.train.rank import train_in_world

    train_step, steps = loop.train_step, count()

    def spiking(**arguments: Any) -> Any:
        done = train_step(**arguments)
        return replace(done, mean_loss=done.mean_loss * 50) if next(steps) == 5 else done

    loop.train_step = spiking
    train_in_world(recipe, check_recipe(recipe, None), recipe.run_dir, FromScratch())


@pytest.mark.slow
def test_a_spike_of_the_loss_is_told_and_its_batch_kept(run_ranks: RunRanks, recipe: Path) -> None:
    settings = [*LAYOUT, *ADAM, "train.loss_spike_zscore=20", "train.loss_spike_window=8"]
    loaded = load_recipe(recipe, [*settings, "train.learning_rate=1e-5", "train.steps=6"])
    make_run_dir(loaded, resumes=False)
    run_ranks(train_spiking, 3, loaded)
    (incident,) = incidents(loaded.run_dir)
    assert (incident["kind"], incident["step"]) == ("loss spike", 5)
    check_kept_batches(loaded.run_dir, [incident])


@pytest.fixture(autouse=True)
def store(monkeypatch: pytest.MonkeyPatch) -> None:
    store = HashStore()
    monkeypatch.setattr(anomalies, "_get_default_store", lambda: store)


def dataset(*skipped: SkippedSample, samples: int = 1000) -> Dataset:
    class Index(SimpleNamespace):
        def __len__(self) -> int:
            return samples

    index = Index(
        num_skipped=len(skipped),
        skipped_samples=lambda: iter(skipped),
        shard_of=lambda sample: f"{sample // 100}.tar",
    )
    return cast(Dataset, SimpleNamespace(indexes=(index,)))


def lines(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / BAD_SAMPLES).read_text().splitlines()]


def test_a_resumed_run_lists_each_bad_sample_once(tmp_path: Path) -> None:
    unused = dataset(SkippedSample("a.tar", "k\ud83d", "malformed"))
    first = BadSamples(tmp_path, 0)
    first.list_of_indexes({"sources": unused, "validation": None})
    for step, number in ((1, 4), (3, 0)):
        publish_bad_sample(step, number, 5, SkippedSample("b.tar", f"k{step}", "x" * 5000, number))
        first.append(step, [number])
    with (tmp_path / BAD_SAMPLES).open("a") as file:
        file.write('{"found": "read')  # killed while writing
    expected = [
        {"found": "index", "split": "sources", "source": 0}
        | {"shard": "a.tar", "key": "k\ud83d", "reason": "malformed"},
        {"found": "reading", "step": 1, "rank": 5}
        | {"shard": "b.tar", "key": "k1", "reason": "x" * 2000, "item": 4},
    ]
    resumed = BadSamples(tmp_path, 2)
    resumed.list_of_indexes({"sources": unused})
    assert lines(tmp_path) == expected
    publish_bad_sample(2, 0, 0, SkippedSample("b.tar", "k2", "gone"))
    resumed.append(2, [0])
    last = {"found": "reading", "step": 2, "rank": 0}
    expected.append(last | {"shard": "b.tar", "key": "k2", "reason": "gone"})
    assert lines(tmp_path) == expected


def test_skipped_samples_are_told_whenever_their_number_has_doubled(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    listed = BadSamples(tmp_path, 0)
    listed.list_of_indexes({})
    listed.append(0, [])
    for step in range(50):
        bad = SkippedSample("b.tar", f"k{step}", "cut\noff" + "x" * 500, 2)
        publish_bad_sample(step, 7, 1, bad)
        listed.append(step, [7])
    console = capsys.readouterr().out.splitlines()
    counts = [1, 2, 4, 8, 16, 32]
    assert [int(line.split()[3].rstrip(":")) for line in console] == counts
    assert console[-1].startswith(
        "skipped samples: step 32: 1 skipped in this step, 32 in all; the last: "
        "sample 'k31' of b.tar, item 2: cut offxxx"
    )
    assert console[0].endswith(f"x; all are in {BAD_SAMPLES}")
    recorded = [(e["kind"], e["step"], e["num_samples"]) for e in incidents(tmp_path)]
    assert recorded == [("skipped samples", count - 1, count) for count in counts]
    resumed = BadSamples(tmp_path, 40)
    publish_bad_sample(40, 1, 0, SkippedSample("b.tar", "k", "gone"))
    resumed.append(40, [1])
    assert capsys.readouterr().out == ""


def test_a_limit_that_is_passed_is_named_with_what_was_reached_and_the_worst_shards() -> None:
    limits = Data.model_construct(max_skipped_samples=100, max_skipped_fraction=0.01)
    progress = Progress(1, 0, 4, frozenset({(0, 3), (0, 105), (0, 199), (0, 102)}))
    check_skipped(limits, progress, 400, dataset())
    check_skipped(limits, progress, 199, dataset())  # too few for a share
    with pytest.raises(RuntimeError) as e:
        check_skipped(limits, progress, 399, dataset())
    for part in (
        "4 samples could not be read, 1.00% of the 399 used so far",
        "above data.max_skipped_fraction 0.01",
        "the worst shards: 1.tar (3), 0.tar (1)",
        BAD_SAMPLES,
    ):
        assert part in str(e.value)
    # Later epochs use the same samples again.
    with pytest.raises(RuntimeError, match="of the 300 used so far"):
        check_skipped(limits, progress, 10**6, dataset(samples=300))
    few = replace(progress, skipped_samples=101)
    with pytest.raises(RuntimeError, match="more than data.max_skipped_samples 100"):
        check_skipped(limits, few, 10**6, dataset(samples=10**6))
