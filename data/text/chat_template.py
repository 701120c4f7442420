"""A chat template: where a folder has it, what it writes for messages, how its answers begin.

Vision-language models keep it in `chat_template.jinja`, or in `processor_config.json` or
`chat_template.json` before that existed. As in transformers 5, an older place takes precedence.
Several named templates may be given; `default` is the one for chatting. Source: transformers
`ProcessorMixin.get_processor_dict` and `_resolve_chat_template`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

from data.text.bounded_template import bound_templates
from data.text.messages import Message
from data.text.special_tokens import PROBE, SpecialTokens

_DEFAULT = "default"


def find_chat_template(directory: Path, of_tokenizer: object) -> str:
    """The text of the template of a folder.

    of_tokenizer: the template that transformers loads with the tokenizer: chat_template.jinja if
    there is one, else that of tokenizer_config.json; one, several by name, or None. Raises
    ValueError when there is none, several without a default, or a damaged file.
    """
    files = (directory / name for name in ("processor_config.json", "chat_template.json"))
    of_processor = (_read_json(file).get("chat_template") for file in files)
    found = next((one for one in of_processor if one is not None), of_tokenizer)
    if isinstance(found, list):
        found = {entry.get("name"): entry.get("template") for entry in found}
    if isinstance(found, dict):
        if not isinstance(found.get(_DEFAULT), str):
            names = ", ".join(map(str, found)) or "none"
            raise ValueError(
                f"the chat templates in {directory} are {names}, and none is named {_DEFAULT!r}: "
                "put the one to use into chat_template.jinja and leave it out of the other files"
            )
        found = found[_DEFAULT]
    if not isinstance(found, str) or not found:
        raise ValueError(
            f"the tokenizer in {directory} has no chat template: add chat_template.jinja"
        )
    return found


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    return document if isinstance(document, dict) else {}


def generation_ends(directory: Path) -> list[int]:
    """Tokens at which a model stops answering, as its ``generation_config.json`` says, if any."""
    given = _read_json(directory / "generation_config.json").get("eos_token_id")
    return [given] if isinstance(given, int) else list(given or [])


class Template:
    """The chat template of a tokenizer folder.

    text: the template itself. tokenizer: of transformers, which renders it. special: tells the
    template's special tokens from text. Only ever reads: may be used by several threads.
    """

    def __init__(self, text: str, tokenizer: Any, special: SpecialTokens) -> None:
        self.text, self._tokenizer, self._special = text, tokenizer, special
        asked = {"role": "user", "content": "?"}
        self._takes_parts = self._writes([asked | {"content": [{"type": "text", "text": PROBE}]}])
        called = {"function": {"name": PROBE, "arguments": {}}, "type": "function"}
        with_call = {"role": "assistant", "content": "", "tool_calls": [called]}
        self._writes_calls = self._writes([asked, with_call])
        self._writes_tools = self._writes([asked | {"tools": [called]}])
        self.opening = self._opening()

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = False) -> str:
        """Messages as the template writes them, for `SpecialTokens.finish`.

        Raises ValueError, with the reason, when it refuses them or has no place for their tools.
        """
        from jinja2 import TemplateError

        if messages[0].get("tools") and not self._writes_tools:
            raise ValueError("it has tools, which the chat template does not write: leave them out")
        if any(one.get("tool_calls") for one in messages) and not self._writes_calls:
            raise ValueError("it calls tools, which the chat template does not write: leave it out")
        try:
            return self._render(self._special.as_text(messages), add_generation_prompt)
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
            messages = [_joined(one) for one in messages]
        bound_templates()
        # transformers compiles a template once per process and keeps it
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
        always = "".join(one for one, _ in takewhile(lambda pair: pair[0] == pair[1], both))
        own = self._special.finish(always)
        if own[:1] == always[:1] or chat.count(always) != 2:
            return None
        rest = self._special.finish(prompt[len(always) :])
        return re.compile(f"{re.escape(own)}(?:{re.escape(rest)})?")


def _joined(message: Message) -> Message:
    """A message for a template that takes only texts: Qwen3's ignores a list of parts."""
    content = message.get("content")
    if isinstance(content, str) or any(part["type"] != "text" for part in content or ()):
        return message
    return {**message, "content": "".join(part["text"] for part in content or ())}
