"""Images of handwritten digits with questions, drawn from the scans that scikit-learn ships.

A sample shows one to four images of one digit each, asks for them, and answers "3 7 1". Some
samples are text only, in whole runs. `write_data_set` also writes the spoken digits.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from data.modalities.image_files import png_bytes
from data.text.digits import write_tokenizer
from examples.digits.conversations import image_conversation, text_conversation

FORMAT_VERSION = 1
SAMPLES_PER_SHARD = 2000
TEXT_RUN = 32  # text-only samples come in runs of this many, at multiples of it
_TEXT_RUN_PERIOD = 8  # one run of training samples in eight is text only
_TEXT_RUN_HELD_OUT = 16
_MARKER = ".complete"

# (width, height) of the canvas: weight. With 14-pixel patches merged 2 x 2 (min_pixels 28·28) they
# make 1, 2 or 4 rows, about 1.9 on average.
CANVASES = {(28, 28): 40, (28, 56): 13, (56, 28): 13, (40, 44): 11, (44, 40): 11, (56, 56): 12}
_NUM_IMAGES = {1: 3, 2: 3, 3: 2, 4: 2}

_MAX_ROTATION_DEGREES = 5.0
_MAX_SHIFT = 0.04  # of the digit's side
_DIGIT_SIDE = (0.86, 1.0)  # of the shorter side of the canvas
_SCAN_PIXELS = 8


Draw = Callable[[random.Random, bool], tuple[dict[str, bytes], dict[str, Any]]]
"""(random state, is text only) -> a sample's files by suffix, and its document."""


def prepare_digits(
    directory: str | Path,
    num_train: int = 16000,
    num_validation: int = 200,
    num_test: int = 300,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Write train-*.tar, validation-*.tar, test-*.tar and tokenizer/; return the absolute folder.

    The splits share no scan, and equal arguments give equal files. A folder that holds the same
    data is left as it is. The folder appears complete or not at all. progress(done, total) counts
    samples.

    Raises ValueError for counts below 1, and for a folder with other files, which is never deleted.
    """
    counts = {"train": num_train, "validation": num_validation, "test": num_test}
    settings = {f"num_{split}": count for split, count in counts.items()}
    settings |= {"seed": seed, "version": FORMAT_VERSION}

    return write_data_set(
        directory, "digits", seed, settings, counts, reading_samples, write_tokenizer, progress
    )


def reading_samples(split: str) -> Draw:
    """Return the function that draws a sample about images to read, or about text alone."""
    scans, digits = load_scans(split)

    def draw(rng: random.Random, text_only: bool) -> tuple[dict[str, bytes], dict[str, Any]]:
        files: dict[str, bytes] = {}
        if text_only:
            messages = text_conversation(rng)
        else:
            chosen = [rng.randrange(len(digits)) for _ in range(_weighted(rng, _NUM_IMAGES))]
            for position, scan in enumerate(chosen):
                canvas = _weighted(rng, CANVASES)
                image = draw_digit(scans[scan], canvas, rng, augment=split == "train")
                files[f"{position}.png"] = png_bytes(np.asarray(image))
            messages = image_conversation(digits[chosen].tolist(), rng)
        answer = messages[1]["content"][0]["text"]
        return files, {"messages": messages, "answer": answer, "images": len(files)}

    return draw


def write_data_set(
    directory: str | Path,
    kind: str,
    seed: int,
    settings: Mapping[str, object],
    counts: Mapping[str, int],
    drawing: Callable[[str], Draw],
    write_tokenizer: Callable[[Path], None],
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Write the shards of every split and tokenizer/ into `directory`; see `prepare_digits`.

    settings: all that the files depend on, as JSON. counts: samples by split. drawing: split -> a
    function that draws one sample from its own random state.
    """
    directory = Path(directory).absolute()
    if min(counts.values()) < 1:
        raise ValueError(f"number of samples per split is {counts}: need at least 1 of each")
    if _is_prepared(directory, settings):
        return directory
    if directory.exists() and not (directory / _MARKER).is_file() and any(directory.iterdir()):
        raise ValueError(f"{directory} exists and holds other files: give an empty or a new folder")
    temporary = directory.with_name(f".{directory.name}.{os.getpid()}.tmp")
    old = temporary.with_suffix(".old")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        done, total = 0, sum(counts.values())
        for split, count in counts.items():
            draw = drawing(split)
            for number in _write_split(temporary, f"{kind}/{seed}", split, count, draw):
                if progress is not None and (number % 100 == 0 or number == count):
                    progress(done + number, total)
            done += count
        write_tokenizer(temporary / "tokenizer")
        (temporary / _MARKER).write_text(json.dumps(dict(settings)), encoding="utf-8")
        try:
            if directory.exists():
                os.rename(directory, old)  # at any moment, one of the two is complete
            os.rename(temporary, directory)
        except OSError:  # another process was faster; equal settings gave equal files
            if not _is_prepared(directory, settings):
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)
    return directory


def _is_prepared(directory: Path, settings: Mapping[str, object]) -> bool:
    try:
        return json.loads((directory / _MARKER).read_text(encoding="utf-8")) == settings
    except (OSError, ValueError):
        return False


def is_text_only(split: str, number: int, count: int) -> bool:
    """Whether sample `number` of a split of `count` samples has no image."""
    if split == "train":
        return number // TEXT_RUN % _TEXT_RUN_PERIOD == 1
    return count >= 2 * TEXT_RUN and TEXT_RUN <= number < TEXT_RUN + _TEXT_RUN_HELD_OUT


def split_of_scan(number: int) -> str:
    """The split of a scan, by its index modulo 5: the last fifth is harder than the rest."""
    if number % 5 == 0:
        return "test"
    return "validation" if number % 20 == 1 else "train"


def _write_split(folder: Path, name: str, split: str, count: int, draw: Draw) -> Iterator[int]:
    """Write the shards of a split; yields the number of samples written so far."""
    from webdataset.writer import TarWriter  # late: it imports torch

    for shard, start in enumerate(range(0, count, SAMPLES_PER_SHARD)):
        with (
            open(folder / f"{split}-{shard:05d}.tar", "wb") as file,
            # Fixed owner and time: equal arguments give equal bytes.
            TarWriter(file, encoder=False, mtime=0, user="data", group="data") as tar,
        ):
            for number in range(start, min(start + SAMPLES_PER_SHARD, count)):
                # A string is hashed with SHA-512: the same on every machine and in every process.
                rng = random.Random(f"{name}/{split}/{number}")
                files, document = draw(rng, is_text_only(split, number, count))
                key, text = f"{split}-{number:06d}", json.dumps(document).encode()
                tar.write({"__key__": key, **files, "json": text})
                yield number + 1


def load_scans(split: str) -> tuple[np.ndarray, np.ndarray]:
    """uint8 (k, 10, 10) scans of a split with an empty border, and the digits int (k,) in them."""
    from sklearn.datasets import load_digits  # late: it is slow to import

    bunch: Any = load_digits()
    chosen = [number for number in range(len(bunch.target)) if split_of_scan(number) == split]
    levels = np.round(bunch.images[chosen] * (255 / 16)).astype(np.uint8)  # 17 grey levels, 0..16
    # An empty border lets strokes that touch the edge of the scan fade out instead of being cut.
    return np.pad(levels, ((0, 0), (1, 1), (1, 1))), bunch.target[chosen]


def draw_digit(
    scan: np.ndarray, canvas: tuple[int, int], rng: random.Random, augment: bool
) -> Image.Image:
    """Draw one digit, bright on dark, into a grey image of `canvas` (width, height) pixels.

    scan: uint8 (10, 10), a scan of 8 x 8 with an empty border. The digit keeps its aspect ratio.
    augment: rotate it by up to 5 degrees and shift it by up to 4 %.
    """
    width, height = canvas
    side = min(width, height) * rng.uniform(*_DIGIT_SIDE)
    x = rng.uniform(0, width - side) + side / 2  # centre of the digit on the canvas
    y = rng.uniform(0, height - side) + side / 2
    angle = 0.0
    if augment:
        angle = np.deg2rad(rng.uniform(-_MAX_ROTATION_DEGREES, _MAX_ROTATION_DEGREES))
        x += side * rng.uniform(-_MAX_SHIFT, _MAX_SHIFT)
        y += side * rng.uniform(-_MAX_SHIFT, _MAX_SHIFT)
    # Pillow wants the map from canvas to scan: rotate around the digit's centre, then scale.
    scale = _SCAN_PIXELS / side
    cos, sin = scale * np.cos(angle), scale * np.sin(angle)
    middle = scan.shape[0] / 2
    matrix = (cos, sin, middle - cos * x - sin * y, -sin, cos, middle + sin * x - cos * y)
    to_scan, method = tuple(map(float, matrix)), Image.Resampling.BICUBIC
    return Image.fromarray(scan).transform(canvas, Image.Transform.AFFINE, to_scan, method)


def _weighted[T](rng: random.Random, weights: dict[T, int]) -> T:
    return rng.choices(list(weights), list(weights.values()))[0]
