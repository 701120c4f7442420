"""Bounds of numbers and names in recipes: what can mean something, each said once.

They keep typing errors out (`1e300`, `2**70`) and bound the work that checking a recipe takes, so
they are far beyond what anybody trains with today. Needs no engine; encoders use it as well.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, ConfigDict, Field

STRICT = ConfigDict(
    strict=True, extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
)
"""Of every model of recipe keys: nothing unknown, nothing coerced, no NaN, nothing changed."""

MAX_RANKS = 2**20
MAX_MICROBATCH_TOKENS = 2**31 - 1
"""Places of tokens are counted in int32."""

# ------------------------------------------------------------------ counts

Ranks = Annotated[int, Field(ge=1, le=MAX_RANKS)]
"""Size of an axis of a grid."""
RankOffset = Annotated[int, Field(ge=0, le=MAX_RANKS)]
RankNumber = Annotated[int, Field(ge=0, lt=MAX_RANKS)]
Layers = Annotated[int, Field(ge=1, le=2**10)]
"""Of a stack; so also pipeline stages, and virtual ones."""
Heads = Annotated[int, Field(ge=1, le=2**12)]
Width = Annotated[int, Field(ge=1, le=2**20)]
"""Of a tensor that a layer holds, in elements."""
Vocabulary = Annotated[int, Field(ge=1, le=2**24)]
Window = Annotated[int, Field(ge=1, le=2**24)]
"""Of a sequence, in tokens."""
LayerIndex = Annotated[int, Field(ge=0, lt=2**10)]
Channels = Annotated[int, Field(ge=0, le=2**20)]
"""Of a head that turn with an axis of positions; 0 for none."""
Side = Annotated[int, Field(ge=1, le=2**14)]
"""Of an image, a window or a patch, in pixels."""
Pixels = Annotated[int, Field(ge=1, le=2**34)]
"""Of an image, or of all frames of a video."""
MelBins = Annotated[int, Field(ge=1, le=2**10)]
"""Bands of a spectrogram."""
Patches = Annotated[int, Field(ge=1, le=2**6)]
"""That become one, along a side or in time."""
Rows = Annotated[int, Field(ge=1, le=2**20)]
"""Of one item."""
Crops = Annotated[int, Field(ge=1, le=2**10)]
Batch = Annotated[int, Field(ge=1, le=2**20)]
"""Samples of a step."""
Microbatches = Annotated[int, Field(ge=0, le=2**20)]
SequenceLength = Annotated[int, Field(ge=1, le=2**24)]
Steps = Annotated[int, Field(ge=1, le=10**9)]
StepNumber = Annotated[int, Field(ge=0, lt=10**9)]
"""Of one step of a run, counted from 0."""
WarmupSteps = Annotated[int, Field(ge=0, le=10**9)]
PackingWindow = Annotated[int, Field(ge=1, le=2**16)]
"""Samples that a checkpoint may have to name."""
Mebibytes = Annotated[int, Field(ge=0, le=2**22)]
Workers = Annotated[int, Field(ge=0, le=2**10)]
"""Processes of a rank."""
Samples = Annotated[int, Field(ge=1, le=10**9)]
SkippedSamples = Annotated[int, Field(ge=0, le=10**12)]
SkippedSteps = Annotated[int, Field(ge=0, le=10**6)]
SpikeWindow = Annotated[int, Field(ge=8, le=10**5)]
CacheGib = Annotated[float, Field(ge=0, le=2**20)]
"""Of a disk; 0 for none."""
Checkpoints = Annotated[int, Field(ge=1, le=10**6)]
Threads = Annotated[int, Field(ge=1, le=2**12)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]
AdapterRank = Annotated[int, Field(ge=1, le=2**16)]

# ------------------------------------------------------------- real numbers

LearningRate = Annotated[float, Field(gt=0, le=1e3)]
Share = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]
"""Of a moving average; 1 would never forget."""
WeightDecay = Annotated[float, Field(ge=0, le=1e3)]
Epsilon = Annotated[float, Field(gt=0, le=1)]
Norm = Annotated[float, Field(gt=0, le=1e12)]
ZScore = Annotated[float, Field(ge=1, le=1e6)]
AdapterScale = Annotated[float, Field(gt=0, le=1e6)]
SourceWeight = Annotated[float, Field(ge=1e-9, le=1e9)]
ItemSeconds = Annotated[float, Field(ge=0.1, le=3600.0)]
"""Of an item that has a length in time."""
Seconds = Annotated[float, Field(ge=0.1, le=7 * 24 * 3600)]
"""How long something may take: longer than a packet on its way, shorter than a job."""
Minutes = Annotated[float, Field(gt=0, le=366 * 24 * 60)]
"""How long a job may take."""
InitStd = Annotated[float, Field(gt=0, le=100)]
RotaryBase = Annotated[float, Field(gt=1, le=1e12)]
RotaryFactor = Annotated[float, Field(ge=1e-3, le=1e6)]
AttentionScalar = Annotated[float, Field(ge=1e-3, le=1e9)]
Rate = Annotated[float, Field(ge=1e-3, le=1e6)]
"""Per second."""
SideRatio = Annotated[float, Field(ge=1, le=1e6)]
ChannelMean = Annotated[float, Field(ge=-100, le=100)]
ChannelStd = Annotated[float, Field(ge=1e-4, le=100)]

# A list in YAML: only the container is converted, not its entries.
Means = Annotated[tuple[ChannelMean, ChannelMean, ChannelMean], Field(strict=False)]
Stds = Annotated[tuple[ChannelStd, ChannelStd, ChannelStd], Field(strict=False)]

# ------------------------------------------------------------------- names


def _path(text: str) -> str:
    if any(letter < " " or letter == "\x7f" for letter in text):
        raise ValueError("a path has no control characters")
    return text


# A part of a folder's name: no separators, not hidden, and room for what is added to it.
_PLAIN = r"[A-Za-z0-9][A-Za-z0-9_-]"
RunName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)]
ModuleName = Annotated[str, Field(pattern=rf"^{_PLAIN}*$", max_length=64)]
PHASE_NAME = rf"{_PLAIN}{{0,63}}"
Word = Annotated[str, Field(min_length=1, max_length=256)]
"""A token, a name of a family or of a media."""
PathText = Annotated[str, Field(min_length=1, max_length=4096), AfterValidator(_path)]
