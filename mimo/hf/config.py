"""The configuration files of a folder in Hugging Face format, and what of them we can compute."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mimo.recipe_errors import InputError

Config = Mapping[str, Any]


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises InputError when it is missing or something else."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path}: no such file; give a folder in Hugging Face format") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise InputError(f"{path}: is not a JSON object")
    return found


def read_config(folder: Path) -> dict[str, Any]:
    """``config.json``, in today's form whichever version of transformers wrote it.

    Sizes of the language model are under ``text_config``, those of a tower under
    ``vision_config``, rotary settings under ``rope_parameters``. Raises InputError.
    """
    read_json(folder / "config.json")  # says which file it is that is missing or broken
    # Here, because they cost seconds to import.
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        ).to_dict()
    except (OSError, ValueError, KeyError, TypeError, StrictDataclassError) as error:
        raise InputError(f"{folder / 'config.json'}: cannot be understood: {error}") from error
    # A tied embedding is said at the top, or for the text alone, depending on version and model.
    text = config.get("text_config", {})
    config.setdefault("tie_word_embeddings", text.get("tie_word_embeddings", False))
    return config


@dataclass(frozen=True)
class Processors:
    """How items are prepared, as files of a folder say; empty where none does."""

    image: Config
    video: Config


def read_processors(folder: Path) -> Processors:
    """From the file that transformers would take: today's one file, else those of old versions."""
    found: dict[str, Any] = {}
    if (folder / "processor_config.json").is_file():
        both = read_json(folder / "processor_config.json")
        found = {kind: both.get(f"{kind}_processor") for kind in ("image", "video")}
    for kind, name in (("image", "preprocessor"), ("video", "video_preprocessor")):
        path = folder / f"{name}_config.json"
        if not found.get(kind) and path.is_file():
            found[kind] = read_json(path)
    return Processors(found.get("image") or {}, found.get("video") or {})


def expect(section: Config, where: str, **values: object) -> None:
    """Raise ValueError for keys of ``section`` that have another value than the one we compute.

    A key that is absent or null has the value that is expected.
    """
    wrong = [
        f"{where}.{key} is {section[key]!r}; only {value!r} is supported"
        for key, value in values.items()
        if section.get(key) not in (None, value)
    ]
    if wrong:
        raise ValueError("; ".join(wrong))


def pixel_limits(processor: Config, prefix: str = "") -> dict[str, int]:
    """``min_pixels`` and ``max_pixels`` of Qwen's processors, in old and new files.

    prefix: of the names in the result.
    """
    size = processor.get("size") or {}
    found = {
        "min_pixels": processor.get("min_pixels") or size.get("shortest_edge"),
        "max_pixels": processor.get("max_pixels") or size.get("longest_edge"),
    }
    return {f"{prefix}{key}": value for key, value in found.items() if value is not None}
