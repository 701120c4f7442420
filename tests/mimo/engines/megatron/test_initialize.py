"""Initial weights: the same in every layout, and no rank draws or holds more than its part."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mimo.checkpoint.hf.recipes import load_recipe
from mimo.checkpoint.hf.tiny import TinyCheckpoint, write_tiny
from mimo.checkpoint.resume import FromScratch, FromWeights, Resume, Start
from mimo.config.schema import Recipe
from mimo.parallel.grids import Layout
from tests import language_steps
from tests.conftest import RunRanks
from tests.language_steps import Job
from tests.lone_module import _context
from tests.mimo import tiny
from tests.mimo.runs import LAYOUT

# Several blocks in either direction, whose borders are not those of the ranks' parts.
WIDE = {
    "num_layers": 4,
    "hidden_size": 320,
    "ffn_hidden_size": 520,
    "num_attention_heads": 8,
    "num_query_groups": 4,
    "head_size": 40,
    "mrope_section": (10, 5, 5),
    "vocab_multiple": 600,
}
GRIDS: dict[str, dict[str, Any]] = {
    "tp2": {"tp": 2, "sp": True},
    "tp4": {"tp": 4},
    "pp2": {"pp": 2},
    "tp2 pp2 vpp2": {"tp": 2, "pp": 2, "vpp": 2},
}


def drawn(run_ranks: RunRanks, job: Job) -> dict[str, np.ndarray]:
    size = job.grid.get("tp", 1) * job.grid.get("pp", 1)
    return tiny.assemble(run_ranks(language_steps.train, size, job), "weight")  # type: ignore[return-value]


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_every_layout_draws_the_same_weights_bit_for_bit(run_ranks: RunRanks, tied: bool) -> None:
    job = Job(settings={**WIDE, "tie_word_embeddings": tied}, dtype=torch.bfloat16, steps=0)
    expected = drawn(run_ranks, job)
    head, embedding = "language.output_layer.weight", "language.embedding.word_embeddings.weight"
    assert (head in expected) is not tied
    assert tied or not np.array_equal(expected[head], expected[embedding])
    for grid in GRIDS.values() if tied else [GRIDS["tp2 pp2 vpp2"]]:
        weights = drawn(run_ranks, replace(job, grid=grid))
        assert weights.keys() == expected.keys()
        for name, value in expected.items():
            np.testing.assert_array_equal(weights[name], value, err_msg=f"{name} with {grid}")


def test_blocks_are_independent_and_distributed_as_asked(run_ranks: RunRanks) -> None:
    weights = drawn(run_ranks, Job(settings=WIDE, steps=0))
    embedding = weights["language.embedding.word_embeddings.weight"]
    assert embedding.shape == (600, 320)
    blocks = [embedding[:256, :256], embedding[256:512, :256]]
    correlation = np.corrcoef(blocks[0].ravel(), blocks[1].ravel())[0, 1]
    assert abs(correlation) < 0.02
    assert embedding.std() == pytest.approx(0.1, rel=0.02)
    assert abs(embedding.mean()) < 0.002
    residual = weights["language.decoder.layers.0.mlp.linear_fc2.weight"]
    assert residual.std() == pytest.approx(0.1 / 8**0.5, rel=0.02)
    # Every number is its own: a block that was used twice would show here.
    assert np.unique(embedding).size > 0.98 * embedding.size


class _Largest(TorchDispatchMode):
    """The largest tensor that any operation gives."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, list | tuple) else (result,):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


def largest_while_building(rank: int) -> tuple[int, int, int]:
    """Elements of the largest tensor made and of the largest parameter; peak bytes of numpy."""
    from mimo.families.languages import qwen3

    ctx = _context(2, sp=True)
    settings = qwen3.Settings(**{**language_steps.SETTINGS, **WIDE, "vocab_multiple": 2400})
    recorder = _Largest()
    tracemalloc.start()
    with recorder:
        model = qwen3.build(settings, ctx, 100, 64, 1)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return recorder.elements, max(p.numel() for p in model.parameters()), peak


def test_a_rank_never_holds_more_than_its_part_and_a_block(run_ranks: RunRanks) -> None:
    from mimo.engines.draw import BLOCK

    for largest, part, numpy_bytes in run_ranks(largest_while_building, 2):
        assert part == 1200 * 320  # half of the vocabulary
        assert part <= largest <= part + BLOCK**2
        # Python's own objects, and one block; the whole embedding would be 3 MB.
        assert numpy_bytes < 2 * 2**20


# ------------------------------------------------------- weights of a checkpoint


def trained(rank: int, recipe: Recipe, layout: Layout, run_dir: Path, start: Start) -> list[str]:
    """Train, and give the names of the parameters that were drawn."""
    from mimo.engines.megatron import weights
    from mimo.train.rank import train_in_world

    names: list[str] = []
    original = weights.draw

    def draw(
        part: Any, row: int, column: int, whole: tuple[int, int], name: str, numbers: Any
    ) -> None:
        names.append(name)
        original(part, row, column, whole, name, numbers)

    weights.draw = draw
    try:
        train_in_world(recipe, layout, run_dir, start)
    finally:
        weights.draw = original
    return names


def names_drawn(run_ranks: RunRanks, recipe: Recipe, start: Start) -> set[str]:
    from mimo.model.recipe_checks import check_recipe
    from mimo.train.run_folder import make_run_dir

    layout = check_recipe(recipe, None)
    run_dir = make_run_dir(recipe, resumes=isinstance(start, Resume))
    by_rank = run_ranks(trained, layout.world_size, recipe, layout, run_dir, start)
    return {name.partition(":")[2] for names in by_rank for name in names}


@pytest.mark.slow
def test_weights_of_a_checkpoint_are_not_drawn_but_what_it_lacks_is(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    tiny.write_samples(tmp_path)
    path = tiny.write_recipe(tmp_path)
    settings = [*LAYOUT, "train.steps=2", "train.save_every=1"]
    recipe = load_recipe(path, settings)
    assert "embedding.word_embeddings.weight" in names_drawn(run_ranks, recipe, FromScratch())
    checkpoint = tmp_path / "runs" / "tiny" / "checkpoints" / "step_1"
    assert names_drawn(run_ranks, recipe, Resume(checkpoint)) == set()
    adapted = load_recipe(path, [*settings, "name=adapted", "language.lora={targets: [proj]}"])
    fresh = names_drawn(run_ranks, adapted, FromWeights(checkpoint))
    linear = "self_attention.linear_proj.lora_a"
    assert fresh == {f"decoder.layers.{number}.{linear}" for number in range(2)}


def test_weights_of_a_published_checkpoint_are_not_drawn(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    write_tiny(TinyCheckpoint("qwen3_vl"), tmp_path / "base")
    (names,) = run_ranks(names_drawn_from_hf, 1, tmp_path / "base")
    assert names == []


def names_drawn_from_hf(rank: int, folder: Path) -> list[str]:
    from mimo.checkpoint.hf.initial import initial_weights, minimal_recipe
    from mimo.engines.megatron import weights
    from mimo.generate.one_rank import LocalModel
    from mimo.model.dataset import open_tokenizer

    names: list[str] = []
    original = weights.draw
    weights.draw = lambda part, row, column, whole, name, numbers: names.append(name)
    try:
        recipe = minimal_recipe(folder)
        size = open_tokenizer(recipe).vocab_size
        local = LocalModel(recipe, size, initial=initial_weights(recipe))
    finally:
        weights.draw = original
    for module in local.model.modules.values():
        for name, param in module.whole.named_parameters():
            assert torch.isfinite(param).all(), name
    return names
