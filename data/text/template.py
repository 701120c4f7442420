"""A chat template, and its special tokens told from text that looks like them."""

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from data.text.messages import Message
from data.text.outputs import QUERY_ID, QUERY_MARK, with_marks

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# Unicode's noncharacters, which no text has.
_MARK_OF_TEXT, _MARK_OF_TOKEN = "\ufdd0", "\ufdd1"
PROBE = QUERY_MARK
_RESERVED = re.compile("[\ufdd0-\ufdd2]")


class SpecialTokens:
    """The special tokens of a tokenizer, and the tokenizer for texts in which they are marked.

    backend: its model is shared, not copied. needed: what counts as special even if the tokenizer
    does not say so, such as placeholders; a text never becomes one of their ids.
    """

    def __init__(self, backend: "Tokenizer", needed: Collection[str]) -> None:
        from tokenizers import AddedToken, Tokenizer

        added = sorted(backend.get_added_tokens_decoder().items())
        special = {token.content for _, token in added if token.special} | set(needed)
        special = {token for token in special if len(token) > 1}
        self._looks_special = _any_of(special)
        self._special = _any_of(token.content for _, token in added if token.content in special)
        self._beginnings = {token[:end] for token in special for end in range(1, len(token))}
        self._longest = max(map(len, special), default=0)

        self._tokenizer = Tokenizer(backend.model)
        for step in ("normalizer", "pre_tokenizer"):
            if getattr(backend, step) is not None:
                setattr(self._tokenizer, step, getattr(backend, step))
        self._ids: dict[str, int] = {}
        named = []
        for token_id, token in added:  # in the order of their ids, so that these stay the same
            flags = {flag: getattr(token, flag) for flag in ("single_word", "lstrip", "rstrip")}
            copy = AddedToken(
                token.content,
                normalized=token.normalized,
                special=token.content in special,
                **flags,
            )
            self._tokenizer.add_tokens([copy])
            if self._tokenizer.token_to_id(token.content) != token_id:
                raise ValueError(
                    f"the tokenizer numbers its added token {token.content!r} as {token_id}, which "
                    "does not follow from its file: save it again with transformers"
                )
            if token.content in special:
                name = _MARK_OF_TOKEN + token.content
                self._ids[name] = token_id
                named.append(AddedToken(name, normalized=False, **flags))
        self._ids[QUERY_MARK] = QUERY_ID
        named.append(AddedToken(QUERY_MARK, normalized=False))
        self._tokenizer.add_tokens(named)
        self._tokenizer.encode_special_tokens = True  # as text
        self._names = _any_of(self._ids)
        marked = [_MARK_OF_TOKEN + token for token in needed]
        self._needed_ids = [self._ids[name] for name in marked if name in self._ids]

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        self._tokenizer.encode_special_tokens = True  # a pickle does not carry this flag

    def as_text(self, value: Any) -> Any:
        """Mark all texts in messages that look like special tokens. Raises ValueError."""
        if isinstance(value, str):
            return self._marked(value)
        if isinstance(value, Mapping):
            return {self.as_text(name): self.as_text(part) for name, part in value.items()}
        if isinstance(value, list | tuple):
            return [self.as_text(part) for part in value]
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
        return self._looks_special.sub(lambda m: m[0][0] + _MARK_OF_TEXT + m[0][1:], text)

    def finish(self, rendered: str) -> str:
        """Rendered messages, or a part of them, as `encode` takes them."""
        marked = self._special.sub(lambda match: _MARK_OF_TOKEN + match[0], rendered)
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
        for match in self._names.finditer(text):
            ids[encoding.char_to_token(match.start())] = self._ids[match[0]]
        return ids, np.array(encoding.offsets, np.int64).reshape(-1, 2)


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    longest_first = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


_DEFAULT = "default"


def find_chat_template(directory: Path, of_tokenizer: object) -> str:
    """The text of the template of a folder. Raises ValueError for none, or for a damaged file.

    of_tokenizer: the template, or several by name, that transformers loads with the tokenizer.
    """
    files = (directory / name for name in ("processor_config.json", "chat_template.json"))
    of_processor = (_read_json(file).get("chat_template") for file in files)
    template = next((entry for entry in of_processor if entry is not None), of_tokenizer)
    if isinstance(template, dict):
        if not isinstance(template.get(_DEFAULT), str):
            names = ", ".join(map(str, template)) or "none"
            raise ValueError(
                f"the chat templates in {directory} are {names}, and none is named {_DEFAULT!r}: "
                "put the one to use into chat_template.jinja and leave it out of the other files"
            )
        template = template[_DEFAULT]
    if not isinstance(template, str) or not template:
        raise ValueError(
            f"the tokenizer in {directory} has no chat template: add chat_template.jinja"
        )
    return template


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    return document if isinstance(document, dict) else {}


def load_tokenizer(directory: Path) -> Any:
    """Return the tokenizer of transformers in a folder, without downloading or running anything."""
    tokenizer_class = _read_json(directory / "tokenizer_config.json").get("tokenizer_class")
    # Imported late, because it costs a second, half of it for AutoTokenizer.
    if tokenizer_class == "TokenizersBackend" and not (directory / "config.json").exists():
        from transformers import TokenizersBackend as Tokenizer
    else:
        from transformers import AutoTokenizer as Tokenizer
    return Tokenizer.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)


def generation_ends(directory: Path) -> list[int]:
    """Tokens at which a model stops answering, as its ``generation_config.json`` says, if any."""
    ends = _read_json(directory / "generation_config.json").get("eos_token_id")
    return [ends] if isinstance(ends, int) else list(ends or [])


class Template:
    """The chat template of a tokenizer folder; safe to use in several threads.

    tokenizer: of transformers, which renders it. special: tells its special tokens from text.
    outputs: by modality; the template gets a text in place of each of these items.
    """

    def __init__(
        self, text: str, tokenizer: Any, special: SpecialTokens, outputs: Mapping[str, Any]
    ) -> None:
        self.text, self._tokenizer, self._special = text, tokenizer, special
        self._outputs = outputs
        asked = {"role": "user", "content": "?"}
        self._takes_parts = self._writes([asked | {"content": [{"type": "text", "text": PROBE}]}])
        called = {"function": {"name": PROBE, "arguments": {}}, "type": "function"}
        with_call = {"role": "assistant", "content": "", "tool_calls": [called]}
        self._writes_calls = self._writes([asked, with_call])
        self._writes_tools = self._writes([asked | {"tools": [called]}])
        self.opening = self._opening()

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = False) -> str:
        """Render messages, for `SpecialTokens.finish`. Raises ValueError if the template cannot."""
        from jinja2 import TemplateError

        if messages[0].get("tools") and not self._writes_tools:
            raise ValueError("it has tools, which the chat template does not write: leave them out")
        if any(message.get("tool_calls") for message in messages) and not self._writes_calls:
            raise ValueError("it calls tools, which the chat template does not write: leave it out")
        try:
            marked = with_marks(self._special.as_text(messages), self._outputs)
            return self._render(marked, add_generation_prompt)
        except TemplateError as error:
            raise ValueError(f"the chat template refuses the messages: {error}") from error
        except ValueError:
            raise
        except Exception as error:  # a template is a program, and may fail in any way
            raise ValueError(
                f"the messages cannot be rendered ({type(error).__name__}: {error}); need contents "
                "that the chat template takes"
            ) from error

    def _render(self, messages: Sequence[Message], add_generation_prompt: bool = False) -> str:
        tools = messages[0].get("tools")
        if not self._takes_parts:
            messages = [_joined(message) for message in messages]
        # It renders in transformers' sandbox, which compiles a template once per process.
        return self._tokenizer.apply_chat_template(
            list(messages),
            tools=tools or None,
            chat_template=self.text,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
        )

    _takes_parts = True  # until it is known

    def _writes(self, messages: Sequence[Message]) -> bool:
        """Whether the template writes what these messages hold, not refusing or ignoring it."""
        try:
            return PROBE in self._render(messages)
        except Exception:  # as above
            return False

    def _opening(self) -> re.Pattern[str] | None:
        """What is before an answer in a finished text: None unless a special token begins it.

        The end of the generation prompt may be missing: Qwen3's thinking models have `<think>` in
        it, and their template leaves the thoughts of earlier answers out.
        """
        content: Any = [{"type": "text", "text": PROBE}] if self._takes_parts else PROBE
        turns = [{"role": role, "content": content} for role in ("user", "assistant")]
        try:
            question, prompt = self._render(turns[:1]), self._render(turns[:1], True)
            chat = self._render([*turns, *turns])
        except Exception:  # as above
            return None
        if not (prompt.startswith(question) and chat.startswith(question)):
            return None
        prompt = prompt[len(question) :]
        both = zip(prompt, chat[len(question) :], strict=False)
        always = "".join(a for a, _ in takewhile(lambda pair: pair[0] == pair[1], both))
        opening = self._special.finish(always)
        if opening[:1] == always[:1] or chat.count(always) != 2:
            return None
        rest = self._special.finish(prompt[len(always) :])
        return re.compile(f"{re.escape(opening)}(?:{re.escape(rest)})?")


def _joined(message: Message) -> Message:
    """A message for a template that takes only texts: Qwen3's ignores a list of parts."""
    content = message.get("content")
    if isinstance(content, str) or any(part["type"] != "text" for part in content or ()):
        return message
    return {**message, "content": "".join(part["text"] for part in content or ())}
