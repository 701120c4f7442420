"""What stands for an item in the rendered text, before it is cut into tokens.

A chat template writes one token per content part. Some families put more around it: Gemma-3 writes
`<start_of_image>`, and the text that is tokenized has line breaks and an end token too. A part may
also become several items, such as an image and its crops.
Source: transformers `ProcessorMixin.get_text_with_replacements`.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from data.text.messages import MessagesError, PlaceholderError

_PLACEHOLDER_SLOT = "{placeholder}"
ITEM_SLOT = "{item}"  # in the text of a part: once per item that the part becomes


@dataclass(frozen=True)
class MediaText:
    """How items of one media appear in the text.

    placeholder: the token that is repeated once per row.
    template_token: what the chat template writes per content part; None for the placeholder.
    item_text: what stands for one item, with `{placeholder}` in it once: see `item_text_problem`.
    """

    placeholder: str
    template_token: str | None = None
    item_text: str = _PLACEHOLDER_SLOT

    @property
    def written(self) -> str:
        """What the chat template writes per content part."""
        return self.placeholder if self.template_token is None else self.template_token

    @property
    def filled(self) -> str:
        """What stands for one item."""
        return self.item_text.replace(_PLACEHOLDER_SLOT, self.placeholder)


def item_text_problem(item_text: str) -> str:
    """Why a text cannot stand for an item, or nothing."""
    if item_text.count(_PLACEHOLDER_SLOT) == 1:
        return ""
    return f"needs {_PLACEHOLDER_SLOT} exactly once, where the rows go"


def write_items(
    rendered: str,
    parts: Sequence[tuple[str, str]],
    media_text: Mapping[str, MediaText],
    key: str,
    finish: Callable[[str], str],
) -> tuple[str, list[tuple[int, int]]]:
    """The rendered text with the k-th token that the template wrote replaced by the k-th part.

    It is finished by `finish`. Also where each part is in it: characters [start, end). parts:
    (media, text of the part) in order of mention. key: names the sample in errors. Raises
    PlaceholderError when tokens and parts differ in number, MessagesError when they are in another
    order.
    """
    media_of = {text.written: media for media, text in media_text.items()}
    # The longest first: one may be contained in another.
    written = sorted(media_of, key=len, reverse=True)
    if not written:
        return finish(rendered), []
    pieces = re.split("(" + "|".join(re.escape(token) for token in written) + ")", rendered)
    found = [media_of[token] for token in pieces[1::2]]
    if len(found) != len(parts):
        raise PlaceholderError(key, len(found), len(parts))
    if found != [media for media, _ in parts]:
        tokens = {media: text.written for media, text in media_text.items()}
        raise MessagesError(
            f"sample {key!r}: the chat template does not write the placeholders {tokens} for items "
            f"of {', '.join(media for media, _ in parts)}, in this order"
        )
    pieces[1::2] = [text.replace(ITEM_SLOT, media_text[media].filled) for media, text in parts]
    pieces = [finish(piece) for piece in pieces]
    ends = [*itertools.accumulate(map(len, pieces))]
    return "".join(pieces), [*zip(ends[0::2], ends[1::2], strict=False)]
