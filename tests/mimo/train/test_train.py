"""Whole runs of the tiny recipe: corrupt samples, validation, bad input, changed shards."""

from __future__ import annotations

import gc
import re
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mimo.checkpoint.hf.recipes import load_recipe
from mimo.checkpoint.resume import FromScratch
from mimo.config.schema import Recipe
from mimo.errors import InputError
from mimo.model.step_plan import StepPlan
from mimo.parallel.build import build_layout
from mimo.parallel.grids import Layout
from mimo.report.status import facts_of, read_view
from mimo.runtime.processes import RanksFailed
from mimo.runtime.run_files import BAD_SAMPLES, incidents
from mimo.train.loop import with_synchronized_gc
from mimo.train.run_folder import make_run_dir
from tests.conftest import RunRanks
from tests.mimo import tiny
from tests.mimo.runs import (
    ADAM,
    LAYOUT,
    bad_samples,
    corrupt,
    metrics,
    mimo,
    mimo_here,
    open_trainer,
    run,
    shards,
)


def test_corrupt_image_is_skipped_counted_and_named(run_ranks: RunRanks, recipe: Path) -> None:
    corrupt(recipe)
    run(run_ranks, recipe, *LAYOUT, *ADAM, "train.steps=2")
    # Once, however often its turn comes.
    assert [m["skipped_samples"] for m in metrics(recipe)] == [1, 1]
    run_dir = recipe.parent / "runs" / "tiny"
    logs = "".join(path.read_text() for path in run_dir.glob("log_rank_*.txt"))
    assert "sample0000" in logs
    assert "train-00000.tar" in logs
    (bad,) = bad_samples(recipe)
    expected = {"found": "reading", "step": 0, "rank": 0, "key": "sample0000", "item": 0}
    assert expected.items() <= bad.items()
    assert bad["shard"] == str(recipe.parent / "train-00000.tar")
    assert "cannot be decoded" in bad["reason"]
    (incident,) = incidents(run_dir)
    assert [incident[key] for key in ("kind", "step", "num_samples")] == ["skipped samples", 0, 1]
    assert "sample0000" in incident["text"]
    assert dict(facts_of(read_view(run_dir)))["skipped samples"] == f"1, listed in {BAD_SAMPLES}"


@pytest.mark.slow
def test_corrupt_video_blanks_the_images_of_its_sample_too(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    tiny.write_samples(tmp_path, videos_per_sample=tiny.VIDEOS_PER_SAMPLE)
    recipe = tiny.write_recipe(tmp_path)
    # The same samples, but without the loss of the first one: no other sample sees its items.
    (expected,) = run_ranks(_loss_without_first_sample, 1, recipe)
    corrupt(recipe)  # sample0000 begins with a video
    run(run_ranks, recipe, tiny.SECOND_ENCODER, "encoders.vision.grid.dp=2", "train.steps=1")
    (got,) = metrics(recipe)
    assert got["skipped_samples"] == 1
    assert got["loss"] == pytest.approx(expected, rel=1e-5)


def _loss_without_first_sample(rank: int, recipe: Path) -> float:
    from mimo.check import packs

    plan = packs.plan_microbatch

    def without_loss(*args: Any) -> Any:
        samples = plan(*args)
        return replace(samples, loss_tokens=samples.loss_tokens * (samples.sample > 0))

    packs.plan_microbatch = without_loss
    return tiny.run_reference_steps(rank, recipe, [tiny.SECOND_ENCODER])["steps"][0]["loss"]


def test_the_seed_of_the_recipe_changes_every_matrix_of_every_module(
    run_ranks: RunRanks, recipe: Path
) -> None:
    run_ranks(_weights_follow_the_seed, 1, recipe)


def _weights_follow_the_seed(rank: int, path: Path) -> None:
    from mimo.generate.one_rank import LocalModel

    def weights(seed: int) -> dict[str, Any]:
        modules = LocalModel(load_recipe(path, [f"train.seed={seed}"]), 48).model.modules
        return {
            f"{module}.{name}": parameter
            for module, one in modules.items()
            for name, parameter in one.whole.named_parameters()
        }

    first, same, other = weights(1), weights(1), weights(2)
    matrices = {name for name, parameter in first.items() if parameter.dim() > 1}
    assert {name.partition(".")[0] for name in matrices} == {"language", "vision"}
    assert all(first[name].equal(same[name]) for name in first)
    assert {name for name in first if not first[name].equal(other[name])} == matrices


def test_ranks_train_on_the_layout_that_they_are_given(run_ranks: RunRanks, recipe: Path) -> None:
    settings = load_recipe(recipe, ["train.steps=1"])
    # Another one than they would make of the recipe: the language model comes first.
    moved = load_recipe(
        recipe, ["language.grid.rank_offset=0", "encoders.vision.grid.rank_offset=1"]
    )
    run_dir = make_run_dir(settings, resumes=False)
    run_ranks(_train_on, 2, settings, build_layout(moved), run_dir)
    logs = [(run_dir / f"log_rank_{rank}.txt").read_text() for rank in range(2)]
    assert "rank 0 owns ['language']" in logs[0]
    assert "rank 1 owns ['vision']" in logs[1]


def test_a_layout_for_another_world_is_refused(run_ranks: RunRanks, recipe: Path) -> None:
    settings = load_recipe(recipe)
    with pytest.raises(RanksFailed, match="the layout was made for another world"):
        run_ranks(_train_on, 3, settings, build_layout(settings), recipe.parent)


def _train_on(rank: int, recipe: Recipe, layout: Layout, run_dir: Path) -> None:
    from mimo.train.rank import train_in_world

    train_in_world(recipe, layout, run_dir, FromScratch())


def test_an_observer_is_told_what_a_step_does_and_sees_gradients_before_they_are_clipped(
    run_ranks: RunRanks, recipe: Path
) -> None:
    ranks = run_ranks(_observe, 2, recipe)
    for seen, _, step in ranks:
        assert seen == [
            "batch",
            "planned",
            "forward and backward",
            "gradients",
            "gradients complete",
            "data of a later step",
            "norm and loss",
            "update",
            "updated",
        ]
        norm = sum(squared for _, squared, _ in ranks) ** 0.5
        assert step["grad_norm"] == pytest.approx(norm, rel=1e-6)
        assert norm > 2 * CLIP


CLIP = 0.01


def _observe(rank: int, path: Path) -> tuple[list[str], float, dict[str, float]]:
    """What an observer is told of one step, the squared norm that it finds, and the metrics."""
    from mimo.train.step import StepObserver

    class Observer(StepObserver):
        def at(self, step: int, activity: str) -> None:
            seen.append(activity)

        def planned(self, step: int, plan: StepPlan) -> None:
            seen.append("planned")

        def gradients_complete(self, step: int, modules: Any) -> None:
            seen.append("gradients complete")
            before.extend(weight.detach().clone() for weight in parameters(modules))
            squares.extend(float(p.main_grad.double().pow(2).sum()) for p in parameters(modules))

        def updated(self, step: int, modules: Any) -> None:
            seen.append("updated")
            pairs = zip(before, parameters(modules), strict=True)
            assert not any(old.equal(new) for old, new in pairs)

    def parameters(modules: Any) -> list[Any]:
        return [p for m in modules.values() for chunk in m.raw for p in chunk.parameters()]

    seen, squares, before = list[str](), list[float](), list[Any]()
    recipe = load_recipe(path, ["train.warmup_steps=0", f"train.clip_grad_norm={CLIP}"])
    trainer, dataset = open_trainer(recipe)
    steps = trainer.train(dataset, None, Observer())
    measured = next(steps)
    steps.close()
    return seen, sum(squares), measured


def test_validation_loss_is_the_mean_over_held_out_tokens(
    run_ranks: RunRanks, recipe: Path
) -> None:
    shard = shards(recipe, "train", split="validation")
    # Two batches of unequal numbers of tokens. The first source of training is another one.
    tiny.write_samples(recipe.parent, (6, 0, 5, 6, 0, 0, 0, 6))
    tiny.write_samples(recipe.parent, (3, 1, 2), name="other")
    sources = ", ".join(
        f"{{path: '{recipe.parent}/{name}-*.tar', weight: {weight}}}"
        for name, weight in (("other", 1e-9), ("train", 1))
    )
    every = ["train.validate_every=2", "train.validation_batches=2", "train.learning_rate=1e-12"]
    batches = ["train.steps=2", "train.global_batch_size=4", "train.warmup_steps=0"]
    run(run_ranks, recipe, *LAYOUT, *batches, f"data.sources=[{sources}]", shard, *every)
    *steps, validation = metrics(recipe)
    # The same samples with (nearly) the same weights.
    losses, tokens = ([step[key] for step in steps] for key in ("loss", "loss_tokens"))
    mean = np.average(losses, weights=tokens)
    assert mean != pytest.approx(np.mean(losses), rel=1e-4)
    assert validation["validation_loss"] == pytest.approx(mean, rel=1e-5)


@pytest.mark.slow
def test_several_validation_sources_have_the_losses_that_each_has_alone(
    run_ranks: RunRanks, recipe: Path
) -> None:
    tiny.write_samples(recipe.parent, (3, 1, 2), name="other")
    paths = [recipe.parent / f"{name}-00000.tar" for name in ("train", "other")]
    every = ["train.validate_every=1", "train.validation_batches=1", "train.steps=1"]

    def losses(name: str, chosen: list[Path]) -> dict[str, float]:
        sources = ", ".join(f"{{path: '{path}', weight: {n + 1}}}" for n, path in enumerate(chosen))
        run(run_ranks, recipe, *LAYOUT, *every, f"data.validation=[{sources}]", f"name={name}")
        return metrics(recipe, name)[-1]

    first, second = (
        losses(f"alone_{n}", [path])["validation_loss"] for n, path in enumerate(paths)
    )
    both = losses("both", paths)
    assert first != pytest.approx(second, rel=1e-4)
    assert both["validation_loss_0"] == pytest.approx(first, rel=1e-6)
    assert both["validation_loss_1"] == pytest.approx(second, rel=1e-6)
    assert min(first, second) < both["validation_loss"] < max(first, second)


def test_too_many_corrupt_samples_end_the_run_with_the_limit_named(
    run_ranks: RunRanks, recipe: Path
) -> None:
    corrupt(recipe)
    done = mimo_here(run_ranks, "train", recipe, "data.max_skipped_samples=0")
    assert done.exit_code == 1
    assert "data.max_skipped_samples" in done.stderr


# All that training may print; a notice of a library is none of it.
CONSOLE = re.compile(
    r"run folder: \S+"
    r"|summary [\w .]+: .+"
    r"|saves a checkpoint (every \d+ steps|after the last step only)"
    r"|changed since \S+:|  .* before, .* now"
    r"|the run continues from \S+"
    r"|step \d+/\d+ loss \S+ grad_norm \S+ lr \S+ tokens/s \d+ epoch [\d.]+"
    r" mfu \S+ idle [\d.]+ eta [\d:]+"
    r"|validation after step \d+: loss \S+"
)


@pytest.mark.slow
def test_the_console_shows_our_lines_alone_and_the_log_files_the_rest(recipe: Path) -> None:
    settings = [shards(recipe, "train", split="validation"), "train.validate_every=2"]
    settings += ["train.log_every=1", "train.save_every=1"]
    for arguments, steps in ((["train.steps=2"], "12"), (["train.steps=3", "--resume"], "3")):
        done = mimo("train", recipe, *settings, *arguments)
        assert (done.returncode, done.stderr) == (0, "")
        lines = done.stdout.splitlines()
        assert [line for line in lines if not CONSOLE.fullmatch(line)] == []
        assert "".join(re.findall(r"^step (\d)/", done.stdout, re.MULTILINE)) == steps
    logs = sorted((recipe.parent / "runs" / "tiny").glob("log_rank_*.txt"))
    assert len(logs) == 2
    assert all("owns" in path.read_text() for path in logs)
    # A file holds what the console does not; what nobody can act on is in neither.
    assert [path.name for path in logs if "WARNING" in path.read_text()] == []


def test_sample_with_more_placeholders_than_images_is_bad_input(
    run_ranks: RunRanks, recipe: Path
) -> None:
    shard = recipe.parent / "train-00000.tar"
    with tarfile.open(shard) as whole, tarfile.open(recipe.parent / "cut.tar", "w") as cut:
        for member in whole:
            if member.name != "sample0003.2.png":
                cut.addfile(member, whole.extractfile(member))
    (recipe.parent / "cut.tar").rename(shard)
    done = mimo_here(run_ranks, "train", recipe)
    assert done.exit_code == 2, done.stderr
    assert "sample0003" in done.stderr
    assert "Traceback" not in done.stderr


BAD_INPUT = {
    "--num-ranks=4": ["language.grid", "4 ranks"],
    "train.stepps=3": ["train.stepps", "did you mean 'steps'"],
    "data.sources.0.path=nowhere/*.tar": ["data.sources.0.path", "nowhere/*.tar"],
    "data.tokenizer=nowhere": ["data.tokenizer", "nowhere"],
    "language.model.hidden_sizes=3": ["language.model.hidden_sizes", "hidden_size"],
    "language.grid.tp=3": ["language.grid", "num_attention_heads"],
    "language.family=qwen4": ["language.family", "qwen3"],
    "data.sequence_length=8": ["data.sources.0.path", "8"],
    "encoders.other={family: qwen_vl}": [
        "encoders.other.media: got 'image', which encoders.vision.media is already",
        "encoders.other.placeholder: got '<|image_pad|>', which encoders.vision.pl",
    ],
    "encoders.vision.media=video": ["data.sources.0.path", "sample0000: image", "take video"],
    "encoders.vision.placeholder='<|no|>'": ["data.tokenizer", "'<|no|>' for the image"],
}


@pytest.mark.parametrize("override", BAD_INPUT)
def test_bad_input_ends_with_one_message_and_exit_code_2(
    run_ranks: RunRanks, recipe: Path, override: str
) -> None:
    done = mimo_here(run_ranks, "train", recipe, override)
    assert done.exit_code == 2, done.stderr
    for text in BAD_INPUT[override]:
        assert text in done.stderr
    assert "Traceback" not in done.stderr
    assert not (recipe.parent / "runs").exists()


def _train_and_change(rank: int, recipe: Recipe, layout: Layout, run_dir: Path) -> tuple[str, int]:
    import mimo.train.rank

    opened = mimo.train.rank.dataset_of
    shard = Path(recipe.data.sources[0].path.replace("*", "00000"))

    def open_and_change(*args: Any) -> Any:
        dataset = opened(*args)
        shard.write_bytes(shard.read_bytes() + bytes(512))
        return dataset

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mimo.train.rank, "dataset_of", open_and_change)
        with pytest.raises(InputError) as error:
            mimo.train.rank.train_in_world(recipe, layout, run_dir, FromScratch())
    return str(error.value), error.value.exit_code


def test_a_shard_that_is_written_under_the_run_ends_it_with_exit_code_2(
    run_ranks: RunRanks, recipe: Path
) -> None:
    settings = load_recipe(recipe, ["encoders.vision.placement=colocated"])
    args = settings, build_layout(settings), make_run_dir(settings, resumes=False)
    ((message, code),) = run_ranks(_train_and_change, 1, *args)
    assert "train-00000.tar has changed since it was indexed" in message
    assert "`mimo data index`" in message
    assert code == 2


def test_garbage_is_collected_before_the_first_step_and_then_every_so_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    collections: list[int] = []
    monkeypatch.setattr(gc, "collect", lambda: collections.append(1))
    seen = []
    for _ in with_synchronized_gc(range(7), every=3):
        assert not gc.isenabled()
        seen.append(len(collections))
    assert seen == [1, 1, 1, 2, 2, 2, 3]
    assert gc.isenabled()


def test_a_failed_step_leaves_the_collector_as_it_was() -> None:
    steps = (1 // (2 - step) for step in range(3))
    with pytest.raises(ZeroDivisionError):
        list(with_synchronized_gc(steps, every=3))
    assert gc.isenabled()
