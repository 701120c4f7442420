"""The contracts of families: Python modules that are found by the name in the recipe.

A family of encoders is a file in `encoders`, one of language models in `mimo.families.languages`,
one of generators in `generators`. Its settings hold all that is known before it is built.

Letters: P patches of all items of a call, C numbers per patch, I items, N rows, L feature levels,
H hidden size of the language model, D of the tower, S sequence, B batch, V vocabulary.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self

import numpy as np
from pydantic import model_validator

from data.modalities.processor import Media
from mimo.config.bounds import Heads, PathText, Pixels, Vocabulary, Width
from mimo.families.flops import Product, attention_products, causal_pairs, layer_products
from mimo.families.hf_config import Config, Processors
from mimo.families.keymap import Weight
from mimo.families.settings import FamilySettings, ItemRules

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from mimo.engines.megatron import LanguageModel, ModuleContext


class EncoderSettings(FamilySettings):
    """The recipe keys under ``encoders.<name>.model``."""

    @property
    def num_levels(self) -> int:
        """L, the number of feature levels besides the embeddings.

        Level k is added to the hidden states after the language model's k-th layer (DeepStack).
        """
        return 0

    @abstractmethod
    def processor(self, modality: str = "image") -> Media[Any]:
        """Return what turns items of the modality into patches and counts each item's rows."""

    def num_inputs(self, grid: tuple[int, int, int]) -> float:
        """Return the inputs of the tower, such as patches, for an item with this grid."""
        return math.prod(grid)

    @abstractmethod
    def products(self, output_size: int) -> list[Product]:
        """Return all matrices and attention of tower and projector, in the order of a forward.

        Every parameter of two dimensions or more has one, under its name in ``weights_in_hf``.
        """

    @abstractmethod
    def counts(self, grids: np.ndarray) -> dict[str, float]:
        """Count each unit of `products` in items with these grids (I, 3)."""

    def stack_products(self, per: str, gated: bool) -> list[Product]:
        """Return the layers, for one token ``per`` unit, and the final norm."""
        count, size = self.num_attention_heads, self.hidden_size
        heads = (count, count, size // count)
        attention = partial(attention_products, per=per, hidden_size=size, heads=heads)
        kinds, ffn = self.layer_kinds(), self.ffn_hidden_size
        layers = layer_products("blocks.layers", kinds, per, size, ffn, gated, attention)
        return [*layers, Product("blocks.final_layernorm.weight", per)]

    def _scaled_sizes(self, chunks: int, tp: int) -> dict[str, Any]:
        heads = math.lcm(2, tp)
        return {
            "num_layers": chunks,
            "hidden_size": 8 * heads,
            "ffn_hidden_size": math.lcm(24, tp),
            "num_attention_heads": heads,
        }


class LanguageSettings(FamilySettings):
    """The recipe keys under ``language.model``: a decoder with grouped queries and a gated MLP."""

    item_rules: ClassVar[ItemRules]
    """How the family treats tokens that stand for items."""
    engines: ClassVar[tuple[str, ...]] = ("megatron", "fsdp")
    """The engines that can run it."""

    num_query_groups: Heads
    """Key and value heads; query heads share them in equal groups."""
    head_size: Width
    """Width of a head."""
    vocab_size: Vocabulary | None = None
    """Tokens that the model knows; as many as the tokenizer has when left out."""
    vocab_multiple: Width = 64
    """The vocabulary is padded to a multiple of this, in every layout alike."""
    tie_word_embeddings: bool = False
    """Use the embedding's weights for the output layer too."""

    @model_validator(mode="after")
    def _heads_form_groups(self) -> Self:
        if self.head_size % 2:
            raise ValueError(f"head_size {self.head_size} must be even: channels turn in pairs")
        if self.num_attention_heads % self.num_query_groups:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} must be a multiple of "
                f"num_query_groups {self.num_query_groups}"
            )
        return self

    def num_tokens(self, tokenizer_size: int) -> int:
        """Return the tokens that the model knows. Raises ValueError if the tokenizer has more."""
        if self.vocab_size is None:
            return tokenizer_size
        if tokenizer_size > self.vocab_size:
            raise ValueError(
                f"the tokenizer has {tokenizer_size} tokens, but language.model.vocab_size is "
                f"{self.vocab_size}; use the tokenizer that belongs to the model"
            )
        return self.vocab_size

    def padded_vocab_size(self, num_tokens: int) -> int:
        """Return V, the rows of the embedding for this many tokens, the same in every layout."""
        known = max(num_tokens, self.vocab_size or 0)
        return -(-known // self.vocab_multiple) * self.vocab_multiple

    def _divided_by_tp(self) -> dict[str, int]:
        padded = {"vocabulary (padded by vocab_multiple)": self.padded_vocab_size(1)}
        return super()._divided_by_tp() | padded

    def grid_problems(self, tp: int, chunks: int, cp: int = 1) -> Iterator[str]:
        yield from super().grid_problems(tp, chunks)
        groups = self.num_query_groups
        if groups % tp and tp % groups:
            yield f"tp={tp} must divide num_query_groups, which is {groups}, or be a multiple of it"

    @property
    def routers(self) -> tuple[int, int, int]:
        """Number of layers with a router, experts of each, and experts that a token chooses."""
        return 0, 0, 0

    def products(self, vocab_size: int) -> list[Product]:
        """Return all matrices and attention, in the order of a forward. vocab_size: V."""
        embedding = "embedding.word_embeddings.weight"
        kinds, size, ffn = self.layer_kinds(), self.hidden_size, self.ffn_hidden_size
        attention = self.attention_products
        layers = layer_products("decoder.layers", kinds, "token", size, ffn, True, attention)
        head = embedding if self.tie_word_embeddings else "output_layer.weight"
        head_product = Product(head, "loss token", (vocab_size, size))
        return [Product(embedding, "token"), *layers, head_product]

    def attention_products(self, name: str, kind: str) -> list[Product]:
        """Return the attention of a layer of this kind, by the name of its parameters."""
        heads = (self.num_attention_heads, self.num_query_groups, self.head_size)
        return attention_products(name, kind, "token", self.hidden_size, heads)

    def counts(
        self, lengths: np.ndarray, item_rows: np.ndarray, loss_tokens: int
    ) -> dict[str, float]:
        """Count each unit of `products` in segments of these lengths (n,), without padding.

        item_rows: (I,) embeddings of each item in them. loss_tokens: only these need the head.
        """
        return {
            "token": float(lengths.sum()),
            "loss token": float(loss_tokens),
            "attention pair": causal_pairs(lengths),
        }

    def _scaled_sizes(self, chunks: int, tp: int) -> dict[str, Any]:
        """Return the sizes of a tiny copy; grouped queries stay grouped."""
        groups = self.num_query_groups if self.num_query_groups == 1 else math.lcm(2, tp)
        grouped = self.num_attention_heads > self.num_query_groups
        return {
            "num_layers": chunks,
            "hidden_size": 32,
            "ffn_hidden_size": math.lcm(48, tp),
            "num_attention_heads": math.lcm(groups * (2 if grouped else 1), tp),
            "num_query_groups": groups,
            "head_size": 8,
            "vocab_size": None,
            "vocab_multiple": math.lcm(16, tp),
            "init_std": 0.1,
        }


class GeneratorSettings(FamilySettings):
    """The recipe keys under ``generators.<name>.model``."""

    in_channels: Width
    """Numbers per token of an item: those of a square of 2 × 2 pixels or latents."""
    condition_size: Width
    """Width of its condition: the hidden size of the language model."""
    max_pixels: Pixels = 1024 * 1024
    """Targets with more pixels are made smaller."""
    autoencoder: PathText | None = None
    """Folder of the frozen autoencoder that turns pixels into latents; null for pixels."""

    @property
    @abstractmethod
    def token_pixels(self) -> int:
        """Side in pixels of the square of an image that a token stands for."""

    @property
    @abstractmethod
    def most_rows(self) -> int:
        """Most hidden states of a condition."""

    @property
    def autoencoder_bytes(self) -> int:
        """Size of the autoencoder's files of weights."""
        files = Path(self.autoencoder).glob("*.safetensors") if self.autoencoder else ()
        return sum(file.stat().st_size for file in files)

    def problems(self, hidden_size: int) -> Iterator[tuple[str, str]]:
        """Yield keys, each with what is wrong with it. hidden_size: the language model's.

        Unlike checks of single settings, these read the autoencoder's configuration.
        """
        if self.condition_size != hidden_size:
            yield (
                "condition_size",
                f"got {self.condition_size}, but the language model's hidden states have "
                f"{hidden_size} numbers, and the condition consists of them; give it that size",
            )

    def grid_problems(self, tp: int, chunks: int) -> Iterator[str]:
        if tp * chunks > 1:
            yield f"tp={tp} and pp={chunks} must be 1: generators have data parallelism only"

    @abstractmethod
    def products(self) -> list[Product]:
        """Return all matrices and attention, in the order of a forward.

        Every parameter of two dimensions or more has one, under its name in ``weights``. Units are
        those of `counts`.
        """

    @abstractmethod
    def counts(self, grids: np.ndarray, condition_rows: np.ndarray) -> dict[str, float]:
        """Count each unit of `products` in items with grids (I, 3) in tokens, one forward each.

        condition_rows: (I,) hidden states that each is conditioned on.
        """


class Autoencoder(Protocol):
    """A frozen autoencoder of images, on the device."""

    def encode(self, images: Tensor) -> Tensor:
        """images (B, 3, h, w) in -1..1 -> latents (B, c, h', w'), the mean, normalised."""
        ...

    def decode(self, latents: Tensor) -> Tensor:
        """The inverse, in -1..1 but for rounding."""
        ...


class GeneratorFamily(Protocol):
    """A family of generators: a transformer of diffusers that learns by flow matching.

    Letters: B items, S tokens of each, line by line, C ``in_channels``, T hidden states
    of each condition, H their size.
    """

    Settings: type[GeneratorSettings]
    PIPELINE: str
    """The class of diffusers for a whole folder of this family."""
    RECIPE_KEYS: Mapping[str, Any]
    """Recipe keys of the generator's section, beside ``model``, that belong to such folders."""

    def build(self, settings: Any) -> nn.Module:
        """Build diffusers' module, unmodified. The caller decides where its parameters are."""
        ...

    def units(self, transformer: Any) -> list[nn.Module]:
        """Return its blocks in the order of a forward."""
        ...

    def predict(
        self,
        transformer: Any,
        tokens: Tensor,
        times: Tensor,
        condition: Tensor,
        lengths: Tensor,
        grid: tuple[int, int],
    ) -> Tensor:
        """Return the velocity (B, S, C) of ``tokens`` (B, S, C), all of one grid.

        Tokens are (1 - t) · x + t · noise for times t (B,) in 0..1, fp32, and the velocity is
        noise - x. condition: (B, T, H), the first ``lengths[b]`` rows are item b's; lengths:
        (B,) int64, best on the host; an item without a condition has 0. grid: height and width in
        tokens. Tokens and condition have the dtype in which the module computes.
        """
        ...

    def weights(self, settings: Any) -> list[Weight]:
        """Return every parameter, under its name in diffusers."""
        ...

    def autoencoder(self, folder: Path, device: torch.device, dtype: torch.dtype) -> Autoencoder:
        """Open the autoencoder in a folder of diffusers. Raises ValueError."""
        ...

    def settings_from_folder(self, folder: Path) -> dict[str, Any] | None:
        """Return settings by key of a folder with diffusers' ``transformer/config.json``.

        None for another family's. Raises ValueError, naming the key, for what we do not compute.
        """
        ...


class EncoderFamily(Protocol):
    """A family of encoders: a tower with its projector to the language model's width."""

    Settings: type[EncoderSettings]
    PROJECTOR: tuple[str, ...]
    """Prefixes of the names of the projector's parameters; all others are the tower's."""

    def build(self, settings: Any, ctx: ModuleContext, output_size: int, seed: int) -> nn.Module:
        """Build this rank's part of tower and projector; drawn weights agree in all layouts.

        A checkpoint fills those in ``ctx.provided``. ctx: process groups and dtype. output_size: H.

        The module has ``config``, Megatron's `TransformerConfig`; ``set_input_tensor([hidden])``,
        called by the schedule with what the previous stage sent, None on the first;
        ``prepare(grids, copy)``, all host work of a forward, done ahead in another thread, where
        ``copy`` brings a host tensor to the device; ``stage_shapes(items)``, the `StageShapes` of
        prepared items; and ``forward(patches, items)``:

        - patches: `mimo.families.wire.WirePatches`, or their values (P, C) in ``ctx.dtype``, on the
          first pipeline stage, else None. ``values(patches)`` gives the latter.
        - items: as prepared, or their grids, (I, 3) int64, every item as (t, h, w) in patches.
        - on the last stage it returns `bridge.ItemRows`: values (N, (1 + L)·H), the embeddings and
          every level side by side, and each item's number of rows, which is compared with the plan
          before anything is sent. On other stages it returns hidden states (P, 1, ...).

        Under sequence parallelism each rank gets all patches and returns its part of the rows,
        ceil(N / tp) of them, blank ones at the end. Without items it returns 0 rows of that width
        that are part of the graph, so that every parameter gets a gradient.
        """
        ...

    def weights_in_hf(self, settings: Any, output_size: int) -> list[Weight]:
        """Return every parameter of the whole module, as runs of the published tensors.

        A family without published checkpoints uses its own names; the memory check needs them.
        """
        ...


class PublishedEncoderFamily(EncoderFamily, Protocol):
    """A family whose models are part of published checkpoints in Hugging Face format."""

    def settings_from_hf(self, config: Config, processors: Processors) -> dict[str, Any]:
        """Return settings by key. Raises ValueError, naming the key, for what we do not compute."""
        ...


class LanguageFamily(Protocol):
    """A family of language models."""

    Settings: type[LanguageSettings]

    def settings_from_hf(self, config: Config) -> dict[str, Any]:
        """Return settings by key. Raises ValueError, naming the key, for what we do not compute."""
        ...

    def weights_in_hf(self, settings: Any) -> list[Weight]:
        """Return every parameter of the whole model. settings: with ``vocab_size``."""
        ...


class MegatronLanguageFamily(LanguageFamily, Protocol):
    """A family that Megatron can run."""

    def build(
        self,
        settings: Any,
        ctx: ModuleContext,
        num_tokens: int,
        max_sequence_length: int,
        seed: int,
    ) -> LanguageModel:
        """Build a chunk of this rank; drawn weights agree in all layouts.

        A checkpoint fills those in ``ctx.provided``. num_tokens: size of the vocabulary, which the
        family pads to V; padding takes no part in the loss. max_sequence_length: of any sequence.
        On the first stage the model takes ``decoder_input`` (S, B, H), or this rank's part of it,
        or looks up ``input_ids`` (B, S); on the last it returns losses of labels, else logits (V).
        """
        ...
