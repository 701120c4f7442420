"""Special tokens that a chat template writes, told from text that only looks like them.

A user may write `<|im_end|>`, and it has to stay text. Before the template renders messages, such
text gets a mark after its first character. Then the special tokens, which are now all the
template's own, get a mark in front, with which the tokenizer here knows them, and the marks inside
texts are taken out. So a rendered text is cut into tokens at once, with the ids of transformers
where no text looks like a special token.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# Unicode's noncharacters, which no text has.
_MARK_OF_TEXT, _MARK_OF_TOKEN = "\ufdd0", "\ufdd1"
PROBE = "\ufdd2"  # a text that no template writes
_RESERVED = re.compile("[\ufdd0-\ufdd2]")


class SpecialTokens:
    """The special tokens of a tokenizer, and the tokenizer for texts in which they are marked.

    backend: its model is shared, not copied. needed: what counts as special even if the tokenizer
    does not say so, such as placeholders; a text never becomes one of their ids.
    """

    def __init__(self, backend: Tokenizer, needed: Collection[str]) -> None:
        from tokenizers import AddedToken, Tokenizer

        added = sorted(backend.get_added_tokens_decoder().items())
        special = {one.content for _, one in added if one.special} | set(needed)
        special = {one for one in special if len(one) > 1}
        self._looks_special = _any_of(special)
        self._special = _any_of(one.content for _, one in added if one.content in special)
        self._beginnings = {one[:end] for one in special for end in range(1, len(one))}
        self._longest = max(map(len, special), default=0)

        self._tokenizer = Tokenizer(backend.model)
        for step in ("normalizer", "pre_tokenizer"):
            if getattr(backend, step) is not None:
                setattr(self._tokenizer, step, getattr(backend, step))
        self._ids: dict[str, int] = {}
        named = []
        for token_id, one in added:  # in the order of their ids, so that these stay the same
            flags = {flag: getattr(one, flag) for flag in ("single_word", "lstrip", "rstrip")}
            own = AddedToken(
                one.content, normalized=one.normalized, special=one.content in special, **flags
            )
            self._tokenizer.add_tokens([own])
            if self._tokenizer.token_to_id(one.content) != token_id:
                raise ValueError(
                    f"the tokenizer numbers its added token {one.content!r} as {token_id}, which "
                    "does not follow from its file: save it again with transformers"
                )
            if one.content in special:
                name = _MARK_OF_TOKEN + one.content
                self._ids[name] = token_id
                named.append(AddedToken(name, normalized=False, **flags))
        self._tokenizer.add_tokens(named)
        self._tokenizer.encode_special_tokens = True  # as text
        self._names = _any_of(self._ids)
        self._needed_ids = [
            self._ids[_MARK_OF_TOKEN + one] for one in needed if _MARK_OF_TOKEN + one in self._ids
        ]

    def as_text(self, value: Any) -> Any:
        """Messages, or a part of them, with a mark in all that looks like a special token.

        Raises ValueError for a text with a character that is reserved for marks.
        """
        if isinstance(value, str):
            return self._marked(value)
        if isinstance(value, Mapping):
            return {self.as_text(name): self.as_text(one) for name, one in value.items()}
        if isinstance(value, list | tuple):
            return [self.as_text(one) for one in value]
        return value

    def _marked(self, text: str) -> str:
        if _RESERVED.search(text):
            raise ValueError(
                "a text has one of the characters U+FDD0 to U+FDD2, which Unicode leaves to "
                "programs: take them out"
            )
        # What begins like a special token at the end of one text may go on in the next.
        kept = text.rstrip()
        for length in range(min(len(kept), self._longest), 0, -1):
            if kept[-length:] in self._beginnings:
                place = len(kept) - length + 1
                text = text[:place] + _MARK_OF_TEXT + text[place:]
                break
        return self._looks_special.sub(lambda one: one[0][0] + _MARK_OF_TEXT + one[0][1:], text)

    def finish(self, rendered: str) -> str:
        """Rendered messages, or a part of them, as `encode` takes them."""
        marked = self._special.sub(lambda one: _MARK_OF_TOKEN + one[0], rendered)
        return marked.replace(_MARK_OF_TEXT, "")

    def encode(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Finished text -> ids int64 (L,) and the characters [start, end) of each, int64 (L, 2).

        Raises ValueError for half a character, and when a text would become a needed token.
        """
        try:
            encoding = self._tokenizer.encode(text, add_special_tokens=False)
        except (TypeError, UnicodeError) as error:  # from a tokenizer given half a character
            raise ValueError(
                f"the messages cannot be tokenized ({error}); need whole Unicode characters (no "
                "lone surrogate such as \\ud83d)"
            ) from error
        ids = np.array(encoding.ids, np.int64)
        if np.isin(ids, self._needed_ids).any():
            raise ValueError(
                "a text looks like a special token, and the tokenizer has no other way to write it"
            )
        for found in self._names.finditer(text):
            ids[encoding.char_to_token(found.start())] = self._ids[found[0]]
        return ids, np.array(encoding.offsets, np.int64).reshape(-1, 2)


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    longest_first = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
