"""Chat messages as a sample's JSON has them: their form, and what can be wrong with them."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Message = Mapping[str, Any]

# The rate at which Qwen's processors sample videos. For Qwen3-VL, transformers assumes 24 where no
# rate is given; a data set with such frames has to say so in `fps`.
DEFAULT_FPS = 2.0
ANSWER_ROLES = ("assistant", "model")  # Gemma calls the assistant model
ROLES = ("system", "user", *ANSWER_ROLES, "tool")


class MessagesError(ValueError):
    """The messages of one sample are malformed, or cannot be rendered, tokenized or cut."""


class PlaceholderError(ValueError):
    """A sample has more or fewer placeholders than items."""

    def __init__(self, key: str, placeholders: int, items: int) -> None:
        super().__init__(
            f"sample {key!r} has {placeholders} placeholders but {items} items: need one content "
            'part such as {"type": "image"} per item, and a chat template that writes it; fix the '
            "messages or the files of the items"
        )
        self.key, self.placeholders, self.items = key, placeholders, items


class UnknownMediaError(ValueError):
    """A sample has an item that no encoder takes."""

    def __init__(self, key: str, media: str, known: Collection[str]) -> None:
        super().__init__(
            f"sample {key!r} has a content part of type {media!r}, but there are encoders for "
            f"{', '.join(known) or 'nothing'} only: give an encoder this media, or correct the type"
        )
        self.key, self.media = key, media


def is_answer(message: Message) -> bool:
    """Whether the model is to learn to write this message."""
    return message["role"] in ANSWER_ROLES


def item_parts(messages: Sequence[Message]) -> list[Mapping[str, Any]]:
    """The content parts that stand for items, in order of mention."""
    contents = [m["content"] for m in messages if not isinstance(m["content"], str)]
    return [part for content in contents for part in content if part["type"] != "text"]


@dataclass(frozen=True)
class Mention:
    """A content part that stands for items.

    frames: consecutive files that it takes. fps: frames per second.
    """

    media: str
    frames: int
    fps: float


def mentions(messages: Sequence[Message], key: str) -> list[Mention]:
    """The content parts that stand for items, in order of mention.

    Raises MessagesError unless `messages` is a chat of texts and items with valid `frames` and
    `fps`.
    """
    _check(messages, key)
    found = []
    for part in item_parts(messages):
        frames, fps = part.get("frames", 1), part.get("fps", DEFAULT_FPS)
        if type(frames) is not int or frames < 1:
            raise MessagesError(
                f"sample {key!r}: a part of type {part['type']!r} has frames {short_text(frames)}; "
                "need the number of files that it takes, 1 or more"
            )
        if type(fps) not in (int, float) or not 0 < fps <= sys.float_info.max:
            raise MessagesError(
                f"sample {key!r}: a part of type {part['type']!r} has fps {short_text(fps)}; need "
                "frames per second, above 0"
            )
        found.append(Mention(part["type"], frames, float(fps)))
    return found


def _check(messages: object, key: str) -> None:
    def fail(problem: str) -> MessagesError:
        return MessagesError(
            f"sample {key!r}: {problem}; need a list such as "
            '[{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "..."}]}, '
            "...]"
        )

    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise fail(f"messages is {short_text(messages)}")
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise fail(f"message {number} is {short_text(message)}, without a role")
        content = message.get("content")
        if isinstance(content, str):
            continue
        if not isinstance(content, Sequence):
            raise fail(f"the content of message {number} is {short_text(content)}")
        for part in content:
            match part:
                case {"type": "text", "text": str()}:
                    continue
                case {"type": str(kind)} if kind != "text":
                    continue
            shown = short_text(part)
            raise fail(f"message {number} has the content part {shown}, neither text nor item")


def short_text(value: object) -> str:
    """A value of a sample's own in a message."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
