"""Tiny language models of transformers on drawn lanes: the plain module against `LanguageModel`.

The plain module takes one sample at a time, with attention and masks of its own.

Letters: T tokens of a lane, L of a sample, n rows, H hidden, k levels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from mimo.engines.fsdp.context import FsdpContext
from mimo.engines.fsdp.language import LanguageModel
from mimo.engines.fsdp.sharding import load, shard
from mimo.ops.segments import PackedSegments, insert_embeddings
from tests.fsdp_ranks import Asked

_TEXT = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
_ROPE = {"rope_type": "default", "rope_theta": 1e4}
_QWEN_TOWER: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": 32,
}
_GEMMA_TOWER: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "image_size": 28,
    "patch_size": 14,
    "vision_use_head": False,
}
NUM_LEVELS = {"qwen3_vl": 2}
WITHOUT_ROWS = ("llama", "mistral")


def config_of(name: str, vision: dict[str, Any] | None = None, **changes: Any) -> Any:
    """The whole configuration of a tiny model. changes: of the text part."""
    import transformers as hf

    text = {**_TEXT, **changes}
    if name == "llama":
        text["rope_parameters"] = {
            "rope_type": "llama3",
            "rope_theta": 1e4,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        }
        return hf.LlamaConfig(**text, attention_bias=True)
    if name == "mistral":
        return hf.MistralConfig(**text, sliding_window=6)
    tied = text["tie_word_embeddings"]
    if name == "qwen3_vl":
        text["rope_parameters"] = _ROPE | {"mrope_section": [4, 2, 2], "mrope_interleaved": True}
        tower = _QWEN_TOWER | {"deepstack_visual_indexes": [0]} | (vision or {})
        return hf.Qwen3VLConfig(text_config=text, vision_config=tower, tie_word_embeddings=tied)
    if name == "qwen2_5_vl":
        text |= {"head_dim": 8, "rope_parameters": _ROPE | {"mrope_section": [1, 1, 2]}}
        text |= {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
        tower = _QWEN_TOWER | (vision or {})
        return hf.Qwen2_5_VLConfig(text_config=text, vision_config=tower, tie_word_embeddings=tied)
    assert name == "gemma3"
    text |= {"tie_word_embeddings": True, "sliding_window": 4, "query_pre_attn_scalar": 20}
    text["layer_types"] = ["sliding_attention", "full_attention", "sliding_attention"]
    # The row without a gradient is on the second rank of two.
    text["pad_token_id"] = 50
    tower = _GEMMA_TOWER | (vision or {})
    return hf.Gemma3Config(
        text_config=text, vision_config=tower, mm_tokens_per_image=4, tie_word_embeddings=True
    )


def new_model(config: Any, attention: str = "sdpa") -> Any:
    """The module of transformers in fp32."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    text_only = config.get_text_config() is config
    kind = AutoModelForCausalLM if text_only else AutoModelForImageTextToText
    return kind.from_config(config, dtype=torch.float32, attn_implementation=attention)


def plain_model(config: Any) -> Any:
    """The module of transformers with drawn weights, the same on every rank."""
    model = new_model(config)
    drawn = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            weight.copy_(0.2 * torch.randn(weight.shape, generator=drawn))
            weight += float("norm" in name)
    return model.eval()


@dataclass(frozen=True)
class Lane:
    """A packed lane, or with `batch` that many sequences of one length.

    lengths: of the segments; the last is padding. items: (start, length) in the lane.
    bidirectional_spans: whether attention sees them so.
    ids (T,), positions (3, T), rows (1 + k, n, H): embeddings and levels. at (m,): tokens with a
    loss, in packed order. labels, factors (m,): the loss is the sum of factors times losses.
    """

    lengths: tuple[int, ...]
    items: tuple[tuple[int, int], ...]
    ids: Tensor
    positions: Tensor
    rows: Tensor
    at: Tensor
    labels: Tensor
    factors: Tensor
    batch: int = 1
    bidirectional_spans: bool = False

    @property
    def places(self) -> Tensor:
        """(n,) of the rows in the lane."""
        parts = [torch.arange(start, start + length) for start, length in self.items]
        return torch.cat([torch.zeros(0, dtype=torch.int64), *parts])

    @property
    def segments(self) -> PackedSegments:
        """The metadata of a packed lane for layers."""
        return PackedSegments.from_lengths(
            self.lengths, torch.device("cpu"), items=self.items if self.bidirectional_spans else ()
        )

    @property
    def sequence_first(self) -> Tensor:
        """``at`` as the model takes it: s·B + b."""
        length = len(self.ids) // self.batch
        return self.at % length * self.batch + self.at // length


LAYOUTS = (
    ((11, 7, 10, 4), ((2, 5), (20, 3)), 1),
    ((16, 14, 2), ((18, 6),), 1),
    ((16, 16), ((3, 2), (5, 2)), 2),
)
"""Two packed lanes, then a batch: its items are not seen whole."""


def lane_of(name: str, number: int) -> Lane:
    """A lane, equal on every rank."""
    lengths, items, batch = LAYOUTS[number]
    if name in WITHOUT_ROWS:
        items = ()
    drawn = torch.Generator().manual_seed(30 + number)
    total = sum(lengths)
    ids = torch.randint(0, 96, (total,), generator=drawn)
    # The padding row of Gemma's embedding, in text, and the other rank's row in the same place.
    ids[8], ids[9] = 50, 2
    plain = torch.cat([torch.arange(length) for length in lengths])
    positions = plain.repeat(3, 1)
    if name.startswith("qwen"):
        positions[1] += torch.randint(0, 3, (total,), generator=drawn)
        positions[2] += torch.randint(0, 5, (total,), generator=drawn)
    count = sum(length for _, length in items)
    rows = torch.randn((1 + NUM_LEVELS.get(name, 0), count, 32), generator=drawn)
    last = total if batch > 1 else total - lengths[-1]
    at = torch.randperm(last, generator=drawn)[:13].sort().values
    labels = torch.randint(0, 96, (13,), generator=drawn)
    factors = torch.rand(13, generator=drawn) + 0.5
    return Lane(lengths, items, ids, positions, rows, at, labels, factors, batch, name == "gemma3")


@dataclass(frozen=True)
class Outcome:
    """Losses (m,) of each lane; gradients by transformers' name; gradients of each lane's rows."""

    losses: list[Tensor]
    gradients: dict[str, Tensor]
    rows: list[Tensor]


def plain_outcome(
    name: str, config: Any, lanes: list[Lane], dtype: torch.dtype = torch.float32
) -> Outcome:
    """The outcome of the plain module, one sample at a time."""
    model = plain_model(config).to(dtype)
    text = getattr(model.model, "language_model", model.model)
    losses, of_rows = [], []
    for lane in lanes:
        rows = lane.rows.to(dtype, copy=True).requires_grad_()
        states, start = [], 0
        for length in lane.lengths:
            inside = slice(start, start + length)
            is_inside = (lane.places >= start) & (lane.places < start + length)
            places = lane.places[is_inside] - start
            hidden = text.embed_tokens(lane.ids[None, inside])
            if len(places):
                hidden = hidden.index_put((torch.zeros_like(places), places), rows[0][is_inside])
            options: dict[str, Any] = {}
            if name == "qwen3_vl":
                mask = torch.zeros(1, length, dtype=torch.bool)
                mask[0, places] = True
                options["visual_pos_masks"] = mask
                options["deepstack_visual_embeds"] = list(rows[1:, is_inside])
            if lane.bidirectional_spans and lane.batch == 1:
                options["attention_mask"] = _gemma_masks(text.config, hidden, lane, start)
            positions = lane.positions[:, None, inside]
            out = text(
                inputs_embeds=hidden,
                position_ids=positions if name.endswith("vl") else positions[0],
                use_cache=False,
                **options,
            )
            states.append(out.last_hidden_state[0])
            start += length
        logits = model.lm_head(torch.cat(states)[lane.at])
        loss = nn.functional.cross_entropy(logits, lane.labels, reduction="none")
        (loss * lane.factors).sum().backward()
        losses.append(loss.detach())
        of_rows.append(torch.zeros(0) if rows.grad is None else rows.grad)
    gradients = {
        name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None
    }
    return Outcome(losses, gradients, of_rows)


def _gemma_masks(config: Any, hidden: Tensor, lane: Lane, start: int) -> Any:
    from transformers.models.gemma3.modeling_gemma3 import create_masks_for_vision_model

    length = hidden.shape[1]
    blocks = torch.full((1, length), -1)
    for number, (first, count) in enumerate(lane.items):
        if start <= first < start + length:
            blocks[0, first - start : first - start + count] = number
    return create_masks_for_vision_model(config, hidden, None, None, None, blocks)


def build(config: Any, ctx: FsdpContext, device: str = "cpu", sharded: bool = False) -> Any:
    """A model with the plain module's weights. sharded: by FSDP2, over the data-parallel ranks."""
    model = LanguageModel(config, ctx)
    if sharded:
        shard(model, ctx)
    weights = {key: weight.detach() for key, weight in plain_model(config).named_parameters()}
    load(model, ctx, torch.device(device), Asked(weights))
    return model.train()


def run_lane(model: Any, lane: Lane, **changes: Callable[[Any], Any]) -> tuple[Tensor, Tensor]:
    """One microbatch forward and backward -> losses (m,), and gradients (1 + k, n, H) of the rows,
    whole on every rank of tp. changes: of the model's arguments.
    """
    rows, mine, inputs = inputs_of(model, lane)
    inputs |= {key: change(inputs[key]) for key, change in changes.items()}
    losses = model(**inputs)
    (losses * lane.factors).sum().backward()
    assert (rows.grad is None) == (not lane.items), "rows are in the graph, none of them too"
    gradient = torch.zeros_like(lane.rows)
    if rows.grad is not None:
        gradient[:, mine] = rows.grad
    if cuts_rows(model):
        dist.all_reduce(gradient, group=model.border.tp.get_group())
    return losses.detach(), gradient


def cuts_rows(model: Any) -> bool:
    """Whether a rank of tp has only the rows of its part of the sequence."""
    is_sequence_parallel = model.border is not None and model.border.sequence_parallel
    return is_sequence_parallel and model.ctx.scatter_embedding


def inputs_of(model: Any, lane: Lane) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """This rank's rows (1 + k, n', H) of a lane, which of the n they are, and all arguments."""
    border, length = model.border, len(lane.ids) // lane.batch
    places, mine = lane.places, torch.ones(len(lane.places), dtype=torch.bool)
    if cuts_rows(model):
        part = length // border.tp.size()
        token, sequence = places % length, places // length
        token = token - border.tp.get_local_rank() * part
        mine = (token >= 0) & (token < part)
        places = (sequence * part + token)[mine]
    rows = lane.rows[:, mine].requires_grad_()

    def place(text: Tensor, queries: object) -> Tensor:
        return insert_embeddings(text, rows[0], places)

    return (
        rows,
        mine,
        {
            "input_ids": lane.ids.view(lane.batch, length),
            "place": place if lane.items else None,
            "levels": (rows[1:], places) if len(rows) > 1 else None,
            "labels": lane.labels,
            "loss_at": lane.sequence_first,
            "packed_seq_params": lane.segments if lane.batch == 1 else None,
            "position_ids": lane.positions.view(3, lane.batch, length),
        },
    )


def gradients(model: LanguageModel) -> dict[str, Tensor]:
    """Whole gradients by transformers' name."""
    whole = {}
    for name, param in model.named_parameters():
        gradient = param.grad
        assert gradient is not None, name
        is_sharded = isinstance(gradient, DTensor)
        whole[model.hf_names[name]] = gradient.full_tensor() if is_sharded else gradient.clone()
    return whole


def errors(got: Mapping[str, Tensor], want: Mapping[str, Tensor]) -> dict[str, float]:
    """By gradient: max|Δ| / max(max|ref|, 1e-6 · global norm)."""
    assert set(got) == set(want), set(got) ^ set(want)
    norm = torch.stack([ref.double().norm() for ref in want.values()]).norm()
    return {
        name: float((got[name] - ref).abs().max() / max(ref.abs().max(), 1e-6 * norm))
        for name, ref in want.items()
    }


def error(got: Tensor, want: Tensor) -> float:
    """The error of losses or of rows' gradients."""
    return float((got - want).abs().max() / want.abs().max()) if want.numel() else 0.0
