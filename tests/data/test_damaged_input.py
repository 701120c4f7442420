"""Every kind of damaged input is named with its reason, and every good sample around it arrives."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from data.index.reader import SampleReader, UnreadableSample
from data.index.samples import Processors, check_skipped
from data.index.shards import find_shards
from data.index.tar_shards import scan_shard
from data.modalities.images import ImageProcessor
from data.modalities.processor import Part
from data.text.chat import ChatTokenizer
from tests.data.conftest import build_index
from tests.data.damaged import BAD, END, ODD, SHARDS, about, member, saved
from tests.data.damaged import chat as chat_json

IMAGE = ImageProcessor(min_pixels=28 * 28)
PROCESSORS: Processors = {"image": IMAGE}
MAX_GROWTH = 250 * 2**20  # bytes of memory, over all kinds of bad samples


def good(number: int) -> bytes:
    """A sample with a picture of its own."""
    data = saved("PNG", 28 * (1 + number), 56)
    return member(f"good{number}.json", about("image")) + member(f"good{number}.0.png", data)


def read(path: Path, chat: ChatTokenizer) -> tuple[set[str], dict[str, str]]:
    """The keys of samples whose tokens and pixels are right, and the reasons of the bad ones."""
    index = build_index(str(path), chat, PROCESSORS)
    reader = SampleReader(index, chat, PROCESSORS)
    arrived, bad = set(), {one.key: one.reason for one in index.skipped_samples()}
    for number in range(len(index)):
        key = index.key(number)
        try:
            sample = reader.sample(number)
            patches = [reader.patches(item) for item in index.items_of_sample(number)]
        except UnreadableSample as error:
            bad[error.sample.key] = error.reason
            continue
        if key.startswith("good"):
            width, height = size = 28 * (1 + int(key[4:])), 56
            noise = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
            expected = IMAGE.item_patches([Image.fromarray(noise)], Part(size), 0)
            np.testing.assert_array_equal(patches[0], expected)
            messages = json.loads(about("image"))["messages"]
            rows = [IMAGE.plan(Part(size)).num_rows]
            np.testing.assert_array_equal(
                sample.input_ids, chat.encode(messages, rows, key).input_ids
            )
        arrived.add(key)
    return arrived, bad


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_sample_is_named_and_the_good_ones_around_it_arrive(
    tmp_path: Path, chat: ChatTokenizer, kind: str
):
    one, path = BAD[kind], tmp_path / "a.tar"
    path.write_bytes(good(0) + one.members() + good(1) + END)
    arrived, bad = read(path, chat)
    assert arrived == {"good0", "good1"}
    assert list(bad) == [one.key]
    assert one.reason in bad[one.key]
    assert len(bad[one.key]) <= 1000
    assert bad[one.key].isprintable()
    in_index = [*build_index(str(path), chat, PROCESSORS).skipped_samples()]
    assert len(in_index) == (0 if one.decoded else 1)


@pytest.mark.parametrize("kind", ODD)
def test_an_odd_but_good_sample_arrives(tmp_path: Path, chat: ChatTokenizer, kind: str):
    path = tmp_path / "a.tar"
    path.write_bytes(good(0) + ODD[kind]() + good(1) + END)
    arrived, bad = read(path, chat)
    assert not bad
    (odd,) = arrived - {"good0", "good1"}
    assert odd.endswith("odd")
    (raw,) = [one for one in scan_shard(find_shards(str(path))[0], {"png"}) if one.key == odd]
    assert raw.json is not None
    stored = path.read_bytes()[raw.json.offset : raw.json.offset + raw.json.size]
    assert b'"role"' in stored.replace(b"\0", b"")


@pytest.mark.parametrize("kind", SHARDS)
def test_a_damaged_shard_is_refused_by_name(tmp_path: Path, chat: ChatTokenizer, kind: str):
    path = tmp_path / "a.tar"
    path.write_bytes(SHARDS[kind](good(0)))
    with pytest.raises(ValueError, match=r"shard .*a\.tar is not a whole uncompressed tar"):
        build_index(str(path), chat, PROCESSORS)


@pytest.mark.slow
def test_no_kind_of_bad_sample_takes_much_memory(tmp_path: Path, digits: Path):
    for number, one in enumerate(BAD.values()):
        (tmp_path / f"{number:02}.tar").write_bytes(good(0) + one.members() + END)
    done = subprocess.run(
        [sys.executable, "-m", "tests.data.test_damaged_input", digits / "tokenizer", tmp_path],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    growth, bad = map(int, done.stdout.split())
    assert bad == len(BAD)
    assert growth < MAX_GROWTH


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _grow(folder: str, shards: str) -> None:
    """Print how much memory it takes to read all shards, and how many samples are bad."""
    tokenizer = ChatTokenizer(folder)
    paths = sorted(Path(shards).glob("*.tar"))
    (Path(shards) / "good").write_bytes(good(0) + END)
    read(Path(shards) / "good", tokenizer)
    before = _peak()
    bad = [read(path, tokenizer)[1] for path in paths]
    print(_peak() - before, sum(map(len, bad)))


def test_too_large_a_share_of_unusable_samples_names_limit_and_worst_shards(
    tmp_path: Path, chat: ChatTokenizer
):
    for name, num_bad in (("a", 3), ("b", 9)):
        members = [member(f"s{n}.json", b"{" if n < num_bad else chat_json()) for n in range(100)]
        (tmp_path / f"{name}.tar").write_bytes(b"".join(members) + END)
    index = build_index(str(tmp_path / "*.tar"), chat, PROCESSORS)
    check_skipped(index, 12 / 200)
    with pytest.raises(ValueError, match=r"12 of 200 samples are unusable, 6\.00%") as e:
        check_skipped(index, 11 / 200)
    assert "above max_skipped_fraction 0.055" in str(e.value)
    assert f"the worst shards: {tmp_path}/b.tar (9), {tmp_path}/a.tar (3)" in str(e.value)
    assert "malformed JSON" in str(e.value)
    few = build_index(str(tmp_path / "a.tar"), chat, PROCESSORS)
    check_skipped(few, 0.0)  # too few samples for a share to say something


if __name__ == "__main__":
    _grow(*sys.argv[1:])
