"""A checkpoint is as it was written, or is passed over with a word of what is wrong with it."""

from __future__ import annotations

import errno
import json
import os
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import torch

from mimo.checkpoint import manifest
from mimo.checkpoint.folder import Progress, complete, latest_checkpoint, resumable, return_to
from mimo.checkpoint.hf.recipes import load_recipe
from mimo.checkpoint.manifest import Listed, Unreadable, listed_files, wrong_checksums
from mimo.checkpoint.reading import read_pieces
from mimo.checkpoint.resume import (
    Resume,
    choose,
    open_checkpoint,
    problems_of,
    split_by_bytes,
)
from mimo.checkpoint.tensors import file_of, write_index, write_pieces
from mimo.engines.contract import Piece
from mimo.errors import InputError
from mimo.runtime.run_files import incidents
from mimo.train.main import Request
from tests.conftest import RunRanks
from tests.mimo import tiny
from tests.mimo.checkpoint.manifests import DAMAGES, flip_bit, small_checkpoint, write_manifest
from tests.mimo.runs import ADAM, LAYOUT, metrics, mimo, run


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    for step in (1, 2, 3):
        small_checkpoint(tmp_path / "checkpoints", step)
    return tmp_path


@pytest.mark.parametrize(("name", "damage", "message"), DAMAGES.values(), ids=DAMAGES)
def test_damage_is_named_and_the_previous_checkpoint_is_chosen(
    run_dir: Path, name: str, damage: Callable[[Path], None], message: str
) -> None:
    latest = run_dir / "checkpoints" / "step_3"
    assert problems_of(latest) == []
    damage(latest / name)
    choice = choose(resumable(run_dir))
    assert choice.checkpoint == run_dir / "checkpoints" / "step_2"
    assert list(choice.damaged) == [latest]
    assert re.search(message, "; ".join(choice.damaged[latest])), choice.damaged
    for path in (run_dir / "checkpoints").glob("step_[12]"):
        shutil.rmtree(path)
    with pytest.raises(InputError, match=rf"step_3 is damaged.*{message}.*\nno checkpoint is left"):
        choose(resumable(run_dir))


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE], ids=errno.errorcode.get)
@pytest.mark.parametrize("name", ["manifest.json", "tensors_1.safetensors", "../latest"])
def test_an_unreadable_file_does_not_count_as_damaged(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, name: str, code: int
) -> None:
    sick = (run_dir / "checkpoints" / "step_3" / name).resolve()
    open_file = Path.open

    def fail(path: Path, *args: Any, **settings: Any) -> Any:
        if path == sick:
            raise OSError(code, os.strerror(code))
        return open_file(path, *args, **settings)

    monkeypatch.setattr(Path, "open", fail)
    refusal = rf"{sick} cannot be read: {os.strerror(code)}; that need"
    with pytest.raises(Unreadable, match=refusal) as error:
        choose(resumable(run_dir))
    assert error.value.exit_code == 1  # a batch script tries again


@pytest.mark.parametrize(
    ("text", "expected"),
    [("step_2", ["step_2", "step_1"]), ("step_9", ["step_9", "step_3", "step_2", "step_1"])]
    + [(text, ["step_3", "step_2", "step_1"]) for text in ("../step_1", "", None)],
)
def test_without_latest_the_newest_checkpoint_is_the_best(
    run_dir: Path, text: str | None, expected: list[str]
) -> None:
    pointer = run_dir / "checkpoints" / "latest"
    pointer.unlink() if text is None else pointer.write_text(text)
    checkpoints = resumable(run_dir)
    assert [path.name for path in checkpoints] == expected
    choice = choose(checkpoints)
    assert choice.checkpoint is not None
    return_to(choice.checkpoint, choice.damaged)
    assert latest_checkpoint(run_dir) == choice.checkpoint
    assert choice.checkpoint.name == expected[text == "step_9"]


def test_a_damaged_checkpoint_is_renamed_and_kept(run_dir: Path) -> None:
    latest = run_dir / "checkpoints" / "step_3"
    flip_bit(latest / "tensors_0.safetensors")
    choice = choose(resumable(run_dir))
    assert choice.checkpoint is not None
    return_to(choice.checkpoint, choice.damaged)
    assert sorted(path.name for path in latest.parent.iterdir()) == [
        *("damaged_step_3", "latest", "step_1", "step_2")
    ]
    assert latest_checkpoint(run_dir) == choice.checkpoint == latest.with_name("step_2")
    assert choose(resumable(run_dir)).checkpoint == choice.checkpoint


def test_a_checkpoint_of_an_earlier_version_is_refused_by_name(run_dir: Path) -> None:
    latest = run_dir / "checkpoints" / "step_3"
    document = json.loads((latest / "manifest.json").read_text())
    del document["blocks"], document["crc32"]
    (latest / "manifest.json").write_text(json.dumps(document))
    for _ in range(2):  # without checksums of blocks, then without a manifest
        with pytest.raises(InputError, match=r"earlier version wrote it; .*`mimo convert to-hf`"):
            open_checkpoint(latest)
        (latest / "manifest.json").unlink(missing_ok=True)


def test_readers_split_the_files_by_bytes_and_find_all_damage(run_dir: Path) -> None:
    files = [Listed(f"f{n}", size, 0) for n, size in enumerate([9, 1, 5, 5, 4, 0])]
    shares = split_by_bytes(files, 3)
    assert sorted(sum(file.num_bytes for file in share) for share in shares) == [6, 9, 9]
    assert sorted(file.name for share in shares for file in share) == [file.name for file in files]
    latest = run_dir / "checkpoints" / "step_3"
    flip_bit(latest / "tensors_1.safetensors")
    listed, counts = listed_files(latest), ([], [])
    problems = [
        wrong_checksums(latest, share, read.append)
        for read, share in zip(counts, split_by_bytes(listed, 2), strict=True)
    ]
    assert sum(map(len, problems)) == 1
    total = sum(file.num_bytes for file in listed)
    assert sum(map(sum, counts)) == total
    assert min(map(sum, counts)) > 0.3 * total


FILE = {"bytes": 0, "crc32": "00000000"}
DOCUMENTS: dict[str, dict[str, object]] = {
    "an absolute name": {"files": {"/etc/passwd": FILE}},
    "a name outside of the folder": {"files": {"assets/../../step_2/tensors.json": FILE}},
    "another format": {"format": "mimo checkpoint 2"},
    "no checksum of a file": {"files": {"x": {"bytes": 1}}},
    "a list of files": {"files": []},
    "another checksum of its own": {"crc32": "00000000"},
}


@pytest.mark.parametrize("change", DOCUMENTS.values(), ids=DOCUMENTS)
def test_an_invalid_manifest_is_refused(run_dir: Path, change: dict[str, object]) -> None:
    latest = run_dir / "checkpoints" / "step_3"
    document = json.loads((latest / "manifest.json").read_text()) | change
    if "crc32" not in change:
        del document["crc32"]
        document["crc32"] = f"{crc32(json.dumps(document).encode()):08x}"
    (latest / "manifest.json").write_text(json.dumps(document))
    with pytest.raises(InputError, match=r"manifest.json is damaged"):
        listed_files(latest)


# --------------------------------------------------------------------------- single bits

FLIPS = 3


def flipped(path: Path, number: int, begin: int = 0) -> bytes:
    """Flip a bit of a file, at the place that a number stands for; returns what was there."""
    original = path.read_bytes()
    place = random.Random(f"{path.name} {number}").randrange(8 * begin, 8 * len(original))
    changed = bytearray(original)
    changed[place // 8] ^= 1 << place % 8
    path.write_bytes(changed)
    return original


def generate_from_flipped_bits(rank: int, checkpoint: Path) -> dict[str, list[str]]:
    """By file of a checkpoint, what `generate` says of single bits of it that have changed."""
    from mimo.generate.answer import Generator

    messages: dict[str, list[str]] = {}
    for path in sorted(path for path in checkpoint.rglob("*") if path.is_file()):
        of_file = messages.setdefault(str(path.relative_to(checkpoint)), [])
        for number in range(FLIPS):
            original = flipped(path, number)
            try:
                Generator(checkpoint)
                of_file.append("nothing")
            except InputError as error:
                of_file.append(str(error))
            path.write_bytes(original)
    Generator(checkpoint)
    return messages


def test_generate_refuses_every_flipped_bit_and_names_the_file(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    tiny.write_samples(tmp_path)
    recipe = tiny.write_recipe(tmp_path)
    run(run_ranks, recipe, *LAYOUT, *ADAM, "train.steps=1")
    checkpoint = tmp_path / "runs" / "tiny" / "checkpoints" / "step_1"
    (messages,) = run_ranks(generate_from_flipped_bits, 1, checkpoint)
    names = {"manifest.json", "progress.json", "recipe.yaml", "tensors.json"}
    assert messages.keys() > names | {f"tensors_{rank}.safetensors" for rank in range(2)}
    for name, texts in messages.items():
        assert len(texts) == FLIPS
        assert all(name in text and "damaged" in text for text in texts), (name, texts)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_reading_any_part_returns_what_was_written_or_reports_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_ranks: int
) -> None:
    monkeypatch.setattr(manifest, "BLOCK_BYTES", 100)  # a piece's rows have 40 bytes
    whole = torch.arange(1200.0).view(120, 10)
    sums = {}
    for rank, rows in enumerate(whole.split(120 // num_ranks)):
        part = Piece("w", (120, 10), rank * len(rows), 0, rows)
        sums[file_of(rank)] = write_pieces(tmp_path, rank, [part])
    write_index(tmp_path, num_ranks)
    complete(tmp_path, Progress(1, 0), "name: x\n", sums)
    refused, intact = 0, 0
    for number in range(60):
        path = tmp_path / file_of(number % num_ranks)
        original = flipped(path, number)
        index = open_checkpoint(tmp_path)
        row, column = number % 100, number % 7
        wanted = torch.zeros(20, 10)[:, : 10 - column]
        try:
            read_pieces(tmp_path, index, [Piece("w", (120, 10), row, column, wanted)])
            assert torch.equal(wanted, whole[row : row + 20, column:])
            intact += 1
        except InputError as error:
            refused += str(error).startswith(f"{tmp_path} is damaged: {path.name} has another")
        assert [line.split()[0] for line in problems_of(tmp_path)] == [path.name]
        path.write_bytes(original)
    assert refused + intact == 60
    assert min(refused, intact) > 5, "only blocks with wanted bytes are read"


# ------------------------------------------------------------------------------- whole runs

SETTINGS = [*LAYOUT, *ADAM, "train.save_every=1", "train.keep_checkpoints=9"]


@pytest.mark.slow
def test_resume_returns_to_the_last_intact_checkpoint_with_a_message(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    tiny.write_samples(tmp_path)
    recipe = tiny.write_recipe(tmp_path)
    run(run_ranks, recipe, *SETTINGS, "train.steps=3", "name=whole")
    shutil.copytree(tmp_path / "runs" / "whole", tmp_path / "runs" / "tiny")
    checkpoints = tmp_path / "runs" / "tiny" / "checkpoints"
    for checkpoint in checkpoints.glob("step_*"):
        write_manifest(checkpoint)
    flip_bit(checkpoints / "step_3" / "tensors_2.safetensors")
    (checkpoints / "step_2" / "tensors_0.safetensors").unlink()
    settings = [*SETTINGS, "train.steps=3"]
    with pytest.raises(InputError, match=r"step_3 is damaged: tensors_2.safetensors has checksum"):
        Request(recipe, settings, resume_from=checkpoints / "step_3").check(None).begin()
    done = mimo("train", recipe, "--resume", *settings)
    assert done.returncode == 0, done.stderr
    for message in (
        "step_3 is damaged and was passed over: tensors_2.safetensors has checksum",
        "step_2 is damaged and was passed over: tensors_0.safetensors is missing",
        f"the run continues from {checkpoints / 'step_1'}",
    ):
        assert message in done.stdout
    events = incidents(tmp_path / "runs" / "tiny")
    assert [Path(event["checkpoint"]).name for event in events] == ["step_3", "step_2"]
    assert {event["kind"] for event in events} == {"checkpoint"}
    got, expected = metrics(recipe), metrics(recipe, "whole")
    assert [m["loss"] for m in got] == [m["loss"] for m in expected]


def test_resuming_from_another_folder_moves_the_run_aside_and_changes_neither(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny.write_samples(tmp_path)
    recipe = tiny.write_recipe(tmp_path)
    run_dir, text = load_recipe(recipe).run_dir, load_recipe(recipe).to_yaml()
    for folder in (run_dir, tmp_path / "backup"):
        for step in (1, 2):
            made = small_checkpoint(folder / "checkpoints", step, text)
            shutil.copytree(tmp_path / "tokenizer", made / "assets", dirs_exist_ok=True)
            write_manifest(made)
    checkpoint, other = (path / "checkpoints" / "step_1" for path in (run_dir, tmp_path / "backup"))
    Request(recipe, resume_from=checkpoint).check(None).begin()
    assert (checkpoint.parent / "latest").read_text() == "step_1"
    job = Request(recipe, resume_from=other).check(None)
    for _ in range(2):  # and again after a failure before the first save
        (run,) = job.begin()
        assert run.start == Resume(other)
        assert not (run_dir / "checkpoints").exists()
        assert (other.parent / "latest").read_text() == "step_2"
        job = job.after_failure()
    aside = run_dir.with_name("tiny.1")
    assert f"the previous run moved to {aside}\n" in capsys.readouterr().out
    assert latest_checkpoint(aside) == aside / "checkpoints" / "step_1"
    assert not run_dir.with_name("tiny.2").exists()
    shutil.copytree(other, run_dir / "copy")
    with pytest.raises(InputError, match=r"copy: is in the run's own folder, but is none of its"):
        Request(recipe, resume_from=run_dir / "copy").check(None).begin()
