"""Damaged recipes and overrides: each ends with a message, soon and in little memory."""

import json
import pkgutil
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

import encoders.qwen_vl
import mimo.families.languages.qwen3
from mimo.checkpoint.hf.recipes import load_phases, load_recipe
from mimo.config.bounds import MAX_RANKS
from mimo.config.schema import Encoder, Recipe
from mimo.errors import InputError, RecipeError
from mimo.model.memory import parameters_by_role
from mimo.model.recipe_checks import check_recipe
from mimo.parallel.build import build_layout

# How long something may take before it counts as hanging.
pytestmark = pytest.mark.timeout(20)
QUICKSTART = Path(__file__).parents[3] / "recipes" / "quickstart.yaml"


def check(*overrides: str) -> None:
    """All that `mimo check` does but printing."""
    phased = load_phases(QUICKSTART, overrides)
    layouts = phased.each(lambda recipe: check_recipe(recipe, None))
    for phase, layout in zip(phased.phases, layouts, strict=True):
        parameters_by_role(phase.recipe, layout)


# ------------------------------------------------------------------ files


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"a: 1\nb: [", r"bad.yaml:2: not valid YAML"),
        (b"name: x\nname: y", r"bad.yaml:2: not valid YAML: found duplicate key"),
        (b"- 1", r"bad.yaml:1: a recipe is a mapping"),
        (b"a: [*b]", r"bad.yaml:1: .*found undefined alias"),
        (b"name: !!python/name:os.system x", r"bad.yaml:1: .*not determine a constructor for the"),
        (b"x: {<<: 3}", r"bad.yaml:1: .*expected a mapping"),
        (b"#" * 2**19, "at most 262144 bytes"),
        (b"a: " + b"[" * 5000 + b"]" * 5000, "nested too deep"),
        (b"name: \xff", "cannot be read"),
        (b"name: \0", "not valid YAML"),
        (b"", "name: this key is required"),
    ],
)
def test_a_file_without_meaning_is_refused(tmp_path: Path, text: bytes, message: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_bytes(text)
    with pytest.raises(RecipeError, match=message):
        load_recipe(path)


def test_a_folder_and_a_device_are_no_recipes(tmp_path: Path) -> None:
    for path in (tmp_path, Path("/dev/zero")):
        with pytest.raises(RecipeError, match="is not a file"):
            load_recipe(path)


# -------------------------------------------------------------- overrides


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("language.grid.tp=1000000000", f"less than or equal to {MAX_RANKS}"),
        ("language.grid.dp=1000000000000000000", f"less than or equal to {MAX_RANKS}"),
        ("language.grid={tp: 8192, cp: 8192, dp: 8192}", f"have at most {MAX_RANKS}"),
        ("train.global_batch_size=1000000000000000", "less than or equal to 1048576"),
        ("train.seed=" + str(2**70), "less than 4294967296"),
        ("train.seed=" + "[" * 5000, "nested too deep"),
        ("data.sources.².path=x", "'²' is not the index of one"),
        ("name=" + "x" * 300, "at most 100 characters"),
        ("name=../up", "should match pattern"),
        ("bridge.timeout_seconds=1e300", "less than or equal to 604800"),
        ("bridge.timeout_seconds=.nan", "finite number"),
        ("language.model.rotary_base=.nan", "language.model.rotary_base: should be a finite"),
        ("language.model.num_layers=true", "should be a valid integer; got True"),
        ("language.model.num_layers='2'", "should be a valid integer; got '2'"),
        ("language.model.head_size=3", "head_size 3 must be even"),
        ("language.model.mrope_section=[-8, 16, 8]", "greater than or equal to 0"),
        ("language.model.mrope_section=8", "mrope_section: should be a valid tuple"),
        ("encoders.vision.model.image_std=[0, 1, 1]", "greater than or equal to 0.0001"),
        ("encoders.vision.encode_group=0", "greater than or equal to 1"),
        ("encoders.vision.run_ahead=[auto]", "needs 'auto' or a number of microbatches"),
        ("language.lora={targets: []}", "or patterns of names such as '*.q_proj', each once"),
        ("language.lora={targets: ['*.q', '*.q']}", "each once"),
        ("language.lora={targets: ['*.q_proj']}", "engine: megatron has no names of transformers"),
        ("language.freeze=[]", "needs true, false or a list of patterns of names"),
        ("language.freeze=tower", "needs true, false or a list of patterns of names"),
        ("encoders.vision.freeze=most", "needs true, false, 'tower'"),
        ("language.freeze=['*.gaet.*']", "no parameter has such a name"),
        ("language.freeze=['*']", "its patterns freeze everything; set it to true"),
        ("train.run_dir=''", "at least 1 character"),
        ('train.run_dir="a\\0b"', "another control character"),
        ("data.sequence_length=16777216", "tokens of a microbatch, but at most"),
    ],
)
def test_an_override_beyond_all_bounds_is_refused(override: str, message: str) -> None:
    extra = ["train.micro_batch_size=1024"] if "sequence_length" in override else []
    with pytest.raises(RecipeError) as caught:
        check(*extra, override)
    assert message in str(caught.value), str(caught.value)
    assert str(caught.value).startswith(("override '", f"{QUICKSTART}:"))


@pytest.mark.parametrize("name", ["../up", "", "a.b", "x" * 65, "é"])
def test_the_name_of_an_encoder_is_part_of_a_file_name(tmp_path: Path, name: str) -> None:
    path = tmp_path / "recipe.yaml"
    text = QUICKSTART.read_text()
    path.write_text(text.replace("\n  vision:\n", f'\n  "{name}":\n'))
    with pytest.raises(RecipeError, match=r"recipe\.yaml:\d+: encoders\."):
        load_recipe(path)


@pytest.mark.parametrize("name", ["..", "a/b", "", "x" * 65])
def test_the_name_of_a_phase_is_part_of_a_file_name(name: str) -> None:
    with pytest.raises(RecipeError, match=r"phases\.0\.name: needs up to 64 letters"):
        load_phases(QUICKSTART, [f'phases=[{{name: "{name}"}}]'])


def test_a_layout_of_16384_ranks_is_no_bad_input() -> None:
    overrides = [
        "language.grid={tp: 8, sp: true, pp: 8, dp: 192}",
        "language.model.num_layers=64",
        "language.model.num_attention_heads=64",
        "language.model.num_query_groups=8",
        "encoders.vision.grid={dp: 4096}",
        "train.global_batch_size=12288",
    ]
    layout = build_layout(load_recipe(QUICKSTART, overrides), 16384)
    assert layout.world_size == 16384
    check(*overrides)


# ----------------------------------------------------------------- bounds


def numbers_without_bounds(schema: Any, where: str) -> Iterator[str]:
    """Every number of a JSON schema that lacks a lower or an upper bound."""
    if isinstance(schema, list):
        for part in schema:
            yield from numbers_without_bounds(part, where)
    if not isinstance(schema, dict):
        return
    if schema.get("type") in ("integer", "number"):
        low = {"minimum", "exclusiveMinimum"} & schema.keys()
        high = {"maximum", "exclusiveMaximum"} & schema.keys()
        if not (low and high):
            yield where
    for key, part in schema.items():
        yield from numbers_without_bounds(part, f"{where}.{key}")


def all_settings() -> list[type[BaseModel]]:
    found: list[type[BaseModel]] = [Recipe]
    for package in (mimo.families.languages, encoders):
        names = [m.name for m in pkgutil.iter_modules(package.__path__) if m.name[0] != "_"]
        assert len(names) >= 3
        found += [import_module(f"{package.__name__}.{name}").Settings for name in names]
    return found


@pytest.mark.parametrize("model", all_settings(), ids=lambda model: model.__module__)
def test_every_number_that_people_type_has_both_bounds_and_is_no_nan(
    model: type[BaseModel],
) -> None:
    assert not list(numbers_without_bounds(model.model_json_schema(), model.__name__))
    for section in sections_of(model):
        assert section.model_config.get("strict"), section
        assert section.model_config.get("allow_inf_nan") is False, section


def sections_of(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
        for field in annotation.model_fields.values():
            yield from sections_of(field.annotation)
    for part in get_args(annotation):
        yield from sections_of(part)


# ------------------------------------------------------------------- fuzz


def keys_of(model: type[BaseModel], where: str) -> Iterator[str]:
    """Every key of a section of the recipe, those of sections in it included."""
    for name, field in model.model_fields.items():
        yield f"{where}{name}"
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from keys_of(field.annotation, f"{where}{name}.")


KEYS = [
    *keys_of(Recipe, ""),
    *keys_of(Encoder, "encoders.vision."),
    *keys_of(encoders.qwen_vl.Settings, "encoders.vision.model."),
    *keys_of(mimo.families.languages.qwen3.Settings, "language.model."),
    *("", "phases", "encoders.vision", "encoders.²", "data.sources.0", "data.sources.0.weight"),
]
SCALARS = st.one_of(
    st.integers(),
    st.integers(-2, 70).map(lambda power: 2**power if power > 0 else power),
    st.floats(),
    st.booleans(),
    st.none(),
    st.sampled_from(["auto", "all", "..", "/", "\0", "tower", "qwen3", "gemma3", "qwen3_vl", "²"]),
    st.text(max_size=20),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["tp", "path", "rank", "name", "x"]), inner, max_size=3)
    ),
    max_leaves=6,
)


def as_yaml(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text.replace("NaN", ".nan").replace("Infinity", ".inf")


@pytest.mark.timeout(120)
@given(st.lists(st.tuples(st.sampled_from(KEYS), VALUES), min_size=1, max_size=3))
@settings(max_examples=150, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
def test_whatever_stands_in_a_recipe_it_works_or_is_refused(changes: list[tuple[str, Any]]) -> None:
    with suppress(InputError):
        check(*(f"{key}={as_yaml(value)}" for key, value in changes))


@pytest.mark.timeout(120)
@given(st.lists(st.tuples(st.integers(0, 10**6), st.sampled_from("\n :{}[]&*!<>-?|#'\"%@²0x\t,"))))
@settings(max_examples=60, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
def test_whatever_text_a_recipe_is_it_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[int, str]]
) -> None:
    text = QUICKSTART.read_text()
    for place, letter in changes:
        place %= len(text)
        text = text[:place] + letter + text[place + 1 :]
    path = tmp_path_factory.mktemp("fuzz") / "recipe.yaml"
    path.write_text(text)
    with suppress(RecipeError):
        load_phases(path)


def test_a_recipe_that_an_earlier_version_recorded_is_read_without_its_old_keys(
    tmp_path: Path,
) -> None:
    text = QUICKSTART.read_text().replace("data:\n", "data:\n  prepare: digits\n")
    written, recorded = tmp_path / "mine.yaml", tmp_path / "recipe.yaml"
    written.write_text(text)
    recorded.write_text(text)
    with pytest.raises(RecipeError, match="this key was removed; `python -m examples.digits`"):
        load_recipe(written)
    assert load_recipe(recorded).to_yaml() == load_recipe(QUICKSTART).to_yaml()
