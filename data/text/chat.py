"""Chat messages to token ids, labels and loss mask, with a Hugging Face tokenizer and its template.

Letters: `L` tokens of one sample, `I` items (images, videos, ...) in it.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path

import numpy as np

from data.text.messages import (
    ITEM_SLOT,
    MediaText,
    Mention,
    Message,
    MessagesError,
    PlaceholderError,
    UnknownMediaError,
    is_answer,
    item_parts,
    mentions,
    write_items,
)
from data.text.outputs import (
    QUERY_ID,
    OutputText,
    add_tokens,
    find_conditions,
    output_of,
    with_system,
)
from data.text.template import (
    SpecialTokens,
    Template,
    find_chat_template,
    generation_ends,
    load_tokenizer,
)

ItemRows = int | tuple[int, ...]
IMAGES = {"image": MediaText("<|image_pad|>")}
_ENDS_OF_TURN = ("<|im_end|>", "<end_of_turn>")  # of Qwen's and of Gemma's chats
_VERSION = 3  # raise it whenever the same files give other ids or masks


@dataclass(frozen=True)
class _Chat:
    messages: Sequence[Message]
    # Modality, and text with `{item}` in it, of each content part that is not text, in order.
    parts: Sequence[tuple[str, str]]
    rows: Sequence[int]  # of each `{item}`
    slots: Sequence[int]  # how many `{item}` each item has
    key: str  # names the messages in errors

    def error(self, problem: object) -> MessagesError:
        return MessagesError(f"sample {self.key!r}: {problem}")


@dataclass(frozen=True)
class _Rendered:
    """Rendered messages in tokens, one placeholder per item."""

    text: str
    ids: np.ndarray
    offsets: np.ndarray  # (L, 2): the characters [start, end) of each token
    parts: list[tuple[int, int]]  # the characters [start, end) of each part


@dataclass(frozen=True)
class EncodedSample:
    """One tokenized sample, with a placeholder or query position for each row of an item.

    The rows of an item stand at ``item_offsets`` and the tokens after it. They are placeholders;
    for an output item, query positions (with the padding's id) or the tokens of its condition.
    """

    input_ids: np.ndarray  # (L,) int64
    labels: np.ndarray  # (L,) int64: labels[i] = input_ids[i + 1], the last one is padding
    loss_mask: np.ndarray  # (L,) float32: 1 where the model learns to write labels[i]
    item_offsets: np.ndarray  # (I,) int64: token of the first row of each item
    item_rows: np.ndarray  # (I,) int64: rows of each item


class ChatTokenizer:
    """A tokenizer folder in Hugging Face format, with the chat template it contains.

    Safe to use from several threads. directory: has tokenizer.json and a chat template, such as a
    checkpoint's. media_text: by modality, how its items appear in the text. outputs: by
    ``output.<modality>``, how its items in answers appear. Raises ValueError when the folder, its
    template, or a needed token is missing.

    added_tokens: start and end tokens of outputs that the files lack, with the ids after the last.
    """

    def __init__(
        self,
        directory: str | Path,
        media_text: Mapping[str, MediaText] = IMAGES,
        outputs: Mapping[str, OutputText] | None = None,
    ) -> None:
        self.directory = Path(directory)
        if not self.directory.is_dir():
            problem = "does not exist"
            if self.directory.exists():
                problem = f"is a file; give its folder, {self.directory.parent}"
            raise ValueError(
                f"tokenizer folder {self.directory} {problem}: need a local folder with "
                "tokenizer.json"
            )
        try:
            if (file := self.directory / "tokenizer.json").exists():
                with file.open("rb") as opened:
                    opened.read(1)  # its reader does not say which OSError it met
            tokenizer = load_tokenizer(self.directory)
        except (OSError, ValueError, KeyError, RecursionError) as error:
            problem = f"no tokenizer can be loaded from {self.directory}: {error}"
            raise ValueError(problem) from error
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ValueError(
                f"the tokenizer in {self.directory} has no tokenizer.json: save its fast version"
            )
        self.template = find_chat_template(self.directory, tokenizer.chat_template)
        # We never truncate, and packing pads. Set once here, so that encoding needs no lock.
        backend.no_truncation()
        backend.no_padding()
        self._tokenizer, self._backend = tokenizer, backend
        self.media_text, self.outputs = media_text, dict(outputs or {})
        of_outputs = {name: text.media_text(name) for name, text in self.outputs.items()}
        self._all_text = {**media_text, **of_outputs}
        self.placeholders = {media: text.placeholder for media, text in media_text.items()}
        unknown = getattr(backend.model, "unk_token", tokenizer.unk_token) or ""
        self.unknown_token_id: int | None = backend.token_to_id(unknown)
        # Not the number of entries: some tokenizers leave ids out.
        vocab_size = 1 + max(tokenizer.get_vocab().values())
        self.added_tokens = add_tokens(backend, self.outputs, vocab_size)
        self.vocab_size: int = vocab_size + len(self.added_tokens)
        self.placeholder_ids: dict[str, int] = {
            media: self._required_id(token, f"the {media} placeholder")
            for media, token in self.placeholders.items()
        }
        known = (token for token in _ENDS_OF_TURN if backend.token_to_id(token) is not None)
        eos = next(known, tokenizer.eos_token)
        self.eos_token_id = self._required_id(eos, "the end of a turn")
        ends = (self.eos_token_id, tokenizer.eos_token_id, *generation_ends(self.directory))
        self.stop_token_ids = frozenset(end for end in ends if end is not None)
        added = backend.get_added_tokens_decoder()
        special = {token_id for token_id, token in added.items() if token.special}
        self._around_items = sorted(special - self.stop_token_ids)
        needed = {eos, *self.placeholders.values()}
        needed |= {text.written for text in media_text.values()}
        needed |= {token for text in self.outputs.values() for token in (text.start, text.end)}
        self.output_ids: dict[str, tuple[int, int]] = {  # start and end tokens
            name: (backend.token_to_id(text.start), backend.token_to_id(text.end))
            for name, text in self.outputs.items()
        }
        self._special_tokens = SpecialTokens(backend, needed)
        self._template = Template(self.template, tokenizer, self._special_tokens, self.outputs)
        pad = tokenizer.pad_token
        self.pad_token_id = self.eos_token_id if pad is None else self._required_id(pad, "padding")

    def mentions(self, messages: Sequence[Message], key: str) -> list[Mention]:
        """Return the parts that stand for items, in order; outputs as ``output.<modality>``.

        Raises MessagesError, UnknownMediaError.
        """
        mentioned = mentions(messages, key)
        for number, mention in enumerate(mentioned):
            if mention.in_answer and (name := output_of(mention.media)) in self.outputs:
                mentioned[number] = replace(mention, media=name)
            elif mention.media not in self.placeholders:
                raise UnknownMediaError(key, mention, self.placeholders)
        return mentioned

    def encode(
        self,
        messages: Sequence[Message],
        rows_per_item: Sequence[ItemRows],
        key: str,
        part_texts: Sequence[str] | None = None,
    ) -> EncodedSample:
        """Tokenize a finished conversation; the loss is on every assistant answer.

        An answer begins after the template's generation prompt and includes its end of turn and the
        start and end tokens of output items, but neither query positions nor what stands for other
        items in it. A text that looks like a special token is text. rows_per_item: placeholders or
        query positions of each item, in order of mention; a tuple for an item that is written as
        several `{item}`. key: names the sample in errors. part_texts: what stands for each content
        part that is not text, with `{item}` once per item; None: each is one item.

        Raises as `mentions`, PlaceholderError when placeholders and items differ in number,
        MessagesError when the template or the tokenizer refuses the messages, or no token
        conditions an output item.
        """
        chat = self._chat(messages, rows_per_item, key, part_texts)
        whole = self._rendered(chat)
        answer = np.zeros_like(whole.ids, bool)
        for start, end in self._answers(chat, whole):
            answer[start:end] = True
        answer &= ~self._of_items(chat, whole)
        return self._expand(chat, whole.ids, answer)

    def encode_prompt(
        self,
        messages: Sequence[Message],
        rows_per_item: Sequence[ItemRows],
        part_texts: Sequence[str] | None = None,
    ) -> EncodedSample:
        """Tokenize a conversation and the generation prompt; nothing in it counts in the loss.

        Raises as `encode`, and MessagesError when the last message already is the assistant's.
        """
        chat = self._chat(messages, rows_per_item, "prompt", part_texts, is_prompt=True)
        if is_answer(messages[-1]):
            raise MessagesError(
                "the last message of a prompt is the assistant's: leave the answer out"
            )
        ids = self._rendered(chat, add_generation_prompt=True).ids
        sample = self._expand(chat, ids, np.zeros_like(ids, bool))
        return replace(sample, labels=np.full_like(sample.input_ids, self.pad_token_id))

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Return the text of token ids, without special tokens and outer white space."""
        return self.text(ids, special=False).strip()

    def text(self, ids: Sequence[int] | np.ndarray, special: bool = True) -> str:
        """Return the text of token ids. special: include special tokens."""
        return self._backend.decode([*map(int, ids)], skip_special_tokens=not special)

    def differences(self, other: "ChatTokenizer") -> list[str]:
        """Return which of "tokenizer" and "chat template" differ from another folder's."""
        names = []
        if self._vocabulary() != other._vocabulary():
            names.append("tokenizer")
        if self.template != other.template:
            names.append("chat template")
        return names

    def _vocabulary(self) -> tuple[str, list[tuple[str, str]]]:
        names = self._tokenizer.special_tokens_map.items()
        return self._backend.to_str(), sorted((name, str(token)) for name, token in names)

    def fingerprint(self) -> str:
        """Hex digest that changes whenever token ids or the rendering may change."""
        backend, special_tokens = self._vocabulary()
        texts = sorted([*self.media_text.items(), *self.outputs.items()], key=itemgetter(0))
        parts = (
            backend,
            self.template,
            special_tokens,
            (texts, self.eos_token_id, self.pad_token_id),
            sorted(self.stop_token_ids),
            _VERSION,
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

    def _chat(
        self,
        messages: Sequence[Message],
        rows_per_item: Sequence[ItemRows],
        key: str,
        part_texts: Sequence[str] | None,
        is_prompt: bool = False,
    ) -> _Chat:
        media = [mention.media for mention in self.mentions(messages, key)]
        messages = with_system(messages, self.outputs, is_prompt)
        texts = [ITEM_SLOT] * len(media) if part_texts is None else part_texts
        slots = [(rows,) if isinstance(rows, int) else rows for rows in rows_per_item]
        rows = [count for of_item in slots for count in of_item]
        written = sum(text.count(ITEM_SLOT) for text in texts)
        for count, needed in ((len(media), len(texts)), (written, len(rows))):
            if count != needed:
                raise PlaceholderError(key, count, needed)
        parts = list(zip(media, texts, strict=True))
        return _Chat(messages, parts, rows, [*map(len, slots)], key)

    def _rendered(
        self, chat: _Chat, count: int | None = None, add_generation_prompt: bool = False
    ) -> _Rendered:
        messages = chat.messages[:count]
        parts = chat.parts[: len(item_parts(messages))]
        try:
            text = self._template.render(messages, add_generation_prompt)
            finish = self._special_tokens.finish
            text, spans = write_items(text, parts, self._all_text, chat.key, finish)
            ids, offsets = self._special_tokens.encode(text)
        except (MessagesError, PlaceholderError):
            raise
        except ValueError as error:
            raise chat.error(error) from error
        return _Rendered(text, ids, offsets, spans)

    def _of_items(self, chat: _Chat, rendered: _Rendered) -> np.ndarray:
        """Return bool per token: whether it stands for an item, or opens or closes an input item.

        A special token right beside such an item, such as Qwen's <|vision_start|>, belongs to it;
        an end of turn does not.
        """
        starts, ends = rendered.offsets.T
        is_item, is_output = np.zeros((2, len(starts)), bool)
        for (media, _), (start, end) in zip(chat.parts, rendered.parts, strict=True):
            of_kind = is_output if media in self.outputs else is_item
            of_kind |= (starts < end) & (ends > start)
        edges = np.diff(is_item.astype(np.int8))
        beside = np.append(np.flatnonzero(edges == 1), np.flatnonzero(edges == -1) + 1)
        is_item[beside] = np.isin(rendered.ids[beside], self._around_items)
        return (is_item & ~is_output) | (rendered.ids == QUERY_ID)

    def _answers(self, chat: _Chat, whole: _Rendered) -> list[tuple[int, int]]:
        """Tokens [start, end) of every answer, its end token included."""
        numbers = [number for number, message in enumerate(chat.messages) if is_answer(message)]
        if numbers[:1] == [0]:
            raise chat.error("begins with an answer; need a question before it")
        if self._template.opening is not None:
            begins = [match.end() for match in self._template.opening.finditer(whole.text)]
            # A token with a character of the opening, such as two line breaks in one, is not whole.
            starts = np.searchsorted(whole.offsets[:, 0], begins)
            turns = np.append(np.flatnonzero(whole.ids == self.eos_token_id), len(whole.ids)) + 1
            ends = turns[np.searchsorted(turns, starts, side="right")]
            if len(starts) == len(numbers) and (ends <= [*starts[1:], len(whole.ids)]).all():
                return list(zip(starts.tolist(), ends.tolist(), strict=True))
        return [self._answer_span(chat, number, whole.ids) for number in numbers]

    def _answer_span(self, chat: _Chat, number: int, ids: np.ndarray) -> tuple[int, int]:
        """[start, end) of the answer in message `number`, for templates without an opening."""
        before = self._rendered(chat, number, add_generation_prompt=True).ids
        through = self._rendered(chat, number + 1).ids
        for first, longer in ((before, through), (through, ids)):
            if not np.array_equal(longer[: len(first)], first):
                raise chat.error(
                    f"the chat template of {self.directory} renders the messages before answer "
                    f"{number} differently once the answer is there, so its tokens cannot be told "
                    "apart: need a template whose answers begin with a special token, or whose "
                    "output only grows with each message"
                )
        # What follows the end of a turn (a line break, in Qwen's template) is never generated.
        turns = len(before) + np.flatnonzero(through[len(before) :] == self.eos_token_id)
        return len(before), int(turns[-1]) + 1 if len(turns) else len(through)

    def _expand(self, chat: _Chat, ids: np.ndarray, answer: np.ndarray) -> EncodedSample:
        """Repeat each placeholder as often as its item has rows; shift labels and mask by one."""
        standing = [*self.placeholder_ids.values(), QUERY_ID]
        placeholders = np.flatnonzero(np.isin(ids, standing))
        if len(placeholders) != len(chat.rows):
            raise PlaceholderError(chat.key, len(placeholders), len(chat.rows))
        repeats = np.ones(len(ids), dtype=np.int64)
        repeats[placeholders] = chat.rows
        is_query = ids == QUERY_ID
        input_ids = np.repeat(np.where(is_query, self.pad_token_id, ids), repeats)
        labels = np.append(input_ids[1:], self.pad_token_id)
        loss_mask = np.append(np.repeat(answer, repeats)[1:], False).astype(np.float32)
        starts = (np.cumsum(repeats) - repeats)[placeholders]
        slots = np.array(chat.slots, np.int64)
        first = np.cumsum(slots) - slots
        offsets, rows = starts[first], np.add.reduceat([*chat.rows, 0], first)[: len(first)]
        outputs = [self.outputs[media] for media, _ in chat.parts if media in self.outputs]
        numbers = np.flatnonzero(is_query[placeholders[first]]).tolist()
        try:
            find_conditions(zip(numbers, outputs, strict=True), offsets, rows)
        except ValueError as error:
            raise chat.error(error) from error
        return EncodedSample(input_ids, labels, loss_mask, offsets, rows)
