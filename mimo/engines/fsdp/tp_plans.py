"""Tensor parallelism of any language model of transformers, by the plan that its class carries.

A plan names a style for each module; `_STYLES` is its DTensor style. Hidden states between layers
and logits are whole plain tensors on every rank of tp. Every rank computes the same loss from them,
unscaled, and gets whole gradients of its parameters. Modules without a style are replicated.
"""

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from transformers import PretrainedConfig, PreTrainedModel
from transformers.distributed.parallel_utils import replace_layer_number_by_wildcard as pattern_of

from mimo.engines.fsdp.models import on_meta
from mimo.engines.fsdp.plans import (
    PLANS,
    Border,
    VocabularyParallel,
    distribute,
    with_local_parameters,
)


class _WholeEmbedding(VocabularyParallel):
    """`VocabularyParallel` whose output is summed over the ranks."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        border = Border(device_mesh, sequence_parallel=False)
        module.register_forward_hook(lambda *call: border.leave(call[-1]))  # its output
        return super()._apply(module, device_mesh)


class _LocalParameters(ParallelStyle):
    """Run a module on its local parameters. Gradients of replicated ones are summed over ranks.

    A norm of queries or keys is replicated, but sees only this rank's heads.
    """

    place: Placement = Replicate()

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        distribute(module, device_mesh, self.place)
        module.forward = partial(with_local_parameters, module, module.forward)
        return module


class _WholeExperts(_LocalParameters):
    """Give each rank some of the experts and sum their outputs.

    Transformers' plan cuts every expert instead, along dimensions that loading does not know.
    """

    place = Shard(0)

    def _apply(self, module: Any, device_mesh: DeviceMesh) -> nn.Module:
        super()._apply(module, device_mesh)
        module.num_experts //= device_mesh.size()
        module._is_expert_parallel = True  # its kernels then skip the expert `num_experts`
        module.forward = partial(_run_experts, module, module.forward, device_mesh)
        return module


def _run_experts(
    module: Any, forward: Any, tp: DeviceMesh, hidden: Tensor, experts: Tensor, weights: Tensor
) -> Tensor:
    """Return (T, H). hidden (T, H), experts and weights (T, k): of T tokens, equal on all ranks."""
    border = Border(tp, sequence_parallel=False)
    hidden, weights = border.enter(hidden), border.enter(weights)
    local = experts - tp.get_local_rank() * module.num_experts
    is_here = (local >= 0) & (local < module.num_experts)
    share = forward(hidden, local.where(is_here, module.num_experts), weights * is_here)
    # Every rank takes part in the backward, also one whose experts get no token.
    return border.leave(share + 0 * (hidden.sum() + weights.sum()).to(share.dtype))


_EXPERTS, _SHARED_NORM = "moe_tp_experts", "replicated_with_grad_allreduce"
_COLUMNS, _ROWS = ("colwise", "colwise_gather_output"), ("rowwise", "rowwise_split_input")
_STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    "rowwise": RowwiseParallel,
    "rowwise_split_input": lambda: RowwiseParallel(input_layouts=Replicate()),
    "embedding_rowwise": _WholeEmbedding,
    _SHARED_NORM: _LocalParameters,
    _EXPERTS: _WholeExperts,
}
_HEADS = ("num_attention_heads", "num_key_value_heads", "num_global_key_value_heads")


def _planned(whole: PreTrainedModel) -> dict[str, str]:
    """Return the styles of the language half's modules and parameters, by name."""
    plan, decoder, head = dict(whole.tp_plan), whole.get_decoder(), whole.get_output_embeddings()
    names: dict[Any, str] = {module: name for name, module in whole.named_modules()}
    table = PLANS.get(decoder.config.model_type)
    if not decoder.tp_plan and table is not None:
        by_table = dict.fromkeys(table.columns, "colwise") | dict.fromkeys(table.rows, "rowwise")
        by_table |= dict.fromkeys(table.per_head, _SHARED_NORM)
        plan |= {f"{names[decoder]}.layers.*.{name}": style for name, style in by_table.items()}
        plan[f"{names[decoder]}.embed_tokens"] = "embedding_rowwise"
    styles = {}
    for name in (*names.values(), *(name for name, _ in whole.named_parameters())):
        style = plan.get(pattern_of(name), "replicate")
        is_inside = name.startswith(f"{names[decoder]}.") or name == names.get(head)
        if is_inside and style != "replicate":
            styles[name] = style
    # A tied head must be split as its embedding. Per-layer inputs index the embedding's weight.
    embedding = whole.get_input_embeddings()
    ends = names[embedding], names.get(head, "")
    is_tied = head is not None and head.weight is embedding.weight
    is_split = [styles.get(end) for end in ends] == ["embedding_rowwise", "colwise_gather_output"]
    if getattr(decoder.config, "hidden_size_per_layer_input", 0) or (is_tied and not is_split):
        styles = {name: style for name, style in styles.items() if name not in ends}
    # A plan may leave out modules beside the heads that it splits: norms of one head, or others.
    for module, name in names.items():
        if styles.get(f"{name}.q_proj") == "colwise":
            for key, parameter in module.named_parameters():
                is_norm = parameter.shape == (getattr(module, "head_dim", 0),)
                left_out = _SHARED_NORM if is_norm else "left out"
                styles.setdefault(f"{name}.{key.partition('.')[0]}", left_out)
    # The parameters of experts go with their module.
    return {k: v for k, v in styles.items() if styles.get(k.rpartition(".")[0]) != _EXPERTS}


def apply_plan(whole: PreTrainedModel, tp: DeviceMesh) -> None:
    """Parallelize the language half of a model without `plan_problems`, in place.

    Call it before FSDP2. Parameters are on meta or equal on all ranks. No communication.
    """
    modules = dict(whole.named_modules())
    embedding, head = whole.get_input_embeddings(), whole.get_output_embeddings()
    tied = head if head is not None and head.weight is embedding.weight else None
    for name, style in _planned(whole).items():
        parallelize_module(modules[name], tp, _STYLES[style](), src_data_rank=None)
    if tied is not None:
        tied.weight = embedding.weight


def plan_problems(config: PretrainedConfig, tp: int) -> Iterator[str]:
    """Yield why ``tp`` tensor-parallel ranks cannot share the language half of a model."""
    if tp == 1:
        return
    whole = on_meta(config, "eager", torch.float32)
    modules, planned = dict(whole.named_modules()), _planned(whole)
    text = whole.get_decoder().config
    problems: dict[str, None] = {}  # each once for all layers
    if not any(".layers." in name for name in planned):
        problems[f"transformers has no plan for {text.model_type!r}; use dp alone"] = None
    for name, style in planned.items():
        for problem in _module_problems(modules.get(name), style, tp):
            problems[f"{pattern_of(name)} ({style!r} in transformers' plan) {problem}"] = None
    if any("attn" in name and style == "colwise" for name, style in planned.items()):
        sizes = {key: getattr(text, key, None) for key in _HEADS}
        problems |= {f"{k} is {n}; change tp": None for k, n in sizes.items() if n and n % tp}
    yield from (f"got {tp}, but {problem}" for problem in problems)


def _module_problems(module: Any, style: str, tp: int) -> Iterator[str]:
    """Yield why a module (None for a parameter) cannot have a style, to follow its name."""
    if style not in _STYLES or module is None:
        yield "has no translation; use dp alone"
    elif style in (*_COLUMNS, *_ROWS):
        size = f"{'out' if style in _COLUMNS else 'in'}_features"
        if not isinstance(module, nn.Linear):
            yield f"is no linear but {type(module).__name__}; use dp alone"
        elif getattr(module, size) % tp:
            yield f"has {size} = {getattr(module, size)}; change tp"
    elif style == "embedding_rowwise" and module.num_embeddings % tp:
        yield f"has {module.num_embeddings} rows; change tp"
    elif style == _EXPERTS:
        sizes = {parameter.shape[0] for parameter in module.parameters()}
        if len(inspect.signature(module.forward).parameters) != 3 or len(sizes) != 1:
            yield f"has experts of an unknown form, {type(module).__name__}; use dp alone"
        elif module.num_experts % tp:
            yield f"has {module.num_experts} experts; change tp"
