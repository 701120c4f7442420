"""Count the memory of tensors, and keep what the kernels of a GPU keep.

On a CPU some operations are composed of several, and each keeps tensors for its backward. In a
dry run they are replaced by stand-ins that keep, and allocate, what these kernels do: the norms
and SwiGLU of Transformer Engine and Megatron, a variable-length attention, and fla's delta rule.
Their results have the right shapes and no meaning.

Letters: T tokens, N heads, G key/value heads, D head size, K key and V value heads, E value size.
"""

import math
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from itertools import chain
from typing import Any, Self
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from mimo.engines.megatron import delta_net, experts, parallel, stack
from mimo.engines.megatron.dispatch import Counts, Route
from mimo.ops import attention_kernels, layers
from mimo.ops.attention_kernels import Kernel, VarlenBlocks, varlen_blocks


class TensorMemory(TorchDispatchMode):
    """Counts the bytes of all tensors that operations return, each storage once.

    Like torch's MemTracker, but without its account of modules, which is slow and follows only one
    pass of each. now, peak: bytes that exist, and the most that existed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._storages: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}

    def __enter__(self) -> Self:
        resize = torch.UntypedStorage.resize_
        propagate = ShardingPropagator._propagate_tensor_meta_non_cached

        def resize_and_count(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            resize(storage, size)
            self._count(storage)
            return storage

        def propagate_uncounted(*args: Any) -> Any:
            with _disable_current_modes():
                return propagate(*args)

        self._patches = ExitStack()
        # FSDP2 resizes storages without an operation. DTensor infers shapes on temporary tensors,
        # which do not count.
        for owner, name, method in (
            (torch.UntypedStorage, "resize_", resize_and_count),
            (ShardingPropagator, "_propagate_tensor_meta_non_cached", propagate_uncounted),
        ):
            self._patches.enter_context(mock.patch.object(owner, name, method))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patches.close()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[override]
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its operations on local tensors come here again
        result = self._run(func, args, kwargs or {})
        peak = self.peak
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self.add(tensor)
        if func is torch.ops.aten.add.Tensor and torch._C._current_graph_task_id() != -1:
            # Autograd adds gradients in place, unless they are fake. This also leaves out the sums
            # of residuals in recomputed layers.
            self.peak = peak
        return result

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Compute masks, lengths and places (`linspace`), by which classes may branch."""
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if func is torch.ops.aten.index.Tensor:
            args = (args[0], [*chain.from_iterable(map(_indices_of_mask, args[1]))])
        is_new = not inputs and func is not torch.ops.aten.linspace.default
        if is_new or any(isinstance(tensor, FakeTensor) for tensor in inputs):
            result = func(*args, **kwargs)
            if not (is_new and isinstance(result, Tensor)) or result.is_floating_point():
                return result
        with unset_fake_temporarily():
            return func(*args, **kwargs)

    def add(self, tensor: Tensor) -> None:
        """Count a tensor that exists."""
        self._count(tensor.untyped_storage())

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        known = self._storages.get(key)
        if known is None:
            known = weakref.ref(storage, lambda _: self._forget(key)), 0
        self._storages[key] = known[0], size
        self.now += size - known[1]
        self.peak = max(self.peak, self.now)

    def _forget(self, key: int) -> None:
        self.now -= self._storages.pop(key)[1]


def _indices_of_mask(index: Tensor | None) -> Sequence[Tensor | None]:
    """Return the indices of a mask whose numbers are known: fake tensors need their count."""
    if index is None or index.dtype != torch.bool or isinstance(index, FakeTensor):
        return (index,)
    with unset_fake_temporarily():
        return index.nonzero(as_tuple=True)


class _StandIn(torch.autograd.Function):
    """Returns zeros and keeps its inputs, and ``more``, for its backward, which returns zeros."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, more: Sequence[Tensor], *inputs: Tensor) -> Tensor:
        ctx.count = len(inputs)
        ctx.save_for_backward(*inputs, *more)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        inputs = ctx.saved_tensors[: ctx.count]
        return None, None, *(x.new_zeros(x.shape) for x in inputs)


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Keep one number of fp32 for each row."""
    rows = x.new_zeros(x.shape[:-1], dtype=torch.float32)
    return _StandIn.apply(x.new_zeros(x.shape), (rows,), x, weight)


def _gate(both: Tensor, activation: Callable[[Tensor], Tensor]) -> Tensor:
    """Keep both halves, but not the activated one."""
    output = both.new_zeros(*both.shape[:-1], both.shape[-1] // 2)
    return _StandIn.apply(output, (), both)


def _attend(q: Tensor, k: Tensor, v: Tensor, blocks: VarlenBlocks, scale: float) -> Tensor:
    """Keep the output, and one number of fp32 for each row of a head."""
    rows = q.new_zeros(q.shape[:-1], dtype=torch.float32)
    output = q.new_zeros(*q.shape[:-1], v.shape[-1])
    inputs = blocks.arguments(q, k, v)[:3]
    return _StandIn.apply(output, (output.detach(), rows), *inputs)


def _grouped_linear(rows: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """Keep nothing more."""
    return _StandIn.apply(rows.new_zeros(len(rows), weights.shape[1]), (), rows, weights)


def _delta_rule(*inputs: Any) -> Tensor:
    """query, key (..., K, D), value (..., V, E), log_decay, beta (..., V) -> (..., V, E).

    Keep the triangular matrices of chunks of 64 tokens.
    """
    value = inputs[2]
    chunks = value.new_zeros(*value.shape[:-1], 64)
    return _StandIn.apply(value.new_zeros(value.shape), (chunks,), *inputs[:5])


def _route(is_worst: bool, experts: Tensor, num_experts: int, group: Any, etp: int) -> Route:
    """Stand in for `Route.of`, with equal loads; see `gpu_kernels` for the worst."""
    (n, k), ranks = experts.shape, group.size()
    ep, each = ranks // etp, num_experts * etp // ranks
    # The share of tokens that choose none of a given rank's experts.
    missed = math.comb(num_experts - each, k) / math.comb(num_experts, k)
    rows, choices = ([math.ceil(x)] * ranks for x in (n * (1 - missed), n * k / ep))
    arriving = [n] * ranks, [n * min(k, each)] * ranks
    arriving_rows, arriving_choices = arriving if is_worst else (rows, choices)
    received = sum(arriving_choices)
    sizes = {"token": sum(rows), "choice": sum(choices), "by_expert": received, "row": received}
    return Route(
        rows=Counts(rows, arriving_rows),
        choices=Counts(choices, arriving_choices),
        counts=experts.new_empty(each),
        **{name: experts.new_empty(size) for name, size in sizes.items()},
    )


def shared_buffers() -> list[Tensor]:
    """Return the buffers that all layers and microbatches use in turn for gathered inputs."""
    return [*parallel.parallel_state.get_global_memory_buffer().buffer.values()]


@contextmanager
def gpu_kernels(worst_experts: bool = False) -> Iterator[None]:
    """Replace operations by stand-ins, in this process, also for models that exist already.

    worst_experts: whether the tokens of all ranks choose experts of this rank, as many as they can.
    """
    replacements: list[tuple[Any, str, Any]] = [
        (layers, "_rounded_norm", _norm),
        (layers.ZeroCenteredRMSNorm, "forward", lambda norm, x: _norm(x, norm.weight, norm.eps)),
        (stack, "gate", _gate),
        (delta_net, "gated_delta_rule", _delta_rule),
        (experts, "grouped_linear", _grouped_linear),
        (Route, "of", partial(_route, worst_experts)),
        # Fake tensors have neither a device to move to nor random states.
        (nn.Module, "to", lambda module, *args, **options: module),
        (torch, "get_rng_state", lambda: torch.empty(0, dtype=torch.uint8)),
        (torch, "set_rng_state", lambda state: None),
        (parallel.parallel_state, "_GLOBAL_MEMORY_BUFFER", None),
        (type(parallel.get_cuda_rng_tracker()), "fork", lambda *args, **options: nullcontext()),
    ]
    name = "torch_chunk_gated_delta_rule"
    for path, module in sys.modules.items():
        if path.startswith("transformers.models.") and name in vars(module):
            rule = module, name, lambda *x, g, beta, **_: (_delta_rule(*x, g, beta), None)
            replacements.append(rule)
    sdpa = Kernel(varlen_blocks, _attend)
    with ExitStack() as stand_ins, mock.patch.dict(attention_kernels.KERNELS, sdpa=sdpa):
        for owner, name, stand_in in replacements:
            stand_ins.enter_context(mock.patch.object(owner, name, stand_in))
        yield
