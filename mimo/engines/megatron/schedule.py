"""Megatron's pipeline schedules, each module on its own pipeline group.

The bridge hides in autograd, so the schedules run unmodified: see docs/parallelism.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import (
    forward_backward_no_pipelining,
    forward_backward_pipelining_with_interleaving,
    forward_backward_pipelining_without_interleaving,
)
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import nn

ForwardStep = Callable[[Iterator[Any], nn.Module], tuple[Any, Callable[..., Any]]]


class RunAheadCommunicator(P2PCommunicator):
    """Makes 1F1B run ``run_ahead`` forward passes of an encoder before its first backward.

    The warm-up of 1F1B is ``total_stages - current_stage - 1``. An encoder on one stage pretends
    to be that many stages before the last, because the language model's pipeline after it
    returns its first gradient only after that many microbatches.
    """

    def __init__(self, pp_group, config, run_ahead: int) -> None:
        super().__init__(pp_group, config)
        self._run_ahead = run_ahead

    @property
    def total_stages(self) -> int:
        """The number of stages that 1F1B is told."""
        return self.pp_group.size() + self._run_ahead


def run_schedule(
    forward_step: ForwardStep,
    microbatches: Sequence[Any],
    chunks: Sequence[nn.Module],
    groups: ProcessGroupCollection,
    forward_only: bool = False,
    run_ahead: int | None = None,
    sequence_length: int = 0,
    num_sequences: int = 1,
) -> list[Any]:
    """Run all microbatches of one module through its pipeline; every rank of the module calls it.

    forward_step: as in Megatron: (iterator, chunk) -> (output, loss function).
    run_ahead: for an encoder, forward passes before its first backward; None for a language
        model.
    sequence_length, num_sequences: S and B of every microbatch, not cut; used with an interleaved
        pipeline only. Elsewhere lengths vary and Megatron exchanges shapes itself.
    Returns what the loss function logged, on the last stage; else an empty list.
    """
    config = chunks[0].config
    common: dict[str, Any] = {
        "forward_step_func": forward_step,
        "num_microbatches": len(microbatches),
        "seq_length": sequence_length,
        "micro_batch_size": num_sequences,
        "forward_only": forward_only,
        "pg_collection": groups,
    }
    if len(chunks) > 1:
        return forward_backward_pipelining_with_interleaving(
            data_iterator=[iter(microbatches) for _ in chunks],
            model=list(chunks),
            p2p_communicator=P2PCommunicator(groups.pp, config),  # type: ignore[arg-type]
            **common,
        )
    common |= {"data_iterator": iter(microbatches), "model": chunks[0]}
    if run_ahead is not None:
        communicator = RunAheadCommunicator(groups.pp, config, run_ahead)
    elif groups.pp.size() == 1:
        return forward_backward_no_pipelining(**common)
    else:
        communicator = P2PCommunicator(groups.pp, config)  # type: ignore[arg-type]
    return forward_backward_pipelining_without_interleaving(p2p_communicator=communicator, **common)


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
