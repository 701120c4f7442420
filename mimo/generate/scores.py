"""How well answers match what is expected: the metrics that `data.metrics` names.

Each gives points and how many there could have been. A score is their ratio over all samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

Points = tuple[float, int]
_ANLS_THRESHOLD = 0.5
_TOLERANCE = 0.05


def exact(given: str, expected: str) -> Points:
    """Every word is right; spacing does not matter."""
    return float(given.split() == expected.split()), 1


def per_word(given: str, expected: str) -> Points:
    """Words that are right in their place; a missing or surplus word counts as wrong."""
    words, wanted = given.split(), expected.split()
    right = sum(one == other for one, other in zip(words, wanted, strict=False))
    return float(right), max(len(words), len(wanted))


def contains(given: str, expected: str) -> Points:
    """The expected text is part of the answer; case and spacing do not matter.

    Source: Liu et al., OCRBench, 2023, arXiv:2305.07895, section 3.
    """
    return float(_plain(expected) in _plain(given)), 1


def anls(given: str, expected: str) -> Points:
    """Average normalized Levenshtein similarity; a similarity below 0.5 counts as 0.

    It is 1 - edit distance / length of the longer text, without regard to case and spacing.
    Source: Biten et al., Scene Text Visual Question Answering, ICCV 2019, arXiv:1905.13648.
    """
    one, other = _plain(given), _plain(expected)
    similarity = 1 - _edit_distance(one, other) / max(len(one), len(other), 1)
    return similarity if similarity >= _ANLS_THRESHOLD else 0.0, 1


def relaxed_number(given: str, expected: str) -> Points:
    """A number is off by 5 % of the expected one at most; any other text is equal but for case.

    Source: Masry et al., ChartQA, 2022, arXiv:2203.10244, section 5.1, after Methani et al.,
    PlotQA, 2020, arXiv:1909.00997.
    """
    number, wanted = _number(given), _number(expected)
    if number is None or wanted is None:
        return float(_plain(given) == _plain(expected)), 1
    return float(abs(number - wanted) <= _TOLERANCE * abs(wanted)), 1


METRICS: Mapping[str, Callable[[str, str], Points]] = {
    one.__name__: one for one in (exact, per_word, contains, anls, relaxed_number)
}
"""By the name in a recipe."""
SHOWN_AS = {"exact": "exact_match"}
"""What is printed for a metric, where that is not its name."""


def _plain(text: str) -> str:
    return " ".join(text.casefold().split())


def _number(text: str) -> float | None:
    """A finite number, or a percentage as a fraction; None for any other text."""
    text = text.strip()
    try:
        found = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        return None
    return found if math.isfinite(found) else None


def _edit_distance(one: str, other: str) -> int:
    """The fewest letters to insert, remove or replace (Wagner and Fischer, 1974)."""
    row = list(range(len(other) + 1))
    for number, letter in enumerate(one, start=1):
        before, row[0] = row[0], number
        for place, wanted in enumerate(other, start=1):
            cheapest = min(row[place], row[place - 1]) + 1
            before, row[place] = row[place], min(cheapest, before + (letter != wanted))
    return row[-1]
