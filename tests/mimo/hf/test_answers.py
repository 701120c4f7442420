"""A tiny checkpoint is fine-tuned and exported: transformers gives the answers that we give."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText

from data.digits import prepare_digits
from mimo.hf.processor import load_processor
from mimo.hf.tiny import TinyCheckpoint, write_tiny
from mimo.hf.to_hf import convert
from mimo.parity.samples import ParitySample, make_samples
from mimo.recipe import load_recipe
from mimo.start import FromScratch
from tests.conftest import RunRanks
from tests.mimo.runs import run_from

RECIPES = Path(__file__).parents[3] / "recipes"
MAX_NEW_TOKENS = 8
SAMPLES = make_samples(6)


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_digits(tmp_path_factory.mktemp("digits"), 64, 1, 1)


def answers_of_ours(rank: int, run: Path, samples: list[ParitySample]) -> list[str]:
    from mimo.generate import Generator, Request

    requests = [Request(sample.prompt(), sample.images()) for sample in samples]
    return Generator(run).answer(requests, MAX_NEW_TOKENS)


def answer_of_theirs(processor: Any, model: Any, sample: ParitySample) -> str:
    text = processor.apply_chat_template(
        sample.prompt(), tokenize=False, add_generation_prompt=True
    )
    images = {"images": [sample.images()]} if sample.pictures else {}
    inputs = processor(text=[text], return_tensors="pt", add_special_tokens=False, **images)
    with torch.no_grad():
        found = model.generate(**inputs, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)
    new = found[0, inputs["input_ids"].shape[1] :]
    return processor.tokenizer.decode(new, skip_special_tokens=True).strip()


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "gemma3"])
def test_a_fine_tuned_and_exported_model_answers_in_transformers_as_here(
    family: str, run_ranks: RunRanks, digits: Path, tmp_path: Path
) -> None:
    write_tiny(TinyCheckpoint(family), tmp_path / "tiny")
    recipe = load_recipe(
        RECIPES / f"{family}_tiny.yaml",
        [
            f"init_from={tmp_path / 'tiny'}",
            f"data.sources=[{{path: {digits}/train-*.tar}}]",
            "data.validation=[]",
            "train.steps=30",
            "train.warmup_steps=0",
            "train.validate_every=null",
            f"train.run_dir={tmp_path}",
        ],
    )
    assert recipe.encoders["vision"].placement == "disjoint"
    run_from(run_ranks, recipe, FromScratch())
    (ours,) = run_ranks(answers_of_ours, 1, recipe.run_dir, SAMPLES)

    convert(recipe.run_dir, tmp_path / "exported", 1 << 20)
    processor = load_processor(tmp_path / "exported")
    model = AutoModelForImageTextToText.from_pretrained(
        tmp_path / "exported", local_files_only=True
    )
    assert [answer_of_theirs(processor, model, sample) for sample in SAMPLES] == ours
    assert len(set(ours)) > 1, "all answers are alike, which says little"
