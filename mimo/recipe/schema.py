"""The recipe: the keys that people type, their types, defaults and limits.

`read_recipe` reads a YAML file and overrides (`train.steps=20`) into frozen models. Unknown keys,
wrong types and values out of range are collected and raised once, each with its file and line.
What only makes sense once the ranks are known is checked in `mimo.layout.grids`.
"""

import io
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, PrivateAttr, ValidationError, model_validator
from ruamel.yaml import YAML

from mimo import bounds
from mimo.errors import RecipeError, nearest
from mimo.recipe.findings import PHASES, describe
from mimo.recipe.modules import MAX_ENTRIES, Encoder, Grid, Language, LoRA, MediaTokens, Section
from mimo.recipe.source import Location, YamlSource, dotted, read_yaml
from mimo.recipe.unsupported import refusals

__all__ = [
    "Encoder",
    "Grid",
    "Language",
    "LoRA",
    "MediaTokens",
    "Recipe",
    "RecipeError",
    "nearest",
    "read_recipe",
]


class Bridge(Section):
    """How rows travel from the encoders to the language model.

    `timeout_seconds`: how long a transfer may take once it is waited for. On a GPU that includes
    the work queued before it, so give more than a step.
    """

    delivery: Literal["sharded", "replicated"] = "sharded"
    wire_dtype: Literal["fp32", "bf16", "fp16", "auto"] = "auto"
    check: Literal["first_steps", "always", "never"] = "first_steps"
    timeout_seconds: bounds.Seconds = 600.0


class Source(Section):
    """Shards of samples: a path or a glob, and how often its samples are drawn."""

    path: bounds.PathText
    weight: bounds.SourceWeight = 1.0


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

    prepare: bounds.Word | None = None
    prepare_settings: dict[str, Any] = {}
    directory: bounds.PathText | None = None
    sources: Annotated[Sources, AfterValidator(_at_least_one)]
    validation: Sources = ()
    test: Sources = ()
    tokenizer: bounds.PathText
    sequence_length: bounds.SequenceLength
    shuffle_block: bounds.Samples = 1
    packing: bool = True
    max_skipped_samples: bounds.SkippedSamples = 100
    prefetch_steps: bounds.PrefetchSteps = 2


class Train(Section):
    """The optimisation, and what is written when. `*_every` are numbers of steps; null is never.

    `precision`: fp64 is for checking results on a CPU.
    `distributed_optimizer`: each data-parallel rank keeps its share of Adam's state only.
    """

    steps: bounds.Steps
    global_batch_size: bounds.Batch
    micro_batch_size: bounds.Batch = 1
    precision: Literal["fp64", "fp32", "bf16"] = "fp32"
    seed: bounds.Seed = 1
    learning_rate: bounds.LearningRate = 1e-3
    warmup_steps: bounds.WarmupSteps = 0
    min_learning_rate_ratio: bounds.Share = 0.1
    optimizer: Literal["adam", "sgd"] = "adam"
    weight_decay: bounds.WeightDecay = 0.0
    adam_beta1: bounds.Decay = 0.9
    adam_beta2: bounds.Decay = 0.95
    adam_eps: bounds.Epsilon = 1e-8
    clip_grad_norm: bounds.Norm | None = 1.0
    overlap_grad_reduce: bool = False
    distributed_optimizer: bool = False
    log_every: bounds.Steps = 10
    validate_every: bounds.Steps | None = None
    validation_batches: bounds.Steps = 4
    save_every: bounds.Steps | None = None
    keep_checkpoints: bounds.Checkpoints = 2
    run_dir: bounds.PathText = "runs"
    threads_per_rank: bounds.Threads | None = None

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

    name: bounds.RunName
    init_from: bounds.PathText | None = None
    language: Language = Language()
    encoders: Annotated[dict[bounds.ModuleName, Encoder], Field(max_length=MAX_ENTRIES)] = {}
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
        if longest * samples > bounds.MAX_MICROBATCH_TOKENS:
            raise ValueError(
                f"train.micro_batch_size {samples} · data.sequence_length {longest} makes "
                f"{longest * samples} tokens of a microbatch, but at most "
                f"{bounds.MAX_MICROBATCH_TOKENS} can be counted; lower one of them"
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
        """The resolved recipe, defaults included, as YAML that `read_recipe` reads back."""
        stream = io.StringIO()
        yaml = YAML()
        yaml.default_flow_style = False
        yaml.dump(self.model_dump(mode="json"), stream)
        return stream.getvalue()


Fill = Callable[[dict[str, Any]], Iterable[tuple[Location, str]]]
"""Completes a recipe's plain data in place; yields the location and message of every problem."""


def fill_nothing(data: dict[str, Any]) -> Iterable[tuple[Location, str]]:
    """Leave the data as it was written."""
    return ()


def read_recipe(path: Path, overrides: Sequence[str] = (), fill: Fill = fill_nothing) -> Recipe:
    """Read the recipe at `path` with `overrides` such as `language.grid.tp=2` applied in order.

    `fill` adds what `init_from` says; `mimo.hf.recipes` has the one for Hugging Face folders.
    Raises RecipeError with one line per error: a file that is missing or not YAML, an override
    that cannot be applied, an unknown key, a wrong type, a value out of range, and what this
    version does not support yet. A recipe with phases has several: see `mimo.recipe.phases`.
    """
    source = read_yaml(Path(path), overrides)
    if PHASES in source.data:
        message = "a recipe without phases is needed here; give that of one phase"
        raise RecipeError(*source.problems, source.problem((PHASES,), message))
    return parse_recipe(source, fill)


def parse_recipe(source: YamlSource, fill: Fill = fill_nothing) -> Recipe:
    """The recipe that `source` holds. Raises RecipeError like `read_recipe`."""
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
