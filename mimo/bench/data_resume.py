"""How soon a run continues at sample 100,000,000: an index of millions, and its first plan."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from data.index.shard_index import write_shard_index
from data.index.shards import describe_shard
from data.index.store import index_homes, survey
from data.packing import TokenBudget, Used
from mimo.bench.contest import Run, timed
from mimo.bench.data_ours import planner_of

POSITION = 100_000_000
_SAMPLES, _MICROBATCHES, _TOKENS = 1_000_000, 64, 8192  # of a shard; of a step; of a microbatch
_SETTINGS = "synthetic"


def write_index(folder: Path, num_shards: int) -> None:
    """Shards that are nothing but a size, and their index: a sample has one image."""
    folder.mkdir()
    rng, n = np.random.default_rng(0), np.arange(_SAMPLES)
    rows = rng.integers(1, 200, _SAMPLES)
    constants = {"json_size": 500, "loss_tokens": 50, "item_media": 0, "item_number": 0}
    constants |= {"item_frames": 1, "item_size_0": 640, "item_size_1": 480, "file_size": 3000}
    constants |= {"item_placeholder": 3, "item_cost": 1, "keys": ord("x")}
    columns = {name: np.full(_SAMPLES, value) for name, value in constants.items()}
    columns |= {"item_start": n, "item_file": n, "key_end": n + 1}
    columns |= {"json_offset": n * 4096, "file_offset": n * 4096 + 512}
    columns |= {"item_fps": np.full(_SAMPLES, 2.0), "item_rows": rows, "token_length": rows + 100}
    columns["keys"] = columns["keys"].astype(np.uint8)
    (home,) = index_homes(str(folder / "*.tar"), _SETTINGS, None)
    for number in range(num_shards):
        path = folder / f"{number:05}.tar"
        with path.open("wb") as file:
            file.truncate(_SAMPLES * 4096)  # of which the disk holds nothing
        state = describe_shard(str(path))
        write_shard_index(home / f"{path.name}.index", _SETTINGS, state, columns, [])
    _survey(folder).open()  # writes the catalog


def resume(folder: Path) -> Run:
    """From nothing to the plan of the step at `POSITION`: index, order, packs, transfers."""

    def plan() -> int:
        used = (1, Used(POSITION))
        planner = planner_of(_survey(folder).open(), _MICROBATCHES, used, TokenBudget(_TOKENS))
        return planner.finish(planner.microbatches(1)).num_tokens

    run = timed(plan)
    assert run.found > _MICROBATCHES * _TOKENS * 0.9, "sequences are full"
    return run


def _survey(folder: Path):
    pattern = str(folder / "*.tar")
    (home,) = index_homes(pattern, _SETTINGS, None)
    return survey(pattern, _SETTINGS, ("image",), home)
