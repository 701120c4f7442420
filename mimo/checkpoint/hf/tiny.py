"""`mimo tiny`: a checkpoint of random weights in Hugging Face format, small enough for two cores.

To try a family's whole path without a download: training, export, parity. No weight has a special
value (no bias is 0, no norm is 1), and training still starts well. The tokenizer has all bytes, so
it encodes any text, and one token for each word of the digits. The chat templates are our own, in
the form of those that the families publish.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from data.text.digits import DIGITS, SPECIAL_TOKENS, chat_template, words
from mimo.checkpoint.hf.folder import new_folder
from mimo.checkpoint.hf.tiny_configs import FAMILIES, tiny_config, widened
from mimo.errors import InputError, suggestion

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel, PreTrainedTokenizerFast


# Text that Gemma's processor writes around the crops of a wide image.
_GEMMA_WORDS = "model Here is the original image and here are some crops to help you see better"
_QWEN_WORDS = "< seconds >"  # that Qwen3-VL's processor writes before each frame of a video
_MAX_VOCABULARY = 4096


@dataclass(frozen=True)
class _Form:
    """The special tokens, words and chat template of a family's tokenizer.

    specials: tokens in the order of their ids, each with the attribute of the tokenizer under which
    the family's processor finds it, or None. end_of_turn: the token after an answer.
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
    template=(files("mimo.checkpoint.hf") / "tiny_gemma.jinja").read_text(encoding="utf-8"),
    end_of_turn="<end_of_turn>",
)


def _form(family: str) -> _Form:
    return _GEMMA if family.startswith("gemma") else _QWEN


def build_tokenizer(family: str) -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer with the digits' words and the family's tokens and template.

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
    vocabulary = dict.fromkeys((*DIGITS, *words(), *form.extra_words.split()))
    texts = [text for word in vocabulary for text in (word, f" {word}")]
    tokenizer.train_from_iterator(texts, trainer)
    if bos := form.named.get("bos_token"):
        # Like the published tokenizer; the chat template writes its own.
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
    """Return the ids at which an answer ends. ids: by token."""
    form = _form(family)
    return [ids[token] for token in dict.fromkeys((form.named["eos_token"], form.end_of_turn))]


Dtype = Literal["float32", "bfloat16"]

_MARKER = "mimo_tiny.json"
_VOCAB_MULTIPLE = 64  # as in published models, the embedding has more rows than there are tokens
_MATRIX_STD = 0.08
_NORM_NOISE, _BIAS_NOISE = 0.1, 0.05


@dataclass(frozen=True)
class TinyCheckpoint:
    """Settings of a tiny checkpoint.

    shard_size: the largest safetensors file, such as "1MB"; None for a single one. tied: None for
    the default of the family's small models. width, num_layers: for a larger model, a factor on the
    hidden sizes, and the number of layers of each stack.
    """

    family: str
    seed: int = 0
    dtype: Dtype = "float32"
    shard_size: str | None = None
    tied: bool | None = None
    width: int = 1
    num_layers: int | None = None


def write_tiny(settings: TinyCheckpoint, directory: str | Path) -> int:
    """Write config, weights, tokenizer and processor files; return the number of weights.

    Equal settings give equal bytes. The folder appears complete or not at all; one from an earlier
    call is replaced. Raises InputError for an unknown family or shard size, and for a folder that
    holds something else.
    """
    if settings.family not in FAMILIES:
        raise InputError(
            f"unknown family {settings.family!r}; {suggestion(settings.family, FAMILIES)}"
        )
    with new_folder(Path(directory), _MARKER, "mimo tiny") as folder:
        return _write(settings, folder)


def _write(settings: TinyCheckpoint, directory: Path) -> int:
    from transformers import GenerationConfig

    family = FAMILIES[settings.family]
    tokenizer = build_tokenizer(settings.family)
    ids = tokenizer.get_vocab()
    vocab_size = (len(ids) // _VOCAB_MULTIPLE + 1) * _VOCAB_MULTIPLE
    tied = family["tied"] if settings.tied is None else settings.tied
    config = tiny_config(settings.family, vocab_size, ids, tied)
    if settings.width > 1 or settings.num_layers is not None:
        config = widened(config, settings.width, settings.num_layers)
    model = _build_model(config, settings)
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=end_token_ids(settings.family, ids),
        pad_token_id=tokenizer.pad_token_id,
    )
    options: dict[str, Any] = {}
    if settings.shard_size is not None:
        options["max_shard_size"] = settings.shard_size
    try:
        model.save_pretrained(str(directory), **options)
    except ValueError as error:
        raise InputError(f"shard size {settings.shard_size!r}: {error}") from error
    tokenizer.save_pretrained(str(directory))
    for name, content in {**family.get("files", {}), _MARKER: asdict(settings)}.items():
        text = json.dumps(content, indent=2, sort_keys=True)
        (directory / name).write_text(text + "\n", encoding="utf-8")
    return sum(parameter.numel() for parameter in model.parameters())


def _build_model(config, settings: TinyCheckpoint) -> PreTrainedModel:
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    is_text_only = "files" not in FAMILIES[settings.family]
    auto_class = AutoModelForCausalLM if is_text_only else AutoModelForImageTextToText
    with torch.random.fork_rng(devices=[]):  # the class draws weights of its own first
        model = auto_class.from_config(config, dtype=torch.float32)
    _draw_weights(model, settings.seed, _MATRIX_STD / settings.width**0.5)
    return model.to(getattr(torch, settings.dtype))


def _draw_weights(model: nn.Module, seed: int, matrix_std: float) -> None:
    """Draw all weights, in the order of their names in the model.

    Matrices are drawn around 0; a norm's weights around the class's initial value, which is 1, or 0
    if the norm adds 1 to them.
    """
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if weight.ndim > 1:
                weight.copy_(matrix_std * noise)
            elif name.endswith("bias"):
                weight.copy_(_BIAS_NOISE * noise)
            else:
                weight.add_(_NORM_NOISE * noise)


def main(settings: TinyCheckpoint, directory: Path) -> int:
    """Run `mimo tiny FAMILY OUT`."""
    from transformers.utils import logging

    logging.disable_progress_bar()  # of one file
    num_weights = write_tiny(settings, directory)
    print(f"{directory}: {settings.family} with {num_weights:,} random weights")
    return 0
