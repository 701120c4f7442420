"""Tiny data to read and to draw, and a generator for the tiny recipe, for tests of whole runs."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from webdataset.writer import TarWriter

from tests.mimo import tiny

# A generator of images of up to 4 x 4 tokens, for the language model of the tiny recipe.
SIZES = (
    "model: {num_layers: 2, hidden_size: 32, num_attention_heads: 2, in_channels: 12, "
    "axes_dims_rope: [4, 6, 6], condition_size: 32, max_pixels: 64}"
)
GENERATOR = f"generators.image={{family: qwen_image, grid: {{dp: 1}}, queries: 3, {SIZES}}}"
# Width and height of what the samples of `write_samples` ask for, one list a sample; the last
# samples draw nothing. Of four samples, one has a picture to read.
DRAWN = [[(8, 8)], [(4, 8), (8, 4)], [(8, 8)], [], [(4, 4)], [(8, 8), (8, 8)], [], [(8, 8)]]


def png(width: int, height: int, seed: int) -> bytes:
    """A PNG of coloured noise."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def chat(question: str, drawn: int, read: int = 0, text: str = "") -> list[dict[str, Any]]:
    """A question about ``read`` images, answered by ``drawn`` images with texts between them."""
    asked = [{"type": "image"}] * read + [{"type": "text", "text": question}]
    answered: list[dict[str, str]] = []
    for _ in range(drawn):
        answered += [*([{"type": "text", "text": text}] if text else []), {"type": "image"}]
    answered = answered or [{"type": "text", "text": text or "3 7"}]
    return [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]


def write_shard(path: Path, chats: Sequence[tuple[list[dict[str, Any]], Sequence[bytes]]]) -> None:
    """Write chats, each with its files in order of mention."""
    with TarWriter(str(path)) as tar:
        for number, (messages, files) in enumerate(chats):
            named = {f"{file}.png": content for file, content in enumerate(files)}
            document = json.dumps({"messages": messages}).encode()
            tar.write({"__key__": f"sample{number:04d}", "json": document, **named})


def write_samples(
    folder: Path,
    drawn: Sequence[Sequence[tuple[int, int]]] = DRAWN,
    name: str = "train",
    readings: bool = True,
) -> None:
    """Write a shard of samples to read and to draw."""
    chats = []
    for number, sizes in enumerate(drawn):
        read = int(readings and number % 4 == 1)
        files = [png(56, 28, 100 + number)] * read
        files += [png(*size, seed=10 * number + item) for item, size in enumerate(sizes)]
        text = "3" if number % 2 else ""
        chats.append((chat(f"repeat {number}", len(sizes), read, text), files))
    write_shard(folder / f"{name}-00000.tar", chats)


def write_recipe(folder: Path) -> Path:
    """Write the samples, the tiny recipe and its tokenizer; the generator is `GENERATOR`."""
    tiny.write_samples(folder, ())
    write_samples(folder)
    return tiny.write_recipe(folder)
