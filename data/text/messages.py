"""Chat messages: their form, what can be wrong with them, and what stands for an item."""

import itertools
import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
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
    """A sample has an item that no encoder takes and no generator makes."""

    def __init__(self, key: str, mention: "Mention", known: Collection[str]) -> None:
        place, maker = "", "an encoder"
        if mention.in_answer:
            place, maker = " in an assistant's message", "a generator or an encoder"
        super().__init__(
            f"sample {key!r} has a content part of type {mention.media!r}{place}, but there are "
            f"encoders for {', '.join(known) or 'nothing'} only: give {maker} this modality, or "
            "correct the type"
        )
        self.key, self.media = key, f"{mention.media}{place}"


def is_answer(message: Message) -> bool:
    """Whether the model is to learn to write this message."""
    return message["role"] in ANSWER_ROLES


def item_parts(messages: Sequence[Message]) -> list[Mapping[str, Any]]:
    """The content parts that stand for items, in order of mention."""
    contents = [m["content"] for m in messages if not isinstance(m["content"], str)]
    return [part for content in contents for part in content if part["type"] != "text"]


@dataclass(frozen=True)
class Mention:
    """A content part that stands for items."""

    media: str
    frames: int  # consecutive files that it takes
    fps: float  # frames per second
    in_answer: bool  # whether the model learns to write its message


def mentions(messages: Sequence[Message], key: str) -> list[Mention]:
    """The content parts that stand for items, in order. Raises MessagesError."""
    _check(messages, key)
    result = []
    parts = [(part, is_answer(message)) for message in messages for part in item_parts([message])]
    for part, in_answer in parts:
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
        result.append(Mention(part["type"], frames, float(fps), in_answer))
    return result


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
    """Shorten a value of a sample for a message."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


PLACEHOLDER_SLOT = "{placeholder}"  # in the text of an item
ITEM_SLOT = "{item}"  # in the text of a part: once per item that the part becomes


@dataclass(frozen=True)
class MediaText:
    """How items of one modality appear in the text."""

    placeholder: str  # the token that is repeated once per row
    template_token: str | None = None  # what the template writes per part; None: the placeholder
    item_text: str = PLACEHOLDER_SLOT  # what stands for one item, with `{placeholder}` in it once

    @property
    def written(self) -> str:
        """What the chat template writes per content part."""
        return self.placeholder if self.template_token is None else self.template_token

    @property
    def filled(self) -> str:
        """What stands for one item."""
        return self.item_text.replace(PLACEHOLDER_SLOT, self.placeholder)


def write_items(
    rendered: str,
    parts: Sequence[tuple[str, str]],
    media_text: Mapping[str, MediaText],
    key: str,
    finish: Callable[[str], str],
) -> tuple[str, list[tuple[int, int]]]:
    """Replace the k-th token that the template wrote by the k-th part, and finish the text.

    parts: (media, text of the part) in order of mention. key: names the sample in errors. Returns
    also the characters [start, end) of each part. Raises PlaceholderError when tokens and parts
    differ in number, MessagesError when they are in another order.
    """
    media_of = {text.written: kind for kind, text in media_text.items()}
    # The longest first: one may be contained in another.
    written = sorted(media_of, key=len, reverse=True)
    if not written:
        return finish(rendered), []
    pieces = re.split("(" + "|".join(re.escape(token) for token in written) + ")", rendered)
    written_modalities = [media_of[token] for token in pieces[1::2]]
    if len(written_modalities) != len(parts):
        raise PlaceholderError(key, len(written_modalities), len(parts))
    if written_modalities != [kind for kind, _ in parts]:
        tokens = {kind: text.written for kind, text in media_text.items()}
        raise MessagesError(
            f"sample {key!r}: the chat template does not write the placeholders {tokens} for items "
            f"of {', '.join(kind for kind, _ in parts)}, in this order"
        )
    pieces[1::2] = [text.replace(ITEM_SLOT, media_text[kind].filled) for kind, text in parts]
    pieces = [finish(piece) for piece in pieces]
    ends = [*itertools.accumulate(map(len, pieces))]
    return "".join(pieces), [*zip(ends[0::2], ends[1::2], strict=False)]
