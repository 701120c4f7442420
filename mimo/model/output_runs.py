"""The forwards and backwards of generators, and the hidden states sent to them.

Disjoint, a generator's rank receives the rows of one microbatch after the other, and returns their
gradient. Colocated, all of that happens inside the forward of the language model's last chunk.

Letters: N rows of a generator's lane, T positions of this rank, H hidden.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bridge import BridgeEnd, ColocatedOutput, OutputReceiver, OutputSender
from mimo.engines.contract import Chunk, Draw, Module
from mimo.parallel.grids import Link
from mimo.spans import SPANS

Draws = Mapping[str, Sequence[Sequence[Draw]]]
"""By generator, the forwards of each microbatch of a step."""


@dataclass
class OutputRuns:
    """This rank's part in generators.

    modules: of this rank. note: called with each activity and its microbatch. senders: of disjoint
    generators, on the language model's last stage. receivers: on their own ranks. colocated: on
    those of the language model. losses: summed over the items of this lane, of the last step.
    """

    modules: Mapping[str, Module]
    note: Callable[[str, int], None]
    senders: dict[Link, OutputSender] = field(default_factory=dict)
    receivers: dict[Link, OutputReceiver] = field(default_factory=dict)
    colocated: dict[Link, ColocatedOutput] = field(default_factory=dict)
    losses: dict[str, float | Tensor] = field(default_factory=dict)

    @property
    def bridges(self) -> dict[Link, OutputSender | OutputReceiver | ColocatedOutput]:
        return {**self.senders, **self.receivers, **self.colocated}

    def run(self, draws: Draws, forward_only: bool) -> None:
        """Run the disjoint generators of this rank; all ranks of each call it."""
        for link, receiver in self.receivers.items():
            for number in range(len(draws[link.module])):
                rows = receiver.receive(number)
                gradient = self._draw(link, draws, number, rows, receiver.end, forward_only)
                receiver.answer(number, gradient)

    def emitter(
        self, draws: Draws, number: int, chunk: Chunk, forward_only: bool
    ) -> Callable[[Tensor], Tensor] | None:
        """Return the argument ``emit`` of a chunk's `run`; None on chunks that feed no generator.

        number: of the microbatch.
        """
        bridges = {**self.senders, **self.colocated}
        if not any(chunk.number in link.chunks for link in bridges):
            return None

        def emit(hidden: Tensor) -> Tensor:
            flat = hidden.transpose(0, 1).flatten(0, 1)  # (T, H)
            tokens = [sender.send(number, flat) for sender in self.senders.values()]
            for link, bridge in self.colocated.items():
                rows = bridge.exchange(number, flat)
                gradient = self._draw(link, draws, number, rows, bridge.end, forward_only)
                tokens.append(bridge.answer(number, gradient, flat))
            return torch.stack(tokens).sum()

        return emit

    def _draw(
        self,
        link: Link,
        draws: Draws,
        number: int,
        rows: Tensor,
        end: BridgeEnd,
        forward_only: bool,
    ) -> Tensor:
        """Run a generator's forwards of a microbatch, and backwards; returns the rows' gradient.

        rows: (N, H) of this lane, without a graph.
        """
        module, of_module = self.modules[link.module], draws[link.module]
        rows = rows.detach().requires_grad_(end.trainable and not forward_only)
        has_backward = (module.trains or end.trainable) and not forward_only
        num_left = sum(map(len, of_module[number + 1 :]))
        self.note(f"forward of {module.name}", number)
        for done, draw in enumerate(of_module[number], 1):
            with torch.set_grad_enabled(has_backward):
                with SPANS.span(module.name, "forward", number=number):
                    losses = module.whole(draw, rows)
                counted = (losses.detach() * draw.counted).sum().double()
                self.losses[module.name] = self.losses.get(module.name, 0.0) + counted
                if has_backward:
                    self.note(f"backward of {module.name}", number)
                    is_last = done == len(of_module[number]) and num_left == 0
                    with SPANS.span(module.name, "backward", number=number):
                        module.learn((losses * draw.weights).sum(), is_last=is_last)
        return torch.zeros_like(rows) if rows.grad is None else rows.grad
