"""Tensor and sequence parallelism of transformers' language models, and low-rank adapters.

Hidden states between layers are whole on every rank of tp or, with sequence parallelism, sharded
along the sequence (Shoeybi et al. 2019; Korthikanti et al. 2022). A parameter that every rank has,
but that sees only its tokens or heads, is a replicated DTensor: FSDP2 sums its gradients over tp.

Letters: B sequences of S tokens, S' of them on this rank, H hidden, V vocabulary, I inputs and
O outputs of a linear, R rank of an adapter.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.functional import linear

from mimo.engines.fsdp.context import FsdpContext, Wrapper

_SEQUENCE, _HEADS = 1, 2  # dimensions


@dataclass(frozen=True)
class Plan:
    """The modules of a decoder layer that are parallelized, by name.

    norms: of hidden states. columns: linears with sharded outputs. rows: linears with sharded
    inputs. per_head: norms of queries and keys, which see only the rank's heads.
    """

    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    columns: tuple[str, ...] = (
        *("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        *("mlp.gate_proj", "mlp.up_proj"),
    )
    rows: tuple[str, ...] = ("self_attn.o_proj", "mlp.down_proj")
    per_head: tuple[str, ...] = ()

    def styles(self, outside: Placement) -> dict[str, ParallelStyle]:
        """The style of each module. outside: the placement of hidden states between layers."""
        whole = Replicate()
        styles: dict[str, ParallelStyle] = {
            "self_attn": PrepareModuleInput(
                input_kwarg_layouts={"hidden_states": outside},
                desired_input_kwarg_layouts={"hidden_states": whole},
            ),
            "mlp": PrepareModuleInput(input_layouts=outside, desired_input_layouts=whole),
        }
        styles |= {name: ColwiseParallel() for name in self.columns}
        styles |= {name: RowwiseParallel(output_layouts=outside) for name in self.rows}
        styles |= {name: head_norm() for name in self.per_head}
        if outside != whole:
            styles |= {name: SequenceParallel(use_local_output=True) for name in self.norms}
        return styles


def head_norm() -> ParallelStyle:
    """Return the style of a norm that sees (B, S, heads, D) of this rank's heads.

    To the norm, heads are what tokens are to `SequenceParallel`: only the gradient needs a sum.
    """
    return SequenceParallel(sequence_dim=_HEADS, use_local_output=True)


_LLAMA = Plan()
_QWEN3 = replace(_LLAMA, per_head=("self_attn.q_norm", "self_attn.k_norm"))
_SANDWICH = (*_LLAMA.norms, "pre_feedforward_layernorm", "post_feedforward_layernorm")
PLANS = {
    "llama": _LLAMA,
    "qwen2": _LLAMA,
    "qwen2_5_vl_text": _LLAMA,
    "qwen3": _QWEN3,
    "qwen3_vl_text": _QWEN3,
    "gemma3_text": replace(_QWEN3, norms=_SANDWICH),
}
"""By `model_type` of the text part's configuration."""


def tp_problems(config: Any, tp: int) -> Iterator[str]:
    """Yield why ``tp`` tensor-parallel ranks cannot share the model."""
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


@dataclass(frozen=True)
class Border:
    """The border between hidden states of layers (B, S', H) and embedding or head.

    Every rank of tp calls `enter` and `leave`, and takes part in their backward.
    """

    tp: DeviceMesh
    sequence_parallel: bool

    @property
    def outside(self) -> Placement:
        """The placement of hidden states between layers."""
        return Shard(_SEQUENCE) if self.sequence_parallel else Replicate()

    def enter(self, hidden: Tensor) -> Tensor:
        """(B, S', H) -> (B, S, H), equal on all ranks; all-gathered if it was sharded.

        The ranks' gradients are shares: they are summed, and scattered if the input was sharded.
        """
        outside = DTensor.from_local(hidden, self.tp, [self.outside], run_check=False)
        return local_share(outside.redistribute(placements=[Replicate()]))

    def leave(self, share: Tensor) -> Tensor:
        """This rank's share (B, S, H) of a sum -> the sum (B, S', H), whose gradient is whole."""
        shares = DTensor.from_local(share, self.tp, [Partial()], run_check=False)
        return shares.redistribute(placements=[self.outside]).to_local()


def local_share(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor; ranks with the same part give shares of its gradient."""
    if not isinstance(tensor, DTensor):
        return tensor
    gradients = [Partial() if place.is_replicate() else place for place in tensor.placements]
    return tensor.to_local(grad_placements=gradients)


class VocabularyParallel(ParallelStyle):
    """Shard the rows of an embedding; each rank embeds its ids and gives zeros for other ids.

    Torch's `RowwiseParallel` computes the gradient of all V rows on every rank, and takes
    `padding_idx` for a row of each rank.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, nn.Embedding)
        distribute(module, device_mesh, Shard(0))
        module.forward = partial(_embed, module, device_mesh)  # type: ignore[assignment]
        if (padding := module.padding_idx) is not None:
            rows = local_share(module.weight).shape[0]
            is_here = padding // rows == device_mesh.get_local_rank()
            module.padding_idx = padding % rows if is_here else None
        return module


def distribute(module: nn.Module, tp: DeviceMesh, place: Placement) -> None:
    """Turn a module's own parameters, equal on all ranks, into DTensors. No communication."""
    for name, param in list(module.named_parameters(recurse=False)):
        part = distribute_tensor(param.detach(), tp, [place], src_data_rank=None)
        module.register_parameter(name, nn.Parameter(part, requires_grad=param.requires_grad))


def with_local_parameters(module: nn.Module, forward: Callable[..., Any], *args: Any) -> Any:
    """Return ``forward(*args)``, run while each parameter is replaced by its `local_share`."""
    parameters = cast("dict[str, Any]", module._parameters)
    originals = dict(parameters)
    parameters.update({k: p if p is None else local_share(p) for k, p in originals.items()})
    try:
        return forward(*args)
    finally:
        parameters.update(originals)


def _embed(embedding: nn.Embedding, tp: DeviceMesh, ids: Tensor) -> Tensor:
    """ids (B, S), equal on all ranks -> embeddings (B, S, H), zeros for ids of other ranks' rows.

    Calls the class's forward, which may scale its output, with this rank's rows as the weight.
    """
    rows = local_share(embedding.weight).shape[0]
    local_ids = ids - tp.get_local_rank() * rows
    is_here = (local_ids >= 0) & (local_ids < rows)
    forward = partial(type(embedding).forward, embedding)
    embeddings = with_local_parameters(embedding, forward, local_ids.where(is_here, 0))
    return embeddings.masked_fill(~is_here[..., None], 0)


class Head(nn.Module):
    """A head whose caller computes with its weight (V, H), while FSDP2 has it gathered."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = linear.weight

    def forward(self, hidden: Tensor, compute: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """Return ``compute(hidden, weight)`` with this rank's rows of the weight (V/tp, H)."""
        return compute(hidden, local_share(self.weight))


def parallelize(text: Any, head: Head | None, border: Border) -> None:
    """Parallelize a text model without `tp_problems`, in place; no communication."""
    plan = PLANS[text.config.model_type]
    for layer in text.layers:
        styles = plan.styles(border.outside)
        parallelize_module(layer, border.tp, styles, src_data_rank=None)
    ends: dict[str, ParallelStyle] = {"embed_tokens": VocabularyParallel()}
    if border.sequence_parallel:
        ends["norm"] = SequenceParallel(use_local_output=True)
    parallelize_module(text, border.tp, ends, src_data_rank=None)
    if head is not None:
        distribute(head, border.tp, Shard(0))


# ---- low-rank adapters, as those of `mimo.engines.megatron.lora`


def adapt(wrapper: Wrapper, ctx: FsdpContext) -> None:
    """Give linears of a wrapper on meta adapters, in place and sharded over tp as they are.

    Linears of a group, such as queries, keys and values, share one `lora_a`, named after the first.
    """
    if ctx.adapters is None:
        return
    names = {hf_name: name for name, hf_name in wrapper.hf_names.items()}
    for group in ctx.adapters.groups:
        lora_a = None
        for linear_name in group:
            name = names[f"{linear_name}.weight"].removesuffix(".weight")
            module = wrapper.get_submodule(name)
            assert isinstance(module, nn.Linear), f"{linear_name} is a {type(module)}"
            if lora_a is None:
                lora_a = _adapter_matrix(module, 1, ctx.adapters.rank)
            module.lora_a, module.lora_b = lora_a, _adapter_matrix(module, 0, ctx.adapters.rank)
            # Before all other hooks: parallel styles then shard or sum the adapter's output too.
            module.register_forward_hook(partial(_add_update, ctx.adapters.scale), prepend=True)
            # A shared matrix is named by the linear that the wrapper has first.
            wrapper.hf_names |= {
                f"{name}.lora_a": f"{group[0]}.lora_a",
                f"{name}.lora_b": f"{linear_name}.lora_b",
            }


def _adapter_matrix(module: nn.Linear, dim: int, rank: int) -> nn.Parameter:
    """Return `lora_b` (O, R) for dim 0 or `lora_a` (R, I) for dim 1, sharded as the weight is."""
    weight = module.weight
    size = weight.shape[dim]
    shape = (size, rank) if dim == 0 else (rank, size)
    matrix = torch.empty(shape, dtype=weight.dtype, device="meta")
    if isinstance(weight, DTensor):
        (place,) = weight.placements
        places = [place if place == Shard(dim) else Replicate()]
        matrix = distribute_tensor(matrix, weight.device_mesh, places, src_data_rank=None)
    return nn.Parameter(matrix)


def _add_update(scale: float, module: nn.Linear, args: tuple[Tensor], output: Tensor) -> Tensor:
    """A forward hook: output (..., O) plus the adapter's update, with the output's placement.

    A linear with sharded inputs has partial outputs, and so has its adapter: no communication is
    added. Of whatever every rank has, each rank gives a share of the gradient.
    """
    inputs, lora_a, lora_b = map(local_share, (args[0], module.lora_a, module.lora_b))  # type: ignore[arg-type]
    update = linear(scale * linear(inputs, lora_a), lora_b)
    if isinstance(output, DTensor):
        update = DTensor.from_local(update, output.device_mesh, output.placements, run_check=False)
    return output + update
