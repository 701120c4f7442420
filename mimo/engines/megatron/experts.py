"""Sparse layers: a router, experts that ranks share out, and perhaps one expert for all tokens.

In place of a layer's MLP. The router's weight is on every rank, and computes in fp32 at least.
Experts are cut over the axes ep and etp of the grid; see `mimo.engines.megatron.dispatch`. Without
sequence parallelism each tensor-parallel rank sends a part of the tokens, and results are gathered.

Router losses are added to gradients, not to the loss, because the last stage does not know them.
Each is a sum over the tokens of the global batch, divided by their number and by that of layers. So
a gradient does not depend on how tokens lie in lanes, microbatches and ranks.

Letters: S' tokens of this rank and B sequences (1 for packed), T all S' · B of them, H hidden, E
experts, E' of this rank, k of a token, n rows, F inner size of an expert on this rank, R rank of
adapters.
"""

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn import functional

from mimo.device import local_device
from mimo.engines.megatron.config import LoRA, gather_sequence, scatter_sequence
from mimo.engines.megatron.dispatch import Route, exchange, sort_choices
from mimo.ops.attention_plan import batch_plan
from mimo.ops.layers import gate
from mimo.ops.routing import (
    Choice,
    RoutedTokens,
    TokenShare,
    balance_over_layers,
    balance_slopes,
    choose_experts,
    count_loads,
    grouped_linear,
)
from mimo.ops.segments import PackedSegments, gather_rows, sum_rows


@dataclass(frozen=True)
class Experts:
    """The experts of a layer.

    count, top_k: E and k. size: inner size of an expert. normalize: whether a token's weights sum
    to 1. balance_loss, z_loss: coefficients of the router's losses. pools_layers: whether experts
    are balanced over all layers together, which need to be on one stage. shared_size: inner size
    of the expert for all tokens, with a gate; 0 for none.
    """

    count: int
    top_k: int
    size: int
    normalize: bool = True
    balance_loss: float = 0.0
    z_loss: float = 0.0
    pools_layers: bool = False
    shared_size: int = 0


def _parameter(config: TransformerConfig, rows: int, columns: int) -> nn.Parameter:
    size, dtype = (rows, columns), config.params_dtype
    return nn.Parameter(torch.empty(size, dtype=dtype, device=local_device()))


def _whole_parameter(config: TransformerConfig, rows: int) -> nn.Parameter:
    """A matrix (rows, H) on every rank; each multiplies its slice under sequence parallelism."""
    parameter: Any = _parameter(config, rows, config.hidden_size)
    parameter.sequence_parallel = config.sequence_parallel
    return parameter


class Router(nn.Module):
    """Chooses experts, and adds the gradients of its losses.

    loss_token_share: see `mimo.engines.contract.Module.begin_step`.
    sums: (E + 4,) fp64, see `mimo.engines.contract.Module.add_router_sums`.
    """

    def __init__(
        self, config: TransformerConfig, experts: Experts, groups: ProcessGroupCollection
    ) -> None:
        super().__init__()
        self.experts, self.num_layers, self.layer_number = experts, config.num_layers, 1
        self.weight = _whole_parameter(config, experts.count)
        # Without sequence parallelism tensor-parallel ranks route the same tokens.
        self.group: dist.ProcessGroup = groups.tp_cp if config.sequence_parallel else groups.cp
        self.counts_once = config.sequence_parallel or groups.tp.rank() == 0
        self.loss_token_share = 0.0
        self.sums: Tensor | None = None

    def begin_step(self, loss_token_share: float) -> None:
        """Clear the sums."""
        self.loss_token_share, self.sums = loss_token_share, None

    def forward(self, tokens: Tensor, routed: RoutedTokens) -> Choice:
        """tokens (T, H) -> their experts. With losses, all ranks that share samples call it."""
        experts = self.experts
        choice = choose_experts(tokens, self.weight, experts.top_k, experts.normalize)
        is_first_run = not torch.is_grad_enabled()  # of a layer that is recomputed
        if not self.training or (is_first_run and not experts.pools_layers):
            return choice
        loads = count_loads(choice, routed)
        per_expert, is_real = loads[:-1].sum(0), routed.is_real
        balance = z = loads.new_zeros(())
        if experts.balance_loss:
            if self.group.size() > 1:
                dist.all_reduce(loads, group=self.group)
            if experts.pools_layers:
                balance = balance_over_layers(choice, routed, loads, self.layer_number)
            else:
                balance = (choice.probabilities * balance_slopes(routed, loads)).sum()
        if is_first_run:
            return choice
        if experts.z_loss:
            z = (choice.logits.logsumexp(-1).square() * is_real).sum()
        loss = experts.balance_loss * balance + experts.z_loss * z
        if loss.requires_grad:
            loss = loss * (self.loss_token_share / self.num_layers)
            choice = replace(choice, weights=_AddLoss.apply(choice.weights, loss))
        with torch.no_grad():
            entropy = torch.special.entr(choice.probabilities).sum(-1) * is_real
            others = torch.stack((is_real.sum().to(z), entropy.sum(), balance, z))
            sums = torch.cat((per_expert, others)).double()
            self.sums = sums if self.sums is None else self.sums + sums
        return choice


class _AddLoss(torch.autograd.Function):
    """Returns its first argument; its backward also gives the second, a loss (), gradient 1."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, loss: Tensor) -> Tensor:
        ctx.like = loss.detach()
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        return gradients[0], torch.ones_like(ctx.like)


class ExpertLinear(nn.Module):
    """A linear of each of this rank's experts, with an adapter if ``lora`` is given.

    weight: (E' · O, I), the matrices of the experts one below the other. blocks: matrices stacked
    in each, which etp cuts separately; None if it cuts the inputs, I.
    """

    def __init__(
        self,
        config: TransformerConfig,
        groups: ProcessGroupCollection,
        count: int,
        sizes: tuple[int, int],
        blocks: int | None,
        lora: LoRA | None,
    ) -> None:
        super().__init__()
        outputs, inputs = sizes
        self.count, self.scale = count, 0.0 if lora is None else lora.scale
        self.weight = _parameter(config, count * outputs, inputs)
        parameters = [self.weight]
        if lora is not None:
            assert groups.expt_tp.size() == 1, "adapters of experts are not cut"
            self.lora_a = _parameter(config, count * lora.rank, inputs)
            self.lora_b = _parameter(config, count * outputs, lora.rank)
            parameters += [self.lora_a, self.lora_b]
        for parameter in cast("Iterable[Any]", parameters):
            parameter.allreduce = False  # Megatron's mark of experts, which have other replicas
            parameter.tensor_model_parallel = groups.expt_tp.size() > 1
            parameter.partition_dim = 1 if blocks is None else 0
            parameter.partition_stride = 1 if blocks is None else count * blocks

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """rows (n, I), those of the first expert first -> (n, O). counts: (E',) int64."""
        output = grouped_linear(rows, self.weight.unflatten(0, (self.count, -1)), counts)
        if not self.scale:
            return output
        lora_a, lora_b = (x.unflatten(0, (self.count, -1)) for x in (self.lora_a, self.lora_b))
        down = self.scale * grouped_linear(rows, lora_a, counts)
        return output + grouped_linear(down, lora_b, counts)


class LocalExperts(nn.Module):
    """This rank's part of the experts, each a gated MLP."""

    def __init__(
        self,
        config: TransformerConfig,
        experts: Experts,
        groups: ProcessGroupCollection,
        lora: LoRA | None,
    ) -> None:
        super().__init__()
        count = experts.count // groups.ep.size()
        inner, size = experts.size // groups.expt_tp.size(), config.hidden_size
        targets = frozenset() if lora is None else lora.targets
        first, last = (lora if name in targets else None for name in ("fc1", "fc2"))
        self.activation = config.activation_func
        self.linear_fc1 = ExpertLinear(config, groups, count, (2 * inner, size), 2, first)
        self.linear_fc2 = ExpertLinear(config, groups, count, (size, inner), None, last)

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """rows (n, H) by expert -> (n, H); with etp > 1 partial sums, which the sender adds up."""
        return self.linear_fc2(gate(self.linear_fc1(rows, counts), self.activation), counts)


class SparseMLP(nn.Module):
    """Experts in place of a layer's MLP: every token's output is a weighted sum of k experts'.

    shared: builds the MLP for all tokens, if ``experts`` has one.
    segments: of the packed sequence, set by the layer during a forward; None for a batch.
    """

    segments: PackedSegments | None = None

    def __init__(
        self,
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection,
        experts: Experts,
        shared: Callable[..., nn.Module],
        lora: LoRA | None = None,
        **unused: object,
    ) -> None:
        super().__init__()
        groups = self.groups = pg_collection
        tp, cp = groups.tp, groups.cp
        place = (cp.size(), cp.rank(), tp.size(), tp.rank())
        self.form = TokenShare(*place, sequence_parallel=config.sequence_parallel)
        self.num_experts = experts.count
        self.router = Router(config, experts, groups)
        self.experts = LocalExperts(config, experts, groups, lora)
        if experts.shared_size:
            # Megatron's second linear reads its size from the configuration.
            shared_config, size = copy.copy(config), experts.shared_size
            shared_config.ffn_hidden_size = size
            self.shared_expert = shared(
                config=shared_config, pg_collection=groups, is_mtp_layer=False, ffn_hidden_size=size
            )
            self.shared_expert_gate = _Gate(config)

    def set_layer_number(self, number: int) -> None:
        """Note the number in the whole model, from 1; called by Megatron's layer."""
        self.router.layer_number = number

    def forward(self, hidden_states: Tensor, **unused: Any) -> tuple[Tensor, None]:
        """hidden_states (S', B, H) -> (S', B, H), and no bias.

        All ranks of a stage call it equally often, since it exchanges tokens between them.
        """
        tokens = hidden_states.flatten(0, 1)
        routed = self._routed(tokens)
        choice = self.router(tokens, routed)
        tp = cast("dist.ProcessGroup", self.groups.tp)
        parts = (tokens, choice.weights, choice.experts)
        is_split = tp.size() > 1 and not self.form.sequence_parallel
        if is_split:
            padded = (functional.pad(x, (0, 0, 0, -len(x) % tp.size())) for x in parts)
            parts = tuple(scatter_sequence(x, group=tp) for x in padded)
        output = self._run(parts, routed.real)
        if is_split:
            # Gradients are equal and complete on all ranks: a sum would count them once for each.
            output = gather_sequence(output, tensor_parallel_output_grad=False, group=tp)
            output = output[: len(tokens)]
        output = output.view(hidden_states.shape)
        if hasattr(self, "shared_expert"):
            shared, _ = self.shared_expert(hidden_states)
            output = output + self.shared_expert_gate(hidden_states).sigmoid() * shared
        return output, None

    def _routed(self, tokens: Tensor) -> RoutedTokens:
        if self.segments is not None:
            return self.segments.plan(self.form)
        # A batch: its padding is routed like other tokens, and it has no losses.
        whole = replace(self.form, cp_size=1, cp_rank=0)
        form = TokenShare() if self.form.sequence_parallel else whole
        return batch_plan(form, len(tokens), 1, tokens.device)

    def _run(self, parts: tuple[Tensor, ...], real: Tensor | None) -> Tensor:
        """parts: tokens (n, H), weights and experts (n, k) -> (n, H), zeros for padding."""
        tokens, weights, experts = parts
        weights = weights.to(tokens.dtype)
        if real is not None:
            weights, experts = weights.index_select(0, real), experts.index_select(0, real)
        group = cast("dist.ProcessGroup", self.groups.tp_ep)
        if group.size() == 1:
            return self._run_on_one_rank(tokens, weights, experts, real)
        etp = cast("dist.ProcessGroup", self.groups.expt_tp).size()
        route = Route.of(experts, self.num_experts, group, etp)
        source = route.token if real is None else real.index_select(0, route.token)
        rows = exchange(gather_rows(tokens, source), route.rows, group)
        sent = gather_rows(weights.flatten(), route.choice)
        received = exchange(sent, route.choices, group).index_select(0, route.by_expert)
        output = self.experts(gather_rows(rows, route.row), route.counts) * received[:, None]
        output = exchange(sum_rows(output, route.row, len(rows)), route.rows.back, group)
        return sum_rows(output, source, len(tokens))

    def _run_on_one_rank(
        self, tokens: Tensor, weights: Tensor, experts: Tensor, real: Tensor | None
    ) -> Tensor:
        choices, counts = sort_choices(experts, self.num_experts)
        source = choices // experts.shape[1]
        source = source if real is None else real.index_select(0, source)
        rows = self.experts(gather_rows(tokens, source), counts)
        rows = rows.index_select(0, choices.argsort()).view(*experts.shape, rows.shape[1])
        output = (rows * weights[:, :, None]).sum(1)
        if real is None:
            return output
        return tokens.new_zeros(len(tokens), output.shape[1]).index_copy(0, real, output)


class _Gate(nn.Module):
    """A linear with one output, the same on all tensor-parallel ranks."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.weight = _whole_parameter(config, 1)

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden (S', B, H) -> (S', B, 1)."""
        return functional.linear(hidden, self.weight)


def routers_in(modules: Iterable[nn.Module]) -> list[Router]:
    """Collect the routers of all layers inside, in order."""
    inside = (part for module in modules for part in module.modules())
    return [part for part in inside if isinstance(part, Router)]
