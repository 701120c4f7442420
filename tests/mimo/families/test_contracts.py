"""Every family that the registry finds keeps the contract of `mimo.families.contracts`.

Families are found by name, so that they keep it is asked here; that its users do, by pyright.
"""

from __future__ import annotations

import inspect
import io
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from annotated_types import Ge, Gt
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from data.modalities.processor import Media, Part
from mimo.checkpoint.hf.architectures import ARCHITECTURES
from mimo.checkpoint.hf.recipes import load_recipe
from mimo.config import bounds
from mimo.errors import RecipeError
from mimo.families import contracts, registry
from mimo.families.contracts import ItemRules
from mimo.families.keymap import num_elements
from mimo.families.registry import encoder_family
from tests.mimo.config.test_recipe import RECIPE
from tests.mimo.families.test_keymap import check_complete
from tests.recipe_keys import families_in

ENCODERS = families_in(registry.ENCODERS)
LANGUAGES = families_in(registry.LANGUAGES)
FAMILIES = {
    **{f"encoders.{name}": family for name, family in ENCODERS.items()},
    **{f"languages.{name}": family for name, family in LANGUAGES.items()},
}
# Sizes that no family gives by default; one that needs more adds its own.
SIZES = {
    "num_layers": 12,
    "hidden_size": 48,
    "ffn_hidden_size": 96,
    "num_attention_heads": 6,
    "num_query_groups": 3,
    "head_size": 8,
    "vocab_size": 100,
    "mrope_section": [2, 1, 1],
    "num_experts": 6,
    "experts_per_token": 2,
    "shared_expert_size": 36,
    # So that there are layers of several kinds, and levels.
    "window_size": 56,
    "full_attention_layers": [5, 11],
    "deepstack_visual_indexes": [3, 7],
}
H, TP, STAGES = 32, 2, 3
every_family = pytest.mark.parametrize("name", FAMILIES)
every_encoder = pytest.mark.parametrize("name", ENCODERS)
every_language = pytest.mark.parametrize("name", LANGUAGES)


def settings_of(family: Any, **given: object) -> Any:
    """Whatever of `SIZES` the family has."""
    known = {key: value for key, value in SIZES.items() if key in family.Settings.model_fields}
    return family.Settings(**{**known, **given})


def draw_items(settings: Any, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Values (P, C) and grids (I, 3) of random items of an encoder."""
    processor, rng = settings.processor(), np.random.default_rng(0)
    patches, grids = [], []
    for _ in range(count):
        decoded = processor.decode(processor.random_file(rng))
        part = Part(processor.size_of(decoded))
        grids.append(processor.plan(part).grid)
        patches.append(processor.wire.values(processor.item_patches([decoded], part, 0)))
    return np.concatenate(patches), np.array(grids)


def functions(protocol: type) -> Iterator[tuple[str, inspect.Signature]]:
    """The functions of a protocol, inherited ones too, without ``self``."""
    for name, value in inspect.getmembers(protocol, inspect.isfunction):
        if not name.startswith("_"):
            signature = inspect.signature(value)
            yield name, signature.replace(parameters=[*signature.parameters.values()][1:])


def assert_offers(owner: Any, protocol: type, says: str) -> None:
    """Every function with the parameters of the protocol, in their order, and none more needed."""
    for name, expected in functions(protocol):
        found: Callable[..., Any] | None = getattr(owner, name, None)
        assert callable(found), f"{says}.{name} is missing"
        own = [*inspect.signature(found).parameters.values()]
        wanted = [*expected.parameters.values()]
        own = [one for one in own if one.name != "self"]
        assert [p.name for p in own[: len(wanted)]] == [p.name for p in wanted], f"{says}.{name}"
        needed = [p.name for p in own[len(wanted) :] if p.default is p.empty and p.kind < 2]
        assert not needed, f"{says}.{name} needs {needed} too"
        for ours, theirs in zip(own, wanted, strict=False):
            same = (ours.default is ours.empty) <= (theirs.default is theirs.empty)
            assert same, f"{says}.{name}: {ours.name} has no default"


def test_the_registry_finds_every_family_that_an_architecture_names() -> None:
    for one in ARCHITECTURES.values():
        assert one.language in LANGUAGES
        assert_offers(one.language_family(), contracts.LanguageFamily, one.language)
        if one.encoder is not None:
            assert one.encoder in ENCODERS
            assert_offers(one.encoder_family(), contracts.PublishedEncoderFamily, one.encoder)


@every_family
def test_a_family_offers_every_function_of_its_contract(name: str) -> None:
    family = FAMILIES[name]
    kind: type = contracts.EncoderFamily
    if name.startswith("lang"):
        megatron = "megatron" in family.Settings.engines
        kind = contracts.MegatronLanguageFamily if megatron else contracts.LanguageFamily
    assert_offers(family, kind, name)
    kind = contracts.EncoderSettings if name.startswith("enc") else contracts.LanguageSettings
    assert issubclass(family.Settings, kind)


@every_family
def test_settings_have_what_their_contract_leaves_open(name: str) -> None:
    settings = settings_of(FAMILIES[name])  # what is missing could not be made
    assert [*inspect.signature(settings.scaled_down).parameters] == ["chunks", "tp"]
    assert settings.changeable_keys <= type(settings).model_fields.keys()


@every_family
def test_settings_refuse_what_is_unknown_and_bound_every_number(name: str) -> None:
    settings = FAMILIES[name].Settings
    assert issubclass(settings, BaseModel)
    assert settings.model_config == bounds.STRICT
    for key, field in settings.model_fields.items():
        if field.annotation in (int, float, int | None, float | None):
            assert any(isinstance(one, Ge | Gt) for one in constraints(field)), f"{key} unbounded"


def constraints(field: FieldInfo) -> list[object]:
    """Of the number itself, or of the one in ``X | None``."""
    return [*field.metadata, *(m for a in inner(field.annotation) for m in a)]


def inner(annotation: Any) -> Iterator[tuple[object, ...]]:
    for part in getattr(annotation, "__args__", ()):
        yield getattr(part, "__metadata__", ())


@every_family
def test_a_tiny_copy_fits_its_grid_and_has_each_kind_of_layer_on_every_stage(name: str) -> None:
    family = FAMILIES[name]
    settings = settings_of(family)
    for stages, tp in ((1, 1), (STAGES, TP), (2, 3)):
        small = settings.scaled_down(stages, tp)
        kinds = small.layer_kinds()
        assert len(kinds) == small.num_layers <= settings.num_layers
        size = small.num_layers // stages
        for first in range(0, small.num_layers, size):
            assert set(kinds[first : first + size]) == set(settings.layer_kinds())
        assert not list(small.grid_problems(tp, stages))
        # Validated anew, for a copy is not.
        assert family.Settings.model_validate(small.model_dump(mode="python")) == small


@every_family
def test_a_grid_that_does_not_fit_is_told_in_sentences_with_axis_and_size(name: str) -> None:
    family = FAMILIES[name]
    settings = settings_of(family)
    assert not list(settings.grid_problems(1, 1))
    by_tp = list(settings.grid_problems(7, 1))
    assert by_tp
    assert all("tp=7 must divide" in problem for problem in by_tp)
    assert any(str(settings.num_attention_heads) in problem for problem in by_tp)
    (by_pp,) = settings.grid_problems(1, 7)
    assert "must divide num_layers, which is 12" in by_pp


def weights_of(family: Any, settings: Any) -> list[Any]:
    encodes = family in ENCODERS.values()
    return family.weights_in_hf(settings, H) if encodes else family.weights_in_hf(settings)


@every_family
def test_parameters_are_told_apart_and_every_period_of_layers_has_equally_many(name: str) -> None:
    family = FAMILIES[name]
    settings = settings_of(family)
    weights = weights_of(family, settings)
    check_complete(weights)
    names = [weight.name for weight in weights]
    assert len(set(names)) == len(names)
    # As they are counted before anything is built.
    period = settings.layer_period
    few = [
        num_elements(weights_of(family, settings.model_copy(update={"num_layers": count * period})))
        for count in (1, 2, 3)
    ]
    assert few[2] - few[1] == few[1] - few[0] > 0
    periods = settings.num_layers // period
    assert num_elements(weights) == few[0] + (periods - 1) * (few[1] - few[0])


@every_encoder
def test_the_projector_is_some_of_an_encoders_parameters_but_not_all(name: str) -> None:
    family = ENCODERS[name]
    assert isinstance(family.PROJECTOR, tuple)
    names = [weight.name for weight in weights_of(family, settings_of(family))]
    for prefix in family.PROJECTOR:
        assert any(one.startswith(prefix) for one in names), f"no parameter begins {prefix}"
    assert any(not one.startswith(family.PROJECTOR) for one in names)
    assert settings_of(family).num_levels >= 0


@every_encoder
def test_an_encoder_says_how_items_of_its_media_become_patches(name: str) -> None:
    settings = settings_of(ENCODERS[name])
    wanted = [member for member, _ in functions(Media)]
    assert wanted
    for processor in (settings.processor(), settings.processor("image")):
        for member in wanted:
            assert callable(getattr(processor, member))


@every_encoder
@pytest.mark.parametrize("media", [None, "image", "video"])
def test_items_of_a_random_file_are_as_large_as_planned(name: str, media: str | None) -> None:
    settings = settings_of(ENCODERS[name])
    processor = settings.processor() if media is None else settings.processor(media)
    assert processor.suffixes
    assert all(re.fullmatch("[a-z0-9]+", suffix) for suffix in processor.suffixes)
    wire = processor.wire
    assert wire == processor.wire, "items of one form are known by it"
    assert 0 < wire.width <= wire.patch_dim
    rng = np.random.default_rng(1)
    patches_per_row = set()
    for frames in (1,) * 8 + (3,):
        file = processor.random_file(rng)
        decoded = processor.decode(file)
        size = processor.probe(io.BytesIO(file))
        assert size == processor.size_of(decoded)
        part = Part(size, frames)
        try:
            plan = processor.plan(part)
        except ValueError:
            assert frames > 1, "a part of one file is refused"
            continue
        assert plan.num_items >= 1
        assert plan.cost > 0
        # A row is made of equally many patches, whatever the item's size.
        patches_per_row.add(math.prod(plan.grid) / plan.num_rows)
        for item in range(plan.num_items):
            own = processor.item_files(part, item)
            assert {*own} <= {*range(frames)}
            patches = processor.item_patches([decoded for _ in own], part, item)
            assert patches.dtype == wire.dtype
            assert patches.shape == (math.prod(plan.grid), wire.width)
            values = wire.values(patches)
            assert values.dtype == np.float32
            assert values.shape == (len(patches), wire.patch_dim)
    assert len(patches_per_row) == 1


@every_language
def test_a_language_model_pads_its_vocabulary_and_refuses_a_larger_tokenizer(name: str) -> None:
    family = LANGUAGES[name]
    assert isinstance(family.Settings.item_rules, ItemRules)
    settings = settings_of(family)
    assert settings.num_tokens(90) == 100
    padded = settings.padded_vocab_size(90)
    assert padded >= 100
    assert padded == settings.padded_vocab_size(100)
    with pytest.raises(ValueError, match="the tokenizer has 101 tokens"):
        settings.num_tokens(101)


# Tables that are looked up. A tied one is the head's matrix as well.
TABLES = {"embedding.word_embeddings.weight", "pos_embed.weight"}


@every_family
def test_every_matrix_of_a_family_is_one_of_its_products(name: str) -> None:
    family = FAMILIES[name]
    settings = settings_of(family)
    encodes = name.startswith("enc")
    products = settings.products(H if encodes else settings.vocab_size)
    multiplied = {p.parameter: math.prod(p.shape) for p in products if p.forward and p.parameter}
    weights = {weight.name: weight for weight in weights_of(family, settings)}
    assert multiplied.keys() <= weights.keys()
    for weight in weights.values():
        matrix = any(len(source.shape) > 1 for source in weight.sources)
        if matrix and (weight.name in multiplied or weight.name not in TABLES):
            # A token's product with experts is declared once for each that it chooses.
            experts = settings.num_experts if ".experts." in weight.name else 1
            elements = num_elements([weight]) // experts
            assert multiplied.pop(weight.name) == elements, weight.name
    assert not multiplied, "only matrices multiply"
    assert {p.parameter for p in products if p.parameter} <= weights.keys()
    assert [p.per for p in products if p.parameter is None] == [
        "token" if kind == "linear" else f"{kind} pair" for kind in settings.layer_kinds()
    ]
    if encodes:
        counts = settings.counts(np.array([settings.processor().plan(Part((64, 64))).grid]))
    else:
        counts = settings.counts(np.array([5, 3]), np.array([2]), 4)
    assert {p.per for p in products if p.forward} <= counts.keys()


def test_what_families_share_is_no_family(tmp_path: Path) -> None:
    path = tmp_path / "tiny.yaml"
    path.write_text(RECIPE)
    recipe = load_recipe(path, ["encoders.vision.family=_patches"])
    with pytest.raises(RecipeError, match="unknown family '_patches'") as caught:
        encoder_family(recipe, "vision")
    assert "qwen3_vl" in str(caught.value)
    assert "_patches" not in str(caught.value).split(";")[1]
