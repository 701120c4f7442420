"""What all vision towers have in common: sizes of their stack, checks, construction."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from pydantic import BaseModel
from torch import Tensor, nn

from encoders._patches import RowParts
from mimo.bounds import STRICT, Epsilon, Heads, InitStd, Layers, Width
from mimo.engines import megatron as engine

if TYPE_CHECKING:
    from mimo.engines.megatron import TransformerConfig


class TowerSettings(BaseModel):
    """Recipe keys under ``encoders.<name>.model`` that all towers have. Numbers of elements."""

    model_config = STRICT

    num_layers: Layers
    """Transformer layers."""
    hidden_size: Width
    """Width between layers."""
    ffn_hidden_size: Width
    """Inner width of the MLP."""
    num_attention_heads: Heads
    """Attention heads."""
    norm_eps: Epsilon = 1e-6
    """Added to the variance in norms."""
    init_std: InitStd = 0.02
    """Standard deviation of freshly drawn weights."""

    def layer_kinds(self) -> tuple[str, ...]:
        """The kind of each layer: all are alike, but where a family says otherwise."""
        return ("attention",) * self.num_layers

    def gated_stack(self) -> engine.StackShape:
        """RMSNorm and SwiGLU, with biases."""
        return engine.StackShape(
            num_layers=self.num_layers,
            hidden_size=self.hidden_size,
            ffn_hidden_size=self.ffn_hidden_size,
            num_heads=self.num_attention_heads,
            num_kv_heads=self.num_attention_heads,
            head_size=self.hidden_size // self.num_attention_heads,
            norm_eps=self.norm_eps,
            linear_bias=True,
            qkv_bias=True,
        )

    def gelu_stack(self) -> engine.StackShape:
        """LayerNorm and a plain MLP with a tanh GELU, with biases."""
        return replace(
            self.gated_stack(),
            normalization="LayerNorm",
            activation=partial(nn.functional.gelu, approximate="tanh"),
            gated=False,
        )


def check_grid(settings: TowerSettings, tp: int, pp: int) -> list[str]:
    """Problems of a tp × pp grid with these sizes, each one sentence."""
    problems = [
        f"tp={tp} must divide {key}, which is {size}"
        for key, size in (
            ("num_attention_heads", settings.num_attention_heads),
            ("ffn_hidden_size", settings.ffn_hidden_size),
        )
        if size % tp
    ]
    if settings.num_layers % pp:
        problems.append(f"pp={pp} must divide num_layers, which is {settings.num_layers}")
    return problems


class Tower(nn.Module):
    """Patches of many images -> rows of the language model's size; a family adds `blocks`.

    config: Megatron's, of the stack. parts: which patches this rank embeds.
    """

    def __init__(
        self, config: TransformerConfig, groups: engine.ProcessGroupCollection, merge_size: int
    ) -> None:
        super().__init__()
        self.config = config
        self.parts = RowParts.of(merge_size, config, groups)

    def set_input_tensor(self, input_tensor: list[Tensor | None]) -> None:
        """Called by the schedule with what the previous stage sent; None on the first."""
        cast("Any", self).blocks.set_input_tensor(input_tensor[0])


def build_tower[T: Tower](
    make: Callable[[TransformerConfig], T],
    shape: engine.StackShape,
    ctx: engine.ModuleContext,
    seed: int,
    init_std: float,
) -> T:
    """A tower with freshly drawn weights, the same in every layout. make: from its config."""
    config = engine.transformer_config(shape, ctx)
    tower = make(config)
    engine.initialize_parameters(tower, config, ctx.groups, seed, init_std)
    return tower
