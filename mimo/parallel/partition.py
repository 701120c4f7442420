"""Split sequences over language ranks: context parallelism (CP), then sequence parallelism (SP).

CP gives every rank its zigzag share of each segment of a packed sequence, or of each sequence of a
batch; see `mimo.ops.segments`. SP then scatters a CP rank's share over its tensor-parallel group,
in tp equal parts. Embeddings get both. Labels, loss mask and position ids get CP only, because SP
gathers logits, queries and keys.

Letters: B batch (1 for packed), S sequence (T packed tokens), H hidden.
"""

from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from mimo.engines.megatron.config import scatter_sequence
from mimo.ops.segments import PackedSegments, zigzag_indices
from mimo.parallel.grids import sequence_multiple


@dataclass(frozen=True)
class PartitionAdapter:
    """Splits sequences over explicit groups of one language rank.

    sequence_parallel: whether embeddings are scattered over ``tp``. A forward does not communicate;
    the backward of the SP scatter all-gathers over ``tp``, so all of its ranks take part.
    """

    cp: dist.ProcessGroup
    tp: dist.ProcessGroup
    sequence_parallel: bool

    def shard_embeddings(
        self, embeddings: Tensor, packed_seq_params: PackedSegments | None
    ) -> Tensor:
        """Cut (S, B, H), equal on all ranks, to (S/(cp·tp), B, H) with SP, else (S/cp, B, H).

        packed_seq_params: the segments of a packed sequence; None for a batch.
        Raises ValueError, naming the recipe key, for lengths that do not divide.
        """
        embeddings = self._cut(embeddings, 0, packed_seq_params)
        if not self.sequence_parallel:
            return embeddings
        cp, tp = self.cp.size(), self.tp.size()
        tokens, multiple = embeddings.shape[0] * cp, sequence_multiple(cp, tp, sp=True)
        if tokens % multiple:
            raise ValueError(
                f"language.grid.sp: a sequence of {tokens} tokens is not a multiple of {multiple} "
                f"(language.grid.tp {tp}, cp {cp}); pad it"
            )
        return scatter_sequence(embeddings, group=self.tp)

    def slice_tokens(self, tokens: Tensor, packed_seq_params: PackedSegments | None) -> Tensor:
        """Cut (B, S) to (B, S/cp): labels, masks, positions, and token ids before the lookup."""
        return self._cut(tokens, 1, packed_seq_params)

    def _cut(self, tensor: Tensor, dim: int, packed_seq_params: PackedSegments | None) -> Tensor:
        if self.cp.size() == 1:
            return tensor
        lengths = (tensor.shape[dim],)
        if packed_seq_params is not None:
            lengths = packed_seq_params.lengths
            assert sum(lengths) == tensor.shape[dim], (
                f"segments of {sum(lengths)} tokens for a sequence of {tensor.shape[dim]}"
            )
        index = zigzag_indices(lengths, self.cp.size(), self.cp.rank())
        return tensor.index_select(dim, index.to(tensor.device))
