"""How well items balance over encoder lanes, by several ways to assign them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bridge import assign_items, imbalance
from data.media.images import ImageProcessor
from data.media.processor import Part

BALANCE_LANES = 64
BALANCE_ITEMS = (512, 4096)
_BALANCE_DRAWS = 20
_SIDES = (224, 1792)
_IMAGES_PER_SAMPLE = 8


@dataclass(frozen=True)
class Balance:
    """Largest lane load over the mean, for each draw of the images.

    bound: max(mean load, largest item) / mean; no assignment of whole items can be below it.
    items: items assigned one by one, largest first (`assign_items`). samples: the same, but all
    images of a sample stay together. in_turn: samples dealt out in turn, as plain data parallelism
    does.
    """

    num_items: int
    lanes: int
    bound: list[float]
    items: list[float]
    samples: list[float]
    in_turn: list[float]

    @property
    def worst(self) -> float:
        """The largest ratio of item-level imbalance to its bound over all draws."""
        return max(got / bound for got, bound in zip(self.items, self.bound, strict=True))


def measure_balance(
    num_items: int, lanes: int = BALANCE_LANES, draws: int = _BALANCE_DRAWS
) -> Balance:
    """The balance for images with sides log-uniform in 224-1,792 pixels, 1 to 8 per sample."""
    found = Balance(num_items, lanes, [], [], [], [])
    # No image is shrunk, so the sides are those drawn: the hardest case.
    processor = ImageProcessor(patch_size=14, max_pixels=_SIDES[1] ** 2)
    for seed in range(draws):
        draw = np.random.default_rng(seed)
        sides = np.exp(draw.uniform(np.log(_SIDES[0]), np.log(_SIDES[1]), (num_items, 2)))
        costs = np.array(
            [processor.plan(Part((w, h))).cost for w, h in np.rint(sides).astype(int).tolist()]
        )
        sizes = draw.integers(1, _IMAGES_PER_SAMPLE + 1, num_items)
        sample = np.repeat(np.arange(num_items), sizes)[:num_items]
        sample_costs = np.bincount(sample, weights=costs).astype(np.int64)
        mean = costs.sum() / lanes
        found.bound.append(float(max(mean, costs.max()) / mean))
        for kind, work, assigned in (
            (found.items, costs, assign_items(costs, lanes)),
            (found.samples, sample_costs, assign_items(sample_costs, lanes)),
            (found.in_turn, sample_costs, np.arange(sample_costs.size) % lanes),
        ):
            kind.append(imbalance(np.bincount(assigned, work, lanes)))
    return found
