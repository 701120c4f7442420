"""One module's part on this rank, as FSDP2 and tensor parallelism by DTensor run it."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from mimo.device import local_device
from mimo.engines.contract import MASTER, STEP, Chunk, Piece, Purpose, key_of
from mimo.engines.fsdp.context import DP_REPLICATE, FsdpContext, Wrapper
from mimo.engines.fsdp.sharding import (
    Names,
    Rectangle,
    local_part,
    local_rectangle,
    reduce_gradients,
    reshard,
)
from mimo.engines.megatron.config import ProcessGroupCollection
from mimo.engines.optimizer import (
    OptimizerSettings,
    fill_state,
    restart_average,
    squared_norm,
    start_average,
    state_tensors,
    step_of,
    torch_optimizer,
    update_weights,
)
from mimo.ops.attention_plan import LayerForm


@dataclass(frozen=True)
class _Parameter:
    """A parameter of the wrapper.

    key: its name in transformers' memory. whole: the sharded parameter. part: this rank's
    rectangle. local: the same memory for the optimizer; None if it is frozen.
    """

    key: str
    whole: nn.Parameter
    part: Rectangle
    local: nn.Parameter | None

    def gradient(self) -> Tensor:
        """This rank's part of the gradient; zeros where no backward gave one."""
        if self.whole.grad is None:
            self.whole.grad = torch.zeros_like(self.whole)
        return local_part(self.whole.grad)


class FsdpModule:
    """Implements `mimo.engines.contract.Module`, which documents the methods.

    wrapper: a `Wrapper`, sharded and with its weights; frozen ones do not require gradients.
    settings: of the optimizer; None for a module that is not updated.
    """

    def __init__(
        self,
        name: str,
        groups: ProcessGroupCollection,
        wrapper: nn.Module,
        ctx: FsdpContext,
        names: Names,
        settings: OptimizerSettings | None,
        learning_rate: float,
        run_ahead: int = 0,
    ) -> None:
        self.name, self.groups, self.whole, self.ctx = name, groups, wrapper, ctx
        self.names, self.run_ahead = names, run_ahead
        reshard(wrapper)
        self._parameters = [self._parameter(*named) for named in wrapper.named_parameters()]
        self._trained = [param for param in self._parameters if param.local is not None]
        self.trains = self.has_trainable_params = bool(self._trained)  # equal on all ranks
        self._optimizer, self._ema_decay = None, settings and settings.ema_decay
        if self._trained and settings is not None:
            assert ctx.stored_dtype.itemsize >= 4, "a module that trains in bf16 needs a mesh"
            weights = [(param.key, cast("nn.Parameter", param.local)) for param in self._trained]
            self._optimizer = torch_optimizer(weights, settings, learning_rate)
            if settings.ema_decay is not None:
                start_average(self._optimizer)
        self._accumulates = False

    def _parameter(self, name: str, param: nn.Parameter) -> _Parameter:
        key = cast("Wrapper", self.whole).hf_names[name]
        local = nn.Parameter(local_part(param)) if param.requires_grad else None
        return _Parameter(key, param, local_rectangle(param, self.ctx.mesh), local)

    @property
    def replicas(self) -> ProcessGroup | None:
        """The ranks with equal parts, not those that share one copy."""
        return None if self.ctx.mesh is None else self.ctx.mesh[DP_REPLICATE].get_group()

    @property
    def sequence_parts(self) -> int:
        tp = self.ctx.tp
        return tp.size() if tp is not None and self.ctx.sequence_parallel else 1

    def attention_forms(self) -> frozenset[LayerForm]:
        return cast("Wrapper", self.whole).attention_forms()

    def begin_step(self, forward_only: bool, loss_token_share: float = 0.0) -> None:
        """Clear gradients, and free weights that an evaluation has gathered."""
        reshard(self.whole)
        self.whole.train(not forward_only)
        if not forward_only:
            self._reduce(now=True)
            for param in self._parameters:
                param.whole.grad = None

    def run_language(
        self,
        forward: Callable[[int, Chunk], Tensor],
        numbers: Sequence[int],
        sizes: Sequence[tuple[int, int]],
        forward_only: bool,
    ) -> list[Tensor]:
        chunk, logged = Chunk(self.whole), list[Tensor]()

        def forward_sum(number: int) -> Tensor:
            loss = forward(number, chunk).sum()
            logged.append(loss.detach())
            return loss

        self._run(forward_sum, numbers, forward_only)
        return logged

    def run_encoder[T](
        self,
        forward: Callable[[T, nn.Module], Any],
        batches: Sequence[T],
        items: Sequence[Any],
        forward_only: bool,
    ) -> None:
        self._run(lambda batch: forward(batch, self.whole), batches, forward_only)

    def _run[T](
        self, forward: Callable[[T], Tensor], batches: Sequence[T], forward_only: bool
    ) -> None:
        """Run forward, `run_ahead` batches ahead, and backward."""
        waiting: deque[Tensor] = deque()
        for done, batch in enumerate(batches, 1):
            loss = forward(batch)
            if not forward_only:
                waiting.append(loss)
            while len(waiting) > (self.run_ahead if done < len(batches) else 0):
                self.learn(waiting.popleft(), is_last=done == len(batches) and not waiting)

    def encode(self, patches: Any, items: Any) -> Any:
        return self.whole(patches, items)

    def learn(self, loss: Tensor, *, is_last: bool) -> None:
        self._reduce(now=is_last and not self._accumulates)
        loss.backward()

    def _reduce(self, *, now: bool) -> None:
        """Set whether the next backward is the step's last, which completes gradients."""
        always = self.ctx.reduce_gradients == "microbatch"
        reduce_gradients(self.whole, now=now or always, over_replicas=now)

    @contextmanager
    def accumulate_only(self) -> Iterator[None]:
        self._accumulates = True
        self._reduce(now=False)
        try:
            yield
        finally:
            self._accumulates = False
            self._reduce(now=True)

    def finish_gradients(self, num_loss_tokens: int) -> None:
        """Divide once by the number of tokens; FSDP2 has summed over the lanes, and over tp."""
        self._scale(1.0 / max(num_loss_tokens, 1))

    def squared_norm(self) -> Tensor:
        """Return this rank's share of the squared norm; of equal copies only the first counts."""
        counted = [g for param, g in self._gradients() if param.part.copy == 0 and g.numel()]
        if not counted:
            return torch.zeros((), dtype=torch.float64, device=local_device())
        return squared_norm(counted)

    def update(
        self, learning_rate: float, gradient_factor: float, measured: bool = False
    ) -> Tensor | float:
        optimizer = self._optimizer
        if optimizer is None:
            return 0.0
        if gradient_factor != 1.0:
            self._scale(gradient_factor)
        for param, gradient in self._gradients():
            cast("nn.Parameter", param.local).grad = gradient
        counted = (id(param.local) for param in self._parameters if param.part.copy == 0)
        change = update_weights(
            optimizer,
            lambda: optimizer.step(),
            learning_rate,
            self._ema_decay,
            set(counted) if measured else None,
        )
        optimizer.zero_grad()
        return change

    def _gradients(self) -> list[tuple[_Parameter, Tensor]]:
        return [(param, param.gradient()) for param in self._trained]

    def _scale(self, factor: float) -> None:
        gradients = [gradient for _, gradient in self._gradients()]
        if gradients:
            cast("Any", torch)._foreach_mul_(gradients, factor)

    def add_router_sums(self, total: Tensor) -> None:
        """Return at once: routers of transformers' modules are not watched."""

    def tensors(self) -> dict[str, list[Tensor]]:
        kinds = {"parameters": [local_part(param.whole) for param in self._parameters]}
        if self._optimizer is not None:
            gradients = [param.whole.grad for param in self._parameters]
            kinds["gradients"] = [local_part(grad) for grad in gradients if grad is not None]
            states = [value for state in self._optimizer.state.values() for value in state.values()]
            kinds["optimizer state"] = [value for value in states if isinstance(value, Tensor)]
        return kinds

    def wait_param_gather(self) -> None:
        """Return at once: `update` gathers nothing."""

    def pieces(self, purpose: Purpose, with_optimizer: bool) -> Iterator[Piece]:
        """The pieces to save or load; the ranks with equal copies save parameters in turns.

        With an optimizer, weights are loaded from the checkpoint's fp32 masters if it has any.
        """
        if with_optimizer and self._optimizer is not None:
            fill_state(self._optimizer)
        for number, param in enumerate(self._parameters):
            if purpose == "save" and number % param.part.copies != param.part.copy:
                continue
            kind, state = None, {}
            if with_optimizer and self._optimizer is not None and param.local is not None:
                kind = MASTER if purpose == "load" else None
                state = state_tensors(self._optimizer, param.local)
            yield from self._named(param, local_part(param.whole), kind)
            for kind, tensor in state.items():
                yield from self._named(param, tensor, kind)
            if state:
                yield from self._steps(param, purpose)

    def _steps(self, param: _Parameter, purpose: Purpose) -> Iterator[Piece]:
        """The step count of each tensor with rows of a parameter; the first rows' rank saves it."""
        assert self._optimizer is not None and param.local is not None
        if (step := step_of(self._optimizer, param.local)) is None:
            return
        for piece in self._named(param, local_part(param.whole), STEP):
            if purpose == "load" or piece.row == piece.column == 0:
                yield replace(piece, shape=(1,), row=0, column=0, values=step.view(1, 1))

    def _named(self, param: _Parameter, local: Tensor, kind: str | None = None) -> Iterator[Piece]:
        """The pieces of a tensor sharded like a parameter. kind: None for the parameter itself."""
        rectangle = replace(param.part, values=param.part.like(local))
        for piece in self.names.pieces(param.key, rectangle):
            key = f"{self.name}.{piece.key}"
            yield replace(piece, key=key if kind is None else key_of(kind, key))

    def gradients(self) -> Iterator[Piece]:
        """The complete gradients on this rank, equal copies included."""
        for param, gradient in self._gradients():
            yield from self._named(param, gradient)

    def follow_weights(self) -> None:
        """Restart the moving average; the optimizer updates the weights in place."""
        if self._optimizer is not None:
            restart_average(self._optimizer)
