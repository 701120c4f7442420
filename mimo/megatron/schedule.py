"""Megatron's pipeline schedules, each module on its own pipeline group.

The bridge hides in autograd (DESIGN §5.2), so the schedules run unmodified.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import (
    forward_backward_no_pipelining,
    forward_backward_pipelining_without_interleaving,
)
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import nn

ForwardStep = Callable[[Iterator[Any], nn.Module], tuple[Any, Callable[..., Any]]]


class RunAheadCommunicator(P2PCommunicator):
    """Makes 1F1B run ``run_ahead`` forward passes of an encoder before its first backward.

    The warm-up of 1F1B is ``total_stages - current_stage - 1``. An encoder on one stage pretends
    to be that many stages before the last, because the language model's pipeline behind it
    returns its first gradient only after as many microbatches.
    """

    def __init__(self, pp_group, config, run_ahead: int) -> None:
        super().__init__(pp_group, config)
        self._run_ahead = run_ahead

    @property
    def total_stages(self) -> int:
        """Stages that 1F1B believes in."""
        return self.pp_group.size() + self._run_ahead


def run_schedule(
    forward_step: ForwardStep,
    microbatches: Sequence[Any],
    chunks: Sequence[nn.Module],
    groups: ProcessGroupCollection,
    forward_only: bool = False,
    run_ahead: int | None = None,
) -> list[Any]:
    """Run all microbatches of one module through its pipeline; every rank of the module calls it.

    forward_step: as in Megatron: (iterator, chunk) -> (output, loss function).
    run_ahead: for an encoder, forward passes ahead of its first backward; None for a language
        model.
    Returns what the loss function logged, on the last stage; else an empty list.
    """
    assert len(chunks) == 1, "interleaved schedules need one iterator per chunk"
    config = chunks[0].config
    common: dict[str, Any] = {
        "forward_step_func": forward_step,
        "data_iterator": iter(microbatches),
        "model": chunks[0],
        "num_microbatches": len(microbatches),
        # Lengths vary from microbatch to microbatch; Megatron exchanges shapes itself.
        "seq_length": 0,
        "micro_batch_size": 1,
        "forward_only": forward_only,
        "pg_collection": groups,
    }
    if run_ahead is not None:
        communicator = RunAheadCommunicator(groups.pp, config, run_ahead)
    elif groups.pp.size() == 1:
        return forward_backward_no_pipelining(**common)
    else:
        communicator = P2PCommunicator(groups.pp, config)  # type: ignore[arg-type]
    return forward_backward_pipelining_without_interleaving(p2p_communicator=communicator, **common)
