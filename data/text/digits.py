"""Questions and answers about digits, and a word-level tokenizer for them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# Spaces around punctuation, so that decoding, which joins words by spaces, gives the text back.
ASK_ONE = (
    "what digit is this ?",
    "which digit do you see ?",
    "read the digit .",
    "what number is in the image ?",
)
ASK_MANY = (
    "what digits are these ?",
    "which digits do you see ?",
    "read the digits in order .",
    "what numbers are in the images ?",
)
ASK_COUNTED = (
    "there are {count} images . read the digits .",
    "read all {count} digits in order .",
    "what are the {count} numbers ?",
)
ASK_NEXT = ("what comes after {a} ?", "which digit follows {a} ?")
ASK_PREVIOUS = ("what comes before {a} ?",)
ASK_COPY = ("write {list} .", "repeat {list} in order .")

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

DIGITS = tuple(str(digit) for digit in range(10))

PLACEHOLDERS = {"image": "<|image_pad|>", "video": "<|video_pad|>"}

# The form of Qwen2-VL's template, without its default system message.
_TEMPLATE = """\
{%- for message in messages -%}
<|im_start|>{{ message['role'] }}
{% if message['content'] is string -%}
{{ message['content'] }}
{%- else -%}
{%- for part in message['content'] -%}
{%- if part['type'] == 'text' -%}
{{ part['text'] }}
MEDIA{%- endif -%}
{%- endfor -%}
{%- endif -%}
<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}
"""


def chat_template(placeholders: Mapping[str, str] = PLACEHOLDERS) -> str:
    """Return the template that writes the placeholder token of each item's modality once."""
    branches = [
        f"{{%- elif part['type'] == {json.dumps(media)} -%}}\n"
        f"<|vision_start|>{{{{ {json.dumps(token)} }}}}<|vision_end|>\n"
        for media, token in placeholders.items()
    ]
    return _TEMPLATE.replace("MEDIA", "".join(branches))


def conversation(items: Sequence[str], question: str, answer: str) -> list[dict[str, Any]]:
    """Return chat messages: items of these modalities with a question, and its answer."""
    content = [{"type": media} for media in items] + [{"type": "text", "text": question}]
    reply = [{"type": "text", "text": answer}]
    return [{"role": "user", "content": content}, {"role": "assistant", "content": reply}]


def write_tokenizer(directory: Path, placeholders: Mapping[str, str] = PLACEHOLDERS) -> None:
    """Write a word-level tokenizer for these texts in Hugging Face format, with the chat template.

    placeholders: by modality, the token that stands for an item; those that are new become tokens.
    """
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Digits, Punctuation, WhitespaceSplit
    from tokenizers.pre_tokenizers import Sequence as Steps
    from transformers import PreTrainedTokenizerFast

    # In a fixed order: specials, digits, words. A new word never renumbers the digits.
    specials = dict.fromkeys((*SPECIAL_TOKENS, *placeholders.values()))
    vocabulary = (*specials, _UNKNOWN, *DIGITS, *words())
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
    """All words of the questions and of the roles, punctuation included, sorted."""
    questions = (*ASK_ONE, *ASK_MANY, *ASK_COUNTED, *ASK_NEXT, *ASK_PREVIOUS, *ASK_COPY)
    texts = " ".join((*questions, "system user assistant then"))
    return sorted({word for word in texts.split() if not word.startswith("{")})
