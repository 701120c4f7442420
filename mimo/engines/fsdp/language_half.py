"""The language half of any vision-language model of transformers; see `mimo.engines.fsdp.halves`.

Letters: I items, N embeddings, L feature levels, H hidden size, B sequences of S tokens (packed:
1 of T), n tokens with a loss, V vocabulary.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import PretrainedConfig, PreTrainedModel

from mimo.engines.fsdp.context import FsdpContext, Wrapper
from mimo.engines.fsdp.halves import (
    MODALITIES,
    FormOf,
    Grid,
    OutputForm,
    arguments_of,
    base_of,
    build_whole,
    decoder_of,
    keep,
    language_parameters,
)
from mimo.engines.fsdp.models import NAME, Segments, language_forms
from mimo.engines.fsdp.tp_plans import apply_plan
from mimo.ops.attention_plan import LayerForm
from mimo.ops.segments import PackedSegments, to_device


@dataclass(frozen=True)
class LanguageInputs:
    """Inputs of a microbatch. arguments: of the model's forward. labels: (n,) int64.

    loss_at: (n,) int64 positions of these tokens in the flat (B, S). order: by modality, the number
    of rows of each item, and the rows' indices among their encoder's; None for all of them.
    segments: of a packed sequence; None for a batch.
    """

    arguments: dict[str, Tensor]
    labels: Tensor
    loss_at: Tensor
    order: dict[str, tuple[tuple[int, ...], Tensor | None]]
    segments: PackedSegments | None


@dataclass(frozen=True)
class Placeholders:
    """Token ids: of the placeholder, by modality, and of padding."""

    ids: Mapping[str, int]
    padding: int


def token_types(ids: Tensor, placeholders: Placeholders) -> dict[str, Tensor]:
    """Return both arguments that tell items from text: the modality's number, and 0 or 1."""
    kinds = torch.zeros_like(ids)
    for number, modality in enumerate(MODALITIES, start=1):
        if modality in placeholders.ids:
            kinds[ids == placeholders.ids[modality]] = number
    return {"mm_token_type_ids": kinds, "token_type_ids": (kinds > 0).long()}


class LanguageHalf(Wrapper):
    """A model of transformers without its tower: from token ids and embeddings to losses.

    packing: None pads a lane's samples to a batch; "causal" packs them; "items" packs them, and the
    tokens of an item see each other. encoders, outputs: by modality, the encoder and the
    form of its output. form_of: see `FormOf`. router_loss: factor of the router's loss.
    """

    def __init__(
        self,
        config: PretrainedConfig,
        ctx: FsdpContext,
        packing: Literal["causal", "items"] | None,
        encoders: Mapping[str, str],
        outputs: Mapping[str, OutputForm],
        form_of: FormOf,
        placeholders: Placeholders,
        router_loss: float = 0.0,
    ) -> None:
        super().__init__(ctx)
        self.packing, self.encoders, self.outputs = packing, encoders, outputs
        self.form_of, self.placeholders, self.router_loss = form_of, placeholders, router_loss
        whole = build_whole(config, ctx.stored_dtype, None if packing is None else NAME)
        kept = language_parameters(whole)
        self.hf_names = {f"whole.{n}": n for n, _ in whole.named_parameters() if n in kept}
        head = whole.get_output_embeddings()
        keep(whole, kept.__contains__, [decoder_of(whole), head, base_of(whole)])
        self.whole: PreTrainedModel = whole
        self.text = decoder_of(whole)
        self.units = list(getattr(self.text, "layers", ()))
        embedding = whole.get_input_embeddings()
        if type(head) is nn.Linear and head.weight is not embedding.weight:
            self.ends = (embedding, head)
        self._chosen: Tensor | None = None
        head.register_forward_pre_hook(self._choose)  # before the hooks of apply_plan
        if ctx.tp is not None:
            apply_plan(whole, ctx.tp)
        self._no_rows: Tensor | float = 0.0
        embedding.register_forward_hook(lambda module, args, output: output + self._no_rows)
        if ctx.recompute == "full":
            whole.gradient_checkpointing_enable({"use_reentrant": False})

    def _choose(self, head: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Reduce the head's input (B, S, H) to the chosen tokens (1, n, H)."""
        hidden, *others = args
        if self._chosen is not None:
            hidden = hidden.flatten(0, 1).index_select(0, self._chosen)[None]
        return hidden, *others

    def attention_forms(self) -> frozenset[LayerForm]:
        """Attention forms of the layers if samples are packed; none with padded samples."""
        if self.packing is None:
            return frozenset()
        if getattr(self.text.config, "per_layer_config", None):
            return frozenset()  # head sizes differ; the forward plans them
        return language_forms(self.text.config, self.ctx.dtype)

    # ---- host work, ahead of the forward

    def prepare(
        self, lane: Any, copy: Callable[[Tensor], Tensor], at: np.ndarray | None = None
    ) -> LanguageInputs:
        """Lay out the samples of a lane's microbatch; in any thread.

        lane: a `data.batch.PackedLane`. at: (n,) tokens of the lane whose losses or logits are
        wanted; None for those with a loss. Segments with neither such tokens nor items, such
        as padding at the end, are left out.
        """
        wanted = np.flatnonzero(lane.loss_mask) if at is None else at
        starts = np.cumsum([0, *lane.lengths])
        items = [(first, *part) for (first, _), part in zip(lane.items, lane.parts, strict=True)]
        needed = np.array([*wanted, *(first for first, *_ in items)], np.int64)
        used = np.unique(np.searchsorted(starts, needed, side="right") - 1).tolist() or [0]
        spans = [(int(starts[number]), max(lane.real_lengths[number], 1)) for number in used]
        longest = max(length for _, length in spans)
        ids = torch.full((len(spans), longest), self.placeholders.padding)
        mask = torch.zeros_like(ids)
        place = torch.full((int(starts[-1]),), -1)
        for row, (start, length) in enumerate(spans):
            ids[row, :length] = torch.from_numpy(lane.input_ids[start : start + length])
            mask[row, :length] = 1
            place[start : start + length] = row * ids.shape[1] + torch.arange(length)
        arguments = {"input_ids": ids, "attention_mask": mask}
        arguments |= token_types(ids, self.placeholders) | self._item_arguments(items)
        segments = None
        if self.packing is not None:
            place = torch.where(place < 0, place, (mask.flatten().cumsum(0) - 1)[place])
            bidirectional = [
                (int(place[first]), self.form_of(modality, grid).num_rows)
                for first, modality, grid in items
                if self.packing == "items"
            ]
            segments = PackedSegments.from_lengths(
                [length for _, length in spans], torch.device("cpu"), items=tuple(bidirectional)
            )
            segments.prepare(self.attention_forms())
            arguments = self._packed(arguments)
        inputs = LanguageInputs(
            arguments_of(self.whole.forward, arguments),
            torch.from_numpy(lane.labels[wanted]),
            place[torch.from_numpy(wanted)],
            self._order(items),
            segments,
        )
        return to_device(inputs, copy)

    def _item_arguments(self, items: Sequence[tuple[int, str, Grid]]) -> dict[str, Tensor]:
        """Return the forward's arguments that describe items, such as their grids."""
        arrays: dict[str, list[Tensor]] = {}
        for _, modality, grid in items:
            for name, value in self.form_of(modality, grid).arrays.items():
                if not value.is_meta:
                    arrays.setdefault(name, []).append(value)
                elif modality == "audio":  # the forward only checks that it is there
                    arrays[name] = [torch.empty(0)]
        # A forward needs grids, which have equal shapes. Others, such as positions of patches, are
        # the tower's alone and may differ in shape.
        return {
            name: torch.cat(values)
            for name, values in arrays.items()
            if len({value.shape[1:] for value in values}) == 1
        }

    def _packed(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Turn a padded batch into one packed sequence, with positions by the model's rules."""
        real = batch["attention_mask"].bool()
        positions = (batch["attention_mask"].cumsum(1) - 1)[None]
        if hasattr(base_of(self.whole), "get_rope_index"):
            method = base_of(self.whole).get_rope_index
            positions = method(**arguments_of(method, batch))[0]
        packed = {
            name: value[real][None] if value.shape == real.shape else value
            for name, value in batch.items()
            if name != "attention_mask"
        }
        packed["position_ids"] = positions[:, real][:, None]
        if len(positions) == 1:
            packed["position_ids"] = packed["position_ids"][0]
        return packed

    def _order(
        self, items: Sequence[tuple[int, str, Grid]]
    ) -> dict[str, tuple[tuple[int, ...], Tensor | None]]:
        """Return `LanguageInputs.order`; an encoder's rows arrive in the order of items."""
        sizes = [self.form_of(modality, grid).num_rows for _, modality, grid in items]
        order = {}
        for modality in dict.fromkeys(kind for _, kind, _ in items):
            matches = [kind == modality for _, kind, _ in items]
            shares = [self.encoders[kind] == self.encoders[modality] for _, kind, _ in items]
            count = tuple(s for s, is_in in zip(sizes, matches, strict=True) if is_in)
            index = None
            if matches != shares:
                masks = [
                    torch.full((s,), m) for s, m, e in zip(sizes, matches, shares, strict=True) if e
                ]
                index = torch.cat(masks).nonzero().flatten()
            order[modality] = count, index
        return order

    def run(
        self, inputs: LanguageInputs, rows: Mapping[str, Tensor], with_logits: bool = False
    ) -> Tensor:
        """Return losses (n,) in at least fp32 or, with ``with_logits``, logits (n, V).

        rows: of each encoder, (N, (1 + L)·H) in the order of the lane's items.
        """
        outputs, width = {}, self.text.config.hidden_size
        for modality, (sizes, index) in inputs.order.items():
            of_encoder = rows[self.encoders[modality]]
            chosen = of_encoder if index is None else of_encoder.index_select(0, index)
            outputs[modality] = self.outputs[modality].output(chosen, sizes, width)
        if (sound := outputs.pop("audio", None)) is not None:
            # No class takes audio in `mm_encoder_outputs`.
            base_of(self.whole).get_audio_features = lambda *args, **kwargs: sound
        options: dict[str, Any] = {"mm_encoder_outputs": outputs} if outputs else {}
        if inputs.segments is not None:
            options["segments"] = Segments([inputs.segments], self.ctx.recompute == "selective")
        if self.router_loss:
            options["output_router_logits"] = True
        # A lane without items takes part in the encoders' backward, and in that of frozen layers,
        # which gathers their weights.
        self._no_rows = sum(0.0 * part.sum() for part in rows.values() if part.requires_grad)
        self._chosen = inputs.loss_at
        output = self.whole(**inputs.arguments, **options, use_cache=False)
        logits = output.logits[0]
        if with_logits:
            return logits
        wide = logits if logits.dtype == torch.float64 else logits.float()
        losses = cross_entropy(wide, inputs.labels, reduction="none")
        if self.router_loss:
            # Adds its gradient, weighted by the call's loss tokens, but not to the logged loss.
            losses = losses + self.router_loss * (output.aux_loss - output.aux_loss.detach())
        return losses
