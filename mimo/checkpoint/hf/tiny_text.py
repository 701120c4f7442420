"""Tokenizers and chat templates of tiny checkpoints, in the form of a family.

A tokenizer has all bytes, so it encodes any text, and one token for each word of the digits. The
templates are our own, in the form of those that the families publish.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from data.text.digits import DIGITS, SPECIAL_TOKENS, chat_template, words

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_GEMMA_TEMPLATE = """\
{{- bos_token -}}
{%- set state = namespace(preface='') -%}
{%- for message in messages -%}
{%- if message['role'] == 'system' -%}
{%- if not loop.first -%}{{ raise_exception('a system message comes first') }}{%- endif -%}
{%- if message['content'] is string -%}
{%- set state.preface = message['content'] + '\n\n' -%}
{%- else -%}
{%- set state.preface = message['content'][0]['text'] + '\n\n' -%}
{%- endif -%}
{%- else -%}
<start_of_turn>{{ 'model' if message['role'] == 'assistant' else message['role'] }}
{{ state.preface }}
{%- set state.preface = '' -%}
{%- if message['content'] is string -%}
{{ message['content'] | trim }}
{%- else -%}
{%- for part in message['content'] -%}
{%- if part['type'] == 'image' -%}
{{ '<start_of_image>' }}
{%- elif part['type'] == 'text' -%}
{{ part['text'] | trim }}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
<end_of_turn>
{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
<start_of_turn>model
{% endif -%}
"""

# What Gemma's processor writes around the crops of a wide image.
_GEMMA_WORDS = "model Here is the original image and here are some crops to help you see better"
_QWEN_WORDS = "< seconds >"  # what Qwen3-VL's processor writes before each frame of a video
_MAX_VOCABULARY = 4096


@dataclass(frozen=True)
class _Form:
    """What a family's tokenizer has beside bytes and the digits' words.

    specials: tokens in the order of their ids, each with the attribute of the tokenizer under which
    the family's processor finds it, if there is one. end_of_turn: the token after an answer.
    """

    specials: Mapping[str, str | None]
    extra_words: str
    template: str
    end_of_turn: str

    @property
    def named(self) -> dict[str, str]:
        return {name: token for token, name in self.specials.items() if name is not None}


_QWEN = _Form(
    specials={
        **dict.fromkeys(SPECIAL_TOKENS),
        "<|endoftext|>": "pad_token",
        "<|im_end|>": "eos_token",
    },
    extra_words=_QWEN_WORDS,
    template=chat_template(),
    end_of_turn="<|im_end|>",
)
_GEMMA = _Form(
    specials={
        "<pad>": "pad_token",
        "<eos>": "eos_token",
        "<bos>": "bos_token",
        "<unk>": "unk_token",
        "<start_of_turn>": None,
        "<end_of_turn>": None,
        "<start_of_image>": "boi_token",
        "<end_of_image>": "eoi_token",
        "<image_soft_token>": "image_token",
    },
    extra_words=_GEMMA_WORDS,
    template=_GEMMA_TEMPLATE,
    end_of_turn="<end_of_turn>",
)


def _form(family: str) -> _Form:
    return _GEMMA if family.startswith("gemma") else _QWEN


def build_tokenizer(family: str) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer with the digits' words, and the family's tokens and chat template.

    The special tokens come first. Equal calls give equal tokenizers.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    form = _form(family)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_MAX_VOCABULARY,  # not reached: it ends when every word is a token
        special_tokens=list(form.specials),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    known = dict.fromkeys((*DIGITS, *words(), *form.extra_words.split()))
    tokenizer.train_from_iterator([text for word in known for text in (word, f" {word}")], trainer)
    if bos := form.named.get("bos_token"):
        # As the published tokenizer does; the chat template writes its own.
        tokenizer.post_processor = TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, list(form.specials).index(bos))]
        )
    others = [token for token, name in form.specials.items() if name is None]
    settings: dict[str, Any] = {**form.named, "extra_special_tokens": others}
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        clean_up_tokenization_spaces=False,
        model_max_length=1 << 20,
        **settings,
    )
    wrapped.chat_template = form.template
    return wrapped


def end_token_ids(family: str, ids: Mapping[str, int]) -> list[int]:
    """The ids at which an answer ends. ids: by token."""
    form = _form(family)
    return [ids[token] for token in dict.fromkeys((form.named["eos_token"], form.end_of_turn))]
