"""The multimodal model of one rank: only the modules that this rank owns a part of.

Disjoint: an encoder's forward ends in `BridgeSender.send`, and that of a language model's chunk
begins with `LevelReceiver.receive`; both are autograd operations. Colocated: the items of a group
of microbatches are encoded in one go, and rows and gradients are exchanged before and after the
language model's run.

Letters: B sequences (1 for packed) of S tokens on this lane, N rows, H hidden.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from bridge import (
    BridgeSender,
    ColocatedBridge,
    FlatEmbeddings,
    ItemRows,
    LevelReceiver,
    SampleKeys,
    TransferWatch,
    UnexpectedRows,
    check_plans,
    split_levels,
    split_sizes_of,
    take_chunk,
)
from data.batch import PackedLane
from mimo.device import Staging, memory_in_use
from mimo.engines.contract import Chunk, Module
from mimo.families.contracts import ItemRules
from mimo.model.decoding import EncoderItems
from mimo.model.inputs import (
    EncoderBatch,
    LanguageBatch,
    ReceivedRows,
    cut_levels,
    join_levels,
    place_embeddings,
    stage_items,
    stage_lane,
)
from mimo.model.step_plan import StepPlan
from mimo.parallel.grids import LANGUAGE, Link
from mimo.parallel.partition import PartitionAdapter
from mimo.spans import SPANS


@dataclass
class MimoModel:
    """The modules of this rank and its ends of the bridges.

    hidden_size: H. num_tokens: that the language model knows; later rows of its embedding are
    padding. item_rules: the language family's.
    senders: of disjoint encoders, on their last stage. receivers: of disjoint encoders, on stages
    of the language model that need their rows. colocated: of colocated encoders.
    encode_group: microbatches that colocated encoders encode in one go; None for all.
    trains_encoders: whether any encoder of the recipe trains, on any rank: gradients then pass
    through all stages of the language model, frozen or not.
    watch: watches transfers on a device where waiting does not block the host.
    partition: cuts sequences for this rank; on language ranks.
    doing: what its modules do at this moment, and with which microbatch; None outside of `run`.
    describe_batch: of the batch that `run` works on, given a microbatch.
    whole_rows: with `delivery: replicated`, all rows of the lane arrive and are put in place in
    whole sequences, which are cut afterwards.
    squared_changes: by module, this rank's share of how much the last update changed the weights,
    until it is reported.
    """

    modules: dict[str, Module]
    device: torch.device
    hidden_size: int
    num_tokens: int
    item_rules: ItemRules
    senders: dict[Link, BridgeSender] = field(default_factory=dict)
    receivers: dict[Link, LevelReceiver] = field(default_factory=dict)
    colocated: dict[Link, ColocatedBridge] = field(default_factory=dict)
    encode_group: int | None = None
    trains_encoders: bool = False
    watch: TransferWatch | None = None
    partition: PartitionAdapter | None = None
    whole_rows: bool = False
    squared_changes: dict[str, float | Tensor] = field(default_factory=dict)
    doing: tuple[str, int] | None = None
    describe_batch: Callable[[int | None], str] = lambda microbatch: ""

    def stage(
        self,
        plan: StepPlan,
        lanes: Sequence[PackedLane],
        items: Mapping[str, Sequence[EncoderItems]],
        staging: Staging,
    ) -> tuple[list[LanguageBatch], dict[str, list[EncoderBatch]]]:
        """What `run` takes of one step, on its way to the device; for a thread in the background.

        lanes: the microbatches of this lane, on language ranks. items: by encoder of this rank, the
        items of its lane, microbatch by microbatch.
        """
        for link, bridge in self._bridges().items():
            colocated = self.colocated.get(link)
            for planned in plan.bridges[link]:
                replicas = None if colocated is None else colocated.encoder_gather
                bridge.end.stage(planned, staging.copy, replicas)
        language = []
        forms = self.modules[LANGUAGE].attention_forms() if lanes else ()
        for lane in lanes:
            assert self.partition is not None, "language ranks have a partition adapter"
            partition, rules = self.partition, self.item_rules
            language.append(stage_lane(lane, rules, partition, self.whole_rows, forms, staging))
        encoders = {}
        for name, own in items.items():
            size = self._group_size(len(own)) if name in self._colocated_encoders() else 1
            tower, starts = self.modules[name].whole, range(0, len(own), size)
            encoders[name] = [stage_items(own[at : at + size], tower, staging) for at in starts]
        return language, encoders

    def run(
        self,
        plan: StepPlan,
        language: Sequence[LanguageBatch],
        items: Mapping[str, Sequence[EncoderBatch]],
        forward_only: bool = False,
        check: bool = False,
        sample_keys: SampleKeys | None = None,
    ) -> float | Tensor:
        """All microbatches of one step, forward and backward; every rank of the world calls it.

        language: this lane's microbatches, on language ranks. items: for each encoder of this
        rank, what it encodes in each go. Both are of `stage`. check: compare plan digests over the
        bridge first, and with ``sample_keys`` also which samples each microbatch has.
        Returns the summed loss of this lane on tensor-parallel rank 0 of the last language stage,
        else 0: a number () in fp64 on the device, which the host has not waited for. Gradients are
        complete after `finish_gradients`.
        """
        for module in self.modules.values():
            module.begin_step(forward_only)
        bridges = self._bridges()
        for link, bridge in bridges.items():
            plans = plan.bridges[link]
            if check:
                check_plans(bridge.end, plans, sample_keys)
            bridge.end.begin_step()
            bridge.begin(plans, forward_only)
        loss: float | Tensor = 0.0
        for name, module in self.modules.items():
            if name == LANGUAGE:
                loss = self._run_groups(module, language, items, forward_only)
            elif name not in self._colocated_encoders():
                self._run_encoder(module, items[name], forward_only)
        for bridge in bridges.values():
            bridge.finish()
        self.doing = None
        return loss

    def finish_gradients(self, num_loss_tokens: int) -> None:
        """Complete every module's gradients and divide them once by the global token count."""
        for name, module in self.modules.items():
            with SPANS.span(name, "gradients"):
                module.finish_gradients(num_loss_tokens)

    def memory(self) -> dict[str, dict[str, int]]:
        """Bytes on this rank by module and kind, memory that is shared once; and of the process."""
        seen, found = set[int](), dict[str, dict[str, int]]()
        for name, module in self.modules.items():
            found[name] = {}
            for kind, tensors in module.tensors().items():
                own = {one.untyped_storage().data_ptr(): one for one in tensors}
                new = [one for at, one in own.items() if at not in seen]
                found[name][kind] = sum(one.untyped_storage().nbytes() for one in new)
                seen |= own.keys()
        return {**found, "process": memory_in_use()}

    def _noting_backward(self, output: Tensor, part: str, microbatch: int) -> Tensor:
        """The same ``output``, whose backward says that this rank is in it when it begins."""

        def note(gradient: Tensor) -> None:
            self.doing = f"backward of {part}", microbatch

        if output.requires_grad:
            output.register_hook(note)
        return output

    def take_waited_seconds(self) -> float:
        """Seconds that the host waited for transfers of all bridges since the last call."""
        return sum(bridge.end.clock.take_seconds() for bridge in self._bridges().values())

    def bridge_bytes(self, plan: StepPlan) -> dict[tuple[str, str], int]:
        """By column and edge, such as `vision_forward`, what this rank has sent in this step.

        The column `least` has what would have to be sent if each row took its way once, and its
        gradient once back.
        """
        found = Counter[tuple[str, str]]()
        for link, bridge in self._bridges().items():
            end, name = bridge.end, link.encoder
            least = 0 if link in self.receivers else end.least_bytes(plan.bridges[link])
            found["sent", f"{name}_forward"] += end.clock.sent_bytes["rows"]
            found["sent", f"{name}_backward"] += end.clock.sent_bytes["gradients"]
            found["least", f"{name}_forward"] += least
            found["least", f"{name}_backward"] += least * end.trainable
        return found

    def _bridges(self) -> dict[Link, BridgeSender | LevelReceiver | ColocatedBridge]:
        """This rank's ends of all bridges."""
        return {**self.senders, **self.receivers, **self.colocated}

    # ------------------------------------------------------------ disjoint encoders

    def _run_encoder(
        self, module: Module, items: Sequence[EncoderBatch], forward_only: bool
    ) -> None:
        # Only the last stage has any.
        senders = {link: s for link, s in self.senders.items() if link.encoder == module.name}
        part = f"{module.name}, stage {module.groups.pp.rank()}"

        def forward(batch: tuple[int, EncoderBatch], tower: nn.Module):
            number, own = batch
            self.doing = f"forward of {part}", number
            with SPANS.span(module.name, "encode", number=number):
                output = tower(own.patches, own.items)
                if senders:
                    rows = _flat_embeddings(output, senders, range(number, number + 1))
                    tokens = [
                        sender.send(number, own_rows)
                        for sender, own_rows in zip(senders.values(), rows, strict=True)
                    ]
                    output = torch.stack(tokens).sum()
            return self._noting_backward(output, part, number)

        learns = module.trains and not forward_only
        # What is no forward pass is backward, or a wait inside of it.
        with torch.set_grad_enabled(learns), SPANS.span(module.name, "backward"):
            module.run_encoder(
                forward,
                list(enumerate(items)),
                [own.items for own in items],
                forward_only or not module.trains,
            )

    # --------------------------------------------- language model, colocated encoders

    def _run_groups(
        self,
        module: Module,
        batches: Sequence[LanguageBatch],
        items: Mapping[str, Sequence[EncoderBatch]],
        forward_only: bool,
    ) -> float | Tensor:
        """The language model's schedule, once or, with colocated encoders, group by group."""
        size = self._group_size(len(batches))
        loss: float | Tensor = 0.0
        for start in range(0, len(batches), size):
            group = range(start, min(start + size, len(batches)))
            with ExitStack() as stack:
                if group.stop < len(batches) and not forward_only:
                    for one in self.modules.values():
                        stack.enter_context(one.accumulate_only())
                rows = {
                    name: self._encode(name, items[name][start // size], group, forward_only)
                    for name in self._colocated_encoders()
                }
                loss += self._run_language(module, batches, group, forward_only)
                for name, parts in rows.items():
                    bridges = self._colocated_of(name).values()
                    if self.modules[name].trains and not forward_only:
                        self.doing = f"backward of {name}", start
                        with SPANS.span(name, "backward"):
                            gradients = [bridge.collect(group) for bridge in bridges]
                            torch.autograd.backward(parts, gradients)
        return loss

    def _group_size(self, num_microbatches: int) -> int:
        """Microbatches that the language model's schedule runs, and encoders encode, in one go."""
        if self.colocated and self.encode_group is not None:
            return self.encode_group
        return num_microbatches

    def _colocated_encoders(self) -> list[str]:
        return list(dict.fromkeys(link.encoder for link in self.colocated))

    def _colocated_of(self, encoder: str) -> dict[Link, ColocatedBridge]:
        return {link: b for link, b in self.colocated.items() if link.encoder == encoder}

    def _encode(
        self, name: str, items: EncoderBatch, group: range, forward_only: bool
    ) -> list[Tensor]:
        """One forward of a colocated encoder over a group's items; delivers its rows.

        Returns the rows (N, k·H) of each of its bridges, for the backward.
        """
        module = self.modules[name]
        self.doing = f"forward of {name}", group.start
        with SPANS.span(name, "encode"):
            with torch.set_grad_enabled(module.trains and not forward_only):
                made = module.encode(items.patches, items.items)
                bridges = self._colocated_of(name)
                rows = _flat_embeddings(made, bridges, group)
            for bridge, own_rows in zip(bridges.values(), rows, strict=True):
                bridge.deliver(group, own_rows)
            return [own_rows.values for own_rows in rows]

    def _run_language(
        self, module: Module, batches: Sequence[LanguageBatch], group: range, forward_only: bool
    ) -> float | Tensor:
        trains = module.trains or self.trains_encoders
        stage = module.groups.pp.rank()

        def forward(number: int, chunk: Chunk) -> Tensor:
            own = batches[number]
            part = f"{LANGUAGE}, stage {stage}, chunk {chunk.number}"
            self.doing = f"forward of {part}", number
            with SPANS.span(module.name, "forward", number=number):
                received = self._receive(chunk, number)
                output = chunk.run(
                    input_ids=own.input_ids,
                    position_ids=own.position_ids,
                    labels=own.labels,
                    loss_at=own.loss_at,
                    packed_seq_params=own.segments,
                    place=partial(self._place, own, received) if chunk.is_first else None,
                    levels=self._levels(own, received),
                )
            return self._noting_backward(output, part, number)

        sizes = [batches[number].position_ids.shape[:0:-1] for number in group]
        learns = trains and not forward_only
        with torch.set_grad_enabled(learns), SPANS.span(module.name, "backward"):
            logged = module.run_language(
                forward, list(group), cast("Any", sizes), forward_only or not trains
            )
        counts = module.groups.tp.rank() == 0
        return torch.stack(logged).sum().double() if logged and counts else 0.0

    def _receive(self, chunk: Chunk, number: int) -> list[ReceivedRows]:
        """What all encoders deliver to a chunk for a microbatch."""
        found = [
            receiver.receive(number, chunk.number)
            for link, receiver in self.receivers.items()
            if chunk.number in link.chunks
        ]
        for link, bridge in self.colocated.items():
            if bridge.receives and chunk.number in link.chunks:
                rows, places = bridge.receive(number)
                found.append((take_chunk(rows, link.chunks, chunk.number), places))
        size, first = self.hidden_size, chunk.is_first
        return [ReceivedRows.of(rows, at, size, has_embeddings=first) for rows, at in found]

    def _place(self, own: LanguageBatch, received: Sequence[ReceivedRows], text: Tensor) -> Tensor:
        """Text embeddings with the rows of all encoders in place: this rank's (S', B, H)."""
        hidden = place_embeddings(text, received)
        if self.whole_rows:
            assert self.partition is not None, "language ranks have a partition adapter"
            hidden = self.partition.shard_embeddings(hidden, own.segments)
        return hidden

    def _levels(
        self, own: LanguageBatch, received: Sequence[ReceivedRows]
    ) -> tuple[Tensor, Tensor] | None:
        """The levels of all encoders for a chunk's layers: rows (k, n, H) and their places."""
        levels = join_levels(received)
        if levels is None or not self.whole_rows:
            return levels
        assert self.partition is not None, "language ranks have a partition adapter"
        cut = partial(self.partition.shard_embeddings, packed_seq_params=own.segments)
        batch, length = own.input_ids.shape
        return cut_levels(levels, batch, length, cut)


def _flat_embeddings(
    made: ItemRows,
    bridges: Mapping[Link, BridgeSender] | Mapping[Link, ColocatedBridge],
    microbatches: range,
) -> list[FlatEmbeddings]:
    """The rows that each of an encoder's bridges moves, of all that its tower made.

    made: the tower's rows for ``microbatches``.
    Raises UnexpectedRows when they are not the rows that were planned, item by item.
    """
    link, bridge = next(iter(bridges.items()))  # all bridges of an encoder move the same rows
    runs, first = bridge.runs(microbatches), microbatches.start
    sizes = split_sizes_of(made.rows_per_item, runs, bridge.lane, link.encoder, first)
    try:
        parts = split_levels(made.values, [link.levels for link in bridges])
        return [FlatEmbeddings(part, sizes, made.parts) for part in parts]
    except ValueError as error:
        what = f"encoder {link.encoder}, microbatch {first}: {error}"
        raise UnexpectedRows(what, first) from error
