"""Checkpoints of language models alone, and language models trained without their tower."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from data.batch import pack_lane
from mimo.check.workload import Sample, write_shard
from mimo.checkpoint.hf.export import convert_to_hf
from mimo.checkpoint.hf.initial import initial_weights
from mimo.checkpoint.hf.recipes import load_recipe
from mimo.errors import RecipeError
from mimo.families.registry import language_settings
from tests.cases import quick
from tests.conftest import RunRanks
from tests.mimo import runs
from tests.mimo.checkpoint.hf import folders
from tests.mimo.checkpoint.hf.folders import TEXT_ONLY

RECIPE = """
name: text
init_from: {folder}/model
language: {{grid: {{tp: 2, sp: true, dp: 1}}}}
encoders: {{}}
data:
  sources: [{{path: "{folder}/train-*.tar"}}]
  test: [{{path: "{folder}/train-*.tar"}}]
  sequence_length: 64
train:
  steps: 3
  global_batch_size: 4
  micro_batch_size: 2
  learning_rate: 0.003
  run_dir: {folder}/runs
  threads_per_rank: 1
"""


def write_text_recipe(folder: Path) -> Path:
    samples = [Sample((), f"what comes after {n} ?", str(n + 1)) for n in range(9)]
    write_shard(folder / "train-00000.tar", samples)
    path = folder / "text.yaml"
    path.write_text(RECIPE.format(folder=folder))
    return path


@pytest.mark.parametrize("family", quick([*TEXT_ONLY, "qwen3_vl"], "qwen3"))
def test_a_text_only_run_exports_a_model_that_transformers_computes_alike(
    run_ranks: RunRanks, tmp_path: Path, family: str
) -> None:
    base = folders.make(family, tmp_path / "model")
    runs.run(run_ranks, write_text_recipe(tmp_path))
    run, exported = tmp_path / "runs" / "text", tmp_path / "exported"
    convert_to_hf(run, exported, 10**6)
    before, after = folders.tensors(base), folders.tensors(exported)
    assert before.keys() == after.keys()
    ((ids, ours),) = run_ranks(_logits, 1, run)
    theirs = logits_of_transformers(exported, family, ids)[:, : ours.shape[1]]
    assert float((ours - theirs).abs().max() / theirs.abs().max()) <= 1e-5
    untrained = logits_of_transformers(base, family, ids)[:, : ours.shape[1]]
    assert float((ours - untrained).abs().max()) > 0.1
    tower = [key for key in before if "visual" in key]
    assert bool(tower) == (family not in TEXT_ONLY)
    assert all(torch.equal(before[key], after[key]) for key in tower)


def _logits(rank: int, run: Path) -> tuple[np.ndarray, Tensor]:
    """Ids of a chat (T,), and our logits (T, V) after it; evaluates, too."""
    from mimo.generate.answer import Generator
    from mimo.generate.evaluate import Scoring, answer_split

    generator = Generator(run)
    turns = [("user", "what comes after 3 ?"), ("assistant", "4")]
    chat = [{"role": role, "content": text} for role, text in turns]
    sample = generator.chat.encode(chat, [], "chat")
    lane = pack_lane([sample], [[]], [0], len(sample.input_ids), 0, time_steps=[[]])
    with torch.no_grad():
        logits = generator.model.forward(lane, {}, with_labels=False)[0]
    answered = list(answer_split(run, "test"))
    assert [answer.expected for answer in answered] == [str(n + 1) for n in range(9)]
    exact = sum(answer.is_exact for answer in answered) / len(answered)
    scoring = Scoring(["exact"])
    for answer in answered:
        scoring.add(answer)
    score = scoring.result({})
    assert score.metrics == {"exact_match": exact}, (
        "samples without images count where none has any"
    )
    return sample.input_ids, logits[:, : generator.model.model.num_tokens]


def logits_of_transformers(folder: Path, family: str, ids: np.ndarray) -> Tensor:
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    kind: Any = AutoModelForCausalLM if family in TEXT_ONLY else AutoModelForImageTextToText
    model, report = kind.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    with torch.no_grad():
        return model(input_ids=torch.from_numpy(ids)[None]).logits[0]


def test_a_text_only_checkpoint_refuses_encoders(tmp_path: Path) -> None:
    folders.make("qwen3", tmp_path / "model")
    path = write_text_recipe(tmp_path)
    path.write_text(path.read_text().replace("encoders: {}\n", ""))
    recipe = load_recipe(path)
    assert not recipe.encoders
    settings: Any = language_settings(recipe)
    assert sum(settings.mrope_section) == settings.head_size // 2
    assert set(getattr(initial_weights(recipe), "weights")) == {"language"}  # noqa: B009
    with pytest.raises(RecipeError, match=r"encoders\.vision: .*language model alone \(qwen3\)"):
        load_recipe(path, ["encoders={vision: {}}"])
