"""The contract of the engines `megatron` and `fsdp`: what training and checkpoints call.

Tensors have the same names in both engines, those of the checkpoint format, so that each reads what
the other wrote.

Letters: B sequences (1 for packed) of S tokens that this rank has, H hidden, n chosen tokens or
rows, k feature levels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from torch import Tensor, nn
from torch.distributed import ProcessGroup

if TYPE_CHECKING:
    from mimo.engines.megatron.config import ProcessGroupCollection
    from mimo.ops.segments import Form

Purpose = Literal["save", "load"]

# Kinds of an optimizer's tensors.
MASTER = "fp32_param"  # the master weight of a 16-bit parameter
MOMENTS = ("exp_avg", "exp_avg_sq")  # Adam's moments
STEP = "step"  # a single number, the updates that the parameter has had
EMA = "ema"  # the moving average of a trainable parameter


def key_of(kind: str, key: str) -> str:
    """Return the key of an optimizer's tensor of this kind, given its parameter's key."""
    return f"{EMA}.{key}" if kind == EMA else f"optimizer.{kind}.{key}"


def kind_of(key: str) -> tuple[str, str]:
    """Return kind and parameter's key, the inverse of `key_of`; "" for the parameter itself."""
    beginning, _, rest = key.partition(".")
    if beginning == EMA:
        return EMA, rest
    if beginning != "optimizer":
        return "", key
    kind, _, parameter = rest.partition(".")
    return kind, parameter


@dataclass(frozen=True)
class Piece:
    """A rectangle of a tensor that a rank writes, or reads into.

    The tensor is seen as a matrix of its first dimension by all others; a vector has one column.

    key: the tensor's name. shape: shape of the whole tensor. row, column: its first element.
    values: (rows, columns), the owner's memory, so that writing to it changes the model.
    """

    key: str
    shape: tuple[int, ...]
    row: int
    column: int
    values: Tensor

    @property
    def matrix(self) -> tuple[int, int]:
        return self.shape[0], math.prod(self.shape[1:])


@dataclass(frozen=True)
class Chunk:
    """A chunk of a language model, as the training loop calls it.

    run: takes by keyword
        input_ids (B, S) int64, position_ids (3, B, S) int64 of whole sequences,
        packed_seq_params: `PackedSegments`, or None for a batch,
        place: on the first chunk, maps the text's embeddings (S', B, H), this rank's part under
            sequence parallelism, and the query parameters (K, H) by generator, to the embeddings
            that the layers get, the encoders' among them,
        levels: embeddings (k, n, H) that are added after the first k layers at places (n,), or
            None,
        labels (n,) int64 of the tokens at loss_at (n,) int64, where s·B + b is token s of
            sequence b -> on the last chunk losses (n,), at least fp32,
        emit: on the last chunk, maps its hidden states (S', B, H) after the final norm to a scalar
            that is appended to the losses (n + 1,), or None.
    number: index of the chunk on its pipeline stage. is_first: whether it embeds tokens.
    """

    run: Callable[..., Tensor]
    number: int = 0
    is_first: bool = True


@dataclass(frozen=True)
class Draw:
    """One forward of a generator: B items of one size, of S tokens each with C numbers.

    grid: height and width in tokens. patches: of the targets, `mimo.families.wire.WirePatches`.
    noise: (B, S, C) fp32. times: (B,) fp32 in 0..1. rows: (B, T) int64, the rows of each condition
    among the lane's N; N itself is a row of zeros. lengths: (B,) int64 on the host, the rows of
    each. weights: (B,) fp64, the factor of each loss in the backward. counted: (B,) fp32, 0 for a
    blank item, else 1.
    """

    grid: tuple[int, int]
    patches: Any
    noise: Tensor
    times: Tensor
    rows: Tensor
    lengths: Tensor
    weights: Tensor
    counted: Tensor


class Module(Protocol):
    """One module's part on this rank.

    name: `language`, or an encoder's name. groups: its process groups.
    trains: whether any of its ranks has weights to update: then all of them run backward.
    has_trainable_params: whether this rank has some. sequence_parts: how many ranks the output is
    cut over; 1 without sequence parallelism. replicas: the ranks whose weights are equal to this
    rank's; None where it is alone.
    run_ahead: forward passes before the first backward, besides those of a pipeline's stages.
    """

    name: str
    groups: ProcessGroupCollection
    trains: bool
    run_ahead: int

    @property
    def has_trainable_params(self) -> bool: ...

    @property
    def replicas(self) -> ProcessGroup | None: ...

    @property
    def sequence_parts(self) -> int: ...

    @property
    def whole(self) -> nn.Module:
        """The module itself where it has one chunk: an encoder, or a model that is alone.

        An encoder has `prepare` and `forward` of `mimo.families.contracts.EncoderFamily.build`.
        """
        ...

    def attention_forms(self) -> frozenset[Form]:
        """The forms of its layers, for `PackedSegments.prepare`."""
        ...

    # ---- one step, in this order; every rank of the module makes the same calls

    def begin_step(self, forward_only: bool, loss_token_share: float = 0.0) -> None:
        """Clear gradients, and choose between training and evaluation.

        loss_token_share: loss tokens over all tokens of the global batch; 0 disables router
            losses. It scales losses that count every token, since `finish_gradients` divides by
            the number of loss tokens.
        """
        ...

    def run_language(
        self,
        forward: Callable[[int, Chunk], Tensor],
        numbers: Sequence[int],
        sizes: Sequence[tuple[int, int]],
        forward_only: bool,
    ) -> list[Tensor]:
        """Run microbatches of a language model forward and, unless ``forward_only``, backward.

        forward: takes microbatch number and chunk, returns the result of ``chunk.run``.
        sizes: (S, B) of each microbatch, S as this context-parallel rank has it.
        Returns the detached loss sum () of each microbatch on the last stage, else nothing.
        """
        ...

    def run_encoder[T](
        self,
        forward: Callable[[T, nn.Module], Any],
        batches: Sequence[T],
        items: Sequence[Any],
        forward_only: bool,
    ) -> None:
        """Run microbatches of a disjoint encoder, `run_ahead` of them before the first backward.

        forward: takes a batch and the module to call; on the last stage it returns the bridge's
            scalar token. items: the prepared items of each batch.
        """
        ...

    def encode(self, patches: Any, items: Any) -> Any:
        """Run one forward of a colocated encoder; the caller runs its backward."""
        ...

    def learn(self, loss: Tensor, *, is_last: bool) -> None:
        """Run the backward of a generator's loss (). is_last: of the step, to sum gradients."""
        ...

    def accumulate_only(self) -> AbstractContextManager[None]:
        """Return a context for all microbatches but the last: gradients are not reduced."""
        ...

    def finish_gradients(self, num_loss_tokens: int) -> None:
        """Sum the gradients over all ranks that have a part of them, and divide once.

        num_loss_tokens: the global batch's, the same on every rank of every module.
        """
        ...

    def squared_norm(self) -> Tensor:
        """Return this rank's share () of the squared gradient norm, fp64 on the device.

        The sum over all ranks counts every element once. The host does not wait for it.
        """
        ...

    def update(
        self, learning_rate: float, gradient_factor: float, measured: bool = False
    ) -> Tensor | float:
        """Scale the gradients by ``gradient_factor`` (clipping) and update the weights.

        The moving average of the weights, if any, follows. A step without this call changes
        nothing that this rank holds.
        Returns this rank's share of the squared norm of the change if ``measured``, on the device
        like `squared_norm`; else 0. Measuring takes about as long as the update.
        """
        ...

    def add_router_sums(self, total: Tensor) -> None:
        """Add what this rank's routers counted since `begin_step` to ``total``; no collective.

        total: (L, E + 4) fp64 on the device, by layer of the whole model: the tokens that chose
        each of E experts; the number of tokens; and, summed over these, the entropy of their
        probabilities, the balancing loss and the z-loss. The sum over all ranks counts every token
        of every microbatch with a backward once. Nothing is added by an engine without router
        losses.
        """
        ...

    # ---- what it holds, under the names of the checkpoint format

    def tensors(self) -> dict[str, list[Tensor]]:
        """Tensors in memory: "parameters", "gradients", "optimizer state". No collective."""
        ...

    def wait_param_gather(self) -> None:
        """Wait for weights that `update` may still be gathering."""
        ...

    def pieces(self, purpose: Purpose, with_optimizer: bool) -> Iterator[Piece]:
        """The pieces that this rank writes, or reads. No collective.

        Keys are ``<module>.<parameter>`` and, for an optimizer's tensors, those of `key_of`. Before
        anything is read into them, these are the tensors of an optimizer without an update.
        """
        ...

    def gradients(self) -> Iterator[Piece]:
        """The complete gradients that this rank holds, after `finish_gradients`."""
        ...

    def follow_weights(self) -> None:
        """Refresh what the optimizer keeps of weights that were just loaded."""
        ...
