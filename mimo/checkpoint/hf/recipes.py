"""Recipes that start from a Hugging Face folder: what they leave out is filled in from it."""

import copy
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mimo.checkpoint.hf import pipelines
from mimo.checkpoint.hf.architectures import Architecture, architecture_of
from mimo.config.phases import PhasedRecipe, read_phases
from mimo.config.schema import Recipe, read_recipe
from mimo.config.source import Location
from mimo.errors import InputError, StartError, kind_of
from mimo.families.hf_config import LOCAL, Config, read_config, read_json, read_processors
from mimo.families.registry import GENERAL

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_DEFAULT_ENCODER, _DEFAULT_GENERATOR = "vision", "image"
_UNREAD = "unread"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read and complete a recipe, see `mimo.config.schema.read_recipe`. Raises RecipeError."""
    return read_recipe(path, overrides, fill_recipe)


def load_phases(
    path: Path, overrides: Sequence[str] = (), site: Path | None = None
) -> PhasedRecipe:
    """Read and complete phases, see `mimo.config.phases.read_phases`. Raises RecipeError."""
    return read_phases(path, overrides, fill_recipe, site)


def fill_recipe(data: dict[str, Any]) -> Iterator[tuple[Location, str]]:
    """Complete a recipe's plain data in place from the folder that ``init_from`` names.

    A Hub id (``org/name``) becomes its folder in the local cache, downloaded on first use.
    Values in the recipe win. Without ``encoders`` it gets one for images; ``encoders: {}`` means
    the language model alone. The folder's tower is the first encoder that names no family, or the
    folder's family; the others have their own. In a folder of diffusers, the text encoder
    is such a folder, and the transformer is a generator, by the same rules. Yields location and
    message of every problem.
    """
    init_from = data.get("init_from")
    if init_from is None:
        return
    if not isinstance(init_from, str):
        _add_stand_ins(data)
        return  # the schema reports it
    folder = Path(init_from)
    if not folder.is_dir() and (snapshot := _snapshot(init_from)) is not None:
        folder, data["init_from"] = snapshot, str(snapshot)
    if not folder.is_dir() and _section(data, "language").get("model"):
        return  # resolved
    try:
        if not folder.is_dir():
            hint = "give a checkpoint in Hugging Face format"
            if _HUB_ID.fullmatch(init_from):
                hint += f"; if this is the id of one, run `hf download {init_from}` first"
            raise InputError(f"{folder}: no such folder; {hint}")
        if pipelines.is_pipeline(folder):
            data.setdefault("generators", {_DEFAULT_GENERATOR: {}})
            folder /= pipelines.TEXT_ENCODER
            data["init_from"] = str(folder)
        pipeline = pipelines.pipeline_around(folder) if data.get("generators") else None
        generator = pipeline and pipelines.generator_in(pipeline)
        config = read_config(folder)
        family = _section(data, "language").get("family")
        architecture = architecture_of(config.get("model_type"), family)
        language = architecture.language_family().settings_from_hf(config)
        tower = tower_settings(architecture, config, folder)
    except StartError:
        raise
    except (ValueError, KeyError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        # An InputError names the file.
        yield ("init_from",), reason if isinstance(error, InputError) else f"{folder}: {reason}"
        _add_stand_ins(data)
        return
    section = _section(data, "language")
    yield from _fill_module(("language",), section, architecture.language, language)
    tokenizer = folder.parent / pipelines.TOKENIZER
    is_apart = folder.name == pipelines.TEXT_ENCODER and tokenizer.is_dir()
    _section(data, "data").setdefault("tokenizer", str(tokenizer if is_apart else folder))
    yield from _fill_encoders(data, folder, architecture, tower)
    if generator is not None:
        yield from _fill_generators(data, *generator)


def _fill_encoders(
    data: dict[str, Any], folder: Path, architecture: Architecture, tower: dict[str, Any] | None
) -> Iterator[tuple[Location, str]]:
    data.setdefault("encoders", {} if tower is None else {_DEFAULT_ENCODER: {}})
    encoders = _section(data, "encoders")
    if tower is None or architecture.encoder is None:
        for name in encoders:
            message = f"{folder} holds a language model alone ({architecture.model_type}); leave "
            yield ("encoders", name), message + "encoders out"
        return
    sections = {name: _section(encoders, name) for name in encoders}
    families = {name: section.get("family") for name, section in sections.items()}
    # If none is of the folder's family, the first is meant, and the messages say so.
    tower_name = architecture.tower_among(families) or next(iter(sections), None)
    for name, section in sections.items():
        if name == tower_name:
            yield from _fill_module(("encoders", name), section, architecture.encoder, tower)
            keys = architecture.encoder_keys
            if architecture.language == GENERAL:
                _section(data, "language").setdefault("engine", "fsdp")
                _section(data, "bridge").setdefault("delivery", "replicated")
                section.setdefault("engine", "fsdp")
                keys = {} if "placeholder" in section else item_keys(folder)
            for key, value in keys.items():
                section.setdefault(key, copy.deepcopy(value))
        elif isinstance(encoders[name], dict):
            held = f"encoders.{tower_name}"
            more = f", or name further media of {held} in {held}.other_media"
            yield from _require_family(("encoders", name), section, held, more)


def _fill_generators(
    data: dict[str, Any], family: str, keys: dict[str, Any]
) -> Iterator[tuple[Location, str]]:
    """Fill in the folder's generator; those of other families begin with fresh weights."""
    generators = _section(data, "generators")
    sections = {name: _section(generators, name) for name in generators}
    held = next((n for n, s in sections.items() if s.get("family") in (None, family)), None)
    for name, section in sections.items():
        if name == held:
            yield from _fill_module(("generators", name), section, family, keys["model"])
            if section.setdefault("condition", keys.get("condition", "queries")) != "prompt":
                keys.pop("skipped_tokens", None)
            for key, value in keys.items():
                section.setdefault(key, value)
        elif isinstance(generators[name], dict):
            yield from _require_family(("generators", name), section, f"generators.{held}")


def _require_family(
    location: Location, section: dict[str, Any], held: str, more: str = ""
) -> Iterator[tuple[Location, str]]:
    """Report a missing family. held: the module of the same kind that init_from holds."""
    if section.get("family") is None:
        message = (
            f"this key is required: init_from holds {held}; give this one a family and a model"
        )
        yield (*location, "family"), message + more
        section["family"] = _UNREAD  # so that it is not reported twice


def item_keys(folder: Path) -> dict[str, Any]:
    """Return an encoder's recipe keys for placeholders, by the folder's processor."""
    from data.modalities.transformers import media_tokens  # late: it loads numpy

    tokens = media_tokens(str(folder), "image")
    return {"placeholder": tokens.placeholder, "template_token": tokens.template_token}


def _snapshot(name: str) -> Path | None:
    """Return a Hub id's folder in the local cache, downloaded if absent. Raises StartError."""
    if not _HUB_ID.fullmatch(name):
        return None
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    absent = (HFValidationError, LocalEntryNotFoundError, HfHubHTTPError, ConnectionError)
    for offline in (True, False):
        try:
            with suppress(*absent):
                return Path(snapshot_download(name, local_files_only=offline))
        except OSError as error:  # such as a full disk
            raise StartError(f"{name}: its download failed: {error}") from error
    return None


def tower_settings(
    architecture: Architecture, config: Config, folder: Path
) -> dict[str, Any] | None:
    """Return the keys under ``model`` for a folder's tower. Raises ValueError or KeyError."""
    if architecture.encoder is None:
        return None
    return architecture.encoder_family().settings_from_hf(config, read_processors(folder))


def architecture_of_folder(folder: Path, family: str | None = None) -> Architecture:
    """Return a folder's architecture. family: of a recipe's language model. Raises InputError."""
    try:
        return architecture_of(read_config(folder).get("model_type"), family)
    except StartError:
        raise
    except ValueError as error:
        raise InputError(f"{folder / 'config.json'}: {error}") from error


def _add_stand_ins(data: dict[str, Any]) -> None:
    """Fill in what only the folder has, so that a refused recipe is not also called incomplete."""
    _section(data, "data").setdefault("tokenizer", _UNREAD)
    for modules in (data.get("encoders"), data.get("generators")):
        for section in modules.values() if isinstance(modules, dict) else ():
            if isinstance(section, dict):
                section.setdefault("family", _UNREAD)


def _section(data: dict[str, Any], key: str) -> dict[str, Any]:
    """Return a mapping inside a recipe, made if absent; a value of a wrong type is left alone."""
    if data.get(key) is None:
        data[key] = {}
    return data[key] if isinstance(data[key], dict) else {}


def _fill_module(
    location: Location, section: dict[str, Any], family: str, settings: dict[str, Any]
) -> Iterator[tuple[Location, str]]:
    if section.setdefault("family", family) != family:
        yield (
            (*location, "family"),
            f"got {section['family']!r}, but init_from holds {family!r}; leave the key out",
        )
        return
    model = _section(section, "model")
    for key, value in settings.items():
        model.setdefault(key, copy.deepcopy(value))


def config_of_folder(folder: Path) -> "PretrainedConfig":
    """Return a whole model's configuration. Raises InputError if it is unknown, or code."""
    from transformers import AutoConfig  # late: it takes seconds to import

    try:
        if "auto_map" in read_json(folder / "config.json"):
            raise ValueError(
                "config.json has auto_map: the model is code of its own, which is not run; give a "
                "model that transformers itself has, or set engine: megatron"
            )
        return AutoConfig.from_pretrained(str(folder), **LOCAL)
    except (OSError, ValueError, KeyError) as error:
        raise kind_of(error)(f"{folder}: {error}") from error
