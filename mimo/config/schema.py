"""The recipe: the keys that people type, their types, defaults and limits.

`read_recipe` reads a YAML file and overrides (`train.steps=20`) into frozen models. Unknown keys,
wrong types and values out of range are collected and raised once, each with its file and line.
What only makes sense once the ranks are known is checked in `mimo.parallel.build`.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, PrivateAttr, ValidationError, model_validator

from mimo.config import bounds
from mimo.config.cluster import Cluster
from mimo.config.data import Data
from mimo.config.findings import PHASES, descriptions
from mimo.config.modules import MAX_ENTRIES, Encoder, Language, Section, word_or_number
from mimo.config.source import Location, YamlSource, as_yaml, dotted, read_yaml
from mimo.errors import RecipeError

LANGUAGE = "language"
"""The name of the language model's module; all others are encoders."""


_NAMES_IN_CHECKPOINTS = {"ema", "optimizer"}


def key_of(module: str) -> Location:
    """Where a recipe says what the module of this name is."""
    return (LANGUAGE,) if module == LANGUAGE else ("encoders", module)


class Bridge(Section):
    """How rows travel from the encoders to the language model."""

    delivery: Literal["sharded", "replicated"] = "sharded"
    """`sharded` sends each row only to the rank that holds its position; `replicated` sends all
    rows to every rank of the lane."""
    wire_dtype: Literal["fp32", "bf16", "fp16", "auto"] = "auto"
    """Dtype of rows and their gradients on the way; `auto` is that of the weights."""
    block_ranks: bounds.Ranks = 512
    """The most ranks at either end of a bridge that exchange rows with one another. Larger ends are
    cut into blocks of lanes, as far as the numbers of lanes have a common divisor; items are
    balanced within a block."""
    check: Literal["first_steps", "always", "never"] = "first_steps"
    """When ranks compare their plans of who sends what."""
    timeout_seconds: bounds.Seconds = 600.0
    """How long a rank waits for a transfer before the run ends; on a GPU this includes queued work,
    so give more than a step."""


class Profile(Section):
    """Which steps of which ranks are traced by PyTorch's profiler."""

    steps: Annotated[tuple[bounds.StepNumber, bounds.StepNumber], Field(strict=False)]
    """The first and last step to trace, counted from 0 as in metrics.jsonl."""
    ranks: Annotated[tuple[bounds.RankNumber, ...], Field(strict=False)] = (0,)
    """The ranks; each writes a file of its own to the run folder's `profile/`."""

    @model_validator(mode="after")
    def _last_is_not_before_first(self) -> "Profile":
        first, last = self.steps
        if last < first:
            raise ValueError(
                f"steps: got [{first}, {last}], but the last step is before the first; write "
                f"[{last}, {first}]"
            )
        return self


class Train(Section):
    """The optimisation, and what is written when."""

    steps: bounds.Steps
    """Length of the run."""
    global_batch_size: bounds.Batch
    """Samples of a step, over all ranks; with `data.tokens_per_microbatch`, packed sequences."""
    micro_batch_size: bounds.Batch = 1
    """Samples that one lane of the language model processes at a time; must be 1 with
    `data.tokens_per_microbatch`."""
    precision: Literal["fp64", "fp32", "bf16"] = "fp32"
    """Dtype of weights and computation; `fp64` is for checking results on a CPU."""
    fp8: Literal["none", "current", "block", "mxfp8"] = "none"
    """8-bit linears in the language model's layers, by Transformer Engine: scaled by tensor
    (`current`), by blocks of 128 (`block`, Hopper) or of 32 (`mxfp8`, Blackwell)."""
    seed: bounds.Seed = 1
    """Seed of freshly drawn weights and of the order of samples."""
    learning_rate: bounds.LearningRate = 1e-3
    """Peak learning rate of every module that does not set its own."""
    warmup_steps: bounds.WarmupSteps = 0
    """Steps over which the learning rate of every module that does not set its own rises from zero.
    """
    schedule: Literal["constant", "cosine", "linear", "wsd"] = "cosine"
    """How the learning rate changes after warm-up: it stays, falls along half a cosine or
    linearly, or stays until the last `decay_steps` and then falls linearly (`wsd`)."""
    decay_steps: bounds.Steps | None = None
    """Of `schedule: wsd`: steps at the end in which the learning rate falls; null for a tenth."""
    min_learning_rate_ratio: bounds.Share = 0.1
    """Learning rate that the schedule falls to, as a share of the peak."""
    max_skipped_steps: bounds.SkippedSteps = 3
    """Steps in a row whose loss or gradient norm is not finite, and which therefore update no
    module, before the run stops; 0 stops it at the first."""
    loss_spike_zscore: bounds.ZScore | None = None
    """A loss more than this many robust standard deviations above those of the steps before it is a
    spike, whose samples are kept; null looks for none."""
    loss_spike_window: bounds.SpikeWindow = 128
    """Number of preceding losses that a loss is compared with; checks begin once half of them
    exist."""
    ema_decay: bounds.Decay | None = None
    """Keep a moving average of the weights that learn; this is the share of the average that is
    kept at each update. Null keeps none."""
    optimizer: Literal["adam", "sgd"] = "adam"
    """The optimizer of every module."""
    weight_decay: bounds.WeightDecay = 0.0
    """Decoupled weight decay of matrices; vectors such as norms and biases do not decay."""
    adam_beta1: bounds.Decay = 0.9
    """Decay of Adam's mean of gradients."""
    adam_beta2: bounds.Decay = 0.95
    """Decay of Adam's mean of squared gradients."""
    adam_eps: bounds.Epsilon = 1e-8
    """Added to the denominator of Adam's update."""
    clip_grad_norm: bounds.Norm | None = 1.0
    """Largest gradient norm, taken over all modules together; null clips nothing."""
    overlap_grad_reduce: bool | Literal["auto"] = "auto"
    """Sum gradients over lanes while the backward pass is still running; `auto` does so on GPUs."""
    distributed_optimizer: bool = False
    """Keep on each data-parallel rank only its share of Adam's state."""
    overlap_param_gather: bool | Literal["auto"] = "auto"
    """Gather the weights that a distributed optimizer has updated while the next step begins;
    `auto` does so where gradients are summed during the backward pass."""
    collect_garbage_every: bounds.Steps | None = 50
    """Steps between two collections of Python's garbage, at the same time on all ranks; null leaves
    it to Python."""
    log_every: bounds.Steps = 10
    """Steps between two lines on the console, and between two measurements of where the time of a
    step goes."""
    loggers: Annotated[
        tuple[Literal["tensorboard", "wandb", "mlflow"], ...], Field(strict=False)
    ] = ("tensorboard",)
    """Where metrics go beside `metrics.jsonl`. `wandb` and `mlflow` must be installed separately;
    without `WANDB_MODE` or `MLFLOW_TRACKING_URI` they write to the run folder alone."""
    profile: Profile | None = None
    """Traces for chrome://tracing or Perfetto of some steps; null for none."""
    validate_every: bounds.Steps | None = None
    """Steps between two validations; null for none."""
    validation_batches: bounds.Steps = 4
    """Global batches of a validation, of each source in `data.validation`."""
    save_every: Annotated[
        int | Literal["auto"] | None,
        word_or_number("'auto', null or a number of steps", bounds.Steps | Literal["auto"] | None),
    ] = "auto"
    """Steps between two checkpoints. `auto` is a tenth of the run, but at least 100 and at most
    500; null saves only after the last step."""
    keep_checkpoints: bounds.Checkpoints = 2
    """Checkpoints that are kept; older ones are removed."""
    keep_every: bounds.Steps | None = None
    """Also keep every checkpoint whose step is a multiple of this; null keeps no others."""
    async_save: bool = False
    """Copy the state to the host's memory, and write it, while training goes on."""
    step_timeout_seconds: bounds.Seconds | None = None
    """How long a rank may stay in one place (a microbatch, a save, ...) before the run is explained
    as hanging and ends; null: only where it waits for others, shortly before that times out."""
    max_minutes: bounds.Minutes | None = None
    """After so many minutes the run finishes its step, saves and ends with exit code 75, to be
    continued with --resume; null for no limit."""
    run_dir: bounds.PathText = "runs"
    """Folder of all runs; a run writes to the folder of its name inside it."""
    threads_per_rank: bounds.Threads | None = None
    """CPU threads of each rank; null shares out the cores."""

    @property
    def save_interval(self) -> int | None:
        """Steps between two checkpoints; None if only the last step is followed by one."""
        if self.save_every == "auto":
            return min(500, max(100, self.steps // 10))
        return self.save_every

    @property
    def last_decay_steps(self) -> int:
        """Steps in which the learning rate of `schedule: wsd` falls."""
        return self.decay_steps or max(1, self.steps // 10)

    @model_validator(mode="after")
    def _settings_go_together(self) -> "Train":
        if self.decay_steps is not None and self.schedule != "wsd":
            raise ValueError(
                f"decay_steps {self.decay_steps} belongs to schedule: wsd, but schedule is "
                f"{self.schedule}; set schedule: wsd, or remove decay_steps"
            )
        if self.fp8 != "none" and self.precision != "bf16":
            raise ValueError(
                f"fp8: {self.fp8} works beside bf16 weights, but precision is {self.precision}; "
                f"set precision: bf16, or remove fp8"
            )
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
        if self.overlap_param_gather is True and not self.distributed_optimizer:
            raise ValueError(
                "overlap_param_gather: true is about the weights that a distributed optimizer "
                "updates, but distributed_optimizer is false; set it to true, or remove "
                "overlap_param_gather"
            )
        if self.overlap_param_gather is True and self.overlap_grad_reduce is False:
            raise ValueError(
                "overlap_param_gather: true needs overlap_grad_reduce, which is false; set it to "
                "true, or remove overlap_param_gather"
            )
        return self


class Recipe(Section):
    """One training run."""

    name: bounds.RunName
    """Name of the run and of its folder."""
    init_from: bounds.PathText | None = None
    """Folder of a Hugging Face checkpoint to start from, or the id (`org/name`) of one that
    `hf download` has put into the local cache; it also gives families, sizes, tokenizer and
    placeholders that the recipe leaves out."""
    language: Language = Language()
    """The language model."""
    encoders: Annotated[dict[bounds.ModuleName, Encoder], Field(max_length=MAX_ENTRIES)] = {}
    """The encoders by a name of your choice, such as `vision`. With `init_from`, the first that
    gives no family, or the folder's, is the folder's tower; the others begin with fresh weights."""
    bridge: Bridge = Bridge()
    """How rows travel from the encoders to the language model."""
    data: Data
    """Samples, tokenizer and packing."""
    train: Train
    """The optimisation, and what is written when."""
    cluster: Cluster = Cluster()
    """The machines of a job, for `mimo launch`."""

    _source: YamlSource | None = PrivateAttr(default=None)

    @model_validator(mode="after")
    def _module_names_are_distinct(self) -> "Recipe":
        if LANGUAGE in self.encoders:
            raise ValueError("encoders.language: the name 'language' is the language model's own")
        for name in _NAMES_IN_CHECKPOINTS & self.encoders.keys():
            raise ValueError(
                f"encoders.{name}: the name '{name}' says in checkpoints whose tensors follow; "
                f"give another one"
            )
        return self

    @model_validator(mode="after")
    def _tokens_can_be_counted(self) -> "Recipe":
        longest, samples = self.data.sequence_length, self.train.micro_batch_size
        if self.data.tokens_per_microbatch is not None and samples != 1:
            raise ValueError(
                f"train.micro_batch_size {samples} packs that many samples, but "
                f"data.tokens_per_microbatch {self.data.tokens_per_microbatch} packs as many as "
                f"fit; set train.micro_batch_size: 1, or remove data.tokens_per_microbatch"
            )
        if longest * samples > bounds.MAX_MICROBATCH_TOKENS:
            raise ValueError(
                f"train.micro_batch_size {samples} · data.sequence_length {longest} makes "
                f"{longest * samples} tokens of a microbatch, but at most "
                f"{bounds.MAX_MICROBATCH_TOKENS} can be counted; lower one of them"
            )
        return self

    @model_validator(mode="after")
    def _rates_rise_before_they_fall(self) -> "Recipe":
        train, slowest = self.train, max(self.modules, key=self.warmup_steps)
        longest = self.warmup_steps(slowest)
        if train.schedule == "wsd" and longest + train.last_decay_steps > train.steps:
            module = slowest if slowest == LANGUAGE else f"encoders.{slowest}"
            owner = "train" if self.module(slowest).warmup_steps is None else module
            raise ValueError(
                f"{owner}.warmup_steps {longest} + train.decay_steps {train.last_decay_steps} "
                f"exceed train.steps {train.steps}; lower one of them"
            )
        return self

    def warmup_steps(self, module: str) -> int:
        """Over how many steps the learning rate of this module rises."""
        own = self.module(module).warmup_steps
        return self.train.warmup_steps if own is None else own

    @property
    def longest_microbatch(self) -> int:
        """Most tokens of samples that a lane of the language model processes at a time."""
        of_samples = self.data.sequence_length * self.train.micro_batch_size
        return self.data.tokens_per_microbatch or of_samples

    def module(self, name: str) -> Language | Encoder:
        """The part of the recipe that says what the module of this name is."""
        return self.language if name == LANGUAGE else self.encoders[name]

    @property
    def modules(self) -> dict[str, Language | Encoder]:
        """The same part of every module, by its name; the language model first."""
        return {LANGUAGE: self.language, **self.encoders}

    @property
    def run_dir(self) -> Path:
        """Where the run of this recipe lives."""
        return Path(self.train.run_dir) / self.name

    @property
    def path(self) -> Path | None:
        """The file that it was read from."""
        return None if self._source is None else self._source.path

    def problem(self, location: Location, message: str) -> str:
        """A line for a RecipeError about the value at `location`, with file and line if known."""
        if self._source is not None:
            return self._source.problem(location, message)
        return f"{dotted(location)}: {message}"

    def to_yaml(self) -> str:
        """The resolved recipe, defaults included, as YAML that `read_recipe` reads back."""
        return as_yaml(self.model_dump(mode="json"))


Fill = Callable[[dict[str, Any]], Iterable[tuple[Location, str]]]
"""Completes a recipe's plain data in place; yields the location and message of every problem."""


def read_recipe(path: Path, overrides: Sequence[str], fill: Fill) -> Recipe:
    """Read the recipe at `path` with `overrides` such as `language.grid.tp=2` applied in order.

    `fill` adds what `init_from` says; `mimo.checkpoint.hf.recipes` has the one for Hugging Face
    folders.
    Raises RecipeError with one line per error: a file that is missing or not YAML, an override
    that cannot be applied, an unknown key, a wrong type, a value out of range, and what this
    version does not support yet. A recipe with phases has several: see `mimo.config.phases`.
    """
    source = read_yaml(Path(path), overrides)
    if PHASES in source.data:
        message = "a recipe without phases is needed here; give that of one phase"
        raise RecipeError(*source.problems, source.problem((PHASES,), message))
    return parse_recipe(source, fill)


def parse_recipe(source: YamlSource, fill: Fill) -> Recipe:
    """The recipe that `source` holds. Raises RecipeError like `read_recipe`."""
    check_keys(source)
    problems = [*source.problems, *(source.problem(*found) for found in fill(source.data))]
    try:
        recipe = Recipe.model_validate(source.data)
    except ValidationError as error:
        raise RecipeError(*problems, *descriptions(error, source.problem, Recipe)) from error
    recipe._source = source
    problems += refusals(recipe)
    if problems:
        raise RecipeError(*problems)
    return recipe


def check_keys(source: YamlSource) -> None:
    """Raise RecipeError for unknown keys before the folder of `init_from` is read.

    Reading it takes seconds; only it can tell which keys are missing.
    """
    try:
        if "init_from" in source.data:
            Recipe.model_validate(source.data)
    except ValidationError as error:
        if any(found["type"] == "extra_forbidden" for found in error.errors()):
            lines = descriptions(error, source.problem, Recipe, skipped="missing")
            raise RecipeError(*source.problems, *lines) from error


def refusals(recipe: Recipe) -> Iterator[str]:
    """A line for every key whose value this version cannot do yet."""
    not_yet = {"cp": "context parallelism", "vpp": "interleaved pipeline stages"}
    for name, encoder in recipe.encoders.items():
        for axis, feature in not_yet.items():
            if (got := getattr(encoder.grid, axis)) != 1:
                yield recipe.problem(
                    ("encoders", name, "grid", axis),
                    f"got {got}, but {feature} in an encoder is not supported yet; only 1 works",
                )
