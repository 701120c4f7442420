"""Low-rank adapters on the linears of a module of transformers.

As those of `mimo.engines.megatron.lora`. Linears that the checkpoint format has as one, such as
queries, keys and values, share one `lora_a`.

Under tensor parallelism each rank has the part that goes with its part of W. Nothing travels in
addition to the linear's own traffic, but whatever is whole on every rank sees a part only, so its
gradient is to be summed:

| linear | lora_a (R, I)         | lora_b (O, R)    | output                                       |
|--------|-----------------------|------------------|----------------------------------------------|
| column | all of it, summed     | the rows of W    | of the rank's own rows                       |
| row    | the columns of W      | all of it, summed | a share, which is summed with that of W     |

Letters: I inputs and O outputs of the linear, R rank of the adapter.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear as product

from mimo.engines.fsdp.context import FsdpContext
from mimo.engines.fsdp.plans import ColumnLinear, RowLinear, cut, local

A, B = "lora_a", "lora_b"


class _Adapted(nn.Linear):
    lora_a: nn.Parameter
    lora_b: nn.Parameter
    scale: float

    def _update(self, input: Tensor) -> Tensor:
        return product(self.scale * product(input, local(self.lora_a)), local(self.lora_b))

    def forward(self, input: Tensor) -> Tensor:
        """(..., I) -> (..., O), or as the linear that it was."""
        return super().forward(input) + self._update(input)


class _AdaptedColumn(_Adapted, ColumnLinear):
    """`ColumnLinear` with an adapter."""


class _AdaptedRow(_Adapted, RowLinear):
    """`RowLinear` with an adapter."""

    def forward(self, input: Tensor) -> Tensor:
        """The adapter's share of a rank is summed together with that of the weight."""
        share = product(input, local(self.weight)) + self._update(input)
        output = self.border.leave(share)
        return output if self.bias is None else output + self.bias


_CLASSES: dict[type[nn.Linear], type[nn.Linear]] = {
    nn.Linear: _Adapted,
    ColumnLinear: _AdaptedColumn,
    RowLinear: _AdaptedRow,
}


def adapt(wrapper: Any, ctx: FsdpContext) -> None:
    """Give linears of a `Wrapper` their adapters, in place: on meta, and cut over tp as it is.

    Their names in transformers' memory are those of the linears with `lora_a` and `lora_b` in the
    place of `weight`; a shared `lora_a` has that of the first.
    """
    if ctx.adapters is None:
        return
    own = {theirs: ours for ours, theirs in wrapper.hf_names.items()}
    summed: set[str] = set()
    for group in ctx.adapters.groups:
        shared = None
        for theirs in group:
            name = own[f"{theirs}.weight"].removesuffix(".weight")
            module = wrapper.get_submodule(name)
            assert isinstance(module, nn.Linear), f"{theirs} is a {type(module)}"
            whole = {ColumnLinear: A, RowLinear: B}.get(type(module))
            shared = _add(module, ctx, shared)
            # Of the names of a shared one, the module that is found first decides.
            wrapper.hf_names |= {f"{name}.{A}": f"{group[0]}.{A}", f"{name}.{B}": f"{theirs}.{B}"}
            if whole is not None:
                summed.add(f"{name}.{whole}")
    wrapper.sums_over_tp |= summed


def _add(module: nn.Linear, ctx: FsdpContext, shared: nn.Parameter | None) -> nn.Parameter:
    """Both matrices, of which the first may be shared already; returns that."""
    assert ctx.adapters is not None, "there is something to add"
    kind, rank, dtype = type(module), ctx.adapters.rank, module.weight.dtype
    adapted: Any = module
    adapted.__class__, adapted.scale = _CLASSES[kind], ctx.adapters.scale
    with torch.device("meta"):
        if shared is None:
            shared = nn.Parameter(torch.empty(rank, module.in_features, dtype=dtype))
        adapted.lora_a = shared
        adapted.lora_b = nn.Parameter(torch.empty(module.out_features, rank, dtype=dtype))
    if ctx.tp is not None and kind is ColumnLinear:
        cut(module, B, ctx.tp, 0)
    if ctx.tp is not None and kind is RowLinear:
        cut(module, A, ctx.tp, 1)
    return adapted.lora_a
