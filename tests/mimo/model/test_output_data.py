"""The data of recipes with generators: tokens, targets, problems by key, and packed lanes."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from data.loader import LoadedStep
from data.modalities.images import TargetImages
from data.packing import Used
from data.text.outputs import OutputText
from mimo.check.workload import Item, Sample, write_shard
from mimo.checkpoint.assets import ASSETS, collect_assets
from mimo.checkpoint.hf.recipes import load_recipe
from mimo.errors import RecipeError
from mimo.families import registry
from mimo.families.contracts import GeneratorSettings
from mimo.families.flops import Product
from mimo.model.dataset import item_processors, modality_problems, open_tokenizer
from mimo.model.decoding import pack_language
from mimo.model.first_samples import _compared_samples, _is_output
from mimo.model.step_plan import PlannedMicrobatch, StepPlan
from tests.mimo import tiny

DRAW = (
    "generators.draw={family: small, queries: 3, model: {num_layers: 1, hidden_size: 24, "
    "ffn_hidden_size: 8, num_attention_heads: 1, in_channels: 12, condition_size: 32, "
    "max_pixels: 64}}"
)


class Settings(GeneratorSettings):
    @property
    def token_pixels(self) -> int:
        return 2 if self.autoencoder is None else 16

    @property
    def most_rows(self) -> int:
        return 1000

    def products(self) -> list[Product]:
        return []

    def counts(self, grids: np.ndarray, condition_rows: np.ndarray) -> dict[str, float]:
        return {}

    def _scaled_sizes(self, chunks: int, tp: int) -> dict[str, Any]:
        return {}


@pytest.fixture(autouse=True)
def family(monkeypatch: pytest.MonkeyPatch) -> None:
    """A family of generators with the name small."""
    names = registry.family_names

    def with_small(package: str) -> list[str]:
        return [*names(package), *(["small"] if package == registry.GENERATORS else [])]

    monkeypatch.setattr(registry, "family_names", with_small)
    module = SimpleNamespace(Settings=Settings)
    monkeypatch.setitem(sys.modules, f"{registry.GENERATORS}.small", module)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    tiny.write_samples(tmp_path, images_per_sample=[1, 0, 2])
    return tiny.write_recipe(tmp_path)


def test_a_generator_adds_its_tokens_and_its_targets(path: Path) -> None:
    plain, recipe = load_recipe(path), load_recipe(path, [DRAW])
    chat, processors = open_tokenizer(recipe), item_processors(recipe)
    assert list(processors) == ["image", "output.image"]
    assert processors["output.image"] == TargetImages(2, 64, 3, tower_width=24)
    assert chat.added_tokens == ("<|image_gen_start|>", "<|image_gen_end|>")
    assert chat.vocab_size == open_tokenizer(plain).vocab_size + 2
    start, end = chat.added_tokens
    assert chat.outputs == {"output.image": OutputText(start, end, most_rows=1000)}
    prompt = load_recipe(
        path, [DRAW, "generators.draw.condition=prompt", "generators.draw.skipped_tokens=34"]
    )
    assert open_tokenizer(prompt).outputs["output.image"].skipped_tokens == 34
    assert item_processors(prompt)["output.image"] == TargetImages(2, 64, 0, tower_width=24)
    latents = load_recipe(
        path, [DRAW, "generators.draw.model.autoencoder=x", "generators.draw.model.max_pixels=256"]
    )
    assert item_processors(latents)["output.image"] == TargetImages(16, 256, 3, tower_width=24)


def test_copied_tokenizer_files_give_the_same_ids(path: Path, tmp_path: Path) -> None:
    recipe = load_recipe(path, [DRAW])
    collect_assets(recipe, tmp_path / ASSETS)
    shutil.move(tmp_path / "tokenizer", tmp_path / "gone")
    copied = load_recipe(path, [DRAW, f"data.tokenizer={tmp_path / ASSETS / 'tokenizer'}"])
    chat, original = (
        open_tokenizer(recipe)
        for recipe in (copied, load_recipe(path, [DRAW, f"data.tokenizer={tmp_path / 'gone'}"]))
    )
    assert chat.added_tokens == original.added_tokens != ()
    assert (chat.output_ids, chat.fingerprint()) == (original.output_ids, original.fingerprint())


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["generators.draw.media=audio"], "generators.draw.media: got 'audio', but .*only image"),
        (
            ["generators.draw.end_token='<|image_gen_start|>'"],
            r"generators\.draw\.end_token: got '<\|image_gen_start\|>', which "
            r"generators\.draw\.start_token is already",
        ),
        (
            ["generators.draw.start_token='<|image_pad|>'"],
            r"generators\.draw\.start_token: got '<\|image_pad\|>', which "
            r"encoders\.vision\.placeholder is already",
        ),
        (
            ["encoders.vision.template_token=<image>", "generators.draw.end_token=<image>"],
            r"generators\.draw\.end_token: .*encoders\.vision\.template_token is already",
        ),
        (["generators.draw.end_token='#'"], r"draw\.end_token: got '#', which texts have too"),
        (["encoders.vision.media=output.image"], r"draw\.media: got 'image', which encoders\.vis"),
    ],
)
def test_tokens_and_modalities_of_generators_are_their_own(
    path: Path, overrides: list[str], problem: str
) -> None:
    recipe = load_recipe(path, [DRAW, *overrides])
    with pytest.raises(RecipeError, match=problem) as error:
        item_processors(recipe)
    assert len(error.value.problems) == 1


def test_two_generators_of_one_modality_are_refused(path: Path) -> None:
    second = DRAW.replace("generators.draw", "generators.paint")
    tokens = [f"generators.paint.{end}_token=<{end}>" for end in ("start", "end")]
    (line,) = modality_problems(load_recipe(path, [DRAW, second, *tokens]))
    assert "generators.paint.media: got 'image', which generators.draw.media is already" in line
    assert len([*modality_problems(load_recipe(path, [DRAW, second]))]) == 3


@pytest.mark.parametrize("token", ["<|im_end|>", "<|endoftext|>"])
def test_the_end_of_a_turn_and_padding_are_no_tokens_of_generators(path: Path, token: str) -> None:
    recipe = load_recipe(path, [DRAW, f"generators.draw.start_token='{token}'"])
    with pytest.raises(RecipeError, match=r"generators\.draw\.start_token: got '<\|.* ends a turn"):
        open_tokenizer(recipe)


def test_pixels_that_no_token_fits_into_are_refused_by_their_key(path: Path) -> None:
    recipe = load_recipe(path, [DRAW, "generators.draw.model.max_pixels=3"])
    with pytest.raises(RecipeError, match=r"draw\.model\.max_pixels: got 3, needs at least the 4"):
        item_processors(recipe)


class Drawing(Sample):
    """A sample whose second image is in the answer."""

    @property
    def messages(self) -> list[dict[str, Any]]:
        asked, answered = super().messages
        drawn = asked["content"].pop(1)
        return [asked, {**answered, "content": [*answered["content"], drawn]}]


def write_drawings(folder: Path, *readings: int) -> None:
    """Write three drawings, and then samples with these numbers of images to read."""
    picture = Item("image", "png", tiny._noise(np.random.default_rng(0), 28, 28))
    samples = [Drawing((picture, picture), "repeat", str(number)) for number in range(3)]
    others = [Sample((picture,) * images, "repeat", "3") for images in readings]
    write_shard(folder / "train-00000.tar", [*samples, *others])


def test_towers_and_processors_are_compared_on_inputs_alone(path: Path) -> None:
    write_drawings(path.parent, 0, 1, 3, 2)
    (reader,) = tiny.open_sources(load_recipe(path, [DRAW])).readers
    assert _is_output(reader, 8).tolist() == [False, True] * 3 + [False] * 2
    assert _compared_samples(reader) == [4, 5]
    write_drawings(path.parent)
    (reader,) = tiny.open_sources(load_recipe(path, [DRAW])).readers
    assert _compared_samples(reader) == []


def test_packed_lanes_know_the_places_of_queries(path: Path) -> None:
    write_drawings(path.parent)
    recipe = load_recipe(path, [DRAW])
    dataset = tiny.open_sources(recipe)
    (reader,) = dataset.readers
    planner = tiny.planner_of(path, DRAW, micro_batch_size=3, num_microbatches=1)
    samples = planner.microbatches(0)[0].samples
    encoded = {n: reader.sample(int(sample)) for n, sample in enumerate(samples.sample)}
    start, end = reader.chat.output_ids["output.image"]
    for blanked in (set[int](), {1}):
        planned = PlannedMicrobatch(samples, {}).without(blanked)
        plan = StepPlan((planned,), 0, 0, 0.0, {})
        loaded = LoadedStep(0, [planned], Used(), [encoded])
        (lane,) = pack_language(loaded, plan, dataset.readers, 0, reader.chat.pad_token_id)
        kept = [number for number in range(3) if number not in blanked]
        starts = np.flatnonzero(lane.input_ids == start)
        assert lane.input_ids[starts + 4].tolist() == [end] * 3
        assert lane.queries == tuple(("output.image", int(starts[n]) + 1, 3) for n in kept)
        assert [modality for modality, _ in lane.parts] == ["image"] * len(kept)
        assert len(lane.items) == len(kept)
        for n in kept:
            steps = np.diff(lane.position_ids[:, starts[n] : starts[n] + 5])
            assert (steps == 1).all()
