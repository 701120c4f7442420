"""Chats in which the model reads digits, and chats in which it draws them.

One kind of sample asks for one or two digits; its answer is a scan of each, 8 x 8 pixels. The other
kind is that of `examples.digits.scans`.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from data.modalities.image_files import png_bytes
from data.text.digits import write_tokenizer
from examples.digits.scans import Draw, load_scans, reading_samples, write_data_set

FORMAT_VERSION = 1
_ASK_ONE = ("draw the digit {a} .", "draw a {a} .", "draw the number {a} .")
_ASK_TWO = ("draw {a} then {b} .", "draw the digits {a} then {b} .")
_WORDS = ("a", "draw")


def prepare_drawn_digits(
    directory: str | Path,
    num_train: int = 28000,
    num_validation: int = 200,
    num_test: int = 400,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Write shards and tokenizer/ like `prepare_digits`; half of those with images are to draw."""
    counts = {"train": num_train, "validation": num_validation, "test": num_test}
    settings = {f"num_{split}": count for split, count in counts.items()}
    settings |= {"seed": seed, "drawings_version": FORMAT_VERSION}
    tokenizer = partial(write_tokenizer, more_words=_WORDS)
    return write_data_set(
        directory, "drawings", seed, settings, counts, _drawing, tokenizer, progress
    )


def _drawing(split: str) -> Draw:
    scans, digits = load_scans(split)
    read = reading_samples(split)

    def draw(rng: random.Random, text_only: bool) -> tuple[dict[str, bytes], dict[str, Any]]:
        if text_only or rng.random() < 0.5:
            return read(rng, text_only)
        chosen = [rng.randrange(len(digits)) for _ in range(rng.choice((1, 1, 2)))]
        asked = dict(zip("ab", digits[chosen].tolist(), strict=False))
        question = rng.choice(_ASK_ONE if len(chosen) == 1 else _ASK_TWO).format(**asked)
        files = {f"{n}.png": png_bytes(scans[scan][1:-1, 1:-1]) for n, scan in enumerate(chosen)}
        messages = [
            {"role": "user", "content": [{"type": "text", "text": question}]},
            {"role": "assistant", "content": [{"type": "image"} for _ in chosen]},
        ]
        return files, {"messages": messages, "drawn": [*asked.values()]}

    return draw
