"""A chat template at work: what it writes for messages, and how its answers begin."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import takewhile
from typing import Any

from data.text.messages import Message
from data.text.special_tokens import PROBE, SpecialTokens


class Template:
    """The chat template of a tokenizer folder.

    text: the template itself. tokenizer: of transformers, which renders it. special: tells the
    template's special tokens from text. Only ever reads: may be used by several threads.
    """

    def __init__(self, text: str, tokenizer: Any, special: SpecialTokens) -> None:
        self.text, self._tokenizer, self._special = text, tokenizer, special
        self._takes_parts = self._writes([_probe([{"type": "text", "text": PROBE}])])
        called = {"function": {"name": PROBE, "arguments": {}}, "type": "function"}
        with_call = {"role": "assistant", "content": "", "tool_calls": [called]}
        self._writes_calls = self._writes([_probe("?"), with_call])
        self._writes_tools = self._writes([_probe("?") | {"tools": [called]}])
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
        turns = [_probe(content), {"role": "assistant", "content": content}]
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


def _probe(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def _joined(message: Message) -> Message:
    """A message for a template that takes only texts: Qwen3's ignores a list of parts."""
    content = message.get("content")
    if isinstance(content, str) or any(part["type"] != "text" for part in content or ()):
        return message
    return {**message, "content": "".join(part["text"] for part in content or ())}
