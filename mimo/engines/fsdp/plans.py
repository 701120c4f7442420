"""Tensor and sequence parallelism of transformers' language models, by module names.

Weights are DTensors, cut over tp; layers compute on local tensors. Hidden states between layers are
whole on every rank or, with sequence parallelism, cut along the sequence in equal parts. They enter
what is cut over tp after a norm, and leave it as the sum of the ranks' shares (Shoeybi et al. 2019;
with sequence parallelism Korthikanti et al. 2022). A parameter that is not cut is a plain tensor;
if it sees only this rank's heads or tokens, its gradient has to be summed over tp.

Letters: B sequences of S tokens, S' of them on this rank, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from mimo.engines.fsdp.attention import KINDS, kinds

_SEQUENCE = 1  # dimension


@dataclass(frozen=True)
class Plan:
    """How a decoder layer is cut; names of modules in it.

    norms: after them, hidden states enter what is cut. columns: linears cut by outputs; from one of
    them each rank has its heads, or its part of the MLP. rows: cut by inputs. per_head: norms of
    queries and keys, which see this rank's heads.
    """

    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    columns: tuple[str, ...] = (
        *("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        *("mlp.gate_proj", "mlp.up_proj"),
    )
    rows: tuple[str, ...] = ("self_attn.o_proj", "mlp.down_proj")
    per_head: tuple[str, ...] = ()


_LLAMA = Plan()
_QWEN3 = replace(_LLAMA, per_head=("self_attn.q_norm", "self_attn.k_norm"))
PLANS = {
    "llama": _LLAMA,
    "qwen2": _LLAMA,
    "qwen2_5_vl_text": _LLAMA,
    "qwen3": _QWEN3,
    "qwen3_vl_text": _QWEN3,
    "gemma3_text": replace(_QWEN3, norms=("input_layernorm", "pre_feedforward_layernorm")),
}
"""By `model_type` of the text part's configuration."""


def tp_problems(config: Any, tp: int) -> Iterator[str]:
    """Why so many tensor-parallel ranks cannot share the model."""
    text = config.get_text_config()
    if tp > 1 and text.model_type not in PLANS:
        yield (
            f"got {tp}, but there is no table for model_type {text.model_type!r}, only for "
            f"{', '.join(PLANS)}; use dp alone, or add one to mimo/engines/fsdp/plans.py"
        )
    for key in ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size"):
        size = getattr(text, key, None)
        if isinstance(size, int) and size % tp:
            yield f"got {tp}, which does not divide {key} = {size} of the model; change tp"


def model_problems(config: Any) -> Iterator[str]:
    """What of the model no kernel computes."""
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
    if others := sorted(set(kinds(text)) - set(KINDS)):
        yield (
            f"the model has layers of {', '.join(others)}, which do not keep packed segments "
            f"apart; only those of {' and '.join(KINDS)} do"
        )


def structure_problems(whole: Any) -> Iterator[str]:
    """Why a causal language model of transformers cannot run for how it is built; may be on meta.

    Its layers attend through transformers' registry alone, so that segments stay apart.
    """
    text, head = getattr(whole, "model", None), getattr(whole, "lm_head", None)
    parts = ("embed_tokens", "layers", "norm", "rotary_emb")
    missing = [f"model.{part}" for part in parts if not hasattr(text, part)]
    if missing:
        yield f"engine: fsdp asks for {', '.join(missing)} in the model, which it does not have"
        return
    if not all(hasattr(layer, "self_attn") for layer in cast("Any", text).layers):
        yield "engine: fsdp asks for layers that attend (self_attn), and not all of its do"
    if not whole._supports_attention_backend:
        yield "engine: fsdp asks for attention by transformers' registry, which it does not use"
    if type(head) is not nn.Linear or head.bias is not None:
        yield "engine: fsdp asks for a head that is a matrix (lm_head), which its is not"


@dataclass(frozen=True)
class Border:
    """Between hidden states of layers (B, S', H) and what is cut over tp.

    Every rank of tp calls `enter` and `leave` alike, and takes part in their backward.
    """

    tp: DeviceMesh
    sequence_parallel: bool

    @property
    def _outside(self) -> Shard | Replicate:
        return Shard(_SEQUENCE) if self.sequence_parallel else Replicate()

    def enter(self, hidden: Tensor) -> Tensor:
        """(B, S', H) -> (B, S, H), equal on all ranks; all-gathered if it was cut.

        The gradient is a share on each rank: it is summed, and cut if the input was.
        """
        outside = DTensor.from_local(hidden, self.tp, [self._outside], run_check=False)
        return outside.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])

    def leave(self, share: Tensor) -> Tensor:
        """This rank's share (B, S, H) of a sum -> the sum (B, S', H); its gradient is whole."""
        shares = DTensor.from_local(share, self.tp, [Partial()], run_check=False)
        return shares.redistribute(placements=[self._outside]).to_local()


class ColumnLinear(nn.Linear):
    """Each rank has some of the outputs; all inputs on every rank."""

    @classmethod
    def adopt(cls, linear: nn.Linear, tp: DeviceMesh) -> None:
        """Cut a linear and make it one of these."""
        assert type(linear) is nn.Linear, f"a linear of {type(linear)}"
        linear.__class__ = cls
        cut(linear, "weight", tp, 0)
        if linear.bias is not None:
            cut(linear, "bias", tp, 0)

    def forward(self, input: Tensor) -> Tensor:
        """(..., inputs) -> (..., outputs/tp). No communication."""
        bias = None if self.bias is None else local(self.bias)
        return nn.functional.linear(input, local(self.weight), bias)


class RowLinear(nn.Linear):
    """Each rank has some of the inputs; their shares of the outputs are summed."""

    border: Border

    @classmethod
    def adopt(cls, linear: nn.Linear, border: Border) -> None:
        """Cut a linear and make it one of these. Its bias is not cut."""
        assert type(linear) is nn.Linear, f"a linear of {type(linear)}"
        row = cast("RowLinear", linear)
        row.__class__, row.border = cls, border
        cut(row, "weight", border.tp, 1)

    def forward(self, input: Tensor) -> Tensor:
        """(B, S, inputs/tp) -> (B, S', outputs), as `Border.leave`."""
        output = self.border.leave(nn.functional.linear(input, local(self.weight)))
        return output if self.bias is None else output + self.bias


def cut(module: nn.Module, name: str, tp: DeviceMesh, dim: int) -> None:
    """Make a parameter of a module a DTensor that is cut over tp. No communication."""
    whole = module.get_parameter(name)
    own = distribute_tensor(whole.detach(), tp, [Shard(dim)], src_data_rank=None)
    module.register_parameter(name, nn.Parameter(own, requires_grad=whole.requires_grad))


def local(parameter: Tensor) -> Tensor:
    """This rank's part of a parameter that may be cut over tp."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _embed(embedding: nn.Embedding, tp: DeviceMesh, ids: Tensor) -> Tensor:
    """ids (B, S), equal on all ranks -> embeddings (B, S, H), zeros for ids of other ranks' rows.

    The module's own forward runs on this rank's rows, with its scale if it has one; its hooks,
    FSDP2's among them, are around all this.
    """
    whole = embedding.weight
    weight = local(whole)
    own = ids - tp.get_local_rank() * weight.shape[0]
    here = (own >= 0) & (own < weight.shape[0])
    parameters = cast("dict[str, Any]", embedding._parameters)
    parameters["weight"] = weight
    try:
        found = type(embedding).forward(embedding, own.where(here, 0))
    finally:
        parameters["weight"] = whole
    return found.masked_fill(~here[..., None], 0)


class Head(nn.Linear):
    """A head whose weight is used by whoever calls it, so that FSDP2 gathers it for that long."""

    @classmethod
    def adopt(cls, linear: nn.Linear) -> Head:
        """Make a linear one of these."""
        assert type(linear) is nn.Linear, f"a linear of {type(linear)}"
        linear.__class__ = cls
        return cast("Head", linear)

    def forward(self, hidden: Tensor, compute: Callable[[Tensor, Tensor], Tensor]) -> Tensor:  # type: ignore[override]
        """``compute(hidden, weight)``, with this rank's rows of the weight (V/tp, H)."""
        return compute(hidden, local(self.weight))


def parallelize(text: Any, head: nn.Linear | None, border: Border) -> None:
    """Cut a text model of transformers and its head, in place; a tied head is None.

    On a device or on meta; `tp_problems` are none.
    """
    tp = border.tp
    plan = PLANS[text.config.model_type]
    for layer in text.layers:
        for name in plan.norms:
            layer.get_submodule(name).register_forward_hook(partial(_enter, border))
        for name in plan.columns:
            ColumnLinear.adopt(layer.get_submodule(name), tp)
        for name in plan.rows:
            RowLinear.adopt(layer.get_submodule(name), border)
    cut(text.embed_tokens, "weight", tp, 0)
    text.embed_tokens.forward = partial(_embed, text.embed_tokens, tp)
    padding = text.embed_tokens.padding_idx
    if padding is not None:
        # The row that gets no gradient is one rank's, under another number.
        rows = text.config.vocab_size // tp.size()
        mine = padding // rows == tp.get_local_rank()
        text.embed_tokens.padding_idx = padding % rows if mine else None
    if head is not None:
        cut(head, "weight", tp, 0)


def _enter(border: Border, norm: nn.Module, args: object, output: Tensor) -> Tensor:
    return border.enter(output)


def seeing_slices(text: Any, border: Border) -> Iterator[str]:
    """Names of parameters that are whole on every rank, but see its heads or tokens only."""
    per_head = PLANS[text.config.model_type].per_head
    for name, parameter in text.named_parameters():
        owner = name.rpartition(".")[0]
        if isinstance(parameter, DTensor):
            continue
        if border.sequence_parallel or owner.endswith(per_head):
            yield name
