"""Items that a model answers with: their tokens, and what stands for them in the text.

An output item is an item in an assistant's message whose modality a generator makes. The modality
is then named ``output.<modality>``. Its text is a start token, query positions and an end token,
whatever the chat template writes for items.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from data.text.messages import PLACEHOLDER_SLOT, MediaText, Message, is_answer, item_parts

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_PREFIX = "output."
QUERY_MARK = "\ufdd2"  # stands for a query position; no template and no message has it
QUERY_ID = -1  # of a query position until it is padded


def output_of(modality: str) -> str:
    """Return the name of a modality as an output."""
    return _PREFIX + modality


def split_outputs(modalities: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the names of inputs, and those of outputs without their prefix."""
    inputs = [name for name in modalities if not name.startswith(_PREFIX)]
    outputs = [name.removeprefix(_PREFIX) for name in modalities if name.startswith(_PREFIX)]
    return inputs, outputs


@dataclass(frozen=True)
class OutputText:
    """The tokens around items of one modality in an answer, and the settings of their condition.

    start, end: tokens. skipped_tokens: number of first tokens of a sample that no condition has;
    None where query positions are the condition. most_rows: limit of a condition of tokens.
    system: the system message for chats without one that are answered with an item.
    """

    start: str
    end: str
    skipped_tokens: int | None = None
    most_rows: int | None = None
    system: str | None = None

    def media_text(self, modality: str) -> MediaText:
        """Return what stands for an item of the modality ``output.<modality>``."""
        return MediaText(QUERY_MARK, _mark(modality), f"{self.start}{PLACEHOLDER_SLOT}{self.end}")


def _mark(modality: str) -> str:
    """Return the text that the template gets in place of an item."""
    return f"{QUERY_MARK}{modality}{QUERY_MARK}"


def with_system(
    messages: Sequence[Message], outputs: Mapping[str, OutputText], is_prompt: bool
) -> Sequence[Message]:
    """Put the system message of an output before a chat that has none.

    is_prompt: whether the answer is still to come; it may have an item of any output.
    """
    answers = item_parts([message for message in messages if is_answer(message)])
    names = [*outputs] if is_prompt else [output_of(part["type"]) for part in answers]
    systems = (outputs[name].system for name in names if name in outputs)
    text = next(filter(None, systems), None)
    if text is None or messages[0]["role"] == "system":
        return messages
    return [{"role": "system", "content": text}, *messages]


def with_marks(messages: Sequence[Message], outputs: Mapping[str, Any]) -> list[Message]:
    """Put a text in place of each output item, so that the template writes nothing of its own.

    outputs: by ``output.<modality>``.
    """

    def marked(part: Mapping[str, Any]) -> Mapping[str, Any]:
        name = output_of(part["type"])
        return {"type": "text", "text": _mark(name)} if name in outputs else part

    return [
        {**message, "content": [marked(part) for part in message["content"]]}
        if is_answer(message) and not isinstance(message["content"], str)
        else message
        for message in messages
    ]


def add_tokens(
    backend: "Tokenizer", outputs: Mapping[str, OutputText], vocab_size: int
) -> tuple[str, ...]:
    """Add the start and end tokens that a tokenizer lacks, in order; return the added ones.

    Tokens that it has become special. vocab_size: the tokenizer's largest id plus 1. Raises
    ValueError where a new token would get the id of another.
    """
    from tokenizers import AddedToken

    tokens = [token for text in outputs.values() for token in (text.start, text.end)]
    new = tuple(token for token in tokens if backend.token_to_id(token) is None)
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    backend.add_special_tokens(
        [AddedToken(token, normalized=False) for token in tokens if token not in known]
    )
    if [backend.token_to_id(token) for token in new] != [*range(vocab_size, vocab_size + len(new))]:
        raise ValueError(
            f"the tokenizer leaves out ids below {vocab_size}, so {', '.join(new)} cannot be added "
            "to it: name start and end tokens that it has"
        )
    return new


def find_conditions(
    items: Iterable[tuple[int, OutputText]], offsets: np.ndarray, rows: np.ndarray
) -> None:
    """Set the offset and rows of each output item to the tokens before it, its condition.

    items: number and text of each output item, in order. offsets, rows: int64 (I,), of all items:
    for output items, the first query position and the number of queries. A condition begins after
    the skipped tokens and the previous output item, and ends before the start token. Raises
    ValueError for an empty one.
    """
    end = 0  # of the previous output item
    for number, text in items:
        start, queries = int(offsets[number]) - 1, int(rows[number])
        if text.skipped_tokens is not None:
            first = max(text.skipped_tokens, end)
            if first >= start:
                raise ValueError(
                    f"item {number} has no condition: its start token is token {start}, and the "
                    f"first {first} are left out; need a text before it, or lower skipped_tokens"
                )
            if text.most_rows is not None and start - first > text.most_rows:
                raise ValueError(
                    f"item {number} has a condition of {start - first} tokens, but its generator "
                    f"takes {text.most_rows} at most; need a shorter text before it"
                )
            offsets[number], rows[number] = first, start - first
        end = start + queries + 2
