"""How a run goes on: from which checkpoint, and with the sources that its recipe names now."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from mimo.checkpoint.assets import recipe_of
from mimo.checkpoint.folder import Progress
from mimo.checkpoint.integrity import Choice, listed_files
from mimo.recipe.schema import Recipe
from mimo.step.dataset import Dataset, item_processors
from mimo.train.incidents import record


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


def tell_choice(choice: Choice, run_dir: Path) -> None:
    """Say what is wrong with checkpoints that were passed over, also to the run's incidents."""
    for path, problems in choice.damaged.items():
        text = (
            f"checkpoint {path} is damaged and was passed over: {'; '.join(problems)}; the run "
            f"goes on from {choice.checkpoint}"
        )
        print(text, flush=True)
        record(run_dir, "checkpoint", text, checkpoint=str(path), problems=[*problems])
    if choice.checkpoint is not None and listed_files(choice.checkpoint) is None:
        print(f"{choice.checkpoint} has no checksums: nothing could be verified", flush=True)


def say_what_differs(recipe: Recipe, checkpoint: Path) -> None:
    """Print whose items become other patches than before the checkpoint; the index may not tell."""
    before = item_processors(recipe_of(checkpoint))
    for media, own in item_processors(recipe).items():
        if own != before.get(media, own):
            print(f"items of media {media!r} are prepared differently from now on:", flush=True)
            print(f"  before: {before[media]}\n  now:    {own}", flush=True)
