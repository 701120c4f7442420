"""A checkpoint that was fine-tuned here answers in transformers as it does here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from data.modalities.transformers import load_processor
from examples.digits.scans import prepare_digits
from mimo.checkpoint.hf.export import convert_to_hf
from mimo.checkpoint.hf.recipes import load_recipe
from mimo.generate.evaluate import Answered, answer_split
from tests.conftest import RunRanks
from tests.mimo import runs
from tests.mimo.checkpoint.hf import folders

NEW_TOKENS = 16
NUM_QUESTIONS = 16
SPLITS = {"sources": "train", "validation": "validation", "test": "test"}
RECIPES = Path("recipes")


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("digits") / "data"
    return prepare_digits(folder, num_train=320, num_validation=8, num_test=64)


def answer_in_transformers(folder: Path, questions: list[Answered]) -> list[str]:
    """Greedy answers, one question at a time."""
    from transformers import AutoModelForImageTextToText

    processor = load_processor(folder)
    model: Any = AutoModelForImageTextToText.from_pretrained(folder)
    answers = []
    for sample in questions:
        content = [{"type": "image"} for _ in sample.pictures]
        content.append({"type": "text", "text": sample.question})
        text = processor.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
        )
        images = {"images": [[Image.fromarray(picture) for picture in sample.pictures]]}
        inputs = processor(
            text=[text],
            return_tensors="pt",
            add_special_tokens=False,
            **(images if sample.pictures else {}),
        )
        with torch.no_grad():
            ids = model.generate(**inputs, do_sample=False, max_new_tokens=NEW_TOKENS)
        new = ids[0, inputs["input_ids"].shape[1] :]
        answers.append(processor.tokenizer.decode(new, skip_special_tokens=True).strip())
    return answers


@pytest.mark.slow
@pytest.mark.parametrize("family", folders.FAMILIES)
def test_an_exported_model_gives_the_same_greedy_answers_in_transformers(
    run_ranks: RunRanks, digits: Path, tmp_path: Path, family: str
) -> None:
    """In the recipe's own layout: the tower on a rank of its own."""
    base = folders.make(family, tmp_path / "base")
    recipe = RECIPES / f"{family}_tiny.yaml"
    overrides = [
        f"init_from={base}",
        *(f'data.{split}=[{{path: "{digits}/{name}-*.tar"}}]' for split, name in SPLITS.items()),
        "train={steps: 60, global_batch_size: 16, micro_batch_size: 4, learning_rate: 0.002, "
        f'warmup_steps: 5, threads_per_rank: 1, run_dir: "{tmp_path}"}}',
    ]
    layout = load_recipe(recipe, overrides)
    assert layout.encoders["vision"].placement == "disjoint"
    runs.run(run_ranks, recipe, *overrides)
    run = tmp_path / layout.name
    lines = (run / "metrics.jsonl").read_text().splitlines()
    losses = [json.loads(line)["loss"] for line in lines]
    assert losses[-1] < losses[0] - 0.5, "the answers should not be those of random weights"

    convert_to_hf(run, tmp_path / "exported", 10**9)
    answered = [*answer_split(run, "test", NEW_TOKENS)]
    with_images = [sample for sample in answered if sample.pictures]
    text_only = [sample for sample in answered if not sample.pictures]
    chosen = [*with_images[: NUM_QUESTIONS - 4], *text_only[:4]]
    assert len(chosen) == NUM_QUESTIONS
    ours = [sample.answer for sample in chosen]
    assert len(set(ours)) > 1, "answers that are all alike compare little"
    assert ours == answer_in_transformers(tmp_path / "exported", chosen)
    assert ours != answer_in_transformers(base, chosen)
