"""The inputs: chats with several pictures, with one and with none, of odd sizes.

Both sides make them from the same numbers; our side reads them from a shard, like any other data.
"""

from __future__ import annotations

import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

# For each sample, width and height of its pictures in pixels. Two samples without pictures stand
# together, so that one microbatch is text only.
_PICTURES = (((61, 37), (140, 90)), (), ((97, 203),), ((28, 28), (45, 131), (33, 71)), (), ())
_QUESTIONS = ("what digits are these ?", "what comes after 3 ?", "read the digit .")
_MAX_ANSWER = 6  # words


@dataclass(frozen=True)
class ParitySample:
    """One chat. pictures: (width, height) in pixels of each."""

    number: int
    pictures: tuple[tuple[int, int], ...]
    question: str
    answer: str

    def prompt(self) -> list[dict[str, Any]]:
        """The messages before the answer."""
        content: list[dict[str, str]] = [{"type": "image"} for _ in self.pictures]
        return [{"role": "user", "content": [*content, {"type": "text", "text": self.question}]}]

    def messages(self) -> list[dict[str, Any]]:
        """The whole chat."""
        answer = [{"type": "text", "text": self.answer}]
        return [*self.prompt(), {"role": "assistant", "content": answer}]

    def images(self) -> list[Image.Image]:
        """Coloured noise, the same in every call."""
        rng = np.random.default_rng(self.number)
        return [
            Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))
            for width, height in self.pictures
        ]


def make_samples(count: int) -> list[ParitySample]:
    """The first ``count`` samples; picture sizes repeat, their content does not."""
    rng = np.random.default_rng(0)
    found = []
    for number in range(count):
        digits = rng.integers(0, 10, int(rng.integers(1, _MAX_ANSWER + 1)))
        found.append(
            ParitySample(
                number,
                _PICTURES[number % len(_PICTURES)],
                _QUESTIONS[number % len(_QUESTIONS)],
                " ".join(str(digit) for digit in digits),
            )
        )
    return found


def write_samples(path: Path, samples: list[ParitySample]) -> None:
    """Write a shard with the samples in order."""
    from webdataset.writer import TarWriter  # here: it imports torch

    with TarWriter(str(path), encoder=False) as tar:
        for sample in samples:
            content = {"messages": sample.messages()}
            members = {"json": json.dumps(content).encode()}
            for number, image in enumerate(sample.images()):
                buffer = io.BytesIO()
                image.save(buffer, "PNG")
                members[f"{number}.png"] = buffer.getvalue()
            tar.write({"__key__": f"sample{sample.number:04d}", **members})
