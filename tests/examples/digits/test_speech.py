"""Synthetic spoken digits: what the shards hold, and that they can be told apart."""

from __future__ import annotations

import json
import random
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data.modalities.audio import AudioClips, wav_bytes
from data.modalities.processor import Part
from data.text.chat import ChatTokenizer
from data.text.messages import MediaText
from examples.digits.scans import is_text_only
from examples.digits.speech import PLACEHOLDERS, Voice, prepare_spoken_digits, speak
from tests.data.conftest import build_index
from tests.examples.digits.test_scans import digests

COUNTS: dict[str, Any] = {"num_train": 64, "num_validation": 2, "num_test": 6}
CLIPS = AudioClips(num_mel_bins=40, tokens_per_row=4, max_seconds=4.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_spoken_digits(tmp_path_factory.mktemp("spoken") / "data", **COUNTS)


def test_shards_hold_a_clip_and_an_answer_or_text_alone(folder: Path) -> None:
    with tarfile.open(folder / "train-00000.tar") as tar:
        members = {one.name: tar.extractfile(one).read() for one in tar}  # type: ignore[union-attr]
    for number in range(COUNTS["num_train"]):
        key = f"train-{number:06d}"
        question, answer = json.loads(members[f"{key}.json"])["messages"]
        (text,) = answer["content"]
        assert all(word in "0123456789" for word in text["text"].split())
        assert (f"{key}.0.wav" in members) != is_text_only("train", number, COUNTS["num_train"])
        kinds = [part["type"] for part in question["content"]]
        assert (kinds == ["audio", "text"]) == (f"{key}.0.wav" in members)


def test_the_index_takes_every_sample_and_rows_follow_the_length(folder: Path) -> None:
    texts = {media: MediaText(token) for media, token in PLACEHOLDERS.items()}
    chat = ChatTokenizer(folder / "tokenizer", texts)
    index = build_index(str(folder / "train-*.tar"), chat, {"audio": CLIPS})
    assert (len(index), index.num_skipped) == (64, 0)
    assert set(index.column("item_size_1").tolist()) == {8_000}
    assert len(set(index.column("item_rows").tolist())) > 5
    np.testing.assert_array_equal(
        index.column("item_rows"), -(-2 * index.column("item_size_0") // 1280)
    )


def test_equal_arguments_give_equal_files_and_another_seed_others(
    folder: Path, tmp_path: Path
) -> None:
    again = prepare_spoken_digits(tmp_path / "again", **COUNTS)
    assert digests(again) == digests(folder)
    other = prepare_spoken_digits(tmp_path / "other", **COUNTS, seed=1)
    assert digests(other)["train-00000.tar"] != digests(folder)["train-00000.tar"]


def test_digits_sound_alike_from_one_voice_to_another_and_unlike_each_other() -> None:
    """The nearest spectrum, scaled to one length, of other voices names most digits."""

    def spectrum(digit: int, rng: random.Random) -> np.ndarray:
        clip = speak([digit], Voice.draw(rng), rng)
        decoded = CLIPS.decode(wav_bytes(clip, 8_000))
        frames = CLIPS.item_patches([decoded], Part(decoded.size), 0)
        loud = np.flatnonzero(frames.mean(1) > frames.mean())
        picked = np.linspace(loud[0], loud[-1], 8).astype(int)
        return frames[picked].ravel()

    known = {d: [spectrum(d, random.Random(f"{d}/{n}")) for n in range(12)] for d in range(10)}
    right = 0
    for digit in range(10):
        for n in range(4):
            heard = spectrum(digit, random.Random(f"new/{digit}/{n}"))
            nearest = {d: min(np.abs(heard - own).sum() for own in known[d]) for d in known}
            right += min(nearest, key=lambda d: nearest[d]) == digit
    assert right >= 32, f"{right} of 40"
