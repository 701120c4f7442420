"""Points: places in a model where activations are compared with transformers.

The whole tensor of a point has a row for each token of all samples, or for each patch or embedding
of all items, in the order of the samples. `run_transformers` computes all points in transformers.

Letters: L tokens of one sample, T of all, I items of one sample, P patches, C numbers per patch,
N rows, H hidden, V vocabulary, S side of a square image in pixels.
"""

import io
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from data.modalities.transformers import load_processor
from mimo.check.compare import (
    INPUTS,
    LOGITS,
    PIXELS,
    POSITIONS,
    TOKENS,
    Reference,
    ReferenceParameter,
)
from mimo.check.workload import Sample
from mimo.errors import InputError

# By model type, the tower's blocks, and the module that outputs its rows.
_QWEN = ("model.visual.blocks", "model.visual")
_GEMMA = ("model.vision_tower.encoder.layers", "model.multi_modal_projector")
_MODULES = {
    **dict.fromkeys(("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"), _QWEN),
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe"), _QWEN),
    "gemma3": _GEMMA,
}
_LANGUAGE = "model.language_model"

Keep = Callable[[str, Tensor], None]
"""Keeps what was computed at a point."""


def level_point(number: int) -> str:
    """Return the point of a tower's output: 0 is the embeddings, other numbers are levels."""
    return "vision.rows" if number == 0 else f"vision.level {number - 1}"


@dataclass
class Recording:
    """Values (n, k) of each call by point, in the order of the microbatches."""

    states: dict[str, list[Tensor]] = field(default_factory=dict)

    def keep(self, point: str, values: Tensor) -> None:
        """Copy what a call computed, because the schedules free it once it is sent.

        Norms under sequence parallelism compute on DTensors: this rank's part is kept.
        """
        values = values.to_local() if isinstance(values, DTensor) else values
        self.states.setdefault(point, []).append(values.detach().clone())


def run_transformers(folder: Path, samples: Sequence[Sample], keys: Collection[str]) -> Reference:
    """Run all samples forward and backward, one at a time, in fp32 and in this process.

    keys: names of the checkpoint's tensors whose gradients and values to return.
    """
    from transformers import AutoModelForImageTextToText
    from transformers.utils import logging

    logging.disable_progress_bar()
    processor = load_processor(folder)
    model: Any = AutoModelForImageTextToText.from_pretrained(
        str(folder), dtype=torch.float32, local_files_only=True
    ).eval()
    encoded = [_encode(processor, model, sample) for sample in samples]
    loss_tokens = sum(int(answer.sum()) for _, answer in encoded)
    recorder = _Recorder(model)
    loss = 0.0
    for inputs, answer in encoded:
        recorder.begin(inputs)
        logits = model(**inputs, use_cache=False).logits[0]
        recorder.keep(LOGITS, logits)
        labels = inputs["input_ids"][0, 1:]
        summed = nn.functional.cross_entropy(logits[:-1][answer], labels[answer], reduction="sum")
        (summed / loss_tokens).backward()
        loss += float(summed.detach()) / loss_tokens
    params = dict(model.named_parameters())
    squares = [float(p.grad.double().pow(2).sum()) for p in params.values() if p.grad is not None]
    step = {"loss": loss, "loss_tokens": loss_tokens, "grad_norm": sum(squares) ** 0.5}
    parameters = {}
    for key, p in params.items():
        if key in keys:
            gradient = torch.zeros_like(p) if p.grad is None else p.grad
            parameters[key] = ReferenceParameter([gradient.numpy()], [p.detach().numpy()])
    return Reference([step], parameters, recorder.points())


def _encode(processor: Any, model: Any, sample: Sample) -> tuple[dict[str, Tensor], Tensor]:
    """Return the model's inputs, and (L - 1,) bool: whether the next token counts in the loss."""
    pictures = [Image.open(io.BytesIO(item.content)) for item in sample.items]
    images = {"images": [pictures]} if pictures else {}

    def encode(messages: Sequence[Any], add_generation_prompt: bool) -> Any:
        text = processor.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=add_generation_prompt
        )
        # The template itself writes the tokens that begin a text.
        return processor(text=[text], return_tensors="pt", add_special_tokens=False, **images)

    prompt, whole = encode(sample.messages[:1], True), encode(sample.messages, False)
    ids = whole["input_ids"][0]
    start = prompt["input_ids"].shape[1]
    if not torch.equal(ids[:start], prompt["input_ids"][0]):
        raise InputError(
            "the chat template renders a question differently after its answer is added, so the "
            "tokens of the answer are unknown: use a template that only appends"
        )
    # Tokens after the end of a turn are never generated. Some folders name no end for generation.
    eos = model.generation_config.eos_token_id
    ends = [*(eos if isinstance(eos, list) else [eos]), processor.tokenizer.eos_token_id]
    is_end = torch.isin(ids, torch.tensor([end for end in ends if end is not None]))
    positions = torch.arange(1, len(ids))
    return dict(whole), (positions >= start) & (positions <= int(is_end.nonzero().max()))


class _Recorder(Recording):
    """Records what modules of transformers compute in several forward passes."""

    def __init__(self, model: Any) -> None:
        super().__init__()
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

    def points(self) -> dict[str, np.ndarray]:
        """Return whole tensors, inputs first, as in the first sample, which has all points."""
        names = sorted(self.states, key=lambda name: name not in INPUTS)
        return {name: torch.cat(self.states[name]).numpy() for name in names}

    def _keep_rows(self, module: nn.Module, args: object, output: Any) -> None:
        if isinstance(output, Tensor):
            levels = [output.flatten(0, 1)]
        else:
            levels = [output.pooler_output, *output.get("deepstack_features", ())]
        for number, rows in enumerate(levels):
            self.keep(level_point(number), rows)

    def _keep_positions(self, module: nn.Module, args: object, kwargs: dict[str, Any]) -> None:
        positions = kwargs.get("position_ids")
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


def watch_text(text: Any, keep: Keep) -> None:
    """Keep what each part of transformers' language model computes, of one sequence (S, H)."""
    # A layer's output is taken as the next one's input, because levels are added in between.
    points = ["embedding", *(f"layers.{number}" for number in range(len(text.layers)))]
    points = [f"language.{name}" for name in points]
    for point, module in zip(points, [*text.layers, text.norm], strict=True):
        module.register_forward_pre_hook(lambda _, args, point=point: keep(point, args[0][0]))
    text.norm.register_forward_hook(lambda _, __, hidden: keep("language.norm", hidden[0]))


def watch_blocks(blocks: Any, config: Any, keep: Keep) -> None:
    """Keep what each block of a tower of transformers computes, (P, D) in our order."""

    def keep_patches(point: str, hidden: Tensor) -> None:
        if hidden.dim() == 3:  # (I, P', D) with the patches of an image line by line
            hidden = hidden[:, block_order(config).to(hidden.device)].flatten(0, 1)
        keep(point, hidden)

    blocks[0].register_forward_pre_hook(lambda _, args: keep_patches("vision.embedding", args[0]))
    for number, block in enumerate(blocks):
        block.register_forward_hook(
            lambda _, __, hidden, point=f"vision.blocks.{number}": keep_patches(point, hidden)
        )


def block_order(config: Any) -> Tensor:
    """Return (P',) the raster index of each patch of a Gemma-3 image, in order of pooled blocks."""
    vision = config.vision_config
    side = vision.image_size // vision.patch_size
    block = side // round(config.mm_tokens_per_image**0.5)
    lines = torch.arange(side * side).view(side // block, block, side // block, block)
    return lines.transpose(1, 2).flatten()
