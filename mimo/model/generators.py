"""Build a generator: its transformer of diffusers under FSDP2, and its frozen autoencoder."""

from pathlib import Path

from torch import Tensor

from mimo.config.schema import Recipe
from mimo.device import local_device
from mimo.engines.fsdp.context import FsdpContext
from mimo.engines.fsdp.generator import Encode, GeneratorModel
from mimo.engines.fsdp.models import module_on_meta
from mimo.families.contracts import Autoencoder
from mimo.families.flow import pack, unpack
from mimo.families.registry import generator_family, generator_settings
from mimo.families.wire import DTYPES


def generator_on_meta(recipe: Recipe, name: str, ctx: FsdpContext) -> GeneratorModel:
    """Build a generator on meta. Raises ValueError, OSError or ImportError where it cannot."""
    family, settings = generator_family(recipe, name), generator_settings(recipe, name)
    transformer = module_on_meta(lambda: family.build(settings), ctx.stored_dtype)
    encode = _encoder(open_autoencoder(recipe, name), settings.token_pixels)
    return GeneratorModel(transformer, family.units(transformer), family.predict, encode, ctx)


def open_autoencoder(recipe: Recipe, name: str) -> Autoencoder | None:
    """Open a generator's autoencoder on the device; None for pixels. Raises ValueError, OSError."""
    settings, dtype = generator_settings(recipe, name), DTYPES[recipe.train.precision]
    if settings.autoencoder is None:
        return None
    family = generator_family(recipe, name)
    return family.autoencoder(Path(settings.autoencoder), local_device(), dtype)


def _encoder(autoencoder: Autoencoder | None, side: int) -> Encode:
    """Return the function that turns squares of ``side`` pixels into tokens."""

    def encode(squares: Tensor, grid: tuple[int, int]) -> Tensor:
        if autoencoder is None:
            return squares
        return pack(autoencoder.encode(unpack(squares, grid, side)))

    return encode
