"""A recipe's data: the order of samples, shards at URLs, and the modalities of encoders."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from data.index.reader import SampleReader
from data.modalities.images import ImageProcessor
from data.modalities.videos import VideoProcessor
from data.text.messages import MediaText
from mimo.checkpoint.hf.recipes import load_recipe
from mimo.errors import InputError, RecipeError
from mimo.model.dataset import (
    Dataset,
    changed_shards_named,
    item_processors,
    modality_problems,
    open_tokenizer,
)
from tests.data.file_server import serving
from tests.mimo import tiny


@pytest.fixture
def path(tmp_path: Path) -> Path:
    tiny.write_samples(tmp_path, images_per_sample=[0] * 6)
    tiny.write_samples(tmp_path, images_per_sample=[0] * 8, name="other")
    return tiny.write_recipe(tmp_path)


def drawn(path: Path, *overrides: str, steps: int = 25) -> np.ndarray:
    """(source, sample) of every sample of the first steps, (2, n)."""
    planner = tiny.planner_of(path, *overrides, micro_batch_size=80, num_microbatches=1)
    samples = [planner.microbatches(step)[0].samples for step in range(steps)]
    return np.concatenate([np.stack([one.source, one.sample]) for one in samples], axis=1)


def test_sources_are_drawn_by_their_weights_whatever_their_sizes(path: Path) -> None:
    folder, settings = path.parent, ["data.shuffle_block=1", "train.seed=1"]
    heavy = f'{{path: "{folder}/train-*.tar", weight: 3.0}}'
    light = f'{{path: "{folder}/other-*.tar", weight: 1.0}}'
    first = drawn(path, *settings, f"data.sources=[{heavy}, {light}]")
    second = drawn(path, *settings, f"data.sources=[{light}, {heavy}]")
    # 2,000 draws: a standard deviation is 0.01.
    assert np.bincount(first[0]) / 2000 == pytest.approx([0.75, 0.25], abs=0.05)
    assert np.bincount(second[0]) / 2000 == pytest.approx([0.25, 0.75], abs=0.05)


def test_the_seed_and_the_shuffle_block_of_the_recipe_change_the_order(path: Path) -> None:
    def epoch(seed: int, block: int) -> list[int]:
        settings = [f"train.seed={seed}", f"data.shuffle_block={block}"]
        return drawn(path, *settings, steps=1)[1, :6].tolist()

    assert epoch(1, 1) == epoch(1, 1) != epoch(2, 1)
    assert sorted(epoch(1, 1)) == sorted(epoch(2, 1)) == [0, 1, 2, 3, 4, 5]
    assert epoch(1, 6) == epoch(2, 6) == [0, 1, 2, 3, 4, 5] != epoch(1, 1)


def test_shards_at_a_url_give_the_samples_of_those_in_a_folder(path: Path) -> None:
    files = {file.name: file.read_bytes() for file in path.parent.glob("train-*.tar")}
    with serving() as server:
        server.files = {f"data/{name}": data for name, data in files.items()}
        remote = [
            f"data.sources=[{{path: '{server.url}/data/train-{{00000..00000}}.tar'}}]",
            f"data.cache_directory={path.parent / 'cache'}",
            "data.cache_gib=1",
        ]
        here, there = (opened(path, *overrides) for overrides in ([], remote))
        for reader, other in zip(here.readers, there.readers, strict=True):
            for sample in range(len(reader.index)):
                assert reader.messages(sample) == other.messages(sample)
        again = opened(path, *remote)
        asked = len(server.requests)
        assert again.readers[0].messages(0) == here.readers[0].messages(0)
        # The block is on the disk; that the shard is still the same is asked once.
        assert [one for _, one in server.requests[asked:]] == [""]
        assert {one.name for one in (path.parent / "cache").iterdir()} == {"blocks", "index"}

        server.files = {name: data + bytes(512) for name, data in server.files.items()}
        with pytest.raises(InputError, match="has changed"), changed_shards_named():
            opened_before_the_change(there)
        server.files.clear()
        with pytest.raises(RecipeError, match=r"data\.sources\.0\.path: .*prepare the data first"):
            opened(path, *remote)


def opened_before_the_change(dataset: Dataset) -> None:
    reader = dataset.readers[0]
    SampleReader(reader.index, reader.chat, reader.processors).messages(0)


def opened(path: Path, *overrides: str) -> Dataset:
    return tiny.open_sources(load_recipe(path, overrides))


@pytest.mark.parametrize(
    "override",
    [
        "data.sources=[{path: 'https://me:secret@host/a.tar'}]",
        "data.validation=[{path: 'https://host/a.tar?sig=secret'}]",
    ],
)
def test_credentials_in_a_url_are_refused_and_not_repeated(path: Path, override: str) -> None:
    with pytest.raises(RecipeError, match="may hold credentials") as error:
        load_recipe(path, [override])
    assert "secret" not in str(error.value)


# ------------------------------------------------------------------ modalities


VIDEO = (
    "encoders.vision.other_media={video: {placeholder: '<|video_pad|>', "
    "item_text: '3 {placeholder}'}}"
)
SECOND = "encoders.second={family: qwen_vl, media: clip, placeholder: '<|clip_pad|>', model: {}}"


def test_one_encoder_may_take_several_media_each_with_its_processor_and_tokens(path: Path) -> None:
    recipe = load_recipe(path, [VIDEO])
    processors = item_processors(recipe)
    assert {modality: type(processor) for modality, processor in processors.items()} == {
        "image": ImageProcessor,
        "video": VideoProcessor,
    }
    assert open_tokenizer(recipe).media_text == {
        "image": MediaText("<|image_pad|>"),
        "video": MediaText("<|video_pad|>", item_text="3 {placeholder}"),
    }
    assert list(recipe.encoders["vision"].media_tokens) == ["image", "video"]


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        (
            "encoders.second.media=video",
            "encoders.second.media: got 'video', which encoders.vision.other_media.video is",
        ),
        ("encoders.second.media=text", "encoders.second.media: 'text' is the language model's own"),
        (
            "encoders.second.placeholder='<|video_pad|>'",
            "encoders.second.placeholder: got '<|video_pad|>', which "
            "encoders.vision.other_media.video.placeholder is already",
        ),
        (
            "encoders.vision.other_media.image={placeholder: '<|x|>'}",
            "encoders.vision.other_media.image: got 'image', which encoders.vision.media is",
        ),
        (
            "encoders.vision.other_media.text={placeholder: '<|x|>'}",
            "encoders.vision.other_media.text: 'text' is the language model's own",
        ),
    ],
)
def test_modality_and_tokens_have_one_encoder(path: Path, override: str, problem: str) -> None:
    recipe = load_recipe(path, [VIDEO, SECOND, override])
    (line,) = modality_problems(recipe)
    assert problem in line


def test_what_the_template_writes_belongs_to_one_media(path: Path) -> None:
    both = [f"encoders.{name}.template_token=<item>" for name in ("vision", "second")]
    (line,) = modality_problems(load_recipe(path, [SECOND, *both]))
    assert "encoders.second.template_token: got '<item>', which" in line


def test_a_misspelt_key_of_another_media_is_refused_by_its_place(path: Path) -> None:
    override = "encoders.vision.other_media={video: {placeholders: x}}"
    with pytest.raises(
        RecipeError, match=r"other_media\.video\.placeholders: unknown key; did you"
    ):
        load_recipe(path, [override])
