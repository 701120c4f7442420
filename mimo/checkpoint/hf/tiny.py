"""`mimo tiny`: a checkpoint of random weights in Hugging Face format, small enough for two cores.

To try a family's whole path without a download: training, export, parity. No weight has a special
value (no bias is 0, no norm is 1), and training still starts well. The tokenizer has all bytes, so
it encodes any text, and one token for each word of the digits. The chat templates are our own, in
the form of those that the families publish.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import yaml

from data.text.digits import DIGITS, chat_template, words
from mimo.checkpoint.hf import pipelines
from mimo.errors import InputError, suggestion
from mimo.families.hf_config import new_folder, write_json

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

Dtype = Literal["float32", "bfloat16"]


def _table(name: str) -> dict[str, dict[str, Any]]:
    path = files("mimo.checkpoint.hf") / f"tiny_{name}.yaml"
    return yaml.safe_load(path.read_text(encoding="utf-8"))


FAMILIES, PIPELINES = _table("families"), _table("pipelines")
_TEXT, _QWEN_TOKENS, _GEMMA_TOKENS = (
    FAMILIES.pop(key) for key in ("all texts", "qwen tokens", "gemma tokens")
)
_MARKER = "mimo_tiny.json"
_MAX_VOCABULARY = 4096
_VOCAB_MULTIPLE = 64  # as in published models, the embedding has more rows than there are tokens
_MATRIX_STD, _NORM_NOISE, _BIAS_NOISE = 0.08, 0.1, 0.05
# Keys that grow with the width, and those of numbers of layers.
_WIDTHS = (
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"),
    "out_hidden_size",
)
_DEPTHS = ("num_hidden_layers", "depth")
_QWEN_WORDS = "< seconds >"  # before each frame of a video, by Qwen3-VL's processor
# Around the crops of a wide image, by Gemma's processor.
_GEMMA_WORDS = "model Here is the original image and here are some crops to help you see better"


def build_tokenizer(family: str) -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer with the digits' words and the family's tokens."""
    from tokenizers.processors import TemplateProcessing

    if not family.startswith("gemma"):
        tokenizer = byte_level_tokenizer(_QWEN_TOKENS, _QWEN_WORDS)
        tokenizer.chat_template = chat_template()
        return tokenizer
    tokenizer = byte_level_tokenizer(_GEMMA_TOKENS, _GEMMA_WORDS)
    template = files("mimo.checkpoint.hf") / "tiny_gemma.jinja"
    tokenizer.chat_template = template.read_text(encoding="utf-8")
    # Like the published tokenizer; the chat template writes its own.
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", list(_GEMMA_TOKENS).index("<bos>"))]
    )
    return tokenizer


def byte_level_tokenizer(
    specials: Mapping[str, str | None], extra_words: str = ""
) -> PreTrainedTokenizerFast:
    """Return a tokenizer with all bytes, the digits' words and special tokens.

    specials: in the order of their ids, each with the attribute of the tokenizer, or None.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_MAX_VOCABULARY,  # not reached: it ends when every word is a token
        special_tokens=list(specials),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    vocabulary = dict.fromkeys((*DIGITS, *words(), *extra_words.split()))
    texts = [text for word in vocabulary for text in (word, f" {word}")]
    tokenizer.train_from_iterator(texts, trainer)
    named: dict[str, Any] = {name: token for token, name in specials.items() if name is not None}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        clean_up_tokenization_spaces=False,
        model_max_length=1 << 20,
        extra_special_tokens=[token for token, name in specials.items() if name is None],
        **named,
    )


@dataclass(frozen=True)
class TinyCheckpoint:
    """Settings of a tiny checkpoint.

    shard_size: of the largest safetensors file. tied: None for the default of the family's small
    models. width, num_layers: for a larger model, a factor on the
    hidden sizes, and the number of layers of each stack.
    """

    family: str
    seed: int = 0
    dtype: Dtype = "float32"
    shard_size: str = "50GB"
    tied: bool | None = None
    width: int = 1
    num_layers: int | None = None


def write_tiny(settings: TinyCheckpoint, directory: str | Path) -> int:
    """Write config, weights, tokenizer and processor files; return the number of weights.

    Equal settings give equal bytes; a folder of an earlier call is replaced. The family may be any
    `model_type` of AutoModelForImageTextToText, or one of `PIPELINES`, a folder of diffusers;
    ``tied``, ``width`` and ``num_layers`` are for the families of `FAMILIES`. Raises InputError for
    an unknown family, for a class that cannot be made tiny, and for a folder that holds something
    else.
    """
    from mimo.checkpoint.hf.tiny_class import classes, make

    names = {**FAMILIES, **PIPELINES, **classes()}
    if settings.family not in names:
        raise InputError(
            f"unknown family {settings.family!r}; {suggestion(settings.family, names)}"
        )
    with new_folder(Path(directory), _MARKER, "mimo tiny") as folder:
        if settings.family in PIPELINES:
            return _write_pipeline(settings, folder)
        if settings.family in FAMILIES:
            model, tokenizer = _build(settings)
            processors = FAMILIES[settings.family].get("files", {})
        else:
            model, processor = make(settings.family)
            tokenizer = processor.tokenizer
            tokenizer.chat_template = processor.chat_template
            parts = json.loads(processor.to_json_string())
            processors = {
                "processor_config.json": {k: v for k, v in parts.items() if v is not None}
            }
        _draw_weights(model, settings.seed, _MATRIX_STD / settings.width**0.5)
        _save(settings, folder, model, tokenizer, processors)
        tokenizer.save_pretrained(str(folder))
        write_json(folder / _MARKER, asdict(settings))
    return sum(parameter.numel() for parameter in model.parameters())


def _write_pipeline(settings: TinyCheckpoint, folder: Path) -> int:
    """Write a folder of diffusers; return the number of weights.

    The autoencoder keeps its initial weights, so that its output depends on the image.
    """
    import diffusers
    import torch

    sizes = deepcopy(PIPELINES[settings.family])
    text_encoder, tokenizer = _build(replace(settings, family=sizes["text_encoder"]))
    sizes["transformer"]["joint_attention_dim"] = text_encoder.config.text_config.hidden_size
    _draw_weights(text_encoder, settings.seed, _MATRIX_STD)
    # As in the published folders, there are no files of processors.
    _save(settings, folder / pipelines.TEXT_ENCODER, text_encoder, tokenizer, {})
    tokenizer.save_pretrained(str(folder / pipelines.TOKENIZER))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        parts = {
            name: getattr(diffusers, kind)(**sizes[name]) for name, kind in sizes["classes"].items()
        }
    _draw_weights(parts[pipelines.TRANSFORMER], settings.seed + 1, _MATRIX_STD)
    weights = [
        w for name in (pipelines.TRANSFORMER, pipelines.VAE) for w in parts[name].parameters()
    ]
    for weight in weights:
        weight.data = weight.data.to(getattr(torch, settings.dtype))
    for name, part in parts.items():
        part.save_pretrained(folder / name)
    pipelines.write_index(folder, sizes["pipeline"])
    write_json(folder / _MARKER, asdict(settings))
    return sum(weight.numel() for weight in (*weights, *text_encoder.parameters()))


def _build(settings: TinyCheckpoint) -> tuple[Any, PreTrainedTokenizerFast]:
    """Return the model and the tokenizer of a family with code of its own."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    family = FAMILIES[settings.family]
    tokenizer = build_tokenizer(settings.family)
    ids = tokenizer.get_vocab()
    vocab_size = (len(ids) // _VOCAB_MULTIPLE + 1) * _VOCAB_MULTIPLE
    tied = family["tied"] if settings.tied is None else settings.tied
    config = tiny_config(settings.family, vocab_size, ids, tied)
    if settings.width > 1 or settings.num_layers is not None:
        config = _widened(config, settings.width, settings.num_layers)
    auto_class = AutoModelForImageTextToText if "files" in family else AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]):  # the class draws weights of its own first
        model = auto_class.from_config(config, dtype=torch.float32)
    return model, tokenizer


def _save(
    settings: TinyCheckpoint,
    directory: Path,
    model: Any,
    tokenizer: PreTrainedTokenizerFast,
    processors: Mapping[str, Any],
) -> None:
    """Write a folder without its tokenizer. processors: contents of their JSON files, by name."""
    import torch
    from transformers import GenerationConfig

    model = model.to(getattr(torch, settings.dtype))
    ends = [tokenizer.eos_token_id, tokenizer.get_vocab().get("<end_of_turn>")]
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=[token for token in ends if token is not None],
        pad_token_id=tokenizer.pad_token_id,
    )
    model.save_pretrained(str(directory), max_shard_size=settings.shard_size)
    for name, content in processors.items():
        write_json(directory / name, content)


def tiny_config(
    family: str, vocab_size: int, token_ids: Mapping[str, int], tied: bool
) -> PreTrainedConfig:
    """Return the configuration of transformers. token_ids: ids by token."""
    from transformers import AutoConfig

    sizes = deepcopy(FAMILIES[family])  # transformers may change it
    text = {**_TEXT, "vocab_size": vocab_size, **sizes["text"]}
    # Other models with a tower have this key at the top level only.
    if "vision" not in sizes or family in ("gemma3", "qwen3_5"):
        text["tie_word_embeddings"] = tied
    text |= {key: token_ids[token] for key, token in sizes["text_ids"].items()}
    if "vision" not in sizes:
        return AutoConfig.for_model(family, **text)
    ids = {key: token_ids[token] for key, token in sizes.get("ids", {}).items()}
    parts = {"text_config": text, "vision_config": sizes["vision"]}
    return AutoConfig.for_model(
        family, **parts, **sizes.get("whole", {}), **ids, tie_word_embeddings=tied
    )


def _widened(config: PreTrainedConfig, width: int, num_layers: int | None) -> PreTrainedConfig:
    """Return the same architecture with hidden sizes times ``width`` and this many layers."""
    sizes = config.to_dict()
    for part in (sizes.get("text_config", sizes), sizes.get("vision_config", {})):
        for key in _WIDTHS:
            if key in part:
                part[key] *= width
        for key in _DEPTHS:
            if key in part and num_layers is not None:
                part[key] = num_layers
        if num_layers is not None and part.get("layer_types"):
            kinds = part["layer_types"]
            part["layer_types"] = [kinds[layer % len(kinds)] for layer in range(num_layers)]
    return type(config).from_dict(sizes)


def _draw_weights(model: PreTrainedModel, seed: int, matrix_std: float) -> None:
    """Draw all weights, in the order of their names in the model.

    Matrices are drawn around 0, a norm's weights around the class's initial value, 1 or 0, and the
    logarithms of decay rates around -1.
    """
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if weight.ndim > 1:
                weight.copy_(matrix_std * noise)
            elif name.endswith("A_log"):  # of slow decays; gradients of fast ones are mostly noise
                weight.copy_(_NORM_NOISE * noise - 1)
            elif name.endswith("bias"):
                weight.copy_(_BIAS_NOISE * noise)
            else:
                weight.add_(_NORM_NOISE * noise)
