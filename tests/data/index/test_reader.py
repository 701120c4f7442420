from __future__ import annotations

import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

import data.index.reader
from data.index.reader import SampleReader, UnreadableSample
from data.index.samples import Processors
from data.index.shards import ShardChangedError
from data.modalities.image_files import open_image
from data.text.chat import ChatTokenizer
from tests.data.conftest import build_index


@contextmanager
def unnoticed(shard: Path) -> Iterator[None]:
    """A shard that is written inside has the same size and time as before."""
    before = shard.stat()
    yield
    os.utime(shard, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert shard.stat().st_size == before.st_size


@pytest.fixture(scope="module")
def reader(digits: Path, chat: ChatTokenizer, processors: Processors) -> SampleReader:
    index = build_index(str(digits / "train-*.tar"), chat, processors)
    return SampleReader(index, chat, processors)


def test_samples_and_patches_agree_with_the_index(reader: SampleReader):
    index = reader.index
    for i in range(len(index)):
        sample = reader.sample(i)
        assert len(sample.input_ids) == index.column("token_length", i)
        assert sample.loss_mask.sum() == index.column("loss_tokens", i)
        items = index.items_of_sample(i)
        placeholders = index.column("item_placeholder", np.array(items))
        assert sample.item_offsets.tolist() == placeholders.tolist()
        for item in items:
            patches = reader.patches(item)
            wire, rows = reader.media(item).wire, index.column("item_rows", item)
            assert patches.dtype == wire.dtype
            assert patches.shape == (np.prod(reader.plan(item).grid), wire.width)
            assert len(patches) == rows * 2**2  # the processors merge 2 x 2
            assert np.prod(reader.plan(item).row_grid) == rows


def test_messages_and_item_bytes_are_those_of_the_shard(reader: SampleReader):
    messages = reader.messages(0)
    assert [message["role"] for message in messages] == ["user", "assistant"]
    assert open_image(reader.read(0, 0)).size == reader.index.part(0).size


def test_threads_can_read_at_the_same_time_from_more_shards_than_stay_open(
    tmp_path: Path,
    chat: ChatTokenizer,
    processors: Processors,
    write_shard,
    ask,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(data.index.reader, "_MAX_OPEN_SHARDS", 2)
    for number in range(8):
        write_shard(tmp_path / f"{number}.tar", {f"k{number}.json": ask(0, answer=str(number))})
    index = build_index(str(tmp_path / "*.tar"), chat, processors)
    reader = SampleReader(index, chat, processors)

    def answer(i: int) -> str:
        sample = reader.sample(i)
        return chat.decode(sample.labels[sample.loss_mask == 1])

    order = np.random.default_rng(0).integers(0, 8, 300)
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(answer, order)) == [str(i) for i in order]


def test_a_corrupt_image_is_reported_with_shard_key_and_item(
    tmp_path: Path, chat: ChatTokenizer, processors: Processors, index_of, ask, make_image
):
    members = {
        "fine.json": ask(1),
        "fine.0.png": make_image(),
        "bad.json": ask(1),
        "bad.0.png": make_image(300, 300)[:4000],
    }
    reader = SampleReader(index_of(members), chat, processors)
    assert reader.patches(0).shape == (4, processors["image"].wire.width)
    with pytest.raises(UnreadableSample, match=r"'bad' of .*, item 0: .*cannot be decoded") as e:
        reader.patches(1)
    sample = e.value.sample
    assert (sample.shard, sample.key, sample.item) == (f"{tmp_path}/a.tar", "bad", 0)
    assert "truncated" in e.value.reason


def test_a_sample_that_differs_from_the_index_is_reported(
    tmp_path: Path, chat: ChatTokenizer, processors: Processors, write_shard, ask, make_image
):
    shard = tmp_path / "a.tar"
    write_shard(shard, {"a.json": ask(1, "1 2 3"), "a.0.bmp": make_image(28, 56, "BMP")})
    index = build_index(str(shard), chat, processors)
    document = json.loads(ask(1, "1 2"))
    same_size = json.dumps(document).encode().ljust(int(index.column("json_size", 0)))
    with unnoticed(shard):
        write_shard(shard, {"a.json": same_size, "a.0.bmp": make_image(56, 28, "BMP")})
    reader = SampleReader(index, chat, processors)
    with pytest.raises(UnreadableSample, match=r"the index says .* run `mimo data index`"):
        reader.sample(0)
    with pytest.raises(UnreadableSample, match="56 x 28 pixels, the index says 28 x 56"):
        reader.patches(0)


def test_items_are_cut_by_the_processor_of_their_media(
    tmp_path: Path,
    two_media_chat: ChatTokenizer,
    two_media_processors: Processors,
    write_shard,
    ask,
    make_image,
):
    shard = tmp_path / "a.tar"
    members = {
        "a.json": ask(["video", "image"]),
        "a.0.png": make_image(28, 56),
        "a.1.png": make_image(28, 56),
    }
    write_shard(shard, members)
    index = build_index(str(shard), two_media_chat, two_media_processors)
    reader = SampleReader(index, two_media_chat, two_media_processors)
    assert [reader.plan(item).grid for item in (0, 1)] == [(1, 8, 4), (1, 4, 2)]
    assert [reader.plan(item).row_grid for item in (0, 1)] == [(1, 4, 2), (1, 2, 1)]
    for item, media in enumerate(("video", "image")):
        assert reader.patches(item).shape[1] == two_media_processors[media].wire.width
    ids = reader.sample(0).input_ids
    for media, rows in {"video": 8, "image": 2}.items():
        assert (ids == two_media_chat.placeholder_ids[media]).sum() == rows


def test_a_shard_that_is_written_under_the_run_ends_it_and_one_that_vanished_does_not(
    tmp_path: Path, chat: ChatTokenizer, processors: Processors, write_shard, ask
):
    shard = write_shard(tmp_path / "a.tar", {"a.json": ask(0)})
    reader = SampleReader(build_index(str(shard), chat, processors), chat, processors)
    reader.sample(0)
    whole = shard.read_bytes()
    shard.write_bytes(whole[:600])
    with pytest.raises(ShardChangedError, match=r"a\.tar has changed .*`mimo data index`"):
        reader.sample(0)
    # As long as before: the text is not JSON any more, and that is not the sample's fault.
    shard.write_bytes(whole.replace(b'{"', b'""'))
    with pytest.raises(ShardChangedError, match="has changed"):
        reader.sample(0)
    shard.unlink()
    reader = SampleReader(reader.index, chat, processors)
    with pytest.raises(UnreadableSample, match="the shard cannot be read"):
        reader.sample(0)
