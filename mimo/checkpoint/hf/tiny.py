"""`mimo tiny`: a checkpoint of random weights in Hugging Face format, small enough for two cores.

To try a family's whole path without a download: training, export, parity. The weights are drawn so
that nothing is at a special value (no bias is 0, no norm is 1) and training still starts well.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from mimo.checkpoint.hf.new_folder import new_folder
from mimo.checkpoint.hf.tiny_configs import FAMILIES, tiny_config, widened
from mimo.checkpoint.hf.tiny_text import build_tokenizer, end_token_ids
from mimo.errors import InputError, suggestion

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

Dtype = Literal["float32", "bfloat16"]

_MARKER = "mimo_tiny.json"
_VOCAB_MULTIPLE = 64  # as in published models, the embedding has more rows than there are tokens
_MATRIX_STD = 0.08
_NORM_NOISE, _BIAS_NOISE = 0.1, 0.05


@dataclass(frozen=True)
class TinyCheckpoint:
    """What to write. tied: None for what the family's small models do.

    shard_size: the largest safetensors file, such as "1MB"; None for a single one.
    width, num_layers: a larger one: hidden sizes times ``width``, and so many layers in each stack.
    """

    family: str
    seed: int = 0
    dtype: Dtype = "float32"
    shard_size: str | None = None
    tied: bool | None = None
    width: int = 1
    num_layers: int | None = None


def write_tiny(settings: TinyCheckpoint, directory: str | Path) -> int:
    """Write config, weights, tokenizer and processor files; returns the number of weights.

    Equal settings give equal bytes. The folder appears complete or not at all; one that an earlier
    call wrote is replaced. Raises InputError for an unknown family or shard size, and for a folder
    that holds something else.
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
    tied = family.tied if settings.tied is None else settings.tied
    config = tiny_config(settings.family, vocab_size, ids, tied)
    if settings.width > 1 or settings.num_layers is not None:
        config = widened(config, settings.width, settings.num_layers)
    model = _build_model(config, settings)
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=end_token_ids(settings.family, ids),
        pad_token_id=tokenizer.pad_token_id,
    )
    whole = settings.shard_size is None
    options: dict[str, Any] = {} if whole else {"max_shard_size": settings.shard_size}
    try:
        model.save_pretrained(str(directory), **options)
    except ValueError as error:
        raise InputError(f"shard size {settings.shard_size!r}: {error}") from error
    tokenizer.save_pretrained(str(directory))
    for name, content in {**family.files, _MARKER: asdict(settings)}.items():
        text = json.dumps(content, indent=2, sort_keys=True)
        (directory / name).write_text(text + "\n", encoding="utf-8")
    return sum(parameter.numel() for parameter in model.parameters())


def _build_model(config, settings: TinyCheckpoint) -> PreTrainedModel:
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    alone = not FAMILIES[settings.family].files
    kind = AutoModelForCausalLM if alone else AutoModelForImageTextToText
    with torch.random.fork_rng(devices=[]):  # the class draws weights of its own first
        model = kind.from_config(config, dtype=torch.float32)
    _draw_weights(model, settings.seed, _MATRIX_STD / settings.width**0.5)
    return model.to(getattr(torch, settings.dtype))


def _draw_weights(model: nn.Module, seed: int, matrix_std: float) -> None:
    """Draw all weights anew, in the order of their names in the model.

    Matrices around 0; a norm's weights around where the class begins, which is 1 or, where 1 is
    added to them, 0.
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
    """`mimo tiny FAMILY OUT`."""
    from transformers.utils import logging

    logging.disable_progress_bar()  # a bar of one file says nothing
    num_weights = write_tiny(settings, directory)
    print(f"{directory}: {settings.family} with {num_weights:,} random weights")
    return 0
