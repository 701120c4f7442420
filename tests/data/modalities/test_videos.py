"""Videos have the pixels, ids and positions that transformers gives the same frames."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import PreTrainedTokenizerFast, Qwen2_5_VLConfig, Qwen3VLConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel

from data.batch import mrope_position_ids
from data.index.reader import SampleReader
from data.modalities.images import ImageProcessor
from data.modalities.processor import Part
from data.modalities.videos import TimedVideoProcessor, VideoProcessor
from data.text.chat import ChatTokenizer
from data.text.messages import MediaText
from tests.data.checkpoint_files import hf_processor, write_folder
from tests.data.conftest import Ask, IndexOf, MakeImage
from tests.data.video_oracle import video_patches

HALF = (0.5, 0.5, 0.5)
SIZES = [(60, 40), (200, 133), (29, 57), (28, 28), (300, 222), (17, 90)]
VIDEO_START, VIDEO_END = "<|vision_start|>", "<|vision_end|>"


@dataclass(frozen=True)
class Family:
    """Ours, and the names and options of the same in transformers."""

    ours: VideoProcessor
    video_text: MediaText
    video_module: str
    options: dict[str, Any]


FAMILIES = {
    "qwen2_5_vl": Family(
        VideoProcessor(min_pixels=28 * 28 * 4, max_pixels=28 * 28 * 20, tokens_per_second=4),
        MediaText("<|video_pad|>"),
        "qwen2_vl",
        {"min_pixels": 28 * 28 * 4, "max_pixels": 28 * 28 * 20},
    ),
    "qwen3_vl": Family(
        TimedVideoProcessor(16, 2, 2, 4 * 32 * 32, 40 * 32 * 32, HALF, HALF),
        MediaText("<|video_pad|>", item_text=f"{VIDEO_START}{{placeholder}}{VIDEO_END}"),
        "qwen3_vl",
        {"size": {"shortest_edge": 4 * 32 * 32, "longest_edge": 40 * 32 * 32}},
    ),
}


@pytest.fixture(params=FAMILIES)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def family(name: str) -> Family:
    return FAMILIES[name]


def frames(count: int, width: int, height: int, seed: int = 0) -> list[Image.Image]:
    values = np.random.default_rng(seed).integers(0, 256, (count, height, width, 3), dtype=np.uint8)
    return [Image.fromarray(one) for one in values]


def patches_of(ours: VideoProcessor, images: list[Image.Image], part: Part) -> np.ndarray:
    """All items of a video, one after the other."""
    items = range(ours.plan(part).num_items)
    chosen = [[images[file] for file in ours.item_files(part, item)] for item in items]
    return np.concatenate([ours.item_patches(own, part, k) for k, own in enumerate(chosen)])


@pytest.mark.parametrize("count", [2, 3, 4, 7, 12])
@pytest.mark.parametrize("size", SIZES)
def test_patches_and_grid_equal_transformers(family: Family, size: tuple[int, int], count: int):
    images = frames(count, *size)
    expected, grid = video_patches(family.video_module, images, **family.options)
    part = Part(size, count)
    plan = family.ours.plan(part)
    assert (plan.num_items * plan.grid[0], *plan.grid[1:]) == grid
    patches = patches_of(family.ours, images, part)
    assert patches.dtype == np.uint8
    np.testing.assert_array_equal(family.ours.wire.values(patches), expected)
    assert plan.num_items * plan.num_rows * 4 == len(patches)


def test_a_single_frame_is_repeated(family: Family):
    (image,) = frames(1, 60, 40)
    part, twice = Part((60, 40), 1), Part((60, 40), 2)
    assert family.ours.plan(part).grid == family.ours.plan(twice).grid
    np.testing.assert_array_equal(
        patches_of(family.ours, [image], part), patches_of(family.ours, [image, image], twice)
    )


def test_an_encoder_of_images_refuses_several_frames():
    with pytest.raises(ValueError, match="part of 2 frames, but need a still image"):
        ImageProcessor().plan(Part((60, 40), 2))


def test_limits_bound_the_frame_in_qwen2_5_and_the_whole_video_in_qwen3():
    two, twenty = Part((200, 200), 2), Part((200, 200), 20)
    ours = FAMILIES["qwen2_5_vl"].ours
    assert ours.frame_size(two) == ours.frame_size(twenty)
    ours = FAMILIES["qwen3_vl"].ours
    assert np.prod(ours.frame_size(two)) > 4 * np.prod(ours.frame_size(twenty))


# ---------------------------------------------------------------- token ids and positions


@dataclass(frozen=True)
class Clip:
    """A content part: a video of so many frames, or an image."""

    count: int
    size: tuple[int, int]
    fps: float = 2.0

    @property
    def is_video(self) -> bool:
        return self.count > 0

    def part(self) -> Part:
        return Part(self.size, max(self.count, 1), self.fps)

    def content(self) -> dict[str, Any]:
        if not self.is_video:
            return {"type": "image"}
        return {"type": "video", "frames": self.count, "fps": self.fps}


IMAGES = ImageProcessor(min_pixels=28 * 28, max_pixels=28 * 28 * 20)
CHATS = {
    "one video": [Clip(4, (60, 40))],
    "an odd number of frames": [Clip(7, (60, 40), fps=1.5)],
    "images and videos": [
        Clip(0, (60, 40)),
        Clip(6, (29, 57), fps=3.0),
        Clip(0, (90, 30)),
        Clip(2, (120, 90), fps=24.0),
    ],
    "a slow video": [Clip(8, (28, 28), fps=0.3)],
}


def messages_of(clips: list[Clip], answer: str | None = None) -> list[dict[str, Any]]:
    content = [part for clip in clips for part in (clip.content(), {"type": "text", "text": "and"})]
    messages: list[dict[str, Any]] = [{"role": "user", "content": content}]
    return [*messages, {"role": "assistant", "content": answer}] if answer else messages


def processors_of(family: Family) -> dict[str, ImageProcessor]:
    cut = family.ours.patch_size, family.ours.merge_size
    images = ImageProcessor(*cut, min_pixels=28 * 28, max_pixels=28 * 28 * 20)
    return {"image": images, "video": family.ours}


def model_of(name: str) -> torch.nn.Module:
    text = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2}
    vision |= {"out_hidden_size": 64, "spatial_merge_size": 2}
    if name == "qwen2_5_vl":
        rope = {"rope_type": "default", "mrope_section": [2, 3, 3]}
        vision |= {"window_size": 56, "tokens_per_second": 4}
        config = Qwen2_5_VLConfig(text_config=text | {"rope_scaling": rope}, vision_config=vision)
        return Qwen2_5_VLModel(config)
    rope = {"rope_type": "default", "mrope_section": [4, 2, 2], "mrope_interleaved": True}
    text |= {"head_dim": 16, "rope_scaling": rope}
    vision |= {"deepstack_visual_indexes": [0]}
    return Qwen3VLModel(Qwen3VLConfig(text_config=text, vision_config=vision))


@pytest.mark.parametrize("chat_name", CHATS)
def test_token_ids_and_positions_equal_transformers(
    name: str, family: Family, tmp_path: Path, chat_name: str
):
    clips = CHATS[chat_name]
    folder = write_folder(name, tmp_path)
    processors = processors_of(family)
    plans = [
        (clip, processors["video" if clip.is_video else "image"].plan(clip.part()))
        for clip in clips
    ]
    chat = ChatTokenizer(folder, {"image": MediaText("<|image_pad|>"), "video": family.video_text})
    counts = [plan.num_rows for _, plan in plans for _ in range(plan.num_items)]
    texts = [plan.text for _, plan in plans]
    prompt = chat.encode_prompt(messages_of(clips), counts, texts)

    ids, grids, seconds = transformers_ids(name, folder, clips, plans)
    assert prompt.input_ids.tolist() == ids

    types = torch.zeros(1, len(ids), dtype=torch.int32)
    for media, number in {"image": 1, "video": 2}.items():
        is_media = prompt.input_ids == chat.placeholder_ids[media]
        types[0, torch.from_numpy(is_media)] = number
    expected, _ = model_of(name).get_rope_index(  # pyright: ignore[reportCallIssue]
        input_ids=torch.tensor([ids]),
        mm_token_type_ids=types,
        second_per_grid_ts=torch.tensor(seconds) if seconds else None,
        **{f"{media}_grid_thw": torch.tensor(own) for media, own in grids.items() if own},
    )
    positions = mrope_position_ids(
        [len(ids)],
        prompt.item_offsets,
        [plan.row_grid for _, plan in plans for _ in range(plan.num_items)],
        [plan.time_step for _, plan in plans for _ in range(plan.num_items)],
    )
    np.testing.assert_array_equal(positions, expected[:, 0].numpy())


def transformers_ids(
    name: str, folder: Path, clips: list[Clip], plans: list[Any]
) -> tuple[list[int], dict[str, list[tuple[int, int, int]]], list[float]]:
    """Ids of the prompt, grids of whole images and videos, seconds per temporal patch.

    The processor's own replacement of tokens, given grids and metadata, so that no pixels are
    needed; `test_patches_and_grid_equal_transformers` holds the grids to it.
    """
    processor = hf_processor(name, folder)
    processor.video_processor.merge_size, processor.video_processor.temporal_patch_size = 2, 2
    grids: dict[str, list[tuple[int, int, int]]] = {"image": [], "video": []}
    texts: dict[str, list[str]] = {"image": [], "video": []}
    seconds = []
    for clip, plan in plans:
        media = "video" if clip.is_video else "image"
        grid = (plan.num_items * plan.grid[0], *plan.grid[1:])
        inputs: dict[str, Any] = {f"{media}_grid_thw": torch.tensor([grid])}
        if clip.is_video:
            from transformers.video_utils import VideoMetadata

            metadata = VideoMetadata(
                total_num_frames=clip.count, fps=clip.fps, frames_indices=list(range(clip.count))
            )
            inputs["video_metadata"] = [metadata]
            seconds.append(2 / metadata.sampled_fps)
            texts[media].append(processor.replace_video_token(inputs, 0))
        else:
            texts[media].append(processor.replace_image_token(inputs, 0))
        grids[media].append(grid)
    rendered = processor.apply_chat_template(messages_of(clips), add_generation_prompt=True)
    (text,), _ = processor.get_text_with_replacements([rendered], texts["image"], texts["video"])
    tokenizer = PreTrainedTokenizerFast.from_pretrained(str(folder))
    return tokenizer(text)["input_ids"], grids, seconds


# ---------------------------------------------------------------- through the index


def saved(images: list[Image.Image], tmp_path: Path) -> list[bytes]:
    files = []
    for image in images:
        image.save(tmp_path / "one.png")
        files.append((tmp_path / "one.png").read_bytes())
    return files


def test_videos_and_images_go_through_index_store_and_reader(
    name: str, family: Family, tmp_path: Path, index_of: IndexOf, ask: Ask
):
    clips = CHATS["images and videos"]
    images = [frames(clip.part().frames, *clip.size, seed=n) for n, clip in enumerate(clips)]
    files = saved([image for own in images for image in own], tmp_path)
    members = {"first.json": ask(1), "first.0.png": files[0]}
    messages = messages_of(clips, answer="both")
    members["clips.json"] = json.dumps({"messages": messages}).encode()
    members |= {f"clips.{number}.png": data for number, data in enumerate(files)}
    processors = processors_of(family)
    chat = ChatTokenizer(
        write_folder(name, tmp_path / "tokenizer"),
        {"image": MediaText("<|image_pad|>"), "video": family.video_text},
    )
    index = index_of(members, chat, processors)
    assert index.num_skipped == 0
    assert [len(index.files_of_sample(sample)) for sample in (0, 1)] == [1, len(files)]

    reader = SampleReader(index, chat, processors)
    sample = reader.sample(1)
    item = index.items_of_sample(1)[0]
    for clip, own in zip(clips, images, strict=True):
        processor = processors["video" if clip.is_video else "image"]
        plan = processor.plan(clip.part())
        got = []
        for number in range(plan.num_items):
            assert reader.plan(item).grid == plan.grid
            assert reader.plan(item).row_grid == plan.row_grid
            assert reader.plan(item).time_step == plan.time_step
            start = int(index.column("item_placeholder", item))
            assert start == sample.item_offsets[item - index.column("item_start", 1)]
            media = "video" if clip.is_video else "image"
            rows = sample.input_ids[start : start + plan.num_rows]
            assert set(rows.tolist()) == {chat.placeholder_ids[media]}
            got.append(reader.patches(item))
            chosen = [own[file] for file in processor.item_files(clip.part(), number)]
            np.testing.assert_array_equal(
                got[-1], processor.item_patches(chosen, clip.part(), number)
            )
            item += 1
        if clip.is_video:
            expected, _ = video_patches(family.video_module, own, **family.options)
            values = processor.wire.values(np.concatenate(got))
            np.testing.assert_array_equal(values, expected)
    assert item == index.num_items


IMAGES_AND_VIDEOS = {"image": IMAGES, "video": FAMILIES["qwen2_5_vl"].ours}


def odd_video(content: dict[str, Any], *files: bytes) -> dict[str, bytes]:
    question = {"role": "user", "content": [{"type": "video", **content}]}
    messages = [question, {"role": "assistant", "content": "7"}]
    members = {"odd.json": json.dumps({"messages": messages}).encode()}
    return members | {f"odd.{number}.png": data for number, data in enumerate(files)}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ({"frames": 0}, "frames 0; need the number of files"),
        ({"frames": "2"}, "frames '2'"),
        ({"frames": 2, "fps": 0}, "fps 0; need frames per second, above 0"),
        ({"frames": 2, "fps": float("inf")}, "fps inf"),
        ({"frames": 2, "fps": True}, "fps True"),
        ({"frames": 2, "fps": 10**400}, "fps 1000"),
        ({"frames": 2}, "item 1: a file of 56 x 28 pixels in a video that begins with one of 28"),
    ],
)
def test_a_video_that_cannot_be_is_left_out_by_the_name_of_its_sample(
    index_of: IndexOf,
    make_image: MakeImage,
    two_media_chat: ChatTokenizer,
    content: dict[str, Any],
    reason: str,
):
    members = odd_video(content, make_image(28, 28), make_image(56, 28))
    (skipped,) = index_of(members, two_media_chat, IMAGES_AND_VIDEOS).skipped_samples()
    assert skipped.key == "odd"
    assert reason in skipped.reason


@pytest.mark.parametrize("wanted", [1, 3])
def test_more_or_fewer_frames_than_files_name_the_sample_and_both_counts(
    index_of: IndexOf, make_image: MakeImage, two_media_chat: ChatTokenizer, wanted: int
):
    members = odd_video({"frames": wanted}, make_image(), make_image())
    with pytest.raises(ValueError, match=rf"odd: {wanted} / 2(.|\n)*\"frames\": 8"):
        index_of(members, two_media_chat, IMAGES_AND_VIDEOS)
