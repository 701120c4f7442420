"""How a run goes on with the sources that its recipe names now."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from mimo.checkpoint.folder import Progress
from mimo.step.dataset import Dataset


def continue_order(dataset: Dataset, progress: Progress) -> tuple[Dataset, Progress, list[str]]:
    """The data in the order in which a run goes on, where it then stands, and lines about it.

    What was passed over of sources that are gone, or have another number of samples now, is not
    used any more.
    """
    now, used, said = dataset.order, progress.used, list[str]()
    if used.end == 0:
        return dataset, replace(progress, mixtures=now.mixtures), said
    earlier = progress.mixtures or now.mixtures
    order = now.after(earlier, used.end)
    if order.mixtures[-1].first == used.end:
        epochs = ", ".join(f"{epoch:.3f}" for epoch in order.epochs(used.end))
        said.append(f"another mixture of sources begins; their epochs so far: {epochs}")
    passed_over = np.array(used.passed_over, np.int64)
    left = tuple(passed_over[order.at(passed_over)[0] >= 0].tolist())
    if gone := len(passed_over) - len(left):
        said.append(
            f"{gone} samples that were passed over are left out: their sources are gone, or have "
            "another number of samples"
        )
    number = dict(enumerate(order.numbers_of(earlier[-1]).tolist()))
    return (
        replace(dataset, order=order),
        replace(
            progress,
            samples=used.samples + gone,
            passed_over=left,
            mixtures=order.mixtures,
            skipped=frozenset(
                (number[source], sample)
                for source, sample in progress.skipped
                if number.get(source, -1) >= 0
            ),
        ),
        said,
    )
