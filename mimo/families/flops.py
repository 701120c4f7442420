"""FLOPs of a module: its products, which are matrices and attention scores.

Recomputed activations and padding are not counted: this is the work that the model needs.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mimo.config.modules import LoRA
from mimo.families.keymap import adapter_names, adapter_shapes


@dataclass(frozen=True)
class Product:
    """One matrix (O, I) that multiplies vectors, or attention's scores and their use.

    parameter: its name in the whole module; None for attention. A table that is looked up, or a
        scale, has no elements; later products depend on it.
    per: the unit that needs it once, such as "token"; see a family's ``counts``.
    """

    parameter: str | None
    per: str
    shape: tuple[int, int] = (0, 0)

    @property
    def forward(self) -> float:
        """FLOPs of a forward, per unit: a multiplication and an addition per element."""
        return 2.0 * self.shape[0] * self.shape[1]


def flops_per_unit(
    products: Sequence[Product],
    is_trained: Callable[[str], bool],
    input_needs_gradient: bool = False,
    adapters: LoRA | None = None,
) -> dict[str, float]:
    """Return the FLOPs of forward and backward for one of each unit.

    A backward passes through a product if anything before it is trained; its weight has a gradient
    if it is trained itself. is_trained: by the name of a parameter.
    """
    flops: dict[str, float] = {}
    passes = input_needs_gradient
    for product in _with_adapters(products, adapters):
        name = product.parameter
        if name is None:
            times = 3 if passes else 1
        else:
            # The engine runs backward through all layers of a stack with adapters.
            passes = passes or (adapters is not None and ".layers." in name)
            times = 1 + passes + is_trained(name)
            passes = passes or is_trained(name)
        flops[product.per] = flops.get(product.per, 0.0) + times * product.forward
    return flops


def _with_adapters(products: Sequence[Product], adapters: LoRA | None) -> Iterator[Product]:
    for product in products:
        yield product
        name = product.parameter
        if adapters is not None and name is not None and adapters.adapts(name):
            shapes = adapter_shapes(product.shape, adapters.rank)
            for adapter, shape in zip(adapter_names(name), shapes, strict=True):
                yield Product(adapter, product.per, shape)


def step_flops(per_unit: Mapping[str, float], counts: Mapping[str, float]) -> float:
    """Return the FLOPs of these counts of each unit."""
    return sum(per_unit[unit] * count for unit, count in counts.items() if unit in per_unit)


def layer_products(
    prefix: str,
    kinds: Sequence[str],
    per: str,
    hidden_size: int,
    ffn_hidden_size: int,
    gated: bool,
    attention: Callable[[str, str], Sequence[Product]],
) -> list[Product]:
    """Return the transformer layers of a stack, for one token ``per`` unit.

    prefix: of their parameters' names. kinds: of each layer. attention: takes the name of a layer's
    attention and its kind; see `attention_products`.
    """
    inner = 2 * ffn_hidden_size if gated else ffn_hidden_size
    products = []
    for number, kind in enumerate(kinds):
        mlp = f"{prefix}.{number}.mlp"
        products += [
            *attention(f"{prefix}.{number}.self_attention", kind),
            Product(f"{mlp}.linear_fc1.weight", per, (inner, hidden_size)),
            Product(f"{mlp}.linear_fc2.weight", per, (hidden_size, ffn_hidden_size)),
        ]
    return products


def attention_products(
    name: str,
    kind: str,
    per: str,
    hidden_size: int,
    heads: tuple[int, int, int],
    has_gate: bool = False,
) -> list[Product]:
    """Return a layer's attention, which counts in pairs of a query and a key of its kind.

    heads: of queries, of keys, and their size. has_gate: whether queries are twice as wide, for a
    gate of the output.
    """
    num_heads, num_kv_heads, size = heads
    qkv = (num_heads * (2 if has_gate else 1) + 2 * num_kv_heads) * size
    return [
        Product(f"{name}.linear_qkv.weight", per, (qkv, hidden_size)),
        Product(None, f"{kind} pair", (2, num_heads * size)),
        Product(f"{name}.linear_proj.weight", per, (hidden_size, num_heads * size)),
    ]


def causal_pairs(lengths: np.ndarray, window: int | None = None) -> float:
    """Count the pairs of a query and a key that it sees, in causal segments of these lengths (n,).

    window: largest number of keys that a query sees, its own included.
    """
    length = np.asarray(lengths, np.float64)
    full = length if window is None else np.minimum(length, window)
    return float((full * (full + 1) / 2 + (length - full) * full).sum())
