"""Chats with images that a model answers with, in the families' tokenizers."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from data.text.chat import ChatTokenizer
from data.text.digits import write_tokenizer
from data.text.messages import MediaText
from data.text.outputs import OutputText
from tests.data.checkpoint_files import GEMMA_IMAGE, write_folder
from tests.data.text.test_label_masks import CLOSED, QWEN3, QWEN3_VL, user

START, END = "<|image_gen_start|>", "<|image_gen_end|>"
QUERIES, PROMPT = OutputText(START, END), OutputText(START, END, skipped_tokens=3)
IMAGE, CLIP = {"type": "image"}, {"type": "clip"}
FAMILIES = {
    "qwen2_5_vl": ("qwen2_5_vl", None),
    "qwen3_vl": ("qwen3_vl", QWEN3_VL),
    "qwen3": ("qwen3_vl", QWEN3),
    "closed": ("qwen3_vl", CLOSED),
    "gemma3": ("gemma3", None),
    "digits": ("digits", None),
}

Open = Callable[..., ChatTokenizer]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    written = {}
    for name, (family, template) in FAMILIES.items():
        folder = written[name] = tmp_path_factory.mktemp(name)
        if family == "digits":
            write_tokenizer(folder)
            continue
        write_folder(family, folder)
        if template is not None:
            tokenizer = PreTrainedTokenizerFast.from_pretrained(str(folder))
            tokenizer.chat_template = template
            tokenizer.save_pretrained(str(folder))
    return written


@pytest.fixture(scope="module")
def opened(folders: dict[str, Path]) -> Open:
    @cache
    def open_chat(name: str, output: OutputText = QUERIES) -> ChatTokenizer:
        image = GEMMA_IMAGE if name == "gemma3" else MediaText("<|image_pad|>")
        return ChatTokenizer(folders[name], {"image": image}, {"output.image": output})

    return open_chat


def answer(*contents: Any) -> dict[str, Any]:
    return {**user(*contents), "role": "assistant"}


def with_tokens(chat: ChatTokenizer, folder: Path) -> ChatTokenizer:
    """The tokenizer of a folder whose files have the tokens."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(str(chat.directory))
    new = [AddedToken(token, normalized=False, special=True) for token in (START, END)]
    tokenizer.add_tokens(new, special_tokens=True)
    tokenizer.chat_template = chat.template
    tokenizer.save_pretrained(str(folder))
    return ChatTokenizer(folder, chat.media_text, chat.outputs)
