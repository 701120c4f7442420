"""Types that keys of recipes share, with bounds far beyond what anybody trains today.

They catch typing errors (`1e300`) and bound the work of checking a recipe.
"""

from typing import Annotated

from pydantic import AfterValidator, ConfigDict, Field

STRICT = ConfigDict(
    strict=True, extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
)
"""Configuration of every model of recipe keys."""

MAX_RANKS = 2**20
MAX_MICROBATCH_TOKENS = 2**31 - 1  # positions are int32

# ------------------------------------------------------------------ counts

Ranks = Annotated[int, Field(ge=1, le=MAX_RANKS)]  # size of an axis of a grid
RankNumber = Annotated[int, Field(ge=0, lt=MAX_RANKS)]
Layers = Annotated[int, Field(ge=1, le=2**10)]  # of a stack; also stages and chunks
Heads = Annotated[int, Field(ge=1, le=2**12)]
Width = Annotated[int, Field(ge=1, le=2**20)]  # elements of a side of a weight
Vocabulary = Annotated[int, Field(ge=1, le=2**24)]
Window = Annotated[int, Field(ge=1, le=2**24)]  # tokens
LayerIndex = Annotated[int, Field(ge=0, lt=2**10)]
Channels = Annotated[int, Field(ge=0, le=2**20)]  # of a head, per axis of positions
Side = Annotated[int, Field(ge=1, le=2**14)]  # pixels of an image, window or patch
Pixels = Annotated[int, Field(ge=1, le=2**34)]  # of an image or a whole video
MelBins = Annotated[int, Field(ge=1, le=2**10)]  # bands of a spectrogram
Patches = Annotated[int, Field(ge=1, le=2**6)]  # merged along a side or in time
Rows = Annotated[int, Field(ge=1, le=2**20)]  # of one item
Crops = Annotated[int, Field(ge=1, le=2**10)]
Batch = Annotated[int, Field(ge=1, le=2**20)]  # samples of a step
Microbatches = Annotated[int, Field(ge=0, le=2**20)]
SequenceLength = Annotated[int, Field(ge=1, le=2**24)]
Steps = Annotated[int, Field(ge=1, le=10**9)]
StepNumber = Annotated[int, Field(ge=0, lt=10**9)]  # counted from 0
WarmupSteps = Annotated[int, Field(ge=0, le=10**9)]
Threads = Annotated[int, Field(ge=1, le=2**12)]

# ------------------------------------------------------------- real numbers

LearningRate = Annotated[float, Field(gt=0, le=1e3)]
Share = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]  # of a moving average
Epsilon = Annotated[float, Field(gt=0, le=1)]
ItemSeconds = Annotated[float, Field(ge=0.1, le=300.0)]  # length of an item
Seconds = Annotated[float, Field(ge=0.1, le=7 * 24 * 3600)]  # timeouts
InitStd = Annotated[float, Field(gt=0, le=100)]
RotaryBase = Annotated[float, Field(gt=1, le=1e12)]
RotaryFactor = Annotated[float, Field(ge=1e-3, le=1e6)]
AttentionScalar = Annotated[float, Field(ge=1e-3, le=1e9)]
Rate = Annotated[float, Field(ge=1e-3, le=1e6)]  # per second
SideRatio = Annotated[float, Field(ge=1, le=1e6)]
ChannelMean = Annotated[float, Field(ge=-100, le=100)]
ChannelStd = Annotated[float, Field(ge=1e-4, le=100)]

# YAML has lists, frozen models want tuples: convert the container, not its entries.
Means = Annotated[tuple[ChannelMean, ChannelMean, ChannelMean], Field(strict=False)]
Stds = Annotated[tuple[ChannelStd, ChannelStd, ChannelStd], Field(strict=False)]

# ------------------------------------------------------------------- names


def _line(text: str) -> str:
    """Refuse what could end a line of a job script or a log. Scripts quote the rest."""
    if not text.isprintable():
        raise ValueError("has a line break or another control character")
    return text


# Part of a folder name: no separators, not hidden, room for a suffix.
_PLAIN = r"[A-Za-z0-9][A-Za-z0-9_-]"
RunName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)]
ModuleName = Annotated[str, Field(pattern=rf"^{_PLAIN}*$", max_length=64)]
PHASE_NAME = rf"{_PLAIN}{{0,63}}"
Word = Annotated[str, Field(min_length=1, max_length=256)]  # a token, family or modality
Line = Annotated[str, Field(min_length=1, max_length=4096), AfterValidator(_line)]
PathText = Line
