"""Answers held-out samples with a trained model and compares them with the expected answers."""

from __future__ import annotations

import json
import math
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from data.index.reader import SampleReader, UnreadableSample
from data.text.chat import EncodedSample
from data.text.messages import is_answer, item_parts
from mimo.checkpoint.assets import portable_recipe
from mimo.checkpoint.folder import find_checkpoint
from mimo.errors import InputError, RecipeError, suggestion
from mimo.generate import scores
from mimo.generate.answer import Generator, Request
from mimo.model.dataset import Dataset, changed_shards_named, open_dataset

BATCH_TOKENS = 8192
"""Tokens of samples that are answered together, their answers included."""
SHOWN = (3, 4)
"""Rows and columns of the picture."""
NO_ITEMS = "text alone, where others have items"
"""Why a sample that was answered is not scored."""
_GAP = 4  # pixels between the files of a sample


@dataclass(frozen=True)
class Answered:
    """One held-out sample: pictures of its files, the question, the given and expected answers.

    pictures: uint8 (height, width, 3). shard, key: where the sample is.
    """

    pictures: Sequence[np.ndarray]
    question: str
    given: str
    expected: str
    shard: str = ""
    key: str = ""

    @property
    def is_exact(self) -> bool:
        """Whether every word is right; spacing does not matter."""
        return scores.exact(self.given, self.expected)[0] > 0


@dataclass(frozen=True)
class Score:
    """How a split was answered.

    metrics: by name, over the samples with items, or over all samples if none has items. scored:
    how many these are. left_out: how many others there are, by reason.
    """

    metrics: Mapping[str, float]
    scored: int
    left_out: Mapping[str, int]

    def __str__(self) -> str:
        """The line that ends an evaluation: ``exact_match=0.944 per_word=0.976``."""
        return " ".join(f"{name}={value:.3f}" for name, value in self.metrics.items())


class Scoring:
    """Sums points of answers; it goes through the answers once and keeps none."""

    def __init__(self, metrics: Sequence[str]) -> None:
        # First those of samples without items, then those of samples with items.
        self._samples = [0, 0]
        self._points = {name: np.zeros((2, 2)) for name in metrics}

    def add(self, one: Answered) -> dict[str, float]:
        """Count an answer; returns its own score by metric."""
        found, kind = dict[str, float](), int(bool(one.pictures))
        self._samples[kind] += 1
        for name, total in self._points.items():
            points, most = scores.METRICS[name](one.given, one.expected)
            total[kind] += (points, most)
            found[name] = points / max(most, 1)
        return found

    def result(self, left_out: Mapping[str, int]) -> Score:
        """The score of all answers; left_out: other samples, by reason."""
        kind = 1 if self._samples[1] else 0
        means = {
            name: total[kind, 0] / max(total[kind, 1], 1) for name, total in self._points.items()
        }
        shown = {scores.SHOWN_AS.get(name, name): float(mean) for name, mean in means.items()}
        others = {NO_ITEMS: self._samples[0]} if kind and self._samples[0] else {}
        return Score(shown, self._samples[kind], {**others, **left_out})


def evaluate(
    run: Path,
    picture: Path,
    split: str = "test",
    max_new_tokens: int | None = None,
    average: bool = False,
    metrics: Sequence[str] = (),
) -> Score:
    """The score of `answer_split`; draws the first samples with items, if any, to ``picture``.

    metrics: in place of the recipe's. Beside the picture, a file with a line of JSON for each
    sample has all answers, and a JSON file has the score and the first samples.
    """
    recipe, left_out = portable_recipe(find_checkpoint(run)), Counter[str]()
    scoring = Scoring(metrics or recipe.data.metrics)
    shown: list[Answered] = []
    of_text: list[Answered] = []
    answers = answer_split(run, split, max_new_tokens, average, left_out)
    path = picture.with_suffix(".jsonl")
    with path.open("w", encoding="utf-8", errors="backslashreplace") as lines:
        for one in answers:
            lines.write(json.dumps(_line(one, scoring.add(one)), ensure_ascii=False) + "\n")
            kind = shown if one.pictures else of_text
            if len(kind) < math.prod(SHOWN):
                kind.append(one)
    found = scoring.result(left_out)
    if shown:
        draw(shown, picture)
    samples = [
        {"question": a.question, "given": a.given, "expected": a.expected, "exact": a.is_exact}
        for a in shown or of_text
    ]
    told = {
        "split": split,
        **found.metrics,
        "metrics": [*found.metrics],
        "scored": found.scored,
        "left_out": found.left_out,
        "samples": samples,
    }
    picture.with_suffix(".json").write_text(json.dumps(told, indent=1) + "\n")
    print(_counts(found), flush=True)
    return found


def _line(one: Answered, own: Mapping[str, float]) -> dict[str, Any]:
    """An answer as the file of all of them has it."""
    return {
        "key": one.key,
        "shard": one.shard,
        "items": len(one.pictures),
        "question": one.question,
        "answer": one.given,
        "expected": one.expected,
        "scores": dict(own),
    }


def _counts(found: Score) -> str:
    """A line on how many samples are scored, and why others are not."""
    others = sum(found.left_out.values())
    reasons = "; ".join(f"{count}: {reason}" for reason, count in found.left_out.items())
    line = f"scored {found.scored} of {found.scored + others} samples"
    return f"{line}, left out {others} ({reasons})" if others else line


def answer_split(
    run: Path,
    split: str = "test",
    max_new_tokens: int | None = None,
    average: bool = False,
    left_out: Counter[str] | None = None,
) -> Iterator[Answered]:
    """Answer every sample of a split of the run's recipe with its latest checkpoint, in order.

    Samples are read as they are answered, about `BATCH_TOKENS` at a time. max_new_tokens: where an
    answer is cut; None for the length of the longest expected answer. average: answer with the
    moving average of the weights. left_out: counts samples that cannot be answered, by reason.
    No prompt and answer together exceed `data.sequence_length`.
    Prints how many expected answers are too long for `max_new_tokens`, and which samples are left
    out and why. Raises RecipeError if the recipe names no shards for the split, InputError with the
    name of a sample that cannot be answered.
    """
    if split not in ("validation", "test"):
        raise RecipeError(f"--split {split}: choose validation or test")
    recipe, left_out = (
        portable_recipe(find_checkpoint(run)),
        Counter() if left_out is None else left_out,
    )
    if not getattr(recipe.data, split):
        raise RecipeError(f"data.{split}: no shards are given, so there is nothing to evaluate")
    generator = Generator(run, average)
    dataset = open_dataset(recipe, split, generator.chat, generator.processors)
    assert dataset is not None
    return _answers(generator, dataset, max_new_tokens, recipe.data.sequence_length, left_out)


def _answers(
    generator: Generator,
    dataset: Dataset,
    max_new_tokens: int | None,
    longest: int,
    left_out: Counter[str],
) -> Iterator[Answered]:
    """The answers of `answer_split`. longest: tokens of a prompt and its answer together."""
    with changed_shards_named():
        limit = _answer_limit(dataset, max_new_tokens)
        for batch in _batches(_questions(dataset, left_out), limit, longest):
            given = generator.answer([one.request for one in batch], limit, longest)
            for one, answer in zip(batch, given, strict=True):
                yield Answered(one.pictures, one.text, answer, one.expected, one.shard, one.key)


@dataclass(frozen=True)
class _Question:
    """A held-out sample: its chat up to the answer, its last question, and what is expected.

    shard, key: where it is. pictures: those of its files. prompt_tokens: number in the chat without
    the answer.
    """

    shard: str
    key: str
    request: Request
    pictures: list[np.ndarray]
    text: str
    expected: str
    prompt_tokens: int


def _answer_limit(dataset: Dataset, max_new_tokens: int | None) -> int:
    """The number of tokens at which answers are cut. Reads all texts, but opens no image."""
    longest = answers = too_long = 0
    for reader in dataset.readers:
        for sample in range(len(reader.index)):
            try:
                _question_and_answer(reader, sample)
                length = _answer_length(reader.sample(sample))
            except UnreadableSample:
                continue  # reported when its turn comes
            longest, answers = max(longest, length), answers + 1
            too_long += max_new_tokens is not None and length > max_new_tokens
    if too_long:
        print(
            f"{too_long} of {answers} expected answers are longer than --max-new-tokens "
            f"{max_new_tokens}, the longest has {longest}; the model's are cut short",
            flush=True,
        )
    return max_new_tokens or max(longest, 1)


def _questions(dataset: Dataset, left_out: Counter[str]) -> Iterator[_Question]:
    """Of all samples in order. Prints which are left out and why, and in the end how many."""
    for one in chain.from_iterable(index.skipped_samples() for index in dataset.indexes):
        print(f"skipped {one}", flush=True)
        left_out[one.reason] += 1
    for reader in dataset.readers:
        for sample in range(len(reader.index)):
            try:
                yield _question(reader, sample)
            except UnreadableSample as error:
                print(f"skipped {error}", flush=True)
                left_out[error.reason] += 1
    if left_out:
        print(f"skipped_samples={left_out.total()}", flush=True)


def _question(reader: SampleReader, sample: int) -> _Question:
    """Decodes the files of a sample. Raises UnreadableSample."""
    index = reader.index
    *asked, answer = _question_and_answer(reader, sample)
    files, pictures = [], []
    for item in index.parts_of_sample(sample):
        own = [reader.decoded(item, file) for file in index.files_of_part(item)]
        files += own
        pictures += map(reader.media(item).picture, own)
    encoded = reader.sample(sample)
    shard, key = index.shard_of(sample), index.key(sample)
    prompt_tokens = len(encoded.input_ids) - _answer_length(encoded)
    request = Request(asked, files, f"sample {key!r} of {shard}")
    question, expected = _text(asked[-1]), _text(answer)
    return _Question(shard, key, request, pictures, question, expected, prompt_tokens)


def _batches(questions: Iterable[_Question], limit: int, longest: int) -> Iterator[list[_Question]]:
    """Consecutive questions with at most `BATCH_TOKENS` including answers of ``limit``, or one.

    longest: tokens at which a question with its answer is cut.
    """
    batch, tokens = list[_Question](), 0
    for one in questions:
        own = min(one.prompt_tokens + limit, longest)
        if batch and tokens + own > BATCH_TOKENS:
            yield batch
            batch, tokens = [], 0
        batch.append(one)
        tokens += own
    if batch:
        yield batch


def _question_and_answer(reader: SampleReader, sample: int) -> list[dict]:
    """The messages of a sample. Raises UnreadableSample unless they end with an answer in text."""
    messages = reader.messages(sample)
    if len(messages) < 2:
        problem = f"{len(messages)} messages: need a question and an answer at least"
    elif not is_answer(messages[-1]):
        role = messages[-1]["role"]
        problem = f"the last message is of {role!r}: need an answer to compare with"
    elif item_parts(messages[-1:]):
        problem = "the last message has items: need an answer in text alone"
    else:
        return messages
    index = reader.index
    raise UnreadableSample(index.shard_of(sample), index.key(sample), None, problem)


def _answer_length(sample: EncodedSample) -> int:
    counted = np.flatnonzero(sample.loss_mask)
    return int(np.split(counted, np.flatnonzero(np.diff(counted) > 1) + 1)[-1].size)


def main(
    run: Path,
    split: str,
    max_new_tokens: int | None = None,
    average: bool = False,
    metrics: Sequence[str] = (),
) -> int:
    """`mimo evaluate RUN`: writes answers into the folder; the last line printed is the score."""
    if unknown := [name for name in metrics if name not in scores.METRICS]:
        raise InputError(f"--metric {unknown[0]}: {suggestion(unknown[0], [*scores.METRICS])}")
    picture = (run if run.is_dir() else run.parent) / f"held_out_{split}.png"
    result = evaluate(run, picture, split, max_new_tokens, average, metrics)
    print(f"answers: {picture.with_suffix('.jsonl')}")
    if picture.is_file():  # samples without images make none
        print(f"picture: {picture}")
    print(result)
    return 0


def _text(message: dict) -> str:
    content = message["content"]
    if isinstance(content, str):
        return content
    return " ".join(part["text"] for part in content if part["type"] == "text")


def draw(shown: Sequence[Answered], path: Path) -> None:
    """Draw samples with items: files, question, given and expected answer."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["text.parse_math"] = False  # texts of samples are no formulas
    from matplotlib import pyplot

    rows, columns = SHOWN
    size = (3.4 * columns, 2.6 * rows)
    figure, axes = pyplot.subplots(rows, columns, figsize=size, layout="constrained")
    for axis in axes.flat:
        axis.set(xticks=[], yticks=[])
        axis.spines[:].set_visible(False)
    for axis, one in zip(axes.flat, shown, strict=False):
        axis.imshow(_side_by_side(one.pictures))
        axis.set_title(textwrap.fill(one.question, 34, max_lines=3), fontsize=8)
        texts = f"answer {one.given!r}\nexpected {one.expected!r}"
        axis.set_xlabel(texts, fontsize=9, color="#1a7f37" if one.is_exact else "#cf222e")
    figure.suptitle("Held-out samples", fontsize=12)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _side_by_side(pictures: Sequence[np.ndarray]) -> np.ndarray:
    """The pictures in a row on white: uint8 (greatest height, all widths and gaps, 3)."""
    columns = []
    for picture in pictures:
        spare = max(map(len, pictures)) - len(picture)
        margins = (spare // 2, spare - spare // 2), (0, _GAP), (0, 0)
        columns.append(np.pad(picture, margins, constant_values=255))
    return np.concatenate(columns, axis=1)[:, :-_GAP]
