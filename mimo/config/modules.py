"""Sections of a recipe about modules: family, grid, adapters, modalities."""

import re
from collections.abc import Callable
from fnmatch import fnmatchcase as fnmatch
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    Field,
    ValidationError,
    WrapValidator,
    model_validator,
)

from mimo.config import bounds

Engine = Literal["megatron", "fsdp"]
Recompute = Literal["none", "selective", "full"]
ReduceGradients = Literal["step", "microbatch"]
MAX_ENTRIES = 64  # encoders of a model, modalities of an encoder


class Section(BaseModel):
    """A part of a recipe: refuses unknown keys and other types, and is frozen."""

    model_config = bounds.STRICT


class Grid(Section):
    """Sizes of a module's axes, as numbers of ranks. The module has `tp · cp · pp · dp` ranks."""

    tp: bounds.Ranks = 1
    """Tensor parallelism: ranks that split every layer."""
    sp: bool = False
    """Sequence parallelism: the tp ranks also split the sequence between layers."""
    cp: bounds.Ranks = 1
    """Context parallelism: ranks that split every sequence."""
    pp: bounds.Layers = 1
    """Pipeline parallelism: stages that split the layers."""
    vpp: bounds.Layers = 1
    """Chunks of layers per pipeline stage; more than 1 interleaves the pipeline."""
    ep: bounds.Ranks = 1
    """Expert parallelism: ranks of a stage that share out the experts of a sparse language model.
    These ranks exchange tokens. `ep · etp` must divide `tp · cp · dp`."""
    etp: bounds.Ranks = 1
    """Expert tensor parallelism: ranks that split every expert, for experts instead of `tp`."""
    dp: bounds.Ranks | None = None
    """Data parallelism: lanes (replicas) that process different samples. One module may leave it
    out; it then follows from the number of ranks."""
    dp_replicate: bounds.Ranks = 1
    """With `engine: fsdp`, groups of lanes that each hold all weights (hybrid sharding); 1 shards
    the weights over all lanes."""
    rank_offset: Annotated[int, Field(ge=0, le=bounds.MAX_RANKS)] | None = None
    """First rank of the module; null: disjoint encoders come first, then the language model."""

    @model_validator(mode="after")
    def _sequence_needs_tensor_parallel_ranks(self) -> "Grid":
        if self.sp and self.tp == 1:
            raise ValueError(
                "sp: true shards the sequence over the tp ranks, but tp is 1; "
                "set tp to 2 or more, or remove sp"
            )
        return self


TARGETS = ("qkv", "proj", "fc1", "fc2")
"""Linears of a transformer layer that adapters may have."""
_PATTERN = re.compile(r".*[.*?].*")


def _targets(targets: tuple[str, ...]) -> tuple[str, ...]:
    are_known = all(target in TARGETS or _PATTERN.fullmatch(target) for target in targets)
    if not targets or len(set(targets)) < len(targets) or not are_known:
        raise ValueError(
            f"needs one or more of {', '.join(TARGETS)}, or patterns of names such as "
            f"'*.q_proj', each once"
        )
    return targets


class LoRA(Section):
    """Low-rank adapters on linears of every transformer layer, whose weights are frozen."""

    rank: Annotated[int, Field(ge=1, le=2**16)] = 16
    """Inner size of the adapters."""
    alpha: Annotated[float, Field(gt=0, le=1e6)] = 32.0
    """The adapters' output is multiplied by `alpha` / `rank`."""
    targets: Annotated[
        tuple[bounds.Word, ...],
        Field(strict=False, max_length=MAX_ENTRIES),
        AfterValidator(_targets),
    ] = TARGETS
    """Linears that are adapted: `qkv` and `proj` of attention, `fc1` and `fc2` of the MLP; with
    `family: transformers`, patterns of names in transformers, such as `*.q_proj`."""

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def adapts(self, weight: str) -> bool:
        linear, _, kind = weight.rpartition(".")
        return kind == "weight" and any(
            fnmatch(linear, target)
            if target not in TARGETS
            else ".layers." in linear and linear.endswith(f".linear_{target}")
            for target in self.targets
        )


class Module(Section):
    """Keys of every module."""

    family: bounds.Word
    """Name of a file in `encoders/`, `generators/` or `mimo/families/languages/`."""
    engine: Engine = "megatron"
    """What runs it; with `fsdp` it is the module of transformers in the folder of `init_from`."""
    reshard_after_forward: bool = True
    """With `engine: fsdp`, free a layer's gathered weights between its forward and backward."""
    reduce_gradients: ReduceGradients = "step"
    """With `engine: fsdp`, when lanes sum gradients: once a `step`, or after each `microbatch`,
    with more messages but less memory."""
    grid: Grid = Grid()
    """The ranks and their axes."""
    lora: LoRA | None = None
    """Train only low-rank adapters, and the projector of an encoder whose family names one."""
    learning_rate: bounds.LearningRate | None = None
    """Peak learning rate of this module; null takes `train.learning_rate`."""
    warmup_steps: bounds.WarmupSteps | None = None
    """Steps over which its learning rate rises from zero; null takes `train.warmup_steps`."""
    recompute: Recompute = "none"
    """Activations to recompute in the backward pass: none, core attention, or all of each layer."""
    model: dict[str, Any] = {}
    """Sizes and other settings of the family; see its section below."""
    freeze: Any = False
    """Weights that are not updated."""

    @property
    def trains(self) -> bool:
        return self.freeze is not True

    @model_validator(mode="after")
    def _adapters_can_learn(self) -> "Module":
        if self.freeze is True and self.lora is not None:
            raise ValueError(
                "freeze: true trains nothing, but lora adds adapters that train; remove freeze "
                "(lora freezes the weights that it adapts) or remove lora"
            )
        return self


def one_of(choices: str) -> WrapValidator:
    """Report one error, which names the `choices`; pydantic would report one for each of them."""

    def check(value: Any, validate: Callable[[Any], Any]) -> Any:
        try:
            return validate(value)
        except ValidationError as error:  # the first is about the number, if any
            reason = error.errors()[0]["msg"].removeprefix("Input ")
            hint = f"; a number {reason}" if "number" in choices else ""
            raise ValueError(f"needs {choices}{hint}") from None

    return WrapValidator(check)


Names = Annotated[tuple[str, ...], Field(strict=False, min_length=1, max_length=MAX_ENTRIES)]
_PATTERNS = "a list of patterns of names, such as ['*.gate.*']"
Freeze = Annotated[bool | Names, one_of(f"true, false or {_PATTERNS}")]
FreezeEncoder = Annotated[
    bool | Names | Literal["tower"],
    one_of(f"true, false, 'tower' (all but the projector) or {_PATTERNS}"),
]


class Language(Module):
    """The language model."""

    family: bounds.Word = "qwen3"
    """Name of a file in `mimo/families/languages/`."""
    freeze: Freeze = False
    """`true` freezes all weights; a list freezes weights by patterns of names: `["*.gate.*"]`."""


def _item_text(value: str) -> str:
    if value.count("{placeholder}") != 1:
        raise ValueError("needs {placeholder} exactly once, where the rows go")
    return value


class MediaTokens(Section):
    """How items of a modality appear in the text."""

    placeholder: bounds.Word
    """Token that stands for each embedding of an item."""
    template_token: bounds.Word | None = None
    """What the chat template writes for each item; null for the placeholder."""
    item_text: Annotated[str, Field(max_length=4096), AfterValidator(_item_text)] = "{placeholder}"
    """Text that stands for an item, with `{placeholder}` where its embeddings go."""


class Encoder(MediaTokens, Module):
    """An encoder with its projector."""

    media: bounds.Word = "image"
    """Modality that it encodes: the type of content parts, such as `image` or `video`."""
    placeholder: bounds.Word = "<|image_pad|>"
    """Token that stands for each embedding of an item."""
    other_media: Annotated[dict[bounds.Word, MediaTokens], Field(max_length=MAX_ENTRIES)] = {}
    """Further modalities that the same weights encode, and how each appears in the text."""
    placement: Literal["disjoint", "colocated"] = "disjoint"
    """`disjoint` runs on separate ranks, `colocated` on those of the language model."""
    freeze: FreezeEncoder = False
    """Freeze all weights (`true`), all but the projector's (`tower`), or by patterns of names."""
    run_ahead: Annotated[
        bounds.Microbatches | Literal["auto"], one_of("'auto' or a number of microbatches")
    ] = "auto"
    """Microbatches that a disjoint encoder encodes before the first gradient returns; `auto` is one
    more than the fewest that cannot deadlock."""
    encode_group: Annotated[
        bounds.Batch | Literal["all"], one_of("'all' or a number of microbatches")
    ] = "all"
    """Microbatches that a colocated encoder encodes at once."""

    @property
    def media_tokens(self) -> dict[str, MediaTokens]:
        """How each modality that it encodes appears in the text, `media` first."""
        return {self.media: self, **self.other_media}


class Generator(Module):
    """A generator: it turns hidden states of the language model into items of its modality."""

    engine: Literal["fsdp"] = "fsdp"
    """The engine: diffusers' own module under FSDP2."""
    media: bounds.Word = "image"
    """Modality that it makes: content parts of this type in an assistant's message are its
    targets."""
    placement: Literal["disjoint", "colocated"] = "disjoint"
    """`disjoint` runs on separate ranks, `colocated` on those of the language model."""
    freeze: Freeze = False
    """`true` freezes all weights; a list freezes weights by patterns of names."""
    condition: Literal["queries", "prompt"] = "queries"
    """Hidden states that it gets: those of learned `queries`, or of the `prompt` (the tokens before
    the item)."""
    queries: Annotated[int, Field(ge=1, le=2**14)] = 64
    """With `condition: queries`, number of learned query positions per item."""
    query_learning_rate: bounds.LearningRate | None = None
    """Peak learning rate of the queries; null takes the language model's."""
    skipped_tokens: Annotated[int, Field(ge=0, le=2**14)] = 0
    """With `condition: prompt`, number of first tokens of a sample that no condition has."""
    system_prompt: Annotated[str, Field(max_length=65536)] | None = None
    """System message for chats that have none and are answered with an item. `skipped_tokens` can
    leave it out of the condition."""
    condition_dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of items that are trained without a condition; guidance needs some."""
    loss_weight: Annotated[float, Field(gt=0, le=1e6)] = 1.0
    """Weight of its loss; the loss of the text has weight 1."""
    time_mean: Annotated[float, Field(ge=-10, le=10)] = 0.0
    """Mean of the normal distribution whose sigmoid gives the times of the noise."""
    time_std: Annotated[float, Field(gt=0, le=10)] = 1.0
    """Standard deviation of that distribution."""
    time_shift: Annotated[float, Field(gt=0, le=100)] = 1.0
    """Shift s of the times: t becomes s · t / (1 + (s - 1) · t); above 1 favours more noise."""
    start_token: bounds.Word = "<|image_gen_start|>"
    """Token before an item, which the model learns to write; added to a tokenizer without it."""
    end_token: bounds.Word = "<|image_gen_end|>"
    """Token after an item; added likewise."""

    @property
    def num_queries(self) -> int:
        """Query positions of an item in the text."""
        return self.queries if self.condition == "queries" else 0

    @property
    def output(self) -> str:
        """The name of its modality as an output, beside those that encoders take."""
        return f"output.{self.media}"
