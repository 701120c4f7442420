"""Build a generator: its transformer of diffusers under FSDP2, and its frozen autoencoder."""

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from mimo.config.schema import Recipe
from mimo.device import local_device
from mimo.engines.fsdp.context import FsdpContext
from mimo.engines.fsdp.generator import GeneratorModel
from mimo.engines.fsdp.models import module_on_meta
from mimo.families.contracts import Autoencoder
from mimo.families.flow import pack, unpack
from mimo.families.registry import generator_family, generator_settings
from mimo.families.wire import DTYPES


def generator_on_meta(recipe: Recipe, name: str, ctx: FsdpContext) -> GeneratorModel:
    """Build a generator on meta. Raises ValueError, OSError or ImportError where it cannot."""
    family, settings = generator_family(recipe, name), generator_settings(recipe, name)
    transformer = module_on_meta(lambda: family.build(settings), ctx.stored_dtype)
    autoencoder, dtype = None, DTYPES[recipe.train.precision]
    if settings.autoencoder is not None:
        autoencoder = family.autoencoder(Path(settings.autoencoder), local_device(), dtype)
    encode = TargetEncoder(autoencoder, settings.token_pixels)
    return GeneratorModel(transformer, family.units(transformer), family.predict, encode, ctx)


@dataclass(frozen=True)
class TargetEncoder:
    """Turns squares of ``side`` pixels into tokens. autoencoder: None for tokens of pixels."""

    autoencoder: Autoencoder | None
    side: int

    def __call__(self, squares: Tensor, grid: tuple[int, int]) -> Tensor:
        if self.autoencoder is None:
            return squares
        return pack(self.autoencoder.encode(unpack(squares, grid, self.side)))
