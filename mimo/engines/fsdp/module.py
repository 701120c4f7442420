"""One module's part on this rank, as FSDP2 and tensor parallelism by DTensor run it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mimo.device import local_device
from mimo.engines.contract import Chunk, Purpose
from mimo.engines.fsdp.context import DP_REPLICATE, FsdpContext, Wrapper
from mimo.engines.fsdp.pieces import Names
from mimo.engines.fsdp.sharding import (
    Held,
    held,
    local_part,
    reduce_gradients,
    reshard,
    stored_dtype,
    sum_over_replicas,
)
from mimo.engines.megatron.groups import ProcessGroupCollection
from mimo.engines.optimizer import (
    MeasuredStep,
    OptimizerSettings,
    advance_average,
    fill_state,
    kept,
    restart_average,
    squared_norm,
    start_average,
    step_of,
    torch_optimizer,
)
from mimo.engines.piece import MASTER, STEP, Piece, key_of
from mimo.ops.attention_plan import LayerForm


@dataclass(frozen=True)
class _Parameter:
    """A parameter of the wrapper.

    key: its name in transformers' memory. whole: as it is registered while it is not gathered.
    own: this rank's rectangle. local: the same memory for the optimizer; None where it is frozen.
    """

    key: str
    whole: nn.Parameter
    own: Held
    local: nn.Parameter | None
    is_summed_over_tp: bool

    def gradient(self) -> Tensor:
        """This rank's part, in its own shape: zeros where no backward came by."""
        if self.whole.grad is None:
            self.whole.grad = torch.zeros_like(self.whole)
        return local_part(self.whole.grad)


class FsdpModule:
    """Implements `mimo.engines.contract.Module`, which says what its methods do.

    wrapper: a `Wrapper`, sharded and with its weights; frozen ones do not require gradients.
    settings: of the optimizer of the others.
    """

    def __init__(
        self,
        name: str,
        groups: ProcessGroupCollection,
        wrapper: nn.Module,
        ctx: FsdpContext,
        names: Names,
        settings: OptimizerSettings,
        learning_rate: float,
        run_ahead: int = 0,
    ) -> None:
        self.name, self.groups, self.whole, self.ctx = name, groups, wrapper, ctx
        self.names, self.learning_rate, self.run_ahead = names, learning_rate, run_ahead
        reshard(wrapper)
        self._parameters = [self._parameter(*named) for named in wrapper.named_parameters()]
        learning = [one.local for one in self._parameters if one.local is not None]
        self.trains = self.has_trainable_params = bool(learning)  # on every rank alike
        self._optimizer, self._ema_decay = None, settings.ema_decay
        if learning:
            assert stored_dtype(ctx).itemsize >= 4, "a module that trains in bf16 needs a mesh"
            self._optimizer = torch_optimizer(learning, settings, learning_rate)
            if settings.ema_decay is not None:
                start_average(self._optimizer)
        self._accumulates = False

    def _parameter(self, name: str, param: nn.Parameter) -> _Parameter:
        wrapper, local = cast("Wrapper", self.whole), None
        if param.requires_grad:
            local = nn.Parameter(local_part(param))
        own, is_summed = held(param, self.ctx.mesh), name in wrapper.sums_over_tp
        return _Parameter(wrapper.hf_names[name], param, own, local, is_summed)

    @property
    def replicas(self) -> dist.ProcessGroup | None:
        """Those of its part, not of the whole: ranks that share out a copy have nothing equal."""
        return None if self.ctx.mesh is None else self.ctx.mesh[DP_REPLICATE].get_group()

    @property
    def sequence_parts(self) -> int:
        """How many ranks the module's output is cut over: 1 without sequence parallelism."""
        tp = self.ctx.tp
        return tp.size() if tp is not None and self.ctx.sequence_parallel else 1

    def attention_forms(self) -> frozenset[LayerForm]:
        """Of the wrapper."""
        return cast("Wrapper", self.whole).attention_forms()

    # ---- one step

    def begin_step(self, forward_only: bool) -> None:
        """Clear gradients, and give up weights that an evaluation has gathered."""
        reshard(self.whole)
        self.whole.train(not forward_only)
        if not forward_only:
            self._reduce(now=True)
            for one in self._parameters:
                one.whole.grad = None

    def run_language(
        self,
        forward: Callable[[int, Chunk], Tensor],
        numbers: Sequence[int],
        sizes: Sequence[tuple[int, int]],
        forward_only: bool,
    ) -> list[Tensor]:
        """One after the other."""
        chunk, logged = Chunk(self.whole), []
        for done, number in enumerate(numbers, 1):
            loss = forward(number, chunk).sum()
            logged.append(loss.detach())
            if not forward_only:
                self._backward(loss, is_last=done == len(numbers))
        return logged

    def run_encoder[T](
        self,
        forward: Callable[[T, nn.Module], Any],
        batches: Sequence[T],
        items: Sequence[Any],
        forward_only: bool,
    ) -> None:
        """After `run_ahead` forward passes, one forward and one backward in turns."""
        waiting: deque[Tensor] = deque()
        for done, batch in enumerate(batches, 1):
            token = forward(batch, self.whole)
            if not forward_only:
                waiting.append(token)
            while len(waiting) > (self.run_ahead if done < len(batches) else 0):
                self._backward(waiting.popleft(), is_last=done == len(batches) and not waiting)

    def encode(self, patches: Any, items: Any) -> Any:
        """One forward of a colocated encoder."""
        return self.whole(patches, items)

    def _backward(self, loss: Tensor, is_last: bool) -> None:
        self._reduce(now=is_last and not self._accumulates)
        loss.backward()

    def _reduce(self, *, now: bool) -> None:
        """Whether the next backward is the step's last, after which gradients are complete."""
        reduce_gradients(self.whole, now=now or self.ctx.reduce_gradients == "microbatch")
        sum_over_replicas(self.whole, now=now)

    @contextmanager
    def accumulate_only(self) -> Iterator[None]:
        """Inside it no backward completes gradients, whoever calls it."""
        self._accumulates = True
        self._reduce(now=False)
        try:
            yield
        finally:
            self._accumulates = False
            self._reduce(now=True)

    def finish_gradients(self, num_loss_tokens: int) -> None:
        """Sum over tp what each of its ranks saw a part of, and divide once.

        FSDP2 has summed over the lanes.
        """
        summed = [gradient for one, gradient in self._gradients() if one.is_summed_over_tp]
        if summed and self.ctx.tp is not None:
            flat = torch.cat([gradient.flatten() for gradient in summed])
            dist.all_reduce(flat, group=self.ctx.tp.get_group())
            parts = flat.split([gradient.numel() for gradient in summed])
            for gradient, part in zip(summed, parts, strict=True):
                gradient.copy_(part.view_as(gradient))
        self._scale(1.0 / max(num_loss_tokens, 1))

    def squared_norm(self) -> Tensor:
        """Of equal copies the first counts."""
        counted = [g for one, g in self._gradients() if one.own.copy == 0 and g.numel()]
        if not counted:
            return torch.zeros((), dtype=torch.float64, device=local_device())
        return squared_norm(counted)

    def update(
        self, learning_rate: float, gradient_factor: float, measured: bool = False
    ) -> Tensor | float:
        """Every rank updates its own part; the next forward gathers."""
        if self._optimizer is None:
            return 0.0
        if gradient_factor != 1.0:
            self._scale(gradient_factor)
        for one, gradient in self._gradients():
            cast("nn.Parameter", one.local).grad = gradient
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        change = 0.0
        if measured:
            counted = {id(one.local) for one in self._parameters if one.own.copy == 0}
            step = MeasuredStep(self._optimizer, lambda param: id(param) in counted)
            step.step()
            change = step.squared_change
        else:
            self._optimizer.step()
        if self._ema_decay is not None:
            advance_average(self._optimizer, self._ema_decay)
        self._optimizer.zero_grad()
        return change

    def _gradients(self) -> list[tuple[_Parameter, Tensor]]:
        return [(one, one.gradient()) for one in self._parameters if one.local is not None]

    def _scale(self, factor: float) -> None:
        gradients = [gradient for _, gradient in self._gradients()]
        if gradients:
            cast("Any", torch)._foreach_mul_(gradients, factor)

    # ---- what it holds

    def tensors(self) -> dict[str, list[Tensor]]:
        """Of all that is sharded, this rank's part."""
        found = {"parameters": [local_part(one.whole) for one in self._parameters]}
        if self._optimizer is not None:
            gradients = [one.whole.grad for one in self._parameters]
            found["gradients"] = [local_part(own) for own in gradients if own is not None]
            states = [own for state in self._optimizer.state.values() for own in state.values()]
            found["optimizer state"] = [own for own in states if isinstance(own, Tensor)]
        return found

    def wait_param_gather(self) -> None:
        """Nothing is on its way."""

    def pieces(self, purpose: Purpose, with_optimizer: bool) -> Iterator[Piece]:
        """Of equal copies one rank writes each, in turns.

        To load an optimizer is to ask for its fp32 weights, where those of the checkpoint are less.
        """
        if with_optimizer and self._optimizer is not None:
            fill_state(self._optimizer)
        for number, one in enumerate(self._parameters):
            if purpose == "save" and number % one.own.copies != one.own.copy:
                continue
            kind, state = None, {}
            if with_optimizer and self._optimizer is not None and one.local is not None:
                kind = MASTER if purpose == "load" else None
                state = kept(self._optimizer, one.local)
            yield from self._named(one, local_part(one.whole), kind)
            for kind, tensor in state.items():
                yield from self._named(one, tensor, kind)
            if state:
                yield from self._steps(one, purpose)

    def _steps(self, one: _Parameter, purpose: Purpose) -> Iterator[Piece]:
        """Of each tensor of the format that a parameter is part of; its first rows write it."""
        assert self._optimizer is not None and one.local is not None
        if (step := step_of(self._optimizer, one.local)) is None:
            return
        for piece in self._named(one, local_part(one.whole), STEP):
            if purpose == "load" or piece.row == piece.column == 0:
                yield replace(piece, shape=(1,), row=0, column=0, values=step.view(1, 1))

    def _named(self, one: _Parameter, local: Tensor, kind: str | None = None) -> Iterator[Piece]:
        """The pieces of a tensor that is cut like a parameter; without a kind, of itself."""
        for piece in self.names.pieces(one.key, replace(one.own, values=one.own.like(local))):
            key = f"{self.name}.{piece.key}"
            yield replace(piece, key=key if kind is None else key_of(kind, key))

    def gradients(self) -> Iterator[Piece]:
        """The complete gradients here, equal copies on each of their ranks."""
        for one, gradient in self._gradients():
            yield from self._named(one, gradient)

    def follow_weights(self) -> None:
        """The optimizer works on the weights themselves; its moving average begins with them."""
        if self._optimizer is not None:
            restart_average(self._optimizer)
