"""Answers held-out samples with a trained model and compares them with the expected answers."""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path

import numpy as np

from data.index.reader import SampleReader, UnreadableSample
from data.text.chat import EncodedSample
from data.text.messages import is_answer, item_parts
from mimo.checkpoint.assets import recipe_of
from mimo.checkpoint.folder import find_checkpoint
from mimo.errors import RecipeError
from mimo.generate.answer import Generator, Request
from mimo.step.dataset import Dataset, changed_shards_named, open_dataset

BATCH_TOKENS = 8192
"""Tokens of samples that are answered together, their answers included."""
SHOWN = (3, 4)
"""Rows and columns of the picture."""
_GAP = 4  # pixels between the files of a sample


@dataclass(frozen=True)
class Answered:
    """One held-out sample: pictures of its files, the question, the given and expected answers.

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
    """The fractions of answers that are exactly right, and of words that are right in their place.

    They are over the samples with items, or over all samples if none has items.
    """

    exact_match: float
    per_word: float


def score(answered: Iterable[Answered]) -> Score:
    """Compare answers word by word; a missing or surplus word counts as wrong.

    Goes through the answers once and keeps none.
    """
    # Rows: samples without and with items. Columns: samples, exact ones, words, right words.
    counts = np.zeros((2, 4), np.int64)
    for one in answered:
        given, expected = one.given.split(), one.expected.split()
        right = sum(g == e for g, e in zip(given, expected, strict=False))
        words = max(len(given), len(expected))
        counts[int(bool(one.pictures))] += (1, one.is_exact, words, right)
    samples, exact, words, right = counts[1 if counts[1, 0] else 0].tolist()
    return Score(exact / max(samples, 1), right / max(words, 1))


def evaluate(
    run: Path,
    picture: Path,
    split: str = "test",
    max_new_tokens: int | None = None,
    average: bool = False,
) -> Score:
    """The score of `answer_split`; draws the first samples with items, if any, to ``picture``.

    Beside it a JSON file has the score and these samples, or the first without items, as text.
    """
    shown: list[Answered] = []
    of_text: list[Answered] = []

    def keep(one: Answered) -> Answered:
        kind = shown if one.pictures else of_text
        if len(kind) < math.prod(SHOWN):
            kind.append(one)
        return one

    found = score(map(keep, answer_split(run, split, max_new_tokens, average)))
    if shown:
        draw(shown, picture)
    samples = [
        {"question": a.question, "given": a.given, "expected": a.expected, "exact": a.is_exact}
        for a in shown or of_text
    ]
    told = {"split": split, **asdict(found), "samples": samples}
    picture.with_suffix(".json").write_text(json.dumps(told, indent=1) + "\n")
    return found


def answer_split(
    run: Path, split: str = "test", max_new_tokens: int | None = None, average: bool = False
) -> Iterator[Answered]:
    """Answer every sample of a split of the run's recipe with its latest checkpoint, in order.

    Samples are read as they are answered, about `BATCH_TOKENS` at a time. max_new_tokens: where an
    answer is cut; None for the length of the longest expected answer. average: answer with the
    moving average of the weights. No prompt and answer together exceed `data.sequence_length`.
    Prints how many expected answers are too long for `max_new_tokens`, and which samples are left
    out and why. Raises RecipeError if the recipe names no shards for the split, InputError with the
    name of a sample that cannot be answered.
    """
    if split not in ("validation", "test"):
        raise RecipeError(f"--split {split}: choose validation or test")
    recipe = recipe_of(find_checkpoint(run))
    if not getattr(recipe.data, split):
        raise RecipeError(f"data.{split}: no shards are given, so there is nothing to evaluate")
    generator = Generator(run, average)
    dataset = open_dataset(recipe, split, generator.chat, generator.processors)
    assert dataset is not None
    longest = recipe.data.sequence_length
    with changed_shards_named():
        limit = _answer_limit(dataset, max_new_tokens)
        for batch in _batches(_questions(dataset), limit, longest):
            given = generator.answer([one.request for one in batch], limit, longest)
            for one, answer in zip(batch, given, strict=True):
                yield Answered(one.pictures, one.text, answer, one.expected)


@dataclass(frozen=True)
class _Question:
    """A held-out sample: its chat up to the answer, its last question, and what is expected.

    pictures: those of its files. prompt_tokens: number in the chat without the answer.
    """

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


def _questions(dataset: Dataset) -> Iterator[_Question]:
    """Of all samples in order. Prints which are left out and why, and in the end how many."""
    num_skipped = 0
    for one in chain.from_iterable(index.skipped_samples() for index in dataset.indexes):
        print(f"skipped {one}", flush=True)
        num_skipped += 1
    for reader in dataset.readers:
        for sample in range(len(reader.index)):
            try:
                yield _question(reader, sample)
            except UnreadableSample as error:
                print(f"skipped {error}", flush=True)
                num_skipped += 1
    if num_skipped:
        print(f"skipped_samples={num_skipped}", flush=True)


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
    name = f"sample {index.key(sample)!r} of {index.shard_of(sample)}"
    prompt_tokens = len(encoded.input_ids) - _answer_length(encoded)
    request = Request(asked, files, name)
    return _Question(request, pictures, _text(asked[-1]), _text(answer), prompt_tokens)


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


def main(run: Path, split: str, max_new_tokens: int | None = None, average: bool = False) -> int:
    """`mimo evaluate RUN`: draws a picture into the folder; the last line printed is the score."""
    picture = (run if run.is_dir() else run.parent) / f"held_out_{split}.png"
    result = evaluate(run, picture, split, max_new_tokens, average)
    if picture.is_file():  # samples without images make none
        print(f"picture: {picture}")
    print(f"exact_match={result.exact_match:.3f} per_word={result.per_word:.3f}")
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
