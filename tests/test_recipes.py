"""Every recipe passes `mimo check`, in every layout that its header documents.

Recipes of published models start from a folder; here it has their configuration and processor
files, with the sizes that they are published with, and no weights.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from mimo.checkpoint.hf.recipes import load_phases
from mimo.checkpoint.hf.tiny import TinyCheckpoint, write_tiny
from mimo.model.memory import memory_by_role
from mimo.model.recipe_checks import check_recipe
from mimo.parallel.grids import Layout, num_microbatches
from tests.cases import quick
from tests.conftest import RunRanks
from tests.mimo.checkpoint.hf import folders
from tests.published import CONFIGS, PROCESSORS, TRANSFORMERS_CONFIGS, merged

RECIPES = Path(__file__).parent.parent / "recipes"
_LAYOUT = re.compile(r"^#\s+(\d+) GPUs:\s+(.*)$", re.MULTILINE)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of the published models, without weights."""
    root = tmp_path_factory.mktemp("models")
    for name, config in CONFIGS.items():
        (root / name).mkdir()
        (root / name / "config.json").write_text(json.dumps(config))
        processor = PROCESSORS[config["model_type"].removesuffix("_moe")]
        (root / name / "preprocessor_config.json").write_text(json.dumps(processor))
    return root


@pytest.fixture(scope="module")
def tiny_checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("checkpoints")
    for family in folders.FAMILIES:
        write_tiny(TinyCheckpoint(family), root / f"{family}_tiny")
    return root


# ------------------------------------------------------------------------- the recipes


@dataclass(frozen=True)
class Documented:
    """A layout that a recipe's header names."""

    path: Path
    gpus: int
    overrides: tuple[str, ...]

    def __str__(self) -> str:
        return " ".join((self.path.stem, str(self.gpus), *self.overrides))


def documented(path: Path) -> list[Documented]:
    """The layouts of a header; overrides may go on in the next lines."""
    text = re.sub(r"\n#\s{8,}(?=\S+=)", " ", path.read_text())
    return [
        Documented(path, int(gpus), tuple(word for word in words.split() if "=" in word))
        for gpus, words in _LAYOUT.findall(text)
    ]


LARGE = sorted(path for path in RECIPES.glob("*.yaml") if documented(path))
TINY = sorted(RECIPES.glob("*_tiny.yaml"))


ANY_CLASS = {
    "qwen3_5_9b_fsdp": "qwen3_5",
    "gemma4_31b_fsdp": "gemma4",
    "internvl3_5_8b_fsdp": "internvl",
}


@cache
def check(path: Path, init_from: Path, gpus: int | None, *overrides: str) -> list[Layout]:
    """`mimo check` of every phase."""
    phased = load_phases(path, [*overrides, f"init_from={init_from}"])
    layouts = phased.each(lambda recipe: check_recipe(recipe, gpus))
    for phase, layout in zip(phased.phases, layouts, strict=True):
        assert num_microbatches(phase.recipe, layout) >= layout.language.pp
    return layouts


def init_from_of(path: Path) -> Path:
    match = re.search(r"^init_from: (\S+)$", path.read_text(), re.MULTILINE)
    assert match is not None
    return Path(match[1])


@pytest.mark.parametrize(
    "layout", [layout for path in LARGE for layout in documented(path)], ids=str
)
def test_documented_layouts_of_published_models_pass_the_check(
    layout: Documented, models: Path
) -> None:
    folder = init_from_of(layout.path)
    assert folder.parent == Path("/models")
    for checked in check(layout.path, models / folder.name, layout.gpus, *layout.overrides):
        assert checked.world_size == layout.gpus
        assert layout.gpus % 8 == 0 or str(layout) == "qwen3_5_27b_sft 17", "nodes have 8 GPUs"


@pytest.mark.parametrize("path", LARGE, ids=lambda path: path.stem)
def test_a_recipe_of_a_published_model_documents_disjoint_and_colocated_layouts(
    path: Path, models: Path
) -> None:
    folder = models / init_from_of(path).name
    kinds = {
        bool(checked.colocated)
        for layout in documented(path)
        for checked in check(path, folder, layout.gpus, *layout.overrides)
    }
    assert kinds == {True, False}
    assert "not measured" in path.read_text()


MEMORY = (
    "# Memory of a GPU in GiB  weights gradients optimizer inputs activations logits buffers in all"
)


def memory_table(path: Path, folder: Path) -> str:
    """What the header of a recipe says of its first layout, by the formula of `mimo check`."""
    gpus = documented(path)[0].gpus
    phased = load_phases(path, [f"init_from={folder}"])
    layouts = phased.each(lambda recipe: check_recipe(recipe, gpus))
    lines = [MEMORY]
    for phase, layout in zip(phased.phases, layouts, strict=True):
        if phase.title:
            lines.append(f"#   {phase.title}")
        for role in memory_by_role(phase.recipe, layout):
            state = (role.weights, role.gradients, role.optimizer, role.inputs)
            parts = (*state, role.activations, role.logits, role.buffers, role.total)
            numbers = [f"{part / 2**30:.1f}" for part in parts]
            columns = zip((10, 10, 10, 7, 12, 7, 8, 7), numbers, strict=True)
            lines.append(f"#   {role.role:<21}" + "".join(f"{n:>{width}}" for width, n in columns))
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("path", LARGE, ids=lambda path: path.stem)
def test_a_recipe_states_the_memory_of_each_role_that_the_formula_gives(
    path: Path, models: Path
) -> None:
    expected = memory_table(path, models / init_from_of(path).name)
    assert expected in path.read_text(), f"the header should say\n{expected}"


def formula_beside_dry_run(
    _: int, path: Path, folder: Path | None
) -> list[tuple[str, float, float]]:
    """Each role of a recipe's first layout, its formula and its dry run."""
    import torch.distributed as dist

    from mimo.plan.dry_run_verdict import run_roles

    dist.destroy_process_group()
    phased = load_phases(path, [f"init_from={folder}"])
    layouts = phased.each(lambda recipe: check_recipe(recipe, None))
    phases = zip(phased.phases, layouts, strict=True)
    runs = [run for phase, layout in phases for run in run_roles(phase.recipe, layout, None)[0]]
    return [(run.formula.role, run.formula.total, run.total) for run in runs]


@pytest.mark.slow
@pytest.mark.parametrize("path", LARGE, ids=lambda path: path.stem)
def test_the_formula_agrees_with_a_dry_run(path: Path, models: Path, run_ranks: RunRanks) -> None:
    folder = models / init_from_of(path).name
    (roles,) = run_ranks(formula_beside_dry_run, 1, path, folder, timeout_seconds=300)
    for role, formula, dry_run in roles:
        assert formula == pytest.approx(dry_run, rel=0.05), role


def large_folder(family: str, folder: Path) -> Path:
    """A folder of a class of transformers with published sizes, without weights."""
    write_tiny(TinyCheckpoint(family), folder)
    config, processor = TRANSFORMERS_CONFIGS[family]
    for name, large in {
        "config.json": config,
        "preprocessor_config.json": processor,
        "processor_config.json": processor,
    }.items():
        if (folder / name).exists():
            text = json.dumps(merged(json.loads((folder / name).read_text()), large))
            (folder / name).write_text(text)
    (folder / "model.safetensors").unlink()
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("stem", ANY_CLASS)
def test_the_formula_of_any_class_agrees_with_a_dry_run(
    stem: str, tmp_path: Path, run_ranks: RunRanks
) -> None:
    folder, path = large_folder(ANY_CLASS[stem], tmp_path / "model"), RECIPES / f"{stem}.yaml"
    (roles,) = run_ranks(formula_beside_dry_run, 1, path, folder, timeout_seconds=400)
    assert len(roles) == 2
    for role, formula, dry_run in roles:
        assert formula == pytest.approx(dry_run, rel=0.05), role


def test_there_is_a_recipe_for_each_published_model_and_each_family() -> None:
    assert {path.stem for path in LARGE} == {
        "qwen2_5_vl_7b_sft",
        "qwen3_vl_8b_pretrain",
        "qwen3_vl_32b_sft",
        "qwen3_5_27b_sft",
        "qwen3_5_35b_a3b_sft",
        "qwen3_vl_30b_a3b_sft",
        "gemma3_4b_sft",
        "gemma3_27b_sft",
        "qwen3_vl_8b_fsdp",
        "gemma3_4b_fsdp",
    }
    assert {path.stem.removesuffix("_tiny") for path in TINY} == set(folders.FAMILIES)


@pytest.mark.parametrize("path", TINY, ids=lambda path: path.stem)
@pytest.mark.parametrize(
    "override",
    [
        "language.grid.dp=2",
        "language.grid.tp=2",
        "language.grid={tp: 2, sp: true, pp: 2, dp: 1}",
        "encoders.vision={placement: colocated, grid: {}}",
    ],
)
def test_recipes_of_tiny_checkpoints_pass_the_check_in_several_layouts(
    path: Path, override: str, tiny_checkpoints: Path
) -> None:
    assert init_from_of(path) == Path("checkpoints") / path.stem
    check(path, tiny_checkpoints / path.stem, None, override)


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.yaml")), ids=lambda path: path.stem)
def test_a_recipe_says_its_command_hardware_and_result(path: Path) -> None:
    header = path.read_text().partition("\nname:")[0]
    assert f"name: {path.stem}\n" in path.read_text()
    for needed in ("# Command", "# Hardware:", "# Result:"):
        assert needed in header


@pytest.mark.parametrize("stem", quick(ANY_CLASS, "qwen3_5_9b_fsdp"))
def test_recipes_of_any_class_pass_the_check_with_a_tiny_folder(stem: str, tmp_path: Path) -> None:
    write_tiny(TinyCheckpoint(ANY_CLASS[stem]), tmp_path / "model")
    path = RECIPES / f"{stem}.yaml"
    (layout,) = check(path, tmp_path / "model", None)
    assert layout.world_size % 8 == 0, "nodes have 8 GPUs"
    assert "not measured" in path.read_text()
