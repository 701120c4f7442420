"""Tokenizer and template files as checkpoints of the families have them, and their processors.

The tokenizers are tiny, the special tokens and what the templates write are those of the
checkpoints. transformers reads the same folders: its processors say what the ids have to be.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast, Qwen2_5_VLProcessor, Qwen3VLProcessor
from transformers.models.gemma3 import Gemma3Processor
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.video_processing_utils import BaseVideoProcessor

from data.modalities.images import ImageProcessor, SquareImageProcessor
from data.text.messages import MediaText

IMAGE_SIZE, ROWS = 56, 4  # of the tiny Gemma-3

_TEXT = (
    "the user asks what the assistant model sees in this picture and the next one ; "
    "you are a helpful assistant . describe both images in a few words please"
)

_QWEN_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>")
_QWEN_TOKENS += ("<|image_pad|>", "<|video_pad|>")
_GEMMA_TOKENS = ("<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>")
_GEMMA_TOKENS += ("<start_of_image>", "<end_of_image>", "<image_soft_token>")

_QWEN_PART = """{%- if part.type == 'image' -%}<|vision_start|><|image_pad|><|vision_end|>
{%- elif part.type == 'video' -%}<|vision_start|><|video_pad|><|vision_end|>
{%- else -%}{{ part.text }}{%- endif -%}"""

_QWEN = (
    """{%- for message in messages -%}
SYSTEM<|im_start|>{{ message.role + '\\n' }}
{%- if message.content is string -%}{{ message.content }}
{%- else -%}{%- for part in message.content -%}PART{%- endfor -%}{%- endif -%}
{{ '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"""
).replace("PART", _QWEN_PART)

QWEN2_5_TEMPLATE = _QWEN.replace(
    "SYSTEM",
    "{%- if loop.first and message.role != 'system' -%}"
    "{{ '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}{%- endif -%}",
)
QWEN3_TEMPLATE = _QWEN.replace("SYSTEM", "")

GEMMA_TEMPLATE = """{{ bos_token }}
{%- set first = namespace(text='') -%}
{%- if messages[0].role == 'system' -%}
{%- set first.text = messages[0].content + '\\n\\n' -%}{%- set messages = messages[1:] -%}
{%- endif -%}
{%- for message in messages -%}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) -%}
{{ raise_exception('roles must take turns') }}{%- endif -%}
{{ '<start_of_turn>' + ('model' if message.role == 'assistant' else message.role) + '\\n' }}
{%- if loop.first -%}{{ first.text }}{%- endif -%}
{%- if message.content is string -%}{{ message.content | trim }}
{%- else -%}{%- for part in message.content -%}
{%- if part.type == 'image' -%}<start_of_image>
{%- else -%}{{ part.text | trim }}{%- endif -%}
{%- endfor -%}{%- endif -%}{{ '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\\n' }}{%- endif -%}"""

GEMMA_IMAGE = MediaText(
    "<image_soft_token>", "<start_of_image>", "\n\n<start_of_image>{placeholder}<end_of_image>\n\n"
)


def write_folder(family: str, folder: Path) -> Path:
    """A tokenizer folder of "qwen2_5_vl", "qwen3_vl" or "gemma3", its template beside it."""
    gemma = family == "gemma3"
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = _GEMMA_TOKENS if gemma else _QWEN_TOKENS
    trainer = BpeTrainer(
        vocab_size=330,
        initial_alphabet=ByteLevel.alphabet(),
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in special],
        show_progress=False,
    )
    tokenizer.train_from_iterator([_TEXT], trainer)
    options: dict[str, Any] = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    if gemma:
        # Gemma has tokens for runs of line breaks: those of the template and of the text around an
        # image become one.
        breaks = ["\n" * count for count in range(2, 6)]
        tokenizer.add_tokens([AddedToken(text, normalized=False) for text in breaks])
        extra = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"}
        options = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}
        options["extra_special_tokens"] = extra | {"image_token": "<image_soft_token>"}
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **options)
    wrapped.chat_template = {
        "qwen2_5_vl": QWEN2_5_TEMPLATE,
        "qwen3_vl": QWEN3_TEMPLATE,
        "gemma3": GEMMA_TEMPLATE,
    }[family]
    wrapped.save_pretrained(str(folder))
    return folder


def hf_processor(family: str, folder: Path, **options: Any) -> Any:
    """The family's processor in transformers, with the tokenizer of a folder.

    options: of the image processor.
    """
    tokenizer = PreTrainedTokenizerFast.from_pretrained(str(folder))
    if family == "gemma3":
        size = {"height": IMAGE_SIZE, "width": IMAGE_SIZE}
        settings: dict[str, Any] = {"size": size} | options
        images = Gemma3ImageProcessorPil(**settings)
        template = tokenizer.chat_template
        return Gemma3Processor(images, tokenizer, chat_template=template, image_seq_length=ROWS)
    images = Qwen2VLImageProcessorPil(min_pixels=28 * 28, max_pixels=28 * 28 * 20, **options)
    kind = Qwen3VLProcessor if family == "qwen3_vl" else Qwen2_5_VLProcessor
    return kind(images, tokenizer, BaseVideoProcessor(), chat_template=tokenizer.chat_template)


def our_processor(family: str) -> ImageProcessor | SquareImageProcessor:
    """Ours for the same images."""
    if family == "gemma3":
        return SquareImageProcessor(image_size=IMAGE_SIZE, patch_size=14, merge_size=2)
    return ImageProcessor(min_pixels=28 * 28, max_pixels=28 * 28 * 20)
