"""The multimodal model of one rank: only the modules that this rank owns a part of.

Disjoint: an encoder's forward ends in `BridgeSender.send`, and that of a language model's chunk
begins with `LevelReceiver.receive`; both are autograd operations. Colocated: the items of a group
of microbatches are encoded in one go, and rows and gradients are exchanged before and after the
language model's run. The last chunk's forward sends hidden states to generators, before its loss.

Letters: B sequences (1 for packed) of S tokens on this lane, N rows, H hidden, k levels.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from bridge import (
    BridgeSender,
    ColocatedBridge,
    LevelReceiver,
    SampleKeys,
    TransferWatch,
    check_plans,
    take_chunk,
)
from data.batch import PackedLane
from mimo.device import Staging, memory_in_use
from mimo.engines.contract import Chunk, Module
from mimo.families.contracts import ItemRules
from mimo.model.decoding import EncoderItems
from mimo.model.inputs import (
    Batch,
    EncoderBatch,
    Inputs,
    LanguageBatch,
    ReceivedRows,
    WholeBatch,
    cut_levels,
    join_levels,
    place_embeddings,
    rows_of_links,
    stage_items,
    stage_lane,
    stage_whole,
)
from mimo.model.output_runs import OutputRuns
from mimo.model.outputs import HostDraw
from mimo.model.step_plan import StepPlan
from mimo.parallel.grids import LANGUAGE, Link
from mimo.parallel.partition import PartitionAdapter
from mimo.spans import SPANS


@dataclass
class MimoModel:
    """The modules of this rank and its ends of the bridges.

    num_tokens: that the language model knows; later rows of its embedding are padding. partition:
    cuts sequences, on language ranks. senders: of disjoint encoders, on their last stage.
    receivers: of disjoint encoders, on stages of the language model that need their rows.
    encode_group: microbatches that colocated encoders encode in one go; None for all.
    router_size: shape of the sums of `Module.add_router_sums`.
    outputs: what this rank does for generators. query_media: by generator with queries, the
    modality of its items.
    passes_gradients: whether anything trains before the language model, on any rank: gradients then
    pass through all of its stages, frozen or not.
    watch: watches transfers on a device where waiting does not block the host.
    takes_rows: whether the language model takes rows itself, as models of transformers do.
    whole_rows: with `delivery: replicated`, all rows of the lane arrive and are placed in whole
    sequences, which are cut afterwards.
    doing: the current activity of this rank's modules, and its microbatch; None outside of `run`.
    squared_changes: by module, this rank's share of the last update's squared change of weights,
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
    query_media: dict[str, str] = field(default_factory=dict)
    passes_gradients: bool = False
    watch: TransferWatch | None = None
    router_size: tuple[int, int] = (0, 4)
    partition: PartitionAdapter | None = None
    whole_rows: bool = False
    takes_rows: bool = False
    squared_changes: dict[str, float | Tensor] = field(default_factory=dict)
    doing: tuple[str, int] | None = None
    describe_batch: Callable[[int | None], str] = lambda microbatch: ""

    def __post_init__(self) -> None:
        self.outputs = OutputRuns(self.modules, self._note)

    def stage(
        self,
        plan: StepPlan,
        lanes: Sequence[PackedLane],
        items: Mapping[str, Sequence[EncoderItems]],
        draws: Mapping[str, Sequence[Sequence[HostDraw]]],
        staging: Staging,
    ) -> Inputs:
        """Copy the inputs of one `run` to the device; for a thread in the background.

        lanes: the microbatches of this lane, on language ranks. items: by encoder of this rank, the
        items of its lane, microbatch by microbatch. draws: likewise the forwards of generators.
        """
        for link, bridge in self._bridges().items():
            gather = bridge.encoder_gather if isinstance(bridge, ColocatedBridge) else None
            for planned in plan.bridges[link]:
                bridge.end.stage(planned, staging.copy, gather)
        language = self._stage_lanes(lanes, staging) if lanes else []
        encoders = {}
        for name, microbatches in items.items():
            count, tower = len(microbatches), self.modules[name].whole
            size = self._group_size(count) if self._colocated_bridges(name) else 1
            groups = (microbatches[start : start + size] for start in range(0, count, size))
            encoders[name] = [stage_items(group, tower, staging) for group in groups]
        generators = {
            name: [[draw.staged(staging) for draw in of_microbatch] for of_microbatch in host]
            for name, host in draws.items()
        }
        return Inputs(language, encoders, generators)

    def _stage_lanes(self, lanes: Sequence[PackedLane], staging: Staging) -> list[Batch]:
        module = self.modules[LANGUAGE]
        if self.takes_rows:
            return [stage_whole(lane, module.whole, staging) for lane in lanes]
        assert self.partition is not None, "language ranks have a partition adapter"
        rules, partition, whole_rows = self.item_rules, self.partition, self.whole_rows
        forms, queries = module.attention_forms(), self.query_media
        return [
            stage_lane(lane, rules, partition, whole_rows, forms, staging, queries)
            for lane in lanes
        ]

    def run(
        self,
        plan: StepPlan,
        inputs: Inputs,
        forward_only: bool = False,
        check: bool = False,
        sample_keys: SampleKeys | None = None,
    ) -> dict[str, float | Tensor]:
        """Run all microbatches of one step, forward and backward; every rank of the world calls it.

        inputs: from `stage`. check: compare plan digests over the bridge first, and with
        ``sample_keys`` also the samples of each microbatch.
        Returns the summed losses by module: of the language model those of this lane's tokens, on
        tensor-parallel rank 0 of the last stage; of a generator those of this lane's items; else
        nothing. Numbers () in fp64 on the device, for which the host has not waited. Gradients are
        complete after `finish_gradients`.
        """
        for module in self.modules.values():
            module.begin_step(forward_only, plan.num_loss_tokens / max(plan.num_tokens, 1))
        bridges = self._bridges()
        for link, bridge in bridges.items():
            plans = plan.bridges[link]
            if check:
                check_plans(bridge.end, plans, sample_keys)
            bridge.end.begin_step()
            bridge.begin(plans, forward_only)
        self.outputs.losses, losses = {}, dict[str, float | Tensor]()
        for name, module in self.modules.items():
            if name == LANGUAGE:
                losses[name] = self._run_groups(module, inputs, forward_only)
            elif name in inputs.items and not self._colocated_bridges(name):
                self._run_encoder(module, inputs.items[name], forward_only)
        self.outputs.run(inputs.draws, forward_only)
        for bridge in bridges.values():
            bridge.finish()
        self.doing = None
        return losses | self.outputs.losses

    def finish_gradients(self, num_loss_tokens: int) -> None:
        """Complete every module's gradients and divide them once by the global token count."""
        for name, module in self.modules.items():
            with SPANS.span(name, "gradients"):
                module.finish_gradients(num_loss_tokens)

    def memory(self) -> dict[str, dict[str, int]]:
        """Return bytes by module and kind, shared memory once, and those of the process."""
        counted, sizes = set[int](), dict[str, dict[str, int]]()
        for name, module in self.modules.items():
            sizes[name] = {}
            for kind, tensors in module.tensors().items():
                storages = [tensor.untyped_storage() for tensor in tensors]
                new = {storage.data_ptr(): storage.nbytes() for storage in storages}
                sizes[name][kind] = sum(size for at, size in new.items() if at not in counted)
                counted |= new.keys()
        return {**sizes, "process": memory_in_use()}

    def router_sums(self) -> Tensor:
        """Return this rank's share of `Module.add_router_sums`, flattened."""
        total = torch.zeros(self.router_size, dtype=torch.float64, device=self.device)
        if (language := self.modules.get(LANGUAGE)) is not None:
            language.add_router_sums(total)
        return total.flatten()

    def take_waited_seconds(self) -> float:
        """Return the seconds that the host waited for transfers since the last call."""
        return sum(bridge.end.clock.take_seconds() for bridge in self._bridges().values())

    def bridge_bytes(self, plan: StepPlan) -> dict[tuple[str, str], int]:
        """Return bytes sent, and their lower bound, by column and edge like `vision_forward`."""
        sizes = Counter[tuple[str, str]]()
        for link, bridge in self._bridges().items():
            end, name = bridge.end, link.module
            at_other_end = link in self.receivers or link in self.outputs.senders
            least = 0 if at_other_end else end.least_bytes(plan.bridges[link])
            sizes["sent", f"{name}_forward"] += end.clock.sent_bytes["rows"]
            sizes["sent", f"{name}_backward"] += end.clock.sent_bytes["gradients"]
            sizes["least", f"{name}_forward"] += least
            sizes["least", f"{name}_backward"] += least * end.trainable
        return sizes

    def _bridges(self) -> dict[Link, Any]:
        """Return all bridge ends, which have `begin`, `finish` and ``end``."""
        return {**self.senders, **self.receivers, **self.colocated, **self.outputs.bridges}

    def _note(self, activity: str, microbatch: int) -> None:
        self.doing = activity, microbatch

    def _note_backward(self, output: Tensor, part: str, microbatch: int) -> Tensor:
        """Return ``output``, whose backward first notes in `doing` that it began."""

        def note(gradient: Tensor) -> None:
            self.doing = f"backward of {part}", microbatch

        if output.requires_grad:
            output.register_hook(note)
        return output

    # ------------------------------------------------------------ disjoint encoders

    def _run_encoder(
        self, module: Module, batches: Sequence[EncoderBatch], forward_only: bool
    ) -> None:
        # Only the last stage has any.
        senders = {link: s for link, s in self.senders.items() if link.module == module.name}
        part = f"{module.name}, stage {module.groups.pp.rank()}"

        def forward(numbered: tuple[int, EncoderBatch], tower: nn.Module):
            number, batch = numbered
            self.doing = f"forward of {part}", number
            with SPANS.span(module.name, "encode", number=number):
                output = tower(batch.patches, batch.items)
                if senders:
                    rows = rows_of_links(output, senders, number)
                    pairs = zip(senders.values(), rows, strict=True)
                    tokens = [sender.send(number, part_of_rows) for sender, part_of_rows in pairs]
                    output = torch.stack(tokens).sum()  # its backward reaches every link
            return self._note_backward(output, part, number)

        has_backward = module.trains and not forward_only
        # The span holds what the spans inside leave over: backward, or a wait inside of it.
        with torch.set_grad_enabled(has_backward), SPANS.span(module.name, "backward"):
            items = [batch.items for batch in batches]
            module.run_encoder(forward, list(enumerate(batches)), items, not has_backward)

    # --------------------------------------------- language model, colocated encoders

    def _run_groups(self, module: Module, inputs: Inputs, forward_only: bool) -> float | Tensor:
        batches, items = inputs.language, inputs.items
        size = self._group_size(len(batches))
        encoders = list(dict.fromkeys(link.module for link in self.colocated))
        loss: float | Tensor = 0.0
        for start in range(0, len(batches), size):
            group = range(start, min(start + size, len(batches)))
            with ExitStack() as stack:
                # Only the last group of microbatches reduces gradients.
                if group.stop < len(batches) and not forward_only:
                    for name in {*encoders, LANGUAGE}:  # generators know their last forward
                        stack.enter_context(self.modules[name].accumulate_only())
                rows = {
                    name: self._encode(name, items[name][start // size], group, forward_only)
                    for name in encoders
                }
                loss += self._run_language(module, inputs, group, forward_only)
                for name, parts in rows.items():
                    if self.modules[name].trains and not forward_only:
                        self.doing = f"backward of {name}", start
                        with SPANS.span(name, "backward"):
                            bridges = self._colocated_bridges(name).values()
                            gradients = [bridge.collect(group) for bridge in bridges]
                            torch.autograd.backward(parts, gradients)
        return loss

    def _group_size(self, num_microbatches: int) -> int:
        """Return the microbatches that are encoded, and run by the language model, in one go."""
        if self.colocated and self.encode_group is not None:
            return self.encode_group
        return num_microbatches

    def _colocated_bridges(self, encoder: str) -> dict[Link, ColocatedBridge]:
        return {link: b for link, b in self.colocated.items() if link.module == encoder}

    def _encode(
        self, name: str, batch: EncoderBatch, group: range, forward_only: bool
    ) -> list[Tensor]:
        """Encode a group's items and deliver the rows; return those (N, k·H) of each bridge."""
        module, bridges = self.modules[name], self._colocated_bridges(name)
        self.doing = f"forward of {name}", group.start
        with SPANS.span(name, "encode"):
            with torch.set_grad_enabled(module.trains and not forward_only):
                output = module.encode(batch.patches, batch.items)
                rows = rows_of_links(output, bridges, group.start)
            for bridge, part_of_rows in zip(bridges.values(), rows, strict=True):
                bridge.deliver(group, part_of_rows)
            return [part_of_rows.values for part_of_rows in rows]

    def _run_language(
        self, module: Module, inputs: Inputs, group: range, forward_only: bool
    ) -> float | Tensor:
        batches, stage = inputs.language, module.groups.pp.rank()

        def forward(number: int, chunk: Chunk) -> Tensor:
            batch = batches[number]
            part = f"{LANGUAGE}, stage {stage}, chunk {chunk.number}"
            self.doing = f"forward of {part}", number
            with SPANS.span(module.name, "forward", number=number):
                received = self._receive(chunk, number)
                if isinstance(batch, WholeBatch):
                    output = chunk.run(inputs=batch.inputs, rows=self._rows_of(received))
                    return self._note_backward(output, part, number)
                output = chunk.run(
                    input_ids=batch.input_ids,
                    position_ids=batch.position_ids,
                    labels=batch.labels,
                    loss_at=batch.loss_at,
                    packed_seq_params=batch.segments,
                    place=partial(self.place, batch, received) if chunk.is_first else None,
                    levels=self.levels(batch, received),
                    emit=self.outputs.emitter(inputs.draws, number, chunk, forward_only),
                )
            return self._note_backward(output, part, number)

        sizes = [batches[number].size for number in group]
        has_backward = (module.trains or self.passes_gradients) and not forward_only
        with torch.set_grad_enabled(has_backward), SPANS.span(module.name, "backward"):
            losses = module.run_language(forward, list(group), sizes, not has_backward)
        if not losses or module.groups.tp.rank() != 0:
            return 0.0
        return torch.stack(losses).sum().double()

    def _receive(self, chunk: Chunk, number: int) -> list[ReceivedRows]:
        pairs = [
            receiver.receive(number, chunk.number)
            for link, receiver in self.receivers.items()
            if chunk.number in link.chunks
        ]
        for link, bridge in self.colocated.items():
            if bridge.receives and chunk.number in link.chunks:
                rows, places = bridge.receive(number)
                pairs.append((take_chunk(rows, link.chunks, chunk.number), places))
        size, first = self.hidden_size, chunk.is_first
        return [ReceivedRows.of(rows, at, size, has_embeddings=first) for rows, at in pairs]

    def _rows_of(self, received: Sequence[ReceivedRows]) -> dict[str, Tensor]:
        """Return the rows (N, (1 + k)·H) of each encoder, for a model that takes them itself."""
        encoders = [link.module for link in (*self.receivers, *self.colocated)]
        return dict(zip(encoders, (rows.side_by_side for rows in received), strict=True))

    def _cut(self, batch: LanguageBatch, hidden: Tensor) -> Tensor:
        assert self.partition is not None, "language ranks have a partition adapter"
        return self.partition.shard_embeddings(hidden, batch.segments)

    def place(
        self,
        batch: LanguageBatch,
        received: Sequence[ReceivedRows],
        text: Tensor,
        queries: Mapping[str, Tensor],
    ) -> Tensor:
        """Place the rows of all encoders, and queries, in text embeddings; returns (S', B, H)."""
        hidden = place_embeddings(text, queries, received, batch.queries)
        return self._cut(batch, hidden) if self.whole_rows else hidden

    def levels(
        self, batch: LanguageBatch, received: Sequence[ReceivedRows]
    ) -> tuple[Tensor, Tensor] | None:
        """Return the levels of all encoders for a chunk's layers: rows (k, n, H) and places."""
        levels = join_levels(received)
        if levels is None or not self.whole_rows:
            return levels
        size, length = batch.input_ids.shape
        return cut_levels(levels, size, length, partial(self._cut, batch))
