"""The data of drawn digits, and the recipe that learns from them, from data to score."""

from __future__ import annotations

import json
import re
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner
from webdataset.compat import WebDataset

from examples.digits import judge
from examples.digits.drawings import prepare_drawn_digits
from examples.digits.scans import load_scans
from mimo.cli.main import app
from mimo.train import main as job
from tests.conftest import RunRanks

RECIPE = Path(__file__).parents[3] / "recipes" / "draws_digits.yaml"
NUM_TRAIN = 96


def prepare(folder: Path) -> Path:
    return prepare_drawn_digits(folder, num_train=NUM_TRAIN, num_validation=16, num_test=24)


@pytest.fixture(scope="module")
def drawn_digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(tmp_path_factory.mktemp("drawn"))


def test_answers_to_draw_are_scans_of_the_digits_that_are_asked_for(drawn_digits: Path) -> None:
    scans, digits = load_scans("train")
    known = {scan[1:-1, 1:-1].tobytes(): int(d) for scan, d in zip(scans, digits, strict=True)}
    samples = list(WebDataset(str(drawn_digits / "train-00000.tar"), shardshuffle=False))
    assert len(samples) == NUM_TRAIN
    documents = [json.loads(sample["json"]) for sample in samples]
    drawn = [number for number, document in enumerate(documents) if "drawn" in document]
    assert 0.25 < len(drawn) / len(samples) < 0.6
    sizes = set[int]()
    for number in drawn:
        question, answer = (message["content"] for message in documents[number]["messages"])
        asked = [int(digit) for digit in re.findall(r"\d", question[0]["text"])]
        assert answer == [{"type": "image"}] * len(asked)
        images = [
            np.asarray(Image.open(BytesIO(samples[number][f"{n}.png"]))) for n in range(len(asked))
        ]
        assert [known[image.tobytes()] for image in images] == asked == documents[number]["drawn"]
        assert {image.shape for image in images} == {(8, 8)}
        sizes.add(len(asked))
    assert sizes == {1, 2}


def test_equal_settings_write_nothing_again(drawn_digits: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in drawn_digits.rglob("*.tar")}
    assert prepare(drawn_digits) == drawn_digits
    assert {path: path.stat().st_mtime_ns for path in drawn_digits.rglob("*.tar")} == before


@pytest.mark.slow
def test_the_recipe_trains_and_is_scored(
    run_ranks: RunRanks, drawn_digits: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    splits = {"sources": "train", "validation": "validation", "test": "test"}
    settings = [
        *(f"data.{key}=[{{path: '{drawn_digits}/{name}-*.tar'}}]" for key, name in splits.items()),
        f"data.tokenizer={drawn_digits}/tokenizer",
        f"train.run_dir={drawn_digits}/runs",
        *("train.steps=2", "train.validate_every=2", "train.validation_batches=1"),
    ]
    assert job.main(RECIPE, settings) == 0
    run_dir = drawn_digits / "runs" / "draws_digits"
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1].keys() >= {"validation_loss_language", "validation_loss_image"}
    run_ranks(evaluate, 1, run_dir)
    capsys.readouterr()
    judge.main(run_dir)
    score = r"exact_match=[01]\.\d{3} per_digit=[01]\.\d{3} drawn=[01]\.\d{3}\n"
    assert re.fullmatch(score, capsys.readouterr().out)


def evaluate(rank: int, run_dir: Path) -> None:
    done = CliRunner().invoke(app, ["evaluate", str(run_dir), "--steps", "2", "--guidance", "2"])
    assert done.exit_code == 0, done.output
