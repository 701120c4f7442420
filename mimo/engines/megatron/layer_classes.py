"""The classes of linears and norms that layers have on this machine, as `acceleration` decides.

With Transformer Engine a layer has its linears and norms under the names of ours, so checkpoints
and key maps work with and without it. Its linear with a norm inside would save a pass over the
hidden states, but it keeps the norm's weight under the linear's name. A linear with an adapter
stays Megatron's own, in 16 bits.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.transformer_config import TransformerConfig

from mimo.engines.megatron.acceleration import layers_of
from mimo.engines.megatron.config import LoRA
from mimo.engines.megatron.layers.norms import norm_class
from mimo.engines.megatron.lora import LoRAColumnParallelLinear, LoRARowParallelLinear


def linear_classes(config: TransformerConfig, lora: LoRA | None) -> dict[str, Any]:
    """The class of each linear of a layer, by its name in `LoRA.targets`."""
    column, row = ColumnParallelLinear, RowParallelLinear
    if layers_of(config.params_dtype).transformer_engine:
        te = _transformer_engine()
        column = partial(_adding_to_main_grad, te.TEColumnParallelLinear)
        row = partial(_adding_to_main_grad, te.TERowParallelLinear)
    columns, rows = (column, LoRAColumnParallelLinear), (row, LoRARowParallelLinear)
    kinds = {"qkv": columns, "proj": rows, "fc1": columns, "fc2": rows}
    targets = frozenset() if lora is None else lora.targets
    return {
        name: partial(adapted, lora=lora) if name in targets else plain
        for name, (plain, adapted) in kinds.items()
    }


def norm_of(config: TransformerConfig) -> Any:
    """The class of a layer's norms."""
    if layers_of(config.params_dtype).transformer_engine:
        return _transformer_engine().TENorm
    return norm_class(config)


def _transformer_engine() -> Any:
    """Megatron's wrappers of its layers. Importing them needs a GPU."""
    from megatron.core.extensions import transformer_engine

    return transformer_engine


def _adding_to_main_grad(linear: Any, *args: Any, config: TransformerConfig, **options: Any) -> Any:
    """A linear of Transformer Engine that adds its weight gradient to DDP's sum itself.

    Only these get the flag: Megatron's own linears, such as the head, would need Apex for it.
    """
    own = copy.copy(config)
    own.gradient_accumulation_fusion = True
    return linear(*args, config=own, **options)
