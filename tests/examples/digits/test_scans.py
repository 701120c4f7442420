from __future__ import annotations

import hashlib
import json
import random
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from webdataset.compat import WebDataset

from data.modalities.image_files import open_image
from data.modalities.images import ImageProcessor
from data.text.chat import ChatTokenizer
from examples.digits.conversations import image_conversation, text_conversation
from examples.digits.scans import (
    CANVASES,
    TEXT_RUN,
    draw_digit,
    is_text_only,
    load_scans,
    prepare_digits,
    split_of_scan,
)
from tests.data.conftest import build_index


def digests(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and ".index" not in path.parts
    }


def bounding_box(image: Image.Image) -> tuple[int, int, int, int] | None:
    return image.point([255 * (value > 60) for value in range(256)]).getbbox()


def test_shards_are_plain_webdataset_and_hold_what_they_promise(digits: Path):
    samples = list(WebDataset(str(digits / "train-00000.tar"), shardshuffle=False))
    assert len(samples) == 96
    for number, sample in enumerate(samples):
        document = json.loads(sample["json"])
        images = [open_image(sample[f"{k}.png"]) for k in range(document["images"])]
        assert all(image.size in CANVASES for image in images)
        placeholders = [p for p in document["messages"][0]["content"] if p["type"] == "image"]
        assert len(placeholders) == len(images)
        assert document["messages"][1]["content"][0]["text"] == document["answer"]
        assert (not images) == is_text_only("train", number, 96)
        if images:
            assert len(document["answer"].split()) == len(images)


def test_text_only_samples_come_in_aligned_runs_of_about_one_eighth():
    text_only = np.array([is_text_only("train", number, 16000) for number in range(16000)])
    runs = text_only.reshape(-1, TEXT_RUN)
    assert (runs.all(axis=1) | ~runs.any(axis=1)).all()
    assert 0.11 < text_only.mean() < 0.14
    for count in (200, 300):
        held_out = [is_text_only("test", number, count) for number in range(count)]
        assert np.flatnonzero(held_out).tolist() == list(range(32, 48))


def test_the_splits_share_no_scan():
    splits = [split_of_scan(number) for number in range(1797)]
    assert {name: splits.count(name) for name in set(splits)} == {
        "test": 360,
        "validation": 90,
        "train": 1347,
    }
    assert all(splits[number] == "test" for number in range(0, 1797, 5))
    sizes = {name: len(load_scans(name)[1]) for name in ("train", "validation", "test")}
    assert sum(sizes.values()) == 1797


def test_an_image_shows_the_scan_it_was_drawn_from():
    scans, _ = load_scans("test")
    rng = random.Random(0)
    likeness: list[float] = []
    for number in range(100):
        scan = scans[number]
        canvas = rng.choice(list(CANVASES))
        image = draw_digit(scan, canvas, rng, augment=True)
        assert (image.size, image.mode) == (canvas, "L")
        # Cut the digit out by its bounding box: it looks like the scan, of whatever size and place.
        box = bounding_box(image)
        original = Image.fromarray(scan)
        original_box = bounding_box(original)
        one, two = (
            np.asarray(picture.crop(part).resize((8, 8), Image.Resampling.BILINEAR), dtype=float)
            for picture, part in ((image, box), (original, original_box))
        )
        likeness.append(float(np.corrcoef(one.ravel(), two.ravel())[0, 1]))
    # Cutting 8 x 8 scans at a threshold is coarse: single ones differ, most agree.
    assert np.median(likeness) > 0.88
    assert min(likeness) > 0.4


def test_rows_per_image_average_about_two(digits: Path, chat: ChatTokenizer):
    index = build_index(
        str(digits / "train-*.tar"), chat, {"image": ImageProcessor(min_pixels=28 * 28)}
    )
    assert set(index.column("item_rows").tolist()) == {1, 2, 4}
    assert 1.5 < index.column("item_rows").mean() < 2.3


def test_the_tokenizer_knows_every_word_of_the_data(digits: Path, chat: ChatTokenizer):
    unknown = chat._backend.token_to_id("<|unknown|>")
    rng = random.Random(0)
    for _ in range(500):
        count = rng.randrange(1, 5)
        picture = image_conversation([rng.randrange(10) for _ in range(count)], rng)
        for images, messages in ((count, picture), (0, text_conversation(rng))):
            encoded = chat.encode(messages, [1] * images, "k")
            answer = messages[1]["content"][0]["text"]
            assert unknown not in encoded.input_ids
            learned = encoded.labels[encoded.loss_mask == 1]
            assert chat.decode(learned) == answer
            assert len(learned) == len(answer.split()) + 1  # one token per digit


def test_questions_typed_without_spaces_mean_the_same(chat: ChatTokenizer):
    typed, spaced = (
        chat.encode_prompt([{"role": "user", "content": text}], []).input_ids.tolist()
        for text in ("what comes after 4?", "what comes after 4 ?")
    )
    assert typed == spaced


def test_equal_settings_give_equal_files_and_a_second_call_does_nothing(tmp_path: Path):
    first = prepare_digits(tmp_path / "a", 40, 4, 4, seed=1)
    second = prepare_digits(tmp_path / "b", 40, 4, 4, seed=1)
    assert digests(first) == digests(second)
    before = {path: path.stat().st_mtime_ns for path in first.rglob("*")}
    steps: list[tuple[int, int]] = []
    prepare_digits(tmp_path / "a", 40, 4, 4, seed=1, progress=lambda *step: steps.append(step))
    assert not steps
    assert {path: path.stat().st_mtime_ns for path in first.rglob("*")} == before
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b"}


def test_other_settings_replace_the_data_and_report_progress_to_the_end(tmp_path: Path):
    folder = prepare_digits(tmp_path / "a", 40, 4, 4)
    before = digests(folder)
    steps: list[tuple[int, int]] = []
    prepare_digits(folder, 40, 4, 5, seed=2, progress=lambda *step: steps.append(step))
    assert steps[-1] == (49, 49)
    after = digests(folder)
    assert before["train-00000.tar"] != after["train-00000.tar"]
    assert before["tokenizer/tokenizer.json"] == after["tokenizer/tokenizer.json"]


def test_data_of_another_version_of_the_generator_is_replaced(tmp_path: Path):
    folder = prepare_digits(tmp_path / "a", 40, 4, 4)
    template = folder / "tokenizer" / "chat_template.jinja"
    template.write_text("of the older version")
    marker = json.loads((folder / ".complete").read_text())
    marker["version"] -= 1
    (folder / ".complete").write_text(json.dumps(marker))
    prepare_digits(folder, 40, 4, 4)
    assert "<|video_pad|>" in template.read_text()


def test_a_folder_with_other_things_is_never_replaced(tmp_path: Path):
    (tmp_path / "precious.txt").write_text("mine")
    with pytest.raises(ValueError, match="holds other files"):
        prepare_digits(tmp_path, 4, 4, 4)
    assert [path.name for path in tmp_path.iterdir()] == ["precious.txt"]


def test_a_run_that_fails_leaves_nothing_behind(tmp_path: Path):
    def fail(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare_digits(tmp_path / "a", 4, 4, 4, progress=fail)
    assert list(tmp_path.iterdir()) == []


def test_an_empty_split_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="need at least 1 of each"):
        prepare_digits(tmp_path / "a", 4, 0, 4)
