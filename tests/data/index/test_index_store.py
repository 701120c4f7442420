from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import numpy as np
import pytest

from data import (
    ChatTokenizer,
    ImageProcessor,
    Index,
    Processors,
    build_index,
    load_index,
    load_or_build_index,
    save_index,
)
from data.index.store import index_directory


def assert_equal(one: Index, other: Index):
    for field in dataclasses.fields(Index):
        mine, theirs = getattr(one, field.name), getattr(other, field.name)
        if isinstance(mine, np.ndarray):
            assert mine.dtype.kind == theirs.dtype.kind
            np.testing.assert_array_equal(mine, theirs, err_msg=field.name)
        else:
            assert mine == theirs, field.name


def test_a_saved_index_loads_equal_and_moves_with_its_shards(
    tmp_path: Path, digits: Path, chat: ChatTokenizer, processors: Processors, write_shard, ask
):
    home = tmp_path / "home"
    home.mkdir()
    shutil.copy(digits / "validation-00000.tar", home)
    write_shard(home / "validation-1.tar", {"x.json": ask(0), "bad.json": b"{"})
    index = load_or_build_index(str(home / "validation-*.tar"), chat, processors)
    directory = index_directory(str(home / "validation-*.tar"))
    assert directory.parent == home / ".index"
    assert len(index.skipped) == 1
    assert_equal(index, load_index(directory))
    moved = home.rename(tmp_path / "moved")
    again = load_index(moved / ".index" / directory.name)
    assert again.shards == tuple(s.replace("/home/", "/moved/") for s in index.shards)
    assert again.fingerprint == index.fingerprint


def test_an_index_of_several_media_loads_equal(
    tmp_path: Path,
    two_media_chat: ChatTokenizer,
    two_media_processors: Processors,
    write_shard,
    ask,
    make_image,
):
    members = {"a.json": ask(["video", "image"]), "a.0.png": make_image(), "a.1.png": make_image()}
    shard = write_shard(tmp_path / "a.tar", members)
    index = build_index(str(shard), two_media_chat, two_media_processors)
    save_index(index, tmp_path / "index")
    assert_equal(index, load_index(tmp_path / "index"))


def test_an_index_without_images_and_one_without_samples_can_be_saved(
    tmp_path: Path, chat: ChatTokenizer, processors: Processors, write_shard, ask
):
    for name, members in {"text": {"x.json": ask(0)}, "none": {"README": b""}}.items():
        shard = write_shard(tmp_path / f"{name}.tar", members)
        index = build_index(str(shard), chat, processors)
        save_index(index, tmp_path / name)
        assert_equal(index, load_index(tmp_path / name))


def test_a_current_index_is_loaded_and_a_stale_one_is_built_again(
    tmp_path: Path,
    chat: ChatTokenizer,
    processors: Processors,
    two_media_chat: ChatTokenizer,
    two_media_processors: Processors,
    write_shard,
    ask,
    make_image,
):
    write_shard(tmp_path / "a.tar", {"a.json": ask(1), "a.0.png": make_image(56, 56)})
    pattern = str(tmp_path / "*.tar")
    scans: list[tuple[int, int]] = []

    def load(with_chat: ChatTokenizer = chat, given: Processors = processors) -> Index:
        return load_or_build_index(
            pattern, with_chat, given, lambda done, total: scans.append((done, total))
        )

    def num_scans() -> int:
        count = sum(done == total for done, total in scans)
        scans.clear()
        return count

    assert load().item_rows.tolist() == [4]
    assert num_scans() == 1
    load()
    assert num_scans() == 0
    smaller = {"image": ImageProcessor(max_pixels=56 * 28, min_pixels=28 * 28)}
    assert load(given=smaller).item_rows.tolist() == [1]
    assert num_scans() == 1
    assert load(two_media_chat, two_media_processors).media == ("image", "video")
    assert num_scans() == 1
    # The order in which a recipe names its encoders does not matter.
    load(two_media_chat, dict(sorted(two_media_processors.items())))
    assert num_scans() == 0
    other = ChatTokenizer(chat.directory, {"image": "<|video_pad|>", "video": "<|image_pad|>"})
    nothing = load(other, two_media_processors)
    assert len(nothing) == 0
    assert "does not write the placeholders" in nothing.skipped[0].reason
    assert num_scans() == 1
    write_shard(tmp_path / "b.tar", {"b.json": ask(0)})
    assert load().keys.tolist() == ["a", "b"]
    assert num_scans() == 1
    # Two generations of parquet files never pile up.
    assert len(list(index_directory(pattern).glob("*.parquet"))) == 3


@pytest.mark.parametrize("damage", ["meta.json", "samples-*.parquet", "items-*.parquet"])
def test_a_damaged_index_is_refused_when_loaded_and_built_again_when_needed(
    tmp_path: Path, digits: Path, chat: ChatTokenizer, processors: Processors, damage: str
):
    shutil.copy(digits / "test-00000.tar", tmp_path)
    pattern = str(tmp_path / "test-*.tar")
    index = load_or_build_index(pattern, chat, processors)
    directory = index_directory(pattern)
    next(directory.glob(damage)).write_bytes(b"{}")
    with pytest.raises(ValueError, match="no usable index in"):
        load_index(directory)
    assert_equal(index, load_or_build_index(pattern, chat, processors))


def test_a_missing_shard_of_a_stored_index_is_named(
    tmp_path: Path, chat: ChatTokenizer, processors: Processors, write_shard, ask
):
    for name in "ab":
        write_shard(tmp_path / f"{name}.tar", {f"{name}.json": ask(0)})
    load_or_build_index(str(tmp_path / "*.tar"), chat, processors)
    (tmp_path / "b.tar").unlink()
    with pytest.raises(ValueError, match=r"shards of the index .* are missing: .*b\.tar; put them"):
        load_or_build_index(str(tmp_path / "*.tar"), chat, processors)


def test_different_patterns_have_different_index_folders():
    patterns = ["d/*.tar", "d/a*.tar", "d/a?.tar", "d/*/a.tar", "d/a.tar"]
    assert len({index_directory(pattern) for pattern in patterns}) == len(patterns)
