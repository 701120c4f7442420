"""`mimo check --dry-run`: roles that exist, memory that fits, and input that is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from mimo.checkpoint.hf.recipes import load_recipe
from mimo.config.schema import Recipe
from mimo.errors import InputError
from mimo.model.recipe_checks import check_recipe
from mimo.parallel.grids import Layout
from mimo.plan.dry_run_verdict import run_roles, verdict
from mimo.plan.rates import Gpu, parse_gpu
from tests.conftest import RunRanks
from tests.mimo import drawings, tiny

LAYOUT = "language.grid={tp: 2, sp: true, pp: 2}"
SPARSE = (
    "language={family: qwen3_moe, grid: {ep: 2, dp: 2}, model: {num_layers: 2, hidden_size: 32, "
    "ffn_hidden_size: 48, num_attention_heads: 4, num_query_groups: 2, head_size: 8, "
    "mrope_section: [2, 1, 1], num_experts: 4, experts_per_token: 2}}",
    "train.global_batch_size=16",
    "train.precision=bf16",
    "encoders.vision.grid={dp: 1}",
)


def load(folder: Path, *overrides: str) -> tuple[Recipe, Layout]:
    recipe = load_recipe(tiny.write_recipe(folder), [LAYOUT, *overrides])
    return recipe, check_recipe(recipe, None)


@pytest.mark.parametrize(
    ("role", "message"),
    [
        ("langage:pp=1", "no module 'langage'; did you mean 'language'"),
        ("language:ppp=1", "no axis 'ppp' in 'language:ppp=1'; did you mean 'pp'"),
        ("language:tp=2", "got tp=2 .* language.grid.tp is 2; give tp=0 to tp=1"),
        ("language:tp=-1", "got tp=-1"),
    ],
)
def test_a_role_that_does_not_exist_is_refused_with_what_does(
    tmp_path: Path, role: str, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        run_roles(*load(tmp_path), role)


def simulate(_: int, folder: Path, role: str | None, *overrides: str) -> list[tuple[str, int]]:
    """Role and rank of each dry run."""
    import torch.distributed as dist

    dist.destroy_process_group()
    return [(run.formula.role, run.rank) for run in run_roles(*load(folder, *overrides), role)[0]]


def test_one_rank_of_each_role_is_simulated_or_the_one_that_is_named(
    tmp_path: Path, run_ranks: RunRanks
) -> None:
    first = ("language, first stage", 1)
    every = [("vision", 0), first, ("language, last stage", 3)]
    assert run_ranks(simulate, 1, tmp_path, None)[0] == every
    named = "language:pp=1,tp=1"
    assert run_ranks(simulate, 1, tmp_path, named)[0] == [("language, last stage", 4)]


def verdicts(_: int, folder: Path, *sizes: float) -> list[list[str]]:
    """The lines for GPUs of these GiB."""
    import torch.distributed as dist

    dist.destroy_process_group()
    recipe, layout = load(folder, "train.precision=bf16")
    runs, _notes = run_roles(recipe, layout)
    gpus: list[Gpu] = [parse_gpu(str(size)) for size in sizes]
    return [list(verdict(recipe, layout, runs, gpu)) for gpu in gpus]


def test_a_layout_that_does_not_fit_names_the_role_and_what_helps_most(
    tmp_path: Path, run_ranks: RunRanks
) -> None:
    ((fits, too_small),) = run_ranks(verdicts, 1, tmp_path, 80, 1e-4)
    assert len(fits) == 1
    assert fits[0].startswith("fits 80.0 GiB: yes, ")
    assert {line.split(" needs ")[0] for line in too_small[:-1]} == {
        "fits 0.1 MiB: no, vision",
        "fits 0.1 MiB: no, language, first stage",
        "fits 0.1 MiB: no, language, last stage",
    }
    assert "would save most of vision" in too_small[-1]


def failure(_: int, folder: Path, fault: str) -> str:
    """The message of a dry run of a model with a fault where embeddings are placed."""
    import torch
    import torch.distributed as dist

    from mimo.model import modules

    dist.destroy_process_group()
    place = {
        "wrong shapes": lambda text, *_: text @ torch.ones(3, 3),
        "a branch": lambda text, *_: text if text.sum() else -text,
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(modules, "place_embeddings", place[fault])
        with pytest.raises(InputError) as error:
            run_roles(*load(folder), "language")
    return str(error.value)


@pytest.mark.parametrize(
    ("fault", "reason"),
    {"wrong shapes": "", "a branch": "the model branches on computed numbers"}.items(),
)
def test_what_would_fail_on_a_rank_or_branches_on_numbers_fails_with_its_role(
    tmp_path: Path, run_ranks: RunRanks, fault: str, reason: str
) -> None:
    (message,) = run_ranks(failure, 1, tmp_path, fault)
    assert message.startswith(f"language, first stage, rank 1: {reason}")


def worst(_: int, folder: Path) -> list[str]:
    """The lines about experts that get all tokens."""
    import torch.distributed as dist

    dist.destroy_process_group()
    return run_roles(*load(folder, *SPARSE), "language")[1]


def test_the_worst_load_of_experts_is_stated(tmp_path: Path, run_ranks: RunRanks) -> None:
    ((line,),) = run_ranks(worst, 1, tmp_path)
    assert "on a rank of language if the tokens of all ranks choose its experts" in line


def drawing(_: int, folder: Path) -> list[tuple[str, float, float]]:
    """Role, dry run and formula of a recipe with a generator."""
    import torch.distributed as dist

    dist.destroy_process_group()
    larger = "generators.image.model.max_pixels=4096"
    recipe = load_recipe(drawings.write_recipe(folder), [drawings.GENERATOR, larger])
    runs = run_roles(recipe, check_recipe(recipe, None))[0]
    return [(run.formula.role, run.total, run.formula.total) for run in runs]


def test_a_generator_is_simulated_too(tmp_path: Path, run_ranks: RunRanks) -> None:
    (roles,) = run_ranks(drawing, 1, tmp_path)
    assert [role for role, *_ in roles] == ["vision", "language", "image"]
    _, dry_run, formula = roles[-1]
    assert formula == pytest.approx(dry_run, rel=0.05)
