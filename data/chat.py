"""Chat messages to token ids, labels and loss mask, with a Hugging Face tokenizer and its template.

Letters: `L` tokens of one sample, `I` images in it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

Message = Mapping[str, Any]


class MessagesError(ValueError):
    """The messages of one sample are malformed, or its chat template refuses them."""


class PlaceholderError(ValueError):
    """A sample has more or fewer image placeholders than images."""

    def __init__(self, key: str, placeholders: int, images: int) -> None:
        super().__init__(
            f"sample {key!r} has {placeholders} image placeholders but {images} images: need one "
            'content part {"type": "image"} per image; fix the messages or the image files'
        )
        self.key, self.placeholders, self.images = key, placeholders, images


@dataclass(frozen=True)
class EncodedSample:
    """One tokenized sample; every image is already `num_tokens(image)` placeholder ids long."""

    input_ids: np.ndarray  # (L,) int64
    labels: np.ndarray  # (L,) int64: labels[i] = input_ids[i + 1], the last one is padding
    loss_mask: np.ndarray  # (L,) float32: 1 where labels[i] belongs to an assistant's answer
    image_offsets: np.ndarray  # (I,) int64: first placeholder of each image


class ChatTokenizer:
    """A tokenizer folder in Hugging Face format, with the chat template it contains.

    Safe to use from several threads: it only ever reads.

    directory: folder with tokenizer.json and a chat template; never downloads anything.
    image_token: the placeholder that the template writes once per image.

    Raises ValueError when the folder, its template, or a needed token is missing.
    """

    def __init__(self, directory: str | Path, image_token: str = "<|image_pad|>") -> None:
        from transformers import AutoTokenizer  # here, because it costs seconds to import

        self.directory = Path(directory)
        if not self.directory.is_dir():
            raise ValueError(
                f"tokenizer folder {self.directory} does not exist: need a local folder with "
                "tokenizer.json"
            )
        try:
            tokenizer = AutoTokenizer.from_pretrained(str(self.directory), local_files_only=True)
        except (OSError, ValueError, KeyError) as error:
            raise ValueError(
                f"no tokenizer can be loaded from {self.directory}: {error}"
            ) from error
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ValueError(
                f"the tokenizer in {self.directory} has no tokenizer.json: save its fast version"
            )
        if not tokenizer.chat_template or isinstance(tokenizer.chat_template, dict):
            raise ValueError(
                f"the tokenizer in {self.directory} has no (single) chat template: add "
                "chat_template.jinja"
            )
        # We never truncate, and packing pads. Set once here, so that encoding needs no lock.
        backend.no_truncation()
        backend.no_padding()
        self._tokenizer, self._backend = tokenizer, backend
        self.image_token = image_token
        self.vocab_size: int = len(tokenizer)
        self.image_token_id = self._required_id(image_token, "the image placeholder")
        eos = "<|im_end|>" if backend.token_to_id("<|im_end|>") is not None else tokenizer.eos_token
        self.eos_token_id = self._required_id(eos, "the end of a turn")
        pad = tokenizer.pad_token
        self.pad_token_id = self.eos_token_id if pad is None else self._required_id(pad, "padding")

    def encode(
        self, messages: Sequence[Message], rows_per_image: Sequence[int], key: str
    ) -> EncodedSample:
        """Tokenize a finished conversation; the loss is on every assistant answer.

        An answer reaches from behind the template's generation prompt to its <|im_end|>, included.
        rows_per_image: rows of each image, in order; that many placeholders stand for it.
        key: names the sample in errors.

        Raises MessagesError for malformed messages, PlaceholderError when placeholders and images
        differ in number, ValueError when the template cannot be cut at the answers.
        """
        check_messages(messages, key)
        ids = self._tokens(messages, key)
        answer = np.zeros(len(ids), dtype=bool)
        for number, message in enumerate(messages):
            if message["role"] == "assistant":
                start, end = self._answer_span(messages, number, ids, key)
                answer[start:end] = True
        return self._expand(ids, answer, rows_per_image, key)

    def encode_prompt(
        self, messages: Sequence[Message], rows_per_image: Sequence[int]
    ) -> EncodedSample:
        """Tokenize a conversation that waits for an answer: ends with the generation prompt.

        There is nothing to learn: labels are all padding, loss_mask is all 0.

        Raises as `encode`, and MessagesError when the last message already is the assistant's.
        """
        check_messages(messages, "prompt")
        if messages[-1]["role"] == "assistant":
            raise MessagesError(
                "the last message of a prompt is the assistant's: leave the answer out"
            )
        ids = self._tokens(messages, "prompt", add_generation_prompt=True)
        sample = self._expand(ids, np.zeros(len(ids), dtype=bool), rows_per_image, "prompt")
        return EncodedSample(
            input_ids=sample.input_ids,
            labels=np.full_like(sample.input_ids, self.pad_token_id),
            loss_mask=sample.loss_mask,
            image_offsets=sample.image_offsets,
        )

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Text of token ids, without special tokens and outer white space."""
        return self._backend.decode([int(token) for token in ids], skip_special_tokens=True).strip()

    def fingerprint(self) -> str:
        """Hex digest that changes whenever token ids or the rendering may change."""
        parts = (
            self._backend.to_str(),
            self._tokenizer.chat_template,
            sorted(
                (name, str(token)) for name, token in self._tokenizer.special_tokens_map.items()
            ),
            (self.image_token, self.eos_token_id, self.pad_token_id),
        )
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]

    def _required_id(self, token: str | None, role: str) -> int:
        token_id = None if token is None else self._backend.token_to_id(token)
        if token_id is None:
            raise ValueError(
                f"the tokenizer in {self.directory} has no token {token!r} for {role}: add it as a "
                "special token, or use the tokenizer of a vision-language model"
            )
        return token_id

    def _tokens(
        self, messages: Sequence[Message], key: str, add_generation_prompt: bool = False
    ) -> list[int]:
        """Token ids of rendered messages, one placeholder per image."""
        from jinja2 import TemplateError

        try:  # transformers compiles a template once per process and keeps it
            text = self._tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=add_generation_prompt
            )
        except TemplateError as error:
            raise MessagesError(
                f"sample {key!r}: the chat template refuses the messages: {error}"
            ) from error
        return self._backend.encode(text, add_special_tokens=False).ids

    def _answer_span(
        self, messages: Sequence[Message], number: int, ids: list[int], key: str
    ) -> tuple[int, int]:
        """[start, end) of the answer in message `number`, its end token included."""
        if number == 0:
            raise MessagesError(f"sample {key!r}: begins with an answer; need a question before it")
        before = self._tokens(messages[:number], key, add_generation_prompt=True)
        # The last answer ends the conversation: no need to render the same messages again.
        last = number == len(messages) - 1
        through = ids if last else self._tokens(messages[: number + 1], key)
        if through[: len(before)] != before or ids[: len(through)] != through:
            raise ValueError(
                f"sample {key!r}: the chat template of {self.directory} renders the messages "
                f"before answer {number} differently once the answer is there, so its tokens "
                "cannot be told apart: need a template whose output only grows with each message "
                "(does it drop earlier reasoning, or rewrite the generation prompt, or does the "
                "answer begin with a line break?)"
            )
        end = len(through)
        # What follows <|im_end|> (a line break in Qwen's template) is never generated.
        for position in range(len(through) - 1, len(before) - 1, -1):
            if through[position] == self.eos_token_id:
                end = position + 1
                break
        return len(before), end

    def _expand(
        self, ids: list[int], answer: np.ndarray, rows_per_image: Sequence[int], key: str
    ) -> EncodedSample:
        """Repeat each placeholder rows_per_image[k] times; shift labels and mask by one."""
        compact = np.array(ids, dtype=np.int64)
        placeholders = np.flatnonzero(compact == self.image_token_id)
        if len(placeholders) != len(rows_per_image):
            raise PlaceholderError(key, len(placeholders), len(rows_per_image))
        repeats = np.ones(len(compact), dtype=np.int64)
        repeats[placeholders] = rows_per_image
        input_ids = np.repeat(compact, repeats)
        labels = np.append(input_ids[1:], self.pad_token_id)
        loss_mask = np.append(np.repeat(answer, repeats)[1:], False).astype(np.float32)
        starts = np.cumsum(repeats) - repeats
        return EncodedSample(input_ids, labels, loss_mask, starts[placeholders])


def check_messages(messages: object, key: str) -> None:
    """Raise MessagesError unless `messages` is a chat list of text and image parts."""

    def fail(problem: str) -> MessagesError:
        return MessagesError(
            f"sample {key!r}: {problem}; need a list such as "
            '[{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "..."}]}, '
            "...]"
        )

    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise fail(f"messages is {_short(messages)}")
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise fail(f"message {number} is {_short(message)}, without a role")
        content = message.get("content")
        if isinstance(content, str):
            continue
        if not isinstance(content, Sequence):
            raise fail(f"the content of message {number} is {_short(content)}")
        for part in content:
            kind = part.get("type") if isinstance(part, Mapping) else None
            if kind != "image" and not (kind == "text" and isinstance(part.get("text"), str)):
                raise fail(
                    f"message {number} has the content part {_short(part)}, neither text nor image"
                )


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
