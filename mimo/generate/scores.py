"""Metrics of `mimo evaluate`: how well answers match the expected answers."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

NO_ITEMS = "text alone, where others have items"
DRAWN = "answers with images"
"""The reason why answered samples are not scored."""

Points = tuple[float, int]
"""Points of an answer, and the most that it could have. A score is their ratio over all samples."""
_ANLS_THRESHOLD = 0.5
_TOLERANCE = 0.05


def exact(answer: str, expected: str) -> Points:
    """Score 1 if every word is right; spacing does not matter."""
    return float(answer.split() == expected.split()), 1


def per_word(answer: str, expected: str) -> Points:
    """Count words that are right in their place; missing and surplus words count as wrong."""
    words, wanted = answer.split(), expected.split()
    right = sum(word == want for word, want in zip(words, wanted, strict=False))
    return float(right), max(len(words), len(wanted))


def contains(answer: str, expected: str) -> Points:
    """Score 1 if the expected text is part of the answer; case and spacing do not matter.

    Source: Liu et al., OCRBench, 2023, arXiv:2305.07895, section 3.
    """
    return float(_plain(expected) in _plain(answer)), 1


def anls(answer: str, expected: str) -> Points:
    """Average normalized Levenshtein similarity; a similarity below 0.5 counts as 0.

    It is 1 - edit distance / length of the longer text, without regard to case and spacing.
    Source: Biten et al., Scene Text Visual Question Answering, ICCV 2019, arXiv:1905.13648.
    """
    text, wanted = _plain(answer), _plain(expected)
    similarity = 1 - _edit_distance(text, wanted) / max(len(text), len(wanted), 1)
    return similarity if similarity >= _ANLS_THRESHOLD else 0.0, 1


def relaxed_number(answer: str, expected: str) -> Points:
    """Score 1 for a number within 5 % of the expected one, or any other text that is equal.

    Case and spacing of text do not matter. Source: Masry et al., ChartQA, 2022, arXiv:2203.10244,
    section 5.1, after Methani et al., PlotQA, 2020, arXiv:1909.00997.
    """
    number, wanted = _number(answer), _number(expected)
    if number is None or wanted is None:
        return float(_plain(answer) == _plain(expected)), 1
    return float(abs(number - wanted) <= _TOLERANCE * abs(wanted)), 1


METRICS: Mapping[str, Callable[[str, str], Points]] = {
    metric.__name__: metric for metric in (exact, per_word, contains, anls, relaxed_number)
}
"""The metrics that `data.metrics` names."""
_PRINTED_AS = {"exact": "exact_match"}


def _plain(text: str) -> str:
    return " ".join(text.casefold().split())


def _number(text: str) -> float | None:
    """Return a finite number, or a percentage as a fraction; None for any other text."""
    text = text.strip()
    try:
        number = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _edit_distance(text: str, other: str) -> int:
    """Return the fewest letters to insert, remove or replace (Wagner and Fischer, 1974)."""
    row = list(range(len(other) + 1))
    for number, letter in enumerate(text, start=1):
        before, row[0] = row[0], number
        for place, wanted in enumerate(other, start=1):
            cheapest = min(row[place], row[place - 1]) + 1
            before, row[place] = row[place], min(cheapest, before + (letter != wanted))
    return row[-1]


@dataclass(frozen=True)
class Answered:
    """A held-out sample with its answer.

    pictures: of its files, uint8 (height, width, 3). truth, drawn: likewise the images of the
    expected answer and of the answer. shard, key: where the sample is.
    """

    pictures: Sequence[np.ndarray]
    question: str
    answer: str
    expected: str
    shard: str = ""
    key: str = ""
    truth: Sequence[np.ndarray] = ()
    drawn: Sequence[np.ndarray] = ()

    @property
    def is_exact(self) -> bool:
        return exact(self.answer, self.expected)[0] > 0


@dataclass(frozen=True)
class Score:
    """The score of a split.

    metrics: by name, over the samples with items, or over all samples if none has items. scored:
    number of these. left_out: number of other samples, by reason.
    """

    metrics: Mapping[str, float]
    scored: int
    left_out: Mapping[str, int]

    def __str__(self) -> str:
        """Return the line that ends an evaluation: ``exact_match=0.944 per_word=0.976``."""
        return " ".join(f"{name}={value:.3f}" for name, value in self.metrics.items())

    def counts(self) -> str:
        """Return a line on how many samples are scored, and why others are not."""
        others = sum(self.left_out.values())
        reasons = "; ".join(f"{count}: {reason}" for reason, count in self.left_out.items())
        line = f"scored {self.scored} of {self.scored + others} samples"
        return f"{line}, left out {others} ({reasons})" if others else line


class Scoring:
    """Sums points of answers and keeps none of them."""

    def __init__(self, metrics: Sequence[str]) -> None:
        # First those of samples without items, then those of samples with items.
        self._samples = [0, 0]
        self._points = {name: np.zeros((2, 2)) for name in metrics}

    def add(self, sample: Answered) -> dict[str, float]:
        """Count an answer; return its own score by metric."""
        scores, kind = dict[str, float](), int(bool(sample.pictures))
        self._samples[kind] += 1
        for name, total in self._points.items():
            points, most = METRICS[name](sample.answer, sample.expected)
            total[kind] += (points, most)
            scores[name] = points / max(most, 1)
        return scores

    def result(self, left_out: Mapping[str, int]) -> Score:
        """Return the score of all answers; left_out: number of other samples, by reason."""
        kind = 1 if self._samples[1] else 0
        metrics = {
            _PRINTED_AS.get(name, name): float(total[kind, 0] / max(total[kind, 1], 1))
            for name, total in self._points.items()
        }
        others = {NO_ITEMS: self._samples[0]} if kind and self._samples[0] else {}
        return Score(metrics, self._samples[kind], {**others, **left_out})
