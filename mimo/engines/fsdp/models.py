"""Models of transformers: how the engine builds and checks them, and their attention.

Attention by our kernels is registered with transformers under `NAME` and `TOWER_NAME`. No function
for masks is, so transformers builds no masks. Segments of a packed sequence never see each other.

Letters: B sequences (1 for packed) of S tokens (T packed), N heads, G key/value heads, D head size.
"""

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PretrainedConfig,
)
from transformers.initialization import no_init_weights

from mimo.ops.acceleration import AttentionCase, best_kernel, this_machine
from mimo.ops.attention_plan import LayerForm, batch_plan
from mimo.ops.segments import PackedSegments

NAME = "mimo_segments"
"""The `attn_implementation` of language models."""
TOWER_NAME = "mimo_flash_segments"
"""The one of towers: with "flash" in the name, transformers makes one call for all segments."""

# Arguments of transformers' attention functions that no kernel of ours computes.
_REFUSED = {
    "softcap": "a soft cap on attention scores",
    "s_aux": "attention sinks",
    "position_bias": "a position bias",
    "dropout": "attention dropout",
}


class Segments:
    """The segments that a forward attends over; the layers pass it on by keyword.

    packings: one in a language model, none for a batch, whose sequences are segments of one length.
    recompute: whether the backward recomputes core attention.
    Not a dataclass, because FSDP2 copies a layer's dataclass arguments without the plans in them.
    """

    def __init__(self, packings: Iterable[PackedSegments], recompute: bool) -> None:
        self.packings, self.recompute = tuple(packings), recompute

    def packing(self, bounds: Tensor | None) -> PackedSegments | None:
        """Return the packing with these bounds, without bounds the only one; None for a batch."""
        matching = (p for p in self.packings if bounds is None or p.cu_seqlens_q is bounds)
        return next(matching, None)


def layer_form(
    head_size: int, dtype: torch.dtype, causal: bool = True, window: int | None = None
) -> LayerForm:
    """Return how layers attend in ``dtype``. window: keys that a query sees, itself included."""
    case = AttentionCase(head_size, causal, window=window)
    return LayerForm(best_kernel(case, dtype, this_machine()), causal, window)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    segments: Segments,
    scaling: float | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """query (B, N, S, D), key and value (B, G, S, D) of this rank's heads -> (B, S, N, D).

    cu_seq_lens_q: bounds of segments from a tower's layer, whose tokens see their whole segment.
    Raises ValueError for what no kernel computes, such as a soft cap.
    """
    for name, what in _REFUSED.items():
        if others.get(name):
            raise ValueError(f"engine = fsdp: no kernel has {what} ({others[name]})")
    assert attention_mask is None, "segments say what a query sees"
    batch, _, length, head_size = query.shape
    form = layer_form(head_size, query.dtype, cu_seq_lens_q is None, sliding_window)
    packed = segments.packing(cu_seq_lens_q)
    plan = batch_plan(form, length, batch, query.device) if packed is None else packed.plan(form)
    scale = head_size**-0.5 if scaling is None else scaling
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    if segments.recompute:
        out = checkpoint(form.attend, q, k, v, plan, scale, use_reentrant=False)
    else:
        out = form.attend(q, k, v, plan, scale)
    return out.unflatten(0, (batch, length)), None


AttentionInterface.register(TOWER_NAME, attend)
AttentionInterface.register(NAME, attend)


_SLIDING = "sliding_attention"
KINDS = ("full_attention", _SLIDING)
"""Kinds of layers that keep segments apart, as transformers names them."""


def layer_kinds(config: Any) -> tuple[str, ...]:
    """Return the kinds of layers of a text model of transformers, each once."""
    default = _SLIDING if getattr(config, "sliding_window", None) else KINDS[0]
    return tuple(dict.fromkeys(getattr(config, "layer_types", None) or [default]))


def windows(config: Any) -> list[int | None]:
    """Return for each kind of layer the keys that a query sees; None for all."""
    return [config.sliding_window if kind == _SLIDING else None for kind in layer_kinds(config)]


def language_forms(config: Any, dtype: torch.dtype) -> frozenset[LayerForm]:
    """Return the attention forms of the layers of a text model of transformers."""
    heads = config.num_attention_heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
    return frozenset(layer_form(head_size, dtype, window=window) for window in windows(config))


def dense_masks(packed: PackedSegments, config: Any, device: torch.device) -> Any:
    """Return the `attention_mask` that gives transformers' own attention the same segments.

    (1, 1, T, T) bool; a dict by kind of layer if there are several. Source: transformers
    `create_masks_for_vision_model`, sliding AND (causal OR same item).
    """
    total = sum(packed.lengths)
    place = torch.arange(total, device=device)
    lengths = torch.tensor(packed.lengths, device=device)
    segment = torch.arange(len(lengths), device=device).repeat_interleave(lengths)
    item = torch.full_like(place, -1)
    for number, (start, length) in enumerate(packed.items):
        item[start : start + length] = number
    behind = place[:, None] - place
    seen = (behind >= 0) | ((item[:, None] == item) & (item >= 0))
    seen = (seen & (segment[:, None] == segment))[None, None]
    masks = [seen if window is None else seen & (behind < window) for window in windows(config)]
    return dict(zip(layer_kinds(config), masks, strict=True)) if len(masks) > 1 else masks[0]


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    register = nn.Module.register_parameter

    def move_to_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            param = nn.Parameter(param.to("meta"), param.requires_grad)
        register(module, name, param)

    nn.Module.register_parameter = move_to_meta  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def build_on_meta(kind: Any, config: PretrainedConfig, dtype: torch.dtype, **options: Any) -> Any:
    """Build the whole model of a configuration with parameters on meta, in ``dtype``.

    Buffers, such as rotary frequencies, have their values, in at least fp32. The configuration is
    not changed. kind: a class of transformers with `from_config`, which gets ``options``.
    """
    wide = dtype if dtype == torch.float64 else torch.float32
    options = {"dtype": wide, "trust_remote_code": False, **options}

    def build() -> Any:
        whole = kind.from_config(copy.deepcopy(config), **options)
        whole.tie_weights()
        return whole

    return module_on_meta(build, dtype)


def module_on_meta(build: Callable[[], nn.Module], dtype: torch.dtype) -> nn.Module:
    """Build a module with parameters on meta, in ``dtype``, and buffers with their values."""
    with no_init_weights(), _parameters_on_meta(), torch.random.fork_rng(devices=()):
        module = build()
    for parameter in module.parameters():
        parameter.data = parameter.data.to(dtype)
    return module


def on_meta(config: PretrainedConfig, attention: str, dtype: torch.dtype) -> Any:
    """Build a model for text, or for images and text, by `build_on_meta`."""
    text_only = config.get_text_config() is config
    kind = AutoModelForCausalLM if text_only else AutoModelForImageTextToText
    return build_on_meta(kind, config, dtype, attn_implementation=attention)


def model_problems(config: Any) -> Iterator[str]:
    """Yield what a model has that no kernel computes."""
    text = config.get_text_config()
    for key, what in (
        ("attn_logit_softcapping", "a soft cap on attention scores"),
        ("final_logit_softcapping", "a soft cap on logits"),
        ("logits_scaling", "a scale of logits"),
        ("logit_scale", "a scale of logits"),
        ("attention_dropout", "attention dropout"),
        ("use_bidirectional_attention", "attention to later text"),
    ):
        value = getattr(text, key, None)
        if value and not (key.startswith("logit") and value == 1):
            yield f"the model has {what} ({key} = {value}), which no kernel computes"
    if others := sorted(set(layer_kinds(text)) - set(KINDS)):
        yield (
            f"the model has layers of {', '.join(others)}, which do not keep packed segments "
            f"apart; only those of {' and '.join(KINDS)} do"
        )


def structure_problems(whole: Any) -> Iterator[str]:
    """Yield what the engine needs and a causal language model, perhaps on meta, lacks.

    Layers must attend through transformers' registry alone, so that segments stay separate.
    """
    text, head = getattr(whole, "model", None), getattr(whole, "lm_head", None)
    parts = ("embed_tokens", "layers", "norm", "rotary_emb")
    missing = [f"model.{part}" for part in parts if not hasattr(text, part)]
    if missing:
        yield f"engine: fsdp asks for {', '.join(missing)} in the model, which it does not have"
        return
    if not all(hasattr(layer, "self_attn") for layer in cast("Any", text).layers):
        yield "engine: fsdp asks for layers with attention (self_attn), which not all layers have"
    if not whole._supports_attention_backend:
        yield "engine: fsdp asks for attention by transformers' registry, which it does not use"
    if type(head) is not nn.Linear or head.bias is not None:
        yield "engine: fsdp asks for a head that is a matrix (lm_head), which this head is not"
