"""How a folder's items are prepared: as its files say, else by the defaults of transformers.

The defaults are in two places. Those in the class of an image or video processor apply where its
file is silent; those in the class of the whole processor apply whatever that file says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mimo.errors import kind_of
from mimo.families.hf_config import Config, agree, read_json

WHOLE = "processor_config.json"
TOKENIZER = "tokenizer_config.json"
_FILES = {
    "image": ("preprocessor_config.json",),
    "video": ("video_preprocessor_config.json", "preprocessor_config.json"),
}


@dataclass(frozen=True)
class Processors:
    """How items are prepared; empty where no file of the folder says anything.

    image: every setting, defaults included. video: as its file says. whole: settings of the
    processor that both belong to, as its file says. files: all these files by name.
    """

    image: Config
    video: Config
    whole: Config
    files: Mapping[str, Config] = field(default_factory=dict)

    @property
    def share_a_file(self) -> bool:
        """Whether the file for images is also that for videos, as in old versions."""
        return self.video is self.files.get(_FILES["image"][0])


def read_processors(folder: Path) -> Processors:
    """The settings as `AutoProcessor` reads them. Raises InputError for files that it refuses."""
    names = dict.fromkeys((WHOLE, *_FILES["image"], *_FILES["video"]))
    files = {name: read_json(folder / name) for name in names if (folder / name).is_file()}
    whole = files.get(WHOLE, {})
    image = _effective_image(folder) if _said(files, "image") is not None else {}
    return Processors(image, _said(files, "video") or {}, whole, files)


def processor_class(folder: str | Path) -> Any:
    """The class of the whole processor in transformers."""
    from transformers import AutoConfig
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

    config = AutoConfig.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    return PROCESSOR_MAPPING[type(config)]


def image_defaults_of_processor(folder: Path) -> Config:
    """What the class of the whole processor says for images, whatever their own file says."""
    return dict(getattr(processor_class(folder), "images_kwargs", {}))


def _said(files: Mapping[str, Config], kind: str) -> Config | None:
    """What the files say of one kind: the current single file, else those of older versions."""
    nested = files.get(WHOLE, {}).get(f"{kind}_processor")
    if nested is not None:
        return nested
    return next((files[name] for name in _FILES[kind] if name in files), None)


def _effective_image(folder: Path) -> dict[str, Any]:
    from transformers import AutoImageProcessor

    try:
        processor: Any = AutoImageProcessor.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False, backend="pil"
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise kind_of(error)(
            f"{folder}: the image processor's configuration cannot be understood: {error}"
        ) from error
    name = type(processor).__name__.removesuffix("Pil").removesuffix("Fast")  # they name a backend
    found = {**processor.to_dict(), "image_processor_type": name}
    found |= image_defaults_of_processor(folder)
    # Settings of the tokenizer also go to the image processor.
    path = folder / TOKENIZER
    given = read_json(path) if path.is_file() else {}
    keys = processor.valid_kwargs.__annotations__
    return {**found, **{key: value for key, value in given.items() if key in keys}}


def pixel_limits(processor: Config, prefix: str = "") -> dict[str, int]:
    """``min_pixels`` and ``max_pixels`` of Qwen's processors, from old or new files.

    prefix: of the names in the result.
    """
    size = processor.get("size") or {}
    found = {
        "min_pixels": processor.get("min_pixels") or size.get("shortest_edge"),
        "max_pixels": processor.get("max_pixels") or size.get("longest_edge"),
    }
    return {f"{prefix}{key}": value for key, value in found.items() if value is not None}


def normalisation(processor: Config) -> dict[str, list[float]]:
    """Means and deviations of the channels, which files may give as one number for all three."""
    found = {}
    for key in ("image_mean", "image_std"):
        value = processor.get(key)
        if value is not None:
            found[key] = [float(value)] * 3 if isinstance(value, (int, float)) else list(value)
    return found


def check_agreement(processors: Processors, **said: object) -> None:
    """Raise ValueError where a file of processors contradicts ``config.json``.

    said: what ``config.json`` says, by the key in those files.
    """
    agree(processors.image, "the image processor's configuration", **said)
    agree(processors.video, "the video processor's configuration", **said)
    for name, content in processors.files.items():
        agree(content, name, **said)
