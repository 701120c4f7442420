"""The language half of any vision-language model of transformers, for `engine: fsdp` only.

The settings hold the whole model's configuration; tensors keep the names of transformers.
"""

from typing import Any, ClassVar, Self

from pydantic import Field

from mimo.families.contracts import ItemRules, LanguageSettings
from mimo.families.flops import Product
from mimo.families.hf_config import Config
from mimo.families.keymap import Weight, plain
from mimo.families.languages._decoder import named_sizes
from mimo.families.whole_models import configuration_of, half_shapes, parameter_products


class Settings(LanguageSettings):
    """Recipe keys under ``language.model``. Sizes are numbers of elements, for estimates."""

    item_rules: ClassVar = ItemRules(positions="plain", bidirectional=False)
    engines: ClassVar = ("fsdp",)

    config: dict[str, Any] = Field(default={}, max_length=500)
    """The whole model's configuration in transformers."""

    def scaled_down(self, chunks: int, tp: int) -> Self:
        """Raise ValueError: `mimo parity` compares these models, on a tiny copy of their own."""
        raise ValueError("family transformers is compared by `mimo parity`")

    def products(self, vocab_size: int) -> list[Product]:
        """Return all matrices, and attention as in layers without a window."""
        shapes = half_shapes(self.config, of_language=True)
        # Of tied parameters there is only the embedding.
        head = next(
            name
            for end in ("lm_head.weight", "embed_tokens.weight")
            for name in shapes
            if name.endswith(end)
        )
        products = parameter_products(shapes, "token", self._experts_share())
        pairs = Product(None, "attention pair", (2, self.num_attention_heads * self.head_size))
        of_layers = [product for product in products if product.parameter != head]
        of_head = Product(head, "loss token", (vocab_size, self.hidden_size))
        return [*of_layers, *[pairs] * self.num_layers, of_head]

    def _experts_share(self) -> float:
        text = self.config.get("text_config", self.config)
        counts = (text.get(key) for key in ("num_experts", "num_local_experts", "n_routed_experts"))
        total = next((count for count in counts if count), None)
        return (text.get("num_experts_per_tok") or 1) / total if total else 1.0


def settings_from_hf(config: Config) -> dict[str, Any]:
    """Return recipe keys for a model. Raises ValueError for what cannot run."""
    return named_sizes(config) | {"vocab_multiple": 1, "config": configuration_of(config)}


def weights_in_hf(settings: Settings) -> list[Weight]:
    """Return every parameter of decoder and head under its name in transformers."""
    shapes = half_shapes(settings.config, of_language=True)
    return [plain(name, name, *shape) for name, shape in shapes.items()]
