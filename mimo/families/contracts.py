"""What a family offers: a Python module with the names below, found by the name in the recipe.

A family of encoders is a file in `encoders`, a family of language models one in `mimo.languages`.
Modules whose names begin with an underscore hold what families share. A family satisfies
`EncoderFamily` or `LanguageFamily`. If its models are published in Hugging Face format, so that a
recipe may start from such a folder, it also satisfies the protocol of published families.

Letters: P patches of all items of a call, C numbers per patch, I items, N rows, L feature levels,
H hidden size of the language model, D of the tower, S sequence, B batch, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, Self

import numpy as np

from data.media.processor import Media
from mimo.families.flops import Product
from mimo.families.hf_config import Config
from mimo.families.hf_preprocessing import Processors
from mimo.families.item_rules import ItemRules
from mimo.families.keymap import Weight

if TYPE_CHECKING:
    from torch import nn

    from mimo.engines.megatron import LanguageModel, ModuleContext


class FamilySettings(Protocol):
    """Sizes of a model: a pydantic model with `mimo.bounds.STRICT`, every number bounded.

    Whatever it accepts can be built on any grid in which `check_grid` finds no problem.
    """

    @property
    def num_layers(self) -> int:
        """Transformer layers. All have parameters of the same sizes, whatever their number."""
        ...

    @property
    def hidden_size(self) -> int:
        """Width of a layer: H of a language model, D of a tower."""
        ...

    def layer_kinds(self) -> tuple[str, ...]:
        """One name per layer; layers that compute different things have different names."""
        ...

    def scaled_down(self, chunks: int, tp: int) -> Self:
        """The smallest settings of the same character, for `mimo verify`.

        ``chunks``, the chunks of all pipeline stages, and ``tp`` tensor-parallel ranks divide them;
        every chunk has a layer of every kind there was. Weights are drawn large enough for every
        part of the model to matter to the loss.
        """
        ...

    def model_copy(self, *, update: Mapping[str, Any] | None = None) -> Self:
        """Pydantic's."""
        ...

    @classmethod
    def model_validate(cls, obj: Any) -> Self:
        """Pydantic's."""
        ...

    def model_dump(self) -> dict[str, Any]:
        """Pydantic's."""
        ...


class EncoderSettings(FamilySettings, Protocol):
    """The recipe keys under ``encoders.<name>.model``."""

    def processor(self, media: str = "image") -> Media[Any]:
        """What turns items of that media into patches and says how many rows each item becomes."""
        ...

    def products(self, output_size: int) -> list[Product]:
        """All matrices and attention of tower and projector, in the order of a forward.

        Every parameter of two dimensions or more has one, under its name in ``weights_in_hf``; one
        that is looked up has no elements. output_size: H.
        """
        ...

    def counts(self, grids: np.ndarray) -> dict[str, float]:
        """How many there are of each unit of `products` in items with these grids (I, 3)."""
        ...


class LanguageSettings(FamilySettings, Protocol):
    """The recipe keys under ``language.model``."""

    def num_tokens(self, tokenizer_size: int) -> int:
        """How many tokens the model knows, given a tokenizer of this many.

        Raises ValueError if the tokenizer has more than the model.
        """
        ...

    def padded_vocab_size(self, num_tokens: int) -> int:
        """V, the rows of the embedding for this many tokens, the same in every layout."""
        ...

    def products(self, vocab_size: int) -> list[Product]:
        """As of `EncoderSettings`. vocab_size: V."""
        ...

    def counts(
        self, lengths: np.ndarray, item_rows: np.ndarray, loss_tokens: int
    ) -> dict[str, float]:
        """How many there are of each unit of `products` in segments of these lengths (n,).

        lengths, item_rows: without padding; item_rows (I,) of all items in them. loss_tokens: in
        all of them together, for which alone the head is needed.
        """
        ...


class EncoderFamily[S: EncoderSettings](Protocol):
    """A family of encoders: a tower with its projector to the language model's width."""

    @property
    def Settings(self) -> type[S]:  # noqa: N802 - the name of a class in the module
        """The settings' class."""
        ...

    @property
    def PROJECTOR(self) -> tuple[str, ...]:  # noqa: N802 - a constant of the module
        """How the names of the projector's parameters begin; all others are the tower's."""
        ...

    def check_grid(self, settings: S, tp: int, pp: int) -> list[str]:
        """Problems of a grid with these sizes, each one sentence that names axis, key and size."""
        ...

    def num_levels(self, settings: S) -> int:
        """L, the feature levels that it emits besides the embeddings, 0 for most.

        Level k is added to the hidden states after the language model's k-th layer (DeepStack).
        """
        ...

    def build(self, settings: S, ctx: ModuleContext, output_size: int, seed: int) -> nn.Module:
        """This rank's part of tower and projector, with freshly drawn weights.

        The weights are the same in every layout; a checkpoint fills those in ``ctx.provided``.
        ctx: process groups and dtype. output_size: H.

        The module has ``config``, Megatron's `TransformerConfig`; ``set_input_tensor([hidden])``,
        called by the schedule with what the previous stage sent, None on the first;
        ``prepare(grids, copy)``, all host work of a forward, done ahead in another thread, where
        ``copy`` brings a host tensor to the device; ``stage_shapes(items)``, the `StageShapes` of
        prepared items; and ``forward(patches, items)``:

        - patches: `mimo.families.wire.WirePatches`, or their values (P, C) in ``ctx.dtype``, on the
          first pipeline stage, else None. ``values(patches)`` gives the latter.
        - items: as prepared, or their grids, (I, 3) int64, every item as (t, h, w) in patches.
        - on the last stage it returns `bridge.ItemRows`: values (N, (1 + L)·H), the embeddings and
          every level side by side, and how many rows each item became, counted on what was
          computed; the counts are compared with the plan before anything is sent. On other stages
          it returns the hidden states for the next stage, (P, 1, ...).

        Under sequence parallelism each rank gets all patches and returns its part of the rows,
        ceil(N / tp) of them, blank ones at the end. Without items it returns 0 rows of that width
        that are part of the graph, so that every parameter gets a gradient.
        """
        ...

    def weights_in_hf(self, settings: S, output_size: int) -> list[Weight]:
        """Every parameter of the whole module by its name, with the tensors it is made of.

        These have their names in the published checkpoints. A family without any uses the names of
        its parameters: every family must list them, because parameters are also counted here.
        output_size: H.
        """
        ...


class PublishedEncoderFamily[S: EncoderSettings](EncoderFamily[S], Protocol):
    """A family whose models are part of published checkpoints in Hugging Face format."""

    def settings_from_hf(self, config: Config, processors: Processors) -> dict[str, Any]:
        """Settings by key, from a whole model's configuration and how its items are prepared.

        Raises ValueError, naming their key, for what we do not compute.
        """
        ...


class LanguageFamily[S: LanguageSettings](Protocol):
    """A family of language models."""

    @property
    def Settings(self) -> type[S]:  # noqa: N802 - the name of a class in the module
        """The settings' class."""
        ...

    @property
    def ITEM_RULES(self) -> ItemRules:  # noqa: N802 - a constant of the module
        """How the family treats tokens that stand for items."""
        ...

    def check_grid(self, settings: S, tp: int, pp: int, vocab_size: int) -> list[str]:
        """Problems of a grid with these sizes, each one sentence that names axis, key and size.

        pp: number of chunks of all pipeline stages. vocab_size: V.
        """
        ...

    def build(
        self,
        settings: S,
        ctx: ModuleContext,
        num_tokens: int,
        max_sequence_length: int,
        seed: int,
    ) -> LanguageModel:
        """This rank's chunk, Megatron's `GPTModel`, with freshly drawn weights.

        The weights are the same in every layout; a checkpoint fills those in ``ctx.provided``.
        It is called once per chunk.

        ctx: process groups, dtype and the chunk. num_tokens: the number that the model knows; the
        family pads it to V, and padding takes no part in the loss. max_sequence_length: tokens of
        the longest sequence, S.

        On the first stage the model takes ``decoder_input`` (S, B, H), or its part of the sequence
        under sequence or context parallelism, or looks up ``input_ids`` (B, S) itself; on the last
        it returns a loss per token if it is given labels, else logits over V.
        """
        ...

    def weights_in_hf(self, settings: S) -> list[Weight]:
        """Every parameter of the whole model by its name, with the tensors it is made of.

        Like `EncoderFamily.weights_in_hf`. settings: with ``vocab_size``.
        """
        ...


class PublishedLanguageFamily[S: LanguageSettings](LanguageFamily[S], Protocol):
    """A family whose models are published in Hugging Face format."""

    def settings_from_hf(self, config: Config) -> dict[str, Any]:
        """Settings by key, from a whole model's configuration.

        Raises ValueError, naming their key, for what we do not compute.
        """
        ...
