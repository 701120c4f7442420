"""What is on disk of an index: files per shard and a catalog, which are current or built again."""

from __future__ import annotations

import os
import pickle
import shutil
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data.index.build import IndexTask, build_here
from data.index.samples import Index, Processors
from data.index.shard_index import COLUMNS, ColumnFile, DamagedFileError, write_columns
from data.index.store import load_or_build_index
from data.modalities.images import ImageProcessor
from data.text.chat import ChatTokenizer
from data.text.messages import MediaText
from tests.data.conftest import build_index


def assert_equal(one: Index, other: Index):
    assert (one.media, [*one.skipped_samples()]) == (other.media, [*other.skipped_samples()])
    for name, of in COLUMNS.items():
        if of != "bytes":
            np.testing.assert_array_equal(one.column(name), other.column(name), err_msg=name)
    assert [*map(one.key, range(len(one)))] == [*map(other.key, range(len(other)))]


class Opener:
    """Opens the index of a pattern, and notes which shards it had to index."""

    def __init__(self, pattern: str, chat: ChatTokenizer, processors: Processors) -> None:
        self.pattern, self.chat, self.processors = pattern, chat, processors
        self.indexed: list[str] = []

    def __call__(
        self, chat: ChatTokenizer | None = None, processors: Processors | None = None
    ) -> Index:
        chat, processors = chat or self.chat, processors or self.processors
        self.indexed.clear()

        def build(tasks: Sequence[IndexTask], *rest: Any) -> None:
            self.indexed += [Path(task.shard.path).name for task in tasks]
            build_here(tasks, *rest)

        return load_or_build_index(self.pattern, chat, processors, build=build)


@pytest.fixture
def open_index(
    tmp_path: Path, chat: ChatTokenizer, processors: Processors, write_shard, ask, make_image
) -> Opener:
    """Of two shards: of a.tar and b.tar, one with an unusable sample."""
    write_shard(tmp_path / "a.tar", {"a.json": ask(1), "a.0.png": make_image(56, 56)})
    members = {"b.json": ask(2), "b.0.png": make_image(), "b.1.png": make_image(28, 56)}
    write_shard(tmp_path / "b.tar", {**members, "text.json": ask(0), "bad.json": b"{"})
    return Opener(str(tmp_path / "*.tar"), chat, processors)


def test_a_stored_index_opens_equal_and_moves_with_its_shards(
    tmp_path: Path, digits: Path, chat: ChatTokenizer, processors: Processors, write_shard, ask
):
    home = tmp_path / "home"
    home.mkdir()
    shutil.copy(digits / "validation-00000.tar", home)
    write_shard(home / "validation-1.tar", {"x.json": ask(0), "bad.json": b"{"})
    open_index = Opener(str(home / "validation-*.tar"), chat, processors)
    index = open_index()
    assert index.num_skipped == 1
    assert len(open_index.indexed) == 2
    assert_equal(open_index(), index)
    assert open_index.indexed == []
    open_index.pattern = str(home.rename(tmp_path / "moved") / "validation-*.tar")
    moved = open_index()
    assert open_index.indexed == []
    assert moved.shards == tuple(s.replace("/home/", "/moved/") for s in index.shards)
    for name in ("token_length", "item_rows"):
        np.testing.assert_array_equal(moved.column(name), index.column(name))


def test_an_index_is_equal_to_one_that_is_not_stored_and_to_its_copy_in_another_process(
    open_index: Opener,
):
    index = open_index()
    assert_equal(index, build_index(open_index.pattern, open_index.chat, open_index.processors))
    data = pickle.dumps(index)
    assert len(data) < 1000
    assert_equal(pickle.loads(data), index)
    # Another catalog numbers samples otherwise, so it does not take the place of the first.
    first = Path(index.shards[0])
    shutil.copy(first, first.with_name("0.tar"))
    open_index()
    with pytest.raises(DamagedFileError, match="replaced while it was in use"):
        pickle.loads(data)
    assert index.key(0) == "a"


def test_items_and_files_are_numbered_through_all_shards(open_index: Opener):
    index = open_index()
    assert [*map(index.key, range(3))] == ["a", "b", "text"]
    assert index.column("item_start").tolist() == [0, 1, 3, 3]
    assert index.column("item_file").tolist() == [0, 1, 2]
    assert index.column("shard", np.array([2, 0, 1])).tolist() == [1, 0, 1]
    assert [index.sample_of_item(item) for item in range(3)] == [0, 1, 1]
    assert [*index.items_of_sample(1)] == [*index.files_of_sample(1)] == [1, 2]
    assert [*index.items_of_sample(2)] == [*index.files_of_sample(2)] == []
    assert index.column("item_rows", np.array([[2, 0], [1, 1]])).tolist() == [[2, 4], [1, 1]]
    assert (index.most_rows, index.num_skipped, next(index.skipped_samples()).key) == (4, 1, "bad")


def test_only_new_and_changed_shards_are_indexed_again(
    tmp_path: Path, open_index: Opener, write_shard, ask
):
    open_index()
    assert open_index.indexed == ["a.tar", "b.tar"]
    write_shard(tmp_path / "c.tar", {"c.json": ask(0)})
    assert len(open_index()) == 4
    assert open_index.indexed == ["c.tar"]
    write_shard(tmp_path / "a.tar", {"a1.json": ask(0), "a2.json": ask(0)})
    assert [*map(open_index().key, range(5))] == ["a1", "a2", "b", "text", "c"]
    assert open_index.indexed == ["a.tar"]
    os.utime(tmp_path / "b.tar", ns=(0, 0))  # of the same size, but written at another time
    open_index()
    assert open_index.indexed == ["b.tar"]
    other = Opener(str(tmp_path / "[ab].tar"), open_index.chat, open_index.processors)
    assert len(other()) == 4
    assert other.indexed == []


def test_indexes_of_different_settings_live_side_by_side(
    open_index: Opener, two_media_chat: ChatTokenizer, two_media_processors: Processors
):
    smaller = {"image": ImageProcessor(max_pixels=56 * 28, min_pixels=28 * 28)}
    other = ChatTokenizer(
        two_media_chat.directory,
        {"image": MediaText("<|video_pad|>"), "video": MediaText("<|image_pad|>")},
    )
    settings = [
        (open_index.chat, open_index.processors),
        (open_index.chat, smaller),
        (two_media_chat, two_media_processors),
        (other, two_media_processors),
    ]
    indexes = [open_index(*one) for one in settings]
    assert [index.column("item_rows")[:1].tolist() for index in indexes] == [[4], [1], [4], []]
    assert "does not write the placeholders" in next(indexes[3].skipped_samples()).reason
    for one, index in zip(settings, indexes, strict=True):
        assert_equal(open_index(*one), index)
        assert open_index.indexed == []
    # The order in which a recipe names its encoders does not matter.
    open_index(two_media_chat, dict(sorted(two_media_processors.items())))
    assert open_index.indexed == []


def test_an_index_of_another_version_is_built_again_with_a_word(
    open_index: Opener, monkeypatch: pytest.MonkeyPatch
):
    open_index()
    monkeypatch.setattr("data.index.samples.INDEX_VERSION", 6)
    with pytest.warns(UserWarning, match="is indexed again: its index in .* of another version"):
        open_index()
    assert open_index.indexed == ["a.tar", "b.tar"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        open_index()


def _flip(path: Path, position: int, bits: int = 0xFF) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= bits
    path.write_bytes(data)


def _files(open_index: Opener) -> Iterator[Path]:
    (home,) = (Path(open_index.pattern).parent / ".index").iterdir()
    yield from (home / "b.tar.index", *home.glob("*.catalog"))


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("damage", ["magic", "version", "header", "column", "cut", "empty", "else"])
def test_a_damaged_file_is_built_again_with_a_word(open_index: Opener, which: int, damage: str):
    index = open_index()
    path = [*_files(open_index)][which]
    match damage:
        case "magic" | "version" | "header" | "column":
            _flip(path, {"magic": 0, "version": 8, "header": 60, "column": -70}[damage])
        case "cut":
            path.write_bytes(path.read_bytes()[:-64])
        case "empty":
            path.write_bytes(b"")
        case "else":
            path.write_bytes(b"PAR1" * 1000)
    with pytest.warns(UserWarning, match=rf"again: the index file .*{path.name} is damaged"):
        again = open_index()
    assert open_index.indexed == (["b.tar"] if which == 0 else [])
    assert_equal(again, build_index(open_index.pattern, open_index.chat, open_index.processors))
    assert again.catalog.identity == index.catalog.identity
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        open_index()


def test_damage_after_opening_is_noticed_where_it_is_read_first(open_index: Opener):
    index, other, third = open_index(), open_index(), open_index()
    path, _ = _files(open_index)
    file = ColumnFile(path)
    _flip(path, int(file.specs["keys"]["offset"]))
    assert index.column("token_length").tolist() == other.column("token_length").tolist()
    with pytest.raises(DamagedFileError, match=r"b\.tar\.index is damaged .*checksum of keys"):
        index.key(1)
    path.unlink()
    with pytest.raises(DamagedFileError, match=r"b\.tar\.index"):
        third.key(1)
    assert other.column("item_rows").tolist() == [4, 1, 2]  # mapped while it was there


def test_where_no_shard_is_no_folder_is_made(tmp_path: Path, open_index: Opener) -> None:
    nowhere = Opener(f"{tmp_path}/nowhere/*.tar", open_index.chat, open_index.processors)
    with pytest.raises(ValueError, match="no shard matches"):
        nowhere()
    assert not (tmp_path / "nowhere").exists()


def test_a_missing_shard_of_a_stored_index_is_named(tmp_path: Path, open_index: Opener):
    open_index()
    (tmp_path / "b.tar").unlink()
    with pytest.raises(
        ValueError, match=r"shards of the index .* are missing: .*b\.tar; put"
    ) as found:
        open_index()
    catalog = Path(str(found.value).split("index ")[1].split(" are")[0])
    catalog.unlink()  # as the message says
    assert len(open_index()) == 1
    assert open_index.indexed == []


def test_where_the_shards_folder_cannot_be_written_the_cache_has_the_index(
    tmp_path: Path, open_index: Opener
):
    (tmp_path / ".index").write_text("a file, so that no folder can be made here")
    chat, processors, cache = open_index.chat, open_index.processors, tmp_path / "cache"
    with pytest.raises(ValueError, match=r"stored neither beside .* nor in data\.cache_directory"):
        load_or_build_index(open_index.pattern, chat, processors)
    stored = load_or_build_index(open_index.pattern, chat, processors, cache=cache)
    assert stored.catalog.path.is_relative_to(cache)
    assert_equal(stored, build_index(open_index.pattern, chat, processors))

    def build(*_: object) -> None:
        raise AssertionError("it is there")

    load_or_build_index(open_index.pattern, chat, processors, cache=cache, build=build)


def test_samples_that_are_misread_keep_only_their_own_shard_out_of_the_index(
    tmp_path: Path, open_index: Opener, write_shard, ask
):
    for name in "cd":
        write_shard(tmp_path / f"{name}.tar", {f"{n}.json": ask(1) for n in range(6)})
    (tmp_path / "e.tar").write_bytes(b"no tar file")
    with pytest.raises(ValueError, match="12 samples have more or fewer placeholders") as found:
        open_index()
    assert "d.tar: 3: 1 / 0" in str(found.value)
    assert "and 2 more" in str(found.value)
    assert "shard " in str(found.value)
    assert "e.tar is not a whole" in str(found.value)
    with pytest.raises(ValueError, match="12 samples have more or fewer placeholders"):
        open_index()
    assert open_index.indexed == ["c.tar", "d.tar", "e.tar"]
    for name in "cde":
        (tmp_path / f"{name}.tar").unlink()
    assert len(open_index()) == 3
    assert open_index.indexed == []


def test_columns_of_equal_steps_take_no_room(tmp_path: Path):
    n = 100_000
    columns = {
        "constant": np.full(n, 7),
        "counting": np.arange(n) * 3 + 5,
        "fps": np.full(n, 2.5),
        "small": np.arange(n) % 200,
        "wide": np.arange(n) ** 2 + 2**40,
        "floats": np.linspace(0, 1, n) ** 2,
        "bytes": np.full(n, 3, np.uint8),
    }
    write_columns(tmp_path / "x", {"a": 1}, columns)
    file = ColumnFile(tmp_path / "x")
    assert file.facts == {"a": 1}
    for name, values in columns.items():
        np.testing.assert_array_equal(file.values(name), values)
    assert len(file.bytes) < n * (1 + 8 + 8 + 1) + 2000
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_shards_outside_of_the_folder_of_their_pattern_are_refused(
    tmp_path: Path, chat: ChatTokenizer, processors: Processors, write_shard, ask
) -> None:
    for folder in ("a/in", "b"):
        (tmp_path / folder).mkdir(parents=True)
    for folder in ("a", "b"):
        write_shard(tmp_path / folder / "x.tar", {"one.json": ask(0)})
    pattern = str(tmp_path / "a" / "in" / "{../x.tar,../../b/x.tar}")
    with pytest.raises(ValueError, match="names shards outside of .* as a source of its own"):
        load_or_build_index(pattern, chat, processors)
