"""Formula, dry run and the tensors of real ranks agree."""

from __future__ import annotations

import gc
import io
import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, override

import numpy as np
import pytest
import torch.distributed as dist
from PIL import Image

from data.text.digits import write_tokenizer
from mimo.check.steps import open_trainer
from mimo.check.workload import Item, Sample, write_shard
from mimo.checkpoint.hf.recipes import load_recipe
from mimo.checkpoint.hf.tiny import TinyCheckpoint, write_tiny
from mimo.config.schema import Recipe
from mimo.model import modules
from mimo.model.recipe_checks import check_recipe
from mimo.parallel.grids import Layout
from mimo.train.step import StepObserver
from tests.conftest import RunRanks
from tests.mimo import drawings, tiny
from tests.mimo.checkpoint.hf import folders

ROWS, TOKENS = (30, 40), 1218
"""Tokens of each sample's only image, and of the sample: nearly all of them stand for items."""

DECODER = (
    "num_layers: 4, hidden_size: 256, ffn_hidden_size: 768, num_attention_heads: 8, "
    "num_query_groups: 4, head_size: 32, mrope_section: [8, 4, 4]"
)
TOWER = (
    "num_layers: 4, hidden_size: 256, ffn_hidden_size: 768, num_attention_heads: 4, "
    "min_pixels: 784, max_pixels: 4000000"
)
RUN = (
    f"data.sequence_length={TOKENS}",
    "train.micro_batch_size=1",
    "train.global_batch_size=4",
    "train.precision=bf16",
    "train.optimizer=adam",
)
MODEL = (
    f"language={{family: qwen3, model: {{{DECODER}}}}}",
    f"encoders.vision={{family: qwen_vl, model: {{{TOWER}}}}}",
    *RUN,
)
LAYOUTS = {
    # On a CPU, fp32 takes a tenth of the time of bf16.
    "disjoint": ("language.grid={tp: 2, sp: true, pp: 2}", "train.precision=fp32"),
    "colocated": (
        "language.grid={tp: 2, sp: true}",
        "encoders.vision.placement=colocated",
        "encoders.vision.grid={tp: 2}",
        "encoders.vision.encode_group=2",
    ),
    "recomputed": (
        "language.grid={cp: 2}",
        f"data.sequence_length={TOKENS + 2}",  # a multiple of 2 · cp
        "language.recompute=full",
        "encoders.vision.recompute=full",
    ),
}
SHARDED = {
    "disjoint, recomputed, reduced at once": (
        "train.precision=fp32",
        "language.reduce_gradients=microbatch",
        "language.recompute=full",
        "encoders.vision.reduce_gradients=microbatch",
        "encoders.vision.recompute=full",
    ),
    "colocated, tp2 sp": (
        "train.precision=fp32",
        "language.grid={tp: 2, sp: true}",
        "encoders.vision.placement=colocated",
        "encoders.vision.encode_group=2",
    ),
}


GENERATORS = {
    "qwen_image": (
        "model: {num_layers: 3, hidden_size: 256, num_attention_heads: 4, in_channels: 12, "
        "axes_dims_rope: [16, 24, 24], condition_size: 32, max_pixels: 4096}"
    ),
    "lumina2": (
        "model: {num_layers: 3, hidden_size: 192, num_attention_heads: 6, num_query_groups: 2, "
        "ffn_hidden_size: 512, axes_dims_rope: [8, 12, 12], in_channels: 12, condition_size: 32, "
        "max_pixels: 4096}, recompute: full"
    ),
}


def write_samples(folder: Path, side: int, rows: tuple[int, int] = ROWS) -> None:
    """side: pixels along a token of an image. rows: tokens along both sides."""
    write_tokenizer(folder / "tokenizer")
    size = side * rows[0], side * rows[1]
    noise = np.random.default_rng(0).integers(0, 256, size, dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(noise).save(buffer, "PNG")
    item = Item("image", "png", buffer.getvalue())
    write_shard(folder / "train-00000.tar", [Sample((item,), "what is this ?", "1")] * 4)


def write_qwen3_vl(root: Path) -> Path:
    """Return a folder with a small model that does not shrink the images."""
    folder = root / "model"
    write_tiny(TinyCheckpoint("qwen3_vl", width=4, num_layers=3), folder)
    processor = json.loads((folder / "preprocessor_config.json").read_text())
    processor["size"] = {"shortest_edge": 1024, "longest_edge": 4_000_000}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return folder


class PeakOfStep(StepObserver):
    """Notes the most bytes of tensors in the second step, until its gradients are complete.

    The optimizer's moments exist from the first update on.
    """

    def __init__(self, memory: Any) -> None:
        self.memory, self.peak = memory, 0

    @override
    def planned(self, step: int, plan: Any) -> None:
        gc.collect()
        self.memory.peak = self.memory.now

    @override
    def gradients_complete(self, step: int, modules: Any) -> None:
        self.peak = self.memory.peak


def real_peak(rank: int, recipe: Recipe, layout: Layout) -> int:
    """Most bytes of this rank's tensors in a step, without the inputs of the next."""
    from torch.utils._python_dispatch import _disable_current_modes

    from mimo.plan.dry_run_kernels import TensorMemory, gpu_kernels

    stage_lane, stage = modules.stage_lane, modules.MimoModel.stage

    def stage_with_losses(lane: Any, *args: Any) -> Any:
        return stage_lane(replace(lane, loss_mask=np.ones_like(lane.loss_mask)), *args)

    def stage_uncounted(*args: Any) -> Any:
        with _disable_current_modes():
            return stage(*args)

    with gpu_kernels(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(modules, "stage_lane", stage_with_losses)
        patch.setattr(modules.MimoModel, "stage", stage_uncounted)
        trainer, dataset = open_trainer(recipe, layout)
        memory = TensorMemory()
        for module in trainer.model.modules.values():
            for tensor in chain.from_iterable(module.tensors().values()):
                memory.add(tensor)
        observer = PeakOfStep(memory)
        steps = trainer.train(dataset, None, observer)
        with memory:
            next(steps)
            next(steps)
        steps.close()
    return observer.peak


def simulate(_: int, recipe: Recipe, layout: Layout) -> tuple[list[Any], list[Any]]:
    """Ranks and bytes of each role, with the inputs of one step; and role, dry run and formula."""
    from mimo.plan.dry_run_verdict import combine_modules, run_roles

    dist.destroy_process_group()
    runs = run_roles(recipe, layout)[0]
    of_one_step = [replace(run, inputs=run.inputs / 2) for run in runs]
    ranks = [(role.ranks, needed) for role, needed in combine_modules(of_one_step, layout)]
    return ranks, [(run.formula.role, run.total, run.formula.total) for run in runs]


def check_agreement(
    run_ranks: RunRanks,
    recipe: Recipe,
    tolerance: float = 0.02,
    modules: Sequence[str] = (),
    of_formula: float = 0.05,
) -> None:
    """tolerance: of the dry run, relative to real ranks. of_formula: relative to the dry run.

    modules: to compare; all without any.
    """
    layout = check_recipe(recipe, None)
    peaks = run_ranks(real_peak, layout.world_size, recipe, layout, timeout_seconds=240)
    ((by_rank, by_role),) = run_ranks(simulate, 1, recipe, layout, timeout_seconds=120)
    compared = [n for name in modules or layout.grids for n in layout.grids[name].ranks]
    for ranks, expected in by_rank:
        real = max(peaks[rank] for rank in ranks)
        assert ranks[0] not in compared or expected == pytest.approx(real, rel=tolerance), ranks
    for role, dry_run, formula in by_role:
        if modules and role not in modules:
            continue
        assert formula == pytest.approx(dry_run, rel=max(tolerance, of_formula)), role


# Quick are `tests/mimo/model/test_memory.py`, where real ranks hold what the formula says, and
# `tests/mimo/plan/test_dry_run.py`, where ranks are simulated.
@pytest.mark.slow
@pytest.mark.parametrize("overrides", LAYOUTS.values(), ids=LAYOUTS)
def test_formula_dry_run_and_tensors_of_real_ranks_agree(
    tmp_path: Path, run_ranks: RunRanks, overrides: tuple[str, ...]
) -> None:
    write_samples(tmp_path, side=28)
    check_agreement(run_ranks, load_recipe(tiny.write_recipe(tmp_path), [*MODEL, *overrides]))


@pytest.mark.slow  # `tests/mimo/model/test_fsdp_memory.py` has quick ones of the formula
@pytest.mark.parametrize("overrides", SHARDED.values(), ids=SHARDED)
def test_under_fsdp_dry_run_and_tensors_of_real_ranks_agree(
    tmp_path: Path, run_ranks: RunRanks, overrides: tuple[str, ...]
) -> None:
    write_samples(tmp_path, side=30)
    folder = write_qwen3_vl(tmp_path)
    path = folders.write_recipe(folder, tmp_path / "recipe.yaml")
    settings = [
        f"data.sources=[{{path: '{tmp_path}/train-*.tar'}}]",
        "language={engine: fsdp, grid: {dp: 2}}",
        "encoders.vision={engine: fsdp, grid: {dp: 2}}",
    ]
    run = ("train.steps=2", f"train.run_dir={tmp_path}")
    # What FSDP2 and bridges hold for other microbatches is simulated in part: -2.8 % colocated,
    # +5.6 % with run-ahead. On such small models that is a large share.
    recipe = load_recipe(path, [*settings, *RUN, *run, *overrides])
    check_agreement(run_ranks, recipe, tolerance=0.06)


@pytest.mark.slow  # `tests/mimo/plan/test_dry_run.py` has a quick one without real ranks
@pytest.mark.parametrize("family", GENERATORS)
def test_dry_run_and_tensors_of_a_real_generator_agree(
    tmp_path: Path, run_ranks: RunRanks, family: str
) -> None:
    path = drawings.write_recipe(tmp_path)
    drawings.write_samples(tmp_path, [[(64, 64)]] * 8, readings=False)
    generator = f"family: {family}, grid: {{dp: 1}}, queries: 4, {GENERATORS[family]}"
    overrides = [
        f"generators.image={{{generator}}}",
        "train.precision=bf16",
        "train.optimizer=adam",
    ]
    recipe = load_recipe(path, [*overrides, "train.micro_batch_size=2"])
    check_agreement(run_ranks, recipe, modules=["image"])


@pytest.mark.slow  # `tests/test_recipes.py` compares formula and dry run at published sizes
def test_dry_run_and_tensors_of_family_transformers_agree(
    tmp_path: Path, run_ranks: RunRanks
) -> None:
    write_samples(tmp_path, side=30, rows=(34, 34))  # as an image of 1,024 by 1,024 pixels
    folder = write_qwen3_vl(tmp_path)
    path = folders.write_recipe(folder, tmp_path / "recipe.yaml")
    modules = "{family: transformers, engine: fsdp, grid: {dp: 2}, recompute: full}"
    settings = [f"language={modules}", f"encoders.vision={modules}", "bridge.delivery=replicated"]
    settings += [f"data.sources=[{{path: '{tmp_path}/train-*.tar'}}]", f"train.run_dir={tmp_path}"]
    recipe = load_recipe(path, [*settings, *RUN, "train.steps=2", "train.precision=fp32"])
    # Measured +3.2 % and -2.7 %: what bridges hold for other microbatches is simulated in part. The
    # formula is for published sizes; on this small decoder it is 11.6 % too high.
    check_agreement(run_ranks, recipe, tolerance=0.04, of_formula=0.13)
