"""The tower of any vision-language model of transformers, for `engine: fsdp` only.

Items are prepared by the folder's own processor; tensors keep the names of transformers.
"""

import math
from typing import Any, Self

import numpy as np
from pydantic import Field

from data.modalities.transformers import TransformersMedia
from mimo.families.contracts import EncoderSettings
from mimo.families.flops import Product
from mimo.families.hf_config import Config, Processors
from mimo.families.keymap import Weight, plain
from mimo.families.whole_models import configuration_of, half_shapes, parameter_products

PROJECTOR = ()


class Settings(EncoderSettings):
    """Recipe keys under ``encoders.<name>.model``. Sizes are numbers of elements, for estimates."""

    folder: str = ""
    """The folder of `init_from`, which has the processor's files."""
    levels: int = Field(default=0, ge=0, le=64)
    """Number of feature levels besides the embeddings."""
    config: dict[str, Any] = Field(default={}, max_length=500)
    """The whole model's configuration in transformers."""

    @property
    def num_levels(self) -> int:
        return self.levels

    def processor(self, modality: str = "image") -> TransformersMedia:
        return TransformersMedia(self.folder, modality)

    def scaled_down(self, chunks: int, tp: int) -> Self:
        """Raise ValueError: `mimo parity` compares these models, on a tiny copy of their own."""
        raise ValueError("family transformers is compared by `mimo parity`")

    def products(self, output_size: int) -> list[Product]:
        """Return all matrices, as if each patch were multiplied by each once."""
        return parameter_products(half_shapes(self.config, of_language=False), "patch")

    @property
    def patch_shape(self) -> tuple[int, int, int]:
        """Frames of a patch of the tower, and pixels along both sides."""
        vision = self.config.get("vision_config") or {}
        side = int(np.ravel(vision.get("patch_size") or 14)[-1])
        return vision.get("temporal_patch_size") or 1, side, side

    def num_inputs(self, grid: tuple[int, int, int]) -> float:
        """Return the patches in files of this size, as if no file were resized."""
        return max(math.prod(grid) / self.patch_shape[1] ** 2, 1.0)

    def counts(self, grids: np.ndarray) -> dict[str, float]:
        return {"patch": sum(self.num_inputs(tuple(grid)) for grid in grids.tolist())}


def settings_from_hf(config: Config, processors: Processors) -> dict[str, Any]:
    """Return settings by key, from a whole model's configuration."""
    vision = config.get("vision_config") or {}

    def size(*keys: str) -> int:
        values = (vision.get(key) for key in keys)
        return next((value for value in values if isinstance(value, int) and value > 0), 1)

    return {
        "num_layers": size("num_hidden_layers", "depth", "num_layers"),
        "hidden_size": size("hidden_size", "embed_dim"),
        "ffn_hidden_size": size("intermediate_size", "mlp_dim"),
        "num_attention_heads": size("num_attention_heads", "num_heads"),
        "levels": len(vision.get("deepstack_visual_indexes") or ()),
        "config": configuration_of(config),
    }


def weights_in_hf(settings: Settings, output_size: int) -> list[Weight]:
    """Return every parameter outside the language model, under its name in transformers."""
    shapes = half_shapes(settings.config, of_language=False)
    return [plain(name, name, *shape) for name, shape in shapes.items()]
