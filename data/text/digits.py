"""Chats about digits, and a word-level tokenizer for them."""

import json
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
_UNKNOWN = "<|unknown|>"
_WORDS: str = (
    ". ? after all are assistant before comes digit digits do follows image images in is number "
    "numbers order read repeat see system the then there these this user what which write you"
)
DIGITS = tuple(str(digit) for digit in range(10))

PLACEHOLDERS = {"image": "<|image_pad|>", "video": "<|video_pad|>"}


def chat_template(placeholders: Mapping[str, str] = PLACEHOLDERS) -> str:
    """Return the template that writes the placeholder token of each item's modality once.

    It has the form of Qwen2-VL's, without its default system message.
    """
    branches = [
        f"{{%- elif part['type'] == {json.dumps(media)} -%}}\n"
        f"<|vision_start|>{{{{ {json.dumps(token)} }}}}<|vision_end|>\n"
        for media, token in placeholders.items()
    ]
    template = (files("data.text") / "digits.jinja").read_text(encoding="utf-8")
    return template.replace("MEDIA", "".join(branches))


def conversation(items: Sequence[str], question: str, answer: str) -> list[dict[str, Any]]:
    """Return chat messages: items of these modalities with a question, and its answer."""
    content = [{"type": media} for media in items] + [{"type": "text", "text": question}]
    reply = [{"type": "text", "text": answer}]
    return [{"role": "user", "content": content}, {"role": "assistant", "content": reply}]


def write_tokenizer(
    directory: Path, placeholders: Mapping[str, str] = PLACEHOLDERS, more_words: Sequence[str] = ()
) -> None:
    """Write a word-level tokenizer for these texts in Hugging Face format, with the chat template.

    placeholders: by modality, the token that stands for an item; those that are new become tokens.
    more_words: words besides `words`.
    """
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Digits, Punctuation, WhitespaceSplit
    from tokenizers.pre_tokenizers import Sequence as Steps
    from transformers import PreTrainedTokenizerFast

    # In a fixed order: specials, digits, words. A new word never renumbers the digits.
    specials = dict.fromkeys((*SPECIAL_TOKENS, *placeholders.values()))
    vocabulary = (*specials, _UNKNOWN, *DIGITS, *words(), *more_words)
    ids = {word: number for number, word in enumerate(vocabulary)}
    tokenizer = Tokenizer(WordLevel(ids, unk_token=_UNKNOWN))
    # Punctuation apart, so that a person may type "what digit is this?".
    steps = [WhitespaceSplit(), Punctuation(), Digits(individual_digits=True)]
    tokenizer.pre_tokenizer = Steps(steps)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        unk_token=_UNKNOWN,
        extra_special_tokens=[t for t in specials if t not in ("<|im_end|>", "<|endoftext|>")],
        clean_up_tokenization_spaces=False,
        model_max_length=1 << 20,
    )
    wrapped.chat_template = chat_template(placeholders)
    wrapped.save_pretrained(str(directory))


def words() -> list[str]:
    """All words of questions about digits and of the roles, punctuation included, sorted."""
    return _WORDS.split()
