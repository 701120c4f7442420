"""Folders of diffusers: a language model in ``text_encoder``, a generator in ``transformer``.

Beside them lie ``tokenizer``, ``vae``, ``scheduler`` and ``model_index.json``. A recipe's
``init_from`` is the text encoder's folder, which is like any folder in Hugging Face format; the
rest is found from there.
"""

import importlib
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from mimo.config.schema import Recipe
from mimo.errors import InputError
from mimo.families.contracts import GeneratorFamily
from mimo.families.hf_config import read_json, write_json
from mimo.families.registry import GENERATORS, family_names, generator_family, generator_settings

if TYPE_CHECKING:
    from mimo.families.flow import Schedule

TEXT_ENCODER, TOKENIZER, TRANSFORMER, VAE = "text_encoder", "tokenizer", "transformer", "vae"
SCHEDULER, INDEX = "scheduler", "model_index.json"
WEIGHTS = "diffusion_pytorch_model"
"""Beginning of the names of a transformer's files."""
COPY = "pipeline"
"""In ``assets/``: copies of the small files around the text encoder."""
_SCHEDULER_CONFIG, _SCHEDULER_CLASS = "scheduler_config.json", "FlowMatchEulerDiscreteScheduler"


def is_pipeline(folder: Path) -> bool:
    """Return whether a folder is one of diffusers."""
    return (folder / INDEX).is_file()


def pipeline_around(text_encoder: Path) -> Path | None:
    """Return the folder of diffusers that a text encoder's folder is part of, or its copy."""
    folders = [text_encoder / COPY]
    if text_encoder.name == TEXT_ENCODER:
        folders.insert(0, text_encoder.parent)
    return next(filter(is_pipeline, folders), None)


def _pipeline_of(recipe: Recipe) -> Path | None:
    return None if recipe.init_from is None else pipeline_around(Path(recipe.init_from))


def generator_in(pipeline: Path) -> tuple[str, dict[str, Any]] | None:
    """Return the family of a folder's transformer and the keys of its recipe section.

    None without a transformer. Raises ValueError if no family computes it.
    """
    config = pipeline / TRANSFORMER / "config.json"
    if not config.is_file():
        return None
    names = family_names(GENERATORS)
    for name in names:
        family = cast("GeneratorFamily", importlib.import_module(f"{GENERATORS}.{name}"))
        if (model := family.settings_from_folder(pipeline)) is not None:
            keys = {"model": model, **family.RECIPE_KEYS}
            scheduler = _scheduler_in(pipeline)
            if scheduler is not None and not scheduler.get("use_dynamic_shifting"):
                keys["time_shift"] = float(scheduler.get("shift", 1))
            return name, keys
    raise InputError(
        f"{config}: _class_name is {read_json(config).get('_class_name')!r}, which no family "
        f"computes; there are {', '.join(names)}"
    )


def _scheduler_in(pipeline: Path | None) -> dict[str, Any] | None:
    path = pipeline and pipeline / SCHEDULER / _SCHEDULER_CONFIG
    return read_json(path) if path and path.is_file() else None


def folders_generator(recipe: Recipe) -> str | None:
    """Return the recipe's generator whose weights lie in the folder of ``init_from``, if any.

    It is the first of the folder's family. Raises ValueError.
    """
    pipeline = _pipeline_of(recipe) if recipe.generators else None
    families = {part.family for part in recipe.generators.values()}
    if pipeline is None or (held := generator_in(pipeline)) is None or held[0] not in families:
        return None
    return next(name for name, part in recipe.generators.items() if part.family == held[0])


def schedule_of(recipe: Recipe, generator: str) -> "Schedule":
    """Return the times of sampling: the folder's, with the recipe's shift if it is constant.

    Raises ValueError for a scheduler that we do not compute.
    """
    from mimo.families.flow import Schedule  # late: it loads torch

    held = _scheduler_in(_pipeline_of(recipe)) if generator == folders_generator(recipe) else None
    return Schedule.from_config({**(held or {}), "shift": recipe.generators[generator].time_shift})


def copy_small_files(recipe: Recipe, target: Path) -> None:
    """Copy the configuration around the text encoder of ``init_from``, if there is any."""
    pipeline = _pipeline_of(recipe)
    for path in pipeline.glob("*/*config.json") if pipeline is not None else ():
        if path.parent.name in (TRANSFORMER, VAE, SCHEDULER):
            (target / path.parent.name).mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target / path.parent.name / path.name)
    if pipeline is not None:
        target.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(pipeline / INDEX, target / INDEX)


def write_around(recipe: Recipe, generator: str, assets: Path, target: Path) -> None:
    """Write the rest of a folder of diffusers into ``target``, without weights and tokenizer.

    The autoencoder is copied. assets: the checkpoint's. Raises InputError.
    """
    import torch

    family, settings = generator_family(recipe, generator), generator_settings(recipe, generator)
    with torch.device("meta"):
        cast("Any", family.build(settings)).save_config(target / TRANSFORMER)
    if settings.autoencoder is not None:
        try:
            shutil.copytree(settings.autoencoder, target / VAE)
        except (OSError, shutil.Error) as error:
            raise InputError(
                f"{settings.autoencoder}, the autoencoder, cannot be copied: {error}"
            ) from error
    held = _scheduler_in(assets / COPY) or {"_class_name": _SCHEDULER_CLASS}
    (target / SCHEDULER).mkdir()
    shift = {"shift": recipe.generators[generator].time_shift}
    write_json(target / SCHEDULER / _SCHEDULER_CONFIG, {**held, **shift})
    if is_pipeline(assets / COPY):
        shutil.copyfile(assets / COPY / INDEX, target / INDEX)
    else:
        write_index(target, family.PIPELINE)


def write_index(folder: Path, pipeline: str) -> None:
    """Write ``model_index.json`` by the classes in the subfolders. pipeline: class of the whole."""
    index: dict[str, Any] = {"_class_name": pipeline}
    for part, file in ((SCHEDULER, _SCHEDULER_CONFIG), (TRANSFORMER, "config.json")):
        index[part] = ["diffusers", read_json(folder / part / file)["_class_name"]]
    if (folder / VAE).is_dir():
        index[VAE] = ["diffusers", read_json(folder / VAE / "config.json")["_class_name"]]
    (text_class,) = read_json(folder / TEXT_ENCODER / "config.json")["architectures"]
    index |= {TEXT_ENCODER: ["transformers", text_class]}
    index |= {TOKENIZER: ["transformers", "PreTrainedTokenizerFast"]}
    write_json(folder / INDEX, index)
