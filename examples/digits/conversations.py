"""Questions and answers about digits."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from data.text.digits import conversation

# Spaces around punctuation, so that decoding, which joins words by spaces, gives the text back.
_ASK_ONE = (
    "what digit is this ?",
    "which digit do you see ?",
    "read the digit .",
    "what number is in the image ?",
)
_ASK_MANY = (
    "what digits are these ?",
    "which digits do you see ?",
    "read the digits in order .",
    "what numbers are in the images ?",
)
_ASK_COUNTED = (
    "there are {count} images . read the digits .",
    "read all {count} digits in order .",
    "what are the {count} numbers ?",
)
_ASK_NEXT = ("what comes after {a} ?", "which digit follows {a} ?")
_ASK_PREVIOUS = ("what comes before {a} ?",)
_ASK_COPY = ("write {list} .", "repeat {list} in order .")


def image_conversation(digits: Sequence[int], rng: random.Random) -> list[dict[str, Any]]:
    """Images of these digits, then a question; the answer names them in order."""
    plain = _ASK_ONE if len(digits) == 1 else _ASK_MANY
    counted = len(digits) > 1 and rng.random() < 0.4
    question = rng.choice(_ASK_COUNTED if counted else plain).format(count=len(digits))
    return conversation(["image"] * len(digits), question, spaced(digits))


def text_conversation(rng: random.Random) -> list[dict[str, Any]]:
    """A question without any image, about counting or copying digits."""
    kind = rng.randrange(3)
    if kind == 0:
        digit = rng.randrange(9)
        return conversation([], rng.choice(_ASK_NEXT).format(a=digit), str(digit + 1))
    if kind == 1:
        digit = rng.randrange(1, 10)
        return conversation([], rng.choice(_ASK_PREVIOUS).format(a=digit), str(digit - 1))
    digits = [rng.randrange(10) for _ in range(rng.randrange(1, 5))]
    question = rng.choice(_ASK_COPY).format(list=" then ".join(map(str, digits)))
    return conversation([], question, spaced(digits))


def spaced(digits: Sequence[int]) -> str:
    """Join digits as an answer names them."""
    return " ".join(map(str, digits))
