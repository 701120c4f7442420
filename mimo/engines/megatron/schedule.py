"""Megatron's pipeline schedules, each module on its own pipeline group.

The bridge hides in autograd, so the schedules run unmodified: see docs/parallelism.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import (
    forward_backward_no_pipelining,
    forward_backward_pipelining_with_interleaving,
    forward_backward_pipelining_without_interleaving,
    get_schedule_table,
)
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from mimo.spans import SPANS

ForwardStep = Callable[[Iterator[Any], nn.Module], tuple[Any, Callable[..., Any]]]

Shape = tuple[int, int, int]


class StageShapes(NamedTuple):
    """Shapes of one microbatch's tensors on a stage, sequence first and cut as this rank has them.

    received: from the stage before; its gradient goes back there. sent: to the stage after; its
    gradient comes back from there.
    """

    received: Shape
    sent: Shape


def hidden_shapes(
    config: TransformerConfig, groups: ProcessGroupCollection, length: int, num_sequences: int
) -> StageShapes:
    """Shapes of hidden states of ``num_sequences`` sequences.

    length: tokens of each that this context-parallel rank has.
    """
    parts = groups.tp.size() if config.sequence_parallel else 1
    shape = (length // parts, num_sequences, config.hidden_size)
    return StageShapes(shape, shape)


class PlannedCommunicator(P2PCommunicator):
    """Knows the shape of every tensor beforehand, so each of them is a single message.

    Megatron would exchange shapes before tensors that differ in length, and wait for the whole
    device around each exchange, receives of the bridge that are posted ahead included.

    shapes: of the tensors that come from the stage before, and of the gradients that come from
        the stage after, each in the order of their arrival.
    run_ahead: forward passes of an encoder before its first backward: it pretends to be so many
        stages before the last, because the warm-up of 1F1B is ``total_stages - current_stage - 1``.
    """

    def __init__(
        self,
        pp_group: dist.ProcessGroup,
        config: ModelParallelConfig,
        shapes: tuple[Iterable[Shape], Iterable[Shape]],
        run_ahead: int = 0,
    ) -> None:
        assert not config.variable_seq_lengths, "shapes are planned, not exchanged"
        super().__init__(pp_group, config)
        self._forward, self._backward = map(iter, shapes)
        self._run_ahead = run_ahead

    @property
    def total_stages(self) -> int:
        """The number of stages that 1F1B is told."""
        return self.pp_group.size() + self._run_ahead

    def _communicate(self, *, recv_prev: bool, recv_next: bool, tensor_shape: Any, **others: Any):
        """Every method of the base class that receives anything comes through here."""
        assert not (recv_prev and recv_next), "one call receives in one direction"
        if recv_prev or recv_next:
            tensor_shape = next(self._forward if recv_prev else self._backward)
        with SPANS.wait("pipeline_wait"):
            return super()._communicate(
                recv_prev=recv_prev, recv_next=recv_next, tensor_shape=tensor_shape, **others
            )


def run_schedule(
    forward_step: ForwardStep,
    microbatches: Sequence[Any],
    chunks: Sequence[nn.Module],
    groups: ProcessGroupCollection,
    shapes: Sequence[StageShapes] = (),
    forward_only: bool = False,
    run_ahead: int | None = None,
) -> list[Any]:
    """Run all microbatches of one module through its pipeline; every rank of the module calls it.

    forward_step: as in Megatron: (iterator, chunk) -> (output, loss function).
    shapes: of each microbatch, the same for all chunks; needed with several stages.
    run_ahead: for an encoder, forward passes before its first backward; None for a language
        model.
    Returns what the loss function logged, on the last stage; else an empty list.
    """
    config = cast("TransformerConfig", chunks[0].config)
    common: dict[str, Any] = {
        "forward_step_func": forward_step,
        "num_microbatches": len(microbatches),
        # The communicator knows them.
        "seq_length": 0,
        "micro_batch_size": 0,
        "forward_only": forward_only,
        "pg_collection": groups,
    }
    pipeline = cast("dist.ProcessGroup", groups.pp)
    assert pipeline.size() == 1 or len(shapes) == len(microbatches), "a microbatch without shapes"
    if len(chunks) > 1:
        arriving = _interleaved(pipeline, config, len(chunks), shapes)
        return forward_backward_pipelining_with_interleaving(
            data_iterator=[iter(microbatches) for _ in chunks],
            model=list(chunks),
            p2p_communicator=PlannedCommunicator(pipeline, config, arriving),
            **common,
        )
    common |= {"data_iterator": iter(microbatches), "model": chunks[0]}
    if run_ahead is None and pipeline.size() == 1:
        return forward_backward_no_pipelining(**common)
    arriving = [one.received for one in shapes], [one.sent for one in shapes]
    communicator = PlannedCommunicator(pipeline, config, arriving, run_ahead or 0)
    return forward_backward_pipelining_without_interleaving(p2p_communicator=communicator, **common)


def _interleaved(
    pipeline: dist.ProcessGroup,
    config: TransformerConfig,
    num_chunks: int,
    shapes: Sequence[StageShapes],
) -> tuple[list[Shape], list[Shape]]:
    """Shapes of tensors, and of gradients, in the order in which other stages send them.

    All stages run the chunks of microbatches in one order, backward with the chunks reversed. What
    the last stage's last chunk makes goes nowhere, nor do gradients from the first stage's first.
    """
    order = get_schedule_table(len(shapes), num_chunks, config.microbatch_group_size_per_vp_stage)
    every = [number for number, _ in order]
    passed_on = [number for number, chunk in order if chunk < num_chunks - 1]
    first, last = pipeline.rank() == 0, pipeline.rank() == pipeline.size() - 1
    forward, backward = passed_on if first else every, passed_on if last else every
    return [shapes[m].received for m in forward], [shapes[m].sent for m in backward]


@contextmanager
def accumulate_only(chunks: Sequence[nn.Module]) -> Iterator[None]:
    """Keep DDP from reducing gradients: for groups of microbatches before a step's last one.

    A schedule switches the reduction on for the last microbatch that it sees, so its switch is
    taken away.
    """
    switches = [(chunk.config, chunk.config.no_sync_func) for chunk in chunks]  # type: ignore[union-attr]
    with ExitStack() as stack:
        for chunk in chunks:
            stack.enter_context(chunk.no_sync())  # type: ignore[operator]
        for config, _ in switches:
            config.no_sync_func = None  # type: ignore[union-attr]
        try:
            yield
        finally:
            for config, switch in switches:
                config.no_sync_func = switch  # type: ignore[union-attr]


def begin_step(chunks: Sequence[nn.Module]) -> None:
    """Mark the next microbatch as the first of its step, and keep schedules from marking others.

    With ``train.fp8`` the mark makes Transformer Engine's linears quantize their weights anew and
    *overwrite* DDP's sum with their next weight gradient. A schedule sets it in every call, and
    one step may have several calls or, in a colocated encoder, none.
    """
    for chunk in chunks:
        if isinstance(chunk, MegatronModule):  # others have no such linears
            type(chunk).set_is_first_microbatch(chunk)
            cast("Any", chunk).set_is_first_microbatch = _do_nothing


def _do_nothing() -> None:
    pass


def sum_losses(losses: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Losses (n,) of all tokens that have one -> (sum, n, logged sum); n may be 0.

    In the dtype of the losses, fp32 or fp64. A sum, not a mean: the division by the global token
    count happens once, after the step.
    """
    total = losses.sum()
    count = torch.full((), losses.numel(), dtype=torch.int, device=losses.device)
    # Megatron may scale what it differentiates in place, so the log is a copy.
    return total, count, total.detach().clone()


def pass_token(token: Tensor) -> tuple[Tensor, Tensor, None]:
    """An encoder's loss function: its scalar token goes to the backward as it is."""
    return token, torch.zeros((), dtype=torch.int), None
