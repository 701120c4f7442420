"""The multimodal model of one rank: only the modules that this rank owns a part of.

Each module runs its own Megatron schedule on its own grid; the bridge is the only thing between
them, hidden in autograd: an encoder's forward ends in `BridgeSender.send`, the language model's
first stage begins with `BridgeReceiver.receive`.

Letters: T packed tokens of this lane, H hidden.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from bridge import BridgeReceiver, BridgeSender, FlatEmbeddings, check_plans
from data.batch import PackedLane
from mimo.alignment import place_rows
from mimo.layout import LANGUAGE
from mimo.loader import EncoderItems
from mimo.loss import masked_sum, pass_token
from mimo.megatron.attention import PackedSegments
from mimo.megatron.groups import ProcessGroupCollection
from mimo.megatron.parallel import MegatronOptimizer, finish_gradients, zero_gradients
from mimo.megatron.schedule import run_schedule
from mimo.step_plan import StepPlan


@dataclass
class Module:
    """One module's part on this rank.

    chunks: the model chunks, wrapped in DDP when the module trains. raw: the same without DDP.
    optimizer: None when the module is frozen.
    """

    name: str
    groups: ProcessGroupCollection
    raw: list[nn.Module]
    chunks: list[nn.Module]
    optimizer: MegatronOptimizer | None
    learning_rate: float

    @property
    def trains(self) -> bool:
        """Whether the module has weights to update."""
        return self.optimizer is not None


@dataclass
class MimoModel:
    """The modules of this rank and its ends of the bridges.

    senders: by encoder, on that encoder's ranks. receivers: by encoder, on the language model's
    first stage. language_trains, encoder_trains: of the whole model, known to every rank.
    """

    modules: dict[str, Module]
    device: torch.device
    senders: dict[str, BridgeSender] = field(default_factory=dict)
    receivers: dict[str, BridgeReceiver] = field(default_factory=dict)

    def run(
        self,
        plan: StepPlan,
        language: Sequence[PackedLane],
        items: Sequence[EncoderItems],
        forward_only: bool = False,
        check: bool = False,
    ) -> float:
        """All microbatches of one step, forward and backward; every rank of the world calls it.

        language: this lane's packed microbatches, on language ranks. items: this lane's items,
        on encoder ranks. check: compare plan digests over the bridge first.
        Returns the summed loss of this lane on tensor-parallel rank 0 of the last language stage,
        else 0. Gradients are complete after `finish_gradients`.
        """
        for module in self.modules.values():
            for chunk in module.chunks:
                chunk.train(not forward_only)
            if module.optimizer is not None and not forward_only:
                zero_gradients(cast("Any", module.chunks), module.optimizer)
        for end in (*self.senders.values(), *self.receivers.values()):
            if check:
                check_plans(end.end, plan.bridges)
            end.begin(plan.bridges, forward_only)
        loss = 0.0
        for name, module in self.modules.items():
            if name == LANGUAGE:
                loss = self._run_language(module, language, forward_only)
            else:
                self._run_encoder(module, items, forward_only)
        for end in (*self.senders.values(), *self.receivers.values()):
            end.finish()
        return loss

    def finish_gradients(self, num_loss_tokens: int) -> None:
        """Complete every module's gradients and divide them once by the global token count."""
        for module in self.modules.values():
            if module.trains:
                finish_gradients(cast("Any", module.chunks), module.groups, num_loss_tokens)

    def _run_encoder(
        self, module: Module, items: Sequence[EncoderItems], forward_only: bool
    ) -> None:
        sender = self.senders[module.name]
        dtype = sender.end.dtype

        def forward_step(batches: Iterator[tuple[int, EncoderItems]], chunk: nn.Module):
            number, own = next(batches)
            patches = torch.from_numpy(own.patches).to(self.device, dtype)
            rows = chunk(patches, torch.from_numpy(own.grids))
            token = sender.send(number, FlatEmbeddings(rows, own.split_sizes))
            return token, pass_token

        with torch.set_grad_enabled(module.trains and not forward_only):
            run_schedule(
                forward_step,
                list(enumerate(items)),
                module.chunks,
                module.groups,
                forward_only=forward_only or not module.trains,
                run_ahead=sender.run_ahead,
            )

    def _run_language(
        self, module: Module, batches: Sequence[PackedLane], forward_only: bool
    ) -> float:
        is_first = module.groups.pp.rank() == 0
        trains = module.trains or any(r.end.trainable for r in self.receivers.values())

        def forward_step(numbered: Iterator[tuple[int, PackedLane]], chunk: nn.Module):
            number, lane = next(numbered)
            ids = self._tensor(lane.input_ids)[None]
            positions = self._tensor(lane.position_ids)[:, None, :]
            hidden = self._embed(module.raw[0], number, ids, positions) if is_first else None
            output = chunk(
                input_ids=ids,
                position_ids=positions,
                attention_mask=None,
                decoder_input=hidden,
                labels=self._tensor(lane.labels)[None],
                packed_seq_params=PackedSegments.from_lengths(lane.lengths, self.device),
            )
            return output, masked_sum(self._tensor(lane.loss_mask)[None])

        with torch.set_grad_enabled(trains and not forward_only):
            logged = run_schedule(
                forward_step,
                list(enumerate(batches)),
                module.chunks,
                module.groups,
                forward_only=forward_only or not trains,
            )
        counts = module.groups.tp.rank() == 0
        return float(torch.stack(logged).sum()) if logged and counts else 0.0

    def _embed(self, gpt: nn.Module, number: int, ids: Tensor, positions: Tensor) -> Tensor:
        """Text embeddings with the rows of all encoders in place: (T, 1, H), or its SP slice."""
        embedding = cast("Any", gpt).embedding
        hidden = embedding(input_ids=ids, position_ids=positions)
        for receiver in self.receivers.values():
            rows, places = receiver.receive(number)
            hidden = place_rows(hidden, rows, places)
        return hidden

    def _tensor(self, array) -> Tensor:
        return torch.from_numpy(array).to(self.device)
