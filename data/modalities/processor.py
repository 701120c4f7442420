"""`Media`: all that the index, the readers and the training loop need from a kind of item.

A content part takes one or more files and becomes one or more items, all of one size: an image with
crops is several items of one file, a video one item of many files, or one for every few files.

Letters: `P` patches of one item, `C` numbers per patch, `W` those of them that are sent to the
device, `t, h, w` a grid of frames, lines, columns.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import BinaryIO, Protocol

import numpy as np

from data.text.messages import DEFAULT_FPS, ITEM_SLOT


class ProcessorError(ValueError):
    """A processor contradicts itself, so that none of its items can be used."""


Grid = tuple[int, int, int]
Size = tuple[int, int]  # of a file, in units of its modality, such as (width, height) in pixels


@dataclass(frozen=True)
class Part:
    """The facts of a content part that are known before its files are decoded."""

    size: Size  # of every file
    frames: int = 1  # number of files
    fps: float = DEFAULT_FPS  # frames per second


@dataclass(frozen=True)
class PartPlan:
    """The items that a part becomes.

    grid: (t, h, w) in patches of each item. row_grid: (t, h, w) in rows of each.
    cost: relative work to encode one of them.
    text: what stands for the part in the chat, `{item}` once per item.
    time_step: positions from one frame of an item to the next, where positions have a time.
    slot_rows: rows of each `{item}` of the text where all of them are one item; else None.
    patches: P where it does not follow from the grid.
    is_output: whether the model answers with the items; rows are then query positions.
    """

    grid: Grid
    row_grid: Grid
    cost: int
    text: str = ITEM_SLOT
    time_step: float = 1.0
    slot_rows: tuple[int, ...] | None = None
    patches: int | None = None
    is_output: bool = False

    @property
    def num_items(self) -> int:
        return self.text.count(ITEM_SLOT) if self.slot_rows is None else 1

    @property
    def num_patches(self) -> int:
        return math.prod(self.grid) if self.patches is None else self.patches

    @property
    def rows_of_items(self) -> list[int | tuple[int, ...]]:
        """The rows of each item, or of each `{item}` of the only item, for `ChatTokenizer`."""
        if self.slot_rows is not None:
            return [self.slot_rows]
        return [self.num_rows] * self.num_items

    @property
    def num_rows(self) -> int:
        """Rows, and so placeholder tokens, of each item."""
        return math.prod(self.row_grid)


Triple = tuple[float, float, float]


@dataclass(frozen=True)
class WireForm:
    """The form in which patches are sent to the device, and their values there.

    width: W. normalise: from mean and std of the channels to float32 (3, 256), the value of each
    byte of a channel; a patch is then sent as bytes, channel after channel. None if the values
    themselves are sent, in float32. repeats: how often each channel follows in turn: a still image
    is sent once for all frames of a patch.
    """

    width: int
    normalise: Callable[[Triple, Triple], np.ndarray] | None = None
    mean: Triple = (0.0, 0.0, 0.0)
    std: Triple = (1.0, 1.0, 1.0)
    repeats: int = 1

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(np.float32 if self.normalise is None else np.uint8)

    @property
    def patch_dim(self) -> int:
        """C: numbers per patch on the device."""
        return self.width * self.repeats

    def table(self) -> np.ndarray:
        """float32 (3, 256), or (3, 0) if values are sent."""
        if self.normalise is None:
            return np.zeros((3, 0), np.float32)
        return self.normalise(self.mean, self.std)

    def values(self, patches: np.ndarray) -> np.ndarray:
        """Return values float32 (P, C) of sent patches (P, W), as towers do on their device."""
        if self.normalise is None:
            return patches
        channels, table = patches.reshape(-1, 3, 1, self.width // 3), self.table()
        # A look-up is exact, and the table has only 3 x 256 entries.
        values = np.stack([table[c][channels[:, c]] for c in range(3)], axis=1)
        return np.repeat(values, self.repeats, axis=2).reshape(len(patches), self.patch_dim)


class Media[D](Protocol):
    """A kind of item: its files, and how they become patches and rows.

    D: a decoded file. What an item becomes follows from the sizes in the `Part` alone. Methods
    raise ValueError, saying what is wrong, for a file or a part that cannot be used. `size_text`
    formats a size for messages.
    """

    @property
    def suffixes(self) -> tuple[str, ...]:
        """Suffixes of its files, in lower case and without a dot, the usual one first."""
        ...

    def probe(self, file: BinaryIO) -> Size:
        """Size of a file from its header, in bounded time and memory, however hostile it is."""
        ...

    def decode(self, data: bytes) -> D:
        """Decode a file, in bounded memory. If this succeeds, `size_of` gives what `probe` gave."""
        ...

    def size_of(self, decoded: D) -> Size: ...

    def size_text(self, size: Size) -> str: ...

    def picture(self, decoded: D) -> np.ndarray:
        """uint8 (height, width, 3): a decoded file, for a person to look at."""
        ...

    def random_file(self, rng: np.random.Generator) -> bytes:
        """A small file of noise with the first suffix; sizes vary from a single row to a few."""
        ...

    @property
    def wire(self) -> WireForm: ...

    def plan(self, part: Part) -> PartPlan: ...

    def item_files(self, part: Part, item: int) -> range:
        """Which files of the part its item number ``item`` is made of."""
        ...

    def item_patches(self, files: Sequence[D], part: Part, item: int) -> np.ndarray:
        """(P, W) in the dtype of `wire`, of one item; files: those of `item_files`."""
        ...

    def fingerprint(self) -> str:
        """Hex digest that changes whenever sizes or row counts may change."""
        ...


def encoding_cost(num_patches: int, tower_width: int) -> int:
    """Relative work to encode n patches that see each other: n² + 6·tower_width·n.

    The shape of a transformer layer's FLOPs: 24·d² per patch in its matrices and 4·d per pair of
    patches in attention, so 4·d·(n² + 6·d·n) at width d.
    """
    return num_patches * (num_patches + 6 * tower_width)
