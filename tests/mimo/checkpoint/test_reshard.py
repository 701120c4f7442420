"""A run resumes in any other layout and engine as it would have continued in its own.

Each source trains three steps and has a checkpoint after two. Each pair does the third step in
another layout. Compared are loss, norm of the gradient, all weights and Adam's moments after it,
and the number of updates that Adam has counted. The epsilon is 1e-4: Adam's first steps turn
rounding of gradients that are zero in theory into steps of the learning rate otherwise.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from mimo.checkpoint.folder import find_checkpoint
from mimo.checkpoint.hf.recipes import load_recipe
from mimo.checkpoint.reading import read
from mimo.checkpoint.resume import FromScratch, Resume
from tests.cases import quick_values
from tests.conftest import RunRanks
from tests.mimo import drawings, tiny
from tests.mimo.model.test_fsdp_runs import make
from tests.mimo.runs import ADAM, metrics, run_from

SETTINGS = [
    *ADAM,
    "train.adam_eps=1e-4",
    "train.warmup_steps=0",
    "train.steps=3",
    "train.save_every=2",
    "train.keep_checkpoints=9",
    "train.validate_every=null",
]
COLOCATED = "encoders.vision.placement=colocated"
BY_FSDP = ["language.engine=fsdp", "encoders.vision.engine=fsdp"]
SHARED = "train.distributed_optimizer=true"
FOUR_LAYERS = "language.model.num_layers=4"


def together(tp: int, dp: int) -> list[str]:
    """The tower on ranks of the language model."""
    return [COLOCATED, f"encoders.vision.grid={{tp: {tp}, dp: {dp}}}"]


def tiny_layout(language: str, vision: list[str], micro: int, *more: str) -> tuple[str, list[str]]:
    """Of the tiny recipe, with layers for any pipeline."""
    grids = [f"language.grid={{{language}}}", f"train.micro_batch_size={micro}", FOUR_LAYERS]
    return "tiny", [*grids, *vision, *more]


def two_encoders(*overrides: str) -> tuple[str, list[str]]:
    return "two", [tiny.SECOND_ENCODER, FOUR_LAYERS, *overrides]


def drawing(*overrides: str) -> tuple[str, list[str]]:
    """With a generator, and averages of all weights."""
    keys = ["train.ema_decay=0.9", "train.global_batch_size=8", "train.micro_batch_size=2"]
    return "draws", [drawings.GENERATOR, FOUR_LAYERS, *keys, *overrides]


def of_transformers(language: str, vision: list[str], *more: str) -> tuple[str, list[str]]:
    """Of a recipe that either engine runs."""
    return "either", [f"language.grid={{{language}}}", *vision, *more]


def with_experts(language: str, ranks: int, *more: str) -> tuple[str, list[str]]:
    """Return a layout of the recipe whose language model has experts."""
    return "sparse", [f"language.grid={{{language}}}", *together(1, ranks), *more]


LAYOUTS = {
    "one rank": tiny_layout("tp: 1", together(1, 1), 4),
    "3 to 2 lanes": tiny_layout("dp: 2", ["encoders.vision.grid.dp=3"], 2),
    "dp2, optimizer shared": tiny_layout("dp: 2", together(1, 2), 2, SHARED),
    "tp2 sp dp2, optimizer shared": tiny_layout(
        "tp: 2, sp: true, dp: 2", together(2, 2), 2, SHARED
    ),
    "tp2 pp2": tiny_layout("tp: 2, pp: 2", together(1, 4), 2),
    "pp2 vpp2": tiny_layout("pp: 2, vpp: 2", together(2, 1), 2),
    "tp2 sp": tiny_layout("tp: 2, sp: true", together(2, 1), 4),
    "cp2": tiny_layout("cp: 2", together(1, 2), 4),
    "two encoders apart": two_encoders("encoders.vision.grid.dp=2"),
    "one encoder apart, one with pp2": two_encoders(
        "encoders.glyphs.placement=colocated",
        "encoders.glyphs.grid={tp: 2}",
        "language.grid={pp: 2}",
        "train.micro_batch_size=2",
    ),
    "one generator lane": drawing("language.grid.dp=2"),
    "two generator lanes to pp2": drawing("language.grid.pp=2", "generators.image.grid.dp=2"),
    "generator colocated with tp2 sp": drawing(
        "language.grid={tp: 2, sp: true}",
        "generators.image.placement=colocated",
        "generators.image.grid.dp=2",
    ),
    "megatron dp2": of_transformers("dp: 2", together(1, 2)),
    "megatron pp2 apart": of_transformers(
        "pp: 2", ["encoders.vision={placement: disjoint, grid: {dp: 1}}"]
    ),
    "fsdp dp2": of_transformers("dp: 2", together(1, 2), *BY_FSDP),
    "fsdp tp2 sp": of_transformers("tp: 2, sp: true, dp: 1", together(1, 2), *BY_FSDP),
    "fsdp hybrid": of_transformers(
        "dp: 4, dp_replicate: 2",
        [COLOCATED, "encoders.vision.grid={dp: 4, dp_replicate: 2}"],
        *BY_FSDP,
    ),
    "experts on one rank": with_experts("dp: 1", 1),
    "ep2, optimizer shared": with_experts("ep: 2, dp: 4", 4, SHARED),
    "ep4": with_experts("tp: 2, sp: true, ep: 4, dp: 2", 4),
    "etp2 ep2 pp2": with_experts("tp: 2, etp: 2, ep: 2, dp: 2, pp: 2", 8),
    "experts by fsdp": with_experts("dp: 2", 2, *BY_FSDP),
}
PAIRS = [
    ("3 to 2 lanes", "tp2 pp2"),
    ("3 to 2 lanes", "cp2"),
    ("pp2 vpp2", "one rank"),
    ("pp2 vpp2", "tp2 sp dp2, optimizer shared"),
    ("dp2, optimizer shared", "one rank"),
    ("dp2, optimizer shared", "3 to 2 lanes"),
    ("tp2 sp", "dp2, optimizer shared"),
    ("cp2", "one rank"),
    ("two encoders apart", "one encoder apart, one with pp2"),
    ("one encoder apart, one with pp2", "two encoders apart"),
    ("one generator lane", "two generator lanes to pp2"),
    ("one generator lane", "generator colocated with tp2 sp"),
    ("generator colocated with tp2 sp", "one generator lane"),
    ("fsdp dp2", "megatron pp2 apart"),
    ("megatron dp2", "fsdp hybrid"),
    ("megatron dp2", "fsdp tp2 sp"),
    ("fsdp hybrid", "megatron dp2"),
    ("ep2, optimizer shared", "ep4"),
    ("ep4", "experts on one rank"),
    ("ep4", "ep2, optimizer shared"),
    ("ep2, optimizer shared", "etp2 ep2 pp2"),
    ("etp2 ep2 pp2", "experts by fsdp"),
    ("experts by fsdp", "ep2, optimizer shared"),
]
QUICK = ["megatron dp2 -> fsdp tp2 sp", "ep2, optimizer shared -> ep4"]


@pytest.fixture(scope="module")
def recipes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {
        name: tmp_path_factory.mktemp(name) for name in ("tiny", "two", "either", "draws", "sparse")
    }
    tiny.write_samples(folders["tiny"])
    tiny.write_samples(folders["two"], videos_per_sample=tiny.VIDEOS_PER_SAMPLE)
    return {
        "tiny": tiny.write_recipe(folders["tiny"]),
        "two": tiny.write_recipe(folders["two"]),
        "either": make(folders["either"], "qwen3_vl"),
        "sparse": make(folders["sparse"], "qwen3_vl_moe"),
        "draws": drawings.write_recipe(folders["draws"]),
    }


@pytest.mark.parametrize("pair", quick_values({f"{a} -> {b}": (a, b) for a, b in PAIRS}, *QUICK))
def test_the_next_step_in_another_layout_is_the_same(
    run_ranks: RunRanks, recipes: dict[str, Path], pair: tuple[str, str]
) -> None:
    source, target = pair

    def trained(layout: str, start: FromScratch | Resume, name: str) -> tuple[Path, dict]:
        kind, overrides = LAYOUTS[layout]
        recipe = load_recipe(recipes[kind], [*SETTINGS, *overrides, f"name={name}"])
        if not recipe.run_dir.exists():
            run_from(run_ranks, recipe, start)
        return recipe.run_dir, metrics(recipes[kind], name)[-1]

    def plain(text: str) -> str:
        return "".join(letter if letter.isalnum() else "_" for letter in text)

    run_dir, expected = trained(source, FromScratch(), plain(source))
    start = Resume(run_dir / "checkpoints" / "step_2")
    resumed, got = trained(target, start, plain(f"{source} {target}"))
    assert got["step"] == expected["step"] == 2
    # Measured: 1e-7 of the loss, 3e-7 of the norm, 8e-7 of weights, 3e-6 of Adam's moments.
    assert got["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    assert got["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)
    ours, theirs = (find_checkpoint(folder) for folder in (resumed, run_dir))
    resumed, wanted = read(ours), read(theirs)
    assert resumed.keys() == wanted.keys()
    counts = [values for name, values in resumed.items() if name.startswith("optimizer.step.")]
    of_state = ("optimizer.", "ema.")
    assert len(counts) == len([name for name in resumed if not name.startswith(of_state)])
    assert {float(values) for values in counts} == {3.0}
    for name, values in wanted.items():
        scale = max(float(values.abs().max()), 1e-5)
        assert float((resumed[name] - values).abs().max()) / scale < 1e-5, name
