"""Read configuration files in Hugging Face format, and refuse what we cannot compute.

Defaults of the class of an image or video processor apply where its file is silent, those of the
class of the whole processor always.
"""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mimo.errors import InputError, kind_of, shown

Config = Mapping[str, Any]
LOCAL: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
"""Arguments of ``from_pretrained`` of transformers: nothing is downloaded or run."""


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises InputError if it is missing or holds anything else, StartError if its file system fails.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path}: no such file; give a folder in Hugging Face format") from None
    except (OSError, ValueError, RecursionError) as error:
        raise kind_of(error)(f"{path}: cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise InputError(f"{path}: is not a JSON object")
    return content


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON object, indented."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


@contextmanager
def new_folder(target: Path, marker: str = "", writer: str = "") -> Iterator[Path]:
    """Yield a folder to write to, which becomes ``target`` at the end, or is removed on an error.

    marker: a file that marks a folder which may be replaced. writer: the command that wrote it.
    Raises InputError, before anything is written, if ``target`` holds something else already.
    """
    target = target.absolute()
    is_free = target.is_dir() and (
        not any(target.iterdir()) or (marker and (target / marker).is_file())
    )
    if not is_free and (target.exists() or target.is_symlink()):
        state = f"exists and was not written by `{writer}`" if writer else "exists already"
        raise InputError(f"{target} {state}; give an empty or a new folder")
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        if marker:
            shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def read_config(folder: Path) -> dict[str, Any]:
    """Read ``config.json`` in its current form, whichever version of transformers wrote it.

    Sizes of the language model are under ``text_config``, even for a text-only model, those of a
    tower under ``vision_config``, rotary settings under ``rope_parameters``. Raises InputError.
    """
    stored = read_json(folder / "config.json")
    if (quantized := stored.get("quantization_config")) is not None:
        raise InputError(
            f"{folder / 'config.json'}: quantization_config is {shown(quantized)}, but only plain "
            "weights are trained; give the checkpoint before it was quantized, or remove the key "
            "if this one was not"
        )
    # They take seconds to import.
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(str(folder), **LOCAL).to_dict()
    except (OSError, ValueError, KeyError, TypeError, StrictDataclassError) as error:
        reason = f"cannot be understood: {error}"
        if "auto_map" in stored:  # transformers would tell people to run it
            reason = "has auto_map: the model comes with its own code, which is not run"
        raise InputError(f"{folder / 'config.json'}: {reason}") from error
    # Tied embeddings are set at the top or under the text, depending on version and model.
    text = config.setdefault("text_config", dict(config))
    config.setdefault("tie_word_embeddings", text.get("tie_word_embeddings", False))
    return config


def expect(
    section: Config, where: str, reason: str = "only {!r} is supported", /, **values: object
) -> None:
    """Raise ValueError for keys of ``section`` with another value than this, unless it is null."""
    wrong = [
        f"{where}.{key} is {section[key]!r}; {reason.format(value)}"
        for key, value in values.items()
        if section.get(key) not in (None, value)
    ]
    if wrong:
        raise ValueError("; ".join(wrong))


def agree(section: Config, where: str, **values: object) -> None:
    """Raise ValueError for keys of ``section`` that contradict ``config.json``."""
    expect(section, where, "but config.json says {!r}", **values)


def refuse_dropout(config: Config) -> None:
    """Raise ValueError for dropout anywhere: we train without."""
    sections = {"": config, "text_config.": config["text_config"]}
    sections["vision_config."] = config.get("vision_config", {})
    wrong = [
        f"{where}{key} is {value!r}; dropout is not supported, set it to 0"
        for where, section in sections.items()
        for key, value in section.items()
        if "dropout" in key and value
    ]
    if wrong:
        raise ValueError("; ".join(wrong))


# The keys that transformers reads for the kinds we compute; others may be present, without effect.
_ROPE_READ = {
    "default": {"rope_theta"},
    "axial": {"rope_theta"},
    "linear": {"rope_theta", "factor", "partial_rotary_factor"},
}


def rope_settings(section: Config, where: str, *kinds: str) -> tuple[float, float]:
    """Return the base of the frequencies and the divisor of positions.

    Source: transformers `modeling_rope_utils`. section: the rotary settings under the key
    ``where``. kinds: the values of ``rope_type`` that the caller computes. Raises ValueError for
    another kind, and for partially rotated heads.
    """
    kind = section["rope_type"]
    if kind not in kinds:
        names = " and ".join(map(repr, kinds))
        are = "is" if len(kinds) == 1 else "are"
        raise ValueError(f"{where}.rope_type is {kind!r}; only {names} {are} supported")
    read = {key: value for key, value in section.items() if key in _ROPE_READ[kind]}
    if (part := read.get("partial_rotary_factor", 1.0)) != 1:
        raise ValueError(f"{where}.partial_rotary_factor is {part!r}; only 1 is supported")
    return float(read["rope_theta"]), float(read.get("factor", 1.0))


# ---- how the items of a folder are prepared

WHOLE = "processor_config.json"
TOKENIZER = "tokenizer_config.json"
_FILES = {
    "image": ("preprocessor_config.json",),
    "video": ("video_preprocessor_config.json", "preprocessor_config.json"),
}


@dataclass(frozen=True)
class Processors:
    """A folder's settings of processors; empty where none of its files has any.

    image: defaults included. video, whole: as in the files of the video and of the whole processor.
    files: all these files by name.
    """

    image: Config
    video: Config
    whole: Config
    files: Mapping[str, Config] = field(default_factory=dict)


def read_processors(folder: Path) -> Processors:
    """Read settings as `AutoProcessor` does. Raises InputError for files that it refuses."""
    names = dict.fromkeys((WHOLE, *_FILES["image"], *_FILES["video"]))
    files = {name: read_json(folder / name) for name in names if (folder / name).is_file()}
    whole = files.get(WHOLE, {})
    image = _effective_image(folder) if _stored(files, "image") is not None else {}
    return Processors(image, _stored(files, "video") or {}, whole, files)


def image_defaults_of_processor(folder: Path) -> Config:
    """Return the settings of images that the class of the whole processor sets over any file."""
    from data.modalities.transformers import processor_class  # late: it loads numpy

    return dict(getattr(processor_class(folder), "images_kwargs", {}))


def _stored(files: Mapping[str, Config], kind: str) -> Config | None:
    """Return the stored settings of a kind: of the current single file, else of older ones."""
    nested = files.get(WHOLE, {}).get(f"{kind}_processor")
    if nested is not None:
        return nested
    return next((files[name] for name in _FILES[kind] if name in files), None)


def _effective_image(folder: Path) -> dict[str, Any]:
    from transformers import AutoImageProcessor

    try:
        processor: Any = AutoImageProcessor.from_pretrained(str(folder), backend="pil", **LOCAL)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise kind_of(error)(
            f"{folder}: the image processor's configuration cannot be understood: {error}"
        ) from error
    name = type(processor).__name__.removesuffix("Pil").removesuffix("Fast")  # they name a backend
    settings = {**processor.to_dict(), "image_processor_type": name}
    settings |= image_defaults_of_processor(folder)
    # Settings of the tokenizer also go to the image processor.
    path = folder / TOKENIZER
    tokenizer = read_json(path) if path.is_file() else {}
    keys = processor.valid_kwargs.__annotations__
    return {**settings, **{key: value for key, value in tokenizer.items() if key in keys}}


def pixel_limits(processor: Config, prefix: str = "") -> dict[str, int]:
    """Return ``min_pixels`` and ``max_pixels`` of Qwen's processors, from old or new files."""
    size = processor.get("size") or {}
    limits = {
        "min_pixels": processor.get("min_pixels") or size.get("shortest_edge"),
        "max_pixels": processor.get("max_pixels") or size.get("longest_edge"),
    }
    return {f"{prefix}{key}": value for key, value in limits.items() if value is not None}


def normalisation(processor: Config) -> dict[str, list[float]]:
    """Return means and deviations of the channels; files may give one number for all three."""
    channels = {}
    for key in ("image_mean", "image_std"):
        value = processor.get(key)
        if value is not None:
            channels[key] = [float(value)] * 3 if isinstance(value, (int, float)) else list(value)
    return channels


def check_agreement(processors: Processors, **expected: object) -> None:
    """Raise ValueError where a file of processors contradicts ``config.json``.

    expected: values of ``config.json``, by the key in those files.
    """
    agree(processors.image, "the image processor's configuration", **expected)
    agree(processors.video, "the video processor's configuration", **expected)
    for name, content in processors.files.items():
        agree(content, name, **expected)
