"""Megatron's pipeline schedules, each module on its own pipeline group.

The bridge hides in autograd, so the schedules run unmodified: see docs/parallelism.md.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
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
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from mimo.spans import SPANS

ForwardStep = Callable[[Iterator[Any], nn.Module], tuple[Any, Callable[..., Any]]]

Shape = tuple[int, int, int]


class StageShapes(NamedTuple):
    """Shapes of one microbatch's tensors on a stage, sequence first, as this rank holds them.

    received: from the stage before. sent: to the stage after. Their gradients have the same shapes.
    """

    received: Shape
    sent: Shape


def hidden_shapes(
    config: TransformerConfig, groups: ProcessGroupCollection, length: int, num_sequences: int
) -> StageShapes:
    """Return the shapes of hidden states. length: of a sequence on a context-parallel rank."""
    parts = groups.tp.size() if config.sequence_parallel else 1
    shape = (length // parts, num_sequences, config.hidden_size)
    return StageShapes(shape, shape)


class PlannedCommunicator(P2PCommunicator):
    """Megatron's communicator with planned shapes, so that each tensor is a single message.

    Megatron would exchange shapes before tensors that differ in length, and wait for the whole
    device around each exchange, including the bridge's receives that are posted ahead.

    shapes: of the tensors from the stage before, and of the gradients from the stage after, each in
        the order of arrival.
    run_ahead: further forward passes before the first backward. It adds to the number of stages,
        because the warm-up of 1F1B is ``total_stages - current_stage - 1``.
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
        return self.pp_group.size() + self._run_ahead

    def _communicate(self, *, recv_prev: bool, recv_next: bool, tensor_shape: Any, **others: Any):
        """Fill in the shape. Every method of the base class that receives calls this method."""
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
    shapes: shapes of each microbatch, equal for all chunks; needed with several stages.
    run_ahead: further forward passes before the first backward, of 1F1B even with one stage; None
        for a language model that waits for no generator.
    Returns what the loss function logged on the last stage, else an empty list.
    """
    config = cast("TransformerConfig", chunks[0].config)
    common: dict[str, Any] = {
        "forward_step_func": forward_step,
        "num_microbatches": len(microbatches),
        # `PlannedCommunicator` has the real ones.
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
    arriving = [shape.received for shape in shapes], [shape.sent for shape in shapes]
    communicator = PlannedCommunicator(pipeline, config, arriving, run_ahead or 0)
    return forward_backward_pipelining_without_interleaving(p2p_communicator=communicator, **common)


def _interleaved(
    pipeline: dist.ProcessGroup,
    config: TransformerConfig,
    num_chunks: int,
    shapes: Sequence[StageShapes],
) -> tuple[list[Shape], list[Shape]]:
    """Return shapes of tensors, and of gradients, in the order in which other stages send them.

    All stages run the chunks of microbatches in one order, backward with the chunks reversed. The
    output of the last stage's last chunk is not sent, nor is the first chunk's input gradient.
    """
    order = get_schedule_table(len(shapes), num_chunks, config.microbatch_group_size_per_vp_stage)
    every = [number for number, _ in order]
    passed_on = [number for number, chunk in order if chunk < num_chunks - 1]
    first, last = pipeline.rank() == 0, pipeline.rank() == pipeline.size() - 1
    forward, backward = passed_on if first else every, passed_on if last else every
    return [shapes[m].received for m in forward], [shapes[m].sent for m in backward]


def sum_losses(losses: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Losses (n,) of all loss tokens -> (sum, n, logged sum), fp32 or fp64; n may be 0.

    A sum, not a mean: `MegatronModule.finish_gradients` divides by the global token count.
    """
    total = losses.sum()
    count = torch.full((), losses.numel(), dtype=torch.int, device=losses.device)
    # Megatron may scale the sum in place, so the logged one is a copy.
    return total, count, total.detach().clone()


def pass_token(token: Tensor) -> tuple[Tensor, Tensor, None]:
    """Loss function of an encoder: pass its scalar token to the backward unchanged."""
    return token, torch.zeros((), dtype=torch.int), None
