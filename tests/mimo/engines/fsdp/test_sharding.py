"""The rectangle of a parameter that a rank holds, and how it gets its weights and buffers."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest
import torch
from torch import nn

from mimo.engines.fsdp.context import TP, FsdpContext
from mimo.engines.fsdp.models import on_meta
from mimo.engines.fsdp.sharding import load, local_rectangle, materialise, shard
from tests.conftest import RunRanks
from tests.fsdp_ranks import Asked
from tests.mimo.engines.fsdp.language_cases import config_of, new_model

SHAPES = {"rows": (6, 4), "columns": (5, 4), "vector": (6,), "whole": (3, 2, 2), "tiny": (1,)}


def numbered() -> nn.ParameterDict:
    """Parameters whose elements are their numbers."""
    return nn.ParameterDict(
        {name: torch.arange(float(torch.Size(s).numel())).view(s) for name, s in SHAPES.items()}
    )


def holds(rank: int) -> dict[str, Any]:
    """A rank's part of each parameter, by grid: dp_replicate 1, 2 with tp 1, 2."""
    from torch.distributed.tensor import Shard, distribute_tensor

    from mimo.parallel.grids import GridSpec, Layout
    from mimo.parallel.groups import build_topology

    found: dict[str, Any] = {}
    for tp, replicate in ((1, 1), (2, 1), (2, 2), (1, 2)):
        # The module's ranks are 1 to 4; rank 0 is an encoder's.
        grid = GridSpec(
            "language", tp=tp, dp=4 // tp, rank_offset=1, engine="fsdp", dp_replicate=replicate
        )
        layout = Layout(grid, {"vision": GridSpec("vision", engine="fsdp")}, 5)
        topology = build_topology(layout)
        assert topology.meshes.keys() == {"vision" if rank == 0 else "language"}
        if rank:
            mesh = topology.meshes["language"]
            ctx = FsdpContext(mesh, torch.float32)
            module: Any = numbered()
            if ctx.tp is not None:
                for name, dim in (("rows", 0), ("columns", 1), ("vector", 0)):
                    cut = distribute_tensor(module[name].detach(), mesh[TP], [Shard(dim)])
                    module[name] = nn.Parameter(cut)
            module.units, module.ends = [], ()
            shard(module, ctx)
            found[f"{tp} {replicate}"] = {
                "place": mesh.get_coordinate(),
                **{name: asdict(local_rectangle(param, mesh)) for name, param in module.items()},
            }
        topology.close()
    return found


def test_ranks_hold_every_element_once_or_know_their_copies(run_ranks: RunRanks) -> None:
    _, *ranks = run_ranks(holds, 5)
    whole = numbered()
    for case in ranks[0]:
        tp, replicate = map(int, case.split())
        shards = 4 // tp // replicate
        places = [tuple(results[case].pop("place")) for results in ranks]
        grid = torch.arange(4).view(replicate, shards, tp)
        assert [int(grid[place]) for place in places] == [0, 1, 2, 3], case
        for name, shape in SHAPES.items():
            count: dict[int, torch.Tensor] = {}
            for part in (rank[case][name] for rank in ranks):
                assert part["shape"] == shape
                expected = whole[name].detach().reshape(shape[0], -1)
                rows, columns = part["values"].shape
                row, column = part["row"], part["column"]
                area = slice(row, row + rows), slice(column, column + columns)
                assert torch.equal(part["values"], expected[area]), (case, name)
                count.setdefault(part["copy"], torch.zeros_like(expected))[area] += 1
                copies = part["copies"]
            # Each of the copies is complete, and no element is in it twice.
            assert sorted(count) == list(range(copies)), (case, name)
            assert all(bool((number == 1).all()) for number in count.values()), (case, name)


# ---- weights and buffers

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", ["llama", "qwen3_vl", "qwen2_5_vl", "gemma3"])
def test_buffers_are_those_of_a_model_that_was_never_on_meta(name: str) -> None:
    config = config_of(name, tie_word_embeddings=True)
    expected = new_model(config)
    state = torch.get_rng_state()
    model = on_meta(config, "sdpa", torch.float32)
    assert all(param.is_meta for param in model.parameters())
    materialise(model, CPU)
    assert torch.equal(torch.get_rng_state(), state)  # no weight has been drawn
    for key, buffer in expected.named_buffers():
        assert torch.equal(model.get_buffer(key), buffer), key
    assert model.lm_head.weight is model.get_input_embeddings().weight
    model.hf_names = {key: key for key, _ in model.named_parameters()}
    weights = {key: weight.detach() for key, weight in expected.named_parameters()}
    load(model, FsdpContext(None, torch.float32), CPU, Asked(weights))
    for key, weight in model.named_parameters():
        assert torch.equal(weight, weights[key]), key


def test_a_buffer_that_nobody_computes_and_a_tensor_of_another_shape_are_refused() -> None:
    with torch.device("meta"):
        part: Any = nn.Linear(3, 2, bias=False)
        part.register_buffer("scale", torch.ones(1))
    with pytest.raises(AssertionError, match="scale has no values"):
        materialise(part, CPU)
    linear: Any = nn.Linear(3, 2, bias=False)
    linear.hf_names = {"weight": "w"}
    with pytest.raises(ValueError, match=r"w: \[1, 3\], not 2 rows"):
        load(linear, FsdpContext(None, torch.float32), CPU, Asked({"w": torch.ones(1, 3)}))
