"""The part of a recipe that says what is trained on: sources, tokenizer, packing, decoding."""

from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from mimo.config import bounds
from mimo.config.modules import Section


class Source(Section):
    """Shards of samples."""

    path: bounds.PathText
    """A shard, or many: `data/train-*.tar`, `data/train-{00000..00123}.tar`. A path or a URL that
    fsspec understands, such as `s3://bucket/train-*.tar`."""
    weight: bounds.SourceWeight = 1.0
    """How often samples are drawn from this source, relative to the others."""

    @model_validator(mode="after")
    def _has_no_credentials(self) -> "Source":
        from data.index.remote import check_url  # here: the package loads numpy

        check_url(self.path)  # not a validator of the path, which a message would then show
        return self


# YAML has lists, a frozen model wants tuples: only the container is converted, not its entries.
Sources = Annotated[tuple[Source, ...], Field(strict=False)]


def _at_least_one(sources: tuple[Source, ...]) -> tuple[Source, ...]:
    # Not `min_length`: that also counts entries dropped for errors of their own.
    if not sources:
        raise ValueError("needs at least one entry with a path")
    return sources


Metric = Literal["exact", "per_word", "contains", "anls", "relaxed_number"]
Metrics = Annotated[
    tuple[Metric, ...],
    Field(strict=False, min_length=1),
    BeforeValidator(lambda given: (given,) if isinstance(given, str) else given),
]


class Data(Section):
    """Samples, tokenizer and packing. Paths are relative to the current folder."""

    sources: Annotated[Sources, AfterValidator(_at_least_one)]
    """What is trained on; samples of several sources are mixed by weight."""
    validation: Sources = ()
    """Held-out samples for the loss during training."""
    test: Sources = ()
    """Held-out samples for `mimo evaluate`."""
    metrics: Metrics = ("exact", "per_word")
    """How `mimo evaluate` scores answers, one metric or a list: `exact` (all words), `per_word`
    (words right in their place), `contains` (the expected text is in the answer), `anls` (edit
    distance, at least 0.5), `relaxed_number` (within 5 %, else equal text)."""
    tokenizer: bounds.PathText
    """Folder with the tokenizer and its chat template."""
    sequence_length: bounds.SequenceLength
    """Length of the longest sample in tokens; longer ones are an error, never cut."""
    shuffle_block: bounds.Samples | None = None
    """Samples that stay together, in order, when samples are shuffled; a source has as many turns
    in a row. Null: 32 in a source of 65,536 samples or more, so that 512 samples of a batch are 16
    reads of neighbours, still of everywhere; 1 in a smaller one. Sources then take turns by
    sample."""
    packing: bool = True
    """`true` joins the samples of a microbatch into one sequence, each a segment of its own;
    `false` pads each to the longest."""
    tokens_per_microbatch: bounds.SequenceLength | None = None
    """Packs samples into sequences of up to this many tokens by best fit, one sequence to a
    microbatch of a lane; padding for `cp` and `sp` comes on top. Null packs
    `train.micro_batch_size` samples."""
    rows_per_microbatch: bounds.Rows | None = None
    """With `tokens_per_microbatch`: most rows of the items in a sequence, over all encoders; null
    for any number."""
    packing_window: bounds.PackingWindow = 512
    """With `tokens_per_microbatch`: how many samples, in their order, the next sequence is put
    together from."""
    build_index: Literal["ranks", "refuse"] = "ranks"
    """In a job of torchrun or srun, who indexes shards that are not indexed yet: `ranks`, each its
    share, before training; or nobody, as `refuse` ends the job with the command that does it."""
    max_skipped_samples: bounds.SkippedSamples = 100
    """Unreadable samples that are skipped before the run stops."""
    max_skipped_fraction: bounds.Share = 0.05
    """Share of the samples, once there are 200, that may be unusable in a source's index, and that
    may be skipped of those read so far, before the run stops."""
    cache_directory: bounds.PathText | None = None
    """Folder for what is kept of shards at URLs: their indexes, and blocks of them. All processes
    of a machine share it. Null for `$XDG_CACHE_HOME/mimo` or `~/.cache/mimo`."""
    cache_gib: bounds.CacheGib | None = None
    """Most GiB of blocks of shards at URLs that are kept on the local disk; those used least
    recently go first. Null or 0 keeps none."""
    workers: bounds.Workers | None = None
    """Processes of each rank that decode; 0 decodes in a thread of the rank. Null shares out the
    cores of a host, less one for each rank itself: 0 with fewer than two a rank."""
    worker_timeout_seconds: bounds.Seconds | None = None
    """A worker that takes longer for one item or text is replaced; null for a quarter of
    `bridge.timeout_seconds`."""
    prefetch_mib: bounds.Mebibytes = 512
    """How much a rank decodes ahead of use; the next step is read in any case."""

    @model_validator(mode="after")
    def _budget_is_of_packed_sequences(self) -> "Data":
        tokens = self.tokens_per_microbatch
        if tokens is None and self.rows_per_microbatch is not None:
            raise ValueError(
                f"rows_per_microbatch {self.rows_per_microbatch} limits sequences that are packed "
                f"by tokens, but tokens_per_microbatch is not set; set it, or remove "
                f"rows_per_microbatch"
            )
        if tokens is not None and not self.packing:
            raise ValueError(
                f"tokens_per_microbatch {tokens} packs samples into sequences, but packing is "
                f"false; set packing: true, or remove tokens_per_microbatch"
            )
        if tokens is not None and tokens < self.sequence_length:
            raise ValueError(
                f"tokens_per_microbatch {tokens} is below sequence_length {self.sequence_length}, "
                f"so the longest samples would not fit; raise it to {self.sequence_length} or "
                f"more, or lower sequence_length"
            )
        return self
