"""Score a run that reads and draws digits: ``python -m examples.digits.judge RUN``.

A classifier fitted to the training scans reads the images that the run drew for test questions.
The script prints ``exact_match=... per_digit=... drawn=...``; the first two come from
`mimo evaluate`.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from PIL import Image

from examples.digits.scans import load_scans


def share_drawn_right(run: Path) -> float:
    """Return the share of requested digits that the classifier reads in the drawn images."""
    from sklearn.svm import SVC  # late: it is slow to import

    scans, digits = load_scans("train")
    make: Any = SVC
    classifier = make(gamma=0.001, C=10)  # 0.983 on the test scans
    classifier.fit(_features(scans[:, 1:-1, 1:-1]), digits)
    right = asked = 0
    for line in (run / "held_out_test.jsonl").read_text().splitlines():
        sample = json.loads(line)
        if "drawn" not in sample:
            continue
        wanted = [int(digit) for digit in re.findall(r"\d", sample["question"])]
        asked += max(len(wanted), len(sample["drawn"]))  # a surplus image is wrong
        if sample["drawn"]:
            images = [Image.open(run / path).convert("L") for path in sample["drawn"]]
            read = classifier.predict(_features(np.stack([np.asarray(i) for i in images])))
            right += sum(a == b for a, b in zip(read, wanted, strict=False))
    return right / max(asked, 1)


def _features(images: np.ndarray) -> np.ndarray:
    """Convert uint8 (k, 8, 8) to (k, 64), on the 0 to 16 scale of the scans."""
    return (images.astype(np.float64) * (16 / 255)).reshape(len(images), -1)


def main(
    run: Annotated[Path, typer.Argument(help="The run's folder, after mimo evaluate.")],
) -> None:
    """Print the scores of reading and drawing."""
    scores = json.loads((run / "held_out_test.json").read_text())
    drawn = share_drawn_right(run)
    print(
        f"exact_match={scores['exact_match']:.3f} per_digit={scores['per_word']:.3f} "
        f"drawn={drawn:.3f}"
    )


if __name__ == "__main__":
    typer.run(main)
