"""The transformers side: its processor, its model, and what every module computes.

Letters: L tokens of one sample, T of all, I items of one sample, P patches, C numbers per patch,
N rows, H hidden, V vocabulary, S side of a square image in pixels.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from mimo.check.parity.compare import INPUTS, LOGITS, PIXELS, POSITIONS, TOKENS, Theirs, level_point
from mimo.check.verify.compare import Reference, ReferenceParameter
from mimo.check.verify.workload import Sample
from mimo.checkpoint.hf.recipes import load_processor
from mimo.errors import InputError

# By model type, the tower's blocks, and the module that outputs its rows.
_QWEN = ("model.visual.blocks", "model.visual")
_MODULES = {
    "qwen2_5_vl": _QWEN,
    "qwen3_vl": _QWEN,
    "gemma3": ("model.vision_tower.encoder.layers", "model.multi_modal_projector"),
}
_LANGUAGE = "model.language_model"


def run_theirs(directory: Path, samples: Sequence[Sample], keys: Collection[str]) -> Theirs:
    """Run all samples forward and backward, one at a time, in fp32 and in this process.

    keys: of the checkpoint's tensors whose gradients and values are wanted.
    """
    from transformers import AutoModelForImageTextToText
    from transformers.utils import logging

    logging.disable_progress_bar()
    processor = load_processor(directory)
    model: Any = AutoModelForImageTextToText.from_pretrained(
        str(directory), dtype=torch.float32, local_files_only=True
    ).eval()
    encoded = [_encode(processor, model, sample) for sample in samples]
    loss_tokens = sum(int(answer.sum()) for _, answer in encoded)
    watch = _Watch(model)
    loss = 0.0
    for inputs, answer in encoded:
        watch.begin(inputs)
        logits = model(**inputs, use_cache=False).logits[0]
        watch.keep(LOGITS, logits)
        labels = inputs["input_ids"][0, 1:]
        summed = nn.functional.cross_entropy(logits[:-1][answer], labels[answer], reduction="sum")
        (summed / loss_tokens).backward()
        loss += float(summed.detach()) / loss_tokens
    params = dict(model.named_parameters())
    squares = [float(p.grad.double().pow(2).sum()) for p in params.values() if p.grad is not None]
    step = {"loss": loss, "loss_tokens": loss_tokens, "grad_norm": sum(squares) ** 0.5}
    parameters = {
        key: ReferenceParameter(
            [np.zeros(p.shape, np.float32) if p.grad is None else p.grad.numpy()],
            [p.detach().numpy()],
        )
        for key, p in params.items()
        if key in keys
    }
    return Theirs(watch.points(), Reference([step], parameters))


def _encode(processor: Any, model: Any, sample: Sample) -> tuple[dict[str, Tensor], Tensor]:
    """Put the chat through the checkpoint's template and processor.

    Returns the model's inputs, and (L - 1,) bool, where the next token counts in the loss.
    """
    pictures = [Image.open(io.BytesIO(item.content)) for item in sample.items]
    found = []
    for messages, waits in ((sample.messages[:1], True), (sample.messages, False)):
        text = processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=waits)
        images = {"images": [pictures]} if pictures else {}
        found.append(
            # The template itself writes the tokens that begin a text.
            processor(text=[text], return_tensors="pt", add_special_tokens=False, **images)
        )
    prompt, whole = found
    ids = whole["input_ids"][0]
    start = prompt["input_ids"].shape[1]
    if not torch.equal(ids[:start], prompt["input_ids"][0]):
        raise InputError(
            "the chat template renders a question differently once its answer is there, so the "
            "tokens of the answer cannot be told apart: need a template that only grows"
        )
    # Tokens after the end of a turn are never generated. Some folders name no end for generation.
    given = model.generation_config.eos_token_id
    ends = [*(given if isinstance(given, list) else [given]), processor.tokenizer.eos_token_id]
    is_end = torch.isin(ids, torch.tensor([end for end in ends if end is not None]))
    places = torch.arange(1, len(ids))
    return dict(whole), (places >= start) & (places <= int(is_end.nonzero().max()))


class _Watch:
    """Keeps what the modules of a model compute, over several forward passes."""

    def __init__(self, model: Any) -> None:
        self._kept: dict[str, list[np.ndarray]] = {}
        self._config = model.config
        self._tokens = 0
        blocks, rows = (model.get_submodule(name) for name in _MODULES[model.config.model_type])
        watch_blocks(blocks, model.config, self.keep)
        rows.register_forward_hook(self._keep_rows)
        language = model.get_submodule(_LANGUAGE)
        language.register_forward_pre_hook(self._keep_positions, with_kwargs=True)
        watch_text(language, self.keep)

    def begin(self, inputs: dict[str, Tensor]) -> None:
        self._tokens = inputs["input_ids"].shape[1]
        self.keep(TOKENS, inputs["input_ids"].T)
        pixels = inputs.get("pixel_values")
        if pixels is not None:
            self.keep(PIXELS, pixels if pixels.dim() == 2 else self._as_patches(pixels))

    def keep(self, point: str, values: Tensor) -> None:
        self._kept.setdefault(point, []).append(values.detach().numpy().copy())

    def points(self) -> dict[str, np.ndarray]:
        """Whole tensors in forward order, inputs first; the first sample has reached them all."""
        names = sorted(self._kept, key=lambda name: name not in INPUTS)
        return {name: np.concatenate(self._kept[name]) for name in names}

    def _keep_rows(self, module: nn.Module, args: object, output: Any) -> None:
        if isinstance(output, Tensor):
            levels = [output.flatten(0, 1)]
        else:
            levels = [output.pooler_output, *output.get("deepstack_features", ())]
        for number, rows in enumerate(levels):
            self.keep(level_point(number), rows)

    def _keep_positions(self, module: nn.Module, args: object, given: dict[str, Any]) -> None:
        positions = given.get("position_ids")
        if positions is None:
            positions = torch.arange(self._tokens)
        # If there are four, the first is for plain text; the others are time, height and width.
        three = positions.reshape(-1, self._tokens)[-3:].expand(3, -1)
        self.keep(POSITIONS, three.T)

    def _as_patches(self, pixels: Tensor) -> Tensor:
        """Gemma-3's whole images (I, 3, S, S) -> (I·P', 3·patch²) in our order."""
        vision = self._config.vision_config
        patch, side = vision.patch_size, vision.image_size // vision.patch_size
        cut = pixels.view(-1, 3, side, patch, side, patch).permute(0, 2, 4, 1, 3, 5)
        lines = cut.reshape(len(pixels), side * side, -1)
        return lines[:, block_order(self._config)].flatten(0, 1)


Keep = Callable[[str, Tensor], None]
"""Keeps what was computed at a point."""


def watch_text(text: Any, keep: Keep) -> None:
    """Keep what each part of a language model of transformers computes, of one sequence (S, H)."""
    # A layer's output is taken as the next one's input, because levels are added in between.
    names = ["embedding", *(f"layers.{number}" for number in range(len(text.layers)))]
    for name, module in zip(names, [*text.layers, text.norm], strict=True):
        module.register_forward_pre_hook(
            lambda _, args, point=f"language.{name}": keep(point, args[0][0])
        )
    text.norm.register_forward_hook(lambda *given: keep("language.norm", given[-1][0]))


def watch_blocks(blocks: Any, config: Any, keep: Keep) -> None:
    """Keep what each block of a tower of transformers computes, (P, D) in our order."""

    def keep_patches(point: str, hidden: Tensor) -> None:
        if hidden.dim() == 3:  # (I, P', D) with the patches of an image line by line
            hidden = hidden[:, block_order(config).to(hidden.device)].flatten(0, 1)
        keep(point, hidden)

    blocks[0].register_forward_pre_hook(lambda _, args: keep_patches("vision.embedding", args[0]))
    for number, block in enumerate(blocks):
        block.register_forward_hook(
            lambda *given, point=f"vision.blocks.{number}": keep_patches(point, given[-1])
        )


def block_order(config: Any) -> Tensor:
    """(P',) raster index of each patch of an image of Gemma-3, in the order of pooled blocks."""
    vision = config.vision_config
    side = vision.image_size // vision.patch_size
    block = side // round(config.mm_tokens_per_image**0.5)
    lines = torch.arange(side * side).view(side // block, block, side // block, block)
    return lines.transpose(1, 2).flatten()
