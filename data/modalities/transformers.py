"""Prepare items with a model's own processor in transformers, for any model.

The processor of a folder decides what stands for an item in the text and which arrays its tower
takes. It runs once on a blank item of each size, to learn what does not depend on the content. Of
each item only the arrays that depend on the content are sent, as flat numbers.

Letters: `P` numbers of all arrays that depend on the content of one item.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
from PIL import Image

from data.modalities.audio import SAMPLE_RATE, AudioClips, Sound, resampled_length
from data.modalities.image_files import to_rgb
from data.modalities.images import ImageProcessor
from data.modalities.processor import (
    Grid,
    Media,
    Part,
    PartPlan,
    ProcessorError,
    Size,
    WireForm,
    encoding_cost,
)
from data.text.messages import DEFAULT_FPS, ITEM_SLOT, MediaText

if TYPE_CHECKING:
    from torch import Tensor

_LOCAL: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
_FILES = (
    *("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json"),
    *("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
)
_ARGUMENTS = {"image": "images", "video": "videos", "audio": "audio"}  # of a processor
_MAX_FORMS, _MAX_PROCESSORS = 1024, 8
_PATCH_NUMBERS, _TOWER_WIDTH = 3 * 14 * 14, 1024  # of a usual tower: only the cost depends on them
# Tokenizers and processors change their own state while they run.
_RUNNING = threading.Lock()


@dataclass(frozen=True)
class ItemForm:
    """Properties that all items of one size share.

    arrays: the processor's arrays for one item, except the text's, in its order and by the names
    of the model's arguments. Arrays that depend on the content are on the meta device.
    text: the item's text in the chat, with `{item}` once for each run of placeholders.
    slot_rows: number of placeholders in each run.
    """

    arrays: Mapping[str, Tensor]
    text: str
    slot_rows: tuple[int, ...]

    @property
    def num_rows(self) -> int:
        return sum(self.slot_rows)

    @property
    def num_values(self) -> int:
        """P, the numbers that depend on the content."""
        return sum(array.numel() for array in self.arrays.values() if array.is_meta)

    def content(self, values: Tensor) -> dict[str, Tensor]:
        """Return the arrays that depend on the content, from an item's values (P, 1)."""
        arrays = {name: array for name, array in self.arrays.items() if array.is_meta}
        parts = values.reshape(-1).split([array.numel() for array in arrays.values()])
        return {
            name: part.reshape(array.shape).to(array.dtype)
            for part, (name, array) in zip(parts, arrays.items(), strict=True)
        }


@dataclass(frozen=True)
class TransformersMedia:
    """A `Media` whose items are prepared by the processor of a folder in Hugging Face format.

    modality: "image", "video" or "audio". A part is one item. The grid of its plan is (frames,
    height, width) of its files in pixels, or (0, samples per second, samples) of a clip.
    """

    folder: str
    modality: str

    @property
    def _files(self) -> Media[Any]:
        return AudioClips() if self.modality == "audio" else ImageProcessor()

    @property
    def suffixes(self) -> tuple[str, ...]:
        return self._files.suffixes

    def probe(self, file: BinaryIO) -> Size:
        return self._files.probe(file)

    def decode(self, data: bytes) -> Any:
        return self._files.decode(data)

    def size_of(self, decoded: Any) -> Size:
        return self._files.size_of(decoded)

    def size_text(self, size: Size) -> str:
        return self._files.size_text(size)

    def picture(self, decoded: Any) -> np.ndarray:
        return self._files.picture(decoded)

    def random_file(self, rng: np.random.Generator) -> bytes:
        return self._files.random_file(rng)

    @property
    def wire(self) -> WireForm:
        """Form of an item: its P numbers, unchanged."""
        return WireForm(width=1)

    def plan(self, part: Part) -> PartPlan:
        """Plan a part as one item. Raises as `form`, and ValueError for a bad number of files."""
        if part.frames != 1 and self.modality != "video":
            raise ValueError(f"a part of {part.frames} files, but an {self.modality} is one file")
        if part.frames == 1 and self.modality == "video":
            raise ValueError("a video of 1 frame; need 2 or more")
        grid = self._grid(part)
        form = self.form(grid, part.fps)
        if self.modality == "video" and not _are_equal(form.arrays, self.form(grid).arrays):
            raise ValueError(
                f"a video of {part.fps:g} frames per second; the processor of {self.folder} gives "
                f"other arguments at this rate, so only {DEFAULT_FPS:g} is supported"
            )
        return PartPlan(
            grid=grid,
            row_grid=(1, 1, form.num_rows),
            cost=encoding_cost(-(-form.num_values // _PATCH_NUMBERS), _TOWER_WIDTH),
            text=form.text,
            slot_rows=form.slot_rows if len(form.slot_rows) > 1 else None,
            patches=form.num_values,
        )

    def form(self, grid: Grid, fps: float = DEFAULT_FPS) -> ItemForm:
        """Return the form of all items with this grid of a plan; fps: of a video.

        Raises ValueError if the processor refuses such items, ProcessorError if it does not write
        as many placeholders as it promises.
        """
        return _form(self, grid, fps if self.modality == "video" else DEFAULT_FPS)

    def _grid(self, part: Part) -> Grid:
        frames = 0 if self.modality == "audio" else part.frames
        return frames, part.size[1], part.size[0]

    def item_files(self, part: Part, item: int) -> range:
        return range(part.frames)

    def item_patches(self, files: Sequence[Any], part: Part, item: int) -> np.ndarray:
        """Return the arrays that depend on the content, flat, (P, 1) float32. Raises ValueError."""
        form = self.form(self._grid(part), part.fps)
        _, arrays = self._run(files, part.fps)
        shapes, expected = (
            {n: tuple(a.shape) for n, a in of.items()} for of in (arrays, form.arrays)
        )
        if shapes != expected:
            raise ValueError(
                f"the processor makes {shapes} of this {self.modality}, but {expected} of a blank "
                "one: they depend on more than its size"
            )
        flat = [arrays[name].flatten().float() for name, of in form.arrays.items() if of.is_meta]
        return np.concatenate([values.numpy() for values in flat])[:, None]

    def fingerprint(self) -> str:
        """Hex digest that changes with the processor's files and the version of transformers."""
        files = (Path(self.folder) / name for name in _FILES)
        settings = [(file.name, file.read_bytes()) for file in files if file.is_file()]
        parts = ("transformers-1", version("transformers"), self.modality, settings)
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]

    def _run(self, files: Sequence[Any], fps: float) -> tuple[Mapping[str, Any], dict[str, Tensor]]:
        """Run the processor on an item; return its outputs, and their arrays except the text's."""
        processor, options = _processor(self.folder), dict[str, Any]()
        if self.modality == "audio":
            content, options["sampling_rate"] = files[0].waveform, SAMPLE_RATE
        elif self.modality == "image":
            content = to_rgb(files[0])
        else:
            from transformers.video_utils import VideoMetadata

            content = np.stack([np.asarray(to_rgb(file)) for file in files])
            count, (height, width) = len(files), content.shape[1:3]
            times = (count / fps, None, list(range(count)))
            metadata = VideoMetadata(count, fps, width, height, *times)
            options = {"do_sample_frames": False, "video_metadata": [metadata]}
        text = media_tokens(self.folder, self.modality).written
        if hasattr(processor, "_has_wrappers"):  # HunYuan-VL refuses a token that stands alone
            text = f"{processor.image_start_token}{text}{processor.image_end_token}"
        try:
            with _RUNNING:
                outputs = processor(
                    text=[text],
                    **{_ARGUMENTS[self.modality]: [content]},
                    **options,
                    return_tensors="pt",
                    return_mm_token_type_ids=True,
                    return_text_replacement_offsets=True,
                )
            return outputs, _arrays(outputs)
        except Exception as error:  # a processor is a program, and may fail in any way
            raise ValueError(
                f"the processor of {self.folder} refuses this {self.modality} "
                f"({type(error).__name__}: {error})"
            ) from error


@lru_cache(_MAX_FORMS)
def _form(media: TransformersMedia, grid: Grid, fps: float) -> ItemForm:
    frames, height, width = grid
    if media.modality == "audio":
        size, silence = (width, height), np.zeros(resampled_length(width, height), np.float32)
        outputs, arrays = media._run([Sound(silence, size)], fps)
    else:
        outputs, arrays = media._run([Image.new("RGB", (width, height))] * frames, fps)
    processor = _processor(media.folder)
    token = media_tokens(media.folder, media.modality).placeholder
    where = f"{media.folder}: {type(processor).__name__}"
    replaced = (outputs.get("text_replacement_offsets") or [[]])[0]
    if len(replaced) != 1:
        raise ProcessorError(f"{where} does not tell what stands for an {media.modality}")
    text, runs = replaced[0]["replacement"], re.compile(f"(?:{re.escape(token)})+")
    slot_rows = tuple(len(run) // len(token) for run in runs.findall(text))
    token_id = processor.tokenizer.convert_tokens_to_ids(token)
    counted = int((outputs["input_ids"][0] == token_id).sum())
    # Some processors also count the tokens around the placeholders, and mark these.
    kinds = outputs.get("mm_token_type_ids", outputs.get("token_type_ids"))
    marked = counted if kinds is None else int(np.count_nonzero(kinds[0]))
    promised = counted or 1
    if media.modality == "image" and hasattr(processor, "_get_num_multimodal_tokens"):
        promise = processor._get_num_multimodal_tokens(image_sizes=[(height, width)])
        promised = int(promise["num_image_tokens"][0])
    if promised not in (counted, marked) or not 0 < counted == sum(slot_rows):
        raise ProcessorError(
            f"{where} promises {promised} placeholders {token} for an {media.modality} of "
            f"{media.size_text((width, height))}, but writes {counted}"
        )
    for name, array in arrays.items():
        depends_on_content = array.is_floating_point() or name.startswith("pixel_values")
        arrays[name] = array.to("meta") if depends_on_content else _small(array)
    return ItemForm(arrays, runs.sub(ITEM_SLOT, text), slot_rows)


def _arrays(outputs: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return a processor's outputs except the text's; raises any error for other than arrays."""
    import torch

    def array_of(value: Any) -> Tensor:
        is_list = isinstance(value, list) and all(isinstance(part, torch.Tensor) for part in value)
        return torch.stack(value) if is_list else torch.as_tensor(value)

    text = ("input_ids", "attention_mask", "labels", "text_replacement_offsets")
    names = [name for name in outputs if name not in text and not name.endswith("token_type_ids")]
    return {name: array_of(outputs[name]) for name in names}


def _are_equal(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> bool:
    pairs = [(first[name], second[name]) for name in first]
    return all(a.shape == b.shape and (a.is_meta or bool((a == b).all())) for a, b in pairs)


def _small(array: Tensor) -> Tensor:
    """Return an equal array; one of equal numbers, such as a mask of ones, stores one number."""
    if array.numel() and bool((array == (first := array.flatten()[0])).all()):
        return first.clone().expand(array.shape)
    return array


@lru_cache(_MAX_PROCESSORS)
def media_tokens(folder: str, modality: str) -> MediaText:
    """Return how items appear in the chats of a folder's model.

    Raises ValueError if its processor has no token for this modality, and the ImportError, OSError,
    ValueError or KeyError of `load_processor`.
    """
    from transformers import AutoConfig

    processor, config = _processor(folder), None
    with suppress(OSError, ValueError):  # a folder without a model
        config = AutoConfig.from_pretrained(folder, **_LOCAL)
    places = ((config, "id"), (config, "index"), (processor, "id"))  # the model's comes first
    ids = (getattr(owner, f"{modality}_token_{kind}", None) for owner, kind in places)
    token_id = next((number for number in ids if number is not None), None)
    written = getattr(processor, f"{modality}_token", None)
    if written is None or token_id is None:
        raise ValueError(f"{folder}: {type(processor).__name__} has no token for {modality} items")
    return MediaText(processor.tokenizer.convert_ids_to_tokens(token_id), str(written))


def load_processor(folder: str | Path) -> Any:
    """Return the processor of `AutoProcessor.from_pretrained`, with pillow for images.

    Torchvision rounds differently. Raises ImportError for missing packages, and OSError, ValueError
    or KeyError for a folder whose processor is unknown.
    """
    from transformers.processing_utils import MODALITY_TO_AUTOPROCESSOR_MAPPING as AUTO

    base, parts = processor_class(folder), []
    for name in base.get_attributes():
        backend = {"backend": "pil"} if name == "image_processor" else {}
        parts.append(AUTO[name].from_pretrained(folder, **backend, **_LOCAL))
    settings, _ = base.get_processor_dict(folder, **_LOCAL)
    return base.from_args_and_dict(parts, settings)


_processor = lru_cache(_MAX_PROCESSORS)(load_processor)


def processor_class(folder: str | Path) -> Any:
    """Return the class that the folder's files name, else that of its model."""
    from transformers import AutoConfig
    from transformers.models.auto.processing_auto import (
        PROCESSOR_MAPPING,
        processor_class_from_name,
    )

    for name in _FILES:
        file = Path(folder) / name
        named = json.loads(file.read_text()).get("processor_class") if file.is_file() else None
        if named is not None and (known := processor_class_from_name(named)) is not None:
            return known
    return PROCESSOR_MAPPING[type(AutoConfig.from_pretrained(str(folder), **_LOCAL))]
