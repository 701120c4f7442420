"""Which encoder takes which media, and by which tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

from data.modalities.images import ImageProcessor
from data.modalities.videos import VideoProcessor
from data.text.messages import MediaText
from mimo.checkpoint.hf.recipes import load_recipe
from mimo.errors import RecipeError
from mimo.model.dataset import check_media, item_processors, open_tokenizer

VIDEO = (
    "encoders.vision.other_media={video: {placeholder: '<|video_pad|>', "
    "item_text: '3 {placeholder}'}}"
)
SECOND = "encoders.second={family: qwen_vl, media: clip, placeholder: '<|clip_pad|>', model: {}}"


def test_one_encoder_may_take_several_media_each_with_its_processor_and_tokens(path: Path) -> None:
    recipe = load_recipe(path, [VIDEO])
    processors = item_processors(recipe)
    assert {media: type(one) for media, one in processors.items()} == {
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
def test_media_and_placeholders_belong_to_one_encoder(
    path: Path, override: str, problem: str
) -> None:
    recipe = load_recipe(path, [VIDEO, SECOND, override])
    with pytest.raises(RecipeError) as caught:
        check_media(recipe)
    (line,) = caught.value.problems
    assert problem in line


def test_what_the_template_writes_belongs_to_one_media(path: Path) -> None:
    both = [f"encoders.{name}.template_token=<item>" for name in ("vision", "second")]
    with pytest.raises(RecipeError, match=r"encoders\.second\.template_token: got '<item>', which"):
        check_media(load_recipe(path, [SECOND, *both]))


def test_a_misspelt_key_of_another_media_is_refused_by_its_place(path: Path) -> None:
    override = "encoders.vision.other_media={video: {placeholders: x}}"
    with pytest.raises(
        RecipeError, match=r"other_media\.video\.placeholders: unknown key; did you"
    ):
        load_recipe(path, [override])
