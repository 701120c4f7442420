"""A causal language model of transformers, from token ids to losses in one call.

Letters: B sequences (1 for packed) of S tokens, S' of them on this rank, H hidden, V vocabulary,
n chosen tokens or rows, k feature levels.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers import PretrainedConfig

from mimo.engines.fsdp.context import TP, FsdpContext, Wrapper
from mimo.engines.fsdp.models import NAME, Segments, dense_masks, language_forms, on_meta
from mimo.engines.fsdp.plans import Border, Head, distribute, local_share, parallelize
from mimo.ops.attention_plan import LayerForm
from mimo.ops.cross_entropy import append_scalar, linear_cross_entropy
from mimo.ops.segments import PackedSegments


class LanguageModel(Wrapper):
    """The text part of a model of transformers, with its head; its units are the layers.

    If the head is not tied, head and embedding are ends. `plans` says which models can be
    tensor-parallel. Without a mesh it is transformers' module with its attention.

    queries: by generator, the number of its query parameters.
    """

    def __init__(
        self, config: PretrainedConfig, ctx: FsdpContext, queries: Iterable[tuple[str, int]] = ()
    ) -> None:
        super().__init__(ctx)
        whole = on_meta(config, "sdpa" if ctx.mesh is None else NAME, ctx.stored_dtype)
        self.text: Any = getattr(whole.model, "language_model", whole.model)
        is_tied = whole.lm_head.weight is self.text.embed_tokens.weight
        self.head = None if is_tied else Head(whole.lm_head)
        self.name_as_in(whole)
        self.units = list(self.text.layers)
        if self.head is not None:
            self.ends = (self.text.embed_tokens, self.head)
        self.border = None
        if ctx.tp is not None:
            self.border = Border(ctx.tp, ctx.sequence_parallel)
            parallelize(self.text, self.head, self.border)
        self.queries = nn.ParameterDict()
        for name, number in queries:
            size = number, self.text.config.hidden_size
            matrix = torch.empty(size, dtype=ctx.stored_dtype, device="meta")
            self.queries[name] = nn.Parameter(matrix)
            self.hf_names[f"queries.{name}"] = f"queries.{name}"
        if ctx.tp is not None:
            distribute(self.queries, ctx.tp, Replicate())
        if ctx.recompute == "full":
            self.text.activation_checkpointing_enable({"use_reentrant": False})

    def attention_forms(self) -> frozenset[LayerForm]:
        """The forms of its layers; transformers' attention needs no plan."""
        if self.ctx.mesh is None:
            return frozenset()
        return language_forms(self.text.config, self.ctx.dtype)

    def run(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        *,
        place: Callable[[Tensor, Mapping[str, Tensor]], Tensor] | None = None,
        levels: tuple[Tensor, Tensor] | None = None,
        emit: Callable[[Tensor], Tensor] | None = None,
        labels: Tensor | None = None,
        loss_at: Tensor | None = None,
        logits_at: Tensor | None = None,
        packed_seq_params: PackedSegments | None = None,
    ) -> Tensor:
        """Compute losses or logits; every rank of tp calls it with equal tokens.

        The arguments are those of `mimo.engines.contract.Chunk`. Without ``loss_at``, labels (B, S)
        give losses (B, S). Without labels it returns logits (B, S, V) or, of one sequence at the
        positions ``logits_at`` (n,), (1, n, V), whole on every rank of tp.
        """
        if self.border is not None and self.border.sequence_parallel:
            parts = self.border.tp.size()
            assert input_ids.shape[1] % parts == 0, "sequences are padded to a multiple of tp"
        embeddings = self._embed(input_ids, place)
        with ExitStack() as stack:
            if levels is not None:
                rows, places = levels
                for layer, level in zip(self.units[: len(rows)], rows, strict=True):
                    add = partial(_add_level, level, places)
                    stack.enter_context(layer.register_forward_hook(add))
            has_mrope = hasattr(self.text.rotary_emb, "mrope_section")
            hidden = self.text(
                inputs_embeds=embeddings,
                position_ids=position_ids if has_mrope else position_ids[0],
                use_cache=False,
                **self._attention(packed_seq_params, input_ids.device),
            ).last_hidden_state
        if labels is None:
            return self.logits(hidden, logits_at)
        if loss_at is None:
            losses = self._losses(hidden, labels.t().flatten(), None)
            return losses.view(labels.shape[::-1]).t()
        losses = self._losses(hidden, labels, loss_at)
        return losses if emit is None else append_scalar(losses, emit(hidden.transpose(0, 1)))

    def _attention(self, packed: PackedSegments | None, device: torch.device) -> dict[str, Any]:
        if self.ctx.mesh is not None:
            return {"segments": Segments(filter(None, [packed]), self.ctx.recompute == "selective")}
        if packed is None:
            return {}
        return {"attention_mask": dense_masks(packed, self.text.config, device)}

    def _embed(
        self, ids: Tensor, place: Callable[[Tensor, Mapping[str, Tensor]], Tensor] | None
    ) -> Tensor:
        """ids (B, S) -> the first layer's input (B, S', H)."""
        border, text = self.border, self.text.embed_tokens(ids)
        if border is not None and place is not None and not self.ctx.scatter_embedding:
            border = Border(border.tp, sequence_parallel=False)
        if border is not None:
            text = border.leave(text)
        if place is None:
            return text
        # Under sequence parallelism each rank of tp places the queries of its own tokens.
        is_cut = self.ctx.sequence_parallel and self.ctx.scatter_embedding
        queries = {
            name: local_share(q) if is_cut or not isinstance(q, DTensor) else q.to_local()
            for name, q in self.queries.items()
        }
        return place(text.transpose(0, 1), queries).transpose(0, 1).contiguous()

    def _through_head(self, chosen: Tensor, compute: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """Return ``compute(chosen, weight)`` with this rank's rows of the weight (V/tp, H)."""
        if self.head is None:
            return compute(chosen, local_share(self.text.embed_tokens.weight))
        return self.head(chosen, compute)

    def _chosen(self, hidden: Tensor, at: Tensor | None) -> Tensor:
        """hidden (B, S', H), at (n,) -> (n, H), or all (S·B, H), equal on all ranks of tp.

        Each rank of tp gives a share of the gradient.
        """
        border = self.border
        if border is not None and border.sequence_parallel:
            hidden = border.enter(hidden)
        chosen = hidden.transpose(0, 1).flatten(0, 1)
        if at is not None:
            chosen = chosen.index_select(0, at)
        if border is not None and not border.sequence_parallel:
            chosen = border.enter(chosen)
        return chosen

    def _losses(self, hidden: Tensor, labels: Tensor, at: Tensor | None) -> Tensor:
        def compute(chosen: Tensor, weight: Tensor) -> Tensor:
            if self.ctx.mesh is None:
                logits = nn.functional.linear(chosen, weight)
                wide = logits if logits.dtype == torch.float64 else logits.float()
                return nn.functional.cross_entropy(wide, labels, reduction="none")
            group = self.ctx.mesh[TP].get_group()
            return linear_cross_entropy(chosen, weight, labels, self.text.config.vocab_size, group)

        return self._through_head(self._chosen(hidden, at), compute)

    def logits(self, hidden: Tensor, at: Tensor | None = None) -> Tensor:
        """hidden (B, S', H) after the norm -> logits as `run` returns them; on every rank of tp."""
        logits = self._through_head(self._chosen(hidden, at), nn.functional.linear)
        if self.border is not None:
            shards = DTensor.from_local(logits, self.border.tp, [Shard(1)], run_check=False)
            logits = shards.full_tensor()
        if at is not None:
            return logits[None]
        return logits.unflatten(0, (-1, len(hidden))).transpose(0, 1)


def _add_level(
    level: Tensor, places: Tensor, layer: nn.Module, args: object, hidden: Tensor
) -> Tensor:
    """Add level (n, H) to hidden (B, S', H) at (n,), by a hook outside of recomputation.

    Even with n = 0 the result depends on them, so that the backward reaches the bridge.
    """
    flat = hidden.flatten(0, 1)  # place b·S' + s is token s of sequence b
    return flat.index_add(0, places, level.to(hidden.dtype)).view(hidden.shape)
