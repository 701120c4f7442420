"""What an engine owes to whoever trains: the contract of `megatron` and of `fsdp`.

A module is a job of its own on its own grid; the bridge between modules is an autograd operation.
So an engine only has to build a module on a grid, run microbatches forward and backward, complete
gradients, update weights, and say which rectangles of which tensors a rank holds. Tensors have the
same names in both engines, those of the checkpoint format, so that each reads what the other wrote.

Letters: B sequences (1 for packed) of S tokens that this rank has, H hidden, n chosen tokens or
rows, k feature levels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from mimo.engines.piece import Piece

if TYPE_CHECKING:
    from mimo.engines.megatron.groups import ProcessGroupCollection
    from mimo.ops.attention_plan import LayerForm

Purpose = Literal["save", "load"]


@dataclass(frozen=True)
class Chunk:
    """A chunk of a language model as its caller sees it.

    run: takes, by keyword,
        input_ids (B, S) int64, position_ids (3, B, S) int64 of whole sequences,
        packed_seq_params: `PackedSegments`, or None for a batch,
        place: on the first chunk, turns the embeddings of text (S', B, H), this rank's part under
            sequence parallelism, into those that the layers get: the rows of encoders among them,
        levels: rows (k, n, H) that are added after the first k layers at places (n,), or None,
        labels (n,) int64 of the tokens at loss_at (n,) int64, where s·B + b is token s of
            sequence b -> on the last chunk losses (n,), at least fp32.
    number: of the chunk on its pipeline stage. is_first: whether it embeds tokens.
    """

    run: Callable[..., Tensor]
    number: int = 0
    is_first: bool = True


class Module(Protocol):
    """One module's part on this rank.

    name: `language`, or an encoder's. groups: its process groups. learning_rate: its peak.
    trains: whether it has weights to update, on any rank: all of its ranks then run backward.
    run_ahead: of a disjoint encoder, forward passes before its first backward.
    """

    name: str
    groups: ProcessGroupCollection
    learning_rate: float
    trains: bool
    run_ahead: int

    @property
    def has_trainable_params(self) -> bool:
        """Whether this rank has weights to update."""
        ...

    @property
    def replicas(self) -> ProcessGroup | None:
        """The ranks whose weights are equal to this rank's; None where it is alone."""
        ...

    @property
    def sequence_parts(self) -> int:
        """How many ranks the module's output is cut over: 1 without sequence parallelism."""
        ...

    @property
    def whole(self) -> nn.Module:
        """The module itself where it has one chunk: an encoder, or a model that is alone.

        An encoder has `prepare` and `forward` of `mimo.families.contracts.EncoderFamily.build`.
        """
        ...

    def attention_forms(self) -> frozenset[LayerForm]:
        """For which `PackedSegments.prepare` plans ahead of time."""
        ...

    # ---- one step, in this order; every rank of the module calls what is called

    def begin_step(self, forward_only: bool) -> None:
        """Clear gradients, and choose between training and evaluation."""
        ...

    def run_language(
        self,
        forward: Callable[[int, Chunk], Tensor],
        numbers: Sequence[int],
        sizes: Sequence[tuple[int, int]],
        forward_only: bool,
    ) -> list[Tensor]:
        """Run microbatches of a language model forward and, unless told otherwise, backward.

        forward: of microbatch number and chunk, what ``chunk.run`` gave. sizes: (S, B) of each
        microbatch, S as this context-parallel rank has it.
        Returns the summed loss () of each on the last stage, detached; else nothing.
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

        forward: of a batch and the module to call, on the last stage the bridge's scalar token.
        items: as prepared, of each batch.
        """
        ...

    def encode(self, patches: Any, items: Any) -> Any:
        """One forward of a colocated encoder; the caller runs its backward."""
        ...

    def accumulate_only(self) -> AbstractContextManager[None]:
        """Inside it gradients are accumulated and not reduced: more microbatches follow."""
        ...

    def finish_gradients(self, num_loss_tokens: int) -> None:
        """Sum the gradients over all ranks that have a part of them, and divide once.

        num_loss_tokens: of the whole global batch, the same on every rank of every module.
        """
        ...

    def squared_norm(self) -> Tensor:
        """This rank's share () of the squared norm of the whole gradient, fp64 on the device.

        Summed over all ranks it counts every element once. The host does not wait for it.
        """
        ...

    def update(
        self, learning_rate: float, gradient_factor: float, measured: bool = False
    ) -> Tensor | float:
        """Scale the gradients by ``gradient_factor`` (clipping) and update the weights.

        The moving average of the weights, if there is one, follows. Left out, it leaves all that
        this rank holds as if there had been no step.
        Returns this rank's share of the squared norm of the change, if ``measured``, which takes
        about as long as the update; else 0. Like `squared_norm` it is a number of the device.
        """
        ...

    # ---- what it holds, under the names of the checkpoint format

    def tensors(self) -> dict[str, list[Tensor]]:
        """What it has in memory, "parameters", "gradients" and "optimizer state". No collective."""
        ...

    def wait_param_gather(self) -> None:
        """Wait for weights that `update` may still be gathering."""
        ...

    def pieces(self, purpose: Purpose, with_optimizer: bool) -> Iterator[Piece]:
        """The pieces that this rank writes, or those that it wants. No collective.

        Keys are ``<module>.<parameter>``, and `mimo.engines.piece.key_of` what an optimizer keeps
        of it: its moments, master weights and moving average. Before anything
        is read into them, an optimizer's are those of one that has done no update.
        """
        ...

    def gradients(self) -> Iterator[Piece]:
        """The complete gradients that this rank holds, after `finish_gradients`."""
        ...

    def follow_weights(self) -> None:
        """Refresh what the optimizer keeps of weights that were just loaded."""
        ...
