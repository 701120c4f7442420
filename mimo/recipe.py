"""The recipe: the keys that people type, their types, defaults and limits.

`load_recipe` reads a YAML file and overrides (`train.steps=20`) into frozen models. Unknown keys,
wrong types and values out of range are collected and raised once, each with its file and line.
What only makes sense once the ranks are known is checked in `mimo.layout`.
"""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    Field,
    PlainValidator,
    PrivateAttr,
    TypeAdapter,
    ValidationError,
    model_validator,
)
from ruamel.yaml import YAML

from mimo.bounds import (
    MAX_MICROBATCH_TOKENS,
    STRICT,
    AdapterRank,
    AdapterScale,
    Batch,
    Checkpoints,
    Decay,
    Epsilon,
    Layers,
    LearningRate,
    Microbatches,
    ModuleName,
    Norm,
    PathText,
    PrefetchSteps,
    RankOffset,
    Ranks,
    RunName,
    Samples,
    Seconds,
    Seed,
    SequenceLength,
    Share,
    SkippedSamples,
    SourceWeight,
    Steps,
    Threads,
    WarmupSteps,
    WeightDecay,
    Word,
)
from mimo.not_yet import refusals
from mimo.recipe_errors import RecipeError, nearest
from mimo.recipe_findings import STAGES, describe
from mimo.yaml_source import Location, YamlSource, dotted, read_yaml

__all__ = ["Recipe", "RecipeError", "load_recipe", "nearest"]

Recompute = Literal["none", "selective", "full"]
_MAX_ENTRIES = 64  # encoders of a model, media of an encoder


class Section(BaseModel):
    """A part of a recipe: nothing unknown, nothing coerced, nothing changed afterwards."""

    model_config = STRICT


class Grid(Section):
    """Sizes of a module's axes, as numbers of ranks. The module has `tp · cp · pp · dp` ranks."""

    tp: Ranks = 1
    sp: bool = False
    cp: Ranks = 1
    pp: Layers = 1
    vpp: Layers = 1
    dp: Ranks | None = None
    rank_offset: RankOffset | None = None

    @model_validator(mode="after")
    def _sequence_needs_tensor_parallel_ranks(self) -> "Grid":
        if self.sp and self.tp == 1:
            raise ValueError(
                "sp: true shards the sequence over the tp ranks, but tp is 1; "
                "set tp to 2 or more, or remove sp"
            )
        return self


Target = Literal["qkv", "proj", "fc1", "fc2"]


def _targets(targets: tuple[Target, ...]) -> tuple[Target, ...]:
    if not targets or len(set(targets)) < len(targets):
        raise ValueError(f"needs one or more of {', '.join(get_args(Target))}, each once")
    return targets


class LoRA(Section):
    """Low-rank adapters on linears of every transformer layer; what they adapt is frozen.

    `targets`: `qkv` and `proj` of attention, `fc1` and `fc2` of the MLP. Their output is
    multiplied by `alpha` / `rank`.
    """

    rank: AdapterRank = 16
    alpha: AdapterScale = 32.0
    # A list in YAML: only the container is converted, not its entries.
    targets: Annotated[tuple[Target, ...], Field(strict=False), AfterValidator(_targets)] = (
        get_args(Target)
    )


def _check_adapters_can_learn(freeze: bool | Literal["tower"], lora: LoRA | None) -> None:
    if freeze is True and lora is not None:
        raise ValueError(
            "freeze: true lets nothing learn, but lora adds adapters that learn; remove freeze "
            "(lora freezes the weights that it adapts) or remove lora"
        )


class Language(Section):
    """The language model; `model` holds the family's own settings, which the family checks.

    `lora`: only its adapters learn; embeddings, norms, head and the layers' own weights do not.
    """

    family: Word = "qwen3"
    grid: Grid = Grid()
    freeze: bool = False
    lora: LoRA | None = None
    learning_rate: LearningRate | None = None
    recompute: Recompute = "none"
    model: dict[str, Any] = {}

    @model_validator(mode="after")
    def _adapters_can_learn(self) -> "Language":
        _check_adapters_can_learn(self.freeze, self.lora)
        return self

    @property
    def trains(self) -> bool:
        """Whether any of its weights are updated."""
        return not self.freeze


def _number_or(word: str, number: Any, value: Any) -> Any:
    """`value` if it is `word` or a valid `number`; pydantic alone would report two errors."""
    if value != word or not isinstance(value, str):
        try:
            return TypeAdapter(number).validate_python(value, strict=True)
        except ValidationError as error:
            reason = error.errors()[0]["msg"].removeprefix("Input ")
            raise ValueError(
                f"needs '{word}' or a number of microbatches; a number {reason}"
            ) from None
    return value


def _run_ahead(value: Any) -> int | Literal["auto"]:
    return _number_or("auto", Microbatches, value)


def _freeze(value: Any) -> bool | Literal["tower"]:
    if isinstance(value, bool) or value == "tower":
        return value
    raise ValueError("needs true, false or 'tower' (all but the projector)")


def _encode_group(value: Any) -> int | Literal["all"]:
    return _number_or("all", Batch, value)


def _item_text(value: str) -> str:
    from data import item_text_problem  # here: the package loads numpy

    problem = item_text_problem(value)
    if problem:
        raise ValueError(problem)
    return value


class MediaTokens(Section):
    """How items of a media stand in the text.

    `placeholder`: the token that stands for each row of such an item.
    `template_token`: what the chat template writes for each such part; null for the placeholder.
    `item_text`: what stands for an item in the text, `{placeholder}` where the rows go.
    """

    placeholder: Word
    template_token: Word | None = None
    item_text: Annotated[str, Field(max_length=4096), AfterValidator(_item_text)] = "{placeholder}"


class Encoder(Section):
    """An encoder with its projector.

    `freeze`: `true` keeps all of its weights, `tower` all but the projector's.
    `lora`: only the adapters in the tower and the projector learn, as also with `freeze: tower`.
    `media`: the type of content part that it encodes, such as `image`, `video` or `audio`, whose
    `placeholder`, `template_token` and `item_text` are as of `MediaTokens`.
    `other_media`: the types that it encodes with the same weights, and how each stands in the text.
    `run_ahead`: microbatches encoded before the first gradient, where ranks are disjoint.
    `encode_group`: microbatches encoded in one go, where ranks are colocated.
    """

    family: Word
    media: Word = "image"
    placeholder: Word = "<|image_pad|>"
    template_token: Word | None = None
    item_text: Annotated[str, Field(max_length=4096), AfterValidator(_item_text)] = "{placeholder}"
    placement: Literal["disjoint", "colocated"] = "disjoint"
    grid: Grid = Grid()
    freeze: Annotated[bool | Literal["tower"], PlainValidator(_freeze)] = False
    lora: LoRA | None = None
    learning_rate: LearningRate | None = None
    recompute: Recompute = "none"
    other_media: Annotated[dict[Word, MediaTokens], Field(max_length=_MAX_ENTRIES)] = {}
    run_ahead: Annotated[
        int | Literal["auto"], PlainValidator(_run_ahead, Microbatches | Literal["auto"])
    ] = "auto"
    encode_group: Annotated[
        int | Literal["all"], PlainValidator(_encode_group, Batch | Literal["all"])
    ] = "all"
    model: dict[str, Any] = {}

    @model_validator(mode="after")
    def _adapters_can_learn(self) -> "Encoder":
        _check_adapters_can_learn(self.freeze, self.lora)
        return self

    @property
    def trains(self) -> bool:
        """Whether any of its weights are updated."""
        return self.freeze is not True

    @property
    def own_tokens(self) -> MediaTokens:
        """How items of its own `media` stand in the text."""
        return MediaTokens(
            placeholder=self.placeholder,
            template_token=self.template_token,
            item_text=self.item_text,
        )

    @property
    def media_tokens(self) -> dict[str, MediaTokens]:
        """How each media that it encodes stands in the text, its own `media` first."""
        return {self.media: self.own_tokens, **self.other_media}


class Bridge(Section):
    """How rows travel from the encoders to the language model.

    `timeout_seconds`: how long a transfer may take once it is waited for. On a GPU that includes
    the work queued before it, so give more than a step.
    """

    delivery: Literal["sharded", "replicated"] = "sharded"
    wire_dtype: Literal["fp32", "bf16", "fp16", "auto"] = "auto"
    check: Literal["first_steps", "always", "never"] = "first_steps"
    timeout_seconds: Seconds = 600.0


class Source(Section):
    """Shards of samples: a path or a glob, and how often its samples are drawn."""

    path: PathText
    weight: SourceWeight = 1.0


# YAML has lists, a frozen model wants tuples: only the container is converted, not its entries.
Sources = Annotated[tuple[Source, ...], Field(strict=False)]


def _at_least_one(sources: tuple[Source, ...]) -> tuple[Source, ...]:
    # Not `min_length`: that also counts entries dropped for errors of their own.
    if not sources:
        raise ValueError("needs at least one entry with a path")
    return sources


class Data(Section):
    """Samples, tokenizer and packing. Paths are relative to the current folder.

    `prepare` names a generator of example data, with its `prepare_settings`; `directory` is where
    it writes. `sequence_length` is the longest sample, in tokens. `packing`: the samples of a
    microbatch share one sequence; without it each is one, padded to the longest.
    """

    prepare: Word | None = None
    prepare_settings: dict[str, Any] = {}
    directory: PathText | None = None
    sources: Annotated[Sources, AfterValidator(_at_least_one)]
    validation: Sources = ()
    test: Sources = ()
    tokenizer: PathText
    sequence_length: SequenceLength
    shuffle_block: Samples = 1
    packing: bool = True
    max_skipped_samples: SkippedSamples = 100
    prefetch_steps: PrefetchSteps = 2


class Train(Section):
    """The optimisation, and what is written when. `*_every` are numbers of steps; null is never.

    `precision`: fp64 is for checking results on a CPU.
    `distributed_optimizer`: each data-parallel rank keeps its share of Adam's state only.
    """

    steps: Steps
    global_batch_size: Batch
    micro_batch_size: Batch = 1
    precision: Literal["fp64", "fp32", "bf16"] = "fp32"
    seed: Seed = 1
    learning_rate: LearningRate = 1e-3
    warmup_steps: WarmupSteps = 0
    min_learning_rate_ratio: Share = 0.1
    optimizer: Literal["adam", "sgd"] = "adam"
    weight_decay: WeightDecay = 0.0
    adam_beta1: Decay = 0.9
    adam_beta2: Decay = 0.95
    adam_eps: Epsilon = 1e-8
    clip_grad_norm: Norm | None = 1.0
    overlap_grad_reduce: bool = False
    distributed_optimizer: bool = False
    log_every: Steps = 10
    validate_every: Steps | None = None
    validation_batches: Steps = 4
    save_every: Steps | None = None
    keep_checkpoints: Checkpoints = 2
    run_dir: PathText = "runs"
    threads_per_rank: Threads | None = None

    @model_validator(mode="after")
    def _state_can_be_distributed(self) -> "Train":
        if self.distributed_optimizer and self.optimizer != "adam":
            raise ValueError(
                f"distributed_optimizer: true shares out Adam's state, but optimizer is "
                f"{self.optimizer}; set optimizer: adam, or remove distributed_optimizer"
            )
        if self.distributed_optimizer and self.precision == "fp64":
            raise ValueError(
                "distributed_optimizer: true works in fp32 and bf16, but precision is fp64; "
                "set precision: fp32, or remove distributed_optimizer"
            )
        return self


class Recipe(Section):
    """One training run.

    `init_from`: a folder in Hugging Face format to start from. It gives weights, and what the
    recipe leaves out: families, sizes, tokenizer, placeholders, an encoder on a rank of its own.
    """

    name: RunName
    init_from: PathText | None = None
    language: Language = Language()
    encoders: Annotated[dict[ModuleName, Encoder], Field(max_length=_MAX_ENTRIES)] = {}
    bridge: Bridge = Bridge()
    data: Data
    train: Train

    _source: YamlSource | None = PrivateAttr(default=None)

    @model_validator(mode="after")
    def _module_names_are_distinct(self) -> "Recipe":
        if "language" in self.encoders:
            raise ValueError("encoders.language: the name 'language' is the language model's own")
        return self

    @model_validator(mode="after")
    def _tokens_can_be_counted(self) -> "Recipe":
        longest, samples = self.data.sequence_length, self.train.micro_batch_size
        if longest * samples > MAX_MICROBATCH_TOKENS:
            raise ValueError(
                f"train.micro_batch_size {samples} · data.sequence_length {longest} makes "
                f"{longest * samples} tokens of a microbatch, but at most {MAX_MICROBATCH_TOKENS} "
                f"can be counted; lower one of them"
            )
        return self

    @property
    def run_dir(self) -> Path:
        """Where the run of this recipe lives."""
        return Path(self.train.run_dir) / self.name

    def problem(self, location: Location, message: str) -> str:
        """A line for a RecipeError about the value at `location`, with file and line if known."""
        if self._source is not None:
            return self._source.problem(location, message)
        return f"{dotted(location)}: {message}"

    def to_yaml(self) -> str:
        """The resolved recipe, defaults included, as YAML that `load_recipe` reads back."""
        stream = io.StringIO()
        yaml = YAML()
        yaml.default_flow_style = False
        yaml.dump(self.model_dump(mode="json"), stream)
        return stream.getvalue()


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read the recipe at `path` with `overrides` such as `language.grid.tp=2` applied in order.

    Raises RecipeError with one line per error: a file that is missing or not YAML, an override
    that cannot be applied, an unknown key, a wrong type, a value out of range, and what this
    version does not support yet. A recipe with stages has several: see `mimo.stages`.
    """
    source = read_yaml(Path(path), overrides)
    if STAGES in source.data:
        message = "a recipe without stages is needed here; give that of one stage"
        raise RecipeError(*source.problems, source.problem((STAGES,), message))
    return parse_recipe(source)


def fill(data: dict[str, Any]) -> list[tuple[Location, str]]:
    """Complete plain data in place from the folder of `init_from`, if any; returns all problems."""
    if data.get("init_from") is None:
        return []
    from mimo.hf.recipe_keys import fill_recipe  # here, because reading configs is slow

    return list(fill_recipe(data))


def parse_recipe(source: YamlSource) -> Recipe:
    """The recipe that `source` holds. Raises RecipeError like `load_recipe`."""
    problems = [*source.problems, *(source.problem(*found) for found in fill(source.data))]
    recipe = None
    try:
        recipe = Recipe.model_validate(source.data)
    except ValidationError as error:
        problems += [describe(source, details, Recipe) for details in error.errors()]
    problems += [source.problem(location, message) for location, message in refusals(source.data)]
    if recipe is None or problems:
        raise RecipeError(*problems)
    recipe._source = source
    return recipe
