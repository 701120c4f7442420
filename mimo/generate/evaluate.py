"""Answers held-out samples with a trained model and compares with the expected answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data.index.reader import SampleReader, UnreadableSample
from data.text.chat import EncodedSample
from data.text.messages import Message, is_answer, item_parts
from mimo.checkpoint.assets import recipe_of
from mimo.checkpoint.folder import find_checkpoint
from mimo.errors import RecipeError
from mimo.generate.answer import Generator, Request
from mimo.step.dataset import open_dataset

_BATCH = 100
"""Samples answered together."""


@dataclass(frozen=True)
class Answered:
    """One held-out sample: pictures of its files, question, the answer given and the one expected.

    pictures: uint8 (height, width, 3).
    """

    pictures: Sequence[np.ndarray]
    question: str
    given: str
    expected: str

    @property
    def is_exact(self) -> bool:
        """Whether every word is right; spacing does not matter."""
        return self.given.split() == self.expected.split()


@dataclass(frozen=True)
class Score:
    """Over samples with items: whole answers right, and words right at their place."""

    exact_match: float
    per_word: float


def score(answered: Sequence[Answered]) -> Score:
    """Compare answers word by word; a missing or surplus word counts as wrong."""
    seen = [one for one in answered if one.pictures]
    right = total = 0
    for one in seen:
        given, expected = one.given.split(), one.expected.split()
        total += max(len(given), len(expected))
        right += sum(g == e for g, e in zip(given, expected, strict=False))
    exact = sum(one.is_exact for one in seen)
    return Score(exact / max(len(seen), 1), right / max(total, 1))


def answer_split(
    run: Path, split: str = "test", max_new_tokens: int | None = None
) -> list[Answered]:
    """Answer every sample of a split of the run's recipe with its latest checkpoint.

    max_new_tokens: at which an answer is cut; None for the length of the longest expected answer.
    None goes beyond `data.sequence_length` with its prompt, where every expected answer fits.
    Prints which samples cannot be read, or do not end with an answer in text, and are left out,
    and how many there are; and how many expected answers are too long for `max_new_tokens`.
    Raises RecipeError when the recipe names no shards for the split, InputError with the name of a
    sample that cannot be answered.
    """
    if split not in ("validation", "test"):
        raise RecipeError(f"--split {split}: choose validation or test")
    recipe = recipe_of(find_checkpoint(run))
    if not getattr(recipe.data, split):
        raise RecipeError(f"data.{split}: no shards are given, so there is nothing to evaluate")
    generator = Generator(run)
    dataset = open_dataset(recipe, split, generator.chat, generator.processors)
    assert dataset is not None
    waiting: list[tuple[Request, list[np.ndarray], str, str]] = []
    lengths: list[int] = []
    skipped = [
        f"sample {one.key!r} of {one.shard}: {one.reason}"
        for index in dataset.indexes
        for one in index.skipped
    ]
    for reader in dataset.readers:
        for sample in range(len(reader.index)):
            try:
                messages, files, pictures = _read(reader, sample)
                lengths.append(_answer_length(reader.sample(sample)))
            except UnreadableSample as error:
                skipped.append(str(error))
                continue
            name = f"sample {str(reader.index.keys[sample])!r} of {_shard(reader, sample)}"
            request = Request(messages[:-1], files, name)
            waiting.append((request, pictures, _text(messages[-2]), _text(messages[-1])))
    if skipped:
        for reason in skipped:
            print(f"skipped {reason}")
        print(f"skipped_samples={len(skipped)}", flush=True)
    if max_new_tokens is None:
        max_new_tokens = max(lengths, default=1)
    if too_long := sum(length > max_new_tokens for length in lengths):
        print(
            f"{too_long} of {len(lengths)} expected answers are longer than --max-new-tokens "
            f"{max_new_tokens}, the longest has {max(lengths)}; what is given for them is cut",
            flush=True,
        )
    answered = []
    for first in range(0, len(waiting), _BATCH):
        batch = waiting[first : first + _BATCH]
        requests = [request for request, *_ in batch]
        given = generator.answer(requests, max_new_tokens, recipe.data.sequence_length)
        answered += [
            Answered(pictures, question, answer, expected)
            for (_, pictures, question, expected), answer in zip(batch, given, strict=True)
        ]
    return answered


def _read(reader: SampleReader, sample: int) -> tuple[list[dict], list[Any], list[np.ndarray]]:
    """Messages, decoded files and their pictures: of a chat that ends with an answer in text.

    Raises UnreadableSample.
    """
    index, shard = reader.index, _shard(reader, sample)
    key = str(index.keys[sample])
    messages = reader.messages(sample)
    problem = _not_a_question_with_answer(messages)
    if problem:
        raise UnreadableSample(shard, key, None, problem)
    files, pictures = [], []
    for item in index.items_of_sample(sample):
        if index.item_number[item] == 0:  # the first of its part, whose files it stands for
            own = [reader.decoded(item, file) for file in index.files_of_part(item)]
            files += own
            pictures += [reader.media(item).picture(file) for file in own]
    return messages, files, pictures


def _answer_length(sample: EncodedSample) -> int:
    """Tokens of the last answer, its end of turn included."""
    counted = np.flatnonzero(sample.loss_mask)
    return int(np.split(counted, np.flatnonzero(np.diff(counted) > 1) + 1)[-1].size)


def _not_a_question_with_answer(messages: Sequence[Message]) -> str:
    """Why the last message cannot be compared with an answer of the model, or nothing."""
    if len(messages) < 2:
        return f"{len(messages)} messages: need a question and an answer at least"
    if not is_answer(messages[-1]):
        return f"the last message is of {messages[-1]['role']!r}: need an answer to compare with"
    if item_parts(messages[-1:]):
        return "the last message has items: need an answer in text alone"
    return ""


def _shard(reader: SampleReader, sample: int) -> str:
    return reader.index.shards[reader.index.shard[sample]]


def main(run: Path, split: str, max_new_tokens: int | None = None) -> int:
    """`mimo evaluate RUN`: draws a picture into the folder and prints the score as last line."""
    answered = answer_split(run, split, max_new_tokens)
    picture = (run if run.is_dir() else run.parent) / f"held_out_{split}.png"
    draw(answered, picture)
    result = score(answered)
    print(f"picture: {picture}")
    print(f"exact_match={result.exact_match:.3f} per_word={result.per_word:.3f}")
    return 0


def _text(message: dict) -> str:
    content = message["content"]
    if isinstance(content, str):
        return content
    return " ".join(part["text"] for part in content if part["type"] == "text")


def draw(answered: Sequence[Answered], path: Path, columns: int = 4, rows: int = 3) -> None:
    """A picture of the first samples with items: files, question, answer given and expected."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = [one for one in answered if one.pictures][: columns * rows]
    size = (3.4 * columns, 2.6 * rows)
    figure, axes = pyplot.subplots(rows, columns, figsize=size, layout="constrained")
    for axis, one in zip(axes.flat, shown, strict=False):
        axis.imshow(_side_by_side(one.pictures))
        colour = "#1a7f37" if one.is_exact else "#cf222e"
        axis.set_title(_wrap(one.question), fontsize=8)
        axis.set_xlabel(
            f"answer {one.given!r}\nexpected {one.expected!r}", fontsize=9, color=colour
        )
    for axis in axes.flat:
        axis.set_xticks([])
        axis.set_yticks([])
        for side in axis.spines.values():
            side.set_visible(False)
    figure.suptitle("Held-out samples", fontsize=12)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _wrap(text: str, width: int = 34) -> str:
    import textwrap

    return "\n".join(textwrap.wrap(text, width)[:3])


def _side_by_side(pictures: Sequence[np.ndarray], gap: int = 4) -> np.ndarray:
    """uint8 (highest, all widths and gaps, 3), on white."""
    highest = max(len(picture) for picture in pictures)
    columns = []
    for picture in pictures:
        above = (highest - len(picture)) // 2
        margins = (above, highest - len(picture) - above), (0, gap), (0, 0)
        columns.append(np.pad(picture, margins, constant_values=255))
    return np.concatenate(columns, axis=1)[:, :-gap]
