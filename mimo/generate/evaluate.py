"""`mimo evaluate`: answers held-out samples with a trained model and scores the answers."""

import json
import math
import re
import shutil
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from data.index.reader import SampleReader, UnreadableSample
from data.modalities.image_files import png_bytes
from data.text.chat import EncodedSample
from data.text.messages import is_answer, item_parts
from data.text.outputs import output_of
from mimo.checkpoint.assets import portable_recipe
from mimo.checkpoint.folder import find_checkpoint
from mimo.errors import InputError, RecipeError, suggestion
from mimo.generate.answer import Generator, Request
from mimo.generate.drawing import DEFAULT, Drawing
from mimo.generate.scores import DRAWN, METRICS, Answered, Scoring
from mimo.model.dataset import Dataset, changed_shards_named, open_dataset

BATCH_TOKENS = 8192  # of samples that are answered together, their answers included
SHOWN = (3, 4)  # rows and columns of the picture
_GAP = 4  # pixels between the files of a sample


def main(
    run: Path,
    split: str,
    max_new_tokens: int | None = None,
    average: bool = False,
    metrics: Sequence[str] = (),
    how: Drawing = DEFAULT,
) -> int:
    """Write the answers of `answer_split` and their score; the last line is the score.

    Images of answers are written to ``drawn_<split>/`` beside them. how: to draw them.
    """
    if unknown := [name for name in metrics if name not in METRICS]:
        raise InputError(f"--metric {unknown[0]}: {suggestion(unknown[0], [*METRICS])}")
    picture = (run if run.is_dir() else run.parent) / f"held_out_{split}.png"
    recipe, left_out = portable_recipe(find_checkpoint(run)), Counter[str]()
    scoring = Scoring(metrics or recipe.data.metrics)
    with_items: list[Answered] = []
    of_text: list[Answered] = []
    with_images: list[Answered] = []
    drawn = picture.with_name(f"drawn_{split}")
    path = picture.with_suffix(".jsonl")
    with path.open("w", encoding="utf-8", errors="backslashreplace") as lines:
        for number, sample in enumerate(
            answer_split(run, split, max_new_tokens, average, left_out, how)
        ):
            if number == 0:  # the evaluation was not refused
                shutil.rmtree(drawn, ignore_errors=True)
            line: dict[str, Any] = {
                "key": sample.key,
                "shard": sample.shard,
                "items": len(sample.pictures),
                "question": sample.question,
                "answer": sample.answer,
                "expected": sample.expected,
            }
            kind = with_items if sample.pictures else of_text
            if sample.truth:
                left_out[DRAWN] += 1
                line |= {"drawn": _save_drawn(sample, drawn), "asked": len(sample.truth)}
                kind = with_images
            else:
                line["scores"] = scoring.add(sample)
            lines.write(json.dumps(line, ensure_ascii=False) + "\n")
            if len(kind) < math.prod(SHOWN):
                kind.append(sample)
    score = scoring.result(left_out)
    if with_items:
        draw(with_items, picture)
    if with_images:
        draw(with_images, drawn.with_suffix(".png"))
    else:  # of an earlier evaluation
        drawn.with_suffix(".png").unlink(missing_ok=True)
    document = {
        "split": split,
        **score.metrics,
        "metrics": [*score.metrics],
        "scored": score.scored,
        "left_out": score.left_out,
        "samples": [
            {"question": a.question, "given": a.answer, "expected": a.expected, "exact": a.is_exact}
            for a in with_items or of_text
        ],
    }
    picture.with_suffix(".json").write_text(json.dumps(document, indent=1) + "\n")
    print(score.counts())
    print(f"answers: {path}")
    if with_items:
        print(f"picture: {picture}")
    if with_images:
        print(f"drawn: {drawn}, beside the truth: {drawn.with_suffix('.png')}")
    print(score)
    return 0


def draw(shown: Sequence[Answered], path: Path) -> None:
    """Draw samples with items: files, question, answer and expected answer.

    Of samples that are answered with images: what was drawn, then the truth.
    """
    rows, columns = SHOWN
    figure = Figure(figsize=(3.4 * columns, 2.6 * rows), layout="constrained")
    axes = figure.subplots(rows, columns)
    for axis in axes.flat:
        axis.set(xticks=[], yticks=[])
        axis.spines[:].set_visible(False)
    for axis, sample in zip(axes.flat, shown, strict=False):
        axis.imshow(_side_by_side([*sample.pictures, *sample.drawn, *sample.truth]))
        question = textwrap.fill(sample.question, 34, max_lines=3)
        texts = f"answer {sample.answer!r}\nexpected {sample.expected!r}"
        color = "#1a7f37" if sample.is_exact else "#cf222e"
        if sample.truth:
            texts, color = f"{len(sample.drawn)} drawn, then the truth", "#1f2328"
        # Texts of samples are no formulas.
        axis.set_title(question, fontsize=8, parse_math=False)
        axis.set_xlabel(texts, fontsize=9, color=color, parse_math=False)
    figure.suptitle("Held-out samples", fontsize=12)
    figure.savefig(path, dpi=110)


def _save_drawn(sample: Answered, folder: Path) -> list[str]:
    """Save the images of an answer; returns their paths, from the folder of `drawn_<split>`."""
    paths = []
    for number, image in enumerate(sample.drawn):
        folder.mkdir(exist_ok=True)
        name = re.sub(r"[^A-Za-z0-9._-]", "_", f"{Path(sample.shard).stem}_{sample.key}")
        paths.append(f"{folder.name}/{name}.{number}.png")
        (folder.parent / paths[-1]).write_bytes(png_bytes(image))
    return paths


def _side_by_side(pictures: Sequence[np.ndarray]) -> np.ndarray:
    """Return the pictures in a row on white: uint8 (greatest height, all widths and gaps, 3)."""
    columns = []
    for picture in pictures:
        spare = max(map(len, pictures)) - len(picture)
        margins = (spare // 2, spare - spare // 2), (0, _GAP), (0, 0)
        columns.append(np.pad(picture, margins, constant_values=255))
    return np.concatenate(columns, axis=1)[:, :-_GAP]


@dataclass(frozen=True)
class _Question:
    """A held-out sample whose answer is still empty, and the chat to complete."""

    sample: Answered
    request: Request
    prompt_tokens: int


def answer_split(
    run: Path,
    split: str = "test",
    max_new_tokens: int | None = None,
    average: bool = False,
    left_out: Counter[str] | None = None,
    how: Drawing = DEFAULT,
) -> Iterator[Answered]:
    """Answer every sample of a split of the run's recipe with its latest checkpoint, in order.

    max_new_tokens: where an answer is cut; None for the length of the longest expected answer. No
    prompt and answer together exceed `data.sequence_length`. left_out: counts skipped samples by
    reason. Raises RecipeError if the recipe names no shards for the split, InputError with the name
    of a sample that cannot be answered.
    """
    recipe = portable_recipe(find_checkpoint(run))
    if not getattr(recipe.data, split):
        raise RecipeError(f"data.{split}: no shards are given, so there is nothing to evaluate")
    generator = Generator(run, average)
    dataset = open_dataset(recipe, split, generator.chat, generator.processors)
    assert dataset is not None
    counts = Counter[str]() if left_out is None else left_out
    max_length = recipe.data.sequence_length
    with changed_shards_named():
        limit = max_new_tokens or _longest_answer(dataset)
        for batch in _batches(_questions(dataset, counts), limit, max_length):
            requests = [question.request for question in batch]
            answers = generator.respond(requests, limit, max_length, how)
            # The noise of an image depends on its number alone, not on the batch.
            how = replace(how, first=how.first + sum(len(answer.images) for answer in answers))
            for question, answer in zip(batch, answers, strict=True):
                yield replace(question.sample, answer=answer.text, drawn=answer.images)


def _longest_answer(dataset: Dataset) -> int:
    """Return the tokens of the longest expected answer. Reads all texts, but no image."""
    longest = 1
    for reader in dataset.readers:
        for sample in range(len(reader.index)):
            with suppress(UnreadableSample):  # `_questions` reports it
                _question_and_answer(reader, sample)
                tokens = _answer_length(reader.sample(sample), reader.chat.eos_token_id)
                longest = max(longest, tokens)
    return longest


def _questions(dataset: Dataset, left_out: Counter[str]) -> Iterator[_Question]:
    """Yield the questions of all samples in order; print which are left out and why."""
    for skipped in chain.from_iterable(index.skipped_samples() for index in dataset.indexes):
        print(f"skipped {skipped}", flush=True)
        left_out[skipped.reason] += 1
    for reader in dataset.readers:
        for sample in range(len(reader.index)):
            try:
                yield _question(reader, sample)
            except UnreadableSample as error:
                print(f"skipped {error}", flush=True)
                left_out[error.reason] += 1


def _question(reader: SampleReader, sample: int) -> _Question:
    """Decode the files of a sample. Raises UnreadableSample."""
    index = reader.index
    *asked, answer = _question_and_answer(reader, sample)
    files, pictures, truth = [], list[np.ndarray](), list[np.ndarray]()
    num_asked = len(item_parts(asked))
    for number, item in enumerate(index.parts_of_sample(sample)):
        decoded = [reader.decoded(item, file) for file in index.files_of_part(item)]
        if number < num_asked:
            files += decoded
        seen = map(reader.media(item).picture, decoded)
        (pictures if number < num_asked else truth).extend(seen)
    encoded = reader.sample(sample)
    shard, key = index.shard_of(sample), index.key(sample)
    request = Request(asked, files, f"sample {key!r} of {shard}")
    unanswered = Answered(pictures, _text(asked[-1]), "", _text(answer), shard, key, truth)
    length = _answer_length(encoded, reader.chat.eos_token_id)
    return _Question(unanswered, request, len(encoded.input_ids) - length)


def _batches(
    questions: Iterable[_Question], limit: int, max_length: int
) -> Iterator[list[_Question]]:
    """Yield consecutive questions of at most `BATCH_TOKENS` with answers of ``limit``, or one."""
    batch, tokens = list[_Question](), 0
    for question in questions:
        length = min(question.prompt_tokens + limit, max_length)
        if batch and tokens + length > BATCH_TOKENS:
            yield batch
            batch, tokens = [], 0
        batch.append(question)
        tokens += length
    if batch:
        yield batch


def _question_and_answer(reader: SampleReader, sample: int) -> list[dict]:
    """Return the messages of a sample. Raises UnreadableSample if the last is no answer.

    An answer has only text and images of generators.
    """
    index, messages = reader.index, reader.messages(sample)
    kinds = {output_of(part["type"]) for part in item_parts(messages[-1:])}
    read = kinds - {*reader.chat.outputs}
    if len(messages) < 2 or not is_answer(messages[-1]) or read:
        problem = "the chat does not end with a question and an answer of text or drawn images"
        raise UnreadableSample(index.shard_of(sample), index.key(sample), None, problem)
    return messages


def _answer_length(sample: EncodedSample, end_of_turn: int) -> int:
    """Return the number of loss tokens of the last answer; the others' end before it."""
    counted = np.flatnonzero(sample.loss_mask)
    ends = counted[sample.labels[counted] == end_of_turn]
    return int((counted > (ends[-2] if len(ends) > 1 else -1)).sum())


def _text(message: dict) -> str:
    content = message["content"]
    if isinstance(content, str):
        return content
    return " ".join(part["text"] for part in content if part["type"] == "text")
