"""Crops of long images have the pixels and ids that transformers' Gemma-3 processor gives them."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

from data.index.reader import SampleReader
from data.modalities.images import PanAndScan, SquareImageProcessor
from data.modalities.processor import Part
from data.text.chat import ChatTokenizer
from tests.data.checkpoint_files import GEMMA_IMAGE, IMAGE_SIZE, hf_processor, write_folder
from tests.data.conftest import IndexOf

CROPS = PanAndScan(min_crop_size=32, max_num_crops=4, min_ratio=1.2)
OURS = SquareImageProcessor(IMAGE_SIZE, 14, merge_size=2, pan_and_scan=CROPS)
OPTIONS: dict[str, Any] = {
    "do_pan_and_scan": True,
    "pan_and_scan_min_crop_size": 32,
    "pan_and_scan_max_num_crops": 4,
    "pan_and_scan_min_ratio_to_activate": 1.2,
}
SIZES = [(100, 90), (100, 83), (130, 70), (64, 201), (333, 40), (60, 31), (50, 40), (1, 1)]


def noise(width: int, height: int, mode: str = "RGB") -> Image.Image:
    values = np.random.default_rng(width).integers(0, 256, (height, width, 4), dtype=np.uint8)
    return Image.fromarray(values).convert(mode)


def items_of(image: Image.Image) -> np.ndarray:
    """uint8 (items, 16, 588): patches of the image and of its crops."""
    part = Part(image.size)
    plan = OURS.plan(part)
    assert all(list(OURS.item_files(part, item)) == [0] for item in range(plan.num_items))
    return np.stack([OURS.item_patches([image], part, item) for item in range(plan.num_items)])


def to_patches(pixels: np.ndarray) -> np.ndarray:
    """(3, 56, 56) -> (16, 588), the 2 x 2 patches of one row adjacent."""
    blocks = pixels.reshape(3, 2, 2, 14, 2, 2, 14)
    return blocks.transpose(1, 4, 2, 5, 0, 3, 6).reshape(16, 588)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("mode", ["RGB", "RGBA"])
def test_an_image_and_its_crops_equal_transformers(size: tuple[int, int], mode: str):
    image = noise(*size, mode)
    options: dict[str, Any] = {"size": {"height": IMAGE_SIZE, "width": IMAGE_SIZE}} | OPTIONS
    expected = Gemma3ImageProcessorPil(**options)([image], return_tensors="np")
    items = items_of(image)
    assert len(items) == 1 + expected["num_crops"][0]
    for ours, pixels in zip(items, expected["pixel_values"], strict=True):
        np.testing.assert_array_equal(OURS.wire.values(ours), to_patches(pixels))


def test_the_sizes_above_have_from_no_to_four_crops():
    numbers = {OURS.plan(Part(size)).num_items - 1 for size in SIZES}
    assert numbers == {0, 2, 3, 4}


@settings(max_examples=200, deadline=None)
@given(
    st.tuples(st.integers(1, 400), st.integers(1, 400)),
    st.integers(1, 100),
    st.integers(1, 6),
    st.sampled_from([1.0, 1.2, 1.5, 3.0]),
)
def test_crops_are_those_of_transformers(
    size: tuple[int, int], smallest: int, most: int, ratio: float
):
    width, height = size
    # Each pixel is its own place.
    places = np.arange(height * width).reshape(1, height, width)
    expected = Gemma3ImageProcessorPil().pan_and_scan(places, smallest, most, ratio)
    assume(all(crop.size for crop in expected))  # transformers fails to resize an empty crop
    boxes = PanAndScan(smallest, most, ratio).crops(width, height)
    assert len(boxes) == len(expected)
    for (left, top, right, bottom), crop in zip(boxes, expected, strict=True):
        np.testing.assert_array_equal(places[:, top:bottom, left:right], crop)


def test_settings_change_the_fingerprint():
    others = [replace(OURS, pan_and_scan=None), replace(OURS, pan_and_scan=PanAndScan())]
    assert len({one.fingerprint() for one in [OURS, *others]}) == 3


def messages_of(images: list[Image.Image]) -> list[dict[str, Any]]:
    content: list[dict[str, Any]] = [{"type": "image", "image": image} for image in images]
    return [{"role": "user", "content": [*content, {"type": "text", "text": "what is this ?"}]}]


@pytest.mark.parametrize("sizes", [[(130, 70)], [(333, 40), (100, 90), (64, 201)], [(50, 40)]])
def test_token_ids_equal_transformers(tmp_path: Path, sizes: list[tuple[int, int]]):
    folder = write_folder("gemma3", tmp_path)
    images = [noise(*size) for size in sizes]
    expected = hf_processor("gemma3", folder).apply_chat_template(
        messages_of(images),
        tokenize=True,
        add_generation_prompt=True,
        return_dict=True,
        processor_kwargs=OPTIONS,
    )
    chat = ChatTokenizer(folder, {"image": GEMMA_IMAGE})
    plans = [OURS.plan(Part(size)) for size in sizes]
    rows = [plan.num_rows for plan in plans for _ in range(plan.num_items)]
    prompt = chat.encode_prompt(messages_of(images), rows, [plan.text for plan in plans])
    assert prompt.input_ids.tolist() == expected["input_ids"][0]
    assert len(prompt.item_offsets) == len(rows)


def test_crops_in_an_answer_and_what_introduces_them_are_not_learned(tmp_path: Path):
    chat = ChatTokenizer(write_folder("gemma3", tmp_path), {"image": GEMMA_IMAGE})
    plan = OURS.plan(Part((130, 70)))
    assert plan.num_items > 1
    content = [{"type": "text", "text": "the first"}, {"type": "image"}]
    messages = [{"role": "user", "content": "please"}, {"role": "assistant", "content": content}]
    sample = chat.encode(messages, [plan.num_rows] * plan.num_items, "k", [plan.text])
    learned = sample.labels[sample.loss_mask == 1].tolist()
    assert chat._backend.decode(learned, skip_special_tokens=False) == "the first<end_of_turn>"


def test_images_with_crops_go_through_index_and_reader(
    tmp_path: Path, index_of: IndexOf, monkeypatch: pytest.MonkeyPatch
):
    chat = ChatTokenizer(write_folder("gemma3", tmp_path / "t"), {"image": GEMMA_IMAGE})
    images = [noise(*size) for size in SIZES]
    members: dict[str, bytes] = {}
    for number, image in enumerate(images):
        buffer = io.BytesIO()
        image.save(buffer, "PNG")
        members[f"all.{number}.png"] = buffer.getvalue()
    content = [{"type": "image"} for _ in images]
    chats = [{"role": "user", "content": content}, {"role": "assistant", "content": "one"}]
    members["all.json"] = json.dumps({"messages": chats}).encode()
    index = index_of(members, chat, {"image": OURS})
    reader = SampleReader(index, chat, {"image": OURS})
    expected = np.concatenate([items_of(image) for image in images])
    assert index.num_items == len(expected) > len(images)
    assert len(index.files_of_sample(0)) == len(images)
    decode, decoded = SquareImageProcessor.decode, []

    def noted(media: SquareImageProcessor, data: bytes) -> Image.Image:
        decoded.append(data)
        return decode(media, data)

    monkeypatch.setattr(SquareImageProcessor, "decode", noted)
    for item, patches in enumerate(expected):
        np.testing.assert_array_equal(reader.patches(item), patches)
    assert len(decoded) == len(images), "not once for each crop"
    np.testing.assert_array_equal(reader.patches(len(expected) - 2), expected[-2])
    last = members[f"all.{len(images) - 1}.png"]
    assert (decoded[-1] == last) == (index.part(len(expected) - 2).size == SIZES[-1])
    sample = reader.sample(0)
    np.testing.assert_array_equal(sample.item_offsets, index.column("item_placeholder"))
