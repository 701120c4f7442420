"""Items of transformers' own processors: ids and arrays equal those of `apply_chat_template`."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from data.index.reader import SampleReader
from data.modalities import transformers as ours
from data.modalities.audio import wav_bytes
from data.modalities.image_files import png_bytes
from data.modalities.processor import Part, ProcessorError
from data.modalities.transformers import TransformersMedia, load_processor, media_tokens
from data.text.chat import ChatTokenizer
from mimo.checkpoint.hf.tiny import TinyCheckpoint, build_tokenizer, write_tiny
from tests.data.conftest import WriteShard, build_index

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}IMAGE"
    "{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SIZES = [(40, 40), (100, 41), (37, 90), (150, 150)]


def _tokenizer(image_token: str, tokens: Sequence[str], **named: str) -> Any:
    tokenizer: Any = build_tokenizer("qwen2_5_vl")
    tokenizer.add_special_tokens({"additional_special_tokens": [*tokens, *named.values()]})
    tokenizer.chat_template = TEMPLATE.replace("IMAGE", image_token)
    for name, token in named.items():
        tokenizer._set_model_specific_special_tokens({name: token})
    return tokenizer


def _write(folder: Path, model_type: str, processor: Any, token: str) -> None:
    processor.save_pretrained(folder)
    token_id = processor.tokenizer.convert_tokens_to_ids(token)
    config = {"model_type": model_type, "image_token_id": token_id, "image_token_index": token_id}
    (folder / "config.json").write_text(json.dumps(config))


def idefics3(folder: Path) -> None:
    from transformers import Idefics3Processor
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    tokens = [f"<row_{i + 1}_col_{j + 1}>" for i in range(6) for j in range(6)]
    tokenizer = _tokenizer("<image>", ["<image>", "<global-img>", *tokens])
    images = Idefics3ImageProcessorPil(
        size={"longest_edge": 112}, max_image_size={"longest_edge": 56}
    )
    _write(folder, "idefics3", Idefics3Processor(images, tokenizer, image_seq_len=4), "<image>")


def internvl(folder: Path) -> None:
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

    names = {"start_image_token": "<img>", "end_image_token": "</img>"}
    names |= {"context_image_token": "<IMG_CONTEXT>", "video_token": "<video>"}
    tokenizer = _tokenizer("<IMG_CONTEXT>", [], **names)
    images = GotOcr2ImageProcessorPil(
        size={"height": 28, "width": 28}, min_patches=1, max_patches=6
    )

    # In files of their own, as older versions wrote them.
    images.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    settings = {"processor_class": "InternVLProcessor", "image_seq_length": 4}
    (folder / "processor_config.json").write_text(json.dumps(settings))
    token_id = tokenizer.convert_tokens_to_ids("<IMG_CONTEXT>")
    config = {"model_type": "internvl", "image_token_id": token_id}
    (folder / "config.json").write_text(json.dumps(config))


def llava_next(folder: Path) -> None:
    from transformers import LlavaNextProcessor
    from transformers.models.llava_next.image_processing_pil_llava_next import (
        LlavaNextImageProcessorPil,
    )

    images = LlavaNextImageProcessorPil(
        size={"shortest_edge": 28},
        crop_size={"height": 28, "width": 28},
        image_grid_pinpoints=[[28, 56], [56, 28], [56, 56]],
    )
    tokenizer = _tokenizer("<image>", ["<image>"])
    processor = LlavaNextProcessor(images, tokenizer, 14, "default", num_additional_image_tokens=1)
    _write(folder, "llava_next", processor, "<image>")


def pixtral(folder: Path) -> None:
    from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
    from transformers.models.pixtral.processing_pixtral import PixtralProcessor

    images = PixtralImageProcessorPil(size={"longest_edge": 112}, patch_size=14)
    tokenizer = _tokenizer("[IMG]", ["[IMG]", "[IMG_BREAK]", "[IMG_END]"])
    processor = PixtralProcessor(images, tokenizer, patch_size=14, spatial_merge_size=2)
    _write(folder, "mistral3", processor, "[IMG]")


def tiny(family: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        write_tiny(TinyCheckpoint(family), folder)

    return write


FOLDERS: dict[str, Callable[[Path], None]] = {
    "mistral3": pixtral,
    "qwen2_5_vl": tiny("qwen2_5_vl"),
    "qwen3_vl": tiny("qwen3_vl"),
    "gemma3": tiny("gemma3"),
    "idefics3": idefics3,
    "internvl": internvl,
    "llava_next": llava_next,
}


QUICK = ("mistral3", "qwen3_vl", "idefics3", "internvl")
PARAMS = [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in FOLDERS]


@pytest.fixture(scope="module", params=PARAMS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("folders") / request.param
    FOLDERS[request.param](path)
    return path


@pytest.fixture
def media(folder: Path) -> TransformersMedia:
    return TransformersMedia(str(folder), "image")


@pytest.fixture
def chat(folder: Path) -> ChatTokenizer:
    return ChatTokenizer(folder, {"image": media_tokens(str(folder), "image")})


def noise(size: tuple[int, int], seed: int = 0) -> Image.Image:
    width, height = size
    rng = np.random.default_rng(seed)
    return Image.fromarray(rng.integers(0, 256, (height, width, 3), np.uint8))


def conversation(images: Sequence[Image.Image]) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = []
    for image in images:
        parts += [{"type": "image", "image": image}, {"type": "text", "text": "and"}]
    answer = [{"type": "text", "text": "7"}]
    return [{"role": "user", "content": parts}, {"role": "assistant", "content": answer}]


def expected(folder: Path, images: Sequence[Image.Image]) -> dict[str, Any]:
    return load_processor(folder).apply_chat_template(
        conversation(images), tokenize=True, return_dict=True, return_tensors="pt"
    )


def encode(chat: ChatTokenizer, media: TransformersMedia, images: Sequence[Image.Image]) -> Any:
    plans = [media.plan(Part(image.size)) for image in images]
    rows = [rows for plan in plans for rows in plan.rows_of_items]
    return chat.encode(conversation(images), rows, "k", [plan.text for plan in plans])


def arrays(media: TransformersMedia, image: Image.Image) -> dict[str, torch.Tensor]:
    part = Part(image.size)
    patches = media.item_patches([image], part, 0)
    plan = media.plan(part)
    assert (patches.shape, patches.dtype) == ((plan.num_patches, 1), np.float32)
    form = media.form(plan.grid)
    return {**form.arrays, **form.content(torch.from_numpy(patches))}


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_ids_and_arrays_of_an_image_are_those_of_the_processor(
    folder: Path, media: TransformersMedia, chat: ChatTokenizer, size: tuple[int, int]
):
    image = noise(size)
    theirs, sample = expected(folder, [image]), encode(chat, media, [image])
    assert sample.input_ids.tolist() == theirs["input_ids"][0].tolist()
    mine = arrays(media, image)
    text = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")
    assert list(mine) == [name for name in theirs if name not in text]
    for name, array in mine.items():
        assert array.dtype == theirs[name].dtype, name
        assert torch.equal(array, theirs[name]), name
    plan = media.plan(Part(size))
    placeholders = np.flatnonzero(sample.input_ids == chat.placeholder_ids["image"])
    assert (len(placeholders), plan.num_items) == (plan.num_rows, 1)
    assert sample.item_offsets.tolist() == [placeholders[0]]


def test_ids_of_two_images_of_different_sizes_are_those_of_the_processor(
    folder: Path, media: TransformersMedia, chat: ChatTokenizer
):
    images = [noise(SIZES[1], 1), noise(SIZES[2], 2)]
    theirs, sample = expected(folder, images), encode(chat, media, images)
    assert sample.input_ids.tolist() == theirs["input_ids"][0].tolist()
    rows = [media.plan(Part(image.size)).num_rows for image in images]
    placeholders = np.flatnonzero(sample.input_ids == chat.placeholder_ids["image"])
    assert sample.item_offsets.tolist() == [placeholders[0], placeholders[rows[0]]]


def test_arrays_of_two_images_are_those_of_each(folder: Path, media: TransformersMedia):
    images = [noise(SIZES[1], 1), noise(SIZES[2], 2)]
    name = "pixel_values"
    mine, theirs = [arrays(media, image)[name] for image in images], expected(folder, images)[name]
    if folder.name == "idefics3":  # the tiles of a sample lie one after the other
        mine, theirs = [array[0] for array in mine], theirs[0]
    if folder.name in ("llava_next", "mistral3"):  # padded to the largest image of the batch
        for array, padded in zip(mine, theirs, strict=True):
            inside = tuple(slice(0, length) for length in array.shape[1:])
            assert torch.equal(array[0], padded[inside])
    else:
        assert torch.equal(torch.cat(mine), theirs)


def test_samples_come_back_from_an_index(
    folder: Path, media: TransformersMedia, chat: ChatTokenizer, tmp_path: Path,
    write_shard: WriteShard,
):  # fmt: skip
    images = [noise(SIZES[1], 1), noise(SIZES[2], 2)]
    messages = [
        {**message, "content": [{k: v for k, v in part.items() if k != "image"} for part in parts]}
        for message in conversation(images)
        for parts in [message["content"]]
    ]
    files = {f"a.{n}.png": png_bytes(np.asarray(image)) for n, image in enumerate(images)}
    write_shard(
        tmp_path / "a.tar", {"a.json": json.dumps({"messages": messages}).encode(), **files}
    )
    index = build_index(str(tmp_path / "a.tar"), chat, {"image": media})
    assert (len(index), index.num_items, index.num_skipped) == (1, 2, 0)
    reader = pickle.loads(pickle.dumps(SampleReader(index, chat, {"image": media})))
    sample, whole = reader.sample(0), encode(chat, media, images)
    assert sample.input_ids.tolist() == whole.input_ids.tolist()
    assert sample.item_offsets.tolist() == whole.item_offsets.tolist()
    for item, image in enumerate(images):
        patches = media.item_patches([image], Part(image.size), 0)
        np.testing.assert_array_equal(reader.patches(item), patches)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("qwen") / "qwen3_vl"
    tiny("qwen3_vl")(folder)
    return str(folder)


@pytest.fixture
def fresh() -> Iterator[None]:
    for cached in (ours._form, ours._processor, media_tokens):
        cached.cache_clear()
    yield
    for cached in (ours._form, ours._processor, media_tokens):
        cached.cache_clear()


def test_a_processor_that_promises_another_number_ends_the_run(
    qwen: str, fresh: None, write_shard: WriteShard, tmp_path: Path
):
    processor, media = ours._processor(qwen), TransformersMedia(qwen, "image")
    processor._get_num_multimodal_tokens = lambda image_sizes: {"num_image_tokens": [7]}
    with pytest.raises(ProcessorError, match="promises 7 placeholders .* but writes 4"):
        media.plan(Part((64, 64)))
    chat = ChatTokenizer(qwen, {"image": media_tokens(qwen, "image")})
    content = [{"type": "image"}, {"type": "text", "text": "?"}]
    messages = [{"role": "user", "content": content}, {"role": "assistant", "content": "7"}]
    file = png_bytes(np.zeros((64, 64, 3), np.uint8))
    members = {"a.json": json.dumps({"messages": messages}).encode(), "a.0.png": file}
    write_shard(tmp_path / "a.tar", members)
    with pytest.raises(ValueError, match="a: .* promises 7"):
        build_index(str(tmp_path / "a.tar"), chat, {"image": media})


def test_an_array_that_depends_on_the_content_of_an_image_is_refused(qwen: str, fresh: None):
    media, part = TransformersMedia(qwen, "image"), Part((64, 64))
    media.plan(part)
    with pytest.raises(ValueError, match="they depend on more than its size"):
        media.item_patches([noise((96, 64))], part, 0)


def test_the_fingerprint_follows_the_files_of_the_processor_but_not_their_folder(
    qwen: str, tmp_path: Path
):
    copied = shutil.copytree(qwen, tmp_path / "copied")
    first = TransformersMedia(qwen, "image").fingerprint()
    assert TransformersMedia(str(copied), "image").fingerprint() == first
    file = copied / "preprocessor_config.json"
    file.write_text(file.read_text() + " ")
    assert TransformersMedia(str(copied), "image").fingerprint() != first


def test_other_modalities_are_refused_by_name(qwen: str):
    with pytest.raises(ValueError, match="Qwen3VLProcessor has no token for audio items"):
        media_tokens(qwen, "audio")


def test_a_video_is_one_item_of_several_runs_with_the_arrays_of_the_processor(
    qwen: str, fresh: None
):
    frames = [noise((64, 96), seed) for seed in range(4)]
    processor, media = load_processor(qwen), TransformersMedia(qwen, "video")
    part = Part((64, 96), frames=4, fps=4.0)
    plan = media.plan(part)
    patches = media.item_patches(frames, part, 0)
    theirs = processor.video_processor(
        videos=[np.stack([np.asarray(frame) for frame in frames])],
        do_sample_frames=False,
        return_tensors="pt",
    )
    assert (plan.grid, plan.num_items, len(plan.slot_rows or ())) == ((4, 96, 64), 1, 2)
    assert plan.text.index("<0.2 seconds>") < plan.text.index("<0.8 seconds>")
    form = media.form(plan.grid, part.fps)
    arrays = {**form.arrays, **form.content(torch.from_numpy(patches))}
    assert list(arrays) == ["pixel_values_videos", "video_grid_thw"]
    t, h, w = arrays["video_grid_thw"][0].tolist()
    assert t * h * w == 9 * plan.num_rows
    assert all(torch.equal(array, theirs[name]) for name, array in arrays.items())


def test_a_clip_of_sound_has_the_ids_and_arrays_of_the_processor(tmp_path: Path):
    from transformers import Qwen2AudioProcessor, WhisperFeatureExtractor

    tokenizer = _tokenizer("<|AUDIO|>", ["<|AUDIO|>"])
    processor = Qwen2AudioProcessor(
        WhisperFeatureExtractor(chunk_length=2), tokenizer, tokenizer.chat_template
    )
    processor.save_pretrained(tmp_path)
    media = TransformersMedia(str(tmp_path), "audio")
    samples = np.random.default_rng(0).integers(-9999, 9999, 10_000, np.int16)
    sound = media.decode(wav_bytes(samples))
    part = Part(media.size_of(sound))
    plan = media.plan(part)
    theirs = load_processor(tmp_path)(
        text=["<|AUDIO|>"], audio=[sound.waveform], sampling_rate=16_000, return_tensors="pt"
    )
    assert plan.num_rows == theirs["input_ids"].shape[1]
    values = torch.from_numpy(media.item_patches([sound], part, 0))
    form = media.form(plan.grid)
    arrays = {**form.arrays, **form.content(values)}
    assert list(arrays) == ["input_features", "feature_attention_mask"]
    assert all(torch.equal(array, theirs[name]) for name, array in arrays.items())
