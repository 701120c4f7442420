"""The classes of linears and norms that layers have on this machine, as `acceleration` decides.

With Transformer Engine a layer has its linears and norms under the names of ours, so checkpoints
and key maps work with and without it. Its linear with a norm inside would save a pass over the
hidden states, but it keeps the norm's weight under the linear's name. A linear with an adapter
stays Megatron's own, in 16 bits. Transformer Engine overlaps tensor-parallel communication only
for microbatches of one fixed length on groups that tile the whole world, which modules with their
own ranks and packed sequences are not, so there is no key for it.
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
        column, row = (partial(_adding_to_main_grad, one) for one in _transformer_engine()[:2])
    classes: dict[str, Any] = {"qkv": column, "proj": row, "fc1": column, "fc2": row}
    adapted = {
        "qkv": LoRAColumnParallelLinear,
        "proj": LoRARowParallelLinear,
        "fc1": LoRAColumnParallelLinear,
        "fc2": LoRARowParallelLinear,
    }
    for target in () if lora is None else lora.targets:
        classes[target] = partial(adapted[target], lora=lora)
    return classes


def norm_of(config: TransformerConfig) -> Any:
    """The class of a layer's norms."""
    if layers_of(config.params_dtype).transformer_engine:
        return _transformer_engine()[2]
    return norm_class(config)


def _transformer_engine() -> tuple[Any, Any, Any]:
    """Megatron's wrappers: column- and row-parallel linear, norm. Importing them needs a GPU."""
    from megatron.core.extensions import transformer_engine as te

    return te.TEColumnParallelLinear, te.TERowParallelLinear, te.TENorm


def _adding_to_main_grad(linear: Any, *args: Any, config: TransformerConfig, **options: Any) -> Any:
    """A linear of Transformer Engine that adds its weight gradient to DDP's sum itself.

    Only these get the flag: Megatron's own linears, such as the head, would need Apex for it.
    """
    own = copy.copy(config)
    own.gradient_accumulation_fusion = True
    return linear(*args, config=own, **options)
