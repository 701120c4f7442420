"""What the ranks of one job do each its share of, before they train."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.mimo import tiny
from tests.mimo.checkpoint.manifests import flip_bit, write_manifest
from tests.mimo.runs import metrics
from tests.mimo.runtime.conftest import RANKS, Trained, train


def note(path: Path, module: Any, name: str, paths: Callable[..., list[Any]]) -> None:
    """Let each call of a function add the names of the files that it is for to `path`_<rank>."""
    file, called = Path(f"{path}_{os.environ['RANK']}"), getattr(module, name)

    def noted(*args: Any) -> Any:
        with file.open("a") as lines:
            lines.writelines(f"{Path(path).name}\n" for path in paths(*args))
        return called(*args)

    setattr(module, name, noted)


def train_noting_shards(port: int, folder: Path, arguments: list[str]) -> int:
    """Like `train`; the names of the shards that the rank indexes go to `indexed_<rank>`."""
    from data.index import build

    note(folder / "indexed", build, "index_shard", lambda task, *_: [task.shard.path])
    return train(port, folder, arguments)


def failing_for(owner: Any, number: int, is_sick: Callable[[Path], bool]) -> Any:
    """Let ``open`` of Path or of os raise the OSError of this number for the sick paths."""
    opened = owner.open

    def fail(path: Any, *args: Any, **settings: Any) -> Any:
        if is_sick(Path(os.fsdecode(path))):
            raise OSError(number, os.strerror(number), str(path))
        return opened(path, *args, **settings)

    return mock.patch.object(owner, "open", fail)


def train_from_a_sick_disk(port: int, folder: Path, arguments: list[str]) -> int:
    """Like `train`, but a file cannot be read, by whichever rank has it in its share."""
    with failing_for(Path, errno.EIO, lambda path: path.name == "tensors_1.safetensors"):
        return train(port, folder, arguments)


def train_without_room(port: int, folder: Path, arguments: list[str]) -> int:
    """Like `train`, but no index can be written."""
    from data.index import build

    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with mock.patch.object(build, "write_shard_index", side_effect=full):
        return train(port, folder, arguments)


def train_from_a_lost_index(port: int, folder: Path, arguments: list[str]) -> int:
    """Like `train`, but of the index that rank 0 has found the last rank can open nothing."""
    is_last = os.environ["RANK"] == str(RANKS - 1)
    with failing_for(Path, errno.ESTALE, lambda path: is_last and ".index" in path.parts):
        return train(port, folder, arguments)


def train_noting_checksums(port: int, folder: Path, arguments: list[str]) -> int:
    """Like `train`; the names of the files that the rank verifies go to `verified_<rank>`."""
    from mimo.train import entry

    note(
        folder / "verified", entry, "wrong_checksums", lambda _, files, *__: [f.name for f in files]
    )
    return train(port, folder, arguments)


def test_ranks_index_what_is_missing_each_its_share(trained: Trained, recipe: Path) -> None:
    for number in range(3):
        tiny.write_samples(
            recipe.parent, images_per_sample=[1] * (2 + number), name=f"train-{number}"
        )
    indexes = recipe.parent / ".index"
    damaged = recipe.parent / "train-1-00000.tar"
    whole = damaged.read_bytes()
    damaged.write_bytes(whole[: len(whole) // 2])
    codes, printed = trained("train.steps=1", target=train_noting_shards)
    assert codes == [2] * RANKS
    assert "4 shards are not indexed yet; the ranks do it, each its share\n" in printed[0]
    assert "train-1-00000.tar is not a whole uncompressed tar file" in printed[0]
    assert not (recipe.parent / "runs").exists()
    files = [recipe.parent / f"indexed_{rank}" for rank in range(RANKS)]
    shares = [file.read_text().splitlines() for file in files]
    assert sorted(map(len, shares)) == [1, 1, 2]
    assert len({name for names in shares for name in names}) == 4
    assert len(list(indexes.rglob("*.index"))) == 3

    damaged.write_bytes(whole)
    codes, printed = trained("train.steps=1", target=train_noting_shards)
    assert codes == [0] * RANKS
    assert "1 shards are not indexed yet" in printed[0]
    assert sum(len(file.read_text().splitlines()) for file in files) == 5


def test_a_file_system_that_fails_under_the_data_is_no_bad_input(
    trained: Trained, recipe: Path
) -> None:
    codes, printed = trained("train.steps=1", target=train_without_room)
    assert codes == [1] * RANKS
    assert os.strerror(errno.ENOSPC) in printed[0]
    assert trained("train.steps=1")[0] == [0] * RANKS
    codes, printed = trained("train.steps=2", target=train_from_a_lost_index)
    assert codes == [1] * RANKS
    assert any(os.strerror(errno.ESTALE) in text for text in printed), printed


@pytest.mark.slow
def test_ranks_verify_a_checkpoint_each_its_share_and_go_back_together(
    trained: Trained, recipe: Path
) -> None:
    settings = ["train.steps=2", "train.save_every=1"]
    assert trained(*settings)[0] == [0] * RANKS
    checkpoints = recipe.parent / "runs" / "tiny" / "checkpoints"
    for step in (1, 2):
        write_manifest(checkpoints / f"step_{step}")
    flip_bit(checkpoints / "step_2" / "tensors_1.safetensors")
    codes, printed = trained("--resume-from", str(checkpoints / "step_2"), *settings)
    assert codes == [2] * RANKS
    assert printed[0].startswith(f"{checkpoints / 'step_2'} is damaged: tensors_1.safetensors has")
    assert printed[1:] == ["", ""]

    codes, printed = trained("--resume", *settings, target=train_from_a_sick_disk)
    assert codes == [1] * RANKS  # a batch script tries again
    assert "tensors_1.safetensors cannot be read: Input/output error; that need not" in printed[0]
    assert (checkpoints / "step_2").is_dir(), "nothing was moved"

    codes, printed = trained("--resume", *settings, target=train_noting_checksums)
    assert codes == [0] * RANKS
    assert f"the run continues from {checkpoints / 'step_1'}\n" in printed[0]
    assert "step_2 is damaged and was passed over: tensors_1.safetensors has" in printed[0]
    assert [line["step"] for line in metrics(recipe)] == [0, 1]
    read = [(recipe.parent / f"verified_{rank}").read_text().split() for rank in range(RANKS)]
    assert all(read)
    files = (path for path in (checkpoints / "step_1").rglob("*") if path.is_file())
    once = sorted(path.name for path in files if path.name != "manifest.json")
    assert sorted(name for names in read for name in names) == sorted(2 * once), (
        "of both checkpoints"
    )
