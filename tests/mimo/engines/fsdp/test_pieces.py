"""Checkpoints of an fsdp module: on any mesh, and from and to Megatron's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mimo.engines.fsdp.sharding import Names, Rectangle, Rows
from tests.conftest import RunRanks
from tests.fsdp_job import Job
from tests.fsdp_ranks import build, make_topology, train_step

JOB = Job(vocabulary=100, biases=False, dtype=torch.float32)
CUT, HYBRID = replace(JOB, shard=2, tp=2), replace(JOB, replicate=2, shard=2)


def held(whole: torch.Tensor, row: int, column: int, rows: int, columns: int) -> Rectangle:
    matrix = whole.unsqueeze(1) if whole.dim() == 1 else whole.flatten(1)
    values = matrix[row : row + rows, column : column + columns]
    return Rectangle(tuple(whole.shape), row, column, values, 0, 1)


# ------------------------------------------------------------------------- names, without ranks


def test_a_rectangle_becomes_views_of_every_tensor_that_has_rows_of_it() -> None:
    # Two heads of two rows: ours are head 0 of both, then head 1.
    runs = [Rows("q", 0, 2), Rows("k", 0, 2), Rows("q", 2, 2), Rows("k", 2, 2)]
    names = Names.of([("qkv", (8, 6), runs)])
    whole = torch.arange(24.0).view(4, 6)
    pieces = list(names.pieces("q", held(whole, 1, 2, 3, 4)))
    assert [(p.key, p.shape, p.row, p.column) for p in pieces] == [
        ("qkv", (8, 6), 1, 2),
        ("qkv", (8, 6), 4, 2),
    ]
    torch.testing.assert_close(pieces[0].values, whole[1:2, 2:])
    pieces[1].values.fill_(-1.0)
    assert bool((whole[2:, 2:] == -1.0).all())
    assert names.users("k") == {"qkv"}


def test_a_transposed_tensor_and_a_convolution_are_written_in_place() -> None:
    transposed = Names.of([("projection", (3, 5), [Rows("t", 0, 3, transposed=True)])])
    stored = torch.zeros(5, 3)
    (piece,) = transposed.pieces("t", held(stored, 2, 1, 2, 2))
    assert (piece.row, piece.column, tuple(piece.values.shape)) == (1, 2, (2, 2))
    piece.values.copy_(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    assert stored[2:4, 1:].tolist() == [[1.0, 3.0], [2.0, 4.0]]
    kernel = torch.zeros(4, 3, 2, 2)
    convolution = Names.of([("patches", (4, 12), [Rows("c", 0, 4)])])
    (piece,) = convolution.pieces("c", held(kernel, 1, 0, 2, 12))
    piece.values.fill_(1.0)
    assert kernel.sum() == 24
    assert kernel[1:3].sum() == 24


def test_rows_of_padding_are_zeros_that_no_parameter_has() -> None:
    names = Names.of([("words", (8, 2), [Rows("e", 0, 5)]), ("norm", (3,), [Rows("n", 0, 3)])])
    whole = torch.ones(5, 2)
    (own,) = names.pieces("e", held(whole, 0, 0, 3, 2))
    assert own.row == 0
    own, padding = names.pieces("e", held(whole, 3, 1, 2, 1))
    assert (own.row, own.column, own.values.tolist()) == (3, 1, [[1.0], [1.0]])
    assert (padding.row, padding.column, padding.values.tolist()) == (5, 1, [[0.0]] * 3)
    assert len(list(names.pieces("n", held(torch.ones(3), 0, 0, 3, 1)))) == 1


# ------------------------------------------------------------------------------- with Megatron


def names() -> Names:
    """The names of Megatron's Qwen3, made of the family's key map as by a recipe."""
    from mimo.families.languages import qwen3
    from tests.language_steps import NUM_TOKENS, SETTINGS

    sizes = qwen3.Settings(**{**SETTINGS, "vocab_size": NUM_TOKENS})
    tensors = []
    for weight in qwen3.weights_in_hf(sizes):
        rows = weight.num_rows
        if "word_embeddings" in weight.name:
            rows = sizes.padded_vocab_size(NUM_TOKENS)
        runs = [
            Rows(
                run.source.key.replace("model.language_model.", "model."),
                run.start,
                run.count,
                run.source.transposed,
            )
            for run in weight.runs
        ]
        tensors.append((weight.name, (rows, *weight.sources[0].shape[1:]), runs))
    return Names.of(tensors)


def trainer(dtype: torch.dtype) -> Any:
    from tests import language_steps

    job = language_steps.Job(optimizer="adam", learning_rate=0.01, dtype=dtype)
    return language_steps.Trainer(job)


def megatron_saves(rank: int, folder: Path, dtype: torch.dtype = torch.float32) -> None:
    """After a step, so that its optimizer has a state."""
    from tests import language_steps

    job_trainer = trainer(dtype)
    job_trainer.step(0)
    language_steps.save(job_trainer, folder)


def megatron_passes_on(
    rank: int, source: Path, target: Path, dtype: torch.dtype = torch.float32
) -> None:
    from tests import language_steps

    job_trainer = trainer(dtype)
    language_steps.load(job_trainer, source)
    language_steps.save(job_trainer, target)


def passes_on(
    rank: int, job: Job, source: Path, target: Path, plain: bool, steps: int
) -> dict[str, Any]:
    """Load, do more steps, save; how much of each weight was read when it was built."""
    from mimo.checkpoint.load import pieces_to_resume
    from mimo.checkpoint.reading import read_shared
    from mimo.checkpoint.tensors import read_index, write_pieces
    from tests.mimo.checkpoint.manifests import finish

    topology = make_topology(job)
    module = build(job, topology, names(), plain)
    index = read_index(source)
    wanted = pieces_to_resume(module.pieces("load", with_optimizer=True), index)
    read_shared(source, index, wanted, module.replicas)
    for step in range(1, 1 + steps):
        # On fewer lanes, each has the microbatches of several.
        train_step(module, replace(job, replicate=1, shard=2), step, rank // job.tp, job.lanes)
        module.update(1e-2, 1.0)
    write_pieces(target, rank, list(module.pieces("save", with_optimizer=True)))
    dist.barrier()
    if rank == 0:
        finish(target, job.world)
    topology.close()
    return module.whole.asked.elements


def whole(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors, without the rows that pad the vocabulary: Megatron draws them like others."""
    from mimo.checkpoint.reading import read

    tensors = read(folder)
    for key, tensor in tensors.items():
        if "word_embeddings" in key and ".step." not in key:
            assert tensor.shape[0] == 128
            tensors[key] = tensor[: JOB.vocabulary]
    return tensors


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    folders = [tmp_path / str(number) for number in range(5)]
    for folder in folders:
        folder.mkdir()
    return folders


@pytest.mark.slow
def test_checkpoints_go_from_megatron_over_meshes_to_one_rank_and_back_bit_for_bit(
    run_ranks: RunRanks, folders: list[Path]
) -> None:
    first, cut, hybrid, lone, back = folders
    run_ranks(megatron_saves, 1, first)
    asked = run_ranks(passes_on, 4, CUT, first, cut, False, 0)
    run_ranks(passes_on, 4, HYBRID, cut, hybrid, False, 0)
    run_ranks(passes_on, 1, JOB, hybrid, lone, True, 0)
    run_ranks(megatron_passes_on, 1, lone, back)
    expected = whole(first)
    assert {key.split(".")[1] for key in expected if key.startswith("optimizer.")} == {
        "exp_avg",
        "exp_avg_sq",
        "step",
    }
    for folder in (cut, hybrid, lone, back):
        tensors = whole(folder)
        assert tensors.keys() == expected.keys()
        assert not [
            key for key, tensor in expected.items() if not torch.equal(tensors[key], tensor)
        ]
    # No rank has read more than its part.
    for elements in asked:
        assert elements["model.layers.0.mlp.down_proj.weight"] == 32 * 48 / 4
        assert elements["model.embed_tokens.weight"] == 100 * 32 / 2


@pytest.mark.slow
def test_fp32_weights_of_a_run_in_bf16_go_from_megatron_and_back(
    run_ranks: RunRanks, folders: list[Path]
) -> None:
    first, cut, back, *_ = folders
    half = torch.bfloat16
    run_ranks(megatron_saves, 1, first, half)
    run_ranks(passes_on, 2, replace(JOB, shard=2, dtype=half), first, cut, False, 0)
    run_ranks(megatron_passes_on, 1, cut, back, half)
    expected, fsdp_saved, megatron_saved = map(whole, folders[:3])
    for key, tensor in expected.items():
        assert torch.equal(megatron_saved[key], tensor), key
        if key.startswith("optimizer.fp32_param."):
            assert torch.equal(fsdp_saved[key.removeprefix("optimizer.fp32_param.")], tensor), key
            assert key not in fsdp_saved


@pytest.mark.slow
def test_training_goes_on_alike_on_another_mesh_and_on_one_rank(
    run_ranks: RunRanks, folders: list[Path]
) -> None:
    first, cut, lone, *_ = folders
    run_ranks(megatron_saves, 1, first)
    run_ranks(passes_on, 4, CUT, first, cut, False, 2)
    run_ranks(passes_on, 1, JOB, first, lone, True, 2)
    got, expected = whole(cut), whole(lone)
    assert got.keys() == expected.keys()
    for key, one in expected.items():
        torch.testing.assert_close(got[key], one, rtol=1e-4, atol=1e-6, msg=key)
    assert not torch.equal(whole(first)["language.decoder.final_layernorm.weight"], one)
