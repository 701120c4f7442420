"""Whole runs of the tiny recipe: resume, corrupt samples, bad input, generation.

Runs that should succeed use the shared pool of ranks; what a person sees on failure goes through
the command line.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout
from pathlib import Path

import pytest
from PIL import Image

from mimo.job import check_recipe, make_run_dir
from mimo.recipe import Recipe, load_recipe
from mimo.recipe_errors import InputError
from tests.conftest import RunRanks
from tests.mimo import tiny
from tests.ranks import MarkedJob

LAYOUT = ["language.grid.dp=2", "train.micro_batch_size=2"]
ADAM = ["train.optimizer=adam", "train.learning_rate=0.003", "train.clip_grad_norm=1.0"]


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    tiny.write_samples(tmp_path)
    return tiny.write_recipe(tmp_path)


def mimo(*arguments: object, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """The command line, from start to end; no process of it may be left over."""
    job = MarkedJob()
    done = subprocess.run(
        command(*arguments), capture_output=True, text=True, timeout=timeout, env=job.environment
    )
    assert not job.leftovers(), done.stderr
    return done


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "mimo.cli", *map(str, arguments)]


def run(run_ranks: RunRanks, path: Path, *overrides: str, resume_from: Path | None = None) -> None:
    """Train to the end in this process's pool of ranks; the run folder is made as a job does."""
    recipe = load_recipe(path, overrides)
    layout = check_recipe(recipe, None)
    run_dir = make_run_dir(recipe, resumes=resume_from is not None)
    run_ranks(_train, layout.world_size, recipe, run_dir, resume_from)


def _train(rank: int, recipe: Recipe, run_dir: Path, resume_from: Path | None) -> None:
    from mimo.train import train_in_world

    train_in_world(recipe, run_dir, resume_from)


def metrics(recipe: Path, run: str = "tiny") -> list[dict]:
    path = recipe.parent / "runs" / run / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_resumed_run_continues_the_loss_curve_to_the_last_bit(
    run_ranks: RunRanks, recipe: Path
) -> None:
    settings = [*LAYOUT, *ADAM, "train.steps=6", "train.save_every=3"]
    run(run_ranks, recipe, *settings, "name=whole")
    # The interrupted run: same recipe, ended after its checkpoint at step 3.
    folder = recipe.parent / "runs" / "part"
    shutil.copytree(recipe.parent / "runs" / "whole", folder)
    checkpoint = folder / "checkpoints" / "step_3"
    run(run_ranks, recipe, *settings, "name=part", resume_from=checkpoint)
    expected, got = metrics(recipe, "whole"), metrics(recipe, "part")
    assert [m["step"] for m in got] == [0, 1, 2, 3, 4, 5]
    for key in ("loss", "grad_norm", "lr", "tokens"):
        assert [m[key] for m in got] == [m[key] for m in expected], key


def test_killed_run_leaves_no_rank_and_resumes_to_the_last_bit(
    run_ranks: RunRanks, recipe: Path
) -> None:
    # Short steps: an epoch is three of them.
    settings = [*LAYOUT, *ADAM, "train.steps=60", "train.save_every=5", "train.global_batch_size=4"]
    killed = [*settings, "name=killed"]
    checkpoints = recipe.parent / "runs" / "killed" / "checkpoints"
    kill_after_a_checkpoint(recipe, killed, checkpoints)

    latest = checkpoints / (checkpoints / "latest").read_text()
    step = json.loads((latest / "progress.json").read_text())["step"]
    assert latest.name == f"step_{step}"
    assert 0 < step < 60
    assert len(list(latest.glob("rng_rank_*.pt"))) == 3
    before = metrics(recipe, "killed")[:step]
    # What is left to compare with runs while the command line starts.
    with ThreadPoolExecutor(1) as thread:
        resumed = thread.submit(mimo, "train", recipe, "--resume", *killed)
        run(run_ranks, recipe, *settings, "name=whole")
        done = resumed.result()
    assert done.returncode == 0, done.stderr
    expected, got = metrics(recipe, "whole"), metrics(recipe, "killed")
    assert got[:step] == before, "steps before the checkpoint ran again"
    for key in ("step", "loss", "grad_norm"):
        assert [m[key] for m in got] == [m[key] for m in expected], key


def kill_after_a_checkpoint(recipe: Path, settings: list[str], checkpoints: Path) -> None:
    """Start `mimo train`, and SIGKILL its launcher once a checkpoint is complete."""
    job, world_size = MarkedJob(), check_recipe(load_recipe(recipe, settings), None).world_size
    with (recipe.parent / "killed.txt").open("w") as output:
        launcher = subprocess.Popen(
            command("train", recipe, *settings),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**job.environment, "TMPDIR": str(recipe.parent)},
        )
    try:
        deadline = time.monotonic() + 60
        while not (checkpoints / "latest").exists():
            assert launcher.poll() is None, (recipe.parent / "killed.txt").read_text()
            assert time.monotonic() < deadline, "no checkpoint was written"
            time.sleep(0.01)
        pids = job.pids()
        launcher.kill()
        launcher.wait()
        # The launcher, its fork server and the ranks at least: a search that finds none is broken.
        assert len(pids) >= 2 + world_size
        assert not job.leftovers()
    finally:
        for pid in job.pids():
            os.kill(pid, signal.SIGKILL)
        launcher.wait()


def test_random_state_of_every_rank_is_restored_on_resume(
    run_ranks: RunRanks, recipe: Path
) -> None:
    states = run_ranks(_save_and_load_random_state, 3, recipe, [*LAYOUT, *ADAM])
    assert len(set(states)) == 3, "every rank has a state of its own"


def _save_and_load_random_state(rank: int, path: Path, overrides: list[str]) -> bytes:
    import torch

    from mimo.checkpoint import load_checkpoint
    from mimo.layout import build_layout
    from mimo.topology import build_topology
    from mimo.train import Trainer

    recipe = load_recipe(path, overrides)
    trainer = Trainer(recipe, build_topology(build_layout(recipe)), path.parent / "run")
    torch.manual_seed(100 + rank)
    torch.rand(3)
    at_save = torch.get_rng_state()
    checkpoint = trainer.save()
    saved = torch.load(checkpoint / f"rng_rank_{rank}.pt", weights_only=True)["cpu"]
    assert torch.equal(saved, at_save)
    torch.manual_seed(7)
    load_checkpoint(trainer.model, checkpoint)
    assert torch.equal(torch.get_rng_state(), saved)
    return saved.numpy().tobytes()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_checkpoint_of_one_layout_resumes_in_another(
    run_ranks: RunRanks, recipe: Path, precision: str
) -> None:
    settings = [*ADAM, "train.steps=4", "train.save_every=2", f"train.precision={precision}"]
    run(run_ranks, recipe, *LAYOUT, *settings)
    whole = metrics(recipe)
    checkpoint = recipe.parent / "runs" / "tiny" / "checkpoints" / "step_2"
    other = ["language.grid.tp=2", "language.grid.sp=true", "encoders.vision.grid.dp=2"]
    run(run_ranks, recipe, *other, *settings, "name=other", resume_from=checkpoint)
    # Layouts add in another order: the last bits differ, in bf16 (8 bits of mantissa) the first.
    loss, norm = {"fp32": (1e-5, 1e-4), "bf16": (2e-2, 1e-1)}[precision]
    for got, expected in zip(metrics(recipe, "other"), whole[2:], strict=True):
        assert got["loss"] == pytest.approx(expected["loss"], rel=loss)
        assert got["grad_norm"] == pytest.approx(expected["grad_norm"], rel=norm)


def test_corrupt_image_is_skipped_counted_and_named(run_ranks: RunRanks, recipe: Path) -> None:
    corrupt(recipe)
    run(run_ranks, recipe, *LAYOUT, *ADAM, "train.steps=2")
    # Once, however often its turn comes.
    assert [m["skipped_samples"] for m in metrics(recipe)] == [1, 1]
    logs = "".join(p.read_text() for p in (recipe.parent / "runs" / "tiny").glob("log_rank_*.txt"))
    assert "sample0000" in logs
    assert "train-00000.tar" in logs


def test_corrupt_video_blanks_the_images_of_its_sample_too(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    tiny.write_samples(tmp_path, videos_per_sample=tiny.VIDEOS_PER_SAMPLE)
    recipe = tiny.write_recipe(tmp_path)
    corrupt(recipe)  # sample0000 begins with a video
    run(run_ranks, recipe, tiny.SECOND_ENCODER, "encoders.vision.grid.dp=2", "train.steps=1")
    (got,) = metrics(recipe)
    # The same samples, with text of the same length in place of that sample's items.
    (expected,) = run_ranks(_loss_without_first_sample, 1, recipe)
    assert got["skipped_samples"] == 1
    assert got["loss"] == pytest.approx(expected, rel=1e-5)


def _loss_without_first_sample(rank: int, recipe: Path) -> float:
    return tiny.run_reference_steps(
        rank, recipe, [tiny.SECOND_ENCODER], unusable=frozenset({"sample0000"})
    )["steps"][0]["loss"]


def corrupt(recipe: Path, name: str = "train") -> None:
    """Break pixels inside the first item: its header, which the index reads, stays good."""
    shard = recipe.parent / f"{name}-00000.tar"
    data = bytearray(shard.read_bytes())
    first = data.index(b"IDAT")
    data[first + 8 : first + 40] = bytes(32)
    shard.write_bytes(data)


def test_validation_loss_is_the_mean_over_held_out_tokens(
    run_ranks: RunRanks, recipe: Path
) -> None:
    shard = f"data.validation=[{{path: '{recipe.parent}/train-*.tar'}}]"
    every = ["train.validate_every=1", "train.validation_batches=1", "train.learning_rate=1e-12"]
    run(run_ranks, recipe, *LAYOUT, "train.steps=1", "train.warmup_steps=0", shard, *every)
    step, validation = metrics(recipe)
    # The same samples with (nearly) the same weights.
    assert validation["validation_loss"] == pytest.approx(step["loss"], rel=1e-5)


def test_too_many_corrupt_samples_end_the_run_with_the_limit_named(recipe: Path) -> None:
    corrupt(recipe)
    done = mimo("train", recipe, "data.max_skipped_samples=0")
    assert done.returncode == 1
    assert "data.max_skipped_samples" in done.stderr


def test_sample_with_more_placeholders_than_images_is_bad_input(recipe: Path) -> None:
    shard = recipe.parent / "train-00000.tar"
    with tarfile.open(shard) as whole, tarfile.open(recipe.parent / "cut.tar", "w") as cut:
        for member in whole:
            if member.name != "sample0003.2.png":
                cut.addfile(member, whole.extractfile(member))
    (recipe.parent / "cut.tar").rename(shard)
    done = mimo("train", recipe)
    assert done.returncode == 2, done.stderr
    assert "sample0003" in done.stderr
    assert "3" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("override", "mentions"),
    [
        ("train.stepps=3", ["train.stepps", "did you mean 'steps'"]),
        ("data.sources.0.path=nowhere/*.tar", ["data.sources.0.path", "nowhere/*.tar"]),
        ("data.tokenizer=nowhere", ["data.tokenizer", "nowhere"]),
        ("language.model.hidden_sizes=3", ["language.model.hidden_sizes", "hidden_size"]),
        ("language.grid.tp=3", ["language.grid", "num_attention_heads"]),
        ("language.family=qwen4", ["language.family", "qwen3"]),
        ("encoders.vision.family=siglop", ["encoders.vision.family", "qwen_vl"]),
        ("data.sequence_length=8", ["data.sources.0.path", "8"]),
        (
            "encoders.other={family: qwen_vl}",
            [
                "encoders.other.media: got 'image', which encoders.vision.media is already",
                "encoders.other.placeholder: got '<|image_pad|>', which encoders.vision.pl",
            ],
        ),
        ("encoders.vision.media=text", ["encoders.vision.media", "language model's own"]),
        ("encoders.vision.media=video", ["data.sources.0.path", "sample0000: image", "take video"]),
        ("encoders.vision.placeholder='<|no|>'", ["data.tokenizer", "'<|no|>' for the image"]),
    ],
)
def test_bad_input_ends_with_one_message_and_exit_code_2(
    recipe: Path, override: str, mentions: list[str]
) -> None:
    done = mimo("train", recipe, override)
    assert done.returncode == 2, done.stderr
    for text in mentions:
        assert text in done.stderr
    assert "Traceback" not in done.stderr
    assert not (recipe.parent / "runs").exists()


def test_grid_that_does_not_tile_the_ranks_is_bad_input(recipe: Path) -> None:
    done = mimo("train", recipe, "--num-ranks=4")
    assert done.returncode == 2
    assert "4 ranks" in done.stderr


def test_generate_answers_from_a_run_of_any_layout(run_ranks: RunRanks, recipe: Path) -> None:
    image = recipe.parent / "image.png"
    Image.new("L", (56, 28), 128).save(image)
    run(run_ranks, recipe, "train.steps=1", "language.grid.pp=2", "language.grid.tp=2")
    folder = recipe.parent / "runs" / "tiny"
    done = mimo("generate", folder, "--image", image, "--prompt", "what is this ?")
    assert done.returncode == 0, done.stderr
    (expected,) = run_ranks(_answer, 1, folder, image)
    assert done.stdout.strip() == expected.strip()


def _answer(rank: int, folder: Path, image: Path) -> str:
    """The definition of greedy decoding: one whole forward per token, one sample at a time."""
    from mimo.generate import Generator, Request

    generator = Generator(folder)
    content = [{"type": "image"}, {"type": "text", "text": "what is this ?"}]
    request = Request([{"role": "user", "content": content}], [Image.open(image).convert("RGB")])
    other = Request([{"role": "user", "content": [{"type": "text", "text": "hello"}]}], [])
    alone = generator.answer([request], 64)
    # What else is in the pack changes nothing.
    assert generator.answer([other, request, other], 64)[1] == alone[0]
    return alone[0]


def test_two_encoders_answer_about_items_of_both(run_ranks: RunRanks, tmp_path: Path) -> None:
    tiny.write_samples(tmp_path, videos_per_sample=tiny.VIDEOS_PER_SAMPLE)
    recipe = tiny.write_recipe(tmp_path)
    test = f"data.test=[{{path: '{tmp_path}/train-*.tar'}}]"
    run(run_ranks, recipe, tiny.SECOND_ENCODER, "train.steps=1", test)
    run_ranks(_answer_both, 1, tmp_path / "runs" / "tiny")


def _answer_both(rank: int, folder: Path) -> None:
    from mimo.evaluate import answer_split
    from mimo.generate import Generator, Request

    generator = Generator(folder)
    items = [Image.linear_gradient("L").resize(size) for size in ((56, 28), (28, 56), (28, 28))]
    media = ["video", "image", "video"]

    def request(*numbers: int) -> Request:
        content = [{"type": media[n]} for n in numbers] + [{"type": "text", "text": "read"}]
        return Request([{"role": "user", "content": content}], [items[n] for n in numbers])

    requests = [request(0, 1, 2), request(2), request(1), request(), request(1, 0)]
    # What else is in the pack changes nothing.
    assert generator.answer(requests, 8) == [generator.answer([one], 8)[0] for one in requests]
    answered = answer_split(folder)
    numbers = zip(tiny.IMAGES_PER_SAMPLE, tiny.VIDEOS_PER_SAMPLE, strict=True)
    assert [len(one.images) for one in answered] == [sum(both) for both in numbers]


def test_corrupt_held_out_image_is_skipped_counted_and_named(
    run_ranks: RunRanks, recipe: Path
) -> None:
    tiny.write_samples(recipe.parent, (1, 0, 2), name="test")
    corrupt(recipe, "test")
    test = f"data.test=[{{path: '{recipe.parent}/test-*.tar'}}]"
    run(run_ranks, recipe, "train.steps=1", test)
    (printed,) = run_ranks(_evaluate, 1, recipe.parent / "runs" / "tiny")
    skipped, count, _, last = printed.splitlines()
    assert skipped.startswith("skipped sample 'sample0000' of ")
    assert "test-00000.tar, item 0: the image cannot be decoded" in skipped
    assert count == "skipped_samples=1"
    assert last.startswith("exact_match=")


def _evaluate(rank: int, folder: Path) -> str:
    from mimo.evaluate import answer_split, main

    with redirect_stdout(io.StringIO()) as printed:
        assert main(folder, "test") == 0
    with redirect_stdout(io.StringIO()):
        assert len(answer_split(folder)) == 2
    return printed.getvalue()


# The template of the tiny tokenizer, for at most two images.
AT_MOST_TWO = """\
{%- if messages[0]['content'] | selectattr('type', 'equalto', 'image') | list | length > 2 -%}
{{ raise_exception('at most two images, please') }}
{%- endif -%}
"""


def test_generate_refuses_what_tokenizer_template_or_processor_cannot_take(
    run_ranks: RunRanks, recipe: Path
) -> None:
    template = recipe.parent / "tokenizer" / "chat_template.jinja"
    template.write_text(AT_MOST_TWO + template.read_text())
    run(run_ranks, recipe, "train.steps=1")
    run_ranks(_generate_from_bad_input, 1, recipe.parent / "runs" / "tiny")


def _generate_from_bad_input(rank: int, folder: Path) -> None:
    from mimo.generate import Generator, Request, main

    good, long = folder / "good.png", folder / "long.png"
    Image.new("L", (28, 28)).save(good)
    Image.new("L", (2010, 10)).save(long)
    for images, prompt, message in (
        ([good], "what is <|image_pad|> ?", "^--prompt: '<|image_pad|>' stands for an item"),
        ([good, long], "what is this ?", r"^--image .*long\.png: .* aspect ratio of 201"),
        ([good] * 3, "what is this ?", "^the prompt cannot be answered: .*at most two images"),
    ):
        with pytest.raises(InputError, match=message.replace("|", r"\|")) as caught:
            main(folder, images, prompt, 1)
        assert caught.value.exit_code == 2
    assert main(folder, [good] * 2, "what is this ?", 1) == 0
    request = Request([{"role": "user", "content": [{"type": "image"}]}], [])
    with pytest.raises(InputError, match="1 placeholders but 0 items"):
        Generator(folder).answer([request], 1)


def test_generate_without_a_checkpoint_says_what_to_give(tmp_path: Path) -> None:
    done = mimo("generate", tmp_path, "--prompt", "what is this ?")
    assert done.returncode == 2
    assert "no checkpoint" in done.stderr
    assert "Traceback" not in done.stderr
