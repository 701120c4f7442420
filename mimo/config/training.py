"""Sections of a recipe about training: bridge, data, optimisation, and what is written when."""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from mimo.config import bounds
from mimo.config.modules import Section, one_of


class Bridge(Section):
    """How embeddings travel from the encoders to the language model."""

    delivery: Literal["sharded", "replicated"] = "sharded"
    """`sharded` sends an embedding to its position's rank, `replicated` to all ranks of a lane."""
    wire_dtype: Literal["fp32", "bf16", "fp16", "auto"] = "auto"
    """Dtype of embeddings and their gradients on the way; `auto` is that of the weights."""
    block_ranks: bounds.Ranks = 512
    """Most ranks at an end of a bridge that exchange embeddings and balance items with each other.
    Larger ends are cut into blocks, if their numbers of lanes have a common divisor."""
    check: Literal["first_steps", "always", "never"] = "first_steps"
    """When ranks compare their transfer plans."""
    timeout_seconds: bounds.Seconds = 600.0
    """Longest wait for a transfer; on a GPU it includes queued work, so give more than a step."""


class Source(Section):
    """Shards of samples."""

    path: bounds.PathText
    """Path or URL (of fsspec) of shards: `data/train-*.tar`, `s3://bucket/{00..99}.tar`."""
    weight: Annotated[float, Field(ge=1e-9, le=1e9)] = 1.0
    """How often samples are drawn from this source, relative to the others."""

    @model_validator(mode="after")
    def _has_no_credentials(self) -> "Source":
        from data.index.remote import check_url  # late: loads numpy

        check_url(self.path)  # not a validator of the path: its message would show the path
        return self


Sources = Annotated[tuple[Source, ...], Field(strict=False)]


def _at_least_one(sources: tuple[Source, ...]) -> tuple[Source, ...]:
    # Not `min_length`, which also counts entries dropped for other errors.
    if not sources:
        raise ValueError("needs at least one entry with a path")
    return sources


Metric = Literal["exact", "per_word", "contains", "anls", "relaxed_number"]
Metrics = Annotated[tuple[Metric, ...], Field(strict=False, min_length=1)]


class Data(Section):
    """Samples, tokenizer and packing. Paths are relative to the current folder."""

    sources: Annotated[Sources, AfterValidator(_at_least_one)]
    """What is trained on; samples of several sources are mixed by weight."""
    validation: Sources = ()
    """Held-out samples for the loss during training."""
    test: Sources = ()
    """Held-out samples for `mimo evaluate`."""
    metrics: Metrics = ("exact", "per_word")
    """How `mimo evaluate` scores answers: `exact` (all words), `per_word` (words right in their
    place), `contains` (the expected text is in the answer), `anls` (edit distance, at least 0.5),
    `relaxed_number` (within 5 %, else equal text)."""
    tokenizer: bounds.PathText
    """Folder with the tokenizer and its chat template."""
    sequence_length: bounds.SequenceLength
    """Length of the longest sample in tokens; longer ones are an error, never cut."""
    shuffle_block: Annotated[int, Field(ge=1, le=10**9)] | None = None
    """Consecutive samples that shuffling keeps together, so that one read serves them; a source
    takes as many turns in a row. Null: 32 in sources of 65,536 samples or more, else 1."""
    packing: bool = True
    """`true` packs the samples of a microbatch into one sequence; `false` pads to the longest."""
    tokens_per_microbatch: bounds.SequenceLength | None = None
    """Pack samples by best fit into sequences of up to this many tokens, one to a microbatch of a
    lane; padding for `cp` and `sp` comes on top, but padding of samples to a batch counts. Null
    packs `train.micro_batch_size` samples."""
    rows_per_microbatch: bounds.Rows | None = None
    """With `tokens_per_microbatch`: most embeddings in a sequence, over all encoders; null: any."""
    packing_window: Annotated[int, Field(ge=1, le=2**16)] = 512
    """With `tokens_per_microbatch`: how many samples are candidates for the next sequence."""
    max_skipped_samples: Annotated[int, Field(ge=0, le=10**12)] = 100
    """Unreadable samples that are skipped before the run stops."""
    max_skipped_fraction: bounds.Share = 0.05
    """Largest share of unusable samples, of an index or of those read so far (200 or more)."""
    cache_directory: bounds.PathText | None = None
    """Folder that caches indexes and blocks of shards at URLs, for all processes of a machine. Null
    for `$XDG_CACHE_HOME/mimo` or `~/.cache/mimo`."""
    cache_gib: Annotated[float, Field(ge=0, le=2**20)] | None = None
    """Most GiB of cached blocks of shards at URLs; null or 0 caches none."""
    workers: Annotated[int, Field(ge=0, le=2**10)] | None = None
    """Decoding processes of each rank; 0 decodes in a thread. Null divides the cores of a host
    among its ranks, less one for each rank itself: 0 with fewer than two cores a rank."""
    prefetch_mib: Annotated[int, Field(ge=0, le=2**22)] = 512
    """Most MiB that a rank prefetches; the next step is prefetched in any case."""

    @model_validator(mode="after")
    def _budget_is_of_packed_sequences(self) -> "Data":
        tokens = self.tokens_per_microbatch
        if tokens is None and self.rows_per_microbatch is not None:
            raise ValueError(
                f"rows_per_microbatch {self.rows_per_microbatch} limits packing by tokens, but "
                f"tokens_per_microbatch is not set; set it, or remove rows_per_microbatch"
            )
        if tokens is not None and not self.packing:
            raise ValueError(
                f"tokens_per_microbatch {tokens} packs samples into sequences, but packing is "
                f"false; set packing: true, or remove tokens_per_microbatch"
            )
        if tokens is not None and tokens < self.sequence_length:
            raise ValueError(
                f"tokens_per_microbatch {tokens} is below sequence_length {self.sequence_length}, "
                f"so the longest samples would not fit; raise the first, or lower the second"
            )
        return self


class Profile(Section):
    """Steps and ranks that PyTorch's profiler traces."""

    steps: Annotated[tuple[bounds.StepNumber, bounds.StepNumber], Field(strict=False)]
    """The first and last step to trace, counted from 0 as in metrics.jsonl."""
    ranks: Annotated[tuple[bounds.RankNumber, ...], Field(strict=False)] = (0,)
    """The ranks; each writes a file to `profile/` in the run folder."""

    @model_validator(mode="after")
    def _last_is_not_before_first(self) -> "Profile":
        first, last = self.steps
        if last < first:
            raise ValueError(f"steps: got [{first}, {last}]; write [{last}, {first}]")
        return self


class Train(Section):
    """Optimisation, and what is written when."""

    steps: bounds.Steps
    """Steps of the run."""
    global_batch_size: bounds.Batch
    """Samples of a step, over all ranks; with `data.tokens_per_microbatch`, packed sequences."""
    micro_batch_size: bounds.Batch = 1
    """Samples that a lane processes at a time; must be 1 with `data.tokens_per_microbatch`."""
    precision: Literal["fp64", "fp32", "bf16"] = "fp32"
    """Dtype of weights and computation; `fp64` is for checking results on a CPU."""
    fp8: Literal["none", "current", "block", "mxfp8"] = "none"
    """8-bit linears of the language model, by Transformer Engine: scaled by tensor (`current`), by
    blocks of 128 (`block`, Hopper) or of 32 (`mxfp8`, Blackwell)."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 1
    """Seed of freshly drawn weights and of the order of samples."""
    learning_rate: bounds.LearningRate = 1e-3
    """Peak learning rate of every module that does not set its own."""
    warmup_steps: bounds.WarmupSteps = 0
    """Steps over which the rate of every module that does not set its own rises from zero."""
    schedule: Literal["constant", "cosine", "linear", "wsd"] = "cosine"
    """The learning rate after warm-up: constant, falling along half a cosine or linearly, or
    constant until the last `decay_steps` and then falling linearly (`wsd`)."""
    decay_steps: bounds.Steps | None = None
    """With `schedule: wsd`: steps at the end in which the rate falls; null for a tenth."""
    min_learning_rate_ratio: bounds.Share = 0.1
    """Learning rate that the schedule falls to, as a share of the peak."""
    max_skipped_steps: Annotated[int, Field(ge=0, le=10**6)] = 3
    """Most consecutive steps without finite loss or gradient norm; such steps update no weights."""
    loss_spike_zscore: Annotated[float, Field(ge=1, le=1e6)] | None = None
    """Report a loss this many robust standard deviations above the losses before it, and keep its
    samples; null reports none."""
    loss_spike_window: Annotated[int, Field(ge=8, le=10**5)] = 128
    """Preceding losses that a loss is compared with; checks begin once half of them exist."""
    ema_decay: bounds.Decay | None = None
    """Keep a moving average of the trainable weights with this decay; null keeps none."""
    optimizer: Literal["adam", "sgd"] = "adam"
    """The optimizer of every module."""
    weight_decay: Annotated[float, Field(ge=0, le=1e3)] = 0.0
    """Decoupled weight decay of matrices; vectors such as norms and biases do not decay."""
    adam_beta1: bounds.Decay = 0.9
    """Decay of Adam's mean of gradients."""
    adam_beta2: bounds.Decay = 0.95
    """Decay of Adam's mean of squared gradients."""
    adam_eps: bounds.Epsilon = 1e-8
    """Added to the denominator of Adam's update."""
    clip_grad_norm: Annotated[float, Field(gt=0, le=1e12)] | None = 1.0
    """Largest gradient norm, taken over all modules together; null clips nothing."""
    overlap_grad_reduce: bool | Literal["auto"] = "auto"
    """Sum gradients over lanes while the backward pass is still running; `auto` does so on GPUs."""
    distributed_optimizer: bool = False
    """Shard Adam's state over the lanes."""
    overlap_param_gather: bool | Literal["auto"] = "auto"
    """Gather weights of a distributed optimizer while the next step begins; `auto` does so
    if gradients are summed during the backward pass."""
    log_every: bounds.Steps = 10
    """Steps between lines on the console, and between measurements of a step's parts."""
    loggers: Annotated[
        tuple[Literal["tensorboard", "wandb", "mlflow"], ...], Field(strict=False)
    ] = ("tensorboard",)
    """Where metrics go beside `metrics.jsonl`. `wandb` and `mlflow` must be installed separately;
    without `WANDB_MODE` or `MLFLOW_TRACKING_URI` they write to the run folder alone."""
    profile: Profile | None = None
    """Trace some steps for chrome://tracing or Perfetto; null for none."""
    validate_every: bounds.Steps | None = None
    """Steps between validations; null for none."""
    validation_batches: bounds.Steps = 4
    """Global batches of a validation, of each source in `data.validation`."""
    save_every: Annotated[
        bounds.Steps | Literal["auto"] | None, one_of("'auto', null or a number of steps")
    ] = "auto"
    """Steps between saves; `auto` is a tenth of the run (100 to 500); null saves at the end."""
    keep_checkpoints: Annotated[int, Field(ge=1, le=10**6)] = 2
    """How many checkpoints to keep."""
    keep_every: bounds.Steps | None = None
    """Also keep every checkpoint whose step is a multiple of this."""
    async_save: bool = False
    """Copy the state to host memory and write it while training continues."""
    step_timeout_seconds: bounds.Seconds | None = None
    """End the run if a rank makes no progress (a microbatch, a save) for so long; null only
    where a rank waits for others, shortly before that times out."""
    max_minutes: Annotated[float, Field(gt=0, le=366 * 24 * 60)] | None = None
    """Minutes after which the run saves and exits with 75, to be resumed; null for no limit."""
    run_dir: bounds.PathText = "runs"
    """Folder of all runs; a run writes to the folder of its name inside it."""
    threads_per_rank: bounds.Threads | None = None
    """CPU threads of each rank; null divides the cores among the ranks."""

    @property
    def save_interval(self) -> int | None:
        """Steps between checkpoints; None to save only after the last step."""
        if self.save_every == "auto":
            return min(500, max(100, self.steps // 10))
        return self.save_every

    @property
    def last_decay_steps(self) -> int:
        return self.decay_steps or max(1, self.steps // 10)

    @model_validator(mode="after")
    def _settings_go_together(self) -> "Train":
        if self.decay_steps is not None and self.schedule != "wsd":
            self._need("decay_steps", "schedule", "wsd")
        if self.fp8 != "none" and self.precision != "bf16":
            self._need("fp8", "precision", "bf16")
        if self.distributed_optimizer and self.optimizer != "adam":
            self._need("distributed_optimizer", "optimizer", "adam")
        if self.distributed_optimizer and self.precision == "fp64":
            self._need("distributed_optimizer", "precision", "fp32 or bf16")
        if self.overlap_param_gather is True and not self.distributed_optimizer:
            self._need("overlap_param_gather", "distributed_optimizer", "true")
        if self.overlap_param_gather is True and self.overlap_grad_reduce is False:
            self._need("overlap_param_gather", "overlap_grad_reduce", "true")
        return self

    def _need(self, key: str, other: str, value: str) -> None:
        value_of_key, value_of_other = (str(getattr(self, n)).lower() for n in (key, other))
        raise ValueError(
            f"{key}: {value_of_key} needs {other}: {value}, but it is {value_of_other}; set "
            f"{other}: {value}, or remove {key}"
        )
